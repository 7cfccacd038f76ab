"""What is computed twice from the same tensors, which XLA for TPU merges before it propagates shardings.

There is one operation then, in one layout, which propagation takes on to whatever reads either: features of positions,
that all layers of a Hyena put together, were cut for one of them and so for all, and what the others made of them
gathered (eight v5e, 10 % of what the step sent; jax 0.10.2, libtpu 0.0.42.1).  Constraints are merged like any other
operation.  XLA for GPU and for CPU merges nothing so early.
"""

from __future__ import annotations

from typing import Any

from .._jax import ir

_APART = frozenset(
    f"stablehlo.{name}"
    for name in ("optimization_barrier", "custom_call", "rng", "rng_bit_generator", "return")
)
SAME = "stablehlo.maximum"
"""What stands, of one value twice, for an operation that computes what another does."""
_KEPT = frozenset({"stablehlo.constant", "stablehlo.iota"})
"""What costs nothing twice, and shares no layout."""


def merge_equal(block: Any) -> None:
    """Let every operation of a block, and of those inside, that computes what one before it does read its result.

    It stays, as the larger of that result and itself, by its own name: whoever reads it may have it as the plan lays
    it, and is found by that name.
    """
    known: dict[tuple[Any, ...], Any] = {}
    stands_for: dict[Any, Any] = {}
    for view in list(block.operations):
        op = view.operation
        if len(op.regions):
            for region in op.regions:
                for inner in region.blocks:
                    merge_equal(inner)
            continue
        if op.name in _APART or len(op.results) != 1:
            continue
        result, kind = op.results[0], str(op.results[0].type)
        if not kind.startswith("tensor<"):  # a token: there is no larger one
            continue
        if op.name == "stablehlo.constant" and "complex" in kind:  # which the bindings can't read
            continue
        said = [*op.attributes.items()]  # the bindings make equal attributes one
        read = [stands_for.get(operand, operand) for operand in op.operands]
        first = known.setdefault((op.name, result.type, *read, *said), result)
        if first == result:
            continue
        if op.name in _KEPT:
            stands_for[result] = first
            continue
        before = ir.InsertionPoint(op)
        same = ir.Operation.create(
            SAME, results=[result.type], operands=[first, first], loc=op.location, ip=before
        ).results[0]
        stands_for[same] = first
        result.replace_all_uses_with(same)
        op.erase()
