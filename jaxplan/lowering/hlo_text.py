"""The per-device HLO text of CPU, TPU and GPU, read into instructions, each as often as the loops around it run."""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ArgumentError
from .trip_counts import Instruction as Instruction
from .trip_counts import trip_count

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r"([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_LAYOUT = re.compile(r"\]\{(\d+)")
_WIDTH = re.compile(r"[a-z]+(\d+)")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|branch_computations|true_computation|false_computation)="
                     r"(?:\{([^}]*)\}|%?([\w.-]+))")  # fmt: skip
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TABLE = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})$')
_FIELD = re.compile(r"(\w+)=(\d+)")

# Opcodes whose called computations run as programs; a reduction's `to_apply` works on scalars.
_CALLERS = frozenset({"while", "conditional", "call", "fusion", "async-start", "call-start", "fusion-start"})

FUSIONS = frozenset({"fusion", "fusion-start"})
"""Kernels of several operations; XLA of jax 0.11 starts some on GPU beside others, and waits with `fusion-done`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """An instruction in its place.

    Attributes:
      siblings: the instructions of its computation, by name.
      computation: the computation it runs in; of one inside a fusion, that of the fusion.
      fusion: the fusions entered to reach it, "" for none.
      op_name: its name stack, or that of the fusion around it.
      frame: of the source line that made it, in the text's own table (see `Sources`); 0 for none.
    """

    instruction: Instruction
    siblings: Mapping[str, Instruction]
    trips: float
    computation: str
    fusion: str
    op_name: str
    frame: int


def runs(hlo_text: str, while_trips: float) -> Iterator[Run]:
    """Every instruction that runs, in program order, those inside fusions too.

    Args:
      while_trips: iterations of loops whose trip count is unknown.

    Raises:
      ArgumentError: the text is no HLO module.
    """
    computations, entry = _computations(hlo_text)
    yield from _walk(computations, entry, 1.0, entry, "", ("", 0), while_trips)


def _walk(
    computations: Mapping[str, Mapping[str, Instruction]],
    name: str,
    trips: float,
    outside: str,
    fusion: str,
    around: tuple[str, int],
    while_trips: float,
) -> Iterator[Run]:
    siblings = computations[name]
    for instruction in siblings.values():
        op_name, frame = named(instruction, around)
        yield Run(
            instruction=instruction,
            siblings=siblings,
            trips=trips,
            computation=outside,
            fusion=fusion,
            op_name=op_name,
            frame=frame,
        )
        if instruction.opcode not in _CALLERS:
            continue
        inner = trips
        if instruction.opcode == "while":
            inner *= trip_count(instruction, siblings, computations, while_trips)
        for many, one in _CALLED.findall(instruction.rest):
            for callee in _NAME.findall(many) or [one]:
                fused = instruction.opcode in FUSIONS
                yield from _walk(
                    computations,
                    callee,
                    inner,
                    outside if fused else callee,
                    f"{fusion}/{callee}" if fused else fusion,
                    (op_name, frame) if fused else ("", 0),
                    while_trips,
                )


def named(instruction: Instruction, around: tuple[str, int]) -> tuple[str, int]:
    """Its name stack and source line, or those of the fusion around it, as `Run` has them."""
    name, frame = _OP_NAME.search(instruction.rest), _FRAME.search(instruction.rest)
    return name.group(1) if name else around[0], int(frame.group(1)) if frame else around[1]


def _computations(hlo_text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current: dict[str, Instruction] = {}
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


def _parsed(line: str) -> Instruction | None:
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
    return Instruction(
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


class Sources:
    """The source lines of a module: the tables that its text begins with."""

    def __init__(self, hlo_text: str) -> None:
        tables: dict[str, dict[int, str]] = {}
        current: dict[int, str] = {}
        for line in hlo_text.splitlines():
            entry = _TABLE.match(line)
            if entry:
                current[int(entry.group(1))] = entry.group(2) or entry.group(3)
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                current = tables.setdefault(line, {})
            elif line.startswith(("%", "ENTRY")):
                break
        self._files, self._functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
        self._locations = {k: _fields(v) for k, v in tables.get("FileLocations", {}).items()}
        self._frames = {k: _fields(v) for k, v in tables.get("StackFrames", {}).items()}

    def lines(self, frame: int) -> tuple[str, ...]:
        """`"model.py:12 (forward)"`, as `Op.source` says it, of the calls that made an instruction; innermost first.

        Our own calls, which had it lowered, are no lines of the program.
        """
        found = []
        while frame in self._frames:
            fields = self._frames[frame]
            place = self._locations.get(fields.get("file_location_id", 0), {})
            path = self._files.get(place.get("file_name_id", 0), "")
            function = self._functions.get(place.get("function_name_id", 0), "")
            if not path.startswith(_OWN):
                found.append(f"{os.path.basename(path)}:{place.get('line', 0)} ({function})")
            parent = fields.get("parent_frame_id", 0)
            frame = parent if parent != frame else 0
        return tuple(found)


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(text)}


def arrays_of(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(element type, shape) of an HLO type; of a tuple all its parts."""
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in _ARRAY.findall(type_text)]


def row_bytes(type_text: str) -> float:
    """Bytes of what lies side by side in the (first) array of an HLO type: its minor dimension's elements."""
    (dtype, shape), *_ = arrays_of(type_text)
    layout = _LAYOUT.search(type_text)
    minor = int(layout.group(1)) if layout else len(shape) - 1
    return bytes_of(f"{dtype}[{shape[minor]}]") if shape else 0.0


def bytes_of(type_text: str) -> int:
    """Bytes of an HLO type, of a tuple all its parts."""
    total = 0.0
    for dtype, shape in arrays_of(type_text):
        width = _WIDTH.match(dtype)
        bits = 8 if dtype == "pred" or width is None else int(width.group(1))
        total += math.prod(shape) * bits / 8
    return math.ceil(total)
