"""In which order several mesh axes cut one dimension.

The search decides which axes cut a dimension; the order is decided here, after it.  It matters where an axis joins
or leaves: gathering the most minor axis is an all_gather, gathering a more major one moves every piece first.
Axes that go to another dimension do so while pieces are smallest: before others are gathered, after they are scattered.
Dimensions that an operation cuts together, or that pass from maker to reader unchanged, share one order (a class).
An all_to_all of several axes takes their order along to the other dimension, or every piece moves once more.  Classes
take the orders that spare most bytes the move, each by itself and with those whose order it takes along; mesh order
when it makes no difference.

On TPU and GPU a dimension that is summed over wants the order of the one that its sums are scattered onto: XLA
compiles a reduce_scatter only of parts in the order of the pieces, else an all_reduce of the whole sum and a slice (8
v5e and 8 H100, jax 0.10.2, libtpu 0.0.42.1).  What is added up to one number, a norm of many gradients, wants one
order: XLA sums over devices once where parts are summed over these in one order, else each by itself.  Axes that cut
several dimensions of a product that are summed over stand in the order of these, the first contracted one's the major
ones; on GPU in the mesh's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..disjoint import Disjoint
from ..ir import Graph, Op
from ..sharding import UNREDUCED, MeshAxes, Rule
from .axis_orders import Key, Orders
from .turns import Turn, Wants, cut_by, only, to_turn, wants

_ROUNDS = 4
"""Rounds over all classes: a choice can only wait for the choices of a few others, and each spoils less than before."""


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
    copies: Mapping[tuple[int, int], np.ndarray] | None = None,
    platform: str,
) -> Orders:
    """Choose the orders for a decision.

    Args:
      values, reads, outputs: decided rows; factors: for every operation the factor that each axis cuts;
        said: orders that the user's constraints give; copies: rows of the copies that operands are taken from;
        platform: "tpu", "gpu" or "cpu".
    """
    if sum(size > 1 for _, size in axes) < 2:
        return Orders(axes=axes, chosen={})
    resolver = _Resolver(graph, rules, axes, values, reads, outputs, factors, said, copies or {})
    return resolver.orders(platform)


_Dims = Mapping[int, int]
"""Of one tensor the numbers of the dimensions that several axes cut, by dimension."""

_NONE: _Dims = {}


class Summed(NamedTuple):
    """Of a sum in parts over several axes: the dimensions that it was summed over, each with several axes, and the
    orders of axes that are each on a dimension of their own."""

    keys: list[int]
    orders: list[tuple[int, ...]]


def _by_dimension(node: Op, rule: Rule, row: np.ndarray, over: Sequence[int], platform: str) -> tuple[int, ...]:
    """The order of the axes `over` which a product is summed, where they cut several dimensions; else ()."""
    if node.primitive != "dot_general" or len({int(row[axis]) for axis in over}) < 2:
        return ()
    if platform == "gpu":
        return tuple(over)
    (contracted, _), _ = node.params["dimension_numbers"]
    dims = [rule.operands[0][d] for d in contracted]
    return tuple(axis for factors in dims for f in factors for axis in over if row[axis] == f)


class _Resolver:
    def __init__(
        self, graph: Graph, rules: Sequence[Rule], axes: MeshAxes, values: Mapping[int, np.ndarray],
        reads: Mapping[tuple[int, int], np.ndarray], outputs: Mapping[int, np.ndarray],
        factors: Mapping[int, np.ndarray], said: Mapping[Key, tuple[int, ...]],
        copies: Mapping[tuple[int, int], np.ndarray],
    ) -> None:  # fmt: skip
        self.said, self.copies = said, copies
        self.graph, self.rules, self.axes, self.factors = graph, rules, axes, factors
        self.values, self.reads, self.outputs = values, reads, outputs
        # what is cut over several axes along some dimension, there alone is an order to choose: a number for each such
        # dimension, in sets of which each has one order
        self.keys: list[Key] = []
        self.joined = Disjoint()
        self.sets: list[tuple[int, ...]] = []
        self.of_value: dict[int, _Dims] = {}
        self.of_read: dict[tuple[int, int], _Dims] = {}
        self.of_output: dict[int, _Dims] = {}
        self.several: dict[bytes, list[tuple[int, tuple[int, ...]]]] = {}
        # by identity: most rows of a decision are the same few arrays, which it keeps
        self.several_of: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self.merged: dict[int, bool] = {}
        self.wanted: dict[tuple[bytes, bytes], Wants] = {}
        self.fixed: set[int] = set()
        # each with the turn that it spares, if it is one
        self.wishes: list[tuple[int, frozenset[int], float, Turn | None]] = []
        self.taken_along: list[tuple[int, int, frozenset[int], float, Turn | None]] = []

    def orders(self, platform: str) -> Orders:
        for value, row in self.values.items():
            if several := self._several(row):
                self.of_value[value] = self._declared("value", value, 0, several)
        for (op, position), row in self.reads.items():
            if several := self._several(row):
                self.of_read[op, position] = self._declared("read", op, position, several)
        for position, row in self.outputs.items():
            if several := self._several(row):
                self.of_output[position] = self._declared("output", position, 0, several)
        for op, row in self.factors.items():
            self._within(op, row)
        summed = self._summed(platform) if platform != "cpu" else {}
        for (op, position), row in self.reads.items():
            node = self.graph.ops[op]
            value, reader = node.operands[position], self.of_read.get((op, position), _NONE)
            if reader or value in self.of_value:
                self._way(value, ("read", op, position), reader, row, node.trips)
            if value in summed:
                self._scattered(value, summed[value], reader, row, node.trips)
        aliased = {o: self.graph.inputs[i] for i, o in self.graph.aliases}
        for position, row in self.outputs.items():
            value, reader = self.graph.outputs[position], self.of_output.get(position, _NONE)
            if reader or value in self.of_value:
                self._way(value, ("output", position, 0), reader, row, 1.0)
            if value in summed:
                self._scattered(value, summed[value], reader, row, 1.0)
            if position in aliased:
                before = self.of_value.get(aliased[position], _NONE)
                for d, number in reader.items():
                    self._join(number, before.get(d))
        chosen = self._choose()
        return Orders(axes=self.axes, chosen=chosen, turns=self._turns(chosen))

    def _declared(
        self, kind: str, index: int, position: int, several: Sequence[tuple[int, tuple[int, ...]]]
    ) -> _Dims:
        numbers = {}
        for d, cut in several:
            numbers[d] = self.joined.add()
            self.keys.append((kind, index, position, d))
            self.sets.append(cut)
        return numbers

    def _several(self, row: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
        """The dimensions (or factors) that several axes cut, each with these."""
        found = self.several_of.get(id(row))
        if found is None:
            content = row.tobytes()
            if content not in self.several:
                places = row.tolist()
                dims = sorted({place for place in places if place >= 0 and places.count(place) > 1})
                self.several[content] = [(d, cut_by(row, d)) for d in dims]
            found = self.several_of[id(row)] = self.several[content]
        return found

    def _join(self, a: int | None, b: int | None) -> None:
        if a is not None and b is not None and self.sets[a] == self.sets[b]:
            self.joined.join(a, b)

    def _within(self, op: int, row: np.ndarray) -> None:
        """Dimensions that share a factor of one operation share its order."""
        rule = self.rules[op]
        cut = self._several(row)
        if not cut and not self._merges(rule):
            return
        node = self.graph.ops[op]
        several = {f for f, _ in cut}
        first: dict[int, int] = {}
        sides = [(self.of_read.get((op, p)), dims) for p, dims in enumerate(rule.operands)]
        sides += [(self.of_value.get(v), dims) for v, dims in zip(node.results, rule.results, strict=True)]
        for side, dims in sides:
            for d, number in side.items() if side else ():
                if len(dims[d]) > 1 and len({int(row[axis]) for axis in self.sets[number]}) > 1:
                    # a merged dimension whose axes cut several factors: these say the order, which is the mesh's
                    self.fixed.add(number)
                for f in dims[d]:
                    if f in several:
                        self._join(first.setdefault(f, number), number)

    def _merges(self, rule: Rule) -> bool:
        """Whether some dimension of an operation is made of several factors."""
        if id(rule) not in self.merged:
            sides = (*rule.operands, *rule.results)
            self.merged[id(rule)] = any(len(names) > 1 for dims in sides for names in dims)
        return self.merged[id(rule)]

    def _way(
        self, value: int, use: tuple[str, int, int], reader: _Dims, row: np.ndarray, trips: float
    ) -> None:
        """From where a value is made to where it is taken, by way of a copy where there is one."""
        made, maker = self.values.get(value), self.of_value.get(value, _NONE)
        if made is None:
            return
        copy = self.copies.get(use[1:]) if use[0] == "read" else None
        if copy is None or np.array_equal(copy, made) or np.array_equal(copy, row):
            self._between(value, use, (maker, made), (reader, row), trips)
            return
        # the copy has its reader's order where it has its axes, else that in which it was made: see `on_the_way`
        numbers = {
            d: side[d]
            for side in (maker, reader)
            for d, cut in self._several(copy)
            if d in side and self.sets[side[d]] == cut
        }
        self._between(value, use, (maker, made), (numbers, copy), trips)
        self._between(value, use, (numbers, copy), (reader, row), trips)

    def _between(
        self, value: int, use: tuple[str, int, int], before: tuple[_Dims, np.ndarray],
        after: tuple[_Dims, np.ndarray], trips: float,
    ) -> None:  # fmt: skip
        """What stays on a dimension while other axes join or leave wants to be the major part of it."""
        (maker, made), (reader, row) = before, after
        content = made.tobytes(), row.tobytes()
        if content not in self.wanted:
            self.wanted[content] = wants(made, row)
        same, majors_made, majors_read, along = self.wanted[content]
        for d in same:
            self._join(maker.get(d), reader.get(d))
        if not (majors_made or majors_read or along):
            return
        weight = self.graph.values[value].bytes * trips
        for late, side, majors in ((False, maker, majors_made), (True, reader, majors_read)):
            self.wishes += [
                (side[d], axes, weight, Turn(value, use, *content, late, self.sets[side[d]]))
                for d, axes in majors
                if d in side
            ]
        for left, entered, moved in along:
            if left in maker and entered in reader:
                turn = Turn(value, use, *content, False, self.sets[maker[left]])
                self.taken_along.append((maker[left], reader[entered], moved, weight, turn))

    def _summed(self, platform: str) -> dict[int, Summed]:
        """What is known of every value that is a sum in parts over several axes.

        What is done to such a sum before it is finished leaves its parts in their order.
        """
        found: dict[int, Summed] = {}
        for op, row in self.factors.items():
            rule, node = self.rules[op], self.graph.ops[op]
            cut = self._several(row)
            over = [axis for axis, f in enumerate(row.tolist()) if f in rule.reduction] if rule.reduction else []
            if not cut and not found and len(over) < 2:
                continue
            several = {f for f, _ in cut if f in rule.reduction}
            keys = [
                number
                for p, dims in enumerate(rule.operands if several else ())
                for d, number in self.of_read.get((op, p), _NONE).items()
                if not several.isdisjoint(dims[d])
            ]
            order = _by_dimension(node, rule, row, over, platform)
            known = [found[v] for v in node.operands if v in found]
            keys += [key for one in known for key in one.keys]
            orders = [*([order] if order else []), *(o for one in known for o in one.orders)]
            for value in node.results if keys or orders else ():
                if value in self.values and (self.values[value] == UNREDUCED).sum() > 1:
                    found[value] = Summed(keys, orders)
        return found

    def _scattered(self, value: int, summed: Summed, reader: _Dims, row: np.ndarray, trips: float) -> None:
        """The dimensions that `value` was summed over want the order of the one that its sums are scattered onto.

        Else whole sums are sent, not pieces: as many times what a wish spares as there are pieces.
        """
        if not self.graph.values[value].shape and UNREDUCED not in row:  # a number, where it is finished
            weight = self.graph.values[value].bytes * trips
            for one, other in itertools.pairwise(dict.fromkeys(map(self.joined.find, summed.keys))):
                if self.sets[one] == self.sets[other]:
                    self.taken_along.append((one, other, frozenset(self.sets[one]), weight, None))
        for _, piece in sorted(reader.items()):
            count = math.prod(self.axes[axis][1] for axis in self.sets[piece])
            weight = self.graph.values[value].bytes * trips * count
            for key in summed.keys:
                if self.sets[key] == self.sets[piece]:
                    self.taken_along.append((key, piece, frozenset(self.sets[key]), weight, None))
            for order in summed.orders:
                if set(order) == set(self.sets[piece]):
                    self.wishes += [(piece, frozenset(order[:n]), weight, None) for n in range(1, len(order))]

    def _choose(self) -> dict[Key, tuple[int, ...]]:
        number_of = {key: number for number, key in enumerate(self.keys)}
        wishes: dict[int, list[tuple[frozenset[int], float]]] = {}
        for key, stays, weight, _ in self.wishes:
            wishes.setdefault(self.joined.find(key), []).append((stays, weight))
        along: dict[int, list[tuple[int, frozenset[int], float]]] = {}
        for a, b, moved, weight, _ in self.taken_along:
            one, other = self.joined.find(a), self.joined.find(b)
            along.setdefault(one, []).append((other, moved, weight))
            along.setdefault(other, []).append((one, moved, weight))
        fixed = {self.joined.find(key) for key in self.fixed}
        held = {
            number_of[key]: order
            for key, order in self.said.items()
            if key in number_of and set(order) == set(self.sets[number_of[key]])
        }
        said = {self.joined.find(number): order for number, order in held.items()}
        roots = [self.joined.find(number) for number in range(len(self.keys))]
        possible: dict[int, list[tuple[int, ...]]] = {}
        for root in dict.fromkeys(roots):
            every = list(itertools.permutations(self.sets[root]))  # mesh order first: it is taken of equals
            possible[root] = [said[root]] if root in said else every[:1] if root in fixed else every
        best: dict[int, tuple[int, ...]] = {}

        def spoiled(root: int, order: tuple[int, ...], group: Collection[int] = ()) -> float:
            """The bytes that go another way; of what two of a group share, half."""
            mixed = sum(w for stays, w in wishes.get(root, ()) if set(order[: len(stays)]) != stays)
            return mixed + sum(
                w / 2 if other in group else w
                for other, moved, w in along.get(root, ())
                if other in best
                and only(order, moved) != only(order if other == root else best[other], moved)
            )

        # those that can't choose first, then those that have most to lose; then each again beside all others
        at_stake = {
            root: sum(w for *_, w in (*wishes.get(root, ()), *along.get(root, ()))) for root in possible
        }
        turns = sorted(possible, key=lambda root: (len(possible[root]) > 1, -at_stake[root]))
        together = Disjoint(len(self.keys))
        for a, b, moved, *_ in self.taken_along:
            one, other = self.joined.find(a), self.joined.find(b)
            if set(self.sets[one]) == set(self.sets[other]) == moved:
                together.join(one, other)
        groups: dict[int, list[int]] = {}
        for root in possible:
            groups.setdefault(together.find(root), []).append(root)
        for _ in range(_ROUNDS):
            before = dict(best)
            for root in turns:
                best[root] = min(possible[root], key=lambda order: spoiled(root, order))
            # classes that take one another's order along: none turns by itself, though all of them would gain
            for group in groups.values():
                if len(group) > 1:
                    self._turn(group, possible, best, spoiled)
            if best == before:
                break
        chosen = {key: best[root] for key, root in zip(self.keys, roots, strict=True)}
        # two constraints of one class may say two orders: each holds where it was said
        return chosen | {self.keys[number]: order for number, order in held.items()}

    def _turns(self, chosen: Mapping[Key, tuple[int, ...]]) -> tuple[Turn, ...]:
        """What `chosen` makes turn; of one passage and side once."""
        orders = [chosen[key] for key in self.keys]
        found = [
            turn._replace(axes=to_turn(orders[n], first))
            for n, first, _, turn in self.wishes
            if turn is not None and set(orders[n][: len(first)]) != first
        ]
        found += [
            turn
            for a, b, moved, _, turn in self.taken_along
            if turn is not None and only(orders[a], moved) != only(orders[b], moved)
        ]
        return tuple(dict.fromkeys(found))

    def _turn(
        self, group: Collection[int], possible: Mapping[int, Sequence[tuple[int, ...]]],
        best: dict[int, tuple[int, ...]], spoiled: Callable[[int, tuple[int, ...], Collection[int]], float],
    ) -> None:  # fmt: skip
        """Give all of `group` that one of their orders which spoils least, where that is less than what they have."""
        group = dict.fromkeys(group)
        found = {root: best[root] for root in group}
        least = sum(spoiled(root, best[root], group) for root in group)
        for order in itertools.permutations(self.sets[next(iter(group))]):
            best.update((root, order) for root in group if order in possible[root])
            cost = sum(spoiled(root, best[root], group) for root in group)
            if cost < least:
                least, found = cost, {root: best[root] for root in group}
        best.update(found)
