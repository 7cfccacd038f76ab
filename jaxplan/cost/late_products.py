"""Products that XLA for GPU runs late: just before what they make is wanted.

In a loop all of them but those that are added to carries (`carries`), a weight's gradient at the end of the iteration,
with their operands kept till then: so XLA for GPU schedules the backward loops of GPT-2 medium and XL, of a GPT block
and of a mixture of experts (H100, jax 0.10.2).
Outside of loops products run as they stand in the program, but for those that read a softmax narrower than the scores
that it is of, bf16 of f32, or one of f32: the values' gradient keeps it while the scores' gradient is made (stacks of
attention, `jax.nn.dot_product_attention` among them; of bf16 scores and softmax it does not, nor, of f32, always:
vision transformers of 196 tokens and 128 images a device do not, Whisper and those of 256 tokens do).  So it is of bf16
scores that are converted for their softmax, where one kernel makes this by rows, along what lies last (`bnts`, `bths`
of one key and `bktgs`, -5, -9 and -5 % without; not of `btns`, `btkgs` and `bkgts`; H100, jax 0.10.2, 2026-11-29).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..ir import Op
from .carries import added_in_place
from .memory_orders import products_of, softmaxes_by_rows
from .residency import Flow, unmoved
from .scores import is_batched


def late_products(flow: Flow, stored: Sequence[bool]) -> tuple[int, ...]:
    """When each operation runs on GPU, as the index of an operation, see the module and `fusion.Traffic`."""
    times = list(range(len(flow.graph.ops)))
    readers = [[reader for reader, _ in uses] for uses in flow.graph.uses()]
    scores: dict[tuple[int, ...], float] = {}
    for tensor in (flow.graph.values[op.results[0]] for op in flow.graph.ops if is_batched(op)):
        shape = tuple(sorted(tensor.shape))
        scores[shape] = max(scores.get(shape, 0.0), tensor.item_bytes)
    added, by_rows = added_in_place(flow, stored), softmaxes_by_rows(flow)
    for index, made in added.items():
        times[index] = made
    for op in reversed(flow.graph.ops):
        loop = flow.loop_of[op.index]
        if op.index in added:
            continue
        waits = flow.rules[op.index].matmul or (
            flow.kinds[op.index] == "fused" and not any(stored[v] for v in op.results)
        )
        if loop >= 0 and waits:
            wanted = [_wanted(flow, loop, reader, times) for v in op.results for reader in readers[v]]
            times[op.index] = max(op.index, min(wanted, default=op.index))
        elif loop < 0 and is_batched(op) and any(_keeps_softmax(flow, v, scores, by_rows) for v in op.operands):
            times[op.index] = max(op.index, _first_reader(flow, op, readers, stored, times))
    return tuple(times)


def _keeps_softmax(flow: Flow, value: int, scores: Mapping[tuple[int, ...], float], by_rows: Set[int]) -> bool:
    """Whether a product reads a softmax that is rounded from the type of wider scores, or made by rows, or one in f32.

    Args:
      by_rows: see `softmaxes_by_rows`.
    """
    made, tensor = flow.producers[unmoved(flow.graph, flow.producers, value)], flow.graph.values[value]
    if made < 0 or (wide := scores.get(tuple(sorted(tensor.shape)), 0.0)) < tensor.item_bytes:
        return False
    op = flow.graph.ops[made]
    if op.primitive == "convert_element_type":
        return wide > tensor.item_bytes or not by_rows.isdisjoint(products_of(flow, op.operands[0]))
    maker = flow.producers[op.operands[0]] if op.primitive == "div" else -1
    return wide == tensor.item_bytes == 4 and maker >= 0 and flow.graph.ops[maker].primitive == "exp"


def _first_reader(
    flow: Flow, op: Op, readers: Sequence[Sequence[int]], stored: Sequence[bool], times: Sequence[int]
) -> int:
    """When what `op` makes, or what is computed of that where it is read, is read first, outside of loops."""
    found, left, seen = list[int](), [op.index], {op.index}
    while left:
        for reader in (reader for value in flow.graph.ops[left.pop()].results for reader in readers[value]):
            if flow.loop_of[reader] >= 0:
                return op.index
            if flow.kinds[reader] != "fused" or any(stored[v] for v in flow.graph.ops[reader].results):
                found.append(times[reader])
            elif reader not in seen:
                seen.add(reader)
                left.append(reader)
    return min(found, default=op.index)


def _wanted(flow: Flow, loop: int, reader: int, times: Sequence[int]) -> int:
    """When `reader` wants what the body of `loop` makes: as a whole, where it stands in a loop inside or outside."""
    if flow.loop_of[reader] == loop:
        return times[reader]
    for inner in flow.graph.loops:
        if inner.start <= reader < inner.stop and inner.start > flow.graph.loops[loop].start:
            return inner.start
    return flow.graph.loops[loop].stop - 1
