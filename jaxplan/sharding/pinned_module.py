"""Pins written into a module that XLA has imported, where lowering the step with them would write them.

Whoever asks the partitioner again about the same step with a few more pins need not have it traced, lowered and
imported again.  Where that would make another module than the pins written in, nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._jax import ir
from .contested import written_dims
from .imported import nested, scope_of
from .mlir import shape_of
from .spec import Layout


def with_pins(
    imported: Any,
    pins: Mapping[int, Sequence[tuple[tuple[int, ...], Layout | None]]],
    number_of: Callable[[str], int],
    around: Callable[[str], str],
) -> Any | None:
    """A copy of an `imported_copy` in which results are pinned; None where the step has to be lowered for that.

    Args:
      pins: by the number of an operation the global shape of each of its results, and its layout where it is pinned.
      number_of, around: the number of the operation that a scope names, and the scope around that.
    """
    copy = imported.operation.clone().opview
    main = next(op.operation for op in copy.body.operations if op.operation.name == "func.func")
    mesh = next((op.operation for op in copy.body.operations if op.operation.name == "sdy.mesh"), None)
    made: dict[int, list[Any]] = {}
    for op in nested(main):
        if op.name == "stablehlo.while":  # what a loop carries is imported by what is pinned outside
            return None
        number = number_of(scope_of(op.location))
        if number in pins:
            made.setdefault(number, []).append(op)
        if op.name == "sdy.manual_computation":  # a `shard_map` has shapes of its own
            inside = {number, *(number_of(scope_of(inner.location)) for inner in nested(op))}
            if not inside.isdisjoint(pins):
                return None
    makers = {number: _makers(made.get(number, []), [shape for shape, _ in asked]) for number, asked in pins.items()}
    if mesh is None or not all(makers.values()):
        return None
    name = mesh.attributes["sym_name"].value
    with copy.context:
        for number, ops in makers.items():
            after = ops[-1]
            for op, (_, layout) in zip(ops, pins[number], strict=True):
                if layout is None:
                    continue
                sharding = f"#sdy.sharding<@{name}, {written_dims(layout.dims)}>"
                constraint = ir.Operation.create(
                    "sdy.sharding_constraint",
                    results=[op.results[0].type],
                    operands=[op.results[0]],
                    attributes={"sharding": ir.Attribute.parse(sharding)},
                    loc=ir.Location.name(f"{around(scope_of(op.location))}sharding_constraint"),
                    ip=ir.InsertionPoint(op),
                )
                constraint.move_after(after)
                after = constraint
                op.results[0].replace_all_uses_except(constraint.results[0], constraint)
    return copy


def _makers(ops: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Which of the operations that an equation is made of make its results, in order; none where that can't be told.

    The last of its shape makes an equation's only result; of several results each has to have an operation of its own,
    and there may be no other, as where a tensor is split.
    """
    if len(shapes) == 1:
        ops = [op for op in ops if any(shape_of(result)[0] == shapes[0] for result in op.results)][-1:]
    if len(ops) != len(shapes) or any(len(op.results) != 1 for op in ops):
        return []
    return list(ops) if all(shape_of(op.results[0])[0] == s for op, s in zip(ops, shapes, strict=True)) else []
