"""What kind of work an operation is to XLA's fusion."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import LOOP_EDGES, Graph, Op
from ..sharding import Rule
from .masks import fused_on, halves
from .unaligned import copying

_MOVEMENT = frozenset(
    {"broadcast_in_dim", "concatenate", "dynamic_slice", "pad", "reshape", "rev", "roll", "shift", "slice",
     "split", "squeeze", "transpose"}
)  # fmt: skip
"""Data movement that XLA fuses as it fuses elementwise work, whether or not layouts follow through it."""

REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
"""Reductions: the root of a kernel, fused with what makes their operand."""

COMPUTED_AGAIN = 2.25
"""How many times its own bytes a value may be read from to be computed again: what is converted from f32 to bf16 with a
little beside it is (the softmax inside the TPU compiler's attention products)."""

SMALL = 8
"""How many times larger a value is than one that it is computed from, and that takes nothing to compute again beside
it: a normalisation's statistics beside what it normalises."""


def kinds_of(graph: Graph, rules: Sequence[Rule], source: Sequence[bool], platform: str) -> list[str]:
    """`kind_of` every operation; what a scan by halves writes on GPU (`masks.halves`) is the root of a kernel there,
    and a reshape that cuts a TPU's tiles is a kernel of its own.

    Args:
      source: see `source_values`.
    """
    kinds = [kind_of(graph, op, rule, platform) for op, rule in zip(graph.ops, rules, strict=True)]
    producers = graph.producers()
    for value in halves(graph, producers) if platform == "gpu" else ():
        if producers[value] >= 0 and kinds[producers[value]] == "fused" and not source[value]:
            kinds[producers[value]] = "reduction"
    for index in copying(graph) if platform == "tpu" else ():
        kinds[index] = "heavy"
    return kinds


def kind_of(graph: Graph, op: Op, rule: Rule, platform: str) -> str:
    """ "fused", "reduction" (the root of a kernel), "heavy" (a kernel of its own) or "edge" (of a loop: no work)."""
    if op.primitive in LOOP_EDGES:
        return "edge"
    if fused(op, rule) or fused_on(platform, graph, op) or _reduces_nothing(graph, op):
        return "fused"
    return "reduction" if op.primitive in REDUCTIONS or _multiplies(op, rule) else "heavy"


def is_kernels_gradient(graph: Graph, op: Op) -> bool:
    """Whether `op` is a convolution by windows larger than its result, as for the gradient of a kernel: the window is a
    whole image, the batch the image's channels."""
    if op.primitive != "conv_general_dilated":
        return False
    numbers = op.params["dimension_numbers"]
    window, result = graph.values[op.operands[1]].shape, graph.values[op.results[0]].shape
    return math.prod(window[d] for d in numbers.rhs_spec[2:]) > math.prod(result[d] for d in numbers.out_spec[2:])


def _reduces_nothing(graph: Graph, op: Op) -> bool:
    """Whether `op` reduces dimensions of extent 1 alone, as `einsum` does that of one group, which XLA reshapes."""
    if op.primitive not in REDUCTIONS or op.primitive in ("argmax", "argmin"):
        return False
    return math.prod(graph.values[op.operands[0]].shape) == math.prod(graph.values[op.results[0]].shape)


def fused(op: Op, rule: Rule) -> bool:
    """Whether `op` starts no kernel of its own."""
    multiplies = _multiplies(op, rule) and not any(rule.sizes[f] > 1 for f in rule.reduction)
    return (rule.follows or multiplies or op.primitive in _MOVEMENT) and op.primitive not in LOOP_EDGES


def idle(op: Op, source: Sequence[bool]) -> bool:
    """Whether `op` takes no time by itself: the end of an iteration, and what makes nothing but sources."""
    return op.primitive in ("carry_next", "while_test") or (bool(op.results) and all(source[v] for v in op.results))


def _multiplies(op: Op, rule: Rule) -> bool:
    """Whether `op` is written as a product of matrices and is none: elementwise work, and a sum if it sums."""
    return op.primitive == "dot_general" and not rule.matmul


def source_values(graph: Graph, rules: Sequence[Rule]) -> list[bool]:
    """For every value whether it can be made anywhere in any layout at no price.

    Constants, iota, broadcast scalars, and elementwise functions of nothing else.
    """
    source = [value.constant and value.index not in graph.constants for value in graph.values]
    for op, rule in zip(graph.ops, rules, strict=True):
        follows = rule.follows and op.primitive not in LOOP_EDGES
        free = rule.source or (follows and bool(op.operands) and all(source[v] for v in op.operands))
        for value in op.results:
            source[value] = free
    return source
