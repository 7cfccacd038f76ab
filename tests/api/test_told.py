"""What a search is told of a plan that overran its budget: the copies at its peak, as memory of who reads them."""

from __future__ import annotations

from collections.abc import Callable

from jaxplan.api import Found, Pipeline
from jaxplan.api.told import Told
from jaxplan.ir import Traced
from jaxplan.search import Evaluator


def test_copies_at_the_peak_are_counted_by_who_reads_them(
    planner_for: Callable[..., Pipeline], chain: Callable[[int, int], Traced]
) -> None:
    planner = planner_for(chain(3, 32768), (8,), "h100", 2**32)
    fsdp = planner.search(planner.template("fsdp") or {})
    assert isinstance(fsdp, Found)
    told = Told(planner, fsdp.space)
    assert told.tell(fsdp)
    assert not told.tell(fsdp), "once is enough"
    counted = Evaluator(told.space.problem)(fsdp.result.assignment)
    assert counted.objective_s == fsdp.result.objective_s
    at, chosen = fsdp.memory.peak_time, fsdp.result.assignment
    new = told.space.problem.usages[len(fsdp.space.problem.usages) :]
    told_bytes = sum(int(usage.bytes[chosen[usage.node]]) for usage in new if usage.start <= at < usage.stop)
    # a gathered weight; two gradients that wait for their sums beside it are nobody's copies
    assert told_bytes == 4 * 4096**2
    assert fsdp.memory.parts["copies"] == 3 * told_bytes
    assert told.limit_bytes(fsdp) < counted.peak_bytes
