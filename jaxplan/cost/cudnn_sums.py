"""What cuDNN's convolutions add to their results before they write them.

XLA for GPU hands a convolution the number by which alone it is scaled next, and of a sum that alone reads it then that
sum's other addend: a bias, and one array like the result, each once and in any order (`CudnnFusedConvRewriter`).  So of
a residual block without normalisations, of a layer's bias and of the gradient of what a convolution of 1 x 1 and
something else read, the sum is in memory and the convolution's result never is; what is added is in memory, too.  It
does so for all types, kernels, strides, dilations and numbers of spatial dimensions, for the gradients of inputs where
kernels of 1 x 1, dilated or grouped ones make those the convolutions that they look like, and not for those of one
channel a group, gradients of kernels, differences, factors of channels or sums of what was converted (36 forms in f32
and bf16, and ten kinds of convolutions, compiled for H100, jax 0.10.2).  That a plan may sum over devices in between is
not looked at: then one array as large is kept for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..ir import SUMS, Graph, Op
from .indices import unviewed
from .kinds import is_kernels_gradient


class CudnnSum(NamedTuple):
    """A convolution, `steps` that its kernel computes one after the other, of which only the last is written, and
    `beside`, what it reads for that as large as its result."""

    convolution: int
    steps: tuple[int, ...]
    beside: tuple[int, ...]


def cudnn_sums(graph: Graph, producers: Sequence[int]) -> tuple[CudnnSum, ...]:
    """All of a program, by the convolution's place in it."""
    found, taken = list[CudnnSum](), set[int]()
    for op in graph.ops:
        if op.primitive != "conv_general_dilated" or not _forward(graph, producers, op):
            continue
        features = op.params["dimension_numbers"].out_spec[1]
        value, steps, beside, biases = op.results[0], list[int](), list[int](), 0
        shape = graph.values[value].shape
        if (scale := _only_reader(graph, value)) is not None and _scales(graph, scale):
            steps, value = [scale.index], scale.results[0]
        while (reader := _only_reader(graph, value)) is not None and reader.index not in taken:
            other = next((v for v in reader.operands if v != value), value)
            biased = _is_bias(graph, producers, other, shape[features])
            alike = graph.values[other].shape == shape and not biased
            if reader.primitive not in SUMS or other == value or biases + biased > 1 or len(beside) + alike > 1:
                break
            if not (biased or alike):
                break
            biases += biased
            beside += [other] * alike
            steps.append(reader.index)
            value = reader.results[0]
        if steps:
            taken.update(steps)
            found.append(CudnnSum(op.index, tuple(steps), tuple(beside)))
    return tuple(found)


def in_memory(graph: Graph, producers: Sequence[int], found: Sequence[CudnnSum]) -> Iterator[int]:
    """What cuDNN writes, and what it adds to it."""
    for one in found:
        yield graph.ops[one.steps[-1]].results[0]
        yield from (unviewed(graph, producers, value) for value in one.beside)


def summed_traffic(
    graph: Graph, found: Sequence[CudnnSum], reads: list[tuple[float, ...]], writes: list[tuple[float, ...]]
) -> None:
    """Takes out of `reads` and `writes`, bytes by operand and by result of every operation, what stays in kernels."""
    for one in found:
        value = graph.ops[one.convolution].results[0]
        writes[one.convolution] = tuple(0.0 for _ in writes[one.convolution])
        for index in one.steps:
            op = graph.ops[index]
            reads[index] = tuple(0.0 if v == value else n for v, n in zip(op.operands, reads[index], strict=True))
            value = op.results[0]


def _forward(graph: Graph, producers: Sequence[int], op: Op) -> bool:
    """Whether XLA takes a convolution for no gradient, and has it made as it is."""
    if op.params["batch_group_count"] > 1 or is_kernels_gradient(graph, op):
        return False
    kernel, numbers = graph.values[op.operands[1]].shape, op.params["dimension_numbers"]
    if op.params["feature_group_count"] > 1:
        return kernel[numbers.rhs_spec[1]] > 1
    if math.prod(kernel[d] for d in numbers.rhs_spec[2:]) == 1:
        return math.prod(op.params["lhs_dilation"]) == 1
    maker = producers[op.operands[1]]
    turned = maker >= 0 and graph.ops[maker].primitive == "rev"
    return not turned or math.prod(op.params["rhs_dilation"]) > 1


def _only_reader(graph: Graph, value: int) -> Op | None:
    """What alone reads a value that is not returned, in the same loop, and makes one of its type."""
    readers = graph.uses()[value]
    if len(readers) != 1 or value in graph.outputs:
        return None
    op, around = graph.ops[readers[0][0]], graph.loops_around()
    if len(op.results) != 1 or graph.values[op.results[0]].dtype != graph.values[value].dtype:
        return None
    return op if around[op.index] == around[graph.producers()[value]] else None


def _scales(graph: Graph, op: Op) -> bool:
    """Whether an operation multiplies by a number that the program has as one."""
    return op.primitive == "mul" and any(graph.values[v].number is not None for v in op.operands)


def _is_bias(graph: Graph, producers: Sequence[int], value: int, features: int) -> bool:
    """Whether a value is one number for each of `features`, broadcast or not yet."""
    if math.prod(graph.values[value].shape) == features:
        return True
    shown = unviewed(graph, producers, value)
    maker = graph.ops[producers[shown]] if producers[shown] >= 0 else None
    if maker is None or maker.primitive != "broadcast_in_dim":
        return False
    return math.prod(graph.values[maker.operands[0]].shape) == features
