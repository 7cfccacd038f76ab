"""What a merge costs: the candidates of every device are gathered over the axes that cut the dimension."""

from __future__ import annotations

import numpy as np
import pytest
from jax import lax

from jaxplan.cost import CostModel
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import trace
from jaxplan.sharding import OpShapes, rule_for, strategies

AXES = (("data", 4), ("model", 2))


@pytest.mark.parametrize("profile_name", ["tpu-v5e", "h100"])
def test_each_device_hands_its_best_to_all(profile_name: str) -> None:
    graph = trace(lambda x: lax.top_k(x, 3), (np.zeros((8, 64), np.float32),), {}).graph
    (op,) = (op for op in graph.ops if op.primitive == "top_k")
    shapes = [tuple(graph.values[v].shape for v in side) for side in (op.operands, op.results)]
    rule = rule_for(OpShapes(primitive="top_k", params=op.params, operands=shapes[0], results=shapes[1]))
    profile = load_profile(profile_name)
    links = axis_links(profile, AXES)
    model = CostModel(profile=profile, axes=AXES, links=tuple(links[name] for name, _ in AXES))
    options = strategies(rule, AXES)
    found = model.merge_seconds(op, rule, options, graph)
    (merge,) = rule.merges
    for factors, seconds in zip(options.factors.tolist(), found, strict=True):
        over = tuple(axis for axis, factor in enumerate(factors) if factor == merge.factor)
        devices = int(np.prod([AXES[axis][1] for axis in over]))
        apart = [size for (_, size), f in zip(AXES, factors, strict=True) if f not in (-1, merge.factor)]
        rows = 8 // int(np.prod(apart))
        gathered_bytes = devices * rows * 3 * 4  # of values, and of their places
        expected = 2 * model.collective("all_gather", np.array(gathered_bytes), over) if over else 0.0
        assert seconds == pytest.approx(float(expected))
    assert found.max() > 0
