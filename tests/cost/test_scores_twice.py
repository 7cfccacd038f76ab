"""Scores that lie beside the argument of their exponential on TPU, in attention without gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import Traffic, traffic
from jaxplan.cost.scores_twice import kept_as_made, twice_in_memory
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import NONE, graph_rules

BATCH, LAYERS = 64, 3  # more than lies in a v5e's vector memory


class Attention(NamedTuple):
    """Tokens, heads of keys, heads of queries for each or None for as many, columns; what is done to the keys; whether
    all are one array, that a product makes of weights of three, or of three of them that are cut out of its columns."""

    tokens: int
    keys: int
    group: int | None
    columns: int
    rotary: bool = True
    padded: bool = False
    wide: bool = True
    packed: str = ""


ONCE = [
    Attention(1024, 4, None, 128),
    Attention(2048, 4, 1, 128),
    Attention(2048, 4, 2, 64),
    Attention(1024, 4, 2, 128, wide=False),
    Attention(2048, 4, 2, 128, rotary=False),
    Attention(1024, 4, 1, 64, rotary=False, packed="heads"),
    Attention(1024, 4, None, 64, rotary=False, packed="columns"),
]
TWICE = [
    Attention(2048, 4, None, 128),
    Attention(4096, 2, None, 64),
    Attention(768, 4, 3, 128),
    Attention(1024, 4, 2, 128, padded=True),
    Attention(2048, 4, 2, 128, wide=False),
    Attention(1024, 4, None, 64, rotary=False, packed="places"),
    Attention(512, 4, None, 64, rotary=False, wide=False, packed="places"),
    Attention(1024, 4, None, 64, rotary=False, packed="heads"),
]


def rotate(x: Any) -> Any:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def step_of(case: Attention, scanned: bool = True) -> Any:
    """Layers, forward alone."""

    def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        if case.rotary:
            q, k = rotate(q), rotate(k)
        grouped = case.group is not None
        if grouped:
            q = q.reshape(*q.shape[:2], case.keys, case.group, case.columns)
        out = jnp.float32 if case.wide else None
        scores = jnp.einsum("btkgd,bskd->bkgts" if grouped else "btkd,bskd->bkts", q, k, preferred_element_type=out)
        places = jnp.arange(case.tokens)
        seen = (places[:, None] >= places)[None, None]
        if case.padded:
            seen &= (places < lengths[:, None])[:, None, None]
        seen = seen[:, :, None] if grouped else seen
        scores = jnp.where(seen, scores.astype(jnp.float32) * case.columns**-0.5, -1e30)
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        made = jnp.einsum("bkgts,bskd->btkgd" if grouped else "bkts,bskd->btkd", weights, v)
        return made.reshape(*made.shape[:2], -1, case.columns)

    def step(weights: Any, x: Any, lengths: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            if case.packed:
                made = x @ jnp.concatenate([w[name].reshape(x.shape[-1], -1) for name in "qkv"], 1)
                made = made.reshape(*x.shape[:2], 3, case.keys, case.columns)
                q, k, v = (made[:, :, i] for i in range(3))
                if case.packed == "columns":
                    parts = jnp.split(made.reshape(*x.shape[:2], -1), 3, -1)
                    q, k, v = (part.reshape(q.shape) for part in parts)
                if case.packed == "heads":
                    q, k, v = jnp.split(made.reshape(*x.shape[:2], -1, case.columns), 3, 2)
            else:
                q, k, v = (jnp.einsum("bte,ehd->bthd", x, w[name]) for name in "qkv")
            return x + jnp.einsum("bthd,hde->bte", attend(q, k, v, lengths), w["o"]), None

        if scanned:
            return jax.lax.scan(layer, x, weights)[0].mean(1)
        for i in range(LAYERS):
            x, _ = layer(x, {name: w[i] for name, w in weights.items()})
        return x.mean(1)

    return step


def arguments(case: Attention, batch: int = BATCH) -> tuple[Any, ...]:
    heads = case.keys * (case.group or 1)
    dim = heads * case.columns
    shapes = {"q": (dim, heads), "k": (dim, case.keys), "v": (dim, case.keys)}
    weights = {n: jax.ShapeDtypeStruct((LAYERS, *s, case.columns), jnp.bfloat16) for n, s in shapes.items()}
    weights["o"] = jax.ShapeDtypeStruct((LAYERS, heads, case.columns, dim), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((batch, case.tokens, dim), jnp.bfloat16)
    return weights, x, jax.ShapeDtypeStruct((batch,), jnp.int32)


def on_one_device(
    case: Attention, written_out: int = 0, scanned: bool = True
) -> tuple[Traffic, list[tuple[int, int, int]], dict[int, int]]:
    traced = trace(step_of(case, scanned), arguments(case), {})
    crossing = traffic(traced.graph, graph_rules(traced.graph), "tpu")
    reads = {
        (op.index, place): np.full(len(traced.graph.values[v].shape), NONE)
        for op in traced.graph.ops
        for place, v in enumerate(op.operands)
    }
    given = (traced.graph, (("data", 1),), crossing.twice, crossing.times, reads, crossing.rows)
    return crossing, *twice_in_memory(*given, written_out)


@pytest.mark.parametrize("case", ONCE + TWICE, ids=str)
def test_keys_that_a_kernel_cannot_hold_make_scores_lie_twice(case: Attention) -> None:
    crossing, found, late = on_one_device(case)
    times = crossing.times
    assert len(found) == (case in TWICE)
    for (start, stop, size), one in zip(found, crossing.twice, strict=False):
        assert (start, stop) == (times[one.product], times[one.subtracted] + 1)
        assert late[one.scores] == times[one.subtracted]
        wide = 4 if case.wide or not case.packed else 2
        assert size == math.prod((BATCH, case.keys, case.group or 1, case.tokens, case.tokens)) * wide


def test_what_masks_many_keys_is_written_out_on_v6e() -> None:
    case = TWICE[1]
    _, found, _ = on_one_device(case, 2944)
    scores = BATCH * case.keys * case.tokens**2 * 4
    assert [size for *_, size in found] == [scores, 2 * scores, scores / 4]  # scores; -1e30 and the scale; a mask
    assert not on_one_device(case, 2 * case.tokens)[1]


def test_what_masks_the_keys_of_all_layers_is_written_out_once() -> None:
    crossing, found, late = on_one_device(TWICE[1], 2944, scanned=False)
    *scores, filled, mask = found
    assert len(scores) == len(crossing.twice) == LAYERS
    start, stop = scores[0][0] + 1, scores[-1][1]
    assert filled[:2] == mask[:2] == (start, stop)
    assert all(late[one.scores] == until - 1 for one, (_, until, _) in zip(crossing.twice, scores, strict=True))


@pytest.mark.parametrize("dim", [0, 2])
def test_of_one_sequence_or_one_head_a_device_they_lie_once(dim: int) -> None:
    """Which is the case of the layout, not of the program: where the keys are not cut they lie twice."""
    case = TWICE[0]._replace(keys=BATCH)
    traced = trace(step_of(case), arguments(case), {})
    crossing = traffic(traced.graph, graph_rules(traced.graph), "tpu")
    for written_out in (0, 512):
        for cut in (NONE, dim):
            reads = {}
            for one in crossing.twice:
                heads = {0: 0, 2: 1}[dim]  # keys are [b, s, h, d], scores [b, h, t, s]
                reads[one.product, one.place] = np.array([cut, NONE, NONE, NONE])
                reads[one.taken, 0] = np.array([heads if cut == dim else NONE, NONE, NONE, NONE])
            axes = (("data", BATCH), *((name, 1) for name in "abc"))
            found, late = twice_in_memory(
                traced.graph, axes, crossing.twice, crossing.times, reads, crossing.rows, written_out
            )
            assert bool(found) == bool(late) == (cut == NONE)
            narrow = [one._replace(narrow=True) for one in crossing.twice]
            kept = kept_as_made(traced.graph, axes, narrow, reads)
            arguments_ = {v for one in narrow for v in traced.graph.ops[one.subtracted].results}
            assert kept == (set() if cut == NONE else arguments_)
            assert not kept_as_made(traced.graph, axes, crossing.twice, reads)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v6e"])
def test_of_one_sequence_a_device_they_are_compiled_once(target: str, wide: bool) -> None:
    """In the place of arguments that are converted from bf16 scores these are kept."""
    case, batch = Attention(4096, 4, None, 128, wide=wide), 8
    mesh = jaxplan.target(f"{target}:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(step_of(case), mesh, hardware=target, options=options)
    compiled = compiled_memory(step.lower(*arguments(case, batch)).compile()).peak_bytes
    planned = step.plan(*arguments(case, batch)).cost.peak_bytes
    scores = batch // 8 * case.keys * case.tokens**2 * (4 if wide else 2)
    assert [compiled // scores, planned // scores] == [1, 1]


@pytest.mark.aot_tpu
@pytest.mark.parametrize("case", [ONCE[0], TWICE[3], *ONCE[-2:], TWICE[-3], TWICE[-1]], ids=str)
def test_as_much_is_compiled(case: Attention) -> None:
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(step_of(case), mesh, hardware="tpu-v5e", options=options)
    compiled = compiled_memory(step.lower(*arguments(case)).compile()).peak_bytes
    planned = step.plan(*arguments(case)).cost.peak_bytes
    scores = BATCH // 8 * case.keys * (case.group or 1) * case.tokens**2 * 4
    # What else there is takes less than they do, and is in vector memory in part.
    assert [compiled // scores, planned // scores] == [1 + (case in TWICE)] * 2


@pytest.mark.aot_tpu
@pytest.mark.parametrize("scanned", [True, False])
def test_as_much_is_written_out_for_v6e(scanned: bool) -> None:
    """In the order of the program the first layer's scores lie under what masks them, and leave a gap to the others."""
    case, batch = Attention(4096, 4, None, 128), 16
    mesh = jaxplan.target("tpu-v6e:2x4").mesh(data=8)
    options = {"search": "data", "compare_templates": False}
    step = jaxplan.auto_shard(step_of(case, scanned), mesh, hardware="tpu-v6e", options=options)
    compiled = compiled_memory(step.lower(*arguments(case, batch)).compile()).peak_bytes
    planned = step.plan(*arguments(case, batch)).cost.peak_bytes
    scores = batch // 8 * case.keys * case.tokens**2 * 4
    assert [compiled // scores, planned // scores] == [4 if scanned else 5] * 2
