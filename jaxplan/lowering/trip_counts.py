"""How often a loop of a compiled program runs, read from its counter.

CPU and GPU programs say it (`known_trip_count`); TPU programs don't. There the condition compares one element of the
loop's state with a constant, the loop begins with another constant for it, and its body adds a third: 0 and 1 for a
`lax.scan`, 2 for the body of one that the compiler took twice, or of a product that it cut into windows and whose
pieces go around in both directions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_BODY = re.compile(r"body=%?([\w.-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_INTEGER = re.compile(r"[su]\d+\[\]")
_SAME = frozenset({"copy", "bitcast"})
_JOINS = frozenset({"and", "or", "xor", "select"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """`%name = type opcode(operands), rest`; a constant's only operand is its value."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


Computation = Mapping[str, Instruction]


def trip_count(
    loop: Instruction, siblings: Computation, computations: Mapping[str, Computation], otherwise: float
) -> float:
    """Iterations of a `while`; `otherwise` where its counter can't be read.

    Args:
      siblings: the computation that the loop stands in.
    """
    known = _KNOWN_TRIPS.search(loop.rest)
    if known:
        return int(known.group(1))
    condition, body = _CONDITION.search(loop.rest), _BODY.search(loop.rest)
    assert condition is not None and body is not None
    bound = _bound(computations[condition.group(1)])
    if bound is None:
        return otherwise
    limit, position = bound
    start = _start(loop, siblings, position)
    step = _step(computations[body.group(1)], position)
    return max(math.ceil((limit - start) / step), 0)


def _bound(condition: Computation) -> tuple[int, int | None] | None:
    """(constant, position of the counter that it is compared with) of a condition that compares nothing else.

    One that does (until it converges, ten times at most), or asks more than that (until all are done), says how often
    at most, not how often.
    """
    compares = [instruction for instruction in condition.values() if instruction.opcode == "compare"]
    if len(compares) != 1 or any(instruction.opcode in _JOINS for instruction in condition.values()):
        return None
    bounds = [value for name in compares[0].operands if (value := _constant(condition, name)) is not None]
    positions = [place for name in compares[0].operands if (place := _position(condition, name)) is not None]
    return (bounds[0], positions[0] if positions else None) if len(bounds) == 1 else None


def _start(loop: Instruction, siblings: Computation, position: int | None) -> int:
    """What the counter begins with: 0 where that can't be read."""
    state = siblings.get(loop.operands[0])
    if state is None or state.opcode != "tuple" or position is None or position >= len(state.operands):
        return 0
    return _constant(siblings, state.operands[position]) or 0


def _step(body: Computation, position: int | None) -> int:
    """What an iteration adds to the counter: 1 where that can't be read."""
    state = [*body.values()][-1]
    if state.opcode != "tuple" or position is None or position >= len(state.operands):
        return 1
    total, name = 0, state.operands[position]
    while (instruction := body.get(name)) is not None:
        if instruction.opcode in _SAME:
            name = instruction.operands[0]
        elif instruction.opcode == "add":
            amounts = [_constant(body, operand) for operand in instruction.operands]
            rest = [n for n, amount in zip(instruction.operands, amounts, strict=True) if amount is None]
            if len(rest) != 1:
                return 1
            total += sum(amount for amount in amounts if amount is not None)
            name = rest[0]
        else:
            return total if total > 0 and _position(body, name) == position else 1
    return 1


def _constant(computation: Computation, name: str) -> int | None:
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in _SAME:
        instruction = computation.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant" or not _INTEGER.match(instruction.type):
        return None
    return int(instruction.operands[0])


def _position(computation: Computation, name: str) -> int | None:
    """Which element of the loop's state a name stands for."""
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in _SAME:
        instruction = computation.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "get-tuple-element":
        return None
    index = _INDEX.search(instruction.rest)
    return int(index.group(1)) if index else None
