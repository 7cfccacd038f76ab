"""Which operation reads what: the partitioned program's operations, with the reshards between them seen through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .combined import users_of
from .mlir import Dims, Visit, axes_in, shape_of

_THROUGH = frozenset(
    {"sdy.all_gather", "sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute", "sdy.reduce_scatter",
     "sdy.all_reduce", "sdy.reshard", "sdy.sharding_constraint", "sdy.propagation_barrier"}
)  # fmt: skip
_SUMS = frozenset({"sdy.all_reduce", "sdy.reduce_scatter"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor at one operation.

    Attributes:
      number: of the value, before any reshard; the same number is the same value.
      shape: global.
      layout: as this operation makes or reads it.
      made: as its maker left it; of a result the same as `layout`.
      pending: mesh axes over which its maker left a pending sum.
    """

    number: int
    shape: tuple[int, ...]
    layout: Dims
    made: Dims
    pending: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """One operation: `scope` names it, `op` is the StableHLO operation; no reshard is a flow of its own."""

    scope: str
    op: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def flows_of(visits: Sequence[Visit]) -> tuple[Flow, ...]:
    """The operations among `visits`, those of a module whose reshards are explicit; in program order."""
    users = users_of(visits)
    layouts = {number: layout for v in visits for number, layout in zip(v.operands, v.operand_layouts, strict=True)}
    layouts |= {number: layout for v in visits for number, layout in zip(v.results, v.layouts, strict=True)}
    origin: dict[int, int] = {}
    for visit in visits:
        if visit.op.name in _THROUGH and visit.operands:
            origin[visit.results[0]] = origin.get(visit.operands[0], visit.operands[0])
    pending = {
        number: axes_in(str(reader.op.attributes[_axes_name(reader)]))
        for number in set(origin.values())
        for reader in users[number]
        if reader.op.name in _SUMS
    }

    def tensor(number: int, shape: tuple[int, ...], layout: Dims) -> Tensor:
        first = origin.get(number, number)
        return Tensor(
            number=first, shape=shape, layout=layout, made=layouts.get(first, layout), pending=pending.get(first, ())
        )

    return tuple(
        Flow(
            scope=visit.scope,
            op=visit.op.name.removeprefix("stablehlo."),
            operands=tuple(
                tensor(number, shape_of(value)[0], layout)
                for number, value, layout in zip(
                    visit.operands, visit.op.operands, visit.operand_layouts, strict=True
                )
            ),
            results=tuple(
                tensor(number, shape_of(value)[0], layout)
                for number, value, layout in zip(visit.results, visit.op.results, visit.layouts, strict=True)
            ),
        )
        for visit in visits
        if visit.op.name not in _THROUGH
    )


def _axes_name(visit: Visit) -> str:
    return "reduction_axes" if visit.op.name == "sdy.all_reduce" else "reduce_scatter_axes"
