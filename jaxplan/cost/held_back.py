"""Products that XLA for GPU holds back: weights' gradients that are all_reduced.

Nothing but the end of the step wants them, and XLA's latency-hiding scheduler, which works from the last operation to
the first, places them between the starts and ends of their sums: after all of the backward pass, one beside each sum.
They keep their operands till then, so that the activations and gradients of every layer are there at once.

It has times of kernels for Hopper and Blackwell alone (see `hardware.xla_times`); what GPUs before them run stays where
the program has it.  Where it is known what kernels take it is walked through, see `latency_hiding`; else it is taken to
be so:

What was compiled for eight H100 by jax 0.10.2: the layers' gradients of MLPs of width 1024, 2048, 4096 and 8192 and of
a GPT of four layers, not scanned, all run after the last product of the backward pass where they are all_reduced,
whole or after a reduce_scatter; where they are only scattered, layers' gradients run with the backward pass.  A loop
stays where it stands, and an LSTM's products before the backward loops stay before them.

XLA for TPU makes those products where they stand, and sums several in one, up to some 120 MiB of them: three of
bf16[4096, 4096], four of [3584, 3584], two of [5376, 5376], but not three of [4608, 4608] nor two of 67 MB (MLPs under
data parallelism, compiled for v5e, v5p and v6e, jax 0.10.2, libtpu 0.0.42.1).  They wait for the last of them, those of
a network of fewer parameters for the end of the backward pass, where the forward pass's activations have been, so that
what is large finds no room there: of a perceiver with 2.8 GB alive the heap is 3.4.

Gradients of a weight that several layers use are added up behind the backward pass there, where each is summed over
devices by itself: where the sum is in f32 and they are bf16 (else XLA sums what is added, once).  They wait for the
last of them, or what they are made of does (24 layers of one MLP of 2048 and 8192, recomputed and not, and an ALBERT,
compiled for v5e: two thirds to half of their memory; not those of two layers).

Sums that are only scattered are held back too where XLA makes one collective of all of them, for that one wants the
last of them: a diffusion U-Net, a ConvNeXt and a MobileNet of a few million parameters.  Where it makes several, the
products run with the backward pass, and what they make waits for its end, as each collective has gradients of early and
of late layers: those of a diffusion transformer's six blocks, 226 MB, and of twelve, 507 (H100, jax 0.10.2).  The first
one, the last layer's, runs beside the last collective, and keeps what it reads (an MLP of 8192 under ZeRO-3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..ir import SUMS, Graph, Op
from ..sharding import UNREDUCED, MeshAxes, Step, reshard_steps
from .collectives import most_combined_bytes
from .tiles import local_bytes

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

_SAME_SUM = frozenset({"convert_element_type", "reduce_sum", "reshape", "rev", "transpose"})
"""What a gradient goes through before it is summed."""

_USES = 3
"""Of a weight, from which on its gradients wait for the last of them on TPU, see the module."""

COMBINED_ON_TPU = 120 * 2**20
"""Up to which size XLA for TPU sums gradients in one: between 115.6 and 127.4 MB, see the module."""


def held_back(
    graph: Graph,
    axes: MeshAxes,
    stored: Sequence[bool],
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Mapping[int, np.ndarray] | None = None,
) -> tuple[int, ...]:
    """`times` of a step on GPU, with its last products held back if the sum of one of them is all_reduced.

    Args:
      stored, times: see `fusion.Traffic`.
      values, reads: the layout row of every value where it is made, and of every operand as it is read; outputs: of
        results, by position.

    Returns:
      Times at which products after the last loop that no other product needs run when what they make is wanted.
    """
    last = behind_loops(graph)
    held, needed = last_products(last, ())
    steps = [step for _, _, step in summed_over_devices(graph, axes, held, values, reads)]
    for position, row in (outputs or {}).items():
        if (value := graph.outputs[position]) in held and value in values:
            steps += reshard_steps(values[value], row, graph.values[value].bytes, axes)
    scattered = [result_bytes(step, axes) for step in steps if step.kind == "reduce_scatter"]
    most = most_combined_bytes("reduce_scatter", "gpu")
    beside = [op.index for op in last if not held.isdisjoint(op.results)]
    if not any(step.kind == "all_reduce" for step in steps) and not 0 < sum(scattered) <= most:
        beside = beside[:1] if len(scattered) > 1 else []
    return _put_back(last, times, stored, needed, {*beside})


def _put_back(
    last: Sequence[Op], times: Sequence[int], stored: Sequence[bool], needed: Collection[int], held: Collection[int]
) -> tuple[int, ...]:
    """`times` with operations put off until what they make is wanted, and all with them that is no buffer and that they
    alone read.

    Args:
      needed: what the backward pass goes on with.
    """
    later = list(times)
    wanted: dict[int, int] = {}
    for op in reversed(last):
        if op.index in held or not any(stored[v] or v in needed for v in op.results):
            end = last[-1].index if op.index in held else 0  # the caller wants it
            until = min((wanted[v] for v in op.results if v in wanted), default=end)
            later[op.index] = max(later[op.index], until)
        for value in op.operands:
            wanted[value] = min(wanted.get(value, later[op.index]), later[op.index])
    return tuple(later)


def combined_sums(
    graph: Graph,
    axes: MeshAxes,
    times: Sequence[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, bytes) of the last products' sums on GPU that are scattered together, at the end; see above."""
    last = behind_loops(graph)
    held, _ = last_products(last, ())
    producers = graph.producers()
    scattered: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for value, _, step in summed_over_devices(graph, axes, held, values, reads):
        if step.kind == "reduce_scatter":
            scattered.setdefault(step.axes, []).append((value, result_bytes(step, axes)))
    until = max((times[op.index] for op in last if op.primitive in PRODUCTS), default=0) + 1
    for sums in scattered.values():
        combined = [value for value, size in sums if size <= most_combined_bytes("reduce_scatter", "gpu") / 2]
        for value in combined if len(combined) > 1 else ():
            made = times[producers[value]] + 1
            if made < until:
                yield made, until, local_bytes(graph.values[value], values[value], axes, "gpu")


def summed_over_devices(
    graph: Graph,
    axes: MeshAxes,
    made_of: Collection[int],
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> Iterator[tuple[int, np.ndarray, Step]]:
    """(value, layout that is read, collective) of what finishes sums over devices among `made_of`, once a layout."""
    seen: set[tuple[int, bytes]] = set()
    for (reader, position), row in reads.items():
        value = graph.ops[reader].operands[position]
        if value in made_of and (made := values.get(value)) is not None and UNREDUCED in made.tolist():
            key = value, row.tobytes()
            if key not in seen:
                seen.add(key)
                for step in reshard_steps(made, row, graph.values[value].bytes, axes):
                    yield value, row, step


def result_bytes(step: Step, axes: MeshAxes) -> float:
    """Of a reduce_scatter on one device."""
    sizes = dict(axes)
    return step.bytes / math.prod(sizes[name] for name in step.axes)


def awaited_sums(graph: Graph, times: Sequence[int], size_of: Callable[[int], int]) -> dict[int, int]:
    """Until when the sums over devices of a TPU's last products wait, by what they add up: till all are there that are
    summed in one.

    Args:
      size_of: bytes of a value on one device, 0 for what is not summed.
    """
    last = behind_loops(graph)
    held, needed = last_products(last, ())
    groups, so_far = list[list[int]](), math.inf
    for op in last:
        for value in op.results:
            if op.primitive in PRODUCTS and value in held and (size := size_of(value)):
                if so_far + size > COMBINED_ON_TPU:
                    groups.append([])
                    so_far = 0
                groups[-1].append(value)
                so_far += size
    made = graph.producers()
    until = {value: times[made[together[-1]]] + 1 for together in groups for value in together}
    for together in _added_up(last, held, size_of):
        end = max(times[made[value]] for value in together) + 1
        until.update((value, max(end, until[value])) for value in together)
    for op in last:
        if op.primitive in _SAME_SUM and op.operands[0] in until:
            until.update((v, until[op.operands[0]]) for v in op.results if v not in needed)
    return until


def _added_up(last: Sequence[Op], held: Collection[int], size_of: Callable[[int], int]) -> Iterator[Collection[int]]:
    """The gradients of a weight that is used several times, each of which is summed over devices before it is added."""
    parts: dict[int, tuple[int, ...]] = {value: (value,) for value in held if size_of(value)}
    for op in last:
        if op.primitive in _SAME_SUM and op.operands[0] in parts:
            parts.update(dict.fromkeys(op.results, parts[op.operands[0]]))
        elif op.primitive in SUMS and not size_of(op.results[0]):
            both = tuple(value for operand in op.operands for value in parts.get(operand, ()))
            if both:
                parts[op.results[0]] = both
            if len(both) >= _USES:
                yield both


def put_off(graph: Graph, times: Sequence[int], lists: Collection[int], until: int) -> tuple[int, ...]:
    """`times` of a step on TPU whose SparseCores bring these values, lists of rows, into another layout until `until`.

    XLA starts them as soon as the rows are there, and what wants nothing of the list runs beside it: the last products
    that no other product needs, which keep their operands till then (a recommender's layers, beside the gradients of
    its bags of rows: compiled for v5p and v7x, jax 0.10.2, libtpu 0.0.42.1; on v5e and v6e the core itself does it).
    """
    last = behind_loops(graph)
    held, _ = last_products(last, lists)
    return run_later(last, times, {op.index: until for op in last if not held.isdisjoint(op.results)})


def run_later(last: Sequence[Op], times: Sequence[int], until: Mapping[int, int]) -> tuple[int, ...]:
    """`times` with operations of `last` run no sooner than `until` says, and what is made of them no sooner either."""
    later, after = list(times), dict[int, int]()
    for op in last:
        ready = max((after[v] for v in op.operands if v in after), default=0)
        if (start := max(ready, until.get(op.index, 0))) > later[op.index]:
            later[op.index] = start
            after.update(dict.fromkeys(op.results, start))
    return tuple(later)


def behind_loops(graph: Graph) -> Sequence[Op]:
    """The operations after the last loop that holds a product or that one waits for."""
    if not graph.loops:
        return graph.ops
    needed, start = set[int](), len(graph.ops)
    loops = {loop.stop: loop for loop in graph.loops}
    for op in reversed(graph.ops):
        if (loop := loops.get(op.index + 1)) is not None:
            inside = graph.ops[loop.start : loop.stop]
            # what a loop hands on is what it began with, made before it
            made = {v for one in inside for v in one.results}
            made.update(v for one in inside if one.primitive == "carry_next" for v in one.operands)
            if not needed.isdisjoint(made) or any(one.primitive in PRODUCTS for one in inside):
                break
        start = op.index
        if op.primitive in PRODUCTS or not needed.isdisjoint(op.results):
            needed.update(op.operands)
    return graph.ops[start:]


def last_products(last: Sequence[Op], wanted: Iterable[int]) -> tuple[set[int], set[int]]:
    """What products make that neither another product needs nor what is `wanted`, and what these need."""
    needed = set(wanted)
    for op in reversed(last):
        if op.primitive in PRODUCTS or not needed.isdisjoint(op.results):
            needed.update(op.operands)
    return {v for op in last if op.primitive in PRODUCTS for v in op.results} - needed, needed
