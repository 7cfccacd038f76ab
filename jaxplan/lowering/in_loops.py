"""What has to be written down about loops where the partitioner was seen to communicate otherwise than was decided."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ..ir import Graph, Site
from ..sharding import UNREDUCED

Frame = tuple[int, ...]
Place = tuple[int, Site | None]
"""A value and where it is pinned."""


def entered(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    ops: Collection[int],
) -> list[Place]:
    """Of the loops and remat bodies around any of `ops`, what they don't change and read in another layout, with where
    it enters.

    Behind a barrier a value is as open as a loop's own: a chunk of a loss that is computed again took the layout of the
    second product that reads it, and the first was summed over devices.
    """
    if not graph.invariants or not ops:
        return []
    around = {_frame(graph, op) for op in ops}
    moved: dict[int, list[Frame]] = {}
    for (op, position), row in reads.items():
        value = graph.ops[op].operands[position]
        if value in values and values[value] is not row and not np.array_equal(values[value], row):
            moved.setdefault(value, []).append(graph.ops[op].sites[position].frame)

    def inside(frames: Collection[Frame], site: Site) -> bool:
        return any(_inside(frame, site.frame) for frame in frames)

    return [
        (value, site) for value, site in graph.invariants if inside(around, site) and inside(moved.get(value, ()), site)
    ]


def behind_barriers(
    graph: Graph, values: Mapping[int, np.ndarray], moved: Collection[tuple[int, int]]
) -> list[Place]:
    """What a remat body reads both as it is made and, one of the reads `moved`, in another layout; where it enters.

    A pin on the maker ends at the barrier. Behind it Shardy takes the pin of the one reader for the value, for all
    that XLA happens to write down after it: the gradient of a mixture of experts, gathered over one axis for rows to be
    taken from it, was gathered whole for a product of the shared expert, as was the product's other operand, bf16[32,
    1024, 1024] twice a layer (eight H100, jax 0.10.2).
    """
    if not graph.barriers or not moved:
        return []
    behind = graph.behind()
    otherwise = {(graph.ops[op].operands[position], behind[op]) for op, position in moved}
    as_made = {
        (value, behind[op.index])
        for op in graph.ops
        if behind[op.index]
        for position, value in enumerate(op.operands)
        if (op.index, position) not in moved
    }
    both = otherwise & as_made
    return [(value, site) for value, site in graph.invariants if value in values and (value, site.frame) in both]


def written_out(
    graph: Graph, values: Mapping[int, np.ndarray], differing: Collection[int], ops: Collection[int],
    upstream: Collection[int],
) -> list[Place]:  # fmt: skip
    """Of the loops around any of `ops`: each carry where it goes in, is handed on and comes out, and all that differs;
    and the slices among what is `upstream` of `ops`, whose layouts no operation of theirs shows.

    A loop's condition, and what a batched one asks again in its body, reads the carry as it is handed on, not as it is
    pinned where it enters the body; and as it is handed on it is cut like anything that is computed from it, there or
    after the loop. So a batched loop, of which one carry was cut and the others whole, cut its condition, and with it
    every carry.
    """
    around = {_frame(graph, op) for op in ops}
    leaving = {op.operands[1]: op.sites[0] for op in graph.ops if op.primitive == "carry_next"}
    loops: set[Frame] = set()
    found: list[Place] = []
    for op in graph.ops if around else ():
        if op.primitive == "carry_init":
            site, (carry,) = op.sites[0], op.results
            loop = (*site.frame, site.equation)
            if any(_inside(frame, loop) for frame in around):
                loops.add(loop)
                if carry in values and UNREDUCED not in values[carry].tolist():
                    found.append((carry, site))
                    if carry in leaving:
                        out = leaving[carry].position
                        found += [(carry, leaving[carry]), (carry, Site(site.frame, "result", site.equation, out))]
    producers = graph.producers()
    for value in sorted(v for v in upstream if v in values):
        if producers[value] >= 0 and graph.ops[producers[value]].primitive == "scan_slice":
            found.append((value, graph.values[value].site))
    for value in differing:
        maker = producers[value]
        if maker >= 0 and any(_inside(_frame(graph, maker), loop) for loop in loops):
            found.append((value, graph.values[value].site))
    return [(value, site) for value, site in found if site is not None]


def _frame(graph: Graph, op: int) -> Frame:
    sites = graph.ops[op].sites
    return sites[0].frame if sites else ()


def _inside(frame: Frame, outer: Frame) -> bool:
    return frame[: len(outer)] == outer
