"""Searching on where the decided layouts want the axes of one dimension in two orders at once.

The search decides which axes cut a dimension, `lowering.resolve_orders` in which order, afterwards.  Where no order
suits all who read it, pieces change places on the way (Shardy inserts a collective_permute, jax 0.10.2), at a price
that the search did not know: it is told, of just the layouts that it chose, and searches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..lowering import Orders, resolve_orders
from ..search import Charge, Crossed, Decision, Evaluator, Space, charged
from ..sharding import pieces
from .found import Found

if TYPE_CHECKING:
    from .candidates import Pipeline

SHARE = 0.005
"""Of a step: turns that take less are not worth another search."""

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

    These are in its objective and in its problem.  The bound is that of the first search, which holds in any order.
    """
    space, bound_s, limit_s = found.space, found.result.bound_s, pipeline.options.time_limit_s
    known: dict[Charge, float] = {}
    best, spent_s, objective_s = found, 0.0, found.result.objective_s
    for number in range(ROUNDS + 1):
        result = replace(found.result, objective_s=objective_s).bounded(bound_s, pipeline.options.relative_gap)
        turned, turns = _turned(pipeline, replace(found, space=space, result=result))
        best = turned if not number or turned.result.objective_s < best.result.objective_s else best
        told = all(known.get(charge) == seconds for charge, seconds in turns.items())
        spent_s += found.result.wall_s
        left_s = None if limit_s is None else limit_s - spent_s
        small = sum(turns.values()) <= SHARE * turned.result.objective_s
        if small or told or number == ROUNDS or (left_s is not None and left_s <= 0):
            break
        known |= turns
        pipeline.say("no order of axes suits all readers: searching on with what that takes")
        again = pipeline.under(replace(pipeline.options, time_limit_s=left_s))
        other = again.within(charged(space, known), found.result.assignment)
        if not isinstance(other, Found):
            break
        found, objective_s = other, Evaluator(space.problem)(other.result.assignment).objective_s
    return best


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
