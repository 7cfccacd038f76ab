"""Strategies: every way to cut one operation over the mesh, derived from its factor rule.

A strategy assigns each mesh axis to one factor, or to none (the operation is then replicated over that axis).
All mesh axes are assigned jointly.  They are held as arrays, one row a strategy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from .rule import Factors, FixedSides, Rule
from .spec import NONE, UNREDUCED, Layout, MeshAxes, places_of_layout, product_rows


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """All strategies of one operation.

    Attributes:
      factors: `int16[n, n_axes]`, the factor that each axis cuts, `NONE`, or `UNREDUCED` for an axis over which
        operands and results are pending sums.
      operands, results: for each tensor its place array, `int8[n, n_axes]` (see `spec`).
      shares: `float64[n]`, the part of the operation's arithmetic that one device does.
    """

    factors: np.ndarray
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    shares: np.ndarray

    def __len__(self) -> int:
        return len(self.factors)

    def take(self, keep: np.ndarray) -> Strategies:
        """Only the strategies that `keep` (a mask or indices) names."""
        return Strategies(
            factors=self.factors[keep],
            operands=tuple(p[keep] for p in self.operands),
            results=tuple(p[keep] for p in self.results),
            shares=self.shares[keep],
        )


def strategies(rule: Rule, axes: MeshAxes, *, pending: Collection[int] = ()) -> Strategies:
    """Every strategy of `rule` on the mesh that divides evenly; the fully replicated one comes first.

    With `pending`, the operands in which the operation is linear together (both of a sum, one of a product): besides
    cutting a factor, an axis may leave them and the result pending over it, so that they are reduced once, after it.

    A dimension made of several factors (a merged reshape dimension, major first) can only be cut at a minor
    factor when every more major factor of that dimension is cut completely: otherwise the local piece would
    not be contiguous and no PartitionSpec says it.
    """
    if rule.fixed is None or not _fits(rule.fixed, axes):
        return _all_strategies(rule, axes, pending)
    if any(dim is None for side in rule.fixed for dims in side for dim in dims):
        some = _all_strategies(rule, axes, pending)
        some = some.take(_as_demanded(some, rule.fixed, axes))
        if len(some):  # none where a demanded cut doesn't divide: what was left open is then uncut
            return some
    return _fixed(rule.fixed, axes)


def busiest(options: Strategies, cap: int) -> Strategies:
    """At most `cap` strategies: those that leave the fewest axes idle, the replicated one always kept.

    Only meshes of four and more axes come here.  An operation that leaves an axis idle does that part of its work
    several times over.
    """
    if len(options) <= cap:
        return options
    idle = (options.factors == NONE).sum(axis=1)
    order = np.argsort(idle, kind="stable")[:cap]
    keep = np.union1d(order, np.nonzero(idle == idle.max())[0])
    return options.take(keep)


def _all_strategies(rule: Rule, axes: MeshAxes, pending: Collection[int]) -> Strategies:
    n_axes = len(axes)
    choices = [
        [NONE]
        + [
            f
            for f, extent in enumerate(rule.sizes)
            if size > 1 and f not in rule.need_replication and extent % size == 0 and extent >= size
        ]
        for _, size in axes
    ]
    factors = product_rows(choices).astype(np.int16)
    factors = factors[_representable(factors, rule, axes)]
    factors = factors[_sensible_halos(factors, rule, axes)]
    if pending:
        factors = np.concatenate([factors, _pending_rows(factors, axes)])
    sizes = np.array([size for _, size in axes], np.float64)
    shares = 1.0 / np.where(factors >= 0, sizes, 1.0).prod(axis=1) if n_axes else np.ones(len(factors))
    return Strategies(
        factors=factors,
        operands=tuple(
            _places(t, factors if i in pending else np.where(factors == UNREDUCED, NONE, factors), frozenset())
            for i, t in enumerate(rule.operands)
        ),
        results=tuple(_places(t, factors, rule.reduction) for t in rule.results),
        shares=shares,
    )


def _fits(fixed: FixedSides, axes: MeshAxes) -> bool:
    names = {name for name, _ in axes}
    return all(axis in names for side in fixed for dims in side for dim in dims for axis in dim or ())


def _as_demanded(options: Strategies, fixed: FixedSides, axes: MeshAxes) -> np.ndarray:
    """The strategies that cut what the user's code demands as it demands, and what it leaves open as they like."""
    keep = np.ones(len(options), bool)
    for tensors, side in zip((options.operands, options.results), fixed, strict=True):
        for places, dims in zip(tensors, side, strict=True):
            wanted = places_of_layout(Layout(dims=tuple(dim or () for dim in dims)), axes)
            open_dims = [d for d, dim in enumerate(dims) if dim is None]
            for axis, (_, size) in enumerate(axes):
                if size > 1:
                    free = (wanted[axis] == NONE) & np.isin(places[:, axis], open_dims)
                    keep &= (places[:, axis] == wanted[axis]) | free
    return keep


def _fixed(fixed: FixedSides, axes: MeshAxes) -> Strategies:
    """The one strategy of an operation whose layouts the user's code fixes."""
    operands, results = (
        tuple(places_of_layout(Layout(dims=tuple(dim or () for dim in dims)), axes)[None, :] for dims in side)
        for side in fixed
    )
    cut = {axis for side in fixed for dims in side for dim in dims for axis in dim or ()}
    share = 1.0 / math.prod(size for name, size in axes if name in cut)
    return Strategies(
        factors=np.full((1, len(axes)), NONE, np.int16),
        operands=operands,
        results=results,
        shares=np.array([share]),
    )


def _representable(factors: np.ndarray, rule: Rule, axes: MeshAxes) -> np.ndarray:
    """`bool[n]`: which rows divide evenly and can be said by a PartitionSpec of every tensor."""
    every = np.arange(len(factors))
    cut = np.ones((len(factors), len(rule.sizes) + 1), np.int64)  # the last column takes what cuts no factor
    for axis, (_, size) in enumerate(axes):
        cut[every, factors[:, axis]] *= size
    fits = np.ones(len(factors), bool)
    for f, extent in enumerate(rule.sizes):
        fits &= extent % cut[:, f] == 0
    for dim in {dim for tensor in rule.operands + rule.results for dim in tensor if len(dim) > 1}:
        for major, minor in itertools.pairwise(dim):
            fits &= (cut[:, minor] == 1) | (cut[:, major] == rule.sizes[major])
        # with several axes on a merged dimension, mesh order must be the factors' order
        place = np.full(len(rule.sizes) + 1, -1)
        place[[*dim]] = np.arange(len(dim))
        places = place[factors]
        fits &= (places < 0).all(axis=1) | (
            (places >= np.maximum.accumulate(places, axis=1)) | (places < 0)
        ).all(axis=1)
    return fits


def _sensible_halos(factors: np.ndarray, rule: Rule, axes: MeshAxes) -> np.ndarray:
    """`bool[n]`: which rows cut factors with a halo only as `Halo` allows."""
    sensible = np.ones(len(factors), bool)
    sizes = np.array([size for _, size in axes])
    for halo in rule.halos:
        own = factors == halo.factor
        pieces = np.where(own, sizes, 1).prod(axis=1)
        sensible &= (pieces == 1) | (max(halo.before, halo.after) * pieces <= halo.extent)
        if halo.rather is not None:
            free = rule.sizes[halo.rather] // np.where(factors == halo.rather, sizes, 1).prod(axis=1)
            sensible &= ~(own & (free[:, None] % sizes == 0)).any(axis=1)
        if halo.alone:
            idle = (factors == NONE) & ((sizes == 1) | (not halo.fills))
            sensible &= (own | (factors == halo.rather) | idle).all(axis=1) | ~own.any(axis=1)
    return sensible


def _pending_rows(factors: np.ndarray, axes: MeshAxes) -> np.ndarray:
    """`factors` again with every non-empty choice of their idle axes left pending instead."""
    idle = (factors == NONE) & np.array([size > 1 for _, size in axes])
    chosen = [
        np.isin(np.arange(len(axes)), subset)
        for count in range(1, len(axes) + 1)
        for subset in itertools.combinations(range(len(axes)), count)
    ]
    subsets = np.array(chosen, bool).reshape(len(chosen), len(axes))
    row, subset = np.nonzero((idle[:, None, :] | ~subsets[None, :, :]).all(axis=2))
    return np.where(subsets[subset], np.int16(UNREDUCED), factors[row]).astype(np.int16)


def _places(tensor: Factors, factors: np.ndarray, reduction: frozenset[int]) -> np.ndarray:
    table_size = int(max([factors.max(initial=0), *(f for d in tensor for f in d), *reduction, 0])) + 2
    table = np.full(table_size, NONE, np.int8)
    table[[*reduction]] = UNREDUCED
    for d, names in enumerate(tensor):
        for f in names:
            table[f] = d
    return np.where(factors >= 0, table[factors], factors).astype(np.int8)
