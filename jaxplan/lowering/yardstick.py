"""Seconds of a compiled program by one rule that is not the planner's: what XLA made of a step, priced instruction
by instruction.

TPU: the compiler's own estimated cycles over the clock.  GPU and CPU: a roofline of each kernel, whose arithmetic and
memory traffic are read off the compiled text.  Everything counts as often as the loops around it run.  Collectives
are alpha-beta on the links of their mesh axes, nothing of them hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..cost import Channels, CostModel, convolution_seconds, roofline_seconds, unaligned, unaligned_seconds
from ..hardware import Profile
from .hlo import compiled_collectives, instruction_cycles
from .hlo_text import Instruction, Run, arrays_of, bytes_of, row_bytes, runs
from .hlo_work import library_channels, product_flops

_NO_KERNEL = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
     "partition-id", "replica-id", "iota", "opt-barrier", "async-start", "async-done", "async-update", "call-start",
     "call-done", "fusion-done"}
)  # fmt: skip
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(-start|-done)?$"
)
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_FREE_INSIDE = _NO_KERNEL | _SLICES | {"broadcast", "reshape", "transpose", "copy", "pad", "concatenate", "reverse",
                                       "dynamic-update-slice", "scatter", "dot", "convolution", "fusion"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompiledPrice:
    """Seconds of one step of a compiled program.

    Attributes:
      compute_s: of everything that is no collective; comm_s: of the collectives, nothing hidden.
      rule: what priced the computation, "estimated cycles" or "roofline".
    """

    compute_s: float
    comm_s: float
    rule: str

    @property
    def step_s(self) -> float:
        """Computation, then communication."""
        return self.compute_s + self.comm_s


def compiled_price(hlo_text: str, model: CostModel, *, while_trips: float = 16.0) -> CompiledPrice:
    """Price `compiled.as_text()` on `model`'s machine and mesh.

    Args:
      while_trips: of loops whose trip count is unknown.
    """
    every = [name for name, _ in model.axes]
    comm_s = sum(
        model.collective_over(c.kind, c.bytes, every if c.axes == ("?",) else c.axes) * c.trips
        for c in compiled_collectives(hlo_text, model.axes, while_trips=while_trips)
    )
    compute_s = sum(kernel_seconds(hlo_text, model, while_trips=while_trips).values())
    rule = "roofline" if model.profile.clock_hz is None else "estimated cycles"
    return CompiledPrice(compute_s=compute_s, comm_s=comm_s, rule=rule)


def kernel_seconds(hlo_text: str, model: CostModel, *, while_trips: float = 16.0) -> dict[str, float]:
    """Seconds of all runs of every instruction that computes, by its name.

    Args:
      while_trips: of loops whose trip count is unknown.
    """
    clock_hz = model.profile.clock_hz
    seconds: dict[str, float] = {}
    if clock_hz is not None:
        for name, cycles in instruction_cycles(hlo_text, while_trips=while_trips):
            seconds[name] = seconds.get(name, 0.0) + cycles / clock_hz
    else:
        for kernel in compiled_kernels(hlo_text, while_trips):
            seconds[kernel.name] = seconds.get(kernel.name, 0.0) + kernel.seconds(model.profile) * kernel.trips
    return seconds


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a compiled program.

    Attributes:
      name: of its instruction; op_name: the name stack of the operation it was made for.
      flops: of its matrix products, whose operands are of `dtype`; vector_flops: of everything else in it.
      bytes: memory that it reads and writes.
      added: elements that it adds to memory in atomic operations.
      odd: whether it is a product of rows that aren't multiples of 16 bytes.
      channels: of a convolution that cuDNN is called for; else None.
      trips: how often it runs in one step.
    """

    name: str
    op_name: str
    flops: float
    vector_flops: float
    bytes: float
    dtype: str
    trips: float
    added: float = 0.0
    odd: bool = False
    channels: Channels | None = None

    def seconds(self, profile: Profile) -> float:
        """Of one run: arithmetic and memory overlap, and no kernel takes less than its start."""
        product_s = float(roofline_seconds(self.flops, self.bytes, self.dtype, profile, matmul=True))
        if self.channels is not None:
            least_s = convolution_seconds(self.flops, self.bytes, self.dtype, self.channels, profile)
            product_s = max(product_s, float(least_s))
        if self.odd:
            product_s = float(unaligned_seconds(self.flops, product_s, self.dtype, profile))
        added_s = self.added * (profile.atomic_s or 0.0)
        return max(product_s, self.vector_flops / profile.vector_flops_per_s) + added_s


def compiled_kernels(hlo_text: str, while_trips: float = 16.0) -> Iterator[Kernel]:
    """The kernels of a compiled program, in program order; collectives are none."""
    outer: Run | None = None
    inner: list[Run] = []
    for run in runs(hlo_text, while_trips):
        if run.fusion:
            inner.append(run)
            continue
        if outer is not None:
            yield _kernel(outer, inner)
        opcode = run.instruction.opcode
        outer, inner = (None if opcode in _NO_KERNEL or _COLLECTIVE.match(opcode) else run), []
    if outer is not None:
        yield _kernel(outer, inner)


def _kernel(outer: Run, inner: list[Run]) -> Kernel:
    flops, vector_flops, added, dtype, odd = 0.0, 0.0, 0.0, "float32", False
    channels = library_channels(outer)
    for run in inner or [outer]:
        part, siblings = run.instruction, run.siblings
        if part.opcode == "scatter" and len(part.operands) == 3 and "unique_indices=true" not in part.rest:
            added += _elements(siblings[part.operands[2]].type)
        products = product_flops(run)
        if products:
            flops += products
            dtype = _DTYPES.get(arrays_of(siblings[part.operands[0]].type)[0][0], "float32")
            types = (*(siblings[name].type for name in part.operands[:2]), part.type)
            odd |= part.opcode != "convolution" and any(unaligned(row_bytes(text)) for text in types)
        elif part.opcode == "reduce":
            vector_flops += sum(
                _elements(siblings[name].type) for name in part.operands[: len(part.operands) // 2]
            )
        elif part.opcode not in _FREE_INSIDE:
            vector_flops += _elements(part.type)
    return Kernel(
        name=outer.instruction.name,
        op_name=outer.op_name,
        flops=flops,
        vector_flops=vector_flops,
        bytes=_traffic(outer, inner),
        dtype=dtype,
        trips=outer.trips,
        added=added,
        odd=odd and channels is None,
        channels=channels,
    )


def _traffic(outer: Run, inner: list[Run]) -> float:
    """Bytes that a kernel reads and writes: slices read what they take, updates write what they put, in place."""
    instruction, siblings = outer.instruction, outer.siblings
    if instruction.opcode == "dynamic-update-slice":
        return 2.0 * _bytes_named(instruction.operands[1:2], siblings)
    if (put := _put_in_place(instruction)) is not None:
        return _bytes_named(instruction.operands[1:], siblings) + 2.0 * _bytes_named((put,), siblings)
    if instruction.opcode in _SLICES:
        return 2.0 * bytes_of(instruction.type)
    own = [run for run in inner if run.siblings is inner[0].siblings] if inner else []
    if not own:
        return bytes_of(instruction.type) - _scratch(instruction) + _bytes_named(instruction.operands, siblings)
    body = {run.instruction.name: run.instruction for run in own}
    used: dict[str, list[tuple[Instruction, int]]] = {}
    for part in body.values():
        for position, name in enumerate(part.operands):
            used.setdefault(name, []).append((part, position))
    total = 0.0
    for part in body.values():
        if part.opcode != "parameter":
            continue
        readers = _past_bitcasts(part.name, used)
        if readers and all(
            (r.opcode in _SLICES or _put_in_place(r) is not None) and position == 0 for r, position in readers
        ):
            total += sum(bytes_of(r.type) for r, _ in readers if r.opcode in _SLICES)
        else:
            total += bytes_of(part.type)
    root = own[-1].instruction
    roots = [body[name] for name in root.operands if name in body] if root.opcode == "tuple" else [root]
    for written in roots:
        while written.opcode == "bitcast" and written.operands[0] in body:
            written = body[written.operands[0]]
        update = body.get(_put_in_place(written) or "")
        times = 2 if written.opcode == "scatter" else 1  # what is there is read, too
        total += bytes_of(written.type) if update is None else times * bytes_of(update.type)
    return total


def _scratch(instruction: Instruction) -> float:
    """Bytes of the room that a library call works in, the last of its results; what it moves there isn't known."""
    arrays = arrays_of(instruction.type)
    dtype, shape = arrays[-1] if arrays else ("", ())
    works = instruction.opcode == "custom-call" and len(arrays) > 1 and len(shape) == 1 and dtype in ("u8", "s8")
    return float(shape[0]) if works else 0.0


def _put_in_place(instruction: Instruction) -> str | None:
    """The operand that is written into the first one where that lies; None where a result of its own is made.

    Scatters into several arrays at once are not taken apart.
    """
    if instruction.opcode == "dynamic-update-slice":
        return instruction.operands[1]
    return instruction.operands[2] if instruction.opcode == "scatter" and len(instruction.operands) == 3 else None


def _past_bitcasts(
    name: str, used: Mapping[str, list[tuple[Instruction, int]]]
) -> list[tuple[Instruction, int]]:
    found = []
    for part, position in used.get(name, []):
        found += _past_bitcasts(part.name, used) if part.opcode == "bitcast" else [(part, position)]
    return found


def _bytes_named(names: tuple[str, ...], siblings: Mapping[str, Instruction]) -> float:
    return float(sum(bytes_of(siblings[name].type) for name in names if name in siblings))


def _elements(type_text: str) -> float:
    return float(sum(math.prod(shape) for _, shape in arrays_of(type_text)))


_DTYPES = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "u8": "uint8",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
"""Element types of HLO -> NumPy names, where a matrix unit runs them."""
