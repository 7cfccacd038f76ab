"""Exact contraction of the graph of a problem: what follows from the pairs alone, memory left aside.

A mutable graph in which every step is equivalent: it has the same optimum, and `trail` says how a choice in the
smaller graph becomes one in the larger.  Inside, a forbidden pair is the float infinity, which adds and
compares as a mask would; it never reaches a problem or a solver.  Matrices are shared between edges, so every
transform is cached by identity: tens of thousands of edges cost some hundred transforms.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .dominance import Dominance
from .problem import Bools, Floats, Ints, StrategyProblem
from .profiles import Profiles

Array = TypeVar("Array", Floats, Ints)

#: A follower with more neighbours than this is not folded into a node of more strategies: weighing it takes
#: too long.
MOST_NEIGHBOURS = 64


@dataclass(frozen=True)
class Keep:
    """Node `node` kept only some strategies: its new strategy s is its former `kept[s]`."""

    node: int
    kept: Ints

    def lift(self, chosen: list[int]) -> None:
        chosen[self.node] = int(self.kept[chosen[self.node]])


@dataclass(frozen=True)
class Fold:
    """Node `node` follows `into`: its strategy is `follows[strategy of into]`."""

    node: int
    into: int
    follows: Ints

    def lift(self, chosen: list[int]) -> None:
        chosen[self.node] = int(self.follows[chosen[self.into]])


@dataclass(frozen=True)
class Eliminate:
    """Node `node`, of `size` strategies, was minimised out: it takes `best[strategies of its neighbours]`."""

    node: int
    size: int
    neighbours: tuple[int, ...]
    best: Ints

    def lift(self, chosen: list[int]) -> None:
        chosen[self.node] = int(self.best[tuple(chosen[n] for n in self.neighbours)])


class WipeOut(Exception):
    """A node lost its last strategy: the pairs alone forbid every assignment."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


@dataclass(frozen=True)
class Shape:
    """What a matrix says about its rows: which are possible, and whether a row determines the column."""

    possible: Bools
    all_possible: bool
    follows: Ints | None
    free: bool


class Matrices:
    """Transforms of shared matrices, each worked out once; equal results are one array."""

    def __init__(self) -> None:
        self._pool: dict[tuple[str, tuple[int, ...], bytes], np.ndarray] = {}
        # Results are keyed by the identity of their arguments, which the pool or `_alive` keeps from being
        # reused.
        self._known: dict[tuple[object, ...], np.ndarray] = {}
        self._shapes: dict[int, Shape] = {}
        self._alive: list[np.ndarray | None] = []
        self._above: dict[int, tuple[int, Ints | None]] = {}
        self._every: dict[int, Ints] = {}
        self.dominance, self.profiles = Dominance(), Profiles()

    def intern(self, array: np.ndarray) -> np.ndarray:
        """The one array of this content."""
        array = np.ascontiguousarray(array)
        return self._pool.setdefault((array.dtype.kind, array.shape, array.tobytes()), array)

    def masked(self, costs_s: Floats, allowed: Bools | None) -> Floats:
        """The costs with infinity where a pair is forbidden."""
        key = ("masked", id(costs_s), id(allowed))
        if key not in self._known:
            self._alive += [costs_s, allowed]
            self._known[key] = self.intern(costs_s if allowed is None else np.where(allowed, costs_s, np.inf))
        return self._known[key]

    def turned(self, matrix: Floats) -> Floats:
        """The transpose."""
        key = ("turned", id(matrix))
        if key not in self._known:
            turned = self.intern(matrix.T)
            self._known[key], self._known["turned", id(turned)] = turned, matrix
        return self._known[key]

    def rows(self, matrix: Array, index: Ints) -> Array:
        """`matrix[index]`, for an interned index."""
        key = ("rows", id(matrix), id(index))
        if key not in self._known:
            self._known[key] = self.intern(matrix[index])
        return self._known[key]

    def every(self, size: int) -> Ints:
        """All of so many strategies, as an index."""
        if size not in self._every:
            self._every[size] = self.intern(np.arange(size))
        return self._every[size]

    def above(self, used: Ints) -> tuple[int, Ints | None]:
        """The least of an interned array, and what the others are above it; None where all are equal."""
        if id(used) not in self._above:
            least = int(used.min())
            self._above[id(used)] = least, self.intern(used - least) if (used > least).any() else None
        return self._above[id(used)]

    def plus(self, left: Array, right: Array) -> Array:
        """The sum."""
        key = ("plus", id(left), id(right))
        if key not in self._known:
            self._known[key] = self.intern(left + right)
        return self._known[key]

    def shape(self, matrix: Floats) -> Shape:
        """What the matrix says about its rows."""
        known = self._shapes.get(id(matrix))
        if known is None:
            finite = np.isfinite(matrix)
            count = finite.sum(axis=1)
            possible = count > 0
            single = bool((count == 1).all())
            free = bool(finite.all()) and _separable(matrix)
            known = self._shapes[id(matrix)] = Shape(
                possible=possible,
                all_possible=bool(possible.all()),
                follows=self.intern(finite.argmax(axis=1)) if single else None,
                free=free,
            )
        return known


class Contraction:
    """The graph while it shrinks.  `costs[n]` is None once node n is gone; `joined[a][b]` is oriented [a, b]."""

    def __init__(self, problem: StrategyProblem, matrices: Matrices | None = None) -> None:
        self.matrices = matrices or Matrices()
        #: The cost of what has been decided and removed.
        self.constant_s = 0.0
        self.trail: list[Keep | Fold | Eliminate] = []
        self.costs: list[Floats | None] = [node.costs_s for node in problem.nodes]
        self.joined: list[dict[int, Floats]] = [{} for _ in problem.nodes]
        self._dirty: dict[tuple[int, int], None] = {}
        self._usages = problem.usages
        for edge in problem.edges:
            self._join(edge.tail, edge.head, self.matrices.masked(edge.costs_s, edge.allowed))

    @functools.cached_property
    def spans(self) -> tuple[Ints, Ints]:
        """The time steps at which usages start or stop, and of each usage the positions among them: [usages, 2]."""
        bounds = np.array([(u.start, u.stop) for u in self._usages], dtype=np.int64).reshape(-1, 2)
        times, where = np.unique(bounds, return_inverse=True)
        return times, where.reshape(-1, 2)

    @functools.cached_property
    def used(self) -> list[Ints]:
        """The bytes of each usage, equal ones one array."""
        return [self.matrices.intern(usage.bytes) for usage in self._usages]

    def size(self, node: int) -> int:
        """How many strategies a node that is still there has."""
        return self.unary(node).size

    def unary(self, node: int) -> Floats:
        """The costs of a node that is still there."""
        costs = self.costs[node]
        assert costs is not None
        return costs

    def alive(self) -> list[int]:
        """The nodes still there, ascending."""
        return [n for n, costs in enumerate(self.costs) if costs is not None]

    def settle(self) -> None:
        """Contract until nothing follows any more; WipeOut when a node has no possible strategy left."""
        while self._dirty:
            # The latest first: a fold continues along its chain while it is small.
            (a, b), _ = self._dirty.popitem()
            if b in self.joined[a]:
                self._revise(a, b)

    def _revise(self, a: int, b: int) -> None:
        shape = self.matrices.shape
        for here, there in ((a, b), (b, a)):
            rows = shape(self.joined[here][there])
            if not rows.all_possible:
                self.keep(here, np.flatnonzero(rows.possible))
        ours, theirs = shape(self.joined[a][b]), shape(self.joined[b][a])
        if ours.free:
            self._absorb(a, b)
        elif ours.follows is not None and theirs.follows is not None:
            # A bijection: the node with fewer edges moves.
            small, large = (a, b) if len(self.joined[a]) <= len(self.joined[b]) else (b, a)
            self.fold(small, large)
        elif ours.follows is not None and self._worth(b, a):
            self.fold(b, a)
        elif theirs.follows is not None and self._worth(a, b):
            self.fold(a, b)

    def _worth(self, node: int, into: int) -> bool:
        """Whether folding leaves no more matrix entries: a follower with fewer strategies is the cheaper
        carrier.
        """
        mine, theirs = self.size(node), self.size(into)
        if theirs <= mine:
            return True
        if len(self.joined[node]) > MOST_NEIGHBOURS:
            return False
        before, after = mine * theirs, 0
        for other in self.joined[node]:
            if other != into:
                before += mine * self.size(other)
                after += 0 if other in self.joined[into] else theirs * self.size(other)
        return after <= before

    def keep(self, node: int, kept: Ints) -> None:
        """Delete all strategies but `kept` (ascending)."""
        if not kept.size:
            raise WipeOut(node)
        kept = self.matrices.intern(kept)
        self.trail.append(Keep(node, kept))
        self.costs[node] = self.unary(node)[kept]
        for other, matrix in self.joined[node].items():
            self._put(node, other, self.matrices.rows(matrix, kept))

    def fold(self, node: int, into: int) -> None:
        """Remove `node`, which the strategy of `into` determines; its costs and edges move there."""
        matrix = self.joined[into][node]
        follows = self.matrices.shape(matrix).follows
        assert follows is not None
        self.trail.append(Fold(node, into, follows))
        self.costs[into] = (
            self.unary(into) + self.unary(node)[follows] + matrix[np.arange(follows.size), follows]
        )
        self._cut(node, into)
        for other in list(self.joined[node]):
            moved = self.matrices.rows(self.joined[node][other], follows)
            self._cut(node, other)
            self._join(into, other, moved)
        self.costs[node] = None

    def eliminate(self, node: int) -> None:
        """Minimise out a node of at most two neighbours and no memory."""
        neighbours = tuple(self.joined[node])
        total = self.unary(node).reshape((1,) * len(neighbours) + (-1,))
        for axis, other in enumerate(neighbours):
            matrix = self.joined[other][node]
            shape = [1] * len(neighbours) + [matrix.shape[1]]
            shape[axis] = matrix.shape[0]
            total = total + matrix.reshape(shape)
        best = total.argmin(axis=-1)
        least: Floats = total.min(axis=-1)
        self.trail.append(Eliminate(node, self.size(node), neighbours, best))
        for other in neighbours:
            self._cut(node, other)
        self.costs[node] = None
        if len(neighbours) == 2:
            self._join(*neighbours, self.matrices.intern(least))
        elif neighbours:
            other = neighbours[0]
            finite = np.isfinite(least)
            self.costs[other] = self.unary(other) + np.where(finite, least, 0.0)
            if not finite.all():
                self.keep(other, np.flatnonzero(finite))
        else:
            self.constant_s += float(least)

    def _absorb(self, node: int, other: int) -> None:
        """Remove an edge that is a sum of a row part and a column part: they are unary costs."""
        matrix = self.joined[node][other]
        self._cut(node, other)
        self.costs[node] = self.unary(node) + matrix[:, 0]
        self.costs[other] = self.unary(other) + (matrix[0] - matrix[0, 0])

    def _join(self, a: int, b: int, matrix: Floats) -> None:
        present = self.joined[a].get(b)
        self._put(a, b, matrix if present is None else self.matrices.plus(present, matrix))

    def _put(self, a: int, b: int, matrix: Floats) -> None:
        self.joined[a][b] = matrix
        self.joined[b][a] = self.matrices.turned(matrix)
        self._dirty[min(a, b), max(a, b)] = None

    def _cut(self, a: int, b: int) -> None:
        del self.joined[a][b], self.joined[b][a]


def _separable(matrix: Floats) -> bool:
    """Whether the matrix is, to the last bit, its first column plus a row."""
    return bool((matrix == matrix[:, :1] + (matrix[:1] - matrix[0, 0])).all())
