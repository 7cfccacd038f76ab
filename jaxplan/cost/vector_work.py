"""Operations of a TPU's vector unit for an element of what is elementwise made, as XLA counts them where it decides
whether several kernels compute that or one writes it.

An addition counts one, and so do a conversion, an exponential, a logarithm, a tanh and a reciprocal square root; a
division counts ten, and with it a logistic function thirteen.  Error functions are polynomials by then.  (Chains of 6
to 80 squares and additions with one other operation among them, see `shared_operands`, compiled for v5p: by how much
sooner they are written; error functions' operations as the compiled text has them; jax 0.10.2, libtpu 0.0.42.1,
2026-11-29.)
"""

from __future__ import annotations

import math
from collections.abc import Container

from ..ir import VIEWS, Op
from .masks import COMPARISONS
from .residency import Flow

_OF_ONE = COMPARISONS | {
    "abs", "add", "add_any", "and", "convert_element_type", "exp", "exp2", "log", "max", "min", "mul", "neg", "not",
    "or", "rsqrt", "select_n", "square", "sub", "tanh",
}  # fmt: skip
_OF_MORE = {"clamp": 2, "erf": 38, "erfc": 80, "logistic": 13}
_DIVISION = 10
_UNMOVED = VIEWS | {"broadcast_in_dim", "copy"}
_ALIKE = 2
"""How many times smaller something is than what is made of it to take nothing beside it, as statistics do."""


def vector_work(flow: Flow, value: int, leaves: Container[int]) -> float | None:
    """Operations for an element of `value` of what is in memory (`leaves`); None if not all of them are known.

    Of an exact gelu XLA keeps the error function; `fusion` has its argument in its stead, as large.
    """
    graph = flow.graph
    count, seen, todo, total = math.prod(graph.values[value].shape), set[int](), [value], 0.0
    while todo:
        value = todo.pop()
        small = math.prod(graph.values[value].shape) * _ALIKE <= count
        if value in seen or value in leaves or small or flow.source[value] or flow.producers[value] < 0:
            continue
        seen.add(value)
        op = graph.ops[flow.producers[value]]
        kept = op.primitive == "erfc" and op.operands[0] in leaves and _is_elementwise(flow, op.operands[0])
        if op.primitive not in _UNMOVED and not kept:
            if (own := _operations(flow, op)) is None:
                return None
            total += own
        todo += op.operands
    return total


def _is_elementwise(flow: Flow, value: int) -> bool:
    return flow.producers[value] >= 0 and flow.kinds[flow.producers[value]] == "fused"


def _operations(flow: Flow, op: Op) -> float | None:
    if op.primitive == "div":
        return 1.0 if _is_repeated(flow, op) else _DIVISION
    if op.primitive == "integer_pow":
        power = abs(op.params["y"])
        return max(1.0, power.bit_length() + power.bit_count() - 2.0 + (op.params["y"] < 0) * _DIVISION)
    return 1.0 if op.primitive in _OF_ONE else _OF_MORE.get(op.primitive)


def _is_repeated(flow: Flow, op: Op) -> bool:
    """Whether a divisor is a constant, or the same along a dimension, as a softmax's sum: its reciprocal is taken."""
    divisor, count = op.operands[1], math.prod(flow.graph.values[op.results[0]].shape)
    while (made := flow.producers[divisor]) >= 0 and flow.graph.ops[made].primitive in _UNMOVED:
        divisor = flow.graph.ops[made].operands[0]
    return flow.source[divisor] or math.prod(flow.graph.values[divisor].shape) * _ALIKE <= count
