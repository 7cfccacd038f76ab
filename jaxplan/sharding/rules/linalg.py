"""Decompositions, solves and Fourier transforms: batch dimensions pass through, each matrix stays whole."""

from __future__ import annotations

import math
from typing import Any

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import register

_CORE_RANK = {
    "cholesky": 2,
    "cholesky_update": 2,
    "eig": 2,
    "eigh": 2,
    "geqp3": 2,
    "geqrf": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "ormqr": 2,
    "qr": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}
"""How many trailing dimensions of the first operand are one matrix (or vector)."""


@register(*_CORE_RANK)
def decomposition(op: OpShapes) -> Rule:
    """`([b,1,1])->([b,1],[b,1,1])`; FLOPs are the textbook order, n * n * m for each matrix."""
    core = _CORE_RANK[op.primitive]
    shape = op.operands[0]
    batch = len(shape) - core
    b = RuleBuilder()
    dims = b.factors(shape[:batch])

    def batched(tensor: tuple[int, ...]) -> list[Any]:
        return dims + [None] * (len(tensor) - batch)

    return b.rule(
        operands=[batched(s) for s in op.operands],
        results=[batched(s) for s in op.results],
        flops=float(math.prod(shape)) * shape[-1],
    )


@register("fft")
def fft(op: OpShapes) -> Rule:
    """`([b,1])->([b,1])`: transformed dimensions stay whole; 5 n log2 n FLOPs, as FFTW's benchmarks count."""
    transformed = len(op.params["fft_lengths"])
    points = math.prod(int(n) for n in op.params["fft_lengths"])
    batch = len(op.operands[0]) - transformed
    b = RuleBuilder()
    dims: list[Any] = [*b.factors(op.operands[0][:batch]), *[None] * transformed]
    transforms = math.prod(op.operands[0][:batch])
    return b.rule(
        operands=[dims], results=[dims], flops=5.0 * transforms * points * math.log2(max(points, 2))
    )
