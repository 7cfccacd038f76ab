"""A space narrowed down by pins is the space built under them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.search import Space, build, pinned

GRID = (("data", 2), ("model", 2))


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


def update(w: Any, x: Any) -> Any:
    """State that comes back, read twice, beside a result of its own."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]))(w)
    return jax.tree.map(lambda p, g: p - g, w, gradient), loss, w["a"] + 1.0


def arrays(space: Space) -> list[tuple[object, ...]]:
    """Everything that a search sees, and what its choices mean, by content."""
    problem = space.problem
    return [
        *((n.name, n.costs_s.tobytes()) for n in problem.nodes),
        *(
            (e.tail, e.head, e.costs_s.tobytes(), np.ones(e.costs_s.shape, bool).tobytes() if e.allowed is None
             else e.allowed.tobytes())
            for e in problem.edges
        ),
        *((u.node, u.start, u.stop, u.bytes.tobytes()) for u in problem.usages),
        *(
            (key, port.node, port.places.tobytes())
            for ports in (space.values, space.outputs)
            for key, port in sorted(ports.items())
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [-1, 0, 1])
@pytest.mark.parametrize("positions", [(0,), (1, 2), (0, 1, 2)])
def test_pinned_is_built_under_pins(positions: tuple[int, ...], cut: int) -> None:
    graph = trace(update, ({"a": shape(8, 8), "b": shape(8, 8)}, shape(16, 8)), {}, donate_argnums=(0,)).graph
    links = axis_links(load_profile("tpu-v5e"), GRID)
    model = CostModel(profile=load_profile("tpu-v5e"), axes=GRID, links=tuple(links[n] for n, _ in GRID))

    def on_first_axis(places: np.ndarray) -> np.ndarray:
        return np.asarray(places[:, 0] == cut)

    free = build(graph, model, limit_bytes=10**6)
    narrowed = pinned(free, {graph.inputs[p]: on_first_axis for p in positions})
    asked = build(graph, model, input_pins=dict.fromkeys(positions, on_first_axis), limit_bytes=10**6)
    assert arrays(narrowed) == arrays(asked)
    assert arrays(narrowed) != arrays(free)
