"""Ask the partitioner what it will do with a plan, and compare that with what was decided.

No plan is returned unchecked: the planned step is lowered, Shardy's own passes propagate its shardings and insert
its collectives, and those are what the plan reports.  A layout that differs without communicating is the
partitioner's good right; one that costs a collective is pinned.  So is one that cuts what a rule keeps whole: Shardy
cuts slices, pads and windows where it likes and leaves it to XLA to exchange their edges, which is communication that
no pass shows, and which XLA gets wrong where pieces are uneven.  What a loop reads and doesn't change has one layout
inside of it, which propagation takes from any of its readers: it is pinned where others then have to bring it back.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .._jax import names_alone
from ..ir import Graph, Site, Traced
from ..plans import Constraint
from ..sharding import Asked, Beside, Collective, Layout, MeshAxes, Partitioned, Rule, layout_of_places
from .axis_orders import Orders
from .constrain import finished, pin_values, turned_sums
from .decided import Move, communicating, elsewhere_than_decided, move_of, undecided
from .in_loops import entered, written_out
from .jit import SCOPE, lower_flat
from .listing import listing_of
from .pending import held_values
from .repeats import Short, shortened
from .taken_as_it_lies import lying_alike

_SCOPED = re.compile(rf"\b{SCOPE}(\d+)\b")
_INSIDE = re.compile(rf"\b{SCOPE}_in(\d+)\b")

OTHERWISE = 2.0
"""Where the decision moves something, the partitioner may move so many times its bytes in another way."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A plan as the partitioner realises it.

    Attributes:
      constraints: all pins, those added here included.
      collectives: what the partitioner inserts, with the operation of each (-1: unknown).
      unplanned: those of the collectives that the decision has neither at that operation, of another kind but not much
        larger, nor of the same kind, axes and bytes anywhere (the partitioner may reshard one fused operation earlier
        or later).
      differing: values whose layout still differs from the decision, with the layout found.
      rounds: how often the partitioner was asked.
    """

    constraints: tuple[Constraint, ...]
    collectives: tuple[tuple[Collective, int], ...]
    unplanned: tuple[tuple[Collective, int], ...]
    differing: Mapping[int, Layout]
    rounds: int
    warnings: tuple[str, ...]


def check(
    traced: Traced,
    rules: Sequence[Rule],
    orders: Orders,
    axes: MeshAxes,
    mesh: object,
    inputs: Sequence[Layout],
    outputs: Sequence[Layout],
    values: Mapping[int, np.ndarray],
    constraints: tuple[Constraint, ...],
    *,
    reads: Mapping[tuple[int, int], np.ndarray],
    waited: Collection[int],
    platform: str,
    while_trips: float = 16.0,
    max_rounds: int = 6,
    shorten: bool = True,
    beside: Beside | None = None,
) -> Checked:
    """Lower, partition, compare; pin what propagation chose otherwise and look again.

    Args:
      mesh: an AbstractMesh with Auto axes.
      values, reads: the decided layout row of every value, and of every operand as it is read.
      waited: values that are finished before a loop, see `waited_values`.
      shorten: ask about some of many equal blocks, see `repeats`.
      beside: a process that runs the partitioner when it is ready.
    """
    graph = traced.graph
    producers, alike = graph.producers(), lying_alike(graph, values, reads)
    short = None
    if shorten:
        listing = listing_of(traced.jaxpr, traced.consts)
        short = shortened(listing, graph, rules, orders, values, reads, outputs, constraints)

    @functools.cache
    def decided() -> tuple[dict[int, float], dict[Move, list[tuple[int, int]]], frozenset[int]]:
        """What the decision moves, see `communicating`, and the sums that are not pinned."""
        held = held_values(graph, values, reads)
        moving = communicating(graph, rules, axes, values, reads, outputs, held)
        return *moving, turned_sums(graph, values, reads, held)

    def once(short: Short | None) -> Checked | None:
        found = constraints
        pinned: set[Site | None] = {c.site for c in constraints}
        asked = None
        for round_number in range(1, max_rounds + 1):
            if asked is None:
                with names_alone():
                    lowered = lower_flat(
                        traced, found, mesh, inputs, outputs, platform=platform, short=short, alike=alike
                    )
                asked = Asked(lowered.compiler_ir("stablehlo"), beside, platform=platform)
            asked.begin(while_trips)
            expected, moves, free = decided()  # meanwhile
            result = asked.partition(while_trips)
            differing = _differences(graph, axes, values, result)
            collectives = [(c, _asking(c.scope)) for c in result.collectives]
            if short is not None:
                extended = _extended(graph, short, collectives, differing)
                if extended is None:
                    return None
                collectives, differing = extended
            elsewhere = elsewhere_than_decided(collectives, moves)
            surplus = undecided(elsewhere, collectives, moves, expected)
            at_fault = _around(graph, {op for _, op in elsewhere}) | _upstream(graph, rules, surplus)
            at_fault |= _cut_though_whole(graph, rules, differing)
            at_fault -= free
            fresh = [v for v in differing if v in at_fault and graph.values[v].site not in pinned]
            unplanned = tuple(
                (c, op)
                for c, op in collectives
                if c.kind != "all_slice"
                and not c.written
                and c.bytes > OTHERWISE * expected.get(op, 0.0)
                and move_of(c) not in moves
            )
            asking = {op for op in (surplus | {op for _, op in unplanned}) if op >= 0}
            entries = [place for place in entered(graph, values, reads, asking) if place[1] not in pinned]
            if not (fresh or entries):
                around = written_out(graph, values, differing, asking, _upstream(graph, rules, asking))
                entries = [place for place in around if place[0] not in free and place[1] not in pinned]
            if not (fresh or entries) or round_number == max_rounds:
                break
            places = [*((v, graph.values[v].site) for v in fresh), *entries]
            found += pin_values(graph, values, places, orders)
            pinned |= {site for _, site in places}
            there = [(producers[v], v) for v in fresh if short is None or short.keeps(producers[v])]
            anew = entries or any(v in waited for v in fresh)  # what waits is pinned behind its barrier too
            if anew or not _with_pins(asked, graph, there, values, orders):
                asked = None
        return Checked(
            constraints=found,
            collectives=tuple(collectives),
            unplanned=unplanned,
            differing=differing,
            rounds=round_number,
            warnings=tuple(
                in_words(graph, w) for w in result.warnings if "trip count" not in w or not graph.assumptions
            ),
        )

    checked = once(short) or once(None)
    assert checked is not None  # only a shortened step can fail to speak for the whole
    return checked


def _with_pins(
    asked: Asked,
    graph: Graph,
    fresh: Sequence[tuple[int, int]],
    values: Mapping[int, np.ndarray],
    orders: Orders,
) -> bool:
    """Pin the results `fresh`, (operation, value) pairs; False where the module has to be made anew."""
    layouts: dict[int, Layout] = {}
    for _, value in fresh:
        shape, site = graph.values[value].shape, graph.values[value].site
        if site is None or site.kind != "result":
            return False
        layouts[value] = orders.layout("value", value, 0, finished(values[value]), len(shape))
    pins = {
        op: tuple((graph.values[v].shape, layouts.get(v)) for v in graph.ops[op].results) for op, _ in fresh
    }
    return asked.pin(pins, operation_of, _around_scope)


def _extended(
    graph: Graph,
    short: Short,
    collectives: Sequence[tuple[Collective, int]],
    differing: Mapping[int, Layout],
) -> tuple[list[tuple[Collective, int]], dict[int, Layout]] | None:
    """What was found in a shortened step, for the whole; None where its two standing blocks disagree."""
    producers = graph.producers()

    def of(value: int) -> tuple[int, int]:
        return producers[value], graph.ops[producers[value]].results.index(value)

    # an all_slice moves nothing; where it is done is the partitioner's whim
    moving = [(c, op) for c, op in collectives if c.kind != "all_slice"]
    found: list[tuple[int, Hashable]] = [(op, dataclasses.replace(c, scope="")) for c, op in moving]
    found += [(of(v)[0], (of(v)[1], layout)) for v, layout in differing.items()]
    if any(op < 0 for _, op in moving) or not short.agrees(found):
        return None

    def counterparts(value: int) -> list[int]:
        op, position = of(value)
        return [value, *(graph.ops[other].results[position] for other in short.counterparts(op))]

    whole = list(collectives)
    for collective, op in collectives:
        for other in short.counterparts(op):
            scope = _SCOPED.sub(f"{SCOPE}{other}", collective.scope)
            whole.append((dataclasses.replace(collective, scope=scope), other))
    everywhere = {other: layout for v, layout in differing.items() for other in counterparts(v)}
    return sorted(whole, key=lambda entry: entry[1]), dict(sorted(everywhere.items()))


def _asking(scope: str) -> int:
    """The operation that a collective is for, or the first one in the loop or remat body that it is for; -1: none."""
    found = _INSIDE.findall(scope)
    return int(found[-1]) if found and not _SCOPED.search(scope) else operation_of(scope)


def operation_of(scope: str) -> int:
    """The operation that a scope names, "jit(step)/transpose(jvp(jaxplan12))/dot_general" for one; -1 for none."""
    found = _SCOPED.findall(scope)
    return int(found[-1]) if found else -1


def in_words(graph: Graph, warning: str) -> str:
    """A warning of the partitioner's with the operation and its line in the place of the scope that it names, of a loop
    those of the first operation in it."""

    def words(scope: re.Match[str]) -> str:
        op, inside = operation_of(scope.group(1)), _asking(scope.group(1))
        if inside < 0:
            return scope.group(0)
        return f"{'around ' if op < 0 else ''}`{graph.ops[inside].primitive}` at {graph.ops[inside].source}"

    return re.sub(r"`([^`]*)`", words, warning)


def _around_scope(scope: str) -> str:
    """What stands in a scope before the operation that it names."""
    return scope[: [*_SCOPED.finditer(scope)][-1].start()]


def _differences(
    graph: Graph, axes: MeshAxes, values: Mapping[int, np.ndarray], result: Partitioned
) -> dict[int, Layout]:
    """Values whose last StableHLO operation of their own carries another sharding than was decided."""
    found: dict[int, tuple[tuple[str, ...], ...]] = {}
    by_op: dict[int, list[int]] = {op.index: [v for v in op.results if v in values] for op in graph.ops}
    for entry in result.ops:
        for value in by_op.get(operation_of(entry.scope), ()):
            for shape, dims in zip(entry.shapes, entry.layouts, strict=True):
                if shape and shape == graph.values[value].shape:
                    found[value] = dims
    differing = {}
    as_decided: dict[tuple[bytes, tuple[tuple[str, ...], ...]], bool] = {}  # few are different
    for value, dims in sorted(found.items()):
        key = values[value].tobytes(), dims
        if key not in as_decided:
            wanted = layout_of_places(finished(values[value]), len(dims), axes)
            as_decided[key] = list(map(set, wanted.dims)) == list(map(set, dims))
        if not as_decided[key]:
            differing[value] = Layout(dims=dims)
    return differing


def _cut_though_whole(graph: Graph, rules: Sequence[Rule], found: Mapping[int, Layout]) -> set[int]:
    """Values of which a dimension is cut that the rule of their maker, or of one of their readers, keeps whole."""
    cut: set[int] = set()
    producers, uses = graph.producers(), graph.uses()
    for value, layout in found.items():
        sides = [(rules[op], rules[op].operands[position]) for op, position in uses[value]]
        if producers[value] >= 0:
            maker = producers[value]
            sides.append((rules[maker], rules[maker].results[graph.ops[maker].results.index(value)]))
        if any(
            names and whole.issuperset(dim)
            for rule, factors in sides
            for whole in [rule.need_replication.union(merge.factor for merge in rule.merges)]
            for names, dim in zip(layout.dims, factors, strict=True)
        ):
            cut.add(value)
    return cut


def _upstream(graph: Graph, rules: Sequence[Rule], ops: Collection[int]) -> set[int]:
    """Values that `ops` read by way of what takes its operands as they come: whoever made one of them otherwise made
    them move."""
    producers = graph.producers()
    found: set[int] = set()
    todo = [v for op in ops if op >= 0 for v in graph.ops[op].operands]
    while todo:
        value = todo.pop()
        producer = producers[value]
        if value not in found and producer >= 0:
            found.add(value)
            rule = rules[producer]
            todo += graph.ops[producer].operands if rule.follows or not (rule.matmul or rule.reduction) else ()
    return found


def _around(graph: Graph, ops: set[int]) -> set[int]:
    """Values that operations `ops` read or make: pinned, they leave the partitioner no other choice."""
    return {
        value for op in ops if op >= 0 for value in (*graph.ops[op].operands, *graph.ops[op].results)
    }
