"""Scores in f32 that XLA for TPU v6e keeps beside their softmax's argument.

Where queries and keys are f32, flax's default, and nothing scales or masks their product, XLA for v6e writes both what
the product makes and that less its maximum, and reads both on the way back: the values' gradient and the product
forward read the former (`keeps_scores`; attention of 16 to 784 tokens, 12 heads of 64 columns, under jax.nn.softmax and
flax's; jax 0.10.2, libtpu 0.0.42.1, 2026-11-28).  XLA for v5e and v5p keeps one of them; so does XLA for v6e of scores
that are scaled after their product or masked, of scores in bf16, of those whose softmax is rounded, and of those that
are made again under `jax.checkpoint` (of steps that have any such, nothing is counted).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import VIEWS, Graph, Lives
from ..sharding import MeshAxes
from .scores import is_batched, makes_f32
from .tiles import Tiling, local_bytes


def kept_scores(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    lives: Lives,
    values: Mapping[int, np.ndarray],
    rows: Mapping[int, Tiling],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is in no buffer by the rules of `fusion`, scores or arguments, as long as the other.

    Args:
      stored, times, rows: see `Traffic`; values: the layout row of every value where it is made.
    """
    producers, uses = graph.producers(), graph.uses()
    for op in graph.ops if not graph.barriers else ():
        if op.primitive != "sub" or not _softmax_stays(graph, uses, op.results[0]):
            continue
        *between, scores = _as_made(graph, producers, op.operands[0])
        maker = producers[scores]
        if maker < 0 or not is_batched(graph.ops[maker]) or not makes_f32(graph, maker):
            continue
        there = [value for value in (op.results[0], *between, scores) if stored[value]]
        if len(there) != 1:
            continue
        (kept,) = there
        stop = lives.intervals[kept].stop
        if (row := values.get(kept)) is not None and times[op.index] + 1 < stop:
            yield times[maker], stop, local_bytes(graph.values[kept], row, axes, "tpu", rows.get(kept, "any"))


def _softmax_stays(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], argument: int) -> bool:
    """Whether a softmax of `argument` is made, and rounded to nothing else."""

    def made_by(primitive: str, values: Sequence[int]) -> list[int]:
        readers = [graph.ops[reader] for value in values for reader, _ in uses[value]]
        return [op.results[0] for op in readers if op.primitive == primitive]

    quotients = made_by("div", made_by("exp", [argument]))
    return bool(quotients) and not made_by("convert_element_type", quotients)


def _as_made(graph: Graph, producers: Sequence[int], value: int) -> list[int]:
    """A value, and one after the other what it is a view of, or that with nothing added: a mask that masks nothing."""
    found = [value]
    while producers[value] >= 0:
        op = graph.ops[producers[value]]
        made_of = [v for v in op.operands if graph.values[v].number != 0]
        if op.primitive not in VIEWS and (op.primitive != "add" or len(made_of) != 1):
            break
        value = made_of[0]
        found.append(value)
    return found
