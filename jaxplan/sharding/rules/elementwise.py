"""Elementwise primitives: every dimension passes through, rank-0 operands are whole on every device."""

from __future__ import annotations

import math

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import register, replicated

_LINEAR = ("add", "add_any", "sub", "neg", "copy", "stop_gradient", "conj", "real", "imag")

_OTHERS = (
    "abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "cbrt", "ceil", "clamp", "clz", "complex", "convert_element_type", "cos", "cosh", "digamma", "div",
    "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "nextafter", "not", "one_minus_square", "or",
    "polygamma", "polynomial", "population_count", "pow", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
    "sqrt", "square", "tan", "tanh", "threefry2x32", "xor", "zeta",
)  # fmt: skip


ELEMENTWISE = frozenset((*_LINEAR, *_OTHERS))
"""Names of primitives whose results are made element by element."""


@register(*ELEMENTWISE)
def elementwise(op: OpShapes) -> Rule:
    """`([i,j],[i,j],[])->([i,j])`; one FLOP a result element, exp and log too (bytes decide their time)."""
    b = RuleBuilder()
    dims = b.factors(op.results[0])
    # `x + 1` is not linear in x alone: each device would add the 1 to its part of the sum.
    alike = all(shape == op.results[0] for shape in op.operands)
    return b.rule(
        # rank 0 (a scalar literal) and extent 1 are repeated: whole on every device
        operands=[
            [f if n == m else None for f, n, m in zip(dims, shape, op.results[0], strict=bool(shape))]
            for shape in op.operands
        ],
        results=[dims for _ in op.results],
        follows=True,
        linear=op.primitive in _LINEAR and alike,
        flops=float(math.prod(op.results[0])) * len(op.results),
    )


@register("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta")
def iterated(op: OpShapes) -> Rule:
    """Everything whole: a loop runs until the whole tensor has converged, so every iteration would talk."""
    return replicated(op)
