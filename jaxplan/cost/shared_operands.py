"""What several products compute of larger arrays: some TPUs write it once, beside those, instead.

A softmax in bf16 of f32 scores, or of a sum of two products, which the product with the values reads and on the way
back the product for their gradient, that of bf16 scores' gradient, or `silu(a) * b`: both products would read two bytes
or more for each that was written.  XLA for TPU computes them inside both products for v5e (up to 32 times as many
elements as each product's other operand and result have together were seen).  For v5p it writes them from 1.4 times on
(1.33 not, 1.5 so), for v7x from 1.0 on or less (not with one batch dimension only, which is left out), and keeps them
beside what they are made of.  For v6e it does so from 8.5 times on (8 not, 9.6 so), unless the operand begins with two
batch dimensions or more, as sequences and heads do that have their own keys (up to 16 times not); `vmap` over the heads
that share a key, as `jax.nn.dot_product_attention` does it, puts these first.  (With one batch dimension, two heads a
key and 4096 tokens it was not written either, which is left out.)  What is as large as it, the argument of a gelu or
scores in bf16, both products compute it again of; not of scores in bf16 that are transposed, as of queries that share a
head of keys, and scaled or masked in f32 (134 MB a layer on v5p, none on v6e).  Of scores in f32 that are transposed
v6e's are written, whatever their batches, from 4.4 times on where they are masked (4 not, 4.8 so), else from 8.5 on
(6.4 not, 10.7 so) where what the product makes is reshaped, its heads merged (2026-11-30).  The gradient of scores that
are bf16 and converted to f32 for their softmax is computed in f32 of two bf16 arrays, and written on v5p from 1.1 times
on (1.0 not) and on v6e from 2.5 on (2 not; 40 stacks, 128 to 4096 tokens, heads of 64 to 256 columns, libtpu 0.0.42.1,
2026-11-26), on v5e not (up to 32).
So is, on v6e, a softmax rounded to bf16 of scores that queries and keys in f32 make and a mask is added to (Llamas of
Hugging Face's: from 4 times on, 2 not; not where a mask selects, or there is none; 2026-11-28).
Under remat in a loop, where both products are near, it was not
there when memory was fullest (a Llama on v5p).  (85 stacks of attention, 256 to 8192 tokens, heads of 32 to 256
columns, one to sixteen of them a key, and of SwiGLUs; jax 0.10.2, libtpu 0.0.42.1, 2026-11-26.)

What is made of no more bytes than it has, by products of matrices or convolutions, is written where computing it in
every kernel takes longer: a kernel takes as long as its arithmetic on the vector unit or as what it reads and writes,
whichever is longer, and one that computes it and no more comes instead.  A silu of something scaled is written so for
v5p, a gelu is not, neither is for v5e.  (Chains of 1 to 60 operations between products of 16 to 4096 columns and 1 x 1
convolutions, with residuals and without; v5p, v5e and v6e, jax 0.10.2, libtpu 0.0.42.1, 2026-11-29: the operation from
which on they are written is what this says, or the one before it.  For v5p, whose devices are two cores, the rate is
that of one core's unit beside all of memory.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Literal, NamedTuple

import numpy as np

from ..hardware import Profile
from ..ir import Graph
from ..sharding import MeshAxes
from .added_scores import AddedScores
from .residency import Flow, unmoved
from .scores import is_batched, is_converted, is_turned, makes_f32, turned_scores
from .tiles import device_bytes, local_sizes
from .vector_work import vector_work

_WIDER = 2.0
"""Bytes of what it is made of, in its own: then it is worth a buffer."""
_LEAST_WORK = 4
"""Operations for an element of what an exact gelu's error function is kept for: its two products are too few (v5p)."""


_MASKING = frozenset({"add", "select_n"})
Turned = Literal["narrow", "masked", "merged"]


class Again(NamedTuple):
    """What it takes to compute a value in several kernels.

    Attributes:
      work: operations of the vector unit for an element; read: bytes for one of what is in memory of it.
      beside: bytes that each kernel reads and writes beside its operands, for one of its product's result.
    """

    work: float
    read: float
    beside: tuple[float, ...]


class SharedOperand(NamedTuple):
    """What (operation, position of the operand) of products compute alike.

    Attributes:
      rounded: it is rounded of what is computed in wider numbers, of arrays that are none, nor added scores.
      turned: it is a softmax of scores that are transposed, as wide as it ("narrow"), or wider and masked, or wider and
        what the product makes of it is reshaped, as heads that are merged.
      again: of what is made of no more bytes than it has, what that takes.
    """

    value: int
    reads: tuple[tuple[int, int], ...]
    rounded: bool
    again: Again | None = None
    turned: Turned | None = None


def shared_operands(
    flow: Flow,
    stored: Sequence[bool],
    leaves: Sequence[Mapping[int, float] | None],
    bytes_of: Sequence[float],
    added: Sequence[AddedScores],
) -> tuple[SharedOperand, ...]:
    """Those of a program.

    Args:
      stored: see `Traffic`; leaves: of every value what a kernel computes it from, with its bytes; bytes_of: of all;
        added: scores that kernels add again.
    """
    graph, found = flow.graph, dict[int, list[tuple[int, int]]]()
    narrow = turned_scores(graph, flow.kinds, flow.producers)
    totals, uses = {one.total for one in added}, graph.uses()

    def is_wide(value: int, twice: Set[int]) -> bool:
        read = sum(size * (1 + (leaf in twice)) for leaf, size in (leaves[value] or {}).items())
        return read >= _WIDER * bytes_of[value]

    def is_of_f32(leaf: int) -> bool:
        """Whether a leaf is made of scores that queries and keys in f32 make, and that something is added to."""
        shape, seen, todo, added = graph.values[leaf].shape, set[int](), [leaf], False
        while todo:
            value = todo.pop()
            if value in seen or flow.source[value] or (maker := flow.producers[value]) < 0:
                continue
            seen.add(value)
            op = graph.ops[maker]
            if is_batched(op):
                return added and makes_f32(graph, maker)
            if flow.kinds[maker] == "fused":
                added |= op.primitive == "add" and all(graph.values[v].shape for v in op.operands)
                todo += [v for v in op.operands if graph.values[v].shape == shape]
        return False

    def is_rounded(value: int) -> bool:
        large = [leaf for leaf in leaves[value] or () if bytes_of[leaf] >= bytes_of[value]]
        if not graph.values[value].narrowed and any(is_of_f32(leaf) for leaf in large):
            return True
        most_bytes = graph.values[value].item_bytes
        wider = any(graph.values[leaf].item_bytes > most_bytes or leaf in totals for leaf in large)
        wider |= not is_wide(value, totals)  # a softmax of scores that are transposed
        seen, todo = set[int](), [value]
        while todo and not wider:  # it may have been scaled or masked since
            value = todo.pop()
            if value in seen or stored[value] or flow.producers[value] < 0:
                continue
            if is_converted(graph, flow.producers, value):
                return True
            seen.add(value)
            tensor, maker = graph.values[value], graph.ops[flow.producers[value]]
            todo += [v for v in maker.operands if graph.values[v].shape == tensor.shape and v not in large]
        return False

    def turned(value: int, products: Iterable[int]) -> Turned | None:
        """See `SharedOperand`."""
        shape, seen, todo, masked = graph.values[value].shape, set[int](), [*(leaves[value] or ())], False
        while todo:
            made = todo.pop()
            if made in seen or (maker := flow.producers[made]) < 0:
                continue
            seen.add(made)
            op = graph.ops[maker]
            if is_turned(graph, maker):
                if made in narrow:
                    return "narrow"
                if masked:
                    return "masked"
                return "merged" if any(_is_merged(graph, uses, graph.ops[one].results[0]) for one in products) else None
            if op.primitive == "transpose":
                todo += op.operands
            elif flow.kinds[maker] == "fused":
                masked |= op.primitive in _MASKING and all(graph.values[v].shape for v in op.operands)
                todo += [v for v in op.operands if graph.values[v].shape == shape]
        return None

    def again(value: int, work: float, reads: Sequence[tuple[int, int]]) -> Again:
        read, count = sum((leaves[value] or {}).values()), math.prod(graph.values[value].shape)
        kernels = [_beside(flow, uses, stored, leaves, bytes_of, graph.ops[index].results[0]) for index, _ in reads]
        return Again(work, read / count, tuple(kernels))

    for op in graph.ops:
        if flow.rules[op.index].matmul and flow.loop_of[op.index] < 0 and len(op.operands) == 2:
            for place, value in enumerate(op.operands):
                found.setdefault(unmoved(graph, flow.producers, value), []).append((op.index, place))
    shared, erfcs = list[SharedOperand](), {op.operands[0] for op in graph.ops if op.primitive == "erfc"}
    for value, reads in found.items():
        if (
            len({index for index, _ in reads}) > 1
            and flow.producers[value] >= 0
            and not (stored[value] or flow.source[value])
            and any(flow.producers[leaf] >= 0 for leaf in leaves[value] or ())  # of weights see `converted_weights`
            and not any(stored[graph.ops[index].operands[place]] for index, place in reads)
        ):
            wide = is_wide(value, totals | narrow)
            of_erfc = wide and not erfcs.isdisjoint(leaves[value] or ())
            work = vector_work(flow, value, leaves[value] or {}) if of_erfc or not wide else None
            if not wide and work is not None and not graph.values[value].narrowed:  # f32 read in bf16: not seen
                shared.append(SharedOperand(value, tuple(reads), False, again(value, work, reads)))
            products = all(graph.ops[index].primitive == "dot_general" for index, _ in reads)
            if wide and products and (work is None or work >= _LEAST_WORK):
                shared.append(SharedOperand(value, tuple(reads), is_rounded(value), turned=turned(value, dict(reads))))
    return tuple(shared)


def _is_merged(graph: Graph, uses: Sequence[Sequence[tuple[int, int]]], value: int) -> bool:
    """Whether a value is reshaped, transposed before or not."""
    readers = [graph.ops[index] for index, _ in uses[value]]
    return any(
        op.primitive == "reshape" or (op.primitive == "transpose" and _is_merged(graph, uses, op.results[0]))
        for op in readers
    )


def _beside(
    flow: Flow,
    uses: Sequence[Sequence[tuple[int, int]]],
    stored: Sequence[bool],
    leaves: Sequence[Mapping[int, float] | None],
    bytes_of: Sequence[float],
    result: int,
) -> float:
    """Bytes that a product's kernel writes, and reads beside the operands, for an element of the result."""
    count, moved, todo, seen = math.prod(flow.graph.values[result].shape), dict[int, float](), [result], set[int]()
    while todo:
        if (value := todo.pop()) in seen:
            continue
        seen.add(value)
        if stored[value]:
            moved[value] = bytes_of[value]
            continue
        for reader in (flow.graph.ops[index] for index, _ in uses[value]):
            if flow.kinds[reader.index] == "fused":
                for operand in reader.operands:
                    moved.update(leaves[operand] or {})
                todo += reader.results
    return sum(moved.values()) / max(count, 1)


def _dearer_again(
    again: Again, own: np.ndarray, own_bytes: np.ndarray, others: Sequence[tuple[np.ndarray, np.ndarray]],
    profile: Profile,
) -> np.ndarray:  # fmt: skip
    """`bool[n]`: whether computing a value in each of its kernels takes longer than writing it and reading it there.

    Args:
      own, own_bytes: float[n], its elements and bytes; others: float[n] each, of each kernel the bytes that it reads
        and writes beside it, and the elements of its result, which are rounded there.
    """
    cores = 1 + bool(profile.split_vector_memory)
    rate = profile.vector_flops_per_s / cores / profile.assigned_bytes_per_s
    work, read = again.work * own, again.read * own
    computed = sum(np.maximum(rate * (read + other), work + rounded) for other, rounded in others)
    written = np.maximum(rate * (read + own_bytes), work)
    written = written + sum(np.maximum(rate * (own_bytes + other), rounded) for other, rounded in others)
    return np.asarray(computed > written)


def written_bytes(
    graph: Graph, axes: MeshAxes, profile: Profile, shared: SharedOperand, places: Sequence[Sequence[np.ndarray]]
) -> np.ndarray:
    """`int64[n]`: bytes of what products share, where they would have that in memory; else 0.

    Args:
      places: of each product, or of the first of them, `int8[n, k]` of the two operands and the result.
    """
    first, place = shared.reads[0]
    value = graph.values[graph.ops[first].operands[place]]
    size = device_bytes(value, places[0][place], axes, profile.kind)
    if shared.again is None:
        written = np.all([
            _larger(graph, axes, profile, read, rows, shared)
            for read, rows in zip(shared.reads, places, strict=False)
        ], axis=0)  # fmt: skip
        return np.where(written, np.ceil(size), 0).astype(np.int64)
    others = list[tuple[np.ndarray, np.ndarray]]()
    own = local_sizes(value.shape, places[0][place], axes).prod(axis=1)
    for position, ((index, place), beside) in enumerate(zip(shared.reads, shared.again.beside, strict=True)):
        op = graph.ops[index]
        sides = (op.operands[1 - place], op.results[0])
        if position < len(places):
            rows = places[position][1 - place], places[position][2]
            other, result = (
                local_sizes(graph.values[v].shape, row, axes).prod(axis=1) for v, row in zip(sides, rows, strict=True)
            )
        else:  # cut as what they share is
            share = own / max(1, math.prod(value.shape))
            other, result = (math.prod(graph.values[v].shape) * share for v in sides)
        others.append((other * graph.values[sides[0]].item_bytes + result * beside, result))
    written = _dearer_again(shared.again, own, own * value.item_bytes, others, profile)
    return np.where(written, np.ceil(size), 0).astype(np.int64)


def _larger(
    graph: Graph, axes: MeshAxes, profile: Profile, read: tuple[int, int], places: Sequence[np.ndarray],
    shared: SharedOperand,
) -> np.ndarray:  # fmt: skip
    """`bool[n]`: whether what a product reads is so much larger than all else of it that it would have it in memory.

    Args:
      read: operation and position of the operand; places: see `written_bytes`.
    """
    ratio = profile.shared_operand_ratio or math.inf
    of_batches = (profile.rounded_operand_ratio if shared.rounded else profile.batched_operand_ratio) or math.inf
    if shared.turned is not None:
        of_turned = {"narrow": of_batches, "masked": profile.turned_operand_ratio, "merged": ratio}
        ratio = of_batches = of_turned[shared.turned] or math.inf
    op, place = graph.ops[read[0]], read[1]
    if math.isinf(min(ratio, of_batches)):
        return np.zeros(len(places[place]), bool)
    shapes = [graph.values[v].shape for v in (*op.operands, *op.results)]
    sizes = [local_sizes(shape, rows, axes) for shape, rows in zip(shapes, places, strict=True)]
    batches = op.params["dimension_numbers"][1][place]
    own = sizes[place]
    others = sum(size.prod(axis=1) for size in sizes) - own.prod(axis=1)
    first = sorted(batches) == list(range(len(batches)))
    batched = ((own[:, list(batches)] > 1).sum(axis=1) > 1) & first
    return np.asarray(own.prod(axis=1) >= np.where(batched, of_batches, ratio) * others)


def shared_until(shared: SharedOperand, times: Sequence[int], needed: Sequence[int]) -> tuple[int, int]:
    """(start, stop) of what is written for several products.

    Args:
      times: see `Traffic`; needed: see `needed_until`.
    """
    return min(times[i] for i, _ in shared.reads), max(needed[i] for i, _ in shared.reads)


def written_operands(
    graph: Graph,
    axes: MeshAxes,
    shared: Sequence[SharedOperand],
    profile: Profile,
    times: Sequence[int],
    needed: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is written for several products.

    Args:
      times: see `Traffic`; needed: see `needed_until`; values, reads: see `simulate_memory`.
    """
    for one in shared:
        products = [graph.ops[index] for index, _ in one.reads]
        if all(op.results[0] in values and {(op.index, 0), (op.index, 1)} <= reads.keys() for op in products):
            rows = [(reads[op.index, 0], reads[op.index, 1], values[op.results[0]]) for op in products]
            places = [[row[None] for row in of_product] for of_product in rows]
            if size := int(written_bytes(graph, axes, profile, one, places)[0]):
                yield *shared_until(one, times, needed), size
