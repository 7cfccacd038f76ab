"""A problem folded by the colours of its nodes: contracted a colour at a time, as each of its nodes would be.

A *link* is all edges of one matrix between two colours.  What contract.py does to a node along an edge is done
here to all nodes of a colour along a link at once, wherever it is the same for each of them, so that the problem
behind the quotient stays equivalent to the original:

- a strategy without a partner goes, when every node of its colour has an edge of the link;
- a link that says nothing (a row plus a column) goes, when all nodes of either side have equally many of its edges;
- a colour whose nodes follow the other side goes, when each has one edge of the link, and the nodes of the other
  side have equally many.

`folded` then ties what is left: one choice for all nodes of a colour.  That is a restriction; its assignments are
the original's, and cost there what they cost here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .alike import Contents
from .contract import MOST_NEIGHBOURS, Matrices
from .problem import Floats, Ints, StrategyProblem


@dataclass(eq=False)
class Link:
    """Edges of one matrix [tail, head], infinite where forbidden, from node `tails[i]` to `heads[i]` for each i."""

    tail: int
    head: int
    matrix: Floats
    tails: Ints
    heads: Ints


class Quotient:
    """The colours that are left, the nodes that stand for them, and the links between them.

    Attributes:
      costs: by colour, of one of its nodes; None once the colour has gone.
      members: by colour, its nodes, ascending.
      links: by number; `at[c]` are the numbers of those that touch colour c.
    """

    def __init__(
        self, problem: StrategyProblem, contents: Contents, colour: Ints, matrices: Matrices
    ) -> None:
        self.problem, self.colour, self.matrices = problem, colour, matrices
        count = int(colour.max(initial=-1)) + 1
        order = np.argsort(colour, kind="stable")
        bounds = np.searchsorted(colour[order], np.arange(count + 1)).tolist()
        self.members = [order[a:b] for a, b in itertools.pairwise(bounds)]
        self.costs: list[Floats | None] = [problem.nodes[int(nodes[0])].costs_s for nodes in self.members]
        self.links: dict[int, Link] = {}
        self.at: list[dict[int, None]] = [{} for _ in range(count)]
        self._trail: list[tuple[int, int, Ints]] = []
        self._next = 0
        # For each node the one that it is counted at: its own, until its colour follows another.
        self._stands = np.arange(len(problem.nodes))
        self._gather(contents)

    def _gather(self, contents: Contents) -> None:
        edges = self.problem.edges
        tails = np.array([edge.tail for edge in edges], dtype=np.int64)
        heads = np.array([edge.head for edge in edges], dtype=np.int64)
        keys = np.stack([self.colour[tails], self.colour[heads], contents.edges], axis=1)
        order = np.lexsort(keys.T[::-1])
        first = np.flatnonzero(np.diff(keys[order], axis=0, prepend=-1).any(axis=1))
        for mine in np.split(order, first[1:]) if order.size else []:
            tail, head, _ = keys[mine[0]].tolist()
            self._add(Link(tail, head, contents.masked[int(mine[0])], tails[mine], heads[mine]))

    def _add(self, link: Link) -> list[int]:
        """Keep a link, added to another of the very same pairs where there is one; its number, if it is new."""
        few, many = sorted((self.at[link.tail], self.at[link.head]), key=len)
        for number in [n for n in few if n in many]:
            other = self.links[number]
            if other.tails.size != link.tails.size or {other.tail, other.head} != {link.tail, link.head}:
                continue
            alike = link if other.tail == link.tail else self._turned(link)
            if _same_pairs(other, alike):
                self._drop(number)
                matrix = self.matrices.plus(other.matrix, alike.matrix)
                link = Link(other.tail, other.head, matrix, other.tails, other.heads)
        number, self._next = self._next, self._next + 1
        self.links[number] = link
        self.at[link.tail][number] = self.at[link.head][number] = None
        return [number]

    def _drop(self, number: int) -> None:
        link = self.links.pop(number)
        self.at[link.tail].pop(number, None)
        self.at[link.head].pop(number, None)

    def _turned(self, link: Link) -> Link:
        return Link(link.head, link.tail, self.matrices.turned(link.matrix), link.heads, link.tails)

    def cost(self, colour: int) -> Floats:
        """Of one node of a colour that is still there."""
        costs = self.costs[colour]
        assert costs is not None
        return costs

    def alive(self) -> list[int]:
        """The colours still there, ascending."""
        return [c for c, costs in enumerate(self.costs) if costs is not None]

    # -- contraction --------------------------------------------------------------------------------------

    def contract(self) -> Quotient:
        """Contract until nothing changes; returns self."""
        waiting = dict.fromkeys(self.links)
        while waiting:
            number, _ = waiting.popitem()
            if number in self.links and self.links[number].tail != self.links[number].head:
                waiting.update(dict.fromkeys(self._revise(number)))
        return self

    def _revise(self, number: int) -> list[int]:
        """Contract along one link, if that can be done; the numbers of the links to look at again."""
        link = self.links[number]
        again: list[int] = []
        for one in (link, self._turned(link)):
            possible = self.matrices.shape(one.matrix).possible
            if (
                not possible.all()
                and possible.any()
                and np.unique(one.tails).size == self.members[one.tail].size
            ):
                self._keep(one.tail, np.flatnonzero(possible))
                again += self.at[one.tail]
        if again:
            return again
        for one in (link, self._turned(link)):
            here, there = self._evenly(one.tails, one.tail), self._evenly(one.heads, one.head)
            if not here or not there:
                return []
            shape = self.matrices.shape(one.matrix)
            if shape.free:
                self._drop(number)
                self.costs[one.tail] = self.cost(one.tail) + here * one.matrix[:, 0]
                self.costs[one.head] = self.cost(one.head) + there * (one.matrix[0] - one.matrix[0, 0])
                return []
            if there == 1 and shape.follows is not None and self._worth(one) and self._apart(number, one):
                return self._follow(number, one, shape.follows, here)
        return []

    def _evenly(self, nodes: Ints, colour: int) -> int:
        """How many edges each node of the colour has, if all have equally many; else 0."""
        members = self.members[colour]
        if nodes.size % members.size:
            return 0
        each = nodes.size // members.size
        return each if np.array_equal(np.sort(nodes), np.repeat(members, each)) else 0

    def _worth(self, link: Link) -> bool:
        """Whether folding the head into the tail leaves no more matrix entries; see `Contraction._worth`."""
        mine, theirs = self.cost(link.head).size, self.cost(link.tail).size
        if theirs <= mine:
            return True
        return len(self.at[link.head]) <= MOST_NEIGHBOURS and theirs <= 2 * mine

    def _apart(self, number: int, link: Link) -> bool:
        """Whether no other link would join a node with itself once the head is one with the tail."""
        partner = dict(zip(link.heads.tolist(), link.tails.tolist(), strict=True))
        for other in (self.links[n] for n in self.at[link.head] if n != number):
            if {other.tail, other.head} == {link.tail, link.head}:
                one = other if other.tail == link.tail else self._turned(other)
                mine = [partner[h] == t for t, h in zip(one.tails.tolist(), one.heads.tolist(), strict=True)]
                if any(mine):
                    return False
            elif other.tail == other.head and any(
                partner[t] == partner[h]
                for t, h in zip(other.tails.tolist(), other.heads.tolist(), strict=True)
            ):
                return False
        return True

    def _keep(self, colour: int, kept: Ints) -> None:
        kept = self.matrices.intern(kept)
        self._trail.append((colour, colour, kept))
        self.costs[colour] = self.cost(colour)[kept]
        for number in self.at[colour]:
            link = self.links[number]
            if link.tail == colour:
                link.matrix = self.matrices.rows(link.matrix, kept)
            if link.head == colour:
                link.matrix = self.matrices.turned(
                    self.matrices.rows(self.matrices.turned(link.matrix), kept)
                )

    def _follow(self, number: int, link: Link, follows: Ints, each: int) -> list[int]:
        """Fold the head of a link into its tail, `each` of its nodes for every node there."""
        self._drop(number)
        into, gone = link.tail, link.head
        self._trail.append((gone, into, follows))
        here_s = link.matrix[np.arange(follows.size), follows]
        self.costs[into] = self.cost(into) + each * (self.cost(gone)[follows] + here_s)
        self._stands[link.heads] = link.tails
        stands = dict(zip(link.heads.tolist(), link.tails.tolist(), strict=True))
        moved = []
        for other in [self.links[n] for n in self.at[gone]]:
            matrix, tail, head, tails, heads = other.matrix, other.tail, other.head, other.tails, other.heads
            if tail == gone:
                matrix, tail = self.matrices.rows(matrix, follows), into
                tails = np.array([stands[n] for n in tails.tolist()], dtype=np.int64)
            if head == gone:
                turned = self.matrices.rows(self.matrices.turned(matrix), follows)
                matrix, head = self.matrices.turned(turned), into
                heads = np.array([stands[n] for n in heads.tolist()], dtype=np.int64)
            moved.append(Link(tail, head, matrix, tails, heads))
        for n in list(self.at[gone]):
            self._drop(n)
        self.costs[gone] = None
        again: list[int] = []
        for one in moved:
            again += self._add(one)
        return again

    # -- what it means ------------------------------------------------------------------------------------

    def owners(self) -> tuple[Ints, list[Ints]]:
        """For each original colour the colour that it went into, and its strategy for each one of that colour."""
        count = len(self.costs)
        into, rows = np.arange(count), self.matrices.rows
        empty = np.zeros(0, np.int64)
        choice = [
            empty if costs is None else self.matrices.intern(np.arange(costs.size)) for costs in self.costs
        ]
        for colour, leader, follows in reversed(self._trail):
            if colour != leader:
                into[colour] = into[leader]
                choice[colour] = rows(follows, choice[leader])
            else:
                choice[colour] = rows(follows, choice[colour])
        return into, choice

    def stands(self) -> Ints:
        """For each node the one that is still there and that it is counted at."""
        stands = self._stands
        while not np.array_equal(stands[stands], stands):
            stands = stands[stands]
        return stands


def _same_pairs(one: Link, other: Link) -> bool:
    first, second = np.lexsort((one.heads, one.tails)), np.lexsort((other.heads, other.tails))
    return bool(
        np.array_equal(one.tails[first], other.tails[second])
        and np.array_equal(one.heads[first], other.heads[second])
    )
