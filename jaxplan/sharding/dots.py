"""Products as XLA has simplified them by the time it propagates shardings.

XLA for TPU and for GPU runs its algebraic simplifier first, XLA for CPU doesn't: dimensions of extent 1 are reshaped
away, and a product that sums over nothing is a multiplication.  For TPU a product in which one operand has nothing but
dimensions that are summed over or shared, as a vector has, is a multiplication and a sum.  Shardings go through those
earlier than through products, and in other orders.

Read off the modules that XLA propagates (`*.before_propagation.mlir`; some 140 products compiled for v5e and v6e, 60
for H100, f32, bf16 and integers, jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jax import ir

DOT = "stablehlo.dot_general"
_NUMBERS = re.compile(r"(\w+) = \[([\d, ]*)\]")
_WORTH_A_PRODUCT = 64
"""Extent from which on a dimension keeps a TPU product one that shares dimensions, or sums over several (63: a sum)."""


class _Numbers(NamedTuple):
    """What a product does with the dimensions of its operands, each a list of their positions."""

    lhs_batch: list[int]
    rhs_batch: list[int]
    lhs_summed: list[int]
    rhs_summed: list[int]


def simplify(op: Any, platform: str) -> None:
    """Rewrite a `stablehlo.dot_general` as XLA does for "tpu", "cuda" or "rocm"; for "cpu" it stays as it is."""
    if platform not in ("tpu", "cuda", "rocm"):
        return
    text = str(op.attributes["dot_dimension_numbers"])
    said = {name: [int(d) for d in re.findall(r"\d+", dims)] for name, dims in _NUMBERS.findall(text)}
    numbers = _Numbers(
        *(said.get(f"{side}_{kind}_dimensions", []) for kind in ("batching", "contracting") for side in ("lhs", "rhs"))
    )
    operands = list(op.operands)
    lhs, rhs = (list(operand.type.shape) for operand in operands)
    kept = [[d for d, extent in enumerate(shape) if extent != 1] for shape in (lhs, rhs)]
    removed = len(kept[0]) < len(lhs) or len(kept[1]) < len(rhs)
    small = _Numbers(
        *(
            [kept[side].index(d) for d in dims if d in kept[side]]
            for dims, side in zip(numbers, (0, 1, 0, 1), strict=True)
        )
    )
    lhs, rhs = ([shape[d] for d in dims] for shape, dims in zip((lhs, rhs), kept, strict=True))
    multiplied = not small.lhs_summed
    real = not str(op.results[0].type.element_type).startswith("complex")  # of complex ones nothing is known
    summed = not multiplied and real and platform == "tpu" and _is_summed(lhs, rhs, small, removed)
    if not (removed or multiplied or summed):
        return
    made = _Made(op)
    lhs_value, rhs_value = made.reshaped(operands[0], lhs), made.reshaped(operands[1], rhs)
    if multiplied:
        value = _multiplied(made, (lhs_value, lhs), (rhs_value, rhs), small)
    elif summed:
        value = _summed(made, (lhs_value, lhs), (rhs_value, rhs), small)
    else:
        value = made.op(DOT, [lhs_value, rhs_value], _result(lhs, rhs, small), _attributes(op, small))
    op.results[0].replace_all_uses_with(made.reshaped(value, list(op.results[0].type.shape)))
    op.erase()


def _free(shape: Sequence[int], *others: Sequence[int]) -> list[int]:
    return [d for d in range(len(shape)) if not any(d in dims for dims in others)]


def _result(lhs: Sequence[int], rhs: Sequence[int], numbers: _Numbers) -> list[int]:
    return [
        *(lhs[d] for d in numbers.lhs_batch),
        *(lhs[d] for d in _free(lhs, numbers.lhs_batch, numbers.lhs_summed)),
        *(rhs[d] for d in _free(rhs, numbers.rhs_batch, numbers.rhs_summed)),
    ]


def _is_summed(lhs: Sequence[int], rhs: Sequence[int], numbers: _Numbers, removed: bool) -> bool:
    """Whether XLA for TPU multiplies and sums; `removed`: there were dimensions of extent 1."""
    free = [lhs[d] for d in _free(lhs, numbers.lhs_batch, numbers.lhs_summed)]
    others = [rhs[d] for d in _free(rhs, numbers.rhs_batch, numbers.rhs_summed)]
    if free and others:
        return False
    outer, contracted = free or others, [lhs[d] for d in numbers.lhs_summed]
    if removed or not outer or min(len(lhs), len(rhs)) == 1:
        return True
    return max(contracted) < _WORTH_A_PRODUCT or outer[0] < _WORTH_A_PRODUCT


def _multiplied(made: _Made, lhs: tuple[Any, list[int]], rhs: tuple[Any, list[int]], numbers: _Numbers) -> Any:
    shape = _result(lhs[1], rhs[1], numbers)
    shared = len(numbers.lhs_batch)
    between = shared + len(lhs[1]) - len(numbers.lhs_batch)
    sides = []
    for (value, extents), batch, first in ((lhs, numbers.lhs_batch, shared), (rhs, numbers.rhs_batch, between)):
        at = dict(zip((*batch, *_free(extents, batch)), (*range(shared), *range(first, len(shape))), strict=False))
        sides.append(made.broadcast(value, [at[d] for d in range(len(extents))], shape))
    return made.op("stablehlo.multiply", sides, shape)


def _summed(made: _Made, lhs: tuple[Any, list[int]], rhs: tuple[Any, list[int]], numbers: _Numbers) -> Any:
    shape = _result(lhs[1], rhs[1], numbers)
    sides = [(*lhs, numbers.lhs_batch, numbers.lhs_summed), (*rhs, numbers.rhs_batch, numbers.rhs_summed)]
    if _free(lhs[1], numbers.lhs_batch, numbers.lhs_summed):
        sides.reverse()
    (vector, extents, batch, over), (matrix, whole, whole_batch, whole_over) = sides
    at = dict(zip((*batch, *over), (*whole_batch, *whole_over), strict=True))
    repeated = made.broadcast(vector, [at[d] for d in range(len(extents))], whole)
    product = made.op("stablehlo.multiply", [repeated, made.converted(matrix)], whole)
    left = [d for d in range(len(whole)) if d not in whole_over]
    value = made.sum(product, whole_over, [whole[d] for d in left])
    asked = [*whole_batch, *_free(whole, whole_batch, whole_over)]
    if asked == left:
        return value
    turn = [left.index(d) for d in asked]
    return made.op("stablehlo.transpose", [value], shape, {"permutation": ir.DenseI64ArrayAttr.get(turn)})


def _attributes(op: Any, numbers: _Numbers) -> dict[str, Any]:
    names = ("lhs_batching", "rhs_batching", "lhs_contracting", "rhs_contracting")
    said = ", ".join(f"{name}_dimensions = {list(dims)}" for name, dims in zip(names, numbers, strict=True) if dims)
    kept = {name: op.attributes[name] for name in ("precision_config", "algorithm") if name in op.attributes}
    return kept | {"dot_dimension_numbers": ir.Attribute.parse(f"#stablehlo.dot<{said}>")}


class _Made:
    """What is made in place of a product, in front of it and by its name; elements have its result's type."""

    def __init__(self, op: Any) -> None:
        self._location, self._before = op.location, ir.InsertionPoint(op)
        self._element = op.results[0].type.element_type

    def op(
        self, name: str, operands: Sequence[Any], shape: Sequence[int], attributes: dict[str, Any] | None = None,
        element: Any = None, regions: int = 0,
    ) -> Any:  # fmt: skip
        kind = ir.RankedTensorType.get(list(shape), element or self._element, loc=self._location)
        made = ir.Operation.create(
            name, results=[kind], operands=list(operands), attributes=attributes or {}, regions=regions,
            loc=self._location, ip=self._before,
        )  # fmt: skip
        return made.results[0]

    def reshaped(self, value: Any, shape: Sequence[int]) -> Any:
        if list(value.type.shape) == list(shape):
            return value
        assert math.prod(value.type.shape) == math.prod(shape)
        return self.op("stablehlo.reshape", [value], shape, element=value.type.element_type)

    def converted(self, value: Any) -> Any:
        same = value.type.element_type == self._element
        return value if same else self.op("stablehlo.convert", [value], value.type.shape)

    def broadcast(self, value: Any, dims: Sequence[int], shape: Sequence[int]) -> Any:
        value = self.converted(value)
        if list(value.type.shape) == list(shape) and list(dims) == list(range(len(shape))):
            return value
        attributes = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(list(dims))}
        return self.op("stablehlo.broadcast_in_dim", [value], shape, attributes)

    def sum(self, value: Any, dims: Sequence[int], shape: Sequence[int]) -> Any:
        scalar = ir.RankedTensorType.get([], self._element, loc=self._location)
        zero = "0.0" if str(self._element).startswith(("f", "bf")) else "0"
        start = self.op("stablehlo.constant", [], (), {"value": ir.Attribute.parse(f"dense<{zero}> : {scalar}")})
        total = self.op(
            "stablehlo.reduce", [value, start], shape, {"dimensions": ir.DenseI64ArrayAttr.get(sorted(dims))}, regions=1
        )
        block = total.owner.regions[0].blocks.append(scalar, scalar, arg_locs=[self._location] * 2)
        with ir.InsertionPoint(block), self._location:
            added = ir.Operation.create("stablehlo.add", results=[scalar], operands=list(block.arguments))
            ir.Operation.create("stablehlo.return", operands=[added.results[0]])
        return total
