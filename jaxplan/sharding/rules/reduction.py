"""Reductions, cumulative operations, windows and sorting."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ..halo import Halo, Window
from ..merge import Merge, merged_arg, merged_cumulative, merged_top_k, packs
from ..rule import OpShapes, Rule, RuleBuilder
from .registry import LocalFunction, Ring, register, register_cut, register_sends

_REDUCERS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}


@register(*_REDUCERS)
def reduce_axes(op: OpShapes) -> Rule:
    """`([i,j])->([i]) reduction={j}`; one FLOP per operand element."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    axes = {int(a) for a in op.params["axes"]}
    return b.rule(
        operands=[dims],
        results=[[f for d, f in enumerate(dims) if d not in axes]],
        reduction=[dims[d] for d in axes],
        reducer=_REDUCERS[op.primitive],
        linear=op.primitive == "reduce_sum",
        flops=float(math.prod(op.operands[0])),
    )


@register("argmax", "argmin")
def arg_reduce(op: OpShapes) -> Rule:
    """`([i,j])->([i])`; where `j` is cut every device hands its best and that one's place to all (see `merge`)."""
    b = RuleBuilder()
    dims, along = b.factors(op.operands[0]), _arg_axis(op.params)
    value, place = op.operand_dtypes[0], op.result_dtypes[0]
    words = ((0, 8 / np.dtype(place).itemsize),)
    apart = ((0, np.dtype(value).itemsize / np.dtype(place).itemsize), (0, 1.0))
    return b.rule(
        operands=[dims],
        results=[[f for d, f in enumerate(dims) if d != along]],
        merges=(Merge(factor=dims[along], results=words if packs(value, place) else apart),),
        flops=float(math.prod(op.operands[0])),
    )


def _arg_axis(params: Mapping[str, Any]) -> int:
    (axis,) = params["axes"]
    return int(axis)


def _arg_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """The best of every piece and its place, then the best of those."""
    local = functools.partial(eqn.primitive.bind, index_dtype=eqn.params["index_dtype"])
    best = jax.numpy.max if eqn.primitive.name == "argmax" else jax.numpy.min
    return merged_arg(local, best, _arg_axis(eqn.params), ring.axes, ring.devices)


for _primitive in ("argmax", "argmin"):
    register_cut(_primitive)(lambda eqn: _arg_axis(eqn.params))
    register_sends(_primitive)(_arg_piece)


@register("reduce_xor")
def reduce_xor(op: OpShapes) -> Rule:
    """`([i,j])->([i]) need_replication={j}`: the CPU backend refuses an all_reduce by xor."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    axes = {int(a) for a in op.params["axes"]}
    return b.rule(
        operands=[dims],
        results=[[f for d, f in enumerate(dims) if d not in axes]],
        need_replication=[dims[d] for d in axes],
        flops=float(math.prod(op.operands[0])),
    )


@register("reduce")
def reduce_any(op: OpShapes) -> Rule:
    """`([i,j],[])->([i]) need_replication={j}`: a reduction by any function, of any number of operands."""
    count = len(op.operands) // 2
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    axes = {int(a) for a in op.params["dimensions"]}
    result = [f for d, f in enumerate(dims) if d not in axes]
    return b.rule(
        operands=[dims] * count + [[]] * count,
        results=[result] * count,
        need_replication=[dims[d] for d in axes],
        flops=float(math.prod(op.operands[0])) * count,
    )


_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


@register(*_CUMULATIVE)
def cumulative(op: OpShapes) -> Rule:
    """`([i,j])->([i,j])`; along `axis` every device hands its last result to all (see `merge`)."""
    b = RuleBuilder()
    dims, axis = b.factors(op.operands[0]), int(op.params["axis"])
    return b.rule(
        operands=[dims],
        results=[dims],
        merges=(Merge(factor=dims[axis], results=((0, 1 / max(op.operands[0][axis], 1)),)),),
        flops=float(math.prod(op.operands[0])),
    )


def _cumulative_axis(eqn: Any) -> int:
    return int(eqn.params["axis"])


def _cumulative_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """A piece by itself, then what came before it."""
    name, bind = eqn.primitive.name, functools.partial(eqn.primitive.bind, **eqn.params)
    return merged_cumulative(name, bind, _cumulative_axis(eqn), bool(eqn.params["reverse"]), ring.axes, ring.devices)


for _primitive in _CUMULATIVE:
    register_cut(_primitive)(_cumulative_axis)
    register_sends(_primitive)(_cumulative_piece)


@register("sort")
def sort(op: OpShapes) -> Rule:
    """`([i,j],[i,j])->([i,j],[i,j]) need_replication={j}`; n log2 n comparisons each."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    along = int(op.params["dimension"])
    compares = math.log2(max(op.operands[0][along], 2))
    return b.rule(
        operands=[dims] * len(op.operands),
        results=[dims] * len(op.results),
        need_replication=[dims[along]],
        flops=float(math.prod(op.operands[0])) * compares,
    )


@register("top_k")
def top_k(op: OpShapes) -> Rule:
    """`([i,j])->([i,1],[i,1])`: the k best stay whole; where `j` is cut every device hands its own to all (`merge`)."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    along = int(op.params.get("axis", -1)) % len(dims)
    kept: list[Any] = [None if d == along else f for d, f in enumerate(dims)]
    return b.rule(
        operands=[dims],
        results=[kept, kept],
        merges=(Merge(factor=dims[along], results=((0, 1.0), (1, 1.0))),),
        flops=float(math.prod(op.operands[0])),
    )


def _top_k_axis(eqn: Any) -> int:
    return int(eqn.params.get("axis", -1)) % len(eqn.invars[0].aval.shape)


register_cut("top_k")(_top_k_axis)


@register_sends("top_k")
def _top_k_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """The candidates of every piece, then the best of those."""
    local = functools.partial(eqn.primitive.bind, **{name: v for name, v in eqn.params.items() if name != "k"})
    return merged_top_k(local, int(eqn.params["k"]), _top_k_axis(eqn), ring.axes, ring.devices)


@register("approx_top_k")
def approx_top_k(op: OpShapes) -> Rule:
    """`([i,j])->([i,1],[i,1]) need_replication={j}`: what is found depends on how many there are."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    along = int(op.params["reduction_dimension"]) % len(dims)
    kept: list[Any] = [None if d == along else f for d, f in enumerate(dims)]
    return b.rule(
        operands=[dims],
        results=[kept, kept],
        need_replication=[dims[along]],
        flops=float(math.prod(op.operands[0])),
    )


def _windows(op: OpShapes) -> list[Window]:
    """The window along every dimension."""
    p, rank = op.params, len(op.params["window_dimensions"])
    ones = (1,) * rank
    base, dilation = p.get("base_dilation") or ones, p.get("window_dilation") or ones
    return [
        Window(size=size, stride=stride, low=low, high=high, base=b, dilation=d)
        for size, stride, (low, high), b, d in zip(
            p["window_dimensions"], p["window_strides"], p["padding"], base, dilation, strict=True
        )
    ]


def _pooled(b: RuleBuilder, op: OpShapes, apart: Sequence[int], pooled: Sequence[int]) -> tuple[list[Any], Halo | None]:
    """A factor for every dimension that the window leaves alone, and one with a halo for the longest of the others."""
    dims: list[Any] = []
    halo = None
    windows = _windows(op)
    longest = max((n for n, w in zip(apart, windows, strict=True) if not w.is_point), default=0)
    for d, (window, extent, results) in enumerate(zip(windows, apart, pooled, strict=True)):
        read = window.moved_along(extent, results)
        if window.is_point:
            dims.append(b.factor(extent))
        elif halo is None and extent == longest and read is not None:
            dims.append(b.factor(math.gcd(extent, results)))
            halo = Halo(factor=dims[-1], operand=0, dim=d, extent=extent, before=read[0], after=read[1])
        else:
            dims.append(None)
    return dims, halo


@register("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def reduce_window(op: OpShapes) -> Rule:
    """`([i,j])->([i,j])`: dimensions that the window leaves alone pass through, as does the longest of the others, with
    a halo, where pieces line up (see `halo`).  What is left stays whole.
    """
    count = len(op.results)
    b = RuleBuilder()
    dims, halo = _pooled(b, op, op.operands[0], op.results[0])
    return b.rule(
        operands=[dims] * count + [[]] * (len(op.operands) - count),
        results=[dims] * count,
        flops=float(math.prod(op.results[0]) * math.prod(op.params["window_dimensions"])) * count,
        halos=tuple(replace(halo, operand=i) for i in range(count)) if halo else (),
    )


@register("select_and_scatter_add", "select_and_gather_add")
def select_and_move(op: OpShapes) -> Rule:
    """`([i,1],[i,1])->([i,1])`: max pooling's gradient and tangent; the window's dimensions stay whole."""
    whole = op.operands[1]  # the pooled tensor; the other operand and the result have its rank
    b = RuleBuilder()
    dims: list[Any] = [b.factor(n) if w.is_point else None for n, w in zip(whole, _windows(op), strict=True)]
    return b.rule(
        operands=[dims, dims],
        results=[dims],
        flops=float(math.prod(whole) * math.prod(op.params["window_dimensions"])),
    )
