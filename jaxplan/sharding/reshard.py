"""Resharding: which collectives take a tensor from one layout to another, and their bytes.

The steps are those that the partitioner takes, in its order: pending sums are scattered (reduce_scatter) or summed
(all_reduce), replicated dimensions are sliced (free), cuts move between dimensions (all_to_all), and what is left is
gathered (all_gather).  Each collective runs over all its axes at once, save all_to_all, which moves one axis at a
time, and all_gather, which fills one dimension at a time: several at once cost two copies of the whole into another
memory order, dearer than the gather itself (TPU compiles, jax 0.10.2).  A sum is scattered onto one dimension only:
onto several XLA for TPU compiles an all_reduce and slices (products of bf16 and f32, jax 0.10.2; not tried on GPU).
The axes of one dimension are taken to stand in an order in which none has to change places: `lowering.order` sees to
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .spec import NONE, UNREDUCED, MeshAxes, pieces

Price = Callable[[str, np.ndarray, tuple[int, ...]], np.ndarray]
"""(kind, bytes of the larger local buffer, indices of its mesh axes) -> the price of that collective."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One collective: its kind, its mesh axes, and the bytes of its larger local buffer on one device."""

    kind: str
    axes: tuple[str, ...]
    bytes: float


def reachable(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`bool[a, b]`: whether layout `a` of `source` can be brought to layout `b` of `target`.

    Everything can be, except that no collective makes a pending sum out of a finished tensor.
    """
    pending = target[None, :, :] == UNREDUCED
    return ~(pending & (source[:, None, :] != UNREDUCED)).any(axis=2)


def reshard_table(
    source: np.ndarray, target: np.ndarray, size_bytes: float, axes: MeshAxes, price: Price
) -> np.ndarray:
    """`float64[a, b]`: the summed price of bringing layout `a` to layout `b`.

    Args:
      source, target: place arrays of the same tensor, `int8[a, n_axes]` and `int8[b, n_axes]`.
      size_bytes: of the whole, unpartitioned tensor.
      price: of one collective; called with arrays of bytes.
    """
    before, after = (
        np.unique(source, axis=0, return_inverse=True),
        np.unique(target, axis=0, return_inverse=True),
    )
    table = _table(before[0], after[0], size_bytes, axes, price)
    return table[before[1].reshape(-1)[:, None], after[1].reshape(-1)[None, :]]


def _table(
    source: np.ndarray, target: np.ndarray, size_bytes: float, axes: MeshAxes, price: Price
) -> np.ndarray:
    a, b = source[:, None, :], target[None, :, :]
    local = np.repeat((size_bytes / pieces(source, axes))[:, None], len(target), axis=1)
    total = np.zeros_like(local)
    for kind, moves in _stages(a, b, axes):
        for subset in _subsets(moves, together=kind != "all_to_all"):
            mask = _moved(moves, subset, together=kind != "all_to_all")
            factor = math.prod(axes[i][1] for i in subset)
            if kind == "all_gather":
                local = np.where(mask, local * factor, local)
            if kind != "all_slice":
                total += np.where(mask, price(kind, np.where(mask, local, 0.0), subset), 0.0)
            if kind in ("reduce_scatter", "all_slice"):
                local = np.where(mask, local / factor, local)
    return total


def _stages(a: np.ndarray, b: np.ndarray, axes: MeshAxes) -> Iterator[tuple[str, np.ndarray]]:
    """The collectives in the partitioner's order, each with the axes that take part, `bool[a, b, n_axes]`."""
    moves = _moves(a, b, axes)
    scattered = moves["reduce_scatter"]
    onto = np.where(scattered, b, NONE).max(axis=2, keepdims=True)
    at_once = (~scattered | (b == onto)).all(axis=2, keepdims=True)
    yield "reduce_scatter", scattered & at_once
    yield "all_reduce", moves["all_reduce"] | (scattered & ~at_once)
    yield "all_slice", moves["all_slice"] | (scattered & ~at_once)
    yield "all_to_all", moves["all_to_all"]
    for dim in range(int(a.max(initial=NONE)) + 1):
        yield "all_gather", moves["all_gather"] & (a == dim)


def _subsets(moves: np.ndarray, *, together: bool) -> list[tuple[int, ...]]:
    """The sets of axes that move in one collective; an all_to_all moves one axis at a time."""
    n_axes = moves.shape[2]
    if not together:
        return [(i,) for i in range(n_axes) if moves[:, :, i].any()]
    codes = np.unique(moves @ (1 << np.arange(n_axes)))
    return [tuple(i for i in range(n_axes) if code >> i & 1) for code in codes if code]


def _moved(moves: np.ndarray, subset: tuple[int, ...], *, together: bool) -> np.ndarray:
    if not together:
        return moves[:, :, subset[0]]
    return (moves == np.isin(np.arange(moves.shape[2]), subset)).all(axis=2)


def _moves(a: np.ndarray, b: np.ndarray, axes: MeshAxes) -> dict[str, np.ndarray]:
    real = np.array([size > 1 for _, size in axes])
    moves = {
        "reduce_scatter": (a == UNREDUCED) & (b >= 0),
        "all_reduce": (a == UNREDUCED) & (b == NONE),
        "all_slice": (a == NONE) & (b >= 0),
        "all_to_all": (a >= 0) & (b >= 0) & (a != b),
        "all_gather": (a >= 0) & (b == NONE),
    }
    return {kind: move & real for kind, move in moves.items()}


def reshard_steps(
    source: np.ndarray, target: np.ndarray, size_bytes: float, axes: MeshAxes
) -> tuple[Step, ...]:
    """The collectives that bring one layout (a row of a place array) to another; empty when they are equal."""
    steps: list[Step] = []

    def record(kind: str, local: np.ndarray, subset: tuple[int, ...]) -> np.ndarray:
        if float(local.max()) > 0:
            steps.append(Step(kind=kind, axes=tuple(axes[i][0] for i in subset), bytes=float(local.flat[0])))
        return np.zeros_like(local)

    _table(source[None, :], target[None, :], size_bytes, axes, record)
    return tuple(steps)


def reshard_path(source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """The layouts on the way from `source` to `target` (rows, no pending sums), `target` last.

    The SPMD partitioner replicates a tensor as a last resort ("involuntary full rematerialization") when one
    constraint asks for a slice over one axis and a gather over another at once; asked one move at a time it does
    each as the collective it is.  So: all slices, then each all_to_all, then the gathers of each dimension.
    """
    path: list[np.ndarray] = []
    row = source.copy()

    def move(mask: np.ndarray) -> None:
        nonlocal row
        if mask.any():
            row = np.where(mask, target, row).astype(np.int8)
            path.append(row)

    move((row == NONE) & (target >= 0))
    for axis in range(len(row)):
        crosses = (row >= 0) & (target >= 0) & (row != target)
        move(crosses & (np.arange(len(row)) == axis))
    for dim in range(int(source.max(initial=NONE)) + 1):
        move((row == dim) & (target == NONE))
    return path
