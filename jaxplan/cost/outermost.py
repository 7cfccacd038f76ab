"""Dimensions that XLA for TPU has in no tile: those that a product is run for one by one, and those that loops slice.

A product with batch dimensions is run once for each place of these, and has the others in tiles, however that pads
them: scores of 201 tokens, bf16[128, 12, 201, 201], lie with 201 in 256 lanes and 201 in 208 rows though the 128 images
would fill the lanes, and queries, keys and values of 64 columns, [128, 201, 12, 64], with the tokens in lanes and the
columns in rows.  What is elementwise made of them, or they of, in the same shape, lies alike unless a product without
batch dimensions reads or makes it, too.  A loop's stack lies with the dimension that an iteration takes one place of
outermost, and as its slices do: f32[512, 32, 3, 64, 64] of 512 words with 64 in 128 lanes, twice its bytes, though the
words would fill them.  (A vision transformer beside a text encoder, windows of 49 pixels, a recurrent network whose
state is a matrix, all compiled for v5e, jax 0.10.2, libtpu 0.0.42.1.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ir import Op
from .residency import Flow


def outside_tiles(flow: Flow) -> dict[int, frozenset[int]]:
    """Values with such dimensions -> the others, two or more; arguments and results lie as callers see them."""
    found = _batched(flow)
    ends = {*flow.graph.inputs, *flow.graph.outputs}
    for op in flow.graph.ops:
        if op.primitive in ("scan_slice", "scan_stack"):
            stack, piece = op.operands[0], op.results[0]
            if op.primitive == "scan_stack":
                stack, piece = piece, stack
            rank = len(flow.graph.values[stack].shape)
            dims = frozenset(d + 1 for d in found.get(piece, range(rank - 1)))
            if len(dims) > 1 and stack not in ends:
                found[stack] = dims
    return found


def _batched(flow: Flow) -> dict[int, frozenset[int]]:
    graph, found = flow.graph, dict[int, frozenset[int]]()
    ends = {*graph.inputs, *graph.outputs}
    fixed = set(ends)
    for op in graph.ops:
        if op.primitive != "dot_general" or not flow.rules[op.index].matmul:
            continue
        summed, batched = op.params["dimension_numbers"]
        beside = [*zip(op.operands, batched, strict=True), (op.results[0], range(len(batched[0])))]
        if not batched[0]:
            # heads and columns summed at once are read where the product that made them has them
            merged = [v for v, s in zip(op.operands, summed, strict=True) if len(s) == 1]
            fixed.update((*merged, op.results[0]))
            continue
        if any(_alone(graph.values[v].shape, {*s, *b}) for v, s, b in zip(op.operands, summed, batched, strict=True)):
            continue
        for value, batch in beside:
            dims = frozenset(range(len(graph.values[value].shape))) - {*batch}
            if len(dims) > 1 and value not in ends:
                found.setdefault(value, dims)
    for op in (*graph.ops, *reversed(graph.ops)):
        for value in op.operands if len(op.results) == 1 else ():
            for known, new in ((value, op.results[0]), (op.results[0], value)):
                if known in found and new not in found and new not in fixed:
                    if (handed := _handed_on(flow, op, known, new, found[known])) is not None:
                        found[new] = handed
    return found


def _alone(shape: Sequence[int], taken: Collection[int]) -> bool:
    """Whether an operand of a product has but one element beside the dimensions that are summed or batched."""
    return all(size == 1 for d, size in enumerate(shape) if d not in taken)


def _handed_on(flow: Flow, op: Op, known: int, new: int, dims: frozenset[int]) -> frozenset[int] | None:
    """What dimensions of an operation's operand or result become of the other, where it keeps them apart."""
    if op.primitive == "transpose":
        order = op.params["permutation"]
        return frozenset(order[d] if known == op.results[0] else order.index(d) for d in dims)
    alike = flow.graph.values[known].shape == flow.graph.values[new].shape
    return dims if alike and flow.kinds[op.index] == "fused" else None
