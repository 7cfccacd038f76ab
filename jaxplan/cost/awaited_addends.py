"""What waits, with a convolution's result, for the one operation that reads it, on TPU.

XLA for TPU ends a convolution's kernel with what is computed elementwise of its result, where that is all that is
wanted of it.  What one operation alone reads goes into that one's kernel instead, so that of a sum of many
convolutions nothing is added up before the last of them: all of their results are in memory until then.  So it is with
the skip connections of a WaveNet, and with the gradient of an image that several convolutions read (sums of 3, 4 and
8, of 1 x 1 and 3 x 3, over sequences and images, f32 and bf16, with biases, activations, factors and other addends
or none, compiled for v5e, v5p and v6e, jax 0.10.2).

Products of matrices take in what is added up so far, and nothing waits (the same sums of those).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..ir import SUMS, VIEWS, Op
from .residency import Flow
from .scores import is_batched


class Awaited(NamedTuple):
    """`values`: what isn't written, being computed where its one reader is; `written`: what then is, or is in between
    two products' kernels."""

    values: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


def awaited_addends(
    flow: Flow, op_level: Sequence[int], value_level: Sequence[int], here: Callable[[int, Op], bool]
) -> Awaited:
    """All of a program.

    Args:
      op_level, value_level: see `levels_of`; here: whether a value is made in the loop body of an operation.
    """
    graph, uses = flow.graph, flow.graph.uses()
    returned, values, written = set(graph.outputs), set[int](), set[int]()
    made = _made_at_once(flow, uses, op_level, value_level, here)
    for op in graph.ops:
        if flow.kinds[op.index] != "fused" or len(op.results) != 1 or op.results[0] not in made:
            continue
        value, products = op.results[0], made[op.results[0]].products
        before = [v for v in made[value].near if max(made[v].products) < max(products)]
        if any(graph.ops[index].primitive != "conv_general_dilated" for index in products):
            if op.primitive in SUMS and not any(is_batched(graph.ops[index]) for index in products):
                written.update(before)  # the last product's kernel reads it; scores: see `added_scores`
            continue
        written.update(*(made[v].written for v in before))
        if len(uses[value]) != 1 or value in returned or op.primitive in VIEWS:
            continue
        reader = graph.ops[uses[value][0][0]]
        alike = all(graph.values[v].shape == graph.values[value].shape for v in reader.results)
        later = op_level[reader.index] > value_level[value] and here(value, reader)
        alone = all(flow.kinds[flow.producers[v]] == "heavy" for v in made[value].written)
        if alike and later and alone and flow.kinds[reader.index] == "fused":
            values.add(value)
            written.update(made[value].written)
    return Awaited(frozenset(values), frozenset(written))


class _Made(NamedTuple):
    """`products`: those at a value's level that it is made of, one of whose kernels makes it; `written`: what these
    write where another one's does: their results, or what several operations read of them; `near`: operands of its
    operation that are made of them."""

    products: frozenset[int]
    written: frozenset[int]
    near: Sequence[int] = ()


def _made_at_once(
    flow: Flow,
    uses: Sequence[Sequence[tuple[int, int]]],
    op_level: Sequence[int],
    value_level: Sequence[int],
    here: Callable[[int, Op], bool],
) -> dict[int, _Made]:
    found: dict[int, _Made] = {}
    for op in flow.graph.ops:
        level = op_level[op.index]
        if flow.kinds[op.index] == "heavy":
            at_hand = (v for v in op.results if value_level[v] == level)
            found.update((v, _Made(frozenset({op.index}), frozenset({v}))) for v in at_hand)
        elif flow.kinds[op.index] == "fused":
            near = [v for v in op.operands if v in found and value_level[v] == level and here(v, op)]
            products = frozenset[int]().union(*(found[v].products for v in near))
            written = frozenset[int]().union(*(found[v].written for v in near))
            for value in op.results if near else ():
                found[value] = _Made(products, written if len(uses[value]) == 1 else frozenset({value}), near)
    return found
