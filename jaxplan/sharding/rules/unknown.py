"""Primitives that nobody gave a rule: what the partitioner itself proves of them, else everything whole.

A primitive of a third-party library is lowered by itself, its tensors of one shape cut alike.  Where the partitioner
carries the cut from operands to results without any communication, and every operation on the way does the same to
each piece of a cut dimension, the dimension passes through.  What is lowered to anything else (kernels, callbacks,
slices, loops, sorts) is not looked into.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..._jax import parse_module
from ..imported import nested
from ..partitioner import partition
from ..rule import OpShapes, Rule, RuleBuilder

_SAME_TO_EACH_PIECE = frozenset((
    "abs", "add", "and", "atan2", "bitcast_convert", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "compare", "complex", "constant", "convert", "cosine", "count_leading_zeros", "divide", "dot_general",
    "exponential", "exponential_minus_one", "floor", "imag", "iota", "is_finite", "log", "log_plus_one",
    "logistic", "maximum", "minimum", "multiply", "negate", "not", "optimization_barrier", "or", "popcnt",
    "power", "real", "reduce", "reduce_precision", "remainder", "reshape", "round_nearest_afz",
    "round_nearest_even", "rsqrt", "select", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sine", "sqrt", "subtract", "tan", "tanh", "transpose", "xor",
))  # fmt: skip
"""StableHLO operations that need nothing of the neighbouring pieces: a cut that is carried through them without a
collective is carried exactly.  The others exchange the edges of pieces, which no collective shows, or are opaque."""

_AROUND = frozenset({"builtin.module", "func.func", "func.call", "func.return", "sdy.mesh", "stablehlo.return"})


def proved_rule(op: OpShapes) -> Rule | None:
    """`([i,j],[i,j],[])->([i,j])` with the dimensions whole that could not be proved; None if none could."""
    shape = op.results[0] if op.results else ()
    if op.equation is None or not shape or shape not in op.operands or any(op.equation.effects):
        return None
    safe = [d for d, extent in enumerate(shape) if extent > 1 and _passes(op, shape, d)]
    if not safe:
        return None
    b = RuleBuilder()
    dims: list[Any] = [b.factor(extent) if d in safe else None for d, extent in enumerate(shape)]

    def factors(tensor: tuple[int, ...]) -> list[Any]:
        return dims if tensor == shape else [None] * len(tensor)

    size = 1.0
    for extent in shape:
        size *= extent
    return b.rule(
        operands=[factors(tensor) for tensor in op.operands],
        results=[factors(tensor) for tensor in op.results],
        flops=size,
    )


def _passes(op: OpShapes, shape: tuple[int, ...], d: int) -> bool:
    """Whether the partitioner carries a cut of dimension `d` through, exactly and in silence."""
    pieces = next(n for n in range(2, shape[d] + 1) if shape[d] % n == 0)
    mesh = AbstractMesh((pieces,), ("cut",), axis_types=(AxisType.Auto,))
    primitive = op.equation.primitive
    avals = [v.aval for v in op.equation.invars]

    def placed(tensor: tuple[int, ...]) -> NamedSharding:
        spec = PartitionSpec(*[None] * d, "cut") if tensor == shape else PartitionSpec()
        return NamedSharding(mesh, spec)

    def run(*operands: Any) -> Any:
        made = primitive.bind(*operands, **primitive.get_bind_params(op.params))
        return list(made) if primitive.multiple_results else [made]

    jitted = jax.jit(
        run,
        in_shardings=tuple(map(placed, op.operands)),
        out_shardings=list(map(placed, op.results)),
    )
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    try:
        lowered = jitted.trace(*shapes).lower(lowering_platforms=(jax.default_backend(),))
        text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=True)
        names = {inner.name for inner in nested(parse_module(text).operation)} - _AROUND
        if not all(name.removeprefix("stablehlo.") in _SAME_TO_EACH_PIECE for name in names):
            return False
        return not partition(text).collectives
    except Exception:  # another library's lowering may fail in any way by itself; then nothing is proved
        return False
