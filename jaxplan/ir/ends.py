"""Values that nothing orders: no collective of one waits for one of another, and compilers start them together.

The loose ends of the body of a loop, or of the step around all loops: values that no product leads to, weights on their
way to the products that read them, and values that lead to none, gradients on their way out.  And twins: sums alike of
which neither waits for the other, as a norm's two means, or the products of a gate and of what goes through it; and
what is made of such sums and spread over a larger tensor, as a norm's mean and its scale, which are gathered together
where the sums are scattered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .accumulate import SUMS, accumulating_ops
from .graph import VIEWS, Graph, Op

_TOTALS = frozenset(
    {"dot_general", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
"""What may make one number of a tensor."""

_Body = tuple[tuple[int, int], ...]
"""(start, stop) of the loops around an operation, outer first."""

TotalGroup = tuple[_Body, int]
"""The body that a number is summed in, and how many sums to one number it waits for there."""


class Starts(NamedTuple):
    """For every value, how much of the start of what sends it is its own: of sums and exchanges, and of gathers.

    `sending`, `gathering`: see `group`.
    """

    sent: tuple[float, ...]
    gathered: tuple[float, ...]
    sending: tuple[Hashable, ...] = ()
    gathering: tuple[Hashable, ...] = ()

    def of(self, kind: str) -> tuple[float, ...]:
        """Those of a kind of collective."""
        return self.gathered if kind == "all_gather" else self.sent

    def group(self, kind: str, value: int) -> Hashable:
        """With which others the collective of a kind that sends a value starts, equal for all; None: with none."""
        return self.gathering[value] if kind == "all_gather" else self.sending[value]


def start_shares(graph: Graph, products: Sequence[bool], sums: Sequence[bool]) -> Starts:
    """For every value: 1 over how many start together: the loose ends that its body has on this side, twins, or itself.

    What the iterations of a loop make last, and sum, they gather last of all, by itself.

    Args:
      products, sums: for every operation whether it is a matrix product, and whether it sums anything, as products do.
    """
    bodies: list[_Body] = [tuple(loops) for loops in graph.loops_around()]
    producers = graph.producers()
    early, late = _early(graph, products, bodies, producers), _late(graph, products, bodies, producers)
    read = {
        (v, bodies[op.index]) for op in graph.ops if products[op.index] for v in op.operands if early[v]
    }
    fetched = Counter(body for _, body in read)
    finished = Counter(
        bodies[op.index]
        for op in graph.ops
        if sums[op.index] and all(late[v] for v in op.results) and not all(late[v] for v in op.operands)
    )
    accumulated = [graph.ops[op] for op in accumulating_ops(graph) if graph.ops[op].primitive == "carry_init"]
    finished.update(bodies[op.index] for op in accumulated if late[op.results[0]])
    adding = [sums[op.index] and not all(late[v] for v in op.results) for op in graph.ops]
    depth = _depths(graph, adding, bodies, producers)
    twins, spread = _twins(graph, products, adding, bodies, depth), _spread(graph, depth, bodies, producers)
    shares, gathered, sending, gathering = list[float](), list[float](), list[Hashable](), list[Hashable]()
    for value, maker in enumerate(producers):
        body = bodies[maker] if maker >= 0 else ()
        group, alike = twins[maker] if maker in twins else spread.get(value, (None, 1))
        count = finished[body] if late[value] else fetched[body] if early[value] else alike
        sending.append(("late", body) if late[value] else ("early", body) if early[value] else group)
        shares.append(1.0 / max(count, 1))
        by_itself = late[value] and body
        gathered.append(1.0 if by_itself else shares[-1])
        gathering.append(None if by_itself else sending[-1])
    return Starts(tuple(shares), tuple(gathered), tuple(sending), tuple(gathering))


def total_shares(graph: Graph) -> dict[int, float]:
    """Of every number that is added up, from several or from a tensor, and of these: its share of a start.

    The sums over devices of a total's parts, such as the squares that make a norm, start together: if each is summed
    before they are added, they come to one start, and so does the total if it is summed last.  What is added up from
    some of the parts has the share of one: what a layer's parts cost may not depend on how many layers stand before
    it, or equal layers were none.  Totals of which neither waits for the other start together too, as the norms of all
    weights in LAMB, or whether each gradient is finite: compilers make one collective of them.
    """
    found, groups = _totals(graph)
    together = Counter(groups.values())
    return {
        value: share / together[groups[total]] if total in groups else share for value, (share, total) in found.items()
    }


def total_groups(graph: Graph) -> dict[int, TotalGroup]:
    """Of every number that is summed, or added up from such, the group of those that may be summed in one collective.

    Numbers of two loops' bodies, or one of which waits for the other, are of different groups.
    """
    found, groups = _totals(graph)
    return {value: groups[total] for value, (_, total) in found.items() if total in groups}


def _totals(graph: Graph) -> tuple[dict[int, tuple[float, int]], dict[int, TotalGroup]]:
    """Of every number that is added up its share of its total's start, and the total; and the sums' totals' groups."""
    producers, uses = graph.producers(), graph.uses()
    bodies = graph.loops_around()
    adds = {op.results[0] for op in graph.ops if op.primitive in SUMS and not graph.values[op.results[0]].shape}
    depth, numbers = _waited_for(graph, producers, bodies)

    def added(value: int) -> list[int]:
        """What a number is added up from: not of a loop's other iterations, nor what others read too."""
        op = graph.ops[producers[value]]
        return [
            v for v in op.operands
            if producers[v] >= 0 and bodies[producers[v]] == bodies[op.index] and len(uses[v]) == 1
        ]  # fmt: skip

    parts: dict[int, int] = {}
    for op in graph.ops:  # in program order: what is added up comes first
        for value in adds.intersection(op.results):
            parts[value] = sum(parts.get(v, 1) for v in added(value))
    share: dict[int, float] = {}
    total: dict[int, int] = {}
    for value in sorted(adds | numbers, key=lambda value: -producers[value]):
        mine = share.setdefault(value, 1.0 / max(parts.get(value, 1), 1))
        total.setdefault(value, value)
        for v in added(value) if value in adds else ():
            share[v], total[v] = mine, total[value]
    share |= dict.fromkeys(total.values(), 1.0)
    level: dict[int, int] = {}
    for value in numbers:
        level[total[value]] = max(level.get(total[value], 0), depth[value])
    groups = {one: (tuple(bodies[producers[one]]), waits) for one, waits in level.items()}
    return {value: (share[value], total[value]) for value in share}, groups


def _waited_for(graph: Graph, producers: Sequence[int], bodies: Sequence[_Body]) -> tuple[list[int], set[int]]:
    """How many sums to one number a value waits for, one after the other, in its body; and these numbers."""
    depth, numbers = [0] * len(graph.values), set[int]()
    for op in graph.ops:
        before = [depth[v] for v in op.operands if producers[v] >= 0 and bodies[producers[v]] == bodies[op.index]]
        number = op.primitive in _TOTALS and any(graph.values[v].shape for v in op.operands)
        for value in op.results:
            counts = number and not graph.values[value].shape
            depth[value] = max(before, default=0) + counts
            numbers.update((value,) * counts)
    return depth, numbers


def _depths(
    graph: Graph, sums: Sequence[bool], bodies: Sequence[_Body], producers: Sequence[int]
) -> Sequence[int]:
    """For every value how many sums of its body it waits for, one after the other, itself counted."""
    depth = [0] * len(graph.values)
    for op in graph.ops:
        before = [depth[v] for v in op.operands if producers[v] >= 0 and bodies[producers[v]] == bodies[op.index]]
        for value in op.results:
            depth[value] = max(before, default=0) + sums[op.index]
    return depth


def _twins(
    graph: Graph, products: Sequence[bool], sums: Sequence[bool], bodies: Sequence[_Body], depth: Sequence[int]
) -> dict[int, tuple[Hashable, int]]:
    """Which sums are alike, and how many, for each: of a body, of one shape, after equally many one after the other.

    One that waits for another comes after one more.
    """
    like: dict[int, tuple[object, ...]] = {}
    for op in graph.ops:
        if sums[op.index]:
            shapes = tuple(graph.values[v].shape for v in op.results)
            like[op.index] = bodies[op.index], depth[op.results[0]], products[op.index], shapes
    counts = Counter(like.values())
    return {op: (key, counts[key]) for op, key in like.items()}


def spreads(graph: Graph, op: Op, value: int) -> bool:
    """Whether an operation repeats an operand all over something larger."""
    if len(op.results) != 1:
        return False
    return 1 < math.prod(graph.values[value].shape) < math.prod(graph.values[op.results[0]].shape)


def _spread(
    graph: Graph, depth: Sequence[int], bodies: Sequence[_Body], producers: Sequence[int]
) -> dict[int, tuple[Hashable, int]]:
    """Which values behind sums are broadcast to something larger, of a body, of one size and as deep, and how many."""
    chains: dict[int, tuple[object, ...]] = {}
    first: dict[int, int] = {}
    for op in graph.ops:
        for value in op.operands:
            if not spreads(graph, op, value):
                continue
            shape, made, chain = graph.values[value].shape, graph.values[op.results[0]].shape, list[int]()
            same_rank = len(shape) == len(made) and all(a in (1, b) for a, b in zip(shape, made, strict=True))
            if not (same_rank or op.primitive == "broadcast_in_dim"):
                continue
            size = math.prod(shape)
            while depth[value] and bodies[producers[value]] == bodies[op.index]:
                chain.append(value)
                maker = graph.ops[producers[value]]
                viewed = maker.primitive in VIEWS or maker.primitive == "broadcast_in_dim"
                if not viewed or math.prod(graph.values[maker.operands[0]].shape) != size:
                    break
                value = maker.operands[0]
            if chain:
                first |= dict.fromkeys(chain, chain[-1])
                chains[chain[-1]] = bodies[op.index], depth[chain[-1]], size
    alike = Counter(chains.values())
    return {value: (chains[maker], alike[chains[maker]]) for value, maker in first.items()}


def _early(graph: Graph, products: Sequence[bool], bodies: Sequence[_Body], producers: Sequence[int]) -> list[bool]:
    """Whether no product of its body leads to a value."""
    early = [True] * len(graph.values)
    for op in graph.ops:
        here = len(bodies[op.index])
        for value in op.results:
            early[value] = not products[op.index] and op.primitive != "carry_init"
            for operand in op.operands:
                maker = producers[operand]
                if maker >= 0 and len(bodies[maker]) > here:
                    early[value] = False  # made by a loop that has ended
                elif maker < 0 or bodies[maker] == bodies[op.index]:
                    early[value] &= early[operand]
    return early


def _late(graph: Graph, products: Sequence[bool], bodies: Sequence[_Body], producers: Sequence[int]) -> list[bool]:
    """Whether a value leads to no product of its body; a carry: of the body around its loop.

    What an iteration hands to the next leads where that carry leads within the loop: a sum that is added up, nowhere.
    """
    carries = {op.operands[1]: True for op in graph.ops if op.primitive == "carry_next"}  # to none within its loop
    while True:
        late, within = [True] * len(graph.values), dict.fromkeys(carries, True)
        for op in reversed(graph.ops):
            here = len(bodies[op.index])
            if op.primitive == "carry_next":
                late[op.operands[0]] &= carries[op.operands[1]]
                continue
            onward = not products[op.index] and all(late[v] for v in op.results)
            for operand in op.operands:
                maker = producers[operand]
                depth = len(bodies[maker]) if maker >= 0 else 0
                if depth == here:
                    late[operand] &= onward
                elif depth < here and operand in within:
                    within[operand] &= onward and depth + 1 == here
                elif depth < here:
                    late[operand] = False  # read by a loop further in
        if within == carries:
            return late
        carries = {carry: carries[carry] and within[carry] for carry in carries}
