"""What a search decides to communicate is what Shardy's explicit collectives say, kind by kind and axis by axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import pytest
from jax.sharding import AbstractMesh

import models
from jaxplan.api import Found, Options, Pipeline, model_of, target_of
from jaxplan.api.turning import turned_pieces
from jaxplan.cost import collective_wire_bytes, sums_whole
from jaxplan.hardware import load_profile
from jaxplan.ir import trace
from jaxplan.sharding import MeshAxes, reshard_steps

MESHES: dict[str, MeshAxes] = {
    "8": (("data", 8),),
    "4x2": (("data", 4), ("model", 2)),
    "2x4": (("data", 2), ("model", 4)),
    "2x2x2": (("data", 2), ("fsdp", 2), ("model", 2)),
}
NOISE = 1e-3
"""Of all bytes: loss and norm are sums of some scalars each, which the partitioner adds up before or after."""

Sent = Counter[tuple[str, frozenset[str]]]


def planned(model: str, mesh: str, template: str | None) -> tuple[Sent, Sent]:
    """Bytes that a device sends by kind and axes, as the search decided and as the partitioner inserted.

    The machine starts kernels and messages at once: of tiny steps too bytes decide.
    """
    profile = load_profile("tpu-v5e")
    links = tuple(replace(link, latency_s=1e-12, launch_s=1e-12) for link in profile.links)
    axes, module = MESHES[mesh], models.get(model)
    target = target_of(
        AbstractMesh(tuple(n for _, n in axes), tuple(name for name, _ in axes)),
        replace(profile, op_overhead_s=1e-12, links=links),
    )
    config, options = module.CONFIGS["tiny"], Options(time_limit_s=60.0)
    state = jax.eval_shape(lambda: module.init_state(config, jax.random.key(0)))
    traced = trace(module.make_train_step(config), (state, module.batch_shapes(config)), {}, donate_argnums=(0,))
    planner = Pipeline(
        traced, target, model_of(target, options), target.profile.usable_bytes, options, {}, {}, lambda _: None
    )
    found = planner.search({} if template is None else planner.template(template) or {})
    assert isinstance(found, Found)
    sizes, chosen = dict(axes), found.result.assignment

    def extents(names: tuple[str, ...]) -> list[int]:
        return [int(name.partition(")")[2]) if ")" in name else sizes[name] for name in names]

    decided: Sent = Counter()
    for edge, moved in zip(found.space.problem.edges, found.space.passages, strict=True):
        tail, head = moved.tails[chosen[edge.tail]], moved.heads[chosen[edge.head]]
        for step in reshard_steps(tail, head, moved.tensor.bytes, axes):
            if step.kind != "all_slice":
                sent = step.bytes * moved.tensor.as_sent(step.kind)
                whole = step.kind == "reduce_scatter" and sums_whole(planner.model, moved.tensor, head, axes, step.axes)
                kind = "all_reduce" if whole else step.kind
                wire = float(collective_wire_bytes(kind, sent, extents(step.axes)))
                decided[kind, frozenset(step.axes)] += wire * moved.trips  # type: ignore[assignment]
    assert found.orders is not None
    for charge, piece, names in turned_pieces(found.space, chosen, found.orders):
        wire = float(collective_wire_bytes("collective_permute", piece, extents(names)))
        decided["collective_permute", frozenset(names)] += wire * found.space.passages[charge.edge].trips  # type: ignore[assignment]
    inserted: Sent = Counter()
    for item, _ in planner.checked("plan", found).checked.collectives:
        if item.kind != "all_slice":
            wire = float(collective_wire_bytes(item.kind, item.bytes, extents(item.axes)))
            inserted[item.kind, frozenset(item.axes)] += wire * item.trips  # type: ignore[assignment]
    return decided, inserted


_SLOW = [
    ("lstm", "4x2", None), ("moe", "8", None), ("vgg", "4x2", None), ("vit", "2x4", None), ("whisper", "8", None),
    ("gpt", "8", None), ("t5", "8", None), ("t5", "2x2x2", None), ("llama", "2x2x2", None), ("unet", "8", None),
    ("dlrm", "2x2x2", None), ("gpt", "2x2x2", None), ("gpt", "4x2", "fsdp"), ("moe", "4x2", None),
    ("moe", "4x2", "fsdp"), ("t5", "4x2", None), ("gnn", "2x2x2", None),
    ("alexnet", "2x2x2", None), ("alexnet", "4x2", None), ("gnn", "4x2", None), ("gnn", "2x4", None),
]  # fmt: skip
_NEARLY = [("unet", "4x2", None)]
_ONE_PERCENT = pytest.mark.xfail(strict=True, reason="tiny tensors go another way: 0.2 to 2.6 % of what is sent")
_CAST_BESIDE = pytest.mark.xfail(
    strict=True, reason="a table's cast is planned to be exchanged beside the table, and made of what was: 0.4 %"
)
_IN_TWO_STEPS = pytest.mark.xfail(strict=True, reason="a gather over two axes is done one after the other")


@pytest.mark.parametrize(
    ("model", "mesh", "template"),
    [
        ("mlp", "4x2", None), ("mlp", "2x2x2", None), ("mlp", "4x2", "fsdp"), ("llama", "4x2", None),
        ("vit", "4x2", None), ("gnn", "8", None), ("dlrm", "8", None),
        pytest.param("mamba", "4x2", None, marks=_CAST_BESIDE), ("alexnet", "2x4", None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW),
        *(pytest.param(*case, marks=[pytest.mark.slow, _ONE_PERCENT]) for case in _NEARLY),
        pytest.param("dlrm", "4x2", None, marks=[pytest.mark.slow, _IN_TWO_STEPS]),
    ],
)  # fmt: skip
def test_decided_communication_is_what_the_partitioner_inserts(
    model: str, mesh: str, template: str | None
) -> None:
    decided, inserted = planned(model, mesh, template)
    total = sum(inserted.values())
    assert total > 0
    for which in decided | inserted:
        assert abs(decided[which] - inserted[which]) <= NOISE * total, which
