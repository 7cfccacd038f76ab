"""What products on GPU are handed in different orders, and so do not share.

XLA for GPU leaves what is elementwise made of a product's result in that product's order, and writes a product's
operand so that the dimensions that it sums are the last ones.  Two products that sum different dimensions of one value
want two orders.  Where the value is cheap to compute again, each is handed a copy of its own by a kernel just before
it, and none is kept in between: Llama's grouped attention converts its softmax to bf16 once for the values, and, in the
backward pass, once more for their gradient (H100, jax 0.10.2).  Not so where the product left the keys last, as that
of `jax.nn.dot_product_attention` does under its `vmap`: one kernel a row of scores makes the softmax and writes it, and
both products read that.  Under remat, where both products are near, one kernel
may write both copies (eight queries a group).  And where one product reads the value as it lies, as the gradient of
values that all heads have in common does, the kernel that transposes it for the other one writes both, and it is
kept (`memory_orders.is_read_as_it_lies`).  What is a batch of the products that read, but none of the one that the
value is made of, has to come first in memory: it is transposed as that product writes it, and both read it so (experts
that every token meets, `btd,edf->ebtf`, and what a gelu makes of them).  Where the transposition only exchanges the
two operands' dimensions, so does XLA, and the value lies in order: attention of one query a group, whose softmax is
kept for both (GPT-2, unrolled).

Projections in f32 with a bias that are transposed to come first by heads are written as cuBLAS likes them best, what
its first operand sums last, and what its second one sums first: keys once for the scores and once more, from what
the projection made, for the queries' gradient, which keeps that till then, and all that it is merged with.  Triton's
products read any order; XLA has them for sequences that are multiples of 16 (vision transformers of 196, 197 and 256
tokens and a Whisper, H100, jax 0.10.2; in bf16 the second copy is made of the first).  Heads that a reshape splits off
the projection's rows, `Dense` and not `DenseGeneral`, are made twice whatever the type and the sequence (encoders of
Hugging Face's in f32, attention of 196 and 256 tokens in both types, H100).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import MeshAxes
from .memory_orders import Orders, in_memory, is_read_as_it_lies
from .residency import Flow, made_of, permuted
from .split_k import local_product, split_ways
from .tiles import device_bytes, local_bytes, local_sizes

if TYPE_CHECKING:
    from .crossing import Traffic


_HALF = 2
"""Bytes of an element of half precision."""

_TRITON = 16
"""Of what the sequence has to be a multiple for Triton's products, which read any order."""


def made_apart(
    flow: Flow, cheap: Set[int], orders: Orders, by_triton: bool = True
) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """The (product, place) that read each value that is made for each of them.

    Args:
      cheap: values that are in memory because products read them, though they could be computed again.
      orders: see `orders_of`; by_triton: else cuBLAS makes all products (see `without_triton`), and is handed one copy
        of what they take in one order.
    """
    reads: dict[int, list[tuple[int, int]]] = {}
    summed: dict[int, set[tuple[int, ...]]] = {}
    batch: dict[int, int] = {}
    split: dict[int, list[tuple[int, int]]] = {}
    others: set[int] = set(flow.graph.outputs)
    for op in flow.graph.ops:
        product = op.primitive == "dot_general" and flow.rules[op.index].matmul
        for place, value in enumerate(op.operands):
            if product and value not in cheap and (wide := _split(flow, value)) in cheap:
                split.setdefault(wide, []).append((op.index, place))
            elif product and value in cheap:
                reads.setdefault(value, []).append((op.index, place))
                contracted, batched = op.params["dimension_numbers"]
                summed.setdefault(value, set()).add(tuple(contracted[place]))
                batch[value] = max(batch.get(value, 0), len(batched[place]))
            elif flow.kinds[op.index] in ("heavy", "edge"):
                others.add(value)
    apart = [value for value, dims in summed.items() if len(dims) > 1 and value not in others]
    apart = [value for value in apart if by_triton or len(_orders(flow, reads[value])) > 1]
    makers = {value: permuted(flow, value) for value in apart}
    heads = {v: tuple(found) for v, found in split.items() if v not in (*others, *summed)}
    return {v: found for v, found in heads.items() if _is_biased(flow, v) and len(_orders(flow, found)) > 1} | {
        value: tuple(reads[value])
        for value, maker in makers.items()
        if (maker is None and _in_two_orders(flow, value, reads[value]))
        or (
            maker
            and maker.index not in orders.by_rows
            and _is_handed_on(flow, maker, batch[value])
            and not any(is_read_as_it_lies(flow, orders, index, place) for index, place in reads[value])
        )
    }


def _split(flow: Flow, value: int) -> int:
    """What `value` is a reshape of: heads of a projection."""
    while (maker := flow.producers[value]) >= 0 and flow.graph.ops[maker].primitive == "reshape":
        value = flow.graph.ops[maker].operands[0]
    return value


def _in_two_orders(flow: Flow, value: int, reads: Sequence[tuple[int, int]]) -> bool:
    """Whether cuBLAS is handed `value`, a product of f32 with a bias, in two orders, see the module."""
    if flow.graph.values[value].item_bytes != 4 or not _is_biased(flow, value):
        return False
    dims = {d for index, place in reads for d in _behind_batch(flow, index, place)}
    return len(_orders(flow, reads)) > 1 and any(flow.graph.values[value].shape[d] % _TRITON for d in dims)


def _is_biased(flow: Flow, value: int) -> bool:
    """Whether `value` is a product with a bias added."""
    op = flow.graph.ops[flow.producers[value]]
    made = [flow.producers[v] for v in op.operands if flow.graph.values[v].shape == flow.graph.values[value].shape]
    return op.primitive == "add" and len(made) == 1 and flow.rules[made[0]].matmul


def _orders(flow: Flow, reads: Sequence[tuple[int, int]]) -> set[tuple[int, ...]]:
    """In what orders cuBLAS is handed what products read: one if one of them reads it as it lies."""
    batches = [flow.graph.ops[index].params["dimension_numbers"][1][place] for index, place in reads]
    if any(list(batch) == [*range(len(batch))] for batch in batches):
        return {()}
    return {_behind_batch(flow, index, place) for index, place in reads}


def _behind_batch(flow: Flow, index: int, place: int) -> tuple[int, ...]:
    """The other dimensions of a product's operand: those that it sums last of its first one, first of its second."""
    op = flow.graph.ops[index]
    contracted, batched = op.params["dimension_numbers"]
    sums, batch = tuple(contracted[place]), batched[place]
    rank = len(flow.graph.values[op.operands[place]].shape)
    kept = tuple(d for d in range(rank) if d not in (*sums, *batch))
    return (*kept, *sums) if place == 0 else (*sums, *kept)


def _is_handed_on(flow: Flow, product: Op, batches: int) -> bool:
    """Whether what is made of a product stays in its order for products with so many batch dimensions: it has as many,
    and not all that reads it reads it with its first operand's dimensions behind its second's."""
    (result,) = product.results
    tensor = flow.graph.values[result]
    if tensor.sides is None:
        return not batches
    (first, second), rank = tensor.sides, len(tensor.shape)
    wanted = [d for d in (*range(first), *range(second, rank), *range(first, second)) if tensor.shape[d] > 1]
    readers = [flow.graph.ops[op] for op, _ in flow.graph.uses()[result]]
    return first >= batches and not all(
        op.primitive == "transpose" and [d for d in op.params["permutation"] if tensor.shape[d] > 1] == wanted
        for op in readers
    )


def reordered(flow: Flow, orders: Orders) -> Mapping[int, tuple[tuple[int, int], ...]]:
    """The (product, place) that read each value that a kernel transposes for each of them.

    A product takes the dimensions that it sums, has in each operand, or keeps as one each, in its own order: the other
    way round in memory, they have to be transposed.  What is elementwise made is written in the order of the one
    product that reads it; of several that want it transposed, each is given a copy.  So are the scores' gradients of
    grouped attention, of which one product sums the keys and the other the queries and the group, once for each, where
    the softmax is read from a loop's stack (f32[4, 8, 2, 512, 512] of a Llama compiled for H100, jax 0.10.2).  Unrolled
    or under remat they lie as the scores' product wrote them, and both products read them so (groups of 2 and 4), and
    everywhere where the softmax is made by rows, see `softmaxes_by_rows`.  What one of them reads as it lies (see
    `memory_orders.is_read_as_it_lies`) is transposed for the others alone.

    Args:
      orders: see `orders_of`.
    """
    reads: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for op in flow.graph.ops:
        if op.primitive != "dot_general" or not flow.rules[op.index].matmul:
            continue
        contracted, batched = op.params["dimension_numbers"]
        for place, value in enumerate(op.operands):
            base, order = in_memory(flow, value)
            sums, batch = contracted[place], batched[place]
            kept = [d for d in range(len(flow.graph.values[value].shape)) if d not in (*sums, *batch)]
            maker = flow.producers[base]
            if maker < 0 or flow.kinds[maker] != "fused":
                continue
            lies, _ = orders.of[base]
            rows = [[lies[order[d]] for d in dims if d in order] for dims in (sums, batch, kept)]
            if rows != [sorted(row) for row in rows] and not is_read_as_it_lies(flow, orders, op.index, place):
                reads.setdefault(base, []).append((value, (op.index, place)))
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for base, wanted in reads.items():
        products = orders.of[base][1]
        if len(products) == 1 and not orders.by_rows.isdisjoint(products):
            continue  # a softmax, see above
        for value, product in wanted if len(wanted) > 1 else ():
            found[value] = (*found.get(value, ()), product)
    return found


def copies_apart(
    graph: Graph, crossing: Traffic, times: Sequence[int], turned: Sequence[TurnedCopy]
) -> Iterator[tuple[int, tuple[int, int], int]]:
    """(operation, (product, place), value) of the copies that are made for one product each: when they are there; but
    of those that are made later, with what is made of turned results.

    What lies in memory and is transposed for several products is read by one kernel after the other, before the first
    product: all copies are there beside it (a scanned attention of groups of four, H100).

    Args:
      times: see `Traffic`.
    """
    for value, products in crossing.apart.items():
        later = [t for t in turned if graph.values[t.result].bytes == graph.values[value].bytes]
        together = len(products) > 1 and all(product in crossing.reordered for product in products)
        first = min((op for op, _ in products), key=times.__getitem__)
        for op, place in products:
            if not any(t.start <= times[op] <= t.until for t in later):
                yield first if together else op, (op, place), value


def apart_scratch(
    graph: Graph,
    axes: MeshAxes,
    crossing: Traffic,
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    turned: Sequence[TurnedCopy],
) -> dict[int, int]:
    """Bytes of `copies_apart`, by operation."""
    found: dict[int, int] = {}
    for at, read, _ in copies_apart(graph, crossing, times, turned):
        if (row := reads.get(read)) is not None:
            operand = graph.values[graph.ops[read[0]].operands[read[1]]]
            found[at] = found.get(at, 0) + local_bytes(operand, row, axes, "gpu")
    return found


def kept_for_parts(
    graph: Graph,
    axes: MeshAxes,
    crossing: Traffic,
    times: Sequence[int],
    reads: Mapping[tuple[int, int], np.ndarray],
    profile: Profile,
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of what is made apart for two products and kept for both, as the scores lie.

    Of the second one's summed dimensions the first is as long as there are parts (see `split_k`): each part reads one
    place of it, wherever it lies.  Then the softmax is written once, and transposed for the first product (grouped
    attention whose scores are `bkgts` in bf16, of 4 parts and groups of 4 or 2 and 2, sequences of 512 to 2048; not of
    other numbers, nor of scores in f32; H100, jax 0.10.2).
    """
    for value, products in crossing.apart.items():
        if len(products) != 2:
            continue
        (first, _), (last, place) = sorted(products, key=lambda product: times[product[0]])
        op, lhs, rhs = graph.ops[last], reads.get((last, 0)), reads.get((last, 1))
        sums = op.params["dimension_numbers"][0][place]
        if len(sums) < 2 or lhs is None or rhs is None or not _is_half(graph, crossing.producers, value):
            continue
        product = local_product(graph, op, crossing.producers, lhs[None], rhs[None], axes)
        tensor, row = graph.values[op.operands[place]], (lhs, rhs)[place][None]
        parts = 1.0 if product is None else float(split_ways(product, profile)[0])
        if parts > 1 and parts == local_sizes(tensor.shape, row, axes)[0, sums[0]]:
            yield times[first], times[last] + 1, int(device_bytes(tensor, row, axes, "gpu")[0])


def _is_half(graph: Graph, producers: Sequence[int], value: int) -> bool:
    """Whether a value, and the products of its size that it is elementwise made of, are of two bytes an element."""

    def is_alike(made: int) -> bool:
        return math.prod(graph.values[made].shape) == math.prod(graph.values[value].shape)

    def within(op: Op) -> bool:
        return op.primitive != "dot_general" and is_alike(op.results[0])

    leaves = [v for v in made_of(graph, producers, value, within) if is_alike(v) and producers[v] >= 0]
    return bool(leaves) and all(graph.values[v].item_bytes == _HALF for v in (value, *leaves))


class TurnedResult(NamedTuple):
    """A product's result that a kernel brings into the order of another's, which lies transposed.

    Attributes:
      result, turned: what the kernel reads and what it writes, which is that converted where it is converted first;
      made: what is elementwise made of both products, for a product that reads it.
    """

    result: int
    turned: int
    made: int


def turned_results(flow: Flow, orders: Orders) -> Mapping[int, TurnedResult]:
    """Results that are turned, by the product that makes them.

    What is elementwise made of two products lies as the one of them that is transposed for it, see `reordered`: of
    grouped attention the gradients of the softmax, converted to f32, as the scores (H100, jax 0.10.2).  What only one
    operation reads it turns as it reads.

    Args:
      orders: see `orders_of`.
    """
    found: dict[int, TurnedResult] = {}
    uses = flow.graph.uses()
    for base, (lies, products) in orders.of.items():
        for product, own in products.items() if lies != tuple(range(len(lies))) else ():
            (result,) = flow.graph.ops[product].results
            readers = [flow.graph.ops[reader] for reader, _ in uses[result]]
            wide = [r.results[0] for r in readers if r.primitive == "convert_element_type"]
            turned = (wide or [result])[0]
            if own != lies and len(uses[turned]) > 1:
                found[product] = TurnedResult(result, turned, base)
    return found


class TurnedCopy(NamedTuple):
    """What is there of a turned result beside itself.

    Attributes:
      result: which nothing reads after `start`; turned: see `TurnedResult`.
      start, until: when it is turned, and when what it is for is made; stop: when the copy is gone.
    """

    result: int
    turned: int
    start: int
    until: int
    stop: int


def turned_copies(
    graph: Graph, results: Mapping[int, TurnedResult], stored: Sequence[bool], times: Sequence[int]
) -> Iterator[TurnedCopy]:
    """The copies, each up to what is made of it, which may take its place where it is as wide.

    The kernel that makes that also writes the softmax for the product that reads it (see `made_apart`), as long as the
    result that was turned.

    Args:
      stored, times: see `Traffic`.
    """
    producers = graph.producers()
    for product, (result, turned, made) in results.items():
        while not stored[made] and (before := _before(graph, made)) is not None:
            made = before  # what products make of it themselves, they scale
        start, until = times[product] + 1, times[producers[made]]
        stop = until + (graph.values[made].item_bytes < graph.values[turned].item_bytes)
        yield TurnedCopy(result, turned, start, until, max(stop, start + 1))


def _before(graph: Graph, value: int) -> int | None:
    """What an operation makes `value` of, if that is one value of its shape and type."""
    tensor, producers = graph.values[value], graph.producers()
    op = graph.ops[producers[value]]
    alike = [
        v
        for v in op.operands
        if (graph.values[v].shape, graph.values[v].dtype) == (tensor.shape, tensor.dtype)
        and producers[v] >= 0
        and graph.ops[producers[v]].primitive != "broadcast_in_dim"
    ]
    return alike[0] if len(alike) == 1 and op.primitive != "dot_general" else None
