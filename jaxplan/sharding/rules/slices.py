"""Slices that are taken out of a tensor and put into one, also along a dimension that is cut.

Of one dimension, the longest that a slice spans in part, each device works on its piece: what it has of a slice goes
into a sum of all devices', and of what is put in it keeps what falls on it.  XLA's partitioner gathers such a dimension
whole (8 v5e and 8 H100, jax 0.10.2), so these run in a `shard_map` of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ..merge import piece_number
from ..rule import OpShapes, Rule
from .registry import LocalFunction, Ring, register, register_cut, register_sends
from .shape import same_extents


def _in_part(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """The longest dimension of `whole` that `part` spans in part."""
    partly = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
    return max(partly, key=lambda d: whole[d], default=None)


@register("slice", "dynamic_slice")
def take_slice(op: OpShapes) -> Rule:
    """`([v,i],[])->([1,i]) reduction={v}`: dimensions that are taken in full pass through; of those taken in part the
    longest is cut where less than half of it is taken (else it is as soon gathered), the others stay whole."""
    b, dims = same_extents(op, op.operands[0], op.results[0])
    taken, along = list(dims), _few_of(op.operands[0], op.results[0], op.params.get("strides"))
    summed = []
    if along is not None and op.operand_dtypes[0].startswith(NUMBERS):
        taken[along] = b.factor(op.operands[0][along])
        summed = [taken[along]]
    return b.rule(
        operands=[taken, *([None] * len(s) for s in op.operands[1:])],
        results=[dims],
        reduction=summed,
        linear=op.primitive == "slice" and not summed,
    )


NUMBERS = ("float", "bfloat", "int", "uint", "complex")
"""Types of what can be added: not bool, nor keys."""


def _few_of(whole: Sequence[int], part: Sequence[int], strides: Sequence[int] | None) -> int | None:
    """The longest dimension that is taken in part, where that is less than half of it and side by side."""
    along = _in_part(whole, part)
    apart = along is None or 2 * part[along] >= whole[along] or (strides is not None and strides[along] > 1)
    return None if apart else along


@register_cut("slice")
@register_cut("dynamic_slice")
def taken_in_part(eqn: Any) -> int | None:
    """See `take_slice`."""
    return _few_of(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params.get("strides"))


@register_sends("slice")
@register_sends("dynamic_slice")
def slice_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """The rows of the slice that are on this device's piece, zeros in place of the others."""
    dim = taken_in_part(eqn)
    assert dim is not None
    whole, part = (var.aval.shape for var in (eqn.invars[0], eqn.outvars[0]))

    def piece(operand: Any, *starts: Any) -> Any:
        here, rows = operand.shape[dim], part[dim]
        count = min(rows, here)
        starts = starts or tuple(np.asarray(at, np.int32) for at in eqn.params["start_indices"])
        start = _start(starts[dim], whole[dim] - rows) - piece_number(ring.axes, ring.devices).astype(np.int32) * here
        place = jnp.clip(start, 0, here - count)
        sizes = [here if n == m else m for here, n, m in zip(operand.shape, whole, part, strict=True)]
        room = zip(starts, operand.shape, sizes, strict=True)
        at = [place if d == dim else _start(at, n - m) for d, (at, n, m) in enumerate(room)]
        sizes[dim] = count
        taken = lax.dynamic_slice(operand, at, sizes)
        sizes[dim] = rows + 2 * count
        before = jnp.clip(place - start, -count, rows) + count
        placed = lax.dynamic_update_slice_in_dim(jnp.zeros(sizes, operand.dtype), taken, before, dim)
        return lax.slice_in_dim(placed, count, count + rows, axis=dim)

    return piece


@register("dynamic_update_slice")
def dynamic_update_slice(op: OpShapes) -> Rule:
    """`([i,j],[i,1],[])->([i,j])`: dimensions replaced in full pass through; of those replaced in part the longest is
    cut in operand and result, where each device keeps what falls on its piece, and the others stay whole."""
    b, dims = same_extents(op, op.operands[0], op.operands[1])
    whole, along = list(dims), _in_part(*op.operands[:2])
    if along is not None:
        whole[along] = b.factor(op.operands[0][along])
    return b.rule(operands=[whole, dims, *([None] * len(s) for s in op.operands[2:])], results=[whole])


@register_cut("dynamic_update_slice")
def replaced_in_part(eqn: Any) -> int | None:
    """See `dynamic_update_slice`."""
    return _in_part(*(var.aval.shape for var in eqn.invars[:2]))


@register_sends("dynamic_update_slice")
def update_slice_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """The rows of the update that fall on this device's piece, between those that are there."""
    dim = replaced_in_part(eqn)
    assert dim is not None
    extent, rows = (var.aval.shape[dim] for var in eqn.invars[:2])

    def piece(operand: Any, update: Any, *starts: Any) -> Any:
        here = operand.shape[dim]
        count = min(rows, here)
        start = _start(starts[dim], extent - rows) - piece_number(ring.axes, ring.devices).astype(np.int32) * here
        place = jnp.clip(start, 0, here - count)
        skipped = place - start  # rows of the update before those that come to `place`, or fewer than none
        # XLA takes the slice of what is there from before the cut, see `lowering.starts`
        operand = lax.optimization_barrier(operand)
        room = zip(starts, operand.shape, update.shape, strict=True)
        at = [place if d == dim else _start(at, n - m) for d, (at, n, m) in enumerate(room)]
        there = lax.dynamic_slice(operand, at, [count if d == dim else n for d, n in enumerate(update.shape)])
        edges = [(count, count, 0) if d == dim else (0, 0, 0) for d in range(update.ndim)]
        padded = lax.pad(update, np.zeros((), update.dtype), edges)
        come = lax.dynamic_slice_in_dim(padded, jnp.clip(skipped, -count, rows) + count, count, dim)
        row = skipped + lax.broadcasted_iota(skipped.dtype, come.shape, dim)
        return lax.dynamic_update_slice(operand, jnp.where((row >= 0) & (row < rows), come, there), at)

    return piece


def _start(start: Any, last: int) -> Any:
    """A start as jax takes it, moved until the slice fits."""
    last = min(last, int(np.iinfo(start.dtype).max))
    return lax.clamp(np.zeros((), start.dtype), start, np.asarray(last, start.dtype)).astype(np.int32)
