"""Settles contractions whose operands and result claim one mesh axis for different factors, as XLA does.

Propagation can leave a `dot_general` or a `convolution` whose operands and result cannot all keep their
shardings: the weight and the batch of an FSDP layer lie on the same axis. Shardy's explicit-reshards pass
then takes the cheapest way in its own estimate; XLA's SPMD partitioner, which compiles the program, follows
two fixed rules (checked against compiled CPU and TPU modules in tests/sharding/test_partitioner.py):

1. an axis that cuts a reduction factor in every operand stays there: the result is a pending sum over it,
   reduced, and only then brought to the layout that was asked for;
2. else the result's layout decides: an operand that has the axis elsewhere is resharded to agree with it;
3. an axis that cuts a reduction factor in one operand alone, and the result not at all, is gathered there,
   unless other axes are in play too and reducing the result would move less.

The reshards are written into the module, so that the pass has nothing left to decide there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .._jax import ir, run_passes
from .choices import CHOICE
from .imported import nested
from .mlir import Dims, axis_size, layouts_in, mesh_sizes
from .ragged import RAGGED_DOT, state_rule

_CONTRACTIONS = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})
_TENSOR = re.compile(r"\[([^\[\]]*)\]")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_EXTENT = re.compile(r"([a-z](?:_\d+)?)=(\d+)")
_REDUCTION = re.compile(r"reduction=\{([^}]*)\}")
_MESH = re.compile(r"<(@[\w$.-]+), ")


def settle(module: Any) -> None:
    """Rewrite `module`, after propagation, in place: contractions, and what the branches of an `if` return."""
    run_passes(module, ["func.func(sdy-populate-op-sharding-rules)"])
    with module.context:
        sizes = mesh_sizes(module)
        wanted = {*_CONTRACTIONS, RAGGED_DOT, CHOICE}
        found = [op for op in nested(module.operation) if op.name in wanted]
        for op in found:
            if op.name in _CONTRACTIONS:
                _settle(op, sizes)
    run_passes(module, ["func.func(sdy-drop-sharding-rules)"])
    with module.context:
        for op in found:
            if op.name == RAGGED_DOT:  # propagation has dropped its rule with all the others
                state_rule(op)
            elif op.name == CHOICE:
                _bring_together(op)


def _bring_together(op: Any) -> None:
    """Bring what branches of an `if` return to where its results lie, as XLA does: they are whole where propagation,
    which does not go through it (`choices.py`), says nothing."""
    for region in op.regions:
        ending = list(region.blocks[0].operations)[-1].operation
        for i, (result, value) in enumerate(zip(op.results, ending.operands, strict=True)):
            there = _layout_of(result)
            mesh = _MESH.search(_written_sharding(value))
            if mesh and _layout_of(value) != there:
                with ir.InsertionPoint(ending):
                    ending.operands[i] = _reshard(value, mesh.group(1), there, op.location).results[0]


def _settle(op: Any, sizes: Mapping[str, int]) -> None:
    if "sdy.sharding_rule" not in op.attributes:
        return
    operands = [_layout_of(value) for value in op.operands]
    result = _layout_of(op.results[0])
    rule = str(op.attributes["sdy.sharding_rule"])
    # of a dimension that several factors make up (channels in groups), major to minor
    factors = [[tuple(_FACTOR.findall(d)) for d in t.split(", ") if d] for t in _TENSOR.findall(rule)]
    counts = {name: int(count) for name, count in _EXTENT.findall(rule)}
    reduced = _REDUCTION.search(rule)
    reduction = frozenset(reduced.group(1).split(", ")) if reduced else frozenset()
    layouts = [*operands, result]
    if [len(f) for f in factors] != [len(layout) for layout in layouts]:
        return
    extents = [tuple(value.type.shape) for value in (*op.operands, *op.results)]
    settled = _agreed(factors, layouts, reduction, extents, counts, sizes)
    if settled == layouts:
        return
    names = [_MESH.search(_written_sharding(value)) for value in (*op.operands, *op.results)]
    name = next(mesh.group(1) for mesh in names if mesh)
    for i, (before, after) in enumerate(zip(operands, settled, strict=False)):
        if before != after:
            with ir.InsertionPoint(op):
                op.operands[i] = _reshard(op.operands[i], name, after, op.location).results[0]
    if settled[-1] != result:
        op.attributes["sdy.sharding"] = ir.Attribute.parse(
            f"#sdy.sharding_per_value<[<{name}, {written_dims(settled[-1])}>]>"
        )
        with ir.InsertionPoint(op):
            asked = _reshard(op.results[0], name, result, op.location)
        asked.move_after(op)
        op.results[0].replace_all_uses_except(asked.results[0], asked)


def _agreed(
    factors: Sequence[Sequence[tuple[str, ...]]],
    layouts: Sequence[Dims],
    reduction: frozenset[str],
    extents: Sequence[tuple[int, ...]],
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
) -> list[Dims]:
    """Layouts of operands and result in which each axis cuts one factor at most, by the rules above."""
    new = [[list(axes) for axes in layout] for layout in layouts]
    places: list[Mapping[str, str]] = [
        {axis: f for dim, axes in zip(tensor, layout, strict=True) for axis, f in _cut(dim, axes, counts, sizes)}
        for tensor, layout in zip(factors, layouts, strict=True)
    ]
    *operands, result = places
    for axis in sorted({axis for place in places for axis in place}):
        claimed = {place[axis] for place in places if axis in place}
        holders = [i for i, place in enumerate(operands) if axis in place]
        if len(holders) == 1 and axis not in result and claimed <= reduction:
            (i,) = holders
            alone = all(set(place) <= {axis} for place in places)
            gathered = _elements(extents[i], layouts[i], sizes) * axis_size(axis, sizes)
            if alone or gathered <= _elements(extents[-1], layouts[-1], sizes):
                _move(new[i], factors[i], axis, None)
        if len(claimed) == 1 or axis not in result:
            continue
        ours = {place.get(axis) for place in operands}
        if len(ours) == 1 and ours <= reduction:
            _move(new[-1], factors[-1], axis, None)
        elif result[axis] in ours:
            for i, place in enumerate(operands):
                if axis in place and place[axis] != result[axis]:
                    _move(new[i], factors[i], axis, result[axis])
    return [tuple(tuple(axes) for axes in layout) for layout in new]


def _cut(
    dim: tuple[str, ...], axes: Sequence[str], counts: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """The factor of a dimension that each of the axes cuts: the major one as long as they divide what is left of it."""
    rest = list(dim)
    left = counts[rest[0]] if rest else 1
    for axis in axes:
        while len(rest) > 1 and (left == 1 or left % axis_size(axis, sizes)):
            rest = rest[1:]
            left = counts[rest[0]]
        left //= axis_size(axis, sizes)
        yield axis, rest[0]


def _elements(shape: tuple[int, ...], layout: Dims, sizes: Mapping[str, int]) -> float:
    return math.prod(shape) / math.prod(axis_size(axis, sizes) for axes in layout for axis in axes)


def _move(layout: list[list[str]], factors: Sequence[tuple[str, ...]], axis: str, factor: str | None) -> None:
    for axes in layout:
        if axis in axes:
            axes.remove(axis)
    for axes, dim in zip(layout, factors, strict=True):
        if factor is not None and dim[:1] == (factor,):  # a minor one is cut only where the major one is, to the end
            axes.append(axis)


def _layout_of(value: Any) -> Dims:
    found = layouts_in(_written_sharding(value))
    if not found:
        return ((),) * len(value.type.shape)
    owned = isinstance(value.owner, ir.Block)
    index = ir.BlockArgument(value).arg_number if owned else ir.OpResult(value).result_number
    return found[index] if len(found) > 1 else found[0]


def _written_sharding(value: Any) -> str:
    """The attribute with the sharding of `value`, perhaps among others; "" where it has none."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return _argument_sharding(owner.owner, ir.BlockArgument(value).arg_number)
    names = ("sdy.sharding", "out_sharding", "sharding")
    return next((str(owner.attributes[name]) for name in names if name in owner.attributes), "")


def _argument_sharding(parent: Any, index: int) -> str:
    parent = parent.operation
    if parent.name == "func.func":
        attributes = parent.attributes
        if "arg_attrs" in attributes and "sdy.sharding" in attributes["arg_attrs"][index]:
            return str(attributes["arg_attrs"][index]["sdy.sharding"])
    elif parent.name == "stablehlo.while" and "sdy.sharding" in parent.attributes:
        return str(parent.attributes["sdy.sharding"])
    return ""


def written_dims(layout: Dims) -> str:
    """A layout in the words of `#sdy.sharding`."""
    def axis(name: str) -> str:
        name, colon, part = name.partition(":")
        return f'"{name}"{colon}{part}'

    return "[" + ", ".join("{" + ", ".join(axis(a) for a in axes) + "}" for axes in layout) + "]"


def _reshard(value: Any, mesh: str, layout: Dims, location: Any) -> Any:
    sharding = ir.Attribute.parse(f"#sdy.sharding<{mesh}, {written_dims(layout)}>")
    return ir.Operation.create(
        "sdy.reshard", results=[value.type], operands=[value], attributes={"sharding": sharding}, loc=location
    )
