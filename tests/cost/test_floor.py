"""No layouts take less memory than the floor, however they are chosen; a refusal that it proves needs no search."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxplan
import models
from jaxplan.api import candidates, infeasible
from jaxplan.cost import least_memory
from jaxplan.errors import InfeasibleError
from jaxplan.search import Space, decide

GRID = (("data", 4), ("model", 2))


def step_of(model: str, name: str, hardware: str = "tpu-v5e", **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    module = models.get(model)
    config = module.CONFIGS[name]
    mesh = AbstractMesh(tuple(size for _, size in GRID), tuple(axis for axis, _ in GRID))
    state = jax.eval_shape(lambda: module.init_state(config, jax.random.key(0)))
    donate = settings.pop("donate_argnums", 0)
    step = jaxplan.auto_shard(
        module.make_train_step(config), mesh, donate_argnums=donate, hardware=hardware, **settings
    )
    return step, (state, module.batch_shapes(config))


@pytest.mark.parametrize(
    ("model", "name", "hardware", "donate"),
    [
        ("gpt", "tiny", "cpu-host", ()), ("gpt", "tiny-scan-remat", "tpu-v5e", 0), ("mamba", "tiny-scan", "tpu-v5e", 0),
        ("resnet", "tiny", "tpu-v5e", 0), ("moe", "tiny-scan", "tpu-v5e", ()), ("lstm", "tiny", "cpu-host", 0),
        ("unet", "tiny", "cpu-host", 0), ("dlrm", "tiny", "tpu-v5e", 0),
    ],
)  # fmt: skip
def test_no_layouts_take_less(model: str, name: str, hardware: str, donate: Any) -> None:
    step, shapes = step_of(model, name, hardware, donate_argnums=donate)
    pipeline, pins = step.pipeline(shapes, {})
    graph, random = pipeline.graph, np.random.default_rng(0)
    here = pipeline.space(pins)
    for axes in (GRID, (("data", 8), ("model", 2))):
        devices = math.prod(size for _, size in axes)
        floor = least_memory(graph, pipeline.rules, pipeline.crossing, here.values, here.reads, devices)
        space = here if axes == GRID else infeasible._space(pipeline, axes)
        sizes = [node.costs_s.size for node in space.problem.nodes]
        chosen = [random.integers(sizes).tolist() for _ in range(4)]
        # at this end a node's bytes are least, whatever else that asks for
        least = {node: int(np.argmin(used)) for node, used in taken(space).items()}
        chosen.append([least.get(node, 0) for node in range(len(sizes))])
        peaks = [pipeline.simulate(decide(space, one), axes).peak_bytes for one in chosen]
        assert 0 < floor <= min(peaks)


def taken(space: Space) -> dict[int, np.ndarray]:
    """Of each node that takes memory the bytes of its strategies, over all of its usages."""
    bytes_of: dict[int, np.ndarray] = {}
    for usage in space.problem.usages:
        bytes_of[usage.node] = bytes_of.get(usage.node, 0) + usage.bytes
    return bytes_of


def test_a_refusal_that_is_plain_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Searched(Exception):
        pass

    def search(*args: Any, **kwargs: Any) -> Any:
        raise Searched

    step, shapes = step_of("mlp", "tiny", "tpu-v4")
    pipeline, pins = step.pipeline(shapes, {})
    space = pipeline.space(pins)
    floor = least_memory(pipeline.graph, pipeline.rules, pipeline.crossing, space.values, space.reads, 8)
    step, shapes = step_of("mlp", "tiny", "tpu-v4", memory_budget=floor - 1)
    monkeypatch.setattr(candidates, "tradeoff", search)
    with pytest.raises(InfeasibleError, match="Smallest reachable peak"):
        step.plan(*shapes)
    monkeypatch.setattr(candidates.Pipeline, "fits_nothing", lambda self, axes=None: False)
    with pytest.raises(Searched):
        step.plan(*shapes)
