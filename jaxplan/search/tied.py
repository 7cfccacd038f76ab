"""The quotient of a problem with one choice for all nodes of a colour: small, and exact for what it can say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .narrow import narrow
from .problem import Bools, Edge, Floats, Ints, Node, StrategyProblem, Usage
from .quotient import Quotient


@dataclass(frozen=True, kw_only=True, eq=False)
class Tied:
    """`problem` is the original with all nodes of a colour choosing alike, less what follows from the rest.

    Attributes:
      choices: for each colour of the original its strategy by the strategy of node `owner[colour]` of `problem`.
    """

    problem: StrategyProblem
    colour: Ints
    owner: Ints
    choices: tuple[Ints, ...]

    def lift(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """The original's assignment for one of the tied problem; it costs the same."""
        chosen = np.array(
            [
                int(rows[assignment[owner]])
                for rows, owner in zip(self.choices, self.owner.tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        return tuple(chosen[self.colour].tolist())


def tie(quotient: Quotient) -> Tied | None:
    """One node a colour, at the price of all of them; None when some colour can't choose alike at all."""
    alive = quotient.alive()
    position = {colour: i for i, colour in enumerate(alive)}
    allowed = {colour: np.ones(quotient.cost(colour).size, dtype=np.bool_) for colour in alive}
    total = {colour: quotient.members[colour].size * quotient.cost(colour) for colour in alive}
    for link in quotient.links.values():
        if link.tail == link.head:
            alike = np.diagonal(link.matrix)
            allowed[link.tail] &= np.isfinite(alike)
            total[link.tail] = total[link.tail] + link.tails.size * np.where(np.isfinite(alike), alike, 0.0)
    kept = {colour: quotient.matrices.intern(np.flatnonzero(mask)) for colour, mask in allowed.items()}
    if not all(rows.size for rows in kept.values()):
        return None
    nodes = [
        Node(name=quotient.problem.nodes[int(quotient.members[c][0])].name, costs_s=total[c][kept[c]])
        for c in alive
    ]
    edges = []
    split: dict[tuple[int, int], tuple[Floats, Bools | None]] = {}
    for _, link in sorted(quotient.links.items()):
        if link.tail == link.head:
            continue
        matrix = quotient.matrices.rows(link.matrix, kept[link.tail])
        matrix = quotient.matrices.turned(
            quotient.matrices.rows(quotient.matrices.turned(matrix), kept[link.head])
        )
        key = (id(matrix), link.tails.size)
        if key not in split:
            finite = np.isfinite(matrix)
            split[key] = link.tails.size * np.where(finite, matrix, 0.0), None if finite.all() else finite
        costs, mask = split[key]
        edges.append(Edge(tail=position[link.tail], head=position[link.head], costs_s=costs, allowed=mask))
    into, choices = quotient.owners()
    rows = quotient.matrices.rows
    choices = [rows(choice, kept[leader]) for choice, leader in zip(choices, into.tolist(), strict=True)]
    problem = StrategyProblem(
        nodes=tuple(nodes),
        edges=tuple(edges),
        usages=_usages(quotient, position, into, choices),
        limit_bytes=quotient.problem.limit_bytes,
    )
    owner = np.array([position[leader] for leader in into.tolist()], dtype=np.int64)
    return Tied(problem=problem, colour=quotient.colour, owner=owner, choices=tuple(choices))


def narrowed(tied: Tied, kept: Mapping[int, Ints]) -> Tied | None:
    """`tied` with only the strategies `kept` left to some nodes of the original; None when a node has none left."""
    masks: dict[int, Bools] = {}
    for node, strategies in kept.items():
        colour = int(tied.colour[node])
        owner = int(tied.owner[colour])
        left = np.isin(tied.choices[colour], strategies)
        masks[owner] = masks[owner] & left if owner in masks else left
    rows = {owner: np.flatnonzero(mask) for owner, mask in masks.items() if not mask.all()}
    if not all(index.size for index in rows.values()):
        return None
    return Tied(
        problem=narrow(tied.problem, rows),
        colour=tied.colour,
        owner=tied.owner,
        choices=tuple(
            choice[rows[owner]] if owner in rows else choice
            for choice, owner in zip(tied.choices, tied.owner.tolist(), strict=True)
        ),
    )


def _usages(
    quotient: Quotient, position: dict[int, int], into: Ints, choices: Sequence[Ints]
) -> tuple[Usage, ...]:
    """The bytes of all nodes, by the node that decides them; those of one interval as one."""
    matrices = quotient.matrices
    together: dict[tuple[int, int, int], Ints] = {}
    known: dict[tuple[int, int], Ints] = {}
    colours, leaders = quotient.colour.tolist(), into.tolist()
    for usage in quotient.problem.usages:
        colour = colours[usage.node]
        one = id(usage.bytes), colour
        if one not in known:
            known[one] = matrices.rows(matrices.intern(usage.bytes), choices[colour])
        used = known[one]
        key = (position[leaders[colour]], usage.start, usage.stop)
        together[key] = together[key] + used if key in together else used
    return tuple(
        Usage(node=node, start=start, stop=stop, bytes=used) for (node, start, stop), used in together.items()
    )
