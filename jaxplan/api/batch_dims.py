"""Which dimension of an argument its batch is: the first that no loop goes along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..disjoint import Disjoint
from ..ir import Graph, Op
from ..sharding import Rule


def batch_dims(graph: Graph, rules: Sequence[Rule]) -> tuple[int, ...]:
    """For every input its first dimension that no loop goes along, its rank where there is none.

    A loop takes one piece after another: steps of a sequence that comes time first, microbatches.  What is cut along
    that dimension every device would have to send around in turn.  Dimensions are followed through operations that
    keep them whole: labels whose time meets that of a loop's results are time first too, and a batch that is taken
    apart into microbatches is still a batch.
    """
    first = [0]
    for tensor in graph.values:
        first.append(first[-1] + len(tensor.shape))
    joined = Disjoint(first[-1])
    known: dict[int, tuple[tuple[int, int, int, int], ...]] = {}
    along = []
    for op, rule, loops in zip(graph.ops, rules, graph.loops_around(), strict=True):
        if id(rule) not in known:
            known[id(rule)] = tuple(_kept_whole(rule))
        values = (*op.operands, *op.results)
        for side, dim, other, like in known[id(rule)]:
            joined.join(first[values[side]] + dim, first[values[other]] + like)
        along += [first[values[side]] + dim for side, dim in _gone_along(op, bool(loops))]
    looped = {joined.find(dim) for dim in along}
    return tuple(
        next((d for d in range(rank) if joined.find(first[v] + d) not in looped), rank)
        for v, rank in ((v, len(graph.values[v].shape)) for v in graph.inputs)
    )


def _kept_whole(rule: Rule) -> Iterator[tuple[int, int, int, int]]:
    """Pairs of (tensor, dimension) of the same factors: neither is a part of the other."""
    met: dict[tuple[int, ...], tuple[int, int]] = {}
    for side, dims in enumerate((*rule.operands, *rule.results)):
        for dim, names in enumerate(dims):
            if names and met.setdefault(names, (side, dim)) != (side, dim):
                yield (side, dim, *met[names])


def _gone_along(op: Op, in_loop: bool) -> Iterator[tuple[int, int]]:
    """The (tensor, dimension) pairs, operands before results, of which an operation of a loop takes or makes a piece an
    iteration."""
    if op.primitive == "scan_slice":
        yield 0, 0
    elif op.primitive == "scan_stack":
        yield len(op.operands), 0
    elif op.primitive == "dynamic_slice" and in_loop:
        yield from ((0, dim) for dim, size in enumerate(op.params["slice_sizes"]) if size == 1)
