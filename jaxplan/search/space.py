"""The decisions of one program: which node of the StrategyProblem says the layout of which tensor.

Operations that follow (elementwise and the like) are tied to each other: equal layouts, no reshard between them.
A reshard may stand wherever a heavier operation, an argument or a loop's edge is on one side.  A tensor with
several readers gets a *copy* node: one resharded copy that they share, as the compiler shares equal collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..ir import Starts, Value
from ..sharding import Rule, Strategies
from .folds import Folds
from .narrow import SharedParts, narrow
from .problem import StrategyProblem

Allowed = Callable[[np.ndarray], np.ndarray]
"""Rows of a place array -> mask of those that a pin leaves."""


class Port(NamedTuple):
    """A tensor's layout as a function of one node's strategy: row `s` of `places` belongs to strategy `s`."""

    node: int
    places: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Passage:
    """What an edge moves: a tensor as it is sent, `trips` times a step, from row i of `tails` to row j of `heads`."""

    tails: np.ndarray
    heads: np.ndarray
    tensor: Value
    trips: float


@dataclass(frozen=True)
class Settling:
    """What operation `op` made is brought to where a donated argument lies; `seconds`: of the copying in that, by the
    strategies of the nodes that say where it is made and kept; `last`: it is a result, copied once it is there."""

    op: int
    made: int
    kept: int
    seconds: np.ndarray
    last: bool = False


@dataclass(frozen=True, kw_only=True)
class Space:
    """A StrategyProblem and what its nodes mean.

    Attributes:
      problem: what the search sees.
      rules: of every operation.
      values: port of every value at the place where it is made (absent: a source, any layout at no price).
      reads: port of every (operation, operand position) as that operation needs it.
      outputs: port of every result leaf (by position) that is not tied to an argument.
      copies: port of the shared copy that an (operation, operand position) takes its operand from, where it takes one.
      passages: for every edge of the problem what it moves.
      settling: of the results that take donated arguments' places.
      labels: for every node what it decides, in words.
      node_op, strategies: the operations' nodes; exchanges: of these, the seconds in what a node costs in which devices
        exchange edges and merge results.
      complete: whether every strategy of every operation is there; if not, what a search proves of the problem is not
        proved of the program.
      start_shares: of every value, see `ir.start_shares`.
    """

    problem: StrategyProblem
    rules: tuple[Rule, ...]
    values: Mapping[int, Port]
    reads: Mapping[tuple[int, int], Port]
    outputs: Mapping[int, Port]
    copies: Mapping[tuple[int, int], Port]
    passages: tuple[Passage, ...]
    settling: tuple[Settling, ...]
    labels: tuple[str, ...]
    node_op: Mapping[int, int]
    strategies: Mapping[int, Strategies]
    exchanges: Mapping[int, np.ndarray]
    complete: bool = True
    start_shares: Starts = field(default_factory=lambda: Starts((), ()))

    @functools.cached_property
    def folds(self) -> Folds:
        """The folds of the problem, for all searches of it."""
        return Folds(self.problem)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An assignment read back.

    Attributes:
      values, reads, outputs: the layout row of every value, operand and result leaf.
      copies: of the shared copy that an operand is taken from.
      compute_s, factors: of every operation its price, less what it exchanges, and the factor that each axis cuts.
      settled_s: of that what the copies take that bring its results to where they lie.
    """

    values: Mapping[int, np.ndarray]
    reads: Mapping[tuple[int, int], np.ndarray]
    outputs: Mapping[int, np.ndarray]
    copies: Mapping[tuple[int, int], np.ndarray]
    compute_s: Mapping[int, float]
    factors: Mapping[int, np.ndarray]
    settled_s: Mapping[int, float]


def decide(space: Space, assignment: Sequence[int]) -> Decision:
    """What an assignment of `space.problem` means for the program."""

    rows: dict[tuple[int, int], np.ndarray] = {}
    distinct: dict[bytes, np.ndarray] = {}

    def row(port: Port) -> np.ndarray:
        # equal rows are one array: that they are equal is told at a glance then
        key = id(port.places), assignment[port.node]
        if key not in rows:
            found = port.places[key[1]]
            rows[key] = distinct.setdefault(found.tobytes(), found)
        return rows[key]

    nodes = space.problem.nodes
    compute_s = {op: float(nodes[n].costs_s[assignment[n]]) for n, op in space.node_op.items()}
    for n, seconds in space.exchanges.items():
        compute_s[space.node_op[n]] -= float(seconds[assignment[n]])
    settled_s: dict[int, float] = {}
    for x in space.settling:
        seconds_s = float(x.seconds[assignment[x.made], assignment[x.kept]])
        compute_s[x.op] = compute_s.get(x.op, 0.0) + seconds_s
        if x.last and seconds_s > 0:
            settled_s[x.op] = settled_s.get(x.op, 0.0) + seconds_s
    return Decision(
        values={v: row(port) for v, port in space.values.items()},
        reads={key: row(port) for key, port in space.reads.items()},
        outputs={key: row(port) for key, port in space.outputs.items()},
        copies={key: row(port) for key, port in space.copies.items()},
        factors={op: space.strategies[n].factors[assignment[n]] for n, op in space.node_op.items()},
        compute_s=compute_s,
        settled_s=settled_s,
    )


def pinned(space: Space, pins: Mapping[int, Allowed]) -> Space:
    """`space` with the layouts of some values of its own (a program's arguments) narrowed down.

    The same as building it under these pins, without pricing anything again.

    Args:
      pins: by value of the graph, what is left to it.
    """
    kept: dict[int, np.ndarray] = {}
    for value, allowed in pins.items():
        port = space.values[value]
        kept[port.node] = np.flatnonzero(allowed(port.places))
    parts = SharedParts()
    part = parts.of
    passages = tuple(
        replace(moved, tails=part(moved.tails, kept.get(edge.tail)), heads=part(moved.heads, kept.get(edge.head)))
        if edge.tail in kept or edge.head in kept
        else moved
        for edge, moved in zip(space.problem.edges, space.passages, strict=True)
    )

    def narrowed(ports: Mapping[int, Port]) -> dict[int, Port]:
        return {
            key: Port(node=port.node, places=part(port.places, kept[port.node]))
            if port.node in kept
            else port
            for key, port in ports.items()
        }

    return replace(
        space,
        problem=narrow(space.problem, kept, parts),
        values=narrowed(space.values),
        outputs=narrowed(space.outputs),
        passages=passages,
        settling=tuple(
            replace(x, seconds=part(x.seconds, kept.get(x.made), kept.get(x.kept))) for x in space.settling
        ),
    )
