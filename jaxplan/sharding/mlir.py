"""Reads a StableHLO module with Shardy's annotations as one flat sequence of executed operations.

Loop bodies stand once, with how often they run; values are numbered, so that producers and consumers can be
matched.  The module is one of `imported.as_xla_imports`: calls are inlined.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .._jax import ir
from .imported import scope_of

Dims = tuple[tuple[str, ...], ...]
"""For each dimension the axes that cut it, major first; part of an axis is `"model:(1)2"`: (pre-size)size."""

_SHARDING = re.compile(r"<@[\w$.-]+, \[((?:\{[^{}]*\}(?:p\d+)?(?:, )?)*)\]")
_DIMENSION = re.compile(r"\{([^{}]*)\}")
_AXIS = re.compile(r'"([^"]+)"(:\(\d+\)\d+)?')
_MESH_AXIS = re.compile(r'"([^"]+)"=(\d+)')
_SPLAT = re.compile(r"dense<(-?\d+)>")
_BITS = re.compile(r"\d+")
# MLIR spells floating point formats of 8 bits and less in capitals, NumPy with underscores.
_SMALL_FLOAT = re.compile(r"f(\d+)(E\w+)")


class Visit(NamedTuple):
    """One executed operation; a tuple, since they are made by the ten thousand.

    Attributes:
      op: the MLIR operation.
      scope: its `jax.named_scope` path; what has none of its own, that of the loop around it.
      trips: how often it runs in one step.
      frame: number of the block that it stands in.
      operands, results: numbers of its values.
      operand_layouts, layouts: the shardings of operands and results; a value without one is replicated.
      within: the scope of the `shard_map` that it stands in, "" for none: names begin anew inside.
    """

    op: Any
    scope: str
    trips: float
    frame: int
    operands: tuple[int, ...]
    results: tuple[int, ...]
    operand_layouts: tuple[Dims, ...]
    layouts: tuple[Dims, ...]
    within: str = ""


Made = tuple[str, str, tuple[tuple[int, ...], ...], tuple[Dims, ...], float]
"""The name of an operation, its scope, the shapes and the layouts of its results, and how often it runs."""


def mesh_sizes(module: Any) -> dict[str, int]:
    """Axis -> size over the meshes that `module` declares, major to minor."""
    sizes: dict[str, int] = {}
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            for name, size in _MESH_AXIS.findall(str(op.operation.attributes["mesh"])):
                sizes.setdefault(name, int(size))
    return sizes


def axes_in(text: str) -> tuple[str, ...]:
    """The mesh axes that a Shardy attribute mentions, in its order; parts of axes as `"model:(1)2"`."""
    return tuple(name + part for name, part in _AXIS.findall(text))


def axis_size(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of a mesh axis or of a part of one."""
    name, _, part = axis.partition(":(")
    return int(part.partition(")")[2]) if part else sizes[name]


@functools.lru_cache(maxsize=4096)
def layouts_in(text: str) -> tuple[Dims, ...]:
    """The shardings written in a `#sdy.sharding` or `#sdy.sharding_per_value` attribute."""
    return tuple(tuple(axes_in(dim) for dim in _DIMENSION.findall(dims)) for dims in _SHARDING.findall(text))


def element_bits(element_type: str) -> int:
    """Bits of one element of an MLIR element type: `f32`, `bf16`, `i4`, `f8E4M3FN`, `complex<f32>`.

    `i1` takes a whole byte, as XLA's PRED does; a type without a width (a token) takes none.
    """
    if element_type == "i1":
        return 8
    bits = _BITS.search(element_type)
    if bits is None:
        return 0
    return int(bits.group()) * (2 if element_type.startswith("complex") else 1)


def numpy_name(element_type: str) -> str:
    """The NumPy name of an MLIR element type: `f32` -> `float32`, `i1` -> `bool`."""
    if element_type == "i1":
        return "bool"
    if element_type.startswith("complex"):
        return f"complex{element_bits(element_type)}"
    small = _SMALL_FLOAT.fullmatch(element_type)
    if small:
        return f"float{small.group(1)}_{small.group(2).lower()}"
    for prefix, name in (("bf", "bfloat"), ("ui", "uint"), ("f", "float"), ("i", "int")):
        if element_type.startswith(prefix):
            return name + element_type.removeprefix(prefix)
    return element_type


def shape_of(value: Any) -> tuple[tuple[int, ...], str]:
    """`(shape, MLIR element type)` of a value; `((), its type)` for what is no ranked tensor."""
    kind = value.type
    if not isinstance(kind, ir.RankedTensorType):
        return (), str(kind)
    return tuple(kind.shape), str(kind.element_type)


def local_bytes(value: Any, layout: Dims, sizes: Mapping[str, int]) -> int:
    """Bytes that one device holds of `value` under `layout`; a dimension that doesn't divide is padded."""
    shape, element_type = shape_of(value)
    elements = 1
    for extent, axes in zip(shape, layout or ((),) * len(shape), strict=True):
        elements *= -(-extent // math.prod(axis_size(axis, sizes) for axis in axes))
    return math.ceil(elements * element_bits(element_type) / 8)


def function_layouts(function: Any) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Shardings of a function's arguments and of its results."""
    arguments, results = function.type.inputs, function.type.results
    return _layouts_of(function, "arg_attrs", arguments), _layouts_of(function, "res_attrs", results)


def _layouts_of(function: Any, attribute: str, types: Sequence[Any]) -> tuple[Dims, ...]:
    replicated: tuple[Dims, ...] = tuple(
        ((),) * len(t.shape) if isinstance(t, ir.RankedTensorType) else () for t in types
    )
    if attribute not in function.attributes:
        return replicated
    found: list[Dims] = []
    for attributes, otherwise in zip(function.attributes[attribute], replicated, strict=True):
        if "sdy.sharding" in attributes:
            found.extend(layouts_in(str(attributes["sdy.sharding"])))
        else:
            found.append(otherwise)
    return tuple(found)


def _constant(value: Any) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name not in ("sdy.constant", "stablehlo.constant"):
        return None
    splat = _SPLAT.match(str(owner.attributes["value"]))
    return int(splat.group(1)) if splat else None


def trip_count(loop: Any) -> int | None:
    """Iterations of a `stablehlo.while` that counts `i` from a constant to a constant, else None.

    That is what jax writes for `scan` and `fori_loop`: the condition `i < stop`, the body's `i + step`.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    test = condition.operations[len(condition.operations) - 1].operands[0].owner
    if isinstance(test, ir.Block) or test.name != "stablehlo.compare":
        return None
    counter, stop = test.operands[0], _constant(test.operands[1])
    if stop is None or "LT" not in str(test.attributes["comparison_direction"]):
        return None
    if not isinstance(counter.owner, ir.Block):
        return None
    position = ir.BlockArgument(counter).arg_number
    start = _constant(loop.operands[position])
    advance = body.operations[len(body.operations) - 1].operands[position].owner
    if start is None or isinstance(advance, ir.Block) or advance.name != "stablehlo.add":
        return None
    if advance.operands[0] != body.arguments[position]:
        return None
    step = _constant(advance.operands[1])
    return None if not step or step < 0 else max(-((start - stop) // step), 0)


class Walk:
    """One walk through `@main`: iterate over `visits()`; afterwards `warnings` tells what was assumed.

    What a loop of unknown length is taken to run matters where it communicates: only that is told.
    """

    def __init__(self, module: Any, while_trips: float) -> None:
        self._main = next(op.operation for op in module.body.operations if op.operation.name == "func.func")
        self._while_trips = while_trips
        self._count = 0
        # attributes and types are one object to the bindings wherever they are equal
        self._written: dict[Any, tuple[Dims, ...]] = {}
        self._whole: dict[Any, Dims] = {}
        self._shapes: dict[Any, tuple[int, ...]] = {}
        self.warnings: list[str] = []

    def visits(self) -> Iterator[Visit]:
        """Every executed operation in program order, terminators of loops and branches included."""
        block = self._main.regions[0].blocks[0]
        layouts, _ = function_layouts(self._main.opview)
        arguments = [(self._number(), layout) for layout in layouts]
        yield from self._block(block, arguments, {}, "", 1.0)

    def made(self) -> Iterator[Made]:
        """What each operation with results makes, in program order; `visits` also says who reads it."""
        yield from self._made(self._main.regions[0].blocks[0], "", 1.0)

    def _made(
        self, block: Any, scope: str, trips: float
    ) -> Iterator[Made]:
        for view in block.operations:
            op = view.operation
            name, inner = op.name, scope_of(op.location) or scope
            kinds = [result.type for result in op.results]
            if kinds:
                yield name, inner, tuple([self._shape(kind) for kind in kinds]), self._layouts(op, name, kinds), trips
            if name in _REGIONS:
                count = trip_count(op) if name == "stablehlo.while" else 1
                for region in op.regions:
                    for body in region.blocks:
                        yield from self._made(body, inner, trips * (self._while_trips if count is None else count))

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _block(
        self, block: Any, arguments: Sequence[tuple[int, Dims]], outer: Mapping[Any, tuple[int, Dims]],
        scope: str, trips: float, within: str = "",
    ) -> Iterator[Visit]:  # fmt: skip
        frame = self._number()
        env = dict(outer)
        env.update(zip(block.arguments, arguments, strict=True))
        for view in block.operations:
            op = view.operation
            name = op.name
            inner = scope_of(op.location) or scope
            operands = [env[value] for value in op.operands]
            layouts = self._layouts(op, name, [result.type for result in op.results])
            results = tuple(range(self._count + 1, self._count + 1 + len(layouts)))
            self._count += len(layouts)
            visit = Visit(
                op=op,
                scope=inner,
                trips=trips,
                frame=frame,
                operands=tuple([number for number, _ in operands]),
                results=results,
                operand_layouts=tuple([layout for _, layout in operands]),
                layouts=layouts,
                within=within,
            )
            yield visit
            if name in _REGIONS:
                yield from self._regions(visit, env)
            env.update(zip(op.results, zip(results, layouts, strict=True), strict=True))

    def _layouts(self, op: Any, name: str, kinds: Sequence[Any]) -> tuple[Dims, ...]:
        """The shardings of an operation's results, which are of these types."""
        attributes = op.attributes
        whole = tuple([self._replicated(kind) for kind in kinds])
        for key in _OWN_SHARDINGS if name.startswith("sdy.") else _SHARDINGS:
            if key in attributes:
                written = attributes[key]
                if written not in self._written:
                    self._written[written] = layouts_in(str(written))
                found = self._written[written]
                if len(found) == len(whole):
                    # What one device alone makes, as a host callback does, is written without dimensions.
                    return tuple([f if len(f) == len(w) else w for f, w in zip(found, whole, strict=True)])
        return whole

    def _replicated(self, kind: Any) -> Dims:
        """The layout of a value of a type that no axis cuts."""
        if kind not in self._whole:
            self._whole[kind] = ((),) * len(self._shape(kind))
        return self._whole[kind]

    def _shape(self, kind: Any) -> tuple[int, ...]:
        """The shape of a type; () of what is no ranked tensor."""
        if kind not in self._shapes:
            self._shapes[kind] = tuple(kind.shape) if isinstance(kind, ir.RankedTensorType) else ()
        return self._shapes[kind]

    def _regions(self, visit: Visit, env: Mapping[Any, tuple[int, Dims]]) -> Iterator[Visit]:
        op, trips = visit.op, visit.trips
        if op.name == "stablehlo.while":
            count = trip_count(op)
            trips *= self._while_trips if count is None else count
        moved, within = False, visit.scope if op.name == "sdy.manual_computation" else visit.within
        for region in op.regions:
            for block in region.blocks:
                inside = visit.layouts if op.name == "stablehlo.while" else ()
                if op.name in ("sdy.manual_computation", "sdy.named_computation"):
                    inside = tuple(((),) * len(shape_of(v)[0]) for v in block.arguments)
                arguments = [(self._number(), layout) for layout in inside]
                for inner in self._block(block, arguments, env, visit.scope, trips, within):
                    moved = moved or inner.op.name in MOVING
                    yield inner
        if moved and op.name == "stablehlo.while" and count is None:
            self.warnings.append(
                f"the trip count of the loop `{visit.scope}` is not a constant: {self._while_trips:g} is assumed"
            )


_SHARDINGS = ("sdy.sharding",)
_OWN_SHARDINGS = ("sdy.sharding", "out_sharding", "out_shardings", "sharding")
"""Attributes that say how results lie: of any operation, and of Shardy's own."""

MOVING = frozenset(
    f"{dialect}.{kind}"
    for dialect in ("sdy", "stablehlo")
    for kind in ("all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter")
)
"""Operations that communicate: Shardy's own, and those that a `shard_map` writes."""

# Operations whose regions are programs of their own; those of reduce, sort and scatter are about scalars.
_REGIONS = frozenset(
    {"stablehlo.while", "stablehlo.case", "stablehlo.if", "sdy.manual_computation", "sdy.named_computation"}
)
