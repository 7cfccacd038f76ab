"""Pins written into a module that XLA has imported, where lowering the step with them would write them.

Whoever asks the partitioner again about the same step with a few more pins need not have it traced, lowered and
imported again.  Where that would make another module than the pins written in, nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._jax import ir
from .contested import written_dims
from .imported import nested, scope_of
from .mlir import shape_of
from .spec import Layout

_OTHERWISE = frozenset({"stablehlo.while", "sdy.manual_computation"})
"""What a loop carries is imported by what is pinned outside; a `shard_map` has shapes of its own."""


def with_pins(
    imported: Any,
    pins: Mapping[int, tuple[tuple[int, ...], Layout]],
    number_of: Callable[[str], int],
    around: Callable[[str], str],
) -> Any | None:
    """A copy of an `imported_copy` in which results are pinned; None where the step has to be lowered for that.

    Args:
      pins: by the number of an operation of one result that result's global shape, and its layout.
      number_of, around: the number of the operation that a scope names, and the scope around that.
    """
    copy = imported.operation.clone().opview
    main = next(op.operation for op in copy.body.operations if op.operation.name == "func.func")
    mesh = next((op.operation for op in copy.body.operations if op.operation.name == "sdy.mesh"), None)
    last: dict[int, Any] = {}
    for op in nested(main):
        if op.name in _OTHERWISE:
            return None
        number = number_of(scope_of(op.location))
        if number in pins and any(shape_of(result)[0] == pins[number][0] for result in op.results):
            last[number] = op
    if mesh is None or len(last) < len(pins) or any(len(op.results) != 1 for op in last.values()):
        return None
    name = mesh.attributes["sym_name"].value
    with copy.context:
        for number, op in last.items():
            sharding = f"#sdy.sharding<@{name}, {written_dims(pins[number][1].dims)}>"
            constraint = ir.Operation.create(
                "sdy.sharding_constraint",
                results=[op.results[0].type],
                operands=[op.results[0]],
                attributes={"sharding": ir.Attribute.parse(sharding)},
                loc=ir.Location.name(f"{around(scope_of(op.location))}sharding_constraint"),
                ip=ir.InsertionPoint(op),
            )
            constraint.move_after(op)
            op.results[0].replace_all_uses_except(constraint.results[0], constraint)
    return copy
