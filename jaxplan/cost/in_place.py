"""What a kernel may be written over: XLA gives the result of a fusion the buffer of an operand that it reads element by
element, in the same shape, for the last time (HloDataflowAnalysis::CanShareOperandBufferWithUser).

A gradient takes the place of the activation that its derivative is computed from, on TPU unless the same kernel sums it
up for a bias: a kernel of several results has a buffer for each where the layers are 8192 wide, though not where they
are 1024 (MLPs of bf16 with and without biases compiled for v5e, jax 0.10.2, libtpu 0.0.42.1).  On GPU it takes that
place all the same (relus' gradients, and those of logits with a bias and of a cross entropy with targets in full).
Nor is anything written on TPU over what such a kernel made: the gradient of attention's scores lies beside that of its
softmax, which one kernel makes with the sums of its rows (bf16[4, 12, 1024, 1024]).

What is sorted takes the place of its operands (one and two of them, on both platforms, jax 0.10.2).

A softmax's kernels on GPU (Triton's) write over nothing: the gradient of attention's f32 scores lies beside them, two
of f32[2, 16, 1024, 1024] (latent attention over experts, H100).

On GPU, too: the gradient of capped logits takes the place of what a product made, f32[16, 2048, 32000], and so does
the sum of two log-likelihoods' gradients. Where XLA scatters into what is made, as labels' gradients into a
softmax's, that has a buffer of its own, and so has what is made beside a sum (a GRU's logits, two towers; H100, jax
0.10.2).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from .residency import Flow
from .scores import is_batched


def overwritable(
    flow: Flow, stored: Sequence[bool], times: Sequence[int] | None = None, scattered: Container[int] = ()
) -> Mapping[int, tuple[int, ...]]:
    """For values that a fused kernel makes, the stored ones of their shape that it reads element by element; for what
    is sorted, what that was.

    Args:
      times: GPU: when each operation runs, earlier than it stands where it is in the kernel of a sum.
      scattered: what something is scattered into.
    """
    graph = flow.graph
    found: dict[int, tuple[int, ...]] = {}
    kept = {*graph.inputs, *graph.outputs, *graph.constants}
    summed = _summed(flow, stored)

    def batched(value: int) -> bool:
        return is_batched(graph.ops[flow.producers[value]])

    for op in graph.ops:
        if op.primitive == "sort":
            pairs = zip(op.results, op.operands, strict=True)
            found.update({made: (read,) for made, read in pairs if stored[made] and stored[read] and read not in kept})
        beside = times is not None and times[op.index] < op.index
        for value in op.results if not beside else ():
            if value in scattered:
                continue
            alone = times is not None or not summed[value]
            if stored[value] and alone and flow.kinds[op.index] == "fused" and flow.rules[op.index].follows:
                tensor = graph.values[value]
                read, exponents = _read(flow, stored, value)
                near = {
                    other
                    for other in read
                    if other not in kept and graph.values[other].item_bytes == tensor.item_bytes
                    if (not summed[other] if times is None else not (exponents and batched(other)))
                }
                if near:
                    found[value] = tuple(sorted(near))
    return found


def _summed(flow: Flow, stored: Sequence[bool]) -> list[bool]:
    """For every value whether a reduction reads it, or what is made of it and not stored."""
    found = [False] * len(flow.graph.values)
    for op in reversed(flow.graph.ops):
        kind = flow.kinds[op.index]
        if kind == "reduction" or (kind == "fused" and any(found[v] and not stored[v] for v in op.results)):
            for value in op.operands:
                found[value] = True
    return found


def _read(flow: Flow, stored: Sequence[bool], value: int) -> tuple[set[int], bool]:
    """The stored values of a value's own shape that it is computed from element by element, and whether exponentials
    are."""
    graph, found, seen, exponents = flow.graph, set[int](), {value}, False
    waiting = [value]
    while waiting:
        maker = flow.producers[waiting.pop()]
        if maker < 0 or flow.kinds[maker] != "fused" or not flow.rules[maker].follows:
            continue
        exponents |= graph.ops[maker].primitive == "exp"
        for operand in graph.ops[maker].operands:
            if operand in seen or graph.values[operand].shape != graph.values[value].shape:
                continue
            seen.add(operand)
            if stored[operand]:
                found.add(operand)
            else:
                waiting.append(operand)
    return found, exponents
