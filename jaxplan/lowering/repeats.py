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
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ir import Graph
from ..plans import Constraint
from ..sharding import Layout, Rule
from .axis_orders import Orders
from .listing import Listing, Places

_ENDS = 2
"""Blocks kept at either end: the outermost, which touches other work, and one inside that stands for the rest."""

_WORTH = 0.25
"""Share of the equations that has to go to be worth the trouble."""

_PERIODS = 64
"""Distances between equal equations that are tried as periods, the most frequent ones: those within a block are as
frequent as the block's own, of 291 equations 27th in an Evoformer's step."""


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


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Equations `start + block * period + position`; `numbers[block]` is the layer, -1 where unknown.

    Up to `stop`, the equations go on as they do in the blocks before, if not for a whole block.
    """

    start: int
    period: int
    stop: int
    numbers: tuple[int, ...]

    def equation(self, number: int, position: int) -> int:
        return self.start + self.numbers.index(number) * self.period + position


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
    runs = _numbered(listing, _runs(labels))
    core = _core(runs)
    if core is None:
        return None
    runs, numbers = core
    dropped = numbers[_ENDS:-_ENDS]
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
                result = listing.equations[made].results.index(value)
                if other is None or _type(listing, other, result) != _type(listing, made, result):
                    return None
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


def _type(listing: Listing, equation: int, result: int) -> tuple[Hashable, ...]:
    """The shape and element type of an equation's result."""
    aval = listing.equations[equation].eqn.outvars[result].aval
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None)


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


def _runs(labels: np.ndarray) -> list[_Run]:
    """Stretches with a period, the longest first, none over another; blocks still without numbers."""
    order = np.argsort(labels, kind="stable")
    same = labels[order[1:]] == labels[order[:-1]]
    distances = Counter(np.diff(order)[same].tolist())
    least = 2 * _ENDS + 1
    found = []
    for period, _ in sorted(distances.items(), key=lambda item: (-item[1], item[0]))[:_PERIODS]:
        equal = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        edges = np.flatnonzero(np.diff(equal.astype(np.int8))).reshape(-1, 2)
        for start, stop in edges.tolist():
            blocks = (stop - start) // period + 1
            if blocks >= least:
                found.append((blocks * period, period, start, stop + period))
    taken = np.zeros(len(labels), bool)
    runs = []
    for size, period, start, stop in sorted(found, key=lambda f: (-f[0], f[1], f[2])):
        if not taken[start : start + size].any():
            taken[start : start + size] = True
            over = np.flatnonzero(taken[start + size : stop])
            stop = start + size + int(over[0]) if over.size else stop
            taken[start:stop] = True
            runs.append(_Run(start=start, period=period, stop=stop, numbers=(-1,) * (size // period)))
    return runs


_Links = Mapping[tuple[int, int], Mapping[tuple[int, int, int, bool], Mapping[int, int]]]
"""For two runs, by (position in the first, in the second, operand, whether the first reads): block -> the other's."""


def _numbered(listing: Listing, runs: Sequence[_Run]) -> list[_Run]:
    """The runs that hang together, with the number of the layer that each block belongs to."""
    if not runs:
        return []
    # once to find where blocks begin, once with blocks that begin there
    runs, _ = _numbers(listing, runs)
    runs, of_block = _numbers(listing, runs)
    grouped = [_grouped(run, of_block[r]) for r, run in enumerate(runs) if r in of_block]
    return [run for run in grouped if run.numbers]


def _links(listing: Listing, runs: Sequence[_Run]) -> _Links:
    home = {
        run.start + i: (r, *divmod(i, run.period))
        for r, run in enumerate(runs)
        for i in range(len(run.numbers) * run.period)
    }
    maker = {v: e for e, equation in enumerate(listing.equations) for v in equation.results}
    links: dict[tuple[int, int], dict[tuple[int, int, int, bool], dict[int, int]]] = defaultdict(dict)
    for e, (r, block, position) in home.items():
        for k, value in enumerate(listing.equations[e].operands):
            source, other, made = home.get(maker.get(value, -1), (r, 0, 0))
            if source != r:
                links[r, source].setdefault((position, made, k, True), {})[block] = other
                links[source, r].setdefault((made, position, k, False), {})[other] = block
    return links


def _numbers(listing: Listing, runs: Sequence[_Run]) -> tuple[list[_Run], dict[int, list[int]]]:
    """The runs with their blocks begun where layers change; for those that hang together each block's number."""
    links = _links(listing, runs)
    of_block: dict[int, list[int]] = {0: list(range(len(runs[0].numbers)))}
    in_phase = list(runs)

    def told(pair: tuple[int, int]) -> int:
        """How many blocks of the first run the second says the number of."""
        found = of_block[pair[1]]
        return len({block for way in links[pair].values() for block, other in way.items() if found[other] >= 0})

    # a single link may join two runs by chance, through what lies at the end of one: those that say most come first
    while open_pairs := [pair for pair in links if pair[0] not in of_block and pair[1] in of_block]:
        r, known = max(open_pairs, key=told)
        run, numbers = runs[r], [-1] * len(runs[r].numbers)
        at: dict[int, int] = {}
        # the link that most blocks have comes first; others fill in what it leaves open
        for key, way in sorted(links[r, known].items(), key=lambda item: len(item[1]), reverse=True):
            for block, other in way.items():
                if numbers[block] < 0:
                    numbers[block] = of_block[known][other]
                at.setdefault(block * run.period + key[0], of_block[known][other])
        of_block[r], in_phase[r] = numbers, _in_phase(listing, run, at)
    return in_phase, of_block


def _in_phase(listing: Listing, run: _Run, numbers: Mapping[int, int]) -> _Run:
    """`run` begun where the layers change: where their numbers, known at some equations, don't go on evenly.

    Names are sorted as text, layer 10 after layer 1: a block that begins amid layer 1 would be part 1, part 10.  Of the
    equations between the last known of one layer and the first known of the next, a layer begins with the one before
    which the least is at hand for those that follow: with what is made for itself, not amid that.
    """
    steps: dict[int, set[int]] = defaultdict(set)
    before_it: dict[int, int] = {}
    for before, after in itertools.pairwise(sorted(numbers)):
        steps[after % run.period].add(numbers[after] - numbers[before])
        before_it[after % run.period] = min(after - before, before_it.get(after % run.period, run.period))
    uneven = [position for position, found in steps.items() if len(found) > 1]
    if run.period == 1 or len(uneven) != 1:
        return run
    crossed = _crossed(listing, run)
    last, reach = uneven[0], before_it[uneven[0]]
    begin = min(
        range(last, last - reach, -1), key=lambda position: (crossed[position % run.period], last - position)
    )
    start = run.start + begin % run.period
    return replace(run, start=start, numbers=(-1,) * ((run.stop - start) // run.period))


def _crossed(listing: Listing, run: _Run) -> list[int]:
    """By position in a block: how many values are made before it and read from it on, over the whole run."""
    size = len(run.numbers) * run.period
    made = {v: e for e in range(size) for v in listing.equations[run.start + e].results}
    read = {made[v]: e for e in range(size) for v in listing.equations[run.start + e].operands if v in made}
    change = np.zeros(size + 1, np.int64)
    for maker, reader in read.items():
        change[maker + 1] += 1
        change[reader + 1] -= 1
    return list(np.cumsum(change[:size]).reshape(-1, run.period).sum(axis=0))


def _grouped(run: _Run, numbers: Sequence[int]) -> _Run:
    """The part of a run in which each layer has as many blocks as the next, these together as one block.

    A sum over all parameters is a run of single additions, several of each layer.  A block of a layer that is nothing
    to the other runs, amid those that are, has a number below -1 of its own: it stays, and those after it count.
    """
    groups = [(number, len(list(blocks))) for number, blocks in itertools.groupby(numbers)]
    usual = Counter(count for number, count in groups if number >= 0).most_common(1)
    size = usual[0][0] if usual else 1
    best: tuple[int, int, tuple[int, ...]] = (0, 0, ())
    block, first, stretch = 0, 0, list[int]()
    for number, count in [*groups, (-1, 0)]:
        if number == -1 and count == size and stretch:
            stretch.append(-2 - block)
        elif number >= 0 and count == size and number not in stretch:
            if not stretch:
                first = block
            stretch.append(number)
        else:
            while stretch and stretch[-1] < 0:
                stretch.pop()
            if len(stretch) > best[0]:
                best = (len(stretch), first, tuple(stretch))
            stretch = []
        block += count
    start = run.start + best[1] * run.period
    return _Run(start=start, period=run.period * size, stop=run.stop, numbers=best[2])


def _core(runs: Sequence[_Run]) -> tuple[list[_Run], list[int]] | None:
    """The runs that share a stretch of layers long enough to leave some out, and that stretch; None without."""
    chosen: list[_Run] = []
    numbers: list[int] = []
    for run in runs:
        own = sorted(n for n in run.numbers if n >= 0)
        if own != list(range(own[0], own[0] + len(own))):
            continue
        both = sorted(set(own) & set(numbers)) if chosen else own
        if len(both) > 2 * _ENDS and 2 * len(both) > len(numbers):
            chosen.append(run)
            numbers = both
    return (chosen, numbers) if chosen else None


def _in_place_of(
    made: int, reader: int, where: Mapping[int, tuple[_Run, int, int]], dropped: Sequence[int]
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
