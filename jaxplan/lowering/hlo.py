"""What XLA compiled: collectives, memory and cycles, read from the per-device HLO text of CPU, TPU and GPU.

Each instruction counts as often as the loops around it run.  A loop's trip count is the compiler's own
(`known_trip_count`, CPU and GPU) or the constant that its condition compares its counter with (TPU); counters
start at 0 and step by 1, as those of `lax.scan` do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..sharding import MeshAxes, axes_of_groups, axes_of_pairs
from .replica_groups import groups_of, pairs_of

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r"([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_WIDTH = re.compile(r"[a-z]+(\d+)")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)="
                     r"(?:\{([^}]*)\}|%?([\w.-]+))")  # fmt: skip
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
# Opcodes whose called computations run as programs; a reduction's `to_apply` works on scalars.
_CALLERS = frozenset({"while", "conditional", "call", "fusion", "async-start"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCollective:
    """One collective of the compiled program, as each device takes part in it.

    Attributes:
      kind: as of `sharding.partitioner.Collective`; a fused all-reduce-scatter is a reduce_scatter.
      axes: mesh axes, in mesh order; `("?",)` for groups that no axes make.
      bytes: the larger local buffer on one device: an all_gather's result, the operands of the others.
      trips: how often it runs in one step.
      op_name: the name stack of the operation that it was made for.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    trips: float
    op_name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one device, from the compiler's buffer assignment."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What the step needs at once: argument + output + temp - alias, donated arguments counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """An instruction in its place.

    Attributes:
      siblings: the instructions of its computation, by name.
      computation: the computation it runs in; of one inside a fusion, that of the fusion.
      fusion: the fusions entered to reach it, "" for none.
      op_name: its name stack, or that of the fusion around it.
    """

    instruction: _Instruction
    siblings: Mapping[str, _Instruction]
    trips: float
    computation: str
    fusion: str
    op_name: str


def compiled_collectives(
    hlo_text: str, mesh_axes: MeshAxes, *, while_trips: float = 16.0
) -> tuple[CompiledCollective, ...]:
    """The collectives in `compiled.as_text()`, in program order.

    A `-start`/`-done` pair and the fusions over which TPU spreads an asynchronous collective are one; so are
    combined collectives, with the bytes of all.  `while_trips`: for loops whose trip count is unknown.
    """
    n_devices = math.prod(size for _, size in mesh_axes)
    seen: set[tuple[str, str]] = set()
    found = []
    for run in _runs(hlo_text, while_trips):
        instruction = run.instruction
        kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind is None:
            continue
        channel = _CHANNEL.search(instruction.rest)
        if run.fusion and channel:
            # the parts of an asynchronous collective stand in several fusions of a computation, one channel
            if (run.computation, channel.group(1)) in seen:
                continue
            seen.add((run.computation, channel.group(1)))
        if kind == "all_reduce" and "all-reduce-scatter" in run.fusion:
            kind = "reduce_scatter"
        size = sum(_bytes(run.siblings[name].type) for name in instruction.operands if name in run.siblings)
        if kind == "collective_permute":
            axes = axes_of_pairs(pairs_of(instruction.rest), mesh_axes)
        else:
            groups = groups_of(instruction.rest, n_devices)
            axes = axes_of_groups(groups, mesh_axes)
            size *= groups.shape[1] if kind == "all_gather" else 1
        found.append(
            CompiledCollective(kind=kind, axes=axes, bytes=size, trips=run.trips, op_name=run.op_name)
        )
    return tuple(found)


def estimated_cycles(hlo_text: str, *, while_trips: float = 16.0) -> float:
    """The TPU compiler's own cycles of one step: `estimated_cycles` of every instruction times its trips.

    Collectives carry none; CPU and GPU programs give 0.
    """
    total = 0.0
    for run in _runs(hlo_text, while_trips):
        cycles = _CYCLES.search(run.instruction.rest)
        if cycles and not run.fusion:
            total += int(cycles.group(1)) * run.trips
    return total


def compiled_memory(compiled: Any) -> Memory:
    """The memory of a `jax.stages.Compiled` on one device.

    Raises:
      ArgumentError: its backend gives no buffer assignment.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ArgumentError(
            f"{compiled!r} has no memory analysis: its backend reports none. Compile for CPU, TPU or GPU."
        )
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
    )


def _runs(hlo_text: str, while_trips: float) -> Iterator[_Run]:
    computations, entry = _computations(hlo_text)
    yield from _walk(computations, entry, 1.0, entry, "", "", while_trips)


def _walk(
    computations: Mapping[str, Mapping[str, _Instruction]],
    name: str,
    trips: float,
    outside: str,
    fusion: str,
    around: str,
    while_trips: float,
) -> Iterator[_Run]:
    siblings = computations[name]
    for instruction in siblings.values():
        named = _OP_NAME.search(instruction.rest)
        op_name = named.group(1) if named else around
        yield _Run(
            instruction=instruction,
            siblings=siblings,
            trips=trips,
            computation=outside,
            fusion=fusion,
            op_name=op_name,
        )
        if instruction.opcode not in _CALLERS:
            continue
        inner = trips
        if instruction.opcode == "while":
            inner *= _trip_count(instruction, computations, while_trips)
        for many, one in _CALLED.findall(instruction.rest):
            for callee in _NAME.findall(many) or [one]:
                fused = instruction.opcode == "fusion"
                yield from _walk(
                    computations,
                    callee,
                    inner,
                    outside if fused else callee,
                    f"{fusion}/{callee}" if fused else fusion,
                    op_name if fused else "",
                    while_trips,
                )


def _trip_count(
    loop: _Instruction, computations: Mapping[str, Mapping[str, _Instruction]], otherwise: float
) -> float:
    known = _KNOWN_TRIPS.search(loop.rest)
    if known:
        return int(known.group(1))
    condition = _CONDITION.search(loop.rest)
    assert condition is not None
    instructions = computations[condition.group(1)]
    compared = [name for i in instructions.values() if i.opcode == "compare" for name in i.operands]
    bounds = [
        int(instructions[name].operands[0])
        for name in compared
        if instructions[name].opcode == "constant" and instructions[name].type.startswith("s32[]")
    ]
    return bounds[0] if len(bounds) == 1 else otherwise


def _computations(hlo_text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    computations: dict[str, dict[str, _Instruction]] = {}
    entry = ""
    current: dict[str, _Instruction] = {}
    for line in hlo_text.splitlines():
        if line.startswith(" "):
            instruction = _parsed(line)
            if instruction:
                current[instruction.name] = instruction
            continue
        header = _COMPUTATION.match(line)
        if header:
            current = computations.setdefault(header.group(1), {})
            if line.startswith("ENTRY"):
                entry = header.group(1)
    if not entry:
        raise ArgumentError("the text has no ENTRY computation: pass HLO as `compiled.as_text()` writes it")
    return computations, entry


def _parsed(line: str) -> _Instruction | None:
    start = _INSTRUCTION.match(line)
    if not start:
        return None
    after = line[start.end() :]
    end = _closing(after) + 1 if after.startswith("(") else after.index(" ")
    opcode = _OPCODE.match(after[end:].lstrip())
    if not opcode:
        return None
    call = after[end:].lstrip()[opcode.end() - 1 :]
    close = _closing(call)
    inside = call[1:close]
    operands = tuple(_NAME.findall(inside)) or (inside,)
    return _Instruction(
        name=start.group(1), type=after[:end], opcode=opcode.group(1), operands=operands, rest=call[close:]
    )


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)


def _bytes(type_text: str) -> int:
    """Bytes of an HLO type, of a tuple all its parts."""
    total = 0.0
    for dtype, dims in _ARRAY.findall(type_text):
        width = _WIDTH.match(dtype)
        bits = 8 if dtype == "pred" or width is None else int(width.group(1))
        total += math.prod(int(d) for d in dims.split(",") if d) * bits / 8
    return math.ceil(total)
