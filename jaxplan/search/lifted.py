"""A bound on the whole of a folded problem, from messages that all edges of a link share.

The tied problem's own optimum bounds only the assignments in which nodes of a colour choose alike.  For all others
the costs are shifted between nodes and edges as in dual.py, by the same amounts for all edges of a link: every
assignment of the original keeps its cost, so that the sum of the separate minima bounds them all.  Nodes of a
colour with the same number of edges in each link have the same minimum, and are one *kind*: a colour is of several
kinds only where the colours stop telling layers apart, near the ends of a chain, or where a priced byte is alive
for some of its nodes.  The bound is then a sum over kinds and links, each times its number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .base import Incumbent
from .problem import Floats, Ints
from .quotient import Link, Quotient

#: Sweeps there and back; most problems stop gaining before.
MOST_SWEEPS = 100

#: The bound is taken every so many sweeps; once settled, the ascent ends when that closes less of the gap than this.
SWEEPS_A_ROUND, LEAST_GAIN = 4, 0.02

#: A colour of several kinds first passes on what they can spare on average, which may cost one kind for another's
#: good, and more and more what each of them can, which never lowers the bound: the share of the former at the start
#: and its decay a sweep.  Chosen on unrolled networks of 12 to 96 layers: it leaves a third of the gap that
#: caution alone leaves.
DARING, DECAY = 0.8, 0.93

#: The ascent may end for lack of gain once that share is this small.
SETTLED = 0.05

#: Where it ends with the gap open, it dares again from there, for as long as that gains: the share decays faster now.
#: On 96 layers of GPT-3 the gap falls from 0.7 to under 0.5 % in 16 sweeps, where a finer fold gained nothing.
SECOND_DECAY = 0.8

#: A forbidden pair is priced at this many times what all choices together can make a difference: a relaxation.
FORBIDDEN = 2.0


@dataclass(frozen=True, eq=False)
class _Visit:
    """What a colour does when it is visited on the way there, or back, all links at once.

    Attributes:
      matrix: of the links that it collects from, one below the other, [their strategies, mine]; `first`, where each
        begins; `theirs`, where their shifts are, a number a row.
      collects: [links, strategies], the own shifts of these links; `edges`: [kinds, links] of them.
      gives: the own shifts of those that it passes on to; `ahead`: [kinds, 1] edges of these.
      share: of what can be spared, to each of the latter.
    """

    matrix: Floats
    first: Ints
    theirs: Ints
    collects: Floats
    edges: Floats
    gives: Floats
    ahead: Floats
    share: float


class LiftedAscent:
    """The shifted costs: `node[c][k]` of kind k of colour c; of a link, `matrix + tail[:, None] + head`.

    `prices_s` are seconds a byte alive at a time step: a memory row relaxed into the objective (Lagrange).
    """

    def __init__(self, quotient: Quotient, prices_s: Mapping[int, float] | None = None) -> None:
        limit_bytes = quotient.problem.limit_bytes or 0
        self._refund_s = math.fsum(price * limit_bytes for price in (prices_s or {}).values())
        self.order = sorted(quotient.alive(), key=lambda colour: int(quotient.members[colour][0]))
        links = [link for _, link in sorted(quotient.links.items())]
        forbidden_s = FORBIDDEN * _span_s(quotient, links)
        priced: dict[int, Floats] = {}
        for link in links:
            if id(link.matrix) not in priced:
                priced[id(link.matrix)] = np.where(np.isfinite(link.matrix), link.matrix, forbidden_s)
        # The shifts of all links, tail and head, those of one colour together.
        self._shifts = np.zeros(sum(sum(link.matrix.shape) for link in links))
        self._links: list[tuple[int, Floats, Floats, Floats]] = []
        self.node: dict[int, Floats] = {}
        self.count: dict[int, Ints] = {}
        self._weights: dict[int, Floats] = {}
        self._visits: dict[tuple[int, bool], _Visit] = {}
        self._lay_out(
            quotient, links, [priced[id(link.matrix)] for link in links], _alive_s(quotient, prices_s or {})
        )

    def _lay_out(
        self, quotient: Quotient, links: list[Link], matrices: list[Floats], extra_s: Mapping[int, Floats]
    ) -> None:
        rank = {colour: i for i, colour in enumerate(self.order)}
        touching: dict[int, list[tuple[bool, int, bool]]] = {colour: [] for colour in self.order}
        for number, link in enumerate(links):
            tail, head = rank[link.tail], rank[link.head]
            touching[link.tail].append((tail <= head, number, True))
            touching[link.head].append((head < tail, number, False))
        at: dict[tuple[int, bool], int] = {}
        end = 0
        for colour in self.order:
            touching[colour].sort(key=lambda side: side[0])
            for _, number, at_tail in touching[colour]:
                at[number, at_tail], end = end, end + quotient.cost(colour).size
        self._links = [
            (
                link.tails.size, matrix, self._shifts[at[i, True] :][: matrix.shape[0]],
                self._shifts[at[i, False] :][: matrix.shape[1]],
            )
            for i, (link, matrix) in enumerate(zip(links, matrices, strict=True))
        ]  # fmt: skip
        turned = {id(matrix): np.ascontiguousarray(matrix.T) for matrix in matrices}
        stacked: dict[tuple[int, ...], Floats] = {}
        for colour in self.order:
            members = quotient.members[colour]
            table = np.zeros((members.size, len(touching[colour]) + 1))
            for column, (_, number, at_tail) in enumerate(touching[colour]):
                mine = links[number].tails if at_tail else links[number].heads
                table[:, column] = np.bincount(np.searchsorted(members, mine), minlength=members.size)
            extra = extra_s.get(colour)
            if extra is not None:
                table[:, -1] = np.unique(extra, axis=0, return_inverse=True)[1].reshape(-1)
            kinds, first, count = np.unique(table, axis=0, return_index=True, return_counts=True)
            self.count[colour] = count
            self._weights[colour] = count / count.sum()
            self.node[colour] = np.repeat(quotient.cost(colour)[None, :], count.size, axis=0)
            if extra is not None:
                self.node[colour] += extra[first]
            # What is earlier comes first: each way collects from one stretch of sides and gives to the other.
            size, split = quotient.cost(colour).size, sum(not later for later, _, _ in touching[colour])
            begin = at[touching[colour][0][1:]] if touching[colour] else 0
            own = self._shifts[begin : begin + size * len(touching[colour])].reshape(-1, size)
            counts = kinds[:, :-1]
            for back in (False, True):
                here, there = (
                    (slice(split, None), slice(split)) if back else (slice(split), slice(split, None))
                )
                sides = touching[colour][here]
                parts = [turned[id(matrices[n])] if at_tail else matrices[n] for _, n, at_tail in sides]
                key = tuple(map(id, parts))
                if key not in stacked:
                    stacked[key] = np.concatenate([np.zeros((0, size)), *parts])
                sizes = np.array([part.shape[0] for part in parts], dtype=np.int64)
                begins = [
                    np.arange(part.shape[0]) + at[n, not t]
                    for (_, n, t), part in zip(sides, parts, strict=True)
                ]
                passed, ahead = counts[:, here].sum(axis=1), counts[:, there].sum(axis=1)
                most = float(np.maximum(passed, ahead).max())
                self._visits[colour, back] = _Visit(
                    matrix=stacked[key],
                    first=np.cumsum(sizes) - sizes,
                    theirs=np.concatenate([np.zeros(0, np.int64), *begins]),
                    collects=own[here],
                    edges=np.ascontiguousarray(counts[:, here]),
                    gives=own[there] if ahead.any() else own[:0],
                    ahead=ahead[:, None],
                    share=1 / most if most else 0.0,
                )

    def sweep(self, daring: float) -> None:
        """There and back; with `daring` 0 the bound does not fall."""
        for back in (False, True):
            for colour in reversed(self.order) if back else self.order:
                self._pass_on(colour, self._visits[colour, back], daring)

    def _pass_on(self, colour: int, visit: _Visit, daring: float) -> None:
        """Collect what the links to colours visited before cost at least, pass on to those visited after."""
        costs = self.node[colour]
        if len(visit.collects):
            shifted = visit.matrix + self._shifts[visit.theirs][:, None]
            least = np.minimum.reduceat(shifted, visit.first, axis=0)
            least += visit.collects
            costs += visit.edges @ least
            np.subtract(visit.collects, least, out=visit.collects)
        if not len(visit.gives):
            return
        spare = costs - costs.min(axis=1, keepdims=True)
        give = spare.min(axis=0)
        if len(costs) > 1 and daring:
            give = daring * (self._weights[colour] @ spare) + (1 - daring) * give
        give *= visit.share
        np.add(visit.gives, give, out=visit.gives)
        costs -= visit.ahead * give

    def bound_s(self) -> float:
        """The bound at these messages."""
        nodes_s = (self.count[colour] * costs.min(axis=1) for colour, costs in self.node.items())
        links_s = (n * float((matrix + tail[:, None] + head).min()) for n, matrix, tail, head in self._links)
        return math.fsum(float(part.sum()) for part in nodes_s) + math.fsum(links_s) - self._refund_s


def ascend(dual: LiftedAscent, best: Incumbent, relative_gap: float, deadline: float) -> None:
    """Raise the bound of `best` until the gap is closed, little is gained, or the deadline (`time.monotonic`)."""
    daring, decay, last_s, began_s = DARING, DECAY, -math.inf, -math.inf
    for number in range(MOST_SWEEPS):
        dual.sweep(daring if daring > SETTLED else 0.0)
        daring *= decay
        if time.monotonic() > deadline:
            best.raise_bound(dual.bound_s())
            return
        if number % SWEEPS_A_ROUND == SWEEPS_A_ROUND - 1:
            bound_s = dual.bound_s()
            best.raise_bound(bound_s)
            if best.closed(relative_gap):
                return
            least_s = LEAST_GAIN * (best.objective_s - bound_s)
            if bound_s - last_s < least_s and daring <= SETTLED * decay:
                if best.bound_s - began_s < least_s:
                    return
                daring, decay, began_s = DARING, SECOND_DECAY, best.bound_s
            last_s = bound_s


def _span_s(quotient: Quotient, links: list[Link]) -> float:
    """What all choices together can make a difference."""
    nodes_s = (quotient.members[c].size * float(np.ptp(quotient.cost(c))) for c in quotient.alive())
    links_s = (link.tails.size * float(np.ptp(link.matrix[np.isfinite(link.matrix)])) for link in links)
    return math.fsum(nodes_s) + math.fsum(links_s)


def _alive_s(quotient: Quotient, prices_s: Mapping[int, float]) -> dict[int, Floats]:
    """For each colour what the bytes alive at the priced time steps cost, [node, strategy]."""
    extra: dict[int, Floats] = {}
    if not prices_s:
        return extra
    into, choices = quotient.owners()
    stands = quotient.stands()
    for usage in quotient.problem.usages:
        price_s = math.fsum(price for at, price in prices_s.items() if usage.start <= at < usage.stop)
        if not price_s:
            continue
        colour = int(quotient.colour[usage.node])
        leader, members = int(into[colour]), quotient.members[int(into[colour])]
        rows = extra.setdefault(leader, np.zeros((members.size, quotient.cost(leader).size)))
        rows[np.searchsorted(members, stands[usage.node])] += price_s * usage.bytes[choices[colour]]
    return extra
