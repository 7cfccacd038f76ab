"""Repeated blocks of a step, so that the partitioner is asked about some of them and not about a hundred.

An unrolled network repeats its layers: in the forward pass, backwards in the backward pass, and once more in every
stage of the optimizer.  Each is a *run*: a stretch of equations with a period.  Equations are equal here when they are
the same operation at the same decided layouts and pins.  What the blocks of a run read of the blocks of another says
which belong together: the parts of one layer have one number.  From the middle all layers but the first two and the
last two are left out; what read a layer that is left out reads the one that stands in its place now, of equal shape and
layout.  The step computes nothing sensible then, and is partitioned just so: around the second layer, and around the
last but one, everything is as it is around those in between.  That is not taken on trust: what the partitioner says
of the two has to be the same (`Short.agrees`), else the whole step is asked about.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import Graph
from ..plans import Constraint
from ..sharding import Layout, Rule
from .axis_orders import Orders
from .listing import Listing, Places
from .runs import ENDS, Run, core_of, numbered, runs_of

_WORTH = 0.25
"""Share of the equations that has to go to be worth the trouble."""


@dataclass(frozen=True, kw_only=True)
class Short:
    """A step with blocks left out.

    Attributes:
      kept: indices of equations; instead: values read in place of those that are not made, by (equation, operand).
      inputs, outputs: positions of the arguments and results that are left.
      twins: for each block that is left out, the equations of the second block to its own.
      mirror: the equations of the second block to those of the last but one.
    """

    listing: Listing
    places: Places
    kept: tuple[int, ...]
    instead: Mapping[tuple[int, int], int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    twins: tuple[Mapping[int, int], ...]
    mirror: Mapping[int, int]

    def agrees(self, found: Sequence[tuple[int, Hashable]]) -> bool:
        """Whether the two blocks that stand for others are alike in what was `found`: (operation, what) pairs."""
        second, last = set(self.mirror), set(self.mirror.values())
        here = Counter(
            (self.places.moved(op, self.mirror), what)
            for op, what in found
            if op >= 0 and self.places.of_op[op] in second
        )
        there = Counter((op, what) for op, what in found if op >= 0 and self.places.of_op[op] in last)
        return here == there

    def keeps(self, op: int) -> bool:
        """Whether the equation of an operation is left."""
        return self.places.of_op[op] in self._left

    @functools.cached_property
    def _left(self) -> frozenset[int]:
        return frozenset(self.kept)

    def counterparts(self, op: int) -> list[int]:
        """The operations that `op` stands for."""
        if op < 0 or self.places.of_op[op] not in self.mirror:
            return []
        return [self.places.moved(op, twin) for twin in self.twins]


def shortened(
    listing: Listing,
    graph: Graph,
    rules: Sequence[Rule],
    orders: Orders,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    outputs: Sequence[Layout],
    constraints: Sequence[Constraint],
) -> Short | None:
    """The step without the middle of its repeated blocks; None when too little repeats."""
    places = Places(listing, graph)
    labels = _labels(listing, places, graph, rules, orders, values, reads, outputs, constraints)
    runs = numbered(listing, runs_of(labels))
    core = core_of(runs)
    if core is None:
        return None
    runs, numbers = core
    dropped = numbers[ENDS:-ENDS]
    where = {
        run.start + block * run.period + position: (run, number, position)
        for run in runs
        for block, number in enumerate(run.numbers)
        for position in range(run.period)
    }
    gone = {e for e, (_, number, _) in where.items() if number in dropped}
    if len(gone) < _WORTH * len(listing.equations):
        return None
    maker = {v: e for e, equation in enumerate(listing.equations) for v in equation.results}
    kept = tuple(e for e in range(len(listing.equations)) if e not in gone)
    instead: dict[tuple[int, int], int] = {}
    for e in kept:
        for k, value in enumerate(listing.equations[e].operands):
            made = maker.get(value, -1)
            if made in gone:
                other = _in_place_of(made, e, where, dropped)
                if other is None:
                    return None
                result = listing.equations[made].results.index(value)
                instead[e, k] = listing.equations[other].results[result]
    read = {v for e in kept for v in listing.equations[e].operands} | set(instead.values())
    left = tuple(p for p, v in enumerate(listing.results) if maker.get(v, -1) not in gone)
    read |= {listing.results[p] for p in left}
    second = [(e, *at) for e, at in where.items() if at[1] == dropped[0] - 1]

    def to(number: int) -> dict[int, int]:
        return {e: run.equation(number, position) for e, run, _, position in second}

    return Short(
        listing=listing,
        places=places,
        kept=kept,
        instead=instead,
        inputs=tuple(p for p, v in enumerate(listing.arguments) if v in read),
        outputs=left,
        twins=tuple(to(number) for number in dropped),
        mirror=to(dropped[-1] + 1),
    )


def _labels(
    listing: Listing, places: Places, graph: Graph, rules: Sequence[Rule], orders: Orders,
    values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray], outputs: Sequence[Layout],
    constraints: Sequence[Constraint],
) -> np.ndarray:  # fmt: skip
    """A number for every equation, equal for those that do the same at the same layouts."""
    said: dict[tuple[str, int, int], list[Hashable]] = defaultdict(list)
    for (kind, index, position, dim), order in orders.chosen.items():
        said[kind, index, position].append((dim, order))
    signs: list[list[Hashable]] = [
        [e.eqn.primitive.name, *((v.aval.shape, v.aval.dtype) for v in e.eqn.outvars if hasattr(v.aval, "shape"))]
        for e in listing.equations
    ]
    numbers: dict[bytes, int] = {}
    of_row: dict[int, int] = {}

    def row(found: np.ndarray | None) -> int:
        # by identity first: a decision's rows are few arrays, which it keeps
        if id(found) not in of_row:
            of_row[id(found)] = -1 if found is None else numbers.setdefault(found.tobytes(), len(numbers))
        return of_row[id(found)]

    def made(value: int) -> Hashable:
        lies = row(values.get(value))
        orders_of_value = said.get(("value", value, 0)) if said else None
        return (lies, *orders_of_value) if orders_of_value else lies

    lying = [made(value) for value in range(len(graph.values))]
    for op, rule, equation in zip(graph.ops, rules, places.of_op, strict=True):
        index, sign = op.index, [id(rule), op.trips, *[lying[value] for value in op.results]]
        if op.primitive == "sharding_constraint":
            sign.append(str(op.params["sharding"]))
        for position, value in enumerate(op.operands):
            sign += (lying[value], row(reads.get((index, position))))
            if said and (orders_of_read := said.get(("read", index, position))):
                sign += orders_of_read
        signs[equation].append(tuple(sign))
    ends = [c for c in constraints if c.site.kind == "leave" and not c.site.frame]
    for constraint in (c for c in constraints if c not in ends):
        site = constraint.site
        equation = places.of_site(site)
        depth = len(listing.equations[equation].frame)
        inside = (site.frame[depth + 1 :], site.kind, site.equation if len(site.frame) > depth else -1)
        signs[equation].append((*inside, site.position, constraint.layout))
    maker = {v: e for e, equation in enumerate(listing.equations) for v in equation.results}
    left = [(listing.results[c.site.position], ("leave", c.layout)) for c in ends]
    for value, layout in (*zip(listing.results, outputs, strict=True), *left):
        if value in maker:
            signs[maker[value]].append(layout)
    known: dict[tuple[Hashable, ...], int] = {}
    return np.array([known.setdefault(tuple(sign), len(known)) for sign in signs], np.int64)


def _in_place_of(
    made: int, reader: int, where: Mapping[int, tuple[Run, int, int]], dropped: Sequence[int]
) -> int | None:
    """The equation that stands for `made`, which is left out, to a reader that is not; None when there is none."""
    run, number, position = where[made]
    if reader in where and where[reader][0] is not run:
        # another run, with layers in an order of its own: as many layers off as before, those left out not counted
        shift = len(dropped)
        wanted = number - shift if where[reader][1] > number else number + shift
        if wanted in run.numbers and wanted not in dropped and run.equation(wanted, position) < reader:
            return run.equation(wanted, position)
    # what stands before it in its own run now, so that a sum that runs through all blocks stays whole
    block = run.numbers.index(number)
    for other in (*range(block - 1, -1, -1), *range(block + 1, len(run.numbers))):
        found = run.start + other * run.period + position
        if run.numbers[other] not in dropped and found < reader:
            return found
    return None
