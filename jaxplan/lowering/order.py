"""In which order several mesh axes cut one dimension.

The search decides which axes cut a dimension; the order is decided here, after it.  It matters where an axis joins
or leaves: gathering the most minor axis is an all_gather, gathering a more major one moves every piece first.
Dimensions that an operation cuts together, or that pass from maker to reader unchanged, share one order (a class).
An all_to_all of several axes takes their order along to the other dimension, or every piece moves once more.  Classes
take the orders that spare most bytes the move, mesh order when it makes no difference.

On TPU and GPU a dimension that is summed over wants the order of the one that its sums are scattered onto: XLA compiles
a reduce_scatter only of parts in the order of the pieces, else an all_reduce of the whole sum and a slice (8 v5e and 8
H100, jax 0.10.2, libtpu 0.0.42.1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import Graph
from ..sharding import UNREDUCED, Layout, MeshAxes, Rule

Key = tuple[str, int, int, int]
"""("value", index, 0, dim), ("read", operation, operand, dim) or ("output", position, 0, dim)."""

_ROUNDS = 4
"""Rounds over all classes: a choice can only wait for the choices of a few others, and each spoils less than before."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The order of the axes of every dimension that several axes cut, by key; absent: mesh order."""

    axes: MeshAxes
    chosen: Mapping[Key, tuple[int, ...]]

    def layout(self, kind: str, index: int, position: int, row: np.ndarray, rank: int) -> Layout:
        """The Layout of a row of a place array, its axes in the order of this value, read or output."""
        dims = []
        for d in range(rank):
            cut = _cut(row, d)
            order = self.chosen.get((kind, index, position, d), ())
            dims.append(tuple(self.axes[a][0] for a in (order if set(order) == set(cut) else cut)))
        pending = tuple(self.axes[a][0] for a in range(len(self.axes)) if row[a] == UNREDUCED)
        return Layout(dims=tuple(dims), unreduced=pending)

    def on_the_way(self, value: int, op: int, position: int, row: np.ndarray, rank: int) -> Layout:
        """The Layout of a step between a value and one reader: as the reader's where it has the reader's axes."""
        made, read = self.layout("value", value, 0, row, rank), self.layout("read", op, position, row, rank)
        known = [bool(self.chosen.get(("read", op, position, d))) for d in range(rank)]
        return Layout(dims=tuple(r if k else m for r, m, k in zip(read.dims, made.dims, known, strict=True)))


def resolve_orders(
    graph: Graph,
    rules: Sequence[Rule],
    axes: MeshAxes,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Mapping[int, np.ndarray],
    factors: Mapping[int, np.ndarray],
    said: Mapping[Key, tuple[int, ...]],
    *,
    platform: str,
) -> Orders:
    """Choose the orders for a decision.

    Args:
      values, reads, outputs: decided rows; factors: for every operation the factor that each axis cuts;
        said: orders that the user's constraints give; platform: "tpu", "gpu" or "cpu".
    """
    if sum(size > 1 for _, size in axes) < 2:
        return Orders(axes=axes, chosen={})
    resolver = _Resolver(graph, rules, axes, values, reads, outputs, factors, said)
    return resolver.orders(sums_along=platform != "cpu")


def _only(order: tuple[int, ...], axes: frozenset[int]) -> tuple[int, ...]:
    return tuple(axis for axis in order if axis in axes)


def _cut(row: np.ndarray, dim: int) -> tuple[int, ...]:
    """The axes that cut a dimension, in mesh order."""
    return tuple(axis for axis, place in enumerate(row.tolist()) if place == dim)


_Passage = tuple[list[int], list[tuple[int, frozenset[int]]], list[tuple[int, int, frozenset[int]]]]
"""Between two layouts: dimensions cut by the same axes; (dimension, axes that stay on it while others join or leave);
(dimension, another one, axes that go along from the former to the latter, several)."""


def _passage(made: np.ndarray, row: np.ndarray) -> _Passage:
    before, after = (sorted({place for place in places.tolist() if place >= 0}) for places in (made, row))
    same, stay = list[int](), list[tuple[int, frozenset[int]]]()
    for d in sorted({*before, *after}):
        stays = frozenset(_cut(made, d)) & frozenset(_cut(row, d))
        if _cut(made, d) == _cut(row, d):
            same.append(d)
        elif stays:
            stay.append((d, stays))
    moved = [(a, b, frozenset(_cut(made, a)) & frozenset(_cut(row, b))) for a in before for b in after if a != b]
    return same, stay, [way for way in moved if len(way[2]) > 1]


class _Resolver:
    def __init__(
        self, graph: Graph, rules: Sequence[Rule], axes: MeshAxes, values: Mapping[int, np.ndarray],
        reads: Mapping[tuple[int, int], np.ndarray], outputs: Mapping[int, np.ndarray],
        factors: Mapping[int, np.ndarray], said: Mapping[Key, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.said = said
        self.graph, self.rules, self.axes, self.factors = graph, rules, axes, factors
        self.values, self.reads, self.outputs = values, reads, outputs
        self.parent: dict[Key, Key] = {}
        self.sets: dict[Key, tuple[int, ...]] = {}
        # what is cut over several axes along some dimension: only there is an order to choose
        self.declared: set[tuple[str, int, int]] = set()
        self.several: dict[bytes, list[tuple[int, tuple[int, ...]]]] = {}
        self.passages: dict[tuple[bytes, bytes], _Passage] = {}
        self.fixed: set[Key] = set()
        self.wishes: list[tuple[Key, frozenset[int], float]] = []
        self.taken_along: list[tuple[Key, Key, frozenset[int], float]] = []

    def orders(self, *, sums_along: bool) -> Orders:
        for value, row in self.values.items():
            self._declare("value", value, 0, row)
        for (op, position), row in self.reads.items():
            self._declare("read", op, position, row)
        for position, row in self.outputs.items():
            self._declare("output", position, 0, row)
        for op, row in self.factors.items():
            self._within(op, row)
        summed = self._summed() if sums_along else {}
        for (op, position), row in self.reads.items():
            value = self.graph.ops[op].operands[position]
            self._between(value, ("read", op, position), row, self.graph.ops[op].trips)
            self._scattered(value, summed, ("read", op, position), row, self.graph.ops[op].trips)
        aliased = {o: self.graph.inputs[i] for i, o in self.graph.aliases}
        for position, row in self.outputs.items():
            self._between(self.graph.outputs[position], ("output", position, 0), row, 1.0)
            self._scattered(self.graph.outputs[position], summed, ("output", position, 0), row, 1.0)
            if position in aliased:
                for d in range(len(self.graph.values[aliased[position]].shape)):
                    self._join(("output", position, 0, d), ("value", aliased[position], 0, d))
        return Orders(axes=self.axes, chosen=self._choose())

    def _declare(self, kind: str, index: int, position: int, row: np.ndarray) -> None:
        several = self._several(row)
        if not several:
            return
        self.declared.add((kind, index, position))
        for d, cut in several:
            key = (kind, index, position, d)
            self.parent[key], self.sets[key] = key, cut

    def _several(self, row: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
        """The dimensions (or factors) that several axes cut, each with these."""
        content = row.tobytes()
        if content not in self.several:
            places = row.tolist()
            dims = sorted({place for place in places if place >= 0 and places.count(place) > 1})
            self.several[content] = [(d, _cut(row, d)) for d in dims]
        return self.several[content]

    def _find(self, key: Key) -> Key:
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def _join(self, a: Key, b: Key) -> None:
        if a in self.parent and b in self.parent and self.sets[a] == self.sets[b]:
            self.parent[self._find(a)] = self._find(b)

    def _within(self, op: int, row: np.ndarray) -> None:
        """Dimensions that share a factor of one operation share its order."""
        rule, node = self.rules[op], self.graph.ops[op]
        first: dict[int, Key] = {}
        sides = [(("read", op, p), dims) for p, dims in enumerate(rule.operands)]
        sides += [(("value", v, 0), dims) for v, dims in zip(node.results, rule.results, strict=True)]
        several = {f for f, _ in self._several(row)}
        for side, dims in sides:
            if side not in self.declared:
                continue
            for d, names in enumerate(dims):
                key = (*side, d)
                if key not in self.parent:
                    continue
                if len(names) > 1:
                    self.fixed.add(
                        key
                    )  # a merged dimension: its factors already say the order, which is the mesh's
                for f in names:
                    if f in several:
                        self._join(first.setdefault(f, key), key)

    def _between(self, value: int, reader: tuple[str, int, int], row: np.ndarray, trips: float) -> None:
        """What stays on a dimension while other axes join or leave wants to be the major part of it."""
        made = self.values.get(value)
        if made is None or (("value", value, 0) not in self.declared and reader not in self.declared):
            return
        content = made.tobytes(), row.tobytes()
        if content not in self.passages:
            self.passages[content] = _passage(made, row)
        same, stay, along = self.passages[content]
        for d in same:
            self._join(("value", value, 0, d), (*reader, d))
        if not (stay or along):
            return
        weight = self.graph.values[value].bytes * trips
        for d, stays in stay:
            for key in (("value", value, 0, d), (*reader, d)):
                if key in self.parent:
                    self.wishes.append((key, stays, weight))
        for left, entered, moved in along:
            a, b = ("value", value, 0, left), (*reader, entered)
            if a in self.parent and b in self.parent:
                self.taken_along.append((a, b, moved, weight))

    def _summed(self) -> dict[int, list[Key]]:
        """Of every value that is a sum in parts over several axes, the dimensions that were summed over.

        What is done to such a sum before it is finished leaves its parts in their order.
        """
        found: dict[int, list[Key]] = {}
        for op, row in self.factors.items():
            rule, node = self.rules[op], self.graph.ops[op]
            several = {f for f, _ in self._several(row) if f in rule.reduction}
            keys = [
                ("read", op, p, d)
                for p, dims in enumerate(rule.operands if several else ())
                for d, names in enumerate(dims)
                if not several.isdisjoint(names)
            ]
            keys += [key for v in node.operands for key in found.get(v, ())]
            for value in node.results if keys else ():
                if value in self.values and (self.values[value] == UNREDUCED).sum() > 1:
                    found[value] = keys
        return found

    def _scattered(
        self,
        value: int,
        summed: Mapping[int, Sequence[Key]],
        reader: tuple[str, int, int],
        row: np.ndarray,
        trips: float,
    ) -> None:
        """The dimensions that `value` was summed over want the order of the one that its sums are scattered onto.

        Else whole sums are sent, not pieces: as many times what a wish spares as there are pieces.
        """
        if value not in summed:
            return
        pieces = [(*reader, d) for d in sorted({place for place in row.tolist() if place >= 0})]
        for key in summed[value]:
            for piece in pieces:
                if piece in self.parent and key in self.parent and self.sets[key] == self.sets[piece]:
                    count = math.prod(self.axes[axis][1] for axis in self.sets[key])
                    weight = self.graph.values[value].bytes * trips * count
                    self.taken_along.append((key, piece, frozenset(self.sets[key]), weight))

    def _choose(self) -> dict[Key, tuple[int, ...]]:
        wishes: dict[Key, list[tuple[frozenset[int], float]]] = {}
        for key, stays, weight in self.wishes:
            wishes.setdefault(self._find(key), []).append((stays, weight))
        along: dict[Key, list[tuple[Key, frozenset[int], float]]] = {}
        for a, b, moved, weight in self.taken_along:
            one, other = self._find(a), self._find(b)
            along.setdefault(one, []).append((other, moved, weight))
            along.setdefault(other, []).append((one, moved, weight))
        fixed = {self._find(key) for key in self.fixed}
        said = {
            self._find(key): order
            for key, order in self.said.items()
            if key in self.parent and set(order) == set(self.sets[key])
        }
        possible: dict[Key, list[tuple[int, ...]]] = {}
        for root in dict.fromkeys(self._find(key) for key in self.parent):
            every = list(itertools.permutations(self.sets[root]))  # mesh order first: it is taken of equals
            possible[root] = [said[root]] if root in said else every[:1] if root in fixed else every
        best: dict[Key, tuple[int, ...]] = {}

        def spoiled(root: Key, order: tuple[int, ...]) -> float:
            mixed = sum(w for stays, w in wishes.get(root, ()) if set(order[: len(stays)]) != stays)
            return mixed + sum(
                w for other, moved, w in along.get(root, ())
                if other in best and _only(order, moved) != _only(order if other == root else best[other], moved)
            )  # fmt: skip

        # those that can't choose first, then those that have most to lose; then each again beside all others
        at_stake = {root: sum(w for *_, w in (*wishes.get(root, ()), *along.get(root, ()))) for root in possible}
        turns = sorted(possible, key=lambda root: (len(possible[root]) > 1, -at_stake[root]))
        for _ in range(_ROUNDS):
            before = dict(best)
            for root in turns:
                best[root] = min(possible[root], key=lambda order: spoiled(root, order))
            if best == before:
                break
        chosen = {key: best[self._find(key)] for key in self.parent}
        # two constraints of one class may say two orders: each holds where it was said
        return chosen | {
            k: order for k, order in self.said.items() if set(order) == set(self.sets.get(k, ()))
        }
