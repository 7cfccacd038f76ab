"""Products as XLA has simplified them by the time it propagates shardings.

XLA for TPU and for GPU runs its algebraic simplifier first, XLA for CPU doesn't: a product that sums over nothing, or
over dimensions of extent 1, is a multiplication.  For TPU a product in which one operand has nothing but dimensions
that are summed over or shared, or of extent 1, as a vector has, is a multiplication and a sum.  Shardings go through
those earlier than through products, and in other orders.

Read off the modules that XLA propagates (`*.before_propagation.mlir`; some 140 products compiled for v5e and v6e, 60
for H100, f32, bf16 and integers, jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .._jax import ir

DOT = "stablehlo.dot_general"
_NUMBERS = re.compile(r"(\w+) = \[([\d, ]*)\]")
_WORTH_A_PRODUCT = 64
"""Extent from which on a dimension keeps a TPU product one that shares dimensions, or sums over several (63: a sum)."""


def listed_dimensions(numbers: Any) -> dict[str, list[int]]:
    """The dimensions that the attribute of a product lists, by name; names of which there are none may be left out."""
    return {name: [int(d) for d in re.findall(r"\d+", dims)] for name, dims in _NUMBERS.findall(str(numbers))}


def simplify(op: Any, platform: str) -> None:
    """Rewrite a `stablehlo.dot_general` as XLA does for "tpu", "cuda" or "rocm"; for "cpu" it stays as it is."""
    if platform not in ("tpu", "cuda", "rocm"):
        return
    said = listed_dimensions(op.attributes["dot_dimension_numbers"])
    lhs_batch, rhs_batch, lhs_summed, rhs_summed = (
        said.get(f"{side}_{kind}_dimensions", []) for kind in ("batching", "contracting") for side in ("lhs", "rhs")
    )
    lhs, rhs = (list(operand.type.shape) for operand in op.operands)
    lhs_free = [d for d in range(len(lhs)) if d not in (*lhs_batch, *lhs_summed)]
    rhs_free = [d for d in range(len(rhs)) if d not in (*rhs_batch, *rhs_summed)]
    over = [lhs[d] for d in lhs_summed]
    is_sum = max(over, default=1) > 1
    # of complex ones nothing is known
    if is_sum and (platform != "tpu" or str(op.results[0].type.element_type).startswith("complex")):
        return
    if is_sum and not _is_summed(lhs, rhs, [lhs[d] for d in lhs_free], [rhs[d] for d in rhs_free], over):
        return
    # multiplied in one space: what is shared, the left operand's own, what is summed over, the right operand's own
    space = [*(lhs[d] for d in (*lhs_batch, *lhs_free, *lhs_summed)), *(rhs[d] for d in rhs_free)]
    first = len(lhs_batch) + len(lhs_free)
    own = first + len(lhs_summed)
    at_left = {d: at for at, d in enumerate((*lhs_batch, *lhs_free, *lhs_summed))}
    places = (*range(len(rhs_batch)), *range(first, len(space)))
    at_right = dict(zip((*rhs_batch, *rhs_summed, *rhs_free), places, strict=True))
    made = _Made(op)
    sides = [
        made.spread(operand, [at[d] for d in range(len(at))], space)
        for operand, at in zip(op.operands, (at_left, at_right), strict=True)
    ]
    value = made.op("stablehlo.multiply", sides, space)
    shape = op.results[0].type.shape
    value = made.sum(value, range(first, own), shape) if is_sum else made.reshaped(value, shape)
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _is_summed(
    lhs: Sequence[int], rhs: Sequence[int], lhs_free: Sequence[int], rhs_free: Sequence[int], over: Sequence[int]
) -> bool:
    """Whether XLA for TPU multiplies and sums: by the extents of the operands, of their own dimensions, and of those
    that are summed over."""
    left, right, over = ([extent for extent in extents if extent > 1] for extents in (lhs_free, rhs_free, over))
    if left and right:
        return False
    outer = left or right
    vector = min(sum(extent > 1 for extent in shape) for shape in (lhs, rhs)) == 1
    if 1 in (*lhs, *rhs) or not outer or vector:
        return True
    return max(over) < _WORTH_A_PRODUCT or outer[0] < _WORTH_A_PRODUCT


class _Made:
    """What is made in place of a product, in front of it and by its name; elements have its result's type."""

    def __init__(self, op: Any) -> None:
        self._location, self._before = op.location, ir.InsertionPoint(op)
        self._element = op.results[0].type.element_type

    def op(
        self, name: str, operands: Sequence[Any], shape: Sequence[int], attributes: dict[str, Any] | None = None,
        regions: int = 0,
    ) -> Any:  # fmt: skip
        kind = ir.RankedTensorType.get(list(shape), self._element, loc=self._location)
        made = ir.Operation.create(
            name, results=[kind], operands=list(operands), attributes=attributes or {}, regions=regions,
            loc=self._location, ip=self._before,
        )  # fmt: skip
        return made.results[0]

    def reshaped(self, value: Any, shape: Sequence[int]) -> Any:
        return value if list(value.type.shape) == list(shape) else self.op("stablehlo.reshape", [value], shape)

    def spread(self, value: Any, dims: Sequence[int], space: Sequence[int]) -> Any:
        """`value`, whose dimensions are `dims` of `space`, all over that; what that adds none but extents of 1 to is
        reshaped."""
        if value.type.element_type != self._element:
            value = self.op("stablehlo.convert", [value], value.type.shape)
        added = [extent for d, extent in enumerate(space) if d not in dims]
        if list(dims) == sorted(dims) and max(added, default=1) == 1:
            return self.reshaped(value, space)
        attributes = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(list(dims))}
        return self.op("stablehlo.broadcast_in_dim", [value], space, attributes)

    def sum(self, value: Any, dims: Sequence[int], shape: Sequence[int]) -> Any:
        scalar = ir.RankedTensorType.get([], self._element, loc=self._location)
        zero = "0.0" if str(self._element).startswith(("f", "bf")) else "0"
        start = self.op("stablehlo.constant", [], (), {"value": ir.Attribute.parse(f"dense<{zero}> : {scalar}")})
        total = self.op(
            "stablehlo.reduce", [value, start], shape, {"dimensions": ir.DenseI64ArrayAttr.get(list(dims))}, regions=1
        )
        block = total.owner.regions[0].blocks.append(scalar, scalar, arg_locs=[self._location] * 2)
        with ir.InsertionPoint(block), self._location:
            added = ir.Operation.create("stablehlo.add", results=[scalar], operands=list(block.arguments))
            ir.Operation.create("stablehlo.return", operands=[added.results[0]])
        return total
