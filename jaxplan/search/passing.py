"""What it costs to bring a tensor from one layout into another, for all pairs of two place arrays at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..cost import CostModel, Turning, kernels_beside, scattering_seconds
from ..ir import Value
from ..sharding import NONE, UNREDUCED, Moves, reachable
from .sharing import tied_layouts
from .space import Passage


class How(NamedTuple):
    """How a tensor gets from where it is made to where it is read.

    Attributes:
      trips: how often in a step.
      tied: it follows its maker's layout; cut: a part of what is whole follows too, see `tied_layouts`.
      sliced: it is a stack that a loop goes along.
      held: it is a stack that several loops go along.  The reader's first layouts mean that it stays as it is made;
        the others, the same again, that it is resharded before the loops and held for them.
      uncut: no part is cut out of what lies whole, see `totals`.
      settled: it takes a donated argument's place.
      start_share, gather_share: of its starts that are its own, see `ir.start_shares`.
      parted: see `cost.Traffic`.
      turning: what the move turns.
    """

    trips: float = 1.0
    tied: bool = False
    sliced: bool = False
    cut: bool = False
    held: bool = False
    uncut: bool = False
    settled: bool = False
    start_share: float = 1.0
    gather_share: float = 1.0
    parted: bool = False
    turning: Turning | None = None


class Passing:
    """Prices edges; equal ones once.

    Args:
      shared: gives the first array of equal content, see `_Builder._shared`.
    """

    def __init__(self, model: CostModel, shared: Callable[[np.ndarray], np.ndarray]) -> None:
        self.model, self._shared = model, shared
        self._edges: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray | None, Passage]] = {}
        self._copying: dict[tuple[object, ...], np.ndarray] = {}
        self._moves: dict[tuple[int, int], Moves] = {}

    def edge(
        self, tail: np.ndarray, head: np.ndarray, tensor: Value, how: How
    ) -> tuple[np.ndarray, np.ndarray | None, Passage]:
        """`float64[a, b]` seconds in a step, which pairs are possible (None: all), and what is moved."""
        lies = tensor.sides, tensor.image, tensor.ordered
        key = (id(tail), id(head), tensor.shape, tensor.item_bytes, tensor.narrowed, tensor.host, lies, how)
        if key not in self._edges:
            costs, mask = self._held(tail, head, tensor, how) if how.held else self._priced(tail, head, tensor, how)
            allowed = None if mask.all() else self._shared(mask)
            moved = Passage(tails=tail, heads=head, tensor=tensor, trips=how.trips)
            self._edges[key] = self._shared(np.ascontiguousarray(costs)), allowed, moved
        return self._edges[key]

    def _priced(
        self, tail: np.ndarray, head: np.ndarray, tensor: Value, how: How
    ) -> tuple[np.ndarray, np.ndarray]:
        if how.tied:
            allowed = tied_layouts(tail, head, cut=how.cut)
            if not (how.uncut or (tail == UNREDUCED).any()):
                return np.zeros(allowed.shape), allowed
        else:
            allowed = reachable(tail, head)
            if how.sliced:
                # a loop gathers its own slice, one iteration's at a time: gathered before the loop, the whole stack
                # would lie in memory; only what is cut along the loop itself has to be
                a, b = tail[:, None, :], head[None, :, :]
                allowed &= ((a == b) | (a < 0) | (a == 0)).all(axis=2)
        if tensor.host:  # no device works on it there, nor sends any of it to another
            allowed &= (tail[:, None, :] == head[None, :, :]).all(axis=2)
        if how.uncut:
            allowed &= ~((tail[:, None, :] == NONE) & (head[None, :, :] >= 0)).any(axis=2)

        beside = kernels_beside(tensor, how.parted)

        def price(kind: str, size: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
            sent_bytes = size * tensor.as_sent(kind)
            share = how.gather_share if kind == "all_gather" else how.start_share
            return self.model.collective(kind, sent_bytes, axes, start_share=share, beside=beside)

        once = self._between(tail, head).price(tensor.bytes, price)
        once = once + scattering_seconds(self.model, tail, head, tensor, start_share=how.start_share)
        once = once + self.copying(tail, head, tensor, how)
        return np.where(allowed, once * (1 + _LATER_DIMENSION * _moved_dimension(tail, head)) * how.trips, 0.0), allowed

    def copying(self, tail: np.ndarray, head: np.ndarray, tensor: Value, how: How) -> np.ndarray:
        """`float64[a, b]`: the copies in a move, see `CostModel.settling_seconds` and `CostModel.turned_seconds`."""
        key = (id(tail), id(head), tensor.shape, tensor.item_bytes, how.settled, how.turning)
        if key not in self._copying:
            found = np.zeros((len(tail), len(head)))
            if how.settled:
                found = found + self.model.settling_seconds(tail, head, tensor)
            if how.turning is not None:
                found = found + self.model.turned_seconds(how.turning, tail, head)
            self._copying[key] = self._shared(found)
        return self._copying[key]

    def _held(
        self, tail: np.ndarray, head: np.ndarray, tensor: Value, how: How
    ) -> tuple[np.ndarray, np.ndarray]:
        layouts = self._shared(np.ascontiguousarray(head[: len(head) // 2]))
        costs, allowed = self._priced(tail, layouts, tensor, how)
        same = tied_layouts(tail, layouts, cut=False)
        kept, _ = self._priced(tail, layouts, tensor, how._replace(tied=True))
        return np.hstack([np.where(same, kept, 0.0), costs]), np.hstack([same, allowed & ~same])

    def _between(self, tail: np.ndarray, head: np.ndarray) -> Moves:
        key = (id(tail), id(head))
        if key not in self._moves:
            self._moves[key] = Moves(tail, head, self.model.axes)
        return self._moves[key]


_LATER_DIMENSION = 1e-4
"""Share by which communication on the next dimension is dearer, so that equals are cut where pieces are contiguous
and tiles of the last two dimensions stay whole."""


def _moved_dimension(tail: np.ndarray, head: np.ndarray) -> np.ndarray:
    """`[a, b]`: the last dimension that is gathered or scattered between two layouts, 0 for none."""
    moved = tail[:, None, :] != head[None, :, :]
    return np.where(moved, np.maximum(tail[:, None, :], head[None, :, :]), 0).max(axis=2)
