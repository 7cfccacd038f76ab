"""The order in which several mesh axes cut one dimension: of what is decided, and of what lies on the way between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..sharding import UNREDUCED, Layout, MeshAxes
from .turns import Turn, appended, cut_by, turned

Key = tuple[str, int, int, int]
"""("value", index, 0, dim), ("read", operation, operand, dim) or ("output", position, 0, dim)."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The order of the axes of every dimension that several axes cut, by key; absent: mesh order.

    `turns`: what moves in pieces on its way all the same, as no order suits all.
    """

    axes: MeshAxes
    chosen: Mapping[Key, tuple[int, ...]]
    turns: tuple[Turn, ...] = ()

    def layout(self, kind: str, index: int, position: int, row: np.ndarray, rank: int) -> Layout:
        """The Layout of a row of a place array, its axes in the order of this value, read or output."""
        dims = []
        for d in range(rank):
            cut = cut_by(row, d)
            order = self.chosen.get((kind, index, position, d), ())
            dims.append(tuple(self.axes[a][0] for a in (order if set(order) == set(cut) else cut)))
        pending = tuple(self.axes[a][0] for a in range(len(self.axes)) if row[a] == UNREDUCED)
        return Layout(dims=tuple(dims), unreduced=pending)

    def on_the_way(self, made: Layout, use: tuple[str, int, int], rows: Sequence[np.ndarray]) -> list[Layout]:
        """The Layouts of the steps `rows` between a value as it is `made` and one `use` of it, a `Key` without the
        dimension, and where pieces turn.

        A dimension has the reader's order where it has the reader's axes.  Else what enters is the most minor, and what
        crosses from another dimension keeps its order, as collectives make it.
        """
        cut = [[{self.axes[a][0] for a in cut_by(row, d)} for d in range(len(made.dims))] for row in rows]
        layouts, was = [], made.dims
        for number, row in enumerate(rows):
            if (order := turned(was, cut[number:])) is not None:
                layouts.append(Layout(dims=order))
                was = order
            read = self.layout(*use, row, len(was)).dims
            come = tuple(appended(names, was[d], was) for d, names in enumerate(read))
            was = tuple(
                names if self._known((*use, d), names) else come[d] for d, names in enumerate(read)
            )
            # asked for both at once, the partitioner moves parts of axes
            layouts += [Layout(dims=dims) for dims in dict.fromkeys((come, was))]
        return layouts

    def _known(self, key: Key, names: Sequence[str]) -> bool:
        order = self.chosen.get(key, ())
        return {self.axes[axis][0] for axis in order} == set(names)
