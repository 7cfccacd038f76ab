"""How what loops slice lies on TPU: the dimension that an iteration takes one place of is never in lanes.

What is made before a loop and multiplied by one row in it lies in order, its last dimension in lanes: XLA makes such a
product elementwise, of both as they come (a decoder's attention to keys of what it reads, bf16[16, 1500, 8, 64] or
[16, 8, 1500, 64]: twice their bytes; of two rows and more, or of four heads that share a head of keys, 1500 lie in
lanes; compiled for v5e, jax 0.10.2, libtpu 0.0.42.1).

XLA for TPU puts dimensions that are sliced, or updated, at a place known at run time only outermost: of f32[8, 512]
with a column an iteration the other dimension is in lanes, however few it has, and so are those of all that is computed
elementwise with it, in the loop and before it: f32[8, 2048, 2048] whose rows are compared with such columns lies with
its 8 in 128 lanes, sixteen times its bytes (batched suppression of boxes).  Where two dimensions are left, those that
pad least are in tiles as elsewhere (loops over slices of batches of 8 to 256 compiled for v5e, jax 0.10.2,
libtpu 0.0.42.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Graph, Op
from ..sharding import Rule
from .heads import halves_in_lanes
from .kinds import REDUCTIONS
from .residency import Flow


def lanes_left(flow: Flow) -> dict[int, frozenset[int]]:
    """Values of which one dimension is left to lie in lanes -> that dimension.

    The step's arguments and results lie as callers see them, products and reductions and what is elementwise made of
    them as these are made (of boxes apart in two dimensions, or sixteen, whose product or sum is taken, an
    f32[8, 512, 512] lies with 512 in lanes); a loop's copy of any of them is its own.
    """
    graph, rules = flow.graph, flow.rules
    around, given = graph.loops_around(), set(graph.inputs)
    fixed, found = {*_made_in_order(graph, rules), *graph.inputs, *graph.outputs}, dict[int, int]()
    handing = []
    found.update(_multiplied_by_a_row(flow))
    for op in graph.ops:
        part, elementwise = _part(graph, op), rules[op.index].follows
        if part is not None and around[op.index]:
            whole = graph.values[op.operands[0]].shape
            kept = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n == m > 1]
            if len(kept) == 1 and whole != part and op.operands[0] not in given:
                found[op.operands[0]] = kept[0]
        if part is not None or elementwise or op.primitive in ("slice", "split"):
            handing.append((op, part is not None or not elementwise))
    known = 0
    while known < len(found):
        known = len(found)
        for op, parts in (*handing, *reversed(handing)):
            _hand_on(graph, op, rules[op.index], found, fixed, parts)
    for halves in halves_in_lanes(graph, flow.producers):
        found |= {value: len(graph.values[value].shape) - 1 for value in halves.parts if value not in found}
    return {value: frozenset({lanes}) for value, lanes in found.items()}


def _multiplied_by_a_row(flow: Flow) -> dict[int, int]:
    """What is made before the loop that multiplies it by one row -> its last dimension."""
    graph, found = flow.graph, dict[int, int]()
    around = graph.loops_around()
    for op in graph.ops:
        if op.primitive != "dot_general" or not around[op.index]:
            continue
        start, stop = around[op.index][-1]
        shapes = [graph.values[v].shape for v in op.operands]
        for value, shape, beside, dims in zip(op.operands, shapes, shapes[::-1], _taken(op)[::-1], strict=True):
            rows = math.prod(n for d, n in enumerate(beside) if d not in dims)
            maker = flow.producers[value]
            if rows == 1 and maker >= 0 and not start <= maker < stop and len(shape) > 1:
                found[value] = len(shape) - 1
    return found


def _taken(op: Op) -> tuple[frozenset[int], frozenset[int]]:
    """The dimensions of each operand that a product sums over or goes through one by one."""
    (left, right), (left_batch, right_batch) = op.params["dimension_numbers"]
    return frozenset((*left, *left_batch)), frozenset((*right, *right_batch))


def _made_in_order(graph: Graph, rules: Sequence[Rule]) -> set[int]:
    """What products and reductions make, and what is made of that elementwise."""
    found: set[int] = set()
    for op in graph.ops:
        rule = rules[op.index]
        alike = rule.follows and op.primitive != "carry_init"
        sizes = {_size(graph, v) for v in op.operands if alike and v in found}
        ordered = rule.matmul or op.primitive in REDUCTIONS
        found.update(v for v in op.results if ordered or _size(graph, v) in sizes)
    return found


def _size(graph: Graph, value: int) -> int:
    return math.prod(graph.values[value].shape)


def _part(graph: Graph, op: Op) -> tuple[int, ...] | None:
    """Of what takes or replaces one slice at a place known at run time the extents of that; None of anything else.

    XLA makes slices of gathers and scatters with one index: what `vmap` makes of a slice that all take at one place.
    """
    shapes = [graph.values[v].shape for v in (*op.operands, *op.results)]
    if op.primitive == "dynamic_slice":
        return shapes[-1]
    if op.primitive == "dynamic_update_slice":
        return shapes[1]
    if op.primitive == "gather" and math.prod(shapes[1][:-1]) == 1:
        return tuple(op.params["slice_sizes"])
    if op.primitive.startswith("scatter") and math.prod(shapes[1][:-1]) == 1:
        numbers = op.params["dimension_numbers"]
        window = iter([shapes[2][d] for d in numbers.update_window_dims])
        alone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        return tuple(1 if d in alone else next(window) for d in range(len(shapes[0])))
    return None


def _hand_on(graph: Graph, op: Op, rule: Rule, found: dict[int, int], fixed: set[int], parts: bool) -> None:
    """Let what an operation reads and makes lie alike; what is broadcast lies as it may.

    Args:
      parts: whether it takes or replaces parts; else all have one size.
    """
    beside = [*zip(op.operands, rule.operands, strict=True), *zip(op.results, rule.results, strict=True)]
    known = next(((value, dims) for value, dims in beside if value in found), None)
    if known is None:
        return
    lanes = known[1][found[known[0]]]
    for value, dims in beside:
        if value in found or value in fixed or len(dims) < 2 or not lanes:
            continue
        if lanes in dims and (parts or _size(graph, value) == _size(graph, known[0])):
            found[value] = dims.index(lanes)
