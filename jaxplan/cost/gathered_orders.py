"""Copies beside gathers and scattered sums on GPU, where XLA wants the dimension that they go along outermost.

Pieces lie one behind the other where they are gathered along the first dimension.  Along another one the result lies
with that dimension outermost, and so does the piece that is sent.  Who makes the piece writes it so, and a product
reads any order in which the dimensions that it sums, and those that it keeps, lie side by side: a weight [4096, 1024]
gathered along the second one costs nothing more, but [1024, 3, 8, 128], gathered along the heads, is transposed before
it is read, and a gradient like it before it is scattered.  In loops more is copied, of all iterations at once:

- what an iteration takes of an argument's stack is sent in pieces, so that the whole stack is transposed before the
  loop;
- a stack of what was gathered, which a later loop reads, is brought back into order between the two.

What is gathered along two dimensions lies in the wrong order for the second gather: it is transposed in between.

Compiled for H100, jax 0.10.2: of a GPT's twenty plans (4x2) fourteen that pin some arguments at random lacked 43 to 144
us of 2.5 to 2.7 ms that were computed and 43 to 98 with these copies, twelve of them 57 to 85 and the search's own,
which gathers along first dimensions alone, 77 both times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..ir import VIEWS, Graph, Op
from ..sharding import NONE, UNREDUCED, MeshAxes, pieces
from .scores import is_batched
from .without_triton import steps_from

_CHAIN = VIEWS | {"convert_element_type", "copy"}


class GatheredOrder(NamedTuple):
    """What becomes of a tensor that lies with another dimension outermost.

    Attributes:
      shape, bytes: of the whole tensor; sliced_bytes: of the slice of an argument that it is made of in a loop, else 0.
      unread, unmade: the dimensions that may not be outermost where a product reads it, and where one writes it.
      stacked: whether a loop stacks it.
    """

    shape: tuple[int, ...]
    bytes: float
    sliced_bytes: float = 0.0
    unread: frozenset[int] = frozenset()
    unmade: frozenset[int] = frozenset()
    stacked: bool = False

    def beside(self, other: GatheredOrder | None) -> GatheredOrder:
        """For the readers of both."""
        if other is None:
            return self
        return self._replace(
            unread=self.unread | other.unread, unmade=self.unmade | other.unmade, stacked=self.stacked or other.stacked
        )


def gathered_orders(graph: Graph, producers: Sequence[int]) -> Iterator[tuple[tuple[int, int], GatheredOrder]]:
    """((operation, place), what it reads) of matrices that products read or make, and that loops stack."""
    for op in graph.ops:
        for place, value in enumerate(op.operands):
            tensor, maker = graph.values[value], producers[value]
            if sum(extent > 1 for extent in tensor.shape) < 2:
                continue
            unread = unmade = frozenset[int]()
            if _is_matrix_product(op):
                unread = _apart(tensor.shape, _read_groups(op, place, len(tensor.shape)))
            if maker >= 0 and _is_matrix_product(graph.ops[maker]):
                unmade = _apart(tensor.shape, _made_groups(graph, graph.ops[maker]))
            stacked = op.primitive == "scan_stack" and place == 0
            if stacked or unmade or _is_matrix_product(op):
                sliced_bytes = _sliced_bytes(graph, producers, value)
                yield (op.index, place), GatheredOrder(
                    tensor.shape, tensor.bytes, sliced_bytes, unread, unmade, stacked
                )


def copied_bytes(
    order: GatheredOrder, tail: np.ndarray, head: np.ndarray, axes: MeshAxes
) -> Iterator[tuple[np.ndarray, bool]]:
    """`float64[a, b]`: bytes on one device of what is read and written once more, copy by copy, in one run; and
    whether a kernel of each run does it, or one for all of a loop's.

    Args:
      tail, head: place arrays, before and after the move.
    """
    sizes = np.array([size for _, size in axes])
    made, wanted = tail[:, None, :], head[None, :, :]
    moved = (made != wanted) & (sizes > 1)
    gathers = moved & (made >= 0) & (wanted == NONE)
    scatters = moved & (made == UNREDUCED) & (wanted >= 0)
    parts = pieces(tail, axes)[:, None]
    behind = [d for d in range(len(order.shape)) if any(extent > 1 for extent in order.shape[:d])]
    for dim in order.unmade:
        if (there := (scatters & (wanted == dim)).any(axis=2)).any():
            yield there * order.bytes / parts, True
    along = [(gathers & (made == dim)).any(axis=2) for dim in range(len(order.shape))]
    local = order.bytes / parts
    for dim, there in enumerate(along):
        if not there.any():
            continue
        local = local * np.where(gathers & (made == dim), sizes, 1).prod(axis=2)
        first, last = there & ~_any(along[:dim], there), there & ~_any(along[dim + 1 :], there)
        yield local * (there & ~last), True
        if dim in order.unread:
            yield local * last, True
        if dim in behind and order.stacked:
            yield local * last, False
        if dim in behind and order.sliced_bytes:
            yield first * order.sliced_bytes / parts, False


def _any(masks: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    return np.logical_or.reduce(masks) if masks else np.zeros_like(like)


def _is_matrix_product(op: Op) -> bool:
    """Whether no dimension is both operands'."""
    return op.primitive == "dot_general" and not is_batched(op)


def _read_groups(op: Op, place: int, rank: int) -> list[Sequence[int]]:
    """An operand's dimensions that are summed, and the others, each to be read as one."""
    summed = op.params["dimension_numbers"][0][place]
    return [summed, [d for d in range(rank) if d not in summed]]


def _made_groups(graph: Graph, op: Op) -> list[Sequence[int]]:
    """A result's dimensions that are the first operand's, and the second's."""
    rows = len(graph.values[op.operands[0]].shape) - len(op.params["dimension_numbers"][0][0])
    rank = len(graph.values[op.results[0]].shape)
    return [range(rows), range(rows, rank)]


def _apart(shape: tuple[int, ...], groups: Sequence[Sequence[int]]) -> frozenset[int]:
    """The dimensions that, outermost, part a group's, or bring them into another order."""

    def together(lies: Sequence[int], group: Collection[int]) -> bool:
        at = [lies.index(d) for d in group if d in lies]
        return at == list(range(at[0], at[0] + len(at))) if at else True

    long = [d for d, extent in enumerate(shape) if extent > 1]
    orders = {dim: [dim, *(d for d in long if d != dim)] for dim in long}
    if not all(together(long, group) for group in groups):
        return frozenset()  # it is copied however it lies
    return frozenset(dim for dim, lies in orders.items() if not all(together(lies, group) for group in groups))


def _sliced_bytes(graph: Graph, producers: Sequence[int], value: int) -> float:
    """Of the slice of an argument's stack that is only converted or viewed otherwise; 0: it is none."""
    maker, _ = steps_from(graph, producers, value, _CHAIN)
    if maker < 0 or graph.ops[maker].primitive != "scan_slice" or producers[graph.ops[maker].operands[0]] >= 0:
        return 0.0
    return graph.values[graph.ops[maker].results[0]].bytes
