"""What an exchange of edges costs: each side sends its rows of a device's own piece, over the axes that cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jax import lax

from jaxplan.cost import CostModel
from jaxplan.cost.collectives import collective_seconds
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.sharding import OpShapes, rule_for, strategies

AXES = (("data", 4), ("model", 2))


def convolved(images: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        images, kernel, (1, 1), ((3, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("profile_name", ["tpu-v5e", "h100"])
def test_three_rows_before_and_one_after(profile_name: str) -> None:
    images, kernel = np.zeros((2, 64, 16, 8), np.float32), np.zeros((5, 3, 8, 8), np.float32)
    graph = trace(convolved, (images, kernel), {}).graph
    (op,) = (op for op in graph.ops if op.primitive == "conv_general_dilated")
    shapes = [graph.values[v].shape for v in op.operands]
    rule = rule_for(
        OpShapes(
            primitive=op.primitive, params=op.params, operands=tuple(shapes),
            results=tuple(graph.values[v].shape for v in op.results),
        )
    )  # fmt: skip
    (halo,) = rule.halos
    profile = load_profile(profile_name)
    links = axis_links(profile, AXES)
    model = CostModel(profile=profile, axes=AXES, links=tuple(links[name] for name, _ in AXES))
    options = strategies(rule, AXES)
    seconds = model.halo_seconds(op, rule, options, graph)
    row = 16 * 8 * 4
    for factors, found in zip(options.factors.tolist(), seconds, strict=True):
        names = [name for (name, _), f in zip(AXES, factors, strict=True) if f == halo.factor]
        cut = [links[name] for name in names]
        images_here = 2 if halo.rather not in factors else 1  # two images: only `model` can cut them
        expected = sum(
            float(collective_seconds("collective_permute", rows * row * images_here, cut))
            + model.packing_seconds("collective_permute", rows * row * images_here, names)
            for rows in (3, 1)
        )
        assert found == pytest.approx(expected if cut else 0.0), factors
    assert (seconds > 0).any() and (seconds == 0).any()
