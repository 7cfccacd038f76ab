"""A tanh in f32 that XLA for GPU keeps: of what a product with a gathered bias made.

A product's kernel adds a bias that is there before it; one that is gathered over devices is added by the kernel
behind it.  Where the product has several dimensions of rows, [batch, tokens, features], which XLA's products have one
of, that kernel reads through a reshape, and the activation's gradient, which would do all of that again, reads the tanh
from memory (MLPs of four layers under ZeRO-3 on H100, jax 0.10.2: 1511 MB for the 1147 that were predicted; not those
of two dimensions, of logistic functions, nor without biases; in bf16 a tanh is kept anyway, see `masks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import Graph
from ..sharding import MeshAxes, reshard_steps
from .residency import Flow
from .tiles import local_bytes

_F32 = 4


class BiasedTanh(NamedTuple):
    """A tanh that is in no buffer: its value, and every (operation, operand) that reads the bias on its way there."""

    value: int
    bias: tuple[tuple[int, int], ...]


def biased_tanhs(flow: Flow, stored: Sequence[bool]) -> tuple[BiasedTanh, ...]:
    """Those of products of several dimensions of rows, which an operation of their own loop or program reads again."""
    found, uses = list[BiasedTanh](), flow.graph.uses()
    for op in flow.graph.ops:
        value = op.results[0] if op.primitive == "tanh" else -1
        if value < 0 or stored[value] or flow.graph.values[value].item_bytes != _F32:
            continue
        here = flow.loop_of[op.index]
        if any(flow.loop_of[reader] != here for reader, _ in uses[value]) or len(uses[value]) < 2:
            continue
        if bias := _bias_of(flow, stored, op.operands[0]):
            found.append(BiasedTanh(value, bias))
    return tuple(found)


def _bias_of(flow: Flow, stored: Sequence[bool], value: int) -> tuple[tuple[int, int], ...]:
    """Who reads the bias that was added to a product of several dimensions of rows, from that sum to the bias."""
    graph, left, seen = flow.graph, [value], {value}
    while left:
        maker = flow.producers[value := left.pop()]
        if maker < 0 or flow.kinds[maker] != "fused":
            continue
        op, shape = graph.ops[maker], graph.values[value].shape
        if op.primitive == "add" and sum(size > 1 for size in shape[:-1]) > 1:
            for place in (0, 1):
                product = flow.producers[op.operands[1 - place]]
                bias = graph.values[op.operands[place]].shape[:-1] != shape[:-1]
                if bias and product >= 0 and flow.rules[product].matmul:
                    return tuple(_read_through(flow, op.index, place))
        if not stored[value]:
            left += [v for v in op.operands if v not in seen]
            seen.update(op.operands)
    return ()


def _read_through(flow: Flow, op: int, place: int) -> Iterator[tuple[int, int]]:
    while True:
        yield op, place
        op = flow.producers[flow.graph.ops[op].operands[place]]
        if op < 0 or len(flow.graph.ops[op].operands) != 1:
            return
        place = 0


def kept_tanhs(
    graph: Graph,
    axes: MeshAxes,
    tanhs: Sequence[BiasedTanh],
    times: Sequence[int],
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of those whose bias is gathered.

    Args:
      times, needed: when each operation runs, and until when it needs its operands.
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
    """
    producers, uses = graph.producers(), graph.uses()

    def gathered(op: int, place: int) -> bool:
        value = graph.ops[op].operands[place]
        made, read = values.get(value), reads.get((op, place))
        if made is None or read is None:
            return False
        steps = reshard_steps(made, read, graph.values[value].bytes, axes)
        return any(step.kind == "all_gather" for step in steps)

    for one in tanhs:
        if (row := values.get(one.value)) is not None and any(gathered(*read) for read in one.bias):
            stop = max(needed[reader] for reader, _ in uses[one.value])
            size = local_bytes(graph.values[one.value], row, axes, "gpu")
            yield times[producers[one.value]], stop, size
