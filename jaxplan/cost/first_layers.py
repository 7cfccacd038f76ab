"""Updates that XLA for TPU v6e makes the other way round, and not in their arguments' place.

The gradient of the weights that the batch itself is multiplied by comes out with its dimensions turned round, and that
of other weights of the same shape with it.  Where moments are made of it, the weights and all moments are copied into
that order, updated there, and copied back (MLPs of two to six layers of 1024 to 16384 columns, Adam, 64 to 32768 rows,
replicated and summed over devices: 20 compiled for v6e, none of four for v5e and v5p is; jax 0.10.2, libtpu
0.0.42.1).  Not so where a norm of all gradients scales them, nor for plain SGD.  What vector memory holds is copied
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import VIEWS, Graph, Op, settled_values
from ..sharding import ELEMENTWISE, MeshAxes
from .residency import made_of
from .tiles import local_bytes

_OF_INPUTS = ELEMENTWISE | VIEWS | {"broadcast_in_dim"}


def first_layers(graph: Graph, producers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The next values of the weights and moments of each product that is turned."""
    state = {graph.inputs[i] for i, _ in graph.aliases}
    of_batch = {
        op.index
        for op in graph.ops
        if op.primitive == "dot_general" and any(_of_batch(graph, producers, state, v) for v in op.operands)
    }
    near = {graph.values[graph.ops[product].results[0]].shape for product in of_batch}
    made: dict[int, list[int]] = {}
    scaled: dict[int, frozenset[int]] = {}
    for value in settled_values(graph):
        if len(shape := graph.values[value].shape) == 2 and shape in near:
            products, scales = _made_of(graph, producers, value)
            for product in products:
                if not any(product in _products_in(graph, producers, scale, scaled) for scale in scales):
                    made.setdefault(product, []).append(value)
    updated = {product: values for product, values in made.items() if len(values) > 1}
    turned = {graph.values[graph.ops[product].results[0]].shape for product in of_batch.intersection(updated)}
    for product, values in updated.items():
        if graph.values[graph.ops[product].results[0]].shape in turned:
            yield tuple(values)


def turned_round(
    graph: Graph,
    axes: MeshAxes,
    found: Sequence[Sequence[int]],
    room_bytes: float,
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the copies: of one product's at a time, of which the largest are taken, while all are
    updated.

    Args:
      room_bytes: of vector memory, where all of one product's are that fit.
    """
    producers, most, when = graph.producers(), 0, list[int]()
    for together in found:
        sizes = [local_bytes(graph.values[v], values[v], axes, "tpu") for v in together if v in values]
        if sum(sizes) > room_bytes:
            most = max(most, sum(sizes))
            when += [times[producers[v]] for v in together]
    if when:
        yield min(when), max(when) + 1, most


def _made_of(graph: Graph, producers: Sequence[int], value: int) -> tuple[set[int], set[int]]:
    """The products of its shape that a value is elementwise made of, and all else that it is made of."""
    shape, products, others = graph.values[value].shape, set[int](), set[int]()

    def within(op: Op) -> bool:
        return op.primitive in ELEMENTWISE and graph.values[op.results[0]].shape == shape

    for found in made_of(graph, producers, value, within):
        maker = producers[found]
        if maker >= 0 and graph.ops[maker].primitive == "dot_general":
            products.add(maker)
        else:
            others.add(found)
    return products, others


def _products_in(
    graph: Graph, producers: Sequence[int], value: int, known: dict[int, frozenset[int]]
) -> frozenset[int]:
    """All products that a value depends on."""
    while (maker := producers[value]) >= 0 and graph.ops[maker].primitive == "broadcast_in_dim":
        value = graph.ops[maker].operands[0]
    if value not in known:
        found, left, seen = set[int](), [value], {value}
        while left:
            if (maker := producers[left.pop()]) >= 0:
                if graph.ops[maker].primitive == "dot_general":
                    found.add(maker)
                left += {*graph.ops[maker].operands} - seen
                seen |= {*graph.ops[maker].operands}
        known[value] = frozenset(found)
    return known[value]


def _of_batch(graph: Graph, producers: Sequence[int], state: set[int], value: int) -> bool:
    """Whether a value is elementwise made of arguments that are no state."""
    given = False
    for found in made_of(graph, producers, value, lambda op: op.primitive in _OF_INPUTS):
        if producers[found] >= 0 or found in state:
            return False
        given |= found in graph.inputs
    return given
