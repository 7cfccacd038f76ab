"""When operations run, and which loops' stacks are in memory twice: what XLA does beside the program's order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from ..ir import VIEWS, Graph, Loop, Op
from ..sharding import Rule
from .split_k import is_complex

_TWICE = frozenset({"integer_pow", "square"})
"""Operations of one operand that XLA computes as a product of two."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A graph with what fusion knows of it.

    Attributes:
      kinds: of every operation, "fused", "reduction", "heavy" or "edge".
      source: of every value whether it is made anywhere at no price; producers: its operation, or -1.
      loop_of: of every operation the innermost loop around it, or -1.
    """

    graph: Graph
    rules: Sequence[Rule]
    kinds: Sequence[str]
    source: Sequence[bool]
    producers: Sequence[int]
    loop_of: Sequence[int]


class SecondStack(NamedTuple):
    """A loop's stack that is in memory a second time.

    TPU: weights that are converted once, before the loops that slice them.  GPU: residuals that the forward loop writes
    in the order that their product came in, and that are written again in row-major order before the backward loop
    begins: the copy needs nothing of the last product before that loop, and is made earlier (GPT-2's logits are there).

    Attributes:
      value: one iteration's slice of it; trips: how many there are, in the slice's type.
      start, stop: when it is there; sliced: of a converted one the operation that slices it, which may gather it
        instead, converted.
    """

    value: int
    trips: float
    start: int
    stop: int
    sliced: int = -1


def run_times(flow: Flow, stored: Sequence[bool]) -> tuple[int, ...]:
    """When each operation runs on TPU, as the index of an operation, see `fusion.Traffic`.

    What is made of a sum waits for the kernel of that, which has read what it sums by then.
    """
    times = list(range(len(flow.graph.ops)))
    ready = [-1] * len(flow.graph.values)  # -1: waits for nothing in the loop body that it is made in
    for op in flow.graph.ops:
        if flow.kinds[op.index] in ("fused", "reduction"):
            first = max((_ready(flow, v, op, ready) for v in op.operands), default=-1)
            kept = any(stored[v] for v in op.results)
            if first >= 0:
                times[op.index] = first
            elif not kept:  # computed where it is read
                times[op.index] = flow.graph.loops[flow.loop_of[op.index]].start if flow.loop_of[op.index] >= 0 else 0
            whole = kept and (first < 0 or flow.kinds[op.index] == "reduction")
            for value in op.results:
                ready[value] = op.index if whole else first
        else:
            for value in op.results:
                ready[value] = op.index
    return tuple(times)


def _ready(flow: Flow, value: int, op: Op, ready: Sequence[int]) -> int:
    """When `value` is there for `op`: at once if it comes from outside the loop body, or when its own loop ends."""
    producer = flow.producers[value]
    if producer < 0 or flow.source[value]:
        return -1
    if flow.loop_of[producer] == flow.loop_of[op.index]:
        return ready[value]
    for loop in flow.graph.loops:
        if loop.start <= producer < loop.stop and not loop.start <= op.index < loop.stop:
            return loop.stop - 1
    return -1


def second_stacks(flow: Flow, platform: str) -> tuple[SecondStack, ...]:
    """What is in memory twice on "tpu", "gpu" or "cpu"."""
    if platform == "tpu":
        return converted_stacks(flow)
    if platform != "gpu":
        return ()
    return (*reordered_stacks(flow), *reordered_arguments(flow), *reordered_kernels(flow))


def converted_stacks(flow: Flow) -> tuple[SecondStack, ...]:
    """One for each argument that loops slice and read in a smaller type, or read so as it is."""
    graph, found = flow.graph, dict[tuple[int, str], SecondStack]()

    def add(before: int, after: int, dtype: str, times: float, loop: Loop, sliced: int = -1) -> None:
        first = found.get((before, dtype), SecondStack(after, times, loop.start, loop.stop, sliced))
        found[before, dtype] = first._replace(start=min(first.start, loop.start), stop=max(first.stop, loop.stop))

    slices = {op.results[0]: op for op in graph.ops if op.primitive == "scan_slice"}
    for op in graph.ops:
        converted = op.operands[0] if op.primitive == "convert_element_type" else -1
        sliced = slices.get(op.results[0] if op.primitive == "scan_slice" else converted)
        if sliced is not None and flow.producers[sliced.operands[0]] < 0:
            before, after = (graph.values[sliced.results[0] if sliced is not op else op.operands[0]], op.results[0])
            if graph.values[after].item_bytes < before.item_bytes:
                loop = graph.loops[flow.loop_of[sliced.index]]
                add(sliced.operands[0], after, graph.values[after].dtype, loop.trips, loop, sliced.index)
    for value, loop in _read_rounded(graph):
        add(value, value, graph.values[value].narrow().dtype, 0.5, loop)
    return tuple(found.values())


def _read_rounded(graph: Graph) -> Iterator[tuple[int, Loop]]:
    """(value, loop): what loops don't change, and all that read it in there round to half its bytes."""
    producers, around = graph.producers(), graph.loops_around()
    loops = {(loop.start, loop.stop): loop for loop in graph.loops}
    reads: dict[tuple[int, tuple[int, int]], list[tuple[int, int]]] = {}
    for value in sorted({graph.ops[op].operands[position] for op, position in graph.narrow_reads}):
        for use in graph.uses()[value] if not graph.values[value].narrowed else ():
            inside = [loop for loop in around[use[0]] if not loop[0] <= producers[value] < loop[1]]
            if inside and graph.ops[use[0]].primitive != "scan_slice":
                reads.setdefault((value, inside[0]), []).append(use)
    for (value, place), uses in reads.items():
        if graph.narrow_reads.issuperset(uses):
            yield value, loops[place]


def written_again(flow: Flow) -> set[int]:
    """The stacks that XLA for GPU writes in a product's order, and again in row-major order for the loop that reads."""
    written = {op.results[0]: op.operands[0] for op in flow.graph.ops if op.primitive == "scan_stack"}
    sliced = {op.operands[0] for op in flow.graph.ops if op.primitive == "scan_slice"}
    return {stack for stack, value in written.items() if stack in sliced and permuted(flow, value)}


def reordered_stacks(flow: Flow) -> tuple[SecondStack, ...]:
    """The largest of those that are `written_again` or `read_reordered`: one is there twice at a time, as the loop that
    reads begins."""
    largest: SecondStack | None = None
    bytes_of = [tensor.bytes for tensor in flow.graph.values]
    again, sliced = written_again(flow), read_reordered(flow)
    for op in flow.graph.ops:
        if op.primitive == "scan_slice" and (op.operands[0] in again or op.results[0] in sliced):
            loop, value = flow.graph.loops[flow.loop_of[op.index]], op.results[0]
            if largest is None or bytes_of[value] * loop.trips > bytes_of[largest.value] * largest.trips:
                largest = SecondStack(value, loop.trips, _last_product(flow, loop), loop.start + 1)
    return (largest,) if largest else ()


_PASSED_ON = frozenset({"carry_init", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "squeeze"})
"""What hands on what it reads, or a part, in the same order."""


def reordered_arguments(flow: Flow) -> tuple[SecondStack, ...]:
    """Arguments that loops carry or slice and that products inside read in another order.

    XLA for GPU wants the batch dimensions of a product first: caches [batch, length, heads, dim] whose heads are a
    batch are transposed before the loop.  Donated ones give up their buffers to one another: one is there twice at a
    time, the largest (decoding with caches compiled for H100, jax 0.10.2).  cuBLAS multiplies int8 by int8 with the
    dimensions that it sums last: quantised weights that are summed along their rows are transposed, too.
    """
    graph, place = flow.graph, {value: position for position, value in enumerate(flow.graph.inputs)}
    taken: dict[int, tuple[int, SecondStack]] = {}  # what holds elements of an argument -> that one, and its copy
    wanted: dict[int, SecondStack] = {}
    for op in graph.ops:
        first = op.operands[0] if op.operands else -1
        if op.primitive == "carry_init" and first in place:
            taken[op.results[0]] = first, SecondStack(op.results[0], 1.0, op.index, op.index + 1)
        elif op.primitive == "scan_slice" and first in place:
            loop = graph.loops[flow.loop_of[op.index]]
            taken[op.results[0]] = first, SecondStack(op.results[0], loop.trips, loop.start, loop.start + 1)
        elif op.primitive in _PASSED_ON and first in taken:
            argument, copy = taken[first]
            if op.primitive == "scatter":  # a part that is scattered into is a buffer of its own, not the stack's
                copy = copy._replace(stop=_end(graph, copy.start))
            taken.update(dict.fromkeys(op.results, (argument, copy)))
        elif op.primitive == "dot_general":
            small = all(graph.values[v].dtype == "int8" for v in op.operands)
            for value, summed, batch in zip(op.operands, *op.params["dimension_numbers"], strict=True):
                rank = len(graph.values[value].shape)
                turned = small and max(summed, default=0) < rank - 1
                if value in taken and (sorted(batch) != list(range(len(batch))) or turned):
                    wanted.setdefault(*taken[value])
    donated = {v: copy for v, copy in wanted.items() if place[v] in graph.donated}
    kept = [copy._replace(stop=_end(graph, copy.start)) for v, copy in wanted.items() if v not in donated]
    largest = max(donated, key=lambda v: graph.values[v].bytes, default=-1)
    return (*kept, *([donated[largest]] if donated else []))


def reordered_kernels(flow: Flow) -> tuple[SecondStack, ...]:
    """Arguments that convolutions in loops take their kernels from.

    XLA for GPU gives cuDNN kernels with the channels that are made first and those that are summed last.  In a loop
    that takes the same ones each time they are turned before it, in the argument's type, and kept: a diffusion model
    that samples with 296 million weights in f32 has 0.9 GB more (H100, jax 0.10.2).  Of one pixel they need no turning.
    """
    graph, given, found = flow.graph, set(flow.graph.inputs), dict[int, SecondStack]()
    around = graph.loops_around()
    for op in graph.ops:
        if op.primitive != "conv_general_dilated" or not around[op.index]:
            continue
        value, (made, summed, *window) = op.operands[1], op.params["dimension_numbers"].rhs_spec
        rank = len(window) + 2
        while value not in given and graph.ops[flow.producers[value]].primitive == "convert_element_type":
            value = graph.ops[flow.producers[value]].operands[0]
        pixels = math.prod(graph.values[value].shape[d] for d in window) if value in given else 1
        if pixels > 1 and (made, summed) != (0, rank - 1):
            start, stop = around[op.index][0]
            before = found.get(value, SecondStack(value, 1.0, start, stop))
            found[value] = before._replace(start=min(start, before.start), stop=max(stop, before.stop))
    return tuple(found.values())


def _end(graph: Graph, start: int) -> int:
    """When the loop that begins at `start`, or right after it, ends."""
    return min((loop.stop for loop in graph.loops if loop.start >= start), default=start + 1)


def read_reordered(flow: Flow) -> set[int]:
    """The slices of stacks that a loop reads in the order of a product after it.

    A product that sums over several dimensions wants them side by side.  Where what a loop stacked is transposed for
    that, XLA for GPU lets the loop write it in that order, and compute all that it is elementwise made of so (residuals
    of a hidden Markov model's forward algorithm, f32[511, 64, 64, 512], are there twice; H100, jax 0.10.2).
    """
    graph = flow.graph
    wanted: set[int] = set()  # values that lie in a product's order
    for op in reversed(graph.ops):
        kind = flow.kinds[op.index]
        if flow.rules[op.index].matmul and op.primitive == "dot_general":
            for value, dims in zip(op.operands, op.params["dimension_numbers"][0], strict=True):
                if len(dims) > 1 and _transposed(flow, value):
                    wanted.add(value)
        elif kind == "reduction" and flow.loop_of[op.index] >= 0 and _sums_apart(graph, op):
            wanted.update(v for v in op.operands if _of_its_loop(flow, v, op))
        elif op.primitive == "carry_next" and op.operands[1] in wanted:
            wanted.add(op.operands[0])
        elif kind in ("fused", "reduction") or op.primitive == "scan_stack":
            if not wanted.isdisjoint(op.results):
                wanted.update(v for v in op.operands if not flow.source[v] and len(graph.values[v].shape) > 1)
    return {op.results[0] for op in graph.ops if op.primitive == "scan_slice" and op.results[0] in wanted}


def _sums_apart(graph: Graph, op: Op) -> bool:
    """Whether a reduction to two dimensions or more sums some before and some after one that it leaves."""
    shape, summed = graph.values[op.operands[0]].shape, op.params.get("axes", ())
    dims = [d in summed for d, size in enumerate(shape) if size > 1]
    left = [place for place, gone in enumerate(dims) if not gone]
    return len(left) > 1 and any(dims[: left[0]]) and any(dims[left[-1] :])


def _of_its_loop(flow: Flow, value: int, op: Op) -> bool:
    """Whether `value` is elementwise made of nothing but what the loop around `op` slices, carries or is handed."""
    seen, left = {value}, [value]
    while left:
        maker = flow.producers[left.pop()]
        made = flow.graph.ops[maker]
        if maker < 0 or flow.loop_of[maker] != flow.loop_of[op.index] or made.primitive == "scan_slice":
            continue
        if flow.kinds[maker] != "fused":
            return False
        left += [v for v in made.operands if v not in seen]
        seen.update(made.operands)
    return True


def stack_traffic(
    flow: Flow, op: Op, platform: str, leaves: Sequence[Mapping[int, float] | None], products: Set[int], again: Set[int]
) -> tuple[float, float]:
    """Bytes that one iteration reads and writes to slice a stack or to write its part of one.

    A stack is written where its part is made, and a slice read by those who use it.  GPU: what is written is read
    first, the stack is filled with zeros before its loop, a product's slice is a buffer of its own, and a stack in
    a product's order is written again in row-major order (kernels of the compiled GPT-2 medium).

    Args:
      leaves: of every value what a kernel computes it from; products: what products read; again: see `written_again`.
    """
    size = flow.graph.values[op.operands[0] if op.primitive == "scan_stack" else op.results[0]].bytes
    if op.primitive == "scan_stack":
        if platform != "gpu":
            return 0.0, size
        return sum((leaves[op.operands[0]] or {op.operands[0]: size}).values()), 2 * size
    if platform != "gpu":
        return 0.0, 0.0
    times = (op.results[0] in products) + (op.operands[0] in again)
    return times * size, times * size


def _transposed(flow: Flow, value: int) -> bool:
    """Whether `value` is computed, by movement and elementwise work alone, of what a transposition put in order."""
    while (maker := flow.producers[value]) >= 0 and flow.kinds[maker] == "fused":
        op = flow.graph.ops[maker]
        if op.primitive == "transpose":
            return True
        made = [v for v in op.operands if flow.graph.values[v].bytes * 2 > flow.graph.values[value].bytes]
        if not made:
            return False
        value = made[0]
    return False


def _last_product(flow: Flow, loop: Loop) -> int:
    """When the last product before `loop` runs, in the same body and after the loops before it; else its start."""
    done = max((other.stop for other in flow.graph.loops if other.stop <= loop.start), default=loop.start)
    products = (t for t in range(done, loop.start) if flow.rules[t].matmul)
    return max(products, default=loop.start)


def permuted(flow: Flow, value: int) -> Op | None:
    """The product of whose transposed result `value` is elementwise made: XLA leaves it in the order of that."""
    while (producer := flow.producers[value]) >= 0:
        op = flow.graph.ops[producer]
        if op.primitive == "transpose":
            shape = flow.graph.values[value].shape
            order = [d for d, size in zip(op.params["permutation"], shape, strict=True) if size > 1]
            maker = flow.producers[unmoved(flow.graph, flow.producers, value)]
            return flow.graph.ops[maker] if order != sorted(order) and flow.rules[maker].matmul else None
        if flow.kinds[producer] != "fused":
            return None
        size = flow.graph.values[value].shape
        alike = [v for v in op.operands if flow.graph.values[v].shape == size and not flow.source[v]]
        if op.primitive in VIEWS:
            alike = list(op.operands)
        if not alike:
            return None
        value = alike[0]
    return None


def unmoved(graph: Graph, producers: Sequence[int], value: int) -> int:
    """What `value` is a transposition or reshape of: a contraction's operand is read in any order."""
    while producers[value] >= 0 and graph.ops[producers[value]].primitive in VIEWS:
        value = graph.ops[producers[value]].operands[0]
    return value


def made_of(graph: Graph, producers: Sequence[int], value: int, within: Callable[[Op], bool]) -> Iterator[int]:
    """What a value is made of by operations `within`: arguments, and what others make; itself if that is made so."""
    left, seen = [value], {value}
    while left:
        value = left.pop()
        maker = graph.ops[producers[value]] if producers[value] >= 0 else None
        if maker is None or not within(maker):
            yield value
        else:
            left += {*maker.operands} - seen
            seen |= {*maker.operands}


def unwidened(graph: Graph, producers: Sequence[int], value: int) -> int:
    """What `value` is a conversion of, or itself."""
    maker = graph.ops[producers[value]] if producers[value] >= 0 else None
    return maker.operands[0] if maker is not None and maker.primitive == "convert_element_type" else value


def origin(graph: Graph, producers: Sequence[int], value: int) -> int:
    """What `value` is but another type or order of."""
    while (made := unwidened(graph, producers, unmoved(graph, producers, value))) != value:
        value = made
    return value


def taken_in(
    graph: Graph, producers: Sequence[int], kinds: Sequence[str], source: Sequence[bool], value: int, by_triton: bool
) -> int:
    """What a GPU's product that reads `value` has in memory.

    XLA's Triton products compute of it what reads no more bytes than it makes (`IsInputWorthFusing`,
    xla/service/gpu/triton_tiling_propagation.cc): relus and exponentials, but no sum with a bias and no normalised row
    (an MLP, a perceiver and an MLP-Mixer compiled for H100, jax 0.10.2).  What is padded they don't, as the gradient of
    all scores but the last.  cuBLAS, which complex numbers are multiplied by, reads what it multiplies as it is.
    """
    value, takes = unmoved(graph, producers, value), by_triton and not is_complex(graph, value)
    while takes and (made := producers[value]) >= 0 and kinds[made] == "fused":
        op = graph.ops[made]
        read = [v for v in op.operands if not source[v]]
        if len(read) != 1 or op.primitive in _TWICE or op.primitive == "pad":
            break
        if graph.values[read[0]].bytes > graph.values[value].bytes:
            break
        value = unmoved(graph, producers, read[0])
    return value
