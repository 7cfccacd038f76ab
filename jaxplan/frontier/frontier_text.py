"""A frontier in the terminal: its points, and what is proved of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..units import BYTES, SECONDS, format_bytes, told_apart
from .points import Frontier

#: A regret that only float sums in another order make.
PROVED = 1e-6

_WIDTH = 110


def frontier_text(frontier: Frontier) -> str:
    """A head of sentences, then a row a point: memory, time, and how much faster a plan of its memory may be."""
    points, count = frontier.points, len(frontier.points)
    head = f"Frontier of `{frontier.name}` on mesh ({frontier.mesh}), {frontier.hardware}: "
    lines = [head + ("one plan" if count == 1 else f"{count} plans")]
    lines += [wrapped for said in _said(frontier) for wrapped in textwrap.wrap(said, _WIDTH, initial_indent="  ",
                                                                              subsequent_indent="    ")]  # fmt: skip
    lines += ["", f"  {'peak a device':>14}  {'step':>12}  a faster plan in this memory"]
    size = told_apart([point.peak_bytes for point in points], BYTES)
    step, knee = told_apart([point.step_s for point in points], SECONDS), frontier.knee
    for point in points:
        faster = "none" if point.regret < PROVED else f"by {percent(point.regret)} at most"
        marks = ["  <- knee, the best bargain"] if point is knee and count > 2 else []
        marks += ["  (more than a device has)"] if point.peak_bytes > frontier.memory_bytes else []
        row = f"  {size(point.peak_bytes):>14}  {step(point.step_s):>12}  {faster:<18}{''.join(marks)}"
        lines.append(row.rstrip())
    return "\n".join(lines)


def proof(frontier: Frontier) -> str:
    """What is proved of all points, in a sentence or two."""
    proved = frontier.regret_bound < PROVED
    faster = "is faster" if proved else f"is faster by more than {percent(frontier.regret_bound)}"
    if not frontier.alike:
        return f"no plan {faster} in the memory of any of these"
    return (
        f"no plan that cuts repeated layers alike {faster} in the memory of any of these; no other plan is by more "
        f"than {percent(frontier.apart_regret_bound)}"
    )


def stakes(frontier: Frontier) -> str:
    """How much there is to trade, from end to end; "" of one plan."""
    slow, fast = frontier.points[0], frontier.points[-1]
    if slow is fast:
        return ""
    more, less = fast.peak_bytes / slow.peak_bytes - 1, slow.step_s / fast.step_s - 1
    longer = f"the slowest takes {percent(less)} longer than the fastest"
    return f"from end to end: {percent(more)} more memory, and {longer}"


def _said(frontier: Frontier) -> Iterator[str]:
    if words := stakes(frontier):
        yield words
    yield f"found {frontier.method}"
    copies = [point.peak_bytes - point.counted_bytes for point in frontier.points]
    counted = ""
    if min(copies) < 0:
        more, less = format_bytes(-min(copies)), format_bytes(max(max(copies), 0))
        off = f"up to {more} over the peaks below, up to {less} under them"
        counted = f", where memory is as the search counts it: {off}"
    elif any(copies):
        least, most = format_bytes(min(copies)), format_bytes(max(copies))
        size = least if least == most else f"{least} to {most}"
        counted = f", where memory is counted without the copies that resharding makes ({size} of each peak below)"
    yield f"proved: {proof(frontier)}{counted}"


def percent(share: float) -> str:
    """Two digits, and all that are before the point."""
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
