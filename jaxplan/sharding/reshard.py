"""Resharding: which collectives take a tensor from one layout to another, and their bytes.

The steps are those that the partitioner takes, in its order: pending sums are scattered (reduce_scatter) or summed
(all_reduce), replicated dimensions are sliced (free), cuts move between dimensions (all_to_all), and what is left is
gathered (all_gather).  Each collective runs over all its axes at once, save all_to_all, which moves axes from one
dimension to one other (one after the other they end in the wrong order, and a collective_permute puts that right: CPU
and TPU compiles, jax 0.10.2), and all_gather, which fills one dimension at a time: several at once cost two copies of
the whole into another memory order, dearer than the gather itself (TPU compiles, jax 0.10.2).  A sum is scattered
onto one dimension only: onto several XLA for TPU compiles an all_reduce and slices (products of bf16
and f32, jax 0.10.2; not tried on GPU).
The axes of one dimension are taken to stand in an order in which none has to change places: `lowering.order` sees to
that, save where one axis enters a dimension before another leaves it.  What enters is the most minor, as what leaves
has to be: pieces change places in between (collective_permute; a step that Shardy inserts by itself, jax 0.10.2).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .spec import NONE, UNREDUCED, MeshAxes

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


@dataclass(frozen=True, kw_only=True)
class _Move:
    """One collective of several classes of pairs: which classes, and by what the tensor's bytes are divided there."""

    kind: str
    axes: tuple[int, ...]
    classes: np.ndarray
    divisors: np.ndarray


class Moves:
    """The collectives between all layouts of two place arrays of one tensor, whatever its size.

    Pairs that take the same collectives over the same axes at the same share of the tensor are one class: of the
    hundred thousands of pairs on a mesh of three axes some hundred classes are priced.

    Args:
      source, target: place arrays of the same tensor, `int8[a, n_axes]` and `int8[b, n_axes]`.
    """

    def __init__(self, source: np.ndarray, target: np.ndarray, axes: MeshAxes) -> None:
        codes = _codes(source, target, axes)
        first: np.ndarray
        _, first, inverse = np.unique(codes.reshape(-1), return_index=True, return_inverse=True)
        self._count = first.size
        self._class = inverse.reshape(codes.shape).astype(np.min_scalar_type(self._count))
        rows, columns = np.unravel_index(first, codes.shape)
        together: dict[tuple[str, tuple[int, ...]], list[_Move]] = {}
        for move in _moves(source[rows], target[columns], axes):
            if move.kind != "all_slice":
                together.setdefault((move.kind, move.axes), []).append(move)
        # priced at once: a pair may be among them several times, once for each dimension
        self._moves = tuple(
            _Move(
                kind=kind,
                axes=over,
                classes=np.concatenate([move.classes for move in moves]),
                divisors=np.concatenate([move.divisors for move in moves]),
            )
            for (kind, over), moves in together.items()
        )

    def price(self, size_bytes: float, price: Price) -> np.ndarray:
        """`float64[a, b]`: the summed price of bringing layout `a` of a tensor of that size to layout `b`.

        Args:
          size_bytes: of the whole, unpartitioned tensor.
          price: of one collective; called with arrays of bytes.
        """
        total = np.zeros(self._count)
        for move in self._moves:
            seconds = price(move.kind, size_bytes / move.divisors, move.axes)
            total += np.bincount(move.classes, weights=seconds, minlength=self._count)
        return total[self._class]

    def over(self) -> np.ndarray:
        """`int64[a, b]`: the axes that something is sent over between two layouts, axis i as the bit 2**i."""
        total = np.zeros(self._count, np.int64)
        for move in self._moves:
            total[move.classes] |= sum(1 << axis for axis in move.axes)
        axes: np.ndarray = total[self._class]
        return axes


def _codes(source: np.ndarray, target: np.ndarray, axes: MeshAxes) -> np.ndarray:
    """`int64[a, b]`: equal where pairs move alike: for each axis what it does, and which dimensions it leaves and
    enters."""
    dims = int(max(source.max(initial=NONE), target.max(initial=NONE))) + 1
    a, b = np.meshgrid(np.arange(UNREDUCED, dims), np.arange(UNREDUCED, dims), indexing="ij")
    stays = np.where(a >= 0, 1, 0)
    does = stays
    # codes 0 and 1 do nothing, uncut and cut; then one for each dimension, or for each pair of them
    codes_of = {
        "all_reduce": (2, 0 * a), "all_slice": (3, b), "all_gather": (3 + dims, a),
        "reduce_scatter": (3 + 2 * dims, b), "all_to_all": (3 + 3 * dims, a * dims + b),
    }  # fmt: skip
    for kind, where in _kinds(a, b).items():
        first, place = codes_of[kind]
        does = np.where(where, first + place, does)
    radix = 3 + 3 * dims + dims**2
    codes = np.zeros((len(source), len(target)), np.int64)
    for axis, (_, size) in enumerate(axes):
        table = does if size > 1 else stays
        codes = codes * radix + table[source[:, axis, None] - UNREDUCED, target[None, :, axis] - UNREDUCED]
    return codes


def _moves(a: np.ndarray, b: np.ndarray, axes: MeshAxes) -> Iterator[_Move]:
    """The collectives of the pairs `(a[n], b[n])`, rows of place arrays, in the partitioner's order."""
    sizes = np.array([size for _, size in axes], np.int64)
    divisor = np.where(a >= 0, sizes, 1).prod(axis=1)
    stay = np.where(sizes > 1, a, NONE)  # of those that have not left yet
    entered = np.zeros(a.shape, bool)  # before another left the dimension
    for kind, left, moving in _stages(a, b, axes):
        if not moving.any():
            continue
        if left >= 0 and (turning := _turning(stay, b, entered, moving, left)) is not None:
            for subset, mask in _subsets(turning):
                classes = np.flatnonzero(mask)
                yield _Move(kind="collective_permute", axes=subset, classes=classes, divisors=divisor[classes])
            entered &= ~turning
        stay = np.where(moving, NONE, stay)
        for subset, mask in _subsets(moving):
            factor = math.prod(axes[i][1] for i in subset)
            if kind == "all_gather":
                divisor = np.where(mask, divisor // factor, divisor)
            classes = np.flatnonzero(mask)
            yield _Move(kind=kind, axes=subset, classes=classes, divisors=divisor[classes])
            if kind in ("reduce_scatter", "all_slice"):
                divisor = np.where(mask, divisor * factor, divisor)
        if kind in ("reduce_scatter", "all_slice", "all_to_all"):
            entered |= moving


def _turning(
    a: np.ndarray, b: np.ndarray, entered: np.ndarray, leaving: np.ndarray, dim: int
) -> np.ndarray | None:
    """Which axes change places where some `leaving` leave dimension `dim` after others `entered` it: the latter and all
    that ever leave, `bool[n, n_axes]`; None where nowhere."""
    inside = entered & (b == dim)
    turned = _any(inside)
    if not turned.any():
        return None
    turned &= _any(leaving & (a == dim))
    return turned[:, None] & (inside | ((a == dim) & (b != dim))) if turned.any() else None


def _any(mask: np.ndarray) -> np.ndarray:
    """`mask.any(axis=1)`, of a few columns and many rows."""
    found: np.ndarray = np.logical_or.reduce([mask[:, column] for column in range(mask.shape[1])])
    return found


def _stages(a: np.ndarray, b: np.ndarray, axes: MeshAxes) -> Iterator[tuple[str, int, np.ndarray]]:
    """The collectives in the partitioner's order, each with the dimension that axes leave (or NONE) and the axes that
    take part, `bool[n, n_axes]`."""
    real = np.array([size > 1 for _, size in axes])
    moves = {kind: move & real for kind, move in _kinds(a, b).items()}
    scattered = moves["reduce_scatter"]
    onto = np.where(scattered, b, NONE).max(axis=1, keepdims=True, initial=NONE)
    at_once = (~scattered | (b == onto)).all(axis=1, keepdims=True)
    yield "reduce_scatter", NONE, scattered & at_once
    yield "all_reduce", NONE, moves["all_reduce"] | (scattered & ~at_once)
    yield "all_slice", NONE, moves["all_slice"] | (scattered & ~at_once)
    for left, entered in itertools.permutations(range(int(max(a.max(initial=NONE), b.max(initial=NONE))) + 1), 2):
        yield "all_to_all", left, moves["all_to_all"] & (a == left) & (b == entered)
    for dim in range(int(a.max(initial=NONE)) + 1):
        yield "all_gather", dim, moves["all_gather"] & (a == dim)


def _subsets(moves: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The sets of axes that move in one collective, and which pairs."""
    n_axes = moves.shape[1]
    codes = moves @ (1 << np.arange(n_axes))
    for code in np.flatnonzero(np.bincount(codes, minlength=1)):
        if code:
            yield tuple(i for i in range(n_axes) if code >> i & 1), codes == code


def _kinds(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """What an axis does that goes from place `a` to place `b`, elementwise."""
    return {
        "reduce_scatter": (a == UNREDUCED) & (b >= 0),
        "all_reduce": (a == UNREDUCED) & (b == NONE),
        "all_slice": (a == NONE) & (b >= 0),
        "all_to_all": (a >= 0) & (b >= 0) & (a != b),
        "all_gather": (a >= 0) & (b == NONE),
    }


def reshard_steps(
    source: np.ndarray, target: np.ndarray, size_bytes: float, axes: MeshAxes
) -> tuple[Step, ...]:
    """The collectives that bring one layout (a row of a place array) to another; empty when they are equal."""
    before, after = source.tobytes(), target.astype(source.dtype, copy=False).tobytes()
    if before == after:
        return ()
    return tuple(
        Step(kind=kind, axes=names, bytes=size_bytes / divisor)
        for kind, names, divisor in _steps(source.dtype.char, before, after, axes)
    )


@functools.lru_cache(maxsize=1 << 14)
def _steps(
    dtype: str, source: bytes, target: bytes, axes: MeshAxes
) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """(collective, axes, what the tensor's bytes are divided by) for two rows as bytes: programs repeat few pairs."""
    rows = [np.frombuffer(row, dtype)[None, :] for row in (source, target)]
    return tuple(
        (move.kind, tuple(axes[i][0] for i in move.axes), float(move.divisors[0]))
        for move in _moves(rows[0], rows[1], axes)
        if move.kind != "all_slice"
    )


def reshard_path(source: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """The layouts on the way from `source` to `target` (rows, no pending sums), `target` last.

    The SPMD partitioner replicates a tensor as a last resort ("involuntary full rematerialization") when one
    constraint asks for a slice over one axis and a gather over another at once; asked one move at a time it does
    each as the collective it is.  So: all slices, then the all_to_all between each two dimensions, then the gathers of
    each dimension.
    """
    path: list[np.ndarray] = []
    row = source.copy()

    def move(mask: np.ndarray) -> None:
        nonlocal row
        if mask.any():
            row = np.where(mask, target, row).astype(np.int8)
            path.append(row)

    move((row == NONE) & (target >= 0))
    for left, entered in itertools.permutations(range(int(max(row.max(), target.max(), NONE)) + 1), 2):
        move((row == left) & (target == entered) & (source == left))
    for dim in range(int(source.max(initial=NONE)) + 1):
        move((row == dim) & (target == NONE))
    return path
