"""Where what products read lies in memory on GPU: in the order of the product that it is elementwise made of, see
`apart`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from .residency import Flow, unwidened
from .scores import is_batched


class Orders(NamedTuple):
    """Where values lie.

    Attributes:
      of: for what products read where each of its dimensions lies, and of which products it is made, with where they
        would as each wrote it; by_rows: see `softmaxes_by_rows`.
    """

    of: Mapping[int, tuple[tuple[int, ...], Mapping[int, tuple[int, ...]]]]
    by_rows: Set[int]


NO_ORDERS = Orders({}, frozenset())


def orders_of(flow: Flow) -> Orders:
    """For what products read, but for its own transpositions: where each of its dimensions lies, and of which products
    it is made, with where they would as each wrote it, see `_made_of`.

    Where nothing of its shape is transposed all lies in order, and that is not asked: a network's stream of activations
    would be followed to its beginning for every product.
    """
    values = flow.graph.values
    transposed = {tuple(sorted(values[op.results[0]].shape)) for op in flow.graph.ops if op.primitive == "transpose"}
    found: dict[int, tuple[tuple[int, ...], Mapping[int, tuple[int, ...]]]] = {}
    by_rows = softmaxes_by_rows(flow)
    for op in flow.graph.ops:
        if op.primitive == "dot_general" and flow.rules[op.index].matmul:
            for value in op.operands:
                made_of, _ = in_memory(flow, value)
                shape = values[made_of].shape
                if made_of in found:
                    continue
                in_order = tuple(range(len(shape))), dict[int, tuple[int, ...]]()
                found[made_of] = _made_of(flow, made_of) if tuple(sorted(shape)) in transposed else in_order
                for product in by_rows.intersection(found[made_of][1]):
                    found[made_of] = found[made_of][1][product], found[made_of][1]
    return Orders(found, by_rows)


def softmaxes_by_rows(flow: Flow) -> set[int]:
    """The products of scores whose softmax is along their own last dimension: one kernel makes it, row by row."""
    found = set[int]()
    for op in flow.graph.ops:
        axes: Sequence[int] = op.params.get("axes", ()) if op.primitive == "reduce_sum" else ()
        made = flow.producers[unwidened(flow.graph, flow.producers, op.operands[0])] if len(axes) == 1 else -1
        if made >= 0 and flow.graph.ops[made].primitive == "exp":
            for product, lies in _made_of(flow, op.operands[0])[1].items():
                shape = flow.graph.values[flow.graph.ops[product].results[0]].shape
                last = max((d for d, size in enumerate(shape) if size > 1), default=-1)
                if lies[axes[0]] == last and is_batched(flow.graph.ops[product]):
                    found.add(product)
    return found


def is_read_as_it_lies(flow: Flow, orders: Orders, index: int, place: int) -> bool:
    """Whether a product reads an operand as it lies: batches first, then what it sums and what else there is, or the
    other way round, either in its order; or what it sums as it lies next to each other in its other operand, too, for
    XLA then sums in that order.

    What is made for other products, too, is then kept for this one: the kernel that transposes it for the first one
    writes both.
    """
    op = flow.graph.ops[index]
    contracted, batched = op.params["dimension_numbers"]
    lies, others = (_places(flow, orders, v) for v in (op.operands[place], op.operands[1 - place]))
    pairs = zip(contracted[place], contracted[1 - place], strict=True)
    sums = [(lies[d], others[e]) for d, e in pairs if d in lies and e in others]
    in_order = [there for _, there in sorted(sums)]
    if sums != sorted(sums) and in_order != [*range(in_order[0], in_order[0] + len(sums))]:
        return False
    batch = [lies[d] for d in batched[place] if d in lies]
    kept = [lies[d] for d in lies if d not in (*contracted[place], *batched[place])]
    summed = [here for here, _ in sorted(sums)]
    return any(order == sorted(order) for order in ([*batch, *kept, *summed], [*batch, *summed, *kept]))


def _places(flow: Flow, orders: Orders, value: int) -> dict[int, int]:
    """Where each dimension of more than one element of what a product reads lies in memory."""
    made_of, order = in_memory(flow, value)
    lies, _ = orders.of[made_of]
    return {d: lies[place] for d, place in order.items()}


def in_memory(flow: Flow, value: int) -> tuple[int, dict[int, int]]:
    """What `value` is a transposition of, and the place there of each of its dimensions of more than one element."""
    shape = flow.graph.values[value].shape
    order = list(range(len(shape)))
    while (maker := flow.producers[value]) >= 0 and flow.graph.ops[maker].primitive == "transpose":
        permutation = flow.graph.ops[maker].params["permutation"]
        order = [permutation[place] for place in order]
        value = flow.graph.ops[maker].operands[0]
    return value, {d: place for d, (place, size) in enumerate(zip(order, shape, strict=True)) if size > 1}


def products_of(flow: Flow, value: int) -> Mapping[int, tuple[int, ...]]:
    """The products that a value is elementwise made of, with where its dimensions would lie as each wrote it."""
    return _made_of(flow, value)[1]


def _made_of(flow: Flow, value: int) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Where each dimension of what is elementwise made lies, and of which products it is made, with where it would as
    each wrote it: as in a stack that it is made of, else as in a product's result that is transposed for it, else in
    order."""
    shape = flow.graph.values[value].shape
    in_order = tuple(range(len(shape)))
    products: dict[int, tuple[int, ...]] = {}
    open_, seen = [(value, in_order)], {value}
    while open_:
        at, lies = open_.pop()
        maker = flow.producers[at]
        op = flow.graph.ops[maker] if maker >= 0 else None
        if op is None or op.primitive == "scan_slice":
            return in_order, {}
        if op.primitive == "dot_general":
            products[maker] = lies
        elif flow.kinds[maker] == "fused":
            if op.primitive == "transpose":
                lies = tuple(op.params["permutation"][place] for place in lies)
            for operand in op.operands:
                tensor = flow.graph.values[operand]
                if not flow.source[operand] and operand not in seen and sorted(tensor.shape) == sorted(shape):
                    seen.add(operand)
                    open_.append((operand, lies))
    return next((lies for lies in products.values() if lies != in_order), in_order), products
