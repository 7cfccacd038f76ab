"""Which dimensions of images lie in lanes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxplan.cost.images import image_lanes
from jaxplan.ir import trace
from jaxplan.search.space import graph_rules


def test_what_an_image_is_flattened_to_has_no_lanes_of_the_image() -> None:
    """A pooled image of one pixel is read as rows of channels: a reshape that the layout follows, of another rank."""

    def step(x: Any, kernel: Any, head: Any) -> Any:
        made = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(jnp.tanh(made).reshape(16, 8)) @ head

    shapes = ((16, 1, 1, 3), (3, 3, 3, 8), (8, 4))
    graph = trace(step, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], {}).graph
    lanes = image_lanes(graph, graph_rules(graph))
    assert lanes
    assert all(max(dims) < len(graph.values[value].shape) for value, dims in lanes.items())
