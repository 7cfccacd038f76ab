"""Searching on where the decided layouts want the axes of one dimension in two orders at once.

The search decides which axes cut a dimension, `lowering.resolve_orders` in which order, afterwards.  Where no order
suits all who read it, pieces change places on the way (Shardy inserts a collective_permute, jax 0.10.2), at a price
that the search did not know: it is told, of just the layouts that it chose, and searches on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..lowering import Orders, resolve_orders
from ..search import Charge, Crossed, Decision, Evaluator, Space, Termination, charged, decide
from ..sharding import pieces
from .found import Found
from .in_orders import in_orders

if TYPE_CHECKING:
    from .candidates import Pipeline

SHARE = 0.005
"""Of a step: turns that take less are not worth another search."""

ORDERS_GAP = 0.005
"""A gap from which on the search is asked with every order of the axes: where it chose layouts without, no bound knows
what turns."""

FEW_NODES, MUCH_GAP = 3000, 0.01
"""Problems of so many nodes are searched so at once, larger ones where such a gap is left by searches that know what
just the plans before turned: one of 11,000 nodes finds less so in 20 s than by two of those in 12."""

ORDERS_S = 10.0
"""Seconds after which that search is ended with what it has found."""

SAME = 1e-9
"""Prices of one plan that differ by such a share are equal, added up in two ways."""

ROUNDS = 8
"""Searches at most, each of which knows what all before it found out."""


def orders_of(pipeline: Pipeline, decision: Decision) -> Orders:
    """In which orders axes cut dimensions together."""
    return resolve_orders(
        pipeline.traced.graph, pipeline.rules, pipeline.target.axes, decision.values, decision.reads, decision.outputs,
        decision.factors, pipeline.said_orders, copies=decision.copies, platform=pipeline.target.profile.kind,
    )  # fmt: skip


def ordered(pipeline: Pipeline, found: Found) -> Found:
    """`found`, or what a search on from there finds, with orders: whichever takes least, turns included.

    These are in its objective and in its problem.  The bound is that of the first search, which holds in any order, or
    of the search that knows all of them.
    """
    space, (best, turns) = found.space, _turned(pipeline, found)
    limit_s, started = pipeline.options.time_limit_s, time.monotonic() - found.result.wall_s

    def left() -> Pipeline | None:
        """The same with what is left of the time."""
        left_s = None if limit_s is None else limit_s + started - time.monotonic()
        ended = left_s is not None and left_s <= 0
        return None if ended else pipeline.under(replace(pipeline.options, time_limit_s=left_s))

    def in_all_orders(best: Found) -> Found:
        again = left()
        return _in_all_orders(again.ending(ORDERS_GAP / 2, ORDERS_S), space, best) if again else best

    first = len(space.problem.nodes) <= FEW_NODES and sum(turns.values()) > SHARE * best.result.objective_s
    best = in_all_orders(best) if first else best
    known: dict[Charge, float] = {}
    for _ in range(ROUNDS if best.result.gap > ORDERS_GAP else 0):
        small = sum(turns.values()) <= SHARE * best.result.objective_s
        if small or all(known.get(charge) == seconds for charge, seconds in turns.items()) or not (again := left()):
            break
        known |= turns
        pipeline.say("searching on with what just these layouts turn")
        # Its bound is not used, and what it may miss so is not worth another search.
        again = again if len(space.problem.nodes) <= FEW_NODES else again.ending(SHARE / 2)
        other = again.within(charged(space, known), found.result.assignment)
        if not isinstance(other, Found):
            break
        objective_s = Evaluator(space.problem)(other.result.assignment).objective_s
        result = replace(other.result, objective_s=objective_s, bound_s=best.result.bound_s)
        found = replace(other, space=space, result=result.bounded(result.bound_s, pipeline.options.relative_gap))
        turned, turns = _turned(pipeline, found)
        best = turned if turned.result.objective_s < best.result.objective_s else best
        # what searches know only adds up: no later one finds more than this one saw
        if best.result.objective_s - other.result.objective_s <= SHARE * best.result.objective_s:
            break
    best = in_all_orders(best) if known and not first and best.result.gap > MUCH_GAP else best
    proved = best.result.gap <= pipeline.options.relative_gap
    termination = Termination.OPTIMAL if proved else best.result.termination
    result = replace(best.result, termination=termination).bounded(math.inf, pipeline.options.relative_gap)
    return replace(best, result=result)


def _in_all_orders(pipeline: Pipeline, space: Space, best: Found) -> Found:
    """`best`, or what a search finds that knows the orders of axes, and its bound."""
    if pipeline.options.search != "ilp" or not space.complete:
        return best
    every = in_orders(space, pipeline.model, pipeline.target.axes)
    if every is None:
        return best
    pipeline.say("no order of axes suits all readers: searching with every order")
    hint = every.of(best.result.assignment, pipeline.options.seed)
    result = pipeline.solve(replace(space, problem=every.problem), pipeline.rows_bytes, hint)
    if not result.found:
        return best
    assignment, bound_s = every.without(result.assignment), result.bound_s
    decision, objective_s = decide(space, assignment), Evaluator(space.problem)(assignment).objective_s
    memory = pipeline.simulate(decision)
    alone = replace(result, assignment=assignment, objective_s=objective_s)
    turned, _ = _turned(pipeline, Found(space=space, result=alone, decision=decision, memory=memory))
    if memory.peak_bytes <= pipeline.budget_bytes and turned.result.objective_s < best.result.objective_s:
        best = turned
    if turned.result.objective_s < (1 - SAME) * result.objective_s:
        return best  # what several share turns once, and is counted for each: no bound
    result = replace(best.result, bound_s=max(best.result.bound_s, min(bound_s, best.result.objective_s)))
    return replace(best, result=result)


def _turned(pipeline: Pipeline, found: Found) -> tuple[Found, dict[Charge, float]]:
    """`found` with orders and what they make turn in its price, and the latter."""
    space = found.space
    orders = orders_of(pipeline, found.decision)
    turns: dict[Charge, float] = {}
    if not orders.turns:
        return replace(found, orders=orders), turns
    for charge, piece, names in turned_pieces(space, found.result.assignment, orders):
        trips = space.passages[charge.edge].trips
        seconds = pipeline.model.collective_over("collective_permute", piece, names) * trips
        turns[charge] = turns.get(charge, 0.0) + seconds
    result = replace(found.result, objective_s=found.result.objective_s + sum(turns.values()))
    result = result.bounded(result.bound_s, pipeline.options.relative_gap)
    return replace(found, space=charged(space, turns), orders=orders, result=result), turns


def turned_pieces(
    space: Space, assignment: Sequence[int], orders: Orders
) -> list[tuple[Charge, float, tuple[str, ...]]]:
    """What changes places: on which edge, the bytes of a piece as it is sent, and over which axes.

    Of several readers who share it one is enough to make a piece turn, once.
    """
    crossed = Crossed(space, assignment)
    sizes: dict[tuple[Charge, bool], float] = {}
    axes: dict[tuple[Charge, bool], set[int]] = {}
    for turn in orders.turns:
        charge = crossed.between(turn.value, turn.use, turn.made, turn.taken)
        if charge is not None:
            tensor = space.passages[charge.edge].tensor
            row = np.frombuffer(turn.taken if turn.late else turn.made, np.int8)
            whole = tensor.bytes * tensor.as_sent("collective_permute")
            sizes[charge, turn.late] = whole / pieces(row[None], orders.axes)[0]
            axes.setdefault((charge, turn.late), set()).update(turn.axes)
    return [
        (where[0], piece, tuple(orders.axes[axis][0] for axis in sorted(axes[where])))
        for where, piece in sizes.items()
    ]
