"""An equivalent smaller problem, and the way back: exact, memory included.

Contraction (contract.py) folds every node that follows another, deletes impossible strategies, drops edges that
say nothing.  The peaks (peaks.py) leave only the time steps that can bind.  Then, until nothing changes: a
strategy that another one replaces at no cost and with no more bytes is deleted, so is one that is over the limit
however little the other nodes keep, and a node of at most two neighbours with no say in any peak is minimised
out.  The reduced problem has the same optimum, to the rounding of float sums, and `lift` turns each of its
feasible assignments into one of the original of the same objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .contract import Contraction, Matrices, WipeOut
from .peaks import Peaks, find_peaks
from .problem import Bools, Edge, Floats, Ints, Node, StrategyProblem, Usage

#: Minimising out a node of degree 2 makes one table of its neighbours' sizes: not over so many sums, nor
#: entries.
MOST_SUMS, MOST_ENTRIES = 2_000_000, 4_096

#: Comparing all pairs of strategies of one node over one edge may take this many differences.
MOST_DIFFERENCES = 20_000_000

#: Each round pays for itself or ends the loop; what is left after so many is worth no more.
MOST_ROUNDS = 8

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reduction:
    """`problem` is equivalent to the `original`, unless `infeasible` says why nothing satisfies it.

    The last node of `problem` has one strategy: it carries what is paid and alive in any case.  Its time step p
    stands for the original's `time_steps[p]`.
    """

    original: StrategyProblem
    problem: StrategyProblem
    infeasible: str
    kept: tuple[int, ...]
    time_steps: Ints
    graph: Contraction

    def lift(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The original's assignment for one of the reduced problem."""
        chosen = [0] * len(self.original.nodes)
        for node, strategy in zip(self.kept, assignment, strict=False):
            chosen[node] = int(strategy)
        for step in reversed(self.graph.trail):
            step.lift(chosen)
        return tuple(chosen)


def reduce(
    problem: StrategyProblem,
    *,
    for_peak: bool = False,
    contract_only: bool = False,
    matrices: Matrices | None = None,
) -> Reduction:
    """Reduce a problem.

    Args:
      for_peak: keep every time step, for minimising the peak instead of meeting a limit.
      contract_only: decide nothing by cost: only what follows from the pairs, and what can't be, is gone.
      matrices: what was worked out for problems that share matrices with this one, to be gone on with.
    """
    graph = Contraction(problem, matrices)
    limit = -1 if for_peak else problem.limit_bytes
    compared: _Compared = {}
    peaks: Peaks | None = None
    try:
        for _ in range(MOST_ROUNDS):
            graph.settle()
            # where no step can exceed the limit none can later, of fewer strategies
            if peaks is None or peaks.time_steps.size:
                peaks = find_peaks(problem, graph, limit)
            if peaks.overflow is not None and not for_peak:
                reason = f"at time step {peaks.overflow} the least choices already exceed {limit} bytes"
                return _give_up(problem, graph, reason)
            if contract_only:
                break
            if not for_peak and limit is not None and _keep_fitting(graph, peaks, limit):
                continue
            if not (_dominate(graph, peaks, compared) | _eliminate(graph, peaks)):
                break
        else:
            graph.settle()
            peaks = find_peaks(problem, graph, limit)
    except (WipeOut, _Overfull) as error:
        why = "forbidden by its edges" if isinstance(error, WipeOut) else f"over {limit} bytes at some time step"
        name = problem.nodes[error.node].name
        return _give_up(problem, graph, f"every strategy of node {error.node} `{name}` is {why}")
    finally:
        graph.matrices.dominance.forget_sizeable()
    kept = tuple(graph.alive())
    return Reduction(
        original=problem,
        problem=_emit(problem, graph, peaks, kept, None if for_peak else limit),
        infeasible="",
        kept=kept,
        time_steps=peaks.time_steps,
        graph=graph,
    )


def _give_up(problem: StrategyProblem, graph: Contraction, reason: str) -> Reduction:
    return Reduction(
        original=problem, problem=problem, infeasible=reason, kept=(), time_steps=_NONE, graph=graph
    )


def _emit(
    problem: StrategyProblem, graph: Contraction, peaks: Peaks, kept: tuple[int, ...], limit: int | None
) -> StrategyProblem:
    position = {node: i for i, node in enumerate(kept)}
    split: dict[int, tuple[Floats, Bools | None]] = {}
    edges = []
    for node in kept:
        for other, matrix in graph.joined[node].items():
            if node < other:
                if id(matrix) not in split:
                    finite = np.isfinite(matrix)
                    split[id(matrix)] = (
                        (matrix, None) if finite.all() else (np.where(finite, matrix, 0.0), finite)
                    )
                costs, allowed = split[id(matrix)]
                edges.append(Edge(tail=position[node], head=position[other], costs_s=costs, allowed=allowed))
    edges.sort(key=lambda edge: (edge.tail, edge.head))
    usages = [
        Usage(node=position[node], start=start, stop=stop, bytes=used)
        for node in kept
        for start, stop, used in peaks.usages.get(node, [])
    ]
    last, constant = len(kept), peaks.constant_bytes
    usages += [Usage(node=last, start=p, stop=p + 1, bytes=constant[p : p + 1]) for p in range(constant.size)]
    nodes = [Node(name=problem.nodes[node].name, costs_s=graph.unary(node)) for node in kept]
    nodes.append(Node(name="constant", costs_s=np.array([graph.constant_s])))
    return StrategyProblem(
        nodes=tuple(nodes),
        edges=tuple(edges),
        usages=tuple(usages),
        limit_bytes=limit if constant.size else None,
    )


class _Overfull(Exception):
    """Whatever a node chooses, some time step exceeds the limit."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


def _keep_fitting(graph: Contraction, peaks: Peaks, limit_bytes: int) -> bool:
    """Delete each strategy that exceeds the limit at some peak though all other nodes keep the least they can."""
    changed = False
    spare = limit_bytes - peaks.constant_bytes
    for node, usages in peaks.usages.items():
        fits = np.ones(graph.size(node), dtype=bool)
        for start, stop, above in usages:
            fits &= above <= spare[start:stop].min()
        if not fits.any():
            raise _Overfull(node)
        if not fits.all():
            changed = True
            graph.keep(node, np.flatnonzero(fits))
    return changed


_Compared = dict[int, tuple[Floats, list[int], Sequence[tuple[int, int, Ints]]]]
"""By node its costs, edges (by identity: their owner keeps them) and bytes when its strategies were last compared."""


def _dominate(graph: Contraction, peaks: Peaks, compared: _Compared) -> bool:
    """Delete each strategy that another replaces, whatever the neighbours choose; say whether any went."""
    changed = False
    for node in graph.alive():
        costs_s = graph.unary(node)
        size = costs_s.size
        if size == 1:
            continue
        edges = list(graph.joined[node].values())
        own = peaks.usages.get(node, ())
        known, these = compared.get(node), list(map(id, edges))
        if known is not None and known[0] is costs_s and known[1] == these and _same(known[2], own):
            continue
        compared[node] = costs_s, these, own
        if any(size * matrix.size > MOST_DIFFERENCES for matrix in edges):
            continue
        used = graph.matrices.profiles.of([(a, b) for a, b, _ in own], [u for *_, u in own], size).rows
        left = graph.matrices.dominance.left(costs_s, edges, used)
        if left.size < size:
            changed = True
            graph.keep(node, left)
    return changed


def _same(one: Sequence[tuple[int, int, Ints]], other: Sequence[tuple[int, int, Ints]]) -> bool:
    """Whether the usages are the same arrays over the same peaks."""
    return len(one) == len(other) and all(
        a[0] == b[0] and a[1] == b[1] and a[2] is b[2] for a, b in zip(one, other, strict=True)
    )


def _eliminate(graph: Contraction, peaks: Peaks) -> bool:
    """Minimise out the nodes that have few neighbours and no say in memory; say whether any went."""
    changed = False
    for node in graph.alive():
        if node in peaks.usages:
            continue
        sizes = [graph.size(other) for other in graph.joined[node]]
        if len(sizes) == 2:
            a, b = graph.joined[node]
            entries = sizes[0] * sizes[1]
            spared = graph.size(node) * sum(sizes)
            affordable = graph.size(node) * entries <= MOST_SUMS and entries <= MOST_ENTRIES
            if not affordable or (b not in graph.joined[a] and entries > spared):
                continue
        elif len(sizes) > 2:
            continue
        graph.eliminate(node)
        changed = True
    return changed
