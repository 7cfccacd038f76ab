"""What XLA compiled: collectives, memory and cycles, read from the per-device HLO text of CPU, TPU and GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..errors import ArgumentError
from ..hardware import kept_heap
from ..sharding import MeshAxes, axes_of_groups, axes_of_pairs
from .hlo_text import Instruction, Run, Sources, bytes_of, named, runs
from .replica_groups import groups_of, pairs_of

_CHANNEL = re.compile(r"channel_id=(\d+)")
_SCATTERED = "all-reduce-scatter"
"""In the name of a fusion that sums and scatters."""
_ALIASES = re.compile(r"input_output_alias=\{((?:[^{}]|\{[^{}]*\})*)\}")
_ALIAS = re.compile(r"\{[\d,]*\}: \((\d+),")
_UNKNOWN_CYCLES = 2**63 - 1
"""What stands there for kernels without an estimate: scatters of a whole array beside the core, v5p."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCollective:
    """One collective of the compiled program, as each device takes part in it.

    Attributes:
      kind: as of `sharding.partitioner.Collective`; a fused all-reduce-scatter is a reduce_scatter.
      axes: mesh axes, in mesh order; `("?",)` for groups that no axes make.
      bytes: the larger local buffer on one device: an all_gather's result, the operands of the others.
      trips: how often it runs in one step.
      name: of its instruction; op_name: the name stack of the operation that it was made for.
      parts: `bytes` of each of the tensors that a combined collective moves.
      sources: the lines of the program that it comes from, innermost first ("model.py:12 (forward)").
      rounded: whether it brings to their places the pieces of a fused all-reduce-scatter, whose line it has: XLA for
        TPU sums as many rows in each as windows of one size hold, 720 of 5632 rows on eight chips for 704.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    trips: float
    name: str
    op_name: str
    parts: tuple[int, ...]
    sources: tuple[str, ...]
    rounded: bool = False


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


def compiled_collectives(
    hlo_text: str, mesh_axes: MeshAxes, *, while_trips: float = 16.0
) -> tuple[CompiledCollective, ...]:
    """The collectives in `compiled.as_text()`, in program order.

    A `-start`/`-done` pair and the fusions over which TPU spreads an asynchronous collective, in loops that run
    meanwhile too, are one; so are combined collectives, with the bytes of all.  `while_trips`: for loops whose trip
    count is unknown.
    """
    n_devices = math.prod(size for _, size in mesh_axes)
    sources = Sources(hlo_text)
    spread: dict[str, int] = {}
    found: list[CompiledCollective] = []
    for run in runs(hlo_text, while_trips):
        instruction = run.instruction
        kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
        if kind is None:
            continue
        scattered = _SCATTERED in run.fusion
        if channel := spread_channel(run):
            first = spread.setdefault(channel, len(found))
            if first < len(found):
                found[first] = replace(found[first], trips=min(found[first].trips, run.trips))
                continue
        if kind == "all_reduce" and scattered:
            kind = "reduce_scatter"
        parts = [bytes_of(run.siblings[name].type) for name in instruction.operands if name in run.siblings]
        if kind == "all_to_all":
            parts = [sum(parts)]  # its operands are the pieces of one tensor, one for each device
        if kind == "collective_permute":
            axes = axes_of_pairs(pairs_of(instruction.rest), mesh_axes)
        else:
            groups = groups_of(instruction.rest, n_devices)
            axes = axes_of_groups(groups, mesh_axes)
            if kind == "all_gather":
                parts = [size * groups.shape[1] for size in parts]
        sum_of_pieces = _sum_of_pieces(run) if kind == "collective_permute" else None
        op_name, frame = named(sum_of_pieces, ("", 0)) if sum_of_pieces is not None else (run.op_name, run.frame)
        found.append(
            CompiledCollective(
                kind=kind, axes=axes, bytes=sum(parts), trips=run.trips, name=instruction.name,
                op_name=op_name, parts=tuple(parts),
                sources=sources.lines(frame), rounded=sum_of_pieces is not None,
            )
        )  # fmt: skip
    return tuple(found)


def _sum_of_pieces(run: Run) -> Instruction | None:
    """The fused all-reduce-scatter whose result, or a slice of it, is permuted, see `CompiledCollective.rounded`."""
    made = run.siblings.get(run.instruction.operands[0])
    if made is not None and made.opcode == "slice":
        made = run.siblings.get(made.operands[0])
    return made if made is not None and made.opcode == "fusion" and f"calls=%{_SCATTERED}" in made.rest else None


def spread_channel(run: Run) -> str:
    """The channel of an asynchronous collective of which this is a part, "" for none.

    Its parts stand in several fusions, of loops within its own too, and have one channel.  Sums that are combined and
    scattered have one as well, all the same: each is a fusion of its own.
    """
    kind = _KINDS.get(run.instruction.opcode.removesuffix("-start")) if run.fusion else None
    channel = _CHANNEL.search(run.instruction.rest) if kind and _SCATTERED not in run.fusion else None
    return channel.group(1) if channel else ""


def estimated_cycles(hlo_text: str, *, while_trips: float = 16.0) -> float:
    """The TPU compiler's own cycles of one step: `estimated_cycles` of every instruction times its trips.

    Collectives carry none; CPU and GPU programs give 0.
    """
    return sum(cycles for _, cycles in instruction_cycles(hlo_text, while_trips=while_trips))


def instruction_cycles(hlo_text: str, *, while_trips: float = 16.0) -> Iterator[tuple[str, float]]:
    """(name, cycles of all its runs) of the instructions that carry an estimate, in program order."""
    for run in runs(hlo_text, while_trips):
        cycles = _CYCLES.search(run.instruction.rest)
        if cycles and int(cycles.group(1)) < _UNKNOWN_CYCLES and not run.fusion:
            yield run.instruction.name, int(cycles.group(1)) * run.trips


def compiled_memory(compiled: Any) -> Memory:
    """The memory of a `jax.stages.Compiled` on one device.

    XLA for TPU reports the gaps between buffers twice, once in the heap that it has and once more beside it, and counts
    them once where it decides whether a program fits: of VGG-16's 5.73 GB of temporaries the heap has 4.90, of which
    4.06 are ever alive at once.  A convolution's step beside 13.47 GB of arguments was compiled for v5e, which has
    16.91, with 3.52 GB of temporaries reported (3.41 of heap), an MLP's beside 14.26 GB with 2.89 (2.62); with 0.2 GB
    more of arguments both were refused, for arguments and heap (libtpu 0.0.42.1).  What `hardware.compile_for` compiled
    has its heap from XLA's dump.  Of other programs it is half of what is reported and of the most that is alive, which
    is reported too, with what lies in vector memory: at least the heap.  Where buffers lie in the places of arguments
    that are copied out of them (`cost.packing.lent`), what these leave empty is reported as gaps as well: a step of
    5.06 GB counts as 5.34, one of 6.73 as 7.76.

    Raises:
      ArgumentError: its backend gives no buffer assignment.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ArgumentError(
            f"{compiled!r} has no memory analysis: its backend reports none. Compile for CPU, TPU or GPU."
        )
    temp_bytes = kept_heap(compiled)
    if temp_bytes is None:
        temp_bytes = _heap_bytes(stats) if _platform(compiled) == "tpu" else stats.temp_size_in_bytes
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temp_bytes=temp_bytes,
        alias_bytes=stats.alias_size_in_bytes,
    )


def _heap_bytes(stats: Any) -> int:
    """Bytes of a TPU program's temporaries, gaps counted once; results without an argument's buffer count as alive."""
    alive = stats.peak_memory_in_bytes - stats.argument_size_in_bytes
    reported = int(stats.temp_size_in_bytes)
    return min(reported, math.ceil((reported + alive) / 2)) if alive > 0 else reported


def _platform(compiled: Any) -> str:
    """What a program is compiled for; "" for one without arguments and results."""
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    return str(next(iter(shardings[0].device_set)).platform) if shardings else ""


def reused_parameters(hlo_text: str) -> frozenset[int]:
    """The parameters of the program whose buffers its results are written into."""
    header = _ALIASES.search(hlo_text.partition("\n")[0])
    return frozenset(int(number) for number in _ALIAS.findall(header.group(1))) if header else frozenset()
