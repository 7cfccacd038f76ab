"""A bound on the whole of a folded problem, from messages that all edges of a link share.

The tied problem's own optimum bounds only the assignments in which nodes of a colour choose alike.  For all others
the costs are shifted between nodes and edges as in dual.py, by the same amounts for all edges of a link: every
assignment of the original keeps its cost, so that the sum of the separate minima bounds them all.  Nodes of a
colour with the same number of edges in each link have the same minimum, and are one *kind*: a colour is of several
kinds only where the colours stop telling layers apart, near the ends of a chain, or where a priced byte is alive
for some of its nodes.  The bound is then a sum over kinds and links, each times its number.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping

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


class LiftedAscent:
    """The shifted costs of every kind of every colour, and of a link `matrix + tail[:, None] + head`.

    `prices_s` are seconds a byte alive at a time step: a memory row relaxed into the objective (Lagrange).
    """

    def __init__(self, quotient: Quotient, prices_s: Mapping[int, float] | None = None) -> None:
        # compiled code, and what compiles it, are loaded by those who need them
        from . import lifted_messages

        self._kernels = lifted_messages
        limit_bytes = quotient.problem.limit_bytes or 0
        self._refund_s = math.fsum(price * limit_bytes for price in (prices_s or {}).values())
        self.order = sorted(quotient.alive(), key=lambda colour: int(quotient.members[colour][0]))
        links = [link for _, link in sorted(quotient.links.items())]
        forbidden_s = FORBIDDEN * _span_s(quotient, links)
        priced: dict[int, Floats] = {}
        for link in links:
            if id(link.matrix) not in priced:
                priced[id(link.matrix)] = np.where(np.isfinite(link.matrix), link.matrix, forbidden_s)
        matrices = [priced[id(link.matrix)] for link in links]
        self._lay_out(quotient, links, matrices, _alive_s(quotient, prices_s or {}))

    def _lay_out(
        self, quotient: Quotient, links: list[Link], matrices: list[Floats], extra_s: Mapping[int, Floats]
    ) -> None:
        rank = {colour: i for i, colour in enumerate(self.order)}
        touching: dict[int, list[tuple[bool, int, bool]]] = {colour: [] for colour in self.order}
        for number, link in enumerate(links):
            tail, head = rank[link.tail], rank[link.head]
            touching[link.tail].append((tail <= head, number, True))
            touching[link.head].append((head < tail, number, False))
        # The shifts of all links, tail and head, those of one colour together.
        at: dict[tuple[int, bool], int] = {}
        end = 0
        for colour in self.order:
            touching[colour].sort(key=lambda side: side[0])
            for _, number, at_tail in touching[colour]:
                at[number, at_tail], end = end, end + quotient.cost(colour).size
        pool, table = _Pool(), _Table()
        count: list[Ints] = []
        for colour in self.order:
            sides, cost = touching[colour], quotient.cost(colour)
            kinds, first, numbers = _kinds(quotient.members[colour], links, sides, extra_s.get(colour))
            count.append(numbers)
            shifted = np.repeat(cost[None, :], numbers.size, axis=0)
            if colour in extra_s:
                shifted += extra_s[colour][first]
            table.colour(shifted, numbers)
            # What is earlier comes first: each way collects from one stretch of sides and gives to the other.
            split = sum(not later for later, _, _ in sides)
            begin = at[sides[0][1:]] if sides else 0
            for back in (False, True):
                here, there = (
                    (slice(split, None), slice(split)) if back else (slice(split), slice(split, None))
                )
                collected = [
                    (pool.at(matrices[n], turned=t), at[n, not t], matrices[n].shape[1 if t else 0])
                    for _, n, t in sides[here]
                ]
                own, gives = (begin + cost.size * (part.start or 0) for part in (here, there))
                table.visit(collected, own, kinds[:, here], gives, kinds[:, there])
        self._times = np.array([link.tails.size for link in links], dtype=np.int64)
        self._count = np.concatenate([np.zeros(0, np.int64), *count])
        self._flat = self._kernels.Lifted(
            **table.arrays(),
            shift_s=np.zeros(end),
            tail_matrix=np.array([pool.at(matrix, turned=False) for matrix in matrices], dtype=np.int64),
            tail_at=np.array([at[n, True] for n in range(len(links))], dtype=np.int64),
            head_at=np.array([at[n, False] for n in range(len(links))], dtype=np.int64),
            tail_wide=np.array([matrix.shape[0] for matrix in matrices], dtype=np.int64),
            head_wide=np.array([matrix.shape[1] for matrix in matrices], dtype=np.int64),
            matrix_s=pool.array(),
        )

    def copy(self) -> LiftedAscent:
        """The same messages, to be passed on apart."""
        other = copy.copy(self)
        other._flat = self._flat._replace(node_s=self._flat.node_s.copy(), shift_s=self._flat.shift_s.copy())
        return other

    def sweep(self, daring: float) -> None:
        """There and back; with `daring` 0 the bound does not fall."""
        if self.order:
            self._kernels.sweep(self._flat, daring)

    def bound_s(self) -> float:
        """The bound at these messages."""
        nodes_s, links_s = np.zeros(self._count.size), np.zeros(self._times.size)
        self._kernels.minima(self._flat, nodes_s, links_s)
        return math.fsum([*(self._count * nodes_s), *(self._times * links_s)]) - self._refund_s


def _kinds(
    members: Ints, links: list[Link], sides: list[tuple[bool, int, bool]], extra: Floats | None
) -> tuple[Floats, Ints, Ints]:
    """The kinds of a colour's nodes: [kind, side] edges, the first node of each kind, and how many nodes are of it."""
    table = np.zeros((members.size, len(sides) + 1))
    for column, (_, number, at_tail) in enumerate(sides):
        mine = links[number].tails if at_tail else links[number].heads
        table[:, column] = np.bincount(np.searchsorted(members, mine), minlength=members.size)
    if extra is not None:
        table[:, -1] = np.unique(extra, axis=0, return_inverse=True)[1].reshape(-1)
    if (table == table[0]).all():
        return table[:1, :-1], np.zeros(1, np.int64), np.array([members.size])
    kinds, first, count = np.unique(table, axis=0, return_index=True, return_counts=True)
    return kinds[:, :-1], first, count


class _Pool:
    """Matrices one after the other, each once in either orientation that is asked for."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, bool], int] = {}
        self._arrays: list[Floats] = [np.zeros(0)]
        self._end = 0

    def at(self, matrix: Floats, *, turned: bool) -> int:
        key = id(matrix), turned
        if key not in self._at:
            self._at[key], self._end = self._end, self._end + matrix.size
            self._arrays.append((matrix.T if turned else matrix).reshape(-1))
        return self._at[key]

    def array(self) -> Floats:
        return np.concatenate(self._arrays)


class _Table:
    """Collects what the kernels read of colours and their visits."""

    def __init__(self) -> None:
        self._ints: dict[str, list[int]] = {
            name: []
            for name in (
                "size", "kinds", "node_at", "weight_at", "link_matrix", "link_theirs", "link_wide", "own_at",
                "edges_at", "gives_at", "gives", "ahead_at",
            )
        }  # fmt: skip
        self._ints["link_start"] = [0]
        self._pools: dict[str, list[Floats]] = {
            name: [np.zeros(0)] for name in ("node_s", "weight", "edges", "ahead")
        }
        self._ends = dict.fromkeys(self._pools, 0)
        self._share: list[float] = []

    def _keep(self, name: str, array: Floats) -> int:
        """Where in a pool an array begins."""
        begin = self._ends[name]
        self._pools[name].append(array.reshape(-1))
        self._ends[name] += array.size
        return begin

    def _say(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self._ints[name].append(number)

    def colour(self, shifted_s: Floats, count: Ints) -> None:
        """The next colour: its costs [kinds, strategies] and how many nodes are of each kind."""
        self._say(
            size=shifted_s.shape[1], kinds=shifted_s.shape[0], node_at=self._keep("node_s", shifted_s),
            weight_at=self._keep("weight", count / count.sum()),
        )  # fmt: skip

    def visit(
        self, collected: list[tuple[int, int, int]], own_at: int, edges: Floats, gives_at: int, given: Floats
    ) -> None:
        """Its next visit: the links collected from (matrix, where their shifts begin, how many) and those given to."""
        for matrix, theirs, wide in collected:
            self._say(link_matrix=matrix, link_theirs=theirs, link_wide=wide)
        passed, ahead = edges.sum(axis=1), given.sum(axis=1)
        most = float(np.maximum(passed, ahead).max())
        self._share.append(1 / most if most else 0.0)
        self._say(
            link_start=len(self._ints["link_matrix"]), own_at=own_at, edges_at=self._keep("edges", edges),
            gives_at=gives_at, gives=given.shape[1] if ahead.any() else 0, ahead_at=self._keep("ahead", ahead),
        )  # fmt: skip

    def arrays(self) -> dict[str, np.ndarray]:
        ints = {name: np.array(numbers, dtype=np.int64) for name, numbers in self._ints.items()}
        pools = {name: np.concatenate(arrays) for name, arrays in self._pools.items()}
        return {**ints, **pools, "share": np.array(self._share)}


def ascend(dual: LiftedAscent, best: Incumbent, relative_gap: float, deadline: float) -> None:
    """Raise the bound of `best` until the gap is closed, little is gained, or the deadline (`time.monotonic`).

    Where daring leaves the gap open, caution is tried from the start as well: in networks whose layers differ in width
    (U-Net, Inception) what many kinds can spare on average is far from what each of them can.
    """
    cautious = dual.copy()
    _ascend(dual, best, relative_gap, deadline, DARING)
    if not best.closed(relative_gap) and time.monotonic() < deadline:
        _ascend(cautious, best, relative_gap, deadline, 0.0)


def _ascend(
    dual: LiftedAscent, best: Incumbent, relative_gap: float, deadline: float, daring: float
) -> None:
    dares, decay, last_s, began_s = daring > 0, DECAY, -math.inf, -math.inf
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
                if not dares or best.bound_s - began_s < least_s:
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
