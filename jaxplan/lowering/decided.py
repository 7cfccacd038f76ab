"""What a decision moves, and which of the partitioner's collectives it has not.

Pure bookkeeping: nothing is asked, nothing pinned here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..ir import Graph
from ..sharding import UNREDUCED, Collective, Layout, MeshAxes, Rule, places_of_layout, reshard_steps

Move = tuple[str, frozenset[str], int]
"""A collective's kind, axes and bytes."""


def communicating(
    graph: Graph,
    rules: Sequence[Rule],
    axes: MeshAxes,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Sequence[Layout],
    held: Collection[int],
) -> tuple[dict[int, float], dict[Move, list[tuple[int, int]]]]:
    """The most bytes that the decision itself moves at an operation, and where it makes each move: (maker, reader).

    Sums that a loop has `held` are moved by who finishes them, not by their makers.  What several read of one value in
    one way is moved once: the first of them stands for all.
    """
    producers = graph.producers()
    found: dict[int, float] = {}
    whole = [v for v, row in values.items() if v not in held and UNREDUCED in row.tolist()]
    for value in whole:
        found[producers[value]] = max(found.get(producers[value], 0.0), graph.values[value].bytes)
    for index, rule in enumerate(rules):
        for halo in rule.halos:
            read = reads.get((index, halo.operand))
            if read is not None and (read == halo.dim).any():
                size = graph.values[graph.ops[index].operands[halo.operand]].bytes
                found[index] = max(found.get(index, 0.0), size)
    moves: dict[Move, list[tuple[int, int]]] = {}
    moved: set[tuple[int, bytes]] = set()
    taken = [(op, graph.ops[op].operands[position], row) for (op, position), row in reads.items()]
    # who takes a result is the caller: after all operations
    taken += [(len(graph.ops), v, places_of_layout(x, axes)) for v, x in zip(graph.outputs, outputs, strict=True)]
    for op, value, row in taken:
        if value in values and values[value] is not row and not np.array_equal(values[value], row):
            steps = reshard_steps(values[value], row, graph.values[value].bytes, axes)
            sent = max((step.bytes for step in steps if step.kind != "all_slice"), default=0.0)
            for end in (op, producers[value]):
                found[end] = max(found.get(end, 0.0), sent)
            if (value, row.tobytes()) not in moved:
                moved.add((value, row.tobytes()))
                for step in steps:
                    move = step.kind, frozenset(step.axes), int(step.bytes)
                    moves.setdefault(move, []).append((producers[value], op))
    return found, moves


def move_of(collective: Collective) -> Move:
    return collective.kind, frozenset(collective.axes), collective.bytes


def elsewhere_than_decided(
    collectives: Sequence[tuple[Collective, int]], moves: Mapping[Move, Sequence[tuple[int, int]]]
) -> list[tuple[Collective, int]]:
    """Those of a kind and size that was not decided at their operation: perhaps at another reader of what is moved,
    which takes it in pieces, or rounded."""
    there = [(c, op) for c, op in collectives if c.kind != "all_slice"]
    return [(c, op) for c, op in there if all(op not in ends for ends in moves.get(move_of(c), ()))]


def undecided(
    elsewhere: Sequence[tuple[Collective, int]],
    collectives: Sequence[tuple[Collective, int]],
    moves: Mapping[Move, Sequence[tuple[int, int]]],
    expected: Mapping[int, float],
) -> set[int]:
    """Operations with a collective that nobody decided: of its kind and size none, or more than were decided, and it is
    `elsewhere` (a copy that several read, or a sum of several, may be moved at another one of them); nor are there so
    many bytes `expected` to be moved at it in another way."""
    count = Counter(move_of(c) for c, _ in collectives if c.kind != "all_slice")
    return {
        op
        for c, op in elsewhere
        if count[move_of(c)] > len(moves.get(move_of(c), ())) and c.bytes > expected.get(op, 0.0)
    }
