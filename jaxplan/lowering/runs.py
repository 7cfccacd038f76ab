"""Runs: stretches of equations with a period, and the number of the layer that each of their blocks belongs to."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .listing import Listing

ENDS = 2
"""Blocks kept at either end: the outermost, which touches other work, and one inside that stands for the rest."""

_PERIODS = 64
"""Distances between equal equations that are tried as periods, the most frequent ones: those within a block are as
frequent as the block's own, of 291 equations 27th in an Evoformer's step."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Equations `start + block * period + position`; `numbers[block]` is the layer, -1 where unknown.

    Up to `stop`, the equations go on as they do in the blocks before, if not for a whole block.
    """

    start: int
    period: int
    stop: int
    numbers: tuple[int, ...]

    def equation(self, number: int, position: int) -> int:
        return self.start + self.numbers.index(number) * self.period + position


def runs_of(labels: np.ndarray) -> list[Run]:
    """Stretches with a period, the longest first, none over another; blocks still without numbers."""
    order = np.argsort(labels, kind="stable")
    same = labels[order[1:]] == labels[order[:-1]]
    distances = Counter(np.diff(order)[same].tolist())
    least = 2 * ENDS + 1
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
            runs.append(Run(start=start, period=period, stop=stop, numbers=(-1,) * (size // period)))
    return runs


_Links = Mapping[tuple[int, int], Mapping[tuple[int, int, int, bool], Mapping[int, int]]]
"""For two runs, by (position in the first, in the second, operand, whether the first reads): block -> the other's."""


def numbered(listing: Listing, runs: Sequence[Run]) -> list[Run]:
    """The runs that hang together, with the number of the layer that each block belongs to."""
    if not runs:
        return []
    # once to find where blocks begin, once with blocks that begin there
    runs, _ = _numbers(listing, runs)
    _, of_block = _numbers(listing, runs)
    grouped = [_grouped(run, of_block[r]) for r, run in enumerate(runs) if r in of_block]
    return [run for run in grouped if run.numbers]


def _links(listing: Listing, runs: Sequence[Run]) -> _Links:
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


def _numbers(listing: Listing, runs: Sequence[Run]) -> tuple[list[Run], dict[int, list[int]]]:
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


def _in_phase(listing: Listing, run: Run, numbers: Mapping[int, int]) -> Run:
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


def _crossed(listing: Listing, run: Run) -> list[int]:
    """By position in a block: how many values are made before it and read from it on, over the whole run."""
    size = len(run.numbers) * run.period
    made = {v: e for e in range(size) for v in listing.equations[run.start + e].results}
    read = {made[v]: e for e in range(size) for v in listing.equations[run.start + e].operands if v in made}
    change = np.zeros(size + 1, np.int64)
    for maker, reader in read.items():
        change[maker + 1] += 1
        change[reader + 1] -= 1
    return list(np.cumsum(change[:size]).reshape(-1, run.period).sum(axis=0))


def _grouped(run: Run, numbers: Sequence[int]) -> Run:
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
    return Run(start=start, period=run.period * size, stop=run.stop, numbers=best[2])


def core_of(runs: Sequence[Run]) -> tuple[list[Run], list[int]] | None:
    """The runs that share a stretch of layers long enough to leave some out, and that stretch; None without."""
    chosen: list[Run] = []
    numbers: list[int] = []
    for run in runs:
        own = sorted(n for n in run.numbers if n >= 0)
        if own != list(range(own[0], own[0] + len(own))):
            continue
        both = sorted(set(own) & set(numbers)) if chosen else own
        if len(both) > 2 * ENDS and 2 * len(both) > len(numbers):
            chosen.append(run)
            numbers = both
    return (chosen, numbers) if chosen else None
