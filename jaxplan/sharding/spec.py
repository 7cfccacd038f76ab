"""Layouts: which mesh axes cut which dimension of a tensor, and which sum is still pending.

A `Layout` is the value that users meet (it prints as a PartitionSpec).  Inside the planner many layouts of
one tensor are held together as a *place array*: `int8[n_layouts, n_axes]`, where entry `[s, a]` is the
dimension that mesh axis `a` cuts in layout `s`, `NONE` when the axis doesn't cut the tensor (it is replicated
over it), or `UNREDUCED` when the tensor is a pending sum over it.  Several axes on one dimension stand in mesh
order, major first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

NONE = -1
UNREDUCED = -2

MeshAxes = tuple[tuple[str, int], ...]
"""The mesh as the planner sees it: (name, size) of each axis, major to minor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one tensor lies on the mesh.

    Attributes:
      dims: for each dimension the mesh axes that cut it, major first; `()` is uncut.
      unreduced: mesh axes over which the tensor is a pending sum.
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def spec(self) -> PartitionSpec:
        """The PartitionSpec, canonical: no trailing None, single axes unwrapped."""
        entries = [None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def shards(self, axes: MeshAxes) -> int:
        """In how many pieces the mesh cuts the tensor."""
        size = dict(axes)
        return math.prod(size[name] for dim in self.dims for name in dim)

    def __str__(self) -> str:
        inner = ", ".join(
            "None" if not d else repr(d[0]) if len(d) == 1 else repr(tuple(d)) for d in self.dims
        )
        pending = f" unreduced={{{', '.join(self.unreduced)}}}" if self.unreduced else ""
        return f"P({inner}){pending}"


def layout_of_places(places: np.ndarray, rank: int, axes: MeshAxes) -> Layout:
    """The `Layout` of one row of a place array, for a tensor of `rank` dimensions."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    unreduced = []
    for (name, _), place in zip(axes, places, strict=True):
        if place >= 0:
            dims[place].append(name)
        elif place == UNREDUCED:
            unreduced.append(name)
    return Layout(dims=tuple(map(tuple, dims)), unreduced=tuple(unreduced))


def places_of_layout(layout: Layout, axes: MeshAxes) -> np.ndarray:
    """The row of a place array for `layout`: the inverse of `layout_of_places`."""
    row = np.full(len(axes), NONE, np.int8)
    index = {name: i for i, (name, _) in enumerate(axes)}
    for d, names in enumerate(layout.dims):
        for name in names:
            row[index[name]] = d
    for name in layout.unreduced:
        row[index[name]] = UNREDUCED
    return row


def all_places(shape: tuple[int, ...], axes: MeshAxes) -> np.ndarray:
    """Every layout of a tensor that divides evenly: `int8[n, n_axes]`, the replicated one first.

    `jax.jit` refuses arguments and results whose dimension doesn't divide by the axes that cut it, so those
    layouts are not generated.  An axis of size 1 cuts nothing.
    """
    choices = [
        [NONE] + [d for d, extent in enumerate(shape) if size > 1 and extent >= size and extent % size == 0]
        for _, size in axes
    ]
    rows = product_rows(choices)
    sizes = np.array([size for _, size in axes], np.int64)
    fits = np.ones(len(rows), bool)
    for d, extent in enumerate(shape):
        fits &= extent % np.where(rows == d, sizes, 1).prod(axis=1) == 0
    return rows[fits].astype(np.int8)


def product_rows(choices: Sequence[Sequence[int]]) -> np.ndarray:
    """`int64[n, len(choices)]`: every way to take one of each, the last changing fastest."""
    grid = np.meshgrid(*(np.array(c, np.int64) for c in choices), indexing="ij")
    return np.stack(grid, axis=-1).reshape(-1, len(choices)) if choices else np.zeros((1, 0), np.int64)


def pieces(places: np.ndarray, axes: MeshAxes) -> np.ndarray:
    """`float64[n]`: in how many pieces each layout of a place array cuts its tensor."""
    sizes = np.array([size for _, size in axes], np.float64)
    return np.where(places >= 0, sizes, 1.0).prod(axis=1) if len(axes) else np.ones(len(places))
