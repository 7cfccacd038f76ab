"""Primitives that move, repeat, cut or join elements; they do no arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..halo import Halo
from ..rule import OpShapes, Rule, RuleBuilder
from .registry import LocalFunction, Ring, register, register_cut, register_sends


@register("broadcast_in_dim")
def broadcast_in_dim(op: OpShapes) -> Rule:
    """`([j])->([i,j])`; a dimension of one that grows stays whole in the operand."""
    b = RuleBuilder()
    result = b.factors(op.results[0])
    operand: list[int | None] = []
    for extent, d in zip(op.operands[0], op.params["broadcast_dimensions"], strict=True):
        operand.append(result[d] if extent == op.results[0][d] else None)
    return b.rule(
        operands=[operand, *([None] * len(shape) for shape in op.operands[1:])],
        results=[result],
        follows=True,
        source=not op.operands[0],
        linear=True,
    )


@register("iota", "empty", "empty2")
def iota(op: OpShapes) -> Rule:
    """`()->([i,j])`: every device can make its own piece."""
    b = RuleBuilder()
    dims = b.factors(op.results[0])
    operands = [[None] * len(shape) for shape in op.operands]
    return b.rule(operands=operands, results=[dims], source=True)


@register("reshape")
def reshape(op: OpShapes) -> Rule:
    """`([i,jk])->([ij,k])`: the factors that the two shapes have in common, see `common_factors`.

    Of the operand in the order of `dimensions`, where they are said: `vmap` of a convolution over kernels does.
    """
    b = RuleBuilder()
    order = op.params.get("dimensions") or range(len(op.operands[0]))
    read, result = common_factors(b, [op.operands[0][d] for d in order], op.results[0])
    operand = [factors for _, factors in sorted(zip(order, read, strict=True))]
    kept, made = ([n for n in shape if n != 1] for shape in (op.operands[0], op.results[0]))
    return b.rule(
        operands=[operand, *([None] * len(shape) for shape in op.operands[1:])],
        results=[result],
        follows=kept == made and list(order) == sorted(order),
        linear=True,
    )


def common_factors(
    b: RuleBuilder, before: Sequence[int], after: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Factors (major first) of every dimension of two shapes with equally many elements in row-major order.

    Both shapes are read from the major end; the greatest common divisor of what is left of the two current
    dimensions is a factor of both.  Where it is 1 nothing that follows is contiguous in both, up to the next
    place where both shapes have a boundary: `[6,4] -> [4,6]` has the factor 2, and no other.
    """
    first: list[tuple[int, ...]] = [()] * len(before)
    second: list[tuple[int, ...]] = [()] * len(after)
    if 0 in before:
        return first, second
    i = j = 0
    left, right = 1, 1  # what is still to be explained of dimension i of `before` and j of `after`
    while True:
        while left == 1 and i < len(before):
            left, i = before[i], i + 1
        while right == 1 and j < len(after):
            right, j = after[j], j + 1
        if left == 1 and right == 1:
            return first, second
        divisor = math.gcd(left, right)
        if divisor > 1:
            f = b.factor(divisor)
            first[i - 1] += (f,)
            second[j - 1] += (f,)
            left, right = left // divisor, right // divisor
            continue
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        left = right = 1


@register("transpose")
def transpose(op: OpShapes) -> Rule:
    """`([i,j])->([j,i])`."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    return b.rule(
        operands=[dims], results=[[dims[p] for p in op.params["permutation"]]], follows=True, linear=True
    )


@register("squeeze")
def squeeze(op: OpShapes) -> Rule:
    """`([i,1])->([i])`."""
    b = RuleBuilder()
    gone = {int(d) % len(op.operands[0]) for d in op.params["dimensions"]}
    dims: list[Any] = [None if d in gone else b.factor(n) for d, n in enumerate(op.operands[0])]
    return b.rule(
        operands=[dims], results=[[f for d, f in enumerate(dims) if d not in gone]], follows=True, linear=True
    )


@register("bitcast_convert_type")
def bitcast_convert_type(op: OpShapes) -> Rule:
    """`([i,j])->([i,j])`, or with a trailing dimension of the narrower type's pieces that stays whole."""
    b = RuleBuilder()
    rank = min(len(op.operands[0]), len(op.results[0]))
    dims = b.factors(op.operands[0][:rank])
    tail = [None]
    return b.rule(
        operands=[dims + tail * (len(op.operands[0]) - rank)],
        results=[dims + tail * (len(op.results[0]) - rank)],
        follows=True,
    )


def same_extents(op: OpShapes, first: Sequence[int], second: Sequence[int]) -> tuple[RuleBuilder, list[Any]]:
    """A builder, and for each dimension a factor where both shapes agree, None where they differ."""
    b = RuleBuilder()
    return b, [b.factor(n) if n == m else None for n, m in zip(first, second, strict=True)]


@register("pad")
def pad(op: OpShapes) -> Rule:
    """`([i,1],[])->([i,1])`: padded dimensions stay whole."""
    b = RuleBuilder()
    dims: list[Any] = [
        None if any(config) else b.factor(n)
        for n, config in zip(op.operands[0], op.params["padding_config"], strict=True)
    ]
    return b.rule(operands=[dims, []], results=[dims])


@register("rev")
def rev(op: OpShapes) -> Rule:
    """`([i,j])->([i,j]) need_replication={j}` for the reversed dimensions."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    return b.rule(
        operands=[dims],
        results=[dims],
        need_replication=[dims[int(d)] for d in op.params["dimensions"]],
        linear=True,
    )


@register("roll")
def roll(op: OpShapes) -> Rule:
    """`([i,j])->([i,j])`, the dimension that is rolled with a halo of the fewer elements that change ends."""
    b = RuleBuilder()
    dims, axis = b.factors(op.operands[0]), int(op.params["axis"])
    extent, forward = op.operands[0][axis], _moved(op.operands[0][axis], int(op.params["shift"]))
    before, after = max(forward, 0), max(-forward, 0)
    halo = Halo(factor=dims[axis], operand=0, dim=axis, extent=extent, before=before, after=after)
    return b.rule(operands=[dims], results=[dims], halos=(halo,))


def _moved(extent: int, shift: int) -> int:
    """How far elements go the shorter way around, negative towards the start."""
    return shift if shift <= extent - shift else shift - extent


@register_cut("roll")
def rolled_dimension(eqn: Any) -> int:
    """Rolls along a cut dimension send their edges themselves.

    XLA's partitioner finds the pattern where one dimension is rolled; a roll after another one it exchanges by
    all_to_alls of whole pieces (8 v5e and 8 H100, jax 0.10.2).
    """
    return int(eqn.params["axis"])


@register_sends("roll")
def roll_pieces(eqn: Any, ring: Ring) -> LocalFunction:
    """The piece's edge goes to the next device, or the one before; what comes from the other side takes its place."""
    axis, extent = int(eqn.params["axis"]), eqn.invars[0].aval.shape[int(eqn.params["axis"])]
    forward = _moved(extent, int(eqn.params["shift"]))

    def piece(x: Any) -> Any:
        if not forward:
            return x
        here, lax = x.shape[axis], jax.lax
        if forward > 0:
            edge, rest = lax.slice_in_dim(x, here - forward, here, axis=axis), (0, here - forward)
        else:
            edge, rest = lax.slice_in_dim(x, 0, -forward, axis=axis), (-forward, here)
        along = ring.devices if forward > 0 else ring.devices[::-1]
        come = lax.ppermute(edge, ring.axes, list(zip(along, along[1:] + along[:1], strict=True)))
        kept = lax.slice_in_dim(x, *rest, axis=axis)
        return lax.concatenate([come, kept] if forward > 0 else [kept, come], axis)

    return piece


@register("shift")
def shift(op: OpShapes) -> Rule:
    """`([i,j])->([i,j])`, the dimension that is moved along with a halo of the elements that change devices."""
    b = RuleBuilder()
    dims, axis, by = b.factors(op.operands[0]), int(op.params["axis"]), int(op.params["by"])
    extent = op.operands[0][axis]
    halo = Halo(factor=dims[axis], operand=0, dim=axis, extent=extent, before=max(by, 0), after=max(-by, 0))
    return b.rule(operands=[dims], results=[dims], halos=(halo,))


@register_cut("shift")
def shifted_dimension(eqn: Any) -> int:
    """Shifts along a cut dimension send their edges themselves: the pad and the slice that they are lowered to have
    dimensions that no device count divides."""
    return int(eqn.params["axis"])


@register_sends("shift")
def shift_pieces(eqn: Any, ring: Ring) -> LocalFunction:
    """The piece's edge goes to the next device, or the one before; what comes from the other side takes its place, at
    the end the constant."""
    axis, by = int(eqn.params["axis"]), int(eqn.params["by"])

    def piece(x: Any) -> Any:
        here, lax = x.shape[axis], jax.lax
        edge = lax.slice_in_dim(x, here - by, here, axis=axis) if by > 0 else lax.slice_in_dim(x, 0, -by, axis=axis)
        kept = lax.slice_in_dim(x, *((0, here - by) if by > 0 else (-by, here)), axis=axis)
        along = ring.devices if by > 0 else ring.devices[::-1]
        come = lax.ppermute(edge, ring.axes, list(itertools.pairwise(along)))
        fill = np.asarray(eqn.params["fill"]).astype(x.dtype)
        come = jax.numpy.where(lax.axis_index(ring.axes) == along[0], fill, come)
        return lax.concatenate([come, kept] if by > 0 else [kept, come], axis)

    return piece


def _along(op: OpShapes, axis: int) -> Rule:
    """All tensors have one shape but for `axis`, which stays whole."""
    b = RuleBuilder()
    shape = (op.operands or op.results)[0]
    dims: list[Any] = [None if d == axis else b.factor(n) for d, n in enumerate(shape)]
    return b.rule(operands=[dims] * len(op.operands), results=[dims] * len(op.results), linear=True)


@register("concatenate")
def concatenate(op: OpShapes) -> Rule:
    """`([i,1],[i,1])->([i,1])`."""
    return _along(op, int(op.params["dimension"]))


@register("split")
def split(op: OpShapes) -> Rule:
    """`([i,1])->([i,1],[i,1])`."""
    return _along(op, int(op.params["axis"]))


@register("stack", "unstack")
def stack(op: OpShapes) -> Rule:
    """`([i],[i])->([1,i])`, and the other way round for `unstack`: the new dimension stays whole."""
    b = RuleBuilder()
    stacking = op.primitive == "stack"
    apart, together = (op.operands, op.results) if stacking else (op.results, op.operands)
    axis = int(op.params["axis"])
    dims: list[Any] = b.factors(together[0][:axis] + together[0][axis + 1 :])
    many, one = [dims] * len(apart), [[*dims[:axis], None, *dims[axis:]]]
    return b.rule(operands=many if stacking else one, results=one if stacking else many, linear=True)


@register("tile")
def tile(op: OpShapes) -> Rule:
    """`([i,1])->([i,1])`: repeated dimensions stay whole."""
    b, dims = same_extents(op, op.operands[0], op.results[0])
    return b.rule(operands=[dims], results=[dims], linear=True)
