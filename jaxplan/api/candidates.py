"""Searching one step under different pins, and having the partitioner check what was found."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..cost import CostModel, MemoryProfile, least_memory, narrowed, step_memory, traffic
from ..errors import RuleError
from ..ir import Traced
from ..lowering import (
    Key,
    as_sent,
    check,
    collective_prices,
    planned_constraints,
    waited_values,
    written_seconds,
)
from ..search import (
    SEARCHES,
    Allowed,
    Decision,
    SearchResult,
    Space,
    Termination,
    build,
    decide,
    pinned,
    solve,
    solve_folded,
    tradeoff,
)
from ..sharding import Beside, Layout, MeshAxes, graph_rules
from .batch_dims import batch_dims
from .budget import within_budget
from .found import Candidate, Found, Nothing, assignment_in
from .kinds import input_kinds
from .least import NEAR, NEAR_LEAST_S, near_least_peak
from .meshes import Target
from .options import TEMPLATES, Options
from .rivals import RIVAL_NODES, rival
from .templates import template_pins
from .turning import ordered, orders_of

FOLD_NODES = 10_000
"""Nodes from which on a problem that repeats is folded: a smaller one is proved optimal as it is in a second or two."""

PROOF_S = 10.0
"""Seconds that a search with a time limit goes on for within 1 % of what is proved.  Where messages and prices end
there, cores and branching seldom find anything better: of a transformer in int8 on 2x2x2 the plan was there after 6 s,
proved within 0.64 % after 10, and 110 s more brought 0.43 %."""

LARGE_GAP = 1e-3
"""Within which a large problem's search with a time limit ends: a U-Net on 8 x 8 devices is there after 4 s, and 28 s
more closed the gap from 0.06 to 0.03 % without a better plan."""

CHIP_SHARE = 0.05
"""Of a budget, from which on searches count vector memory as room: what they find may be over budget, and costs another
search."""

LOOSE_GAP = 0.02
"""What a plan that may yet be over budget is proved within: of a tiny VQ-VAE's 408 nodes the same plan is found in 3 s
of processor time, and in ten times that proved no further than 1 %."""


def _vouched_for(space: Space, result: SearchResult) -> SearchResult:
    """`result` without its proof where the space lacks strategies: one of them might be better."""
    if space.complete:
        return result
    proved = result.termination is Termination.OPTIMAL
    return dataclasses.replace(
        result, termination=Termination.FEASIBLE if proved else result.termination, bound_s=0.0
    )


def _alike_where_as_good(whole: SearchResult, alike: SearchResult, relative_gap: float) -> SearchResult:
    """Of the whole search's plan and the one in which equal layers decide alike the latter, if it is proved as good.

    Layers differ at no gain where several choices cost the same; alike, they are read and checked as one.
    """
    good = alike.objective_s - whole.bound_s <= relative_gap * abs(alike.objective_s)
    if not alike.found or not (good or alike.objective_s < whole.objective_s):
        return whole
    return dataclasses.replace(
        whole, assignment=alike.assignment, objective_s=alike.objective_s, peak_bytes=alike.peak_bytes,
        bound_s=min(whole.bound_s, alike.objective_s),
    )  # fmt: skip


class Pipeline:
    """What all searches of one step share: the traced step, its rules, prices and budget."""

    def __init__(
        self, traced: Traced, target: Target, model: CostModel, budget_bytes: int, options: Options,
        output_pins: Mapping[int, Allowed], said_orders: Mapping[Key, tuple[int, ...]], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.traced, self.target, self.model = traced, target, model
        self.budget_bytes, self.options, self.output_pins, self.say = budget_bytes, options, output_pins, say
        self.said_orders = said_orders
        self.rules = graph_rules(traced.graph)
        self.kinds = input_kinds(traced.graph, self.rules)
        self.batch_dims = batch_dims(traced.graph, self.rules)
        self.graph = narrowed(traced.graph, self.rules, target.profile.kind)
        self.crossing = traffic(self.graph, self.rules, target.profile.kind, target.profile.usable_bytes)
        self.waited = waited_values(traced)
        ops = zip(traced.graph.ops, self.rules, strict=True)
        unknown = sorted({f"`{op.primitive}` at {op.source}" for op, rule in ops if rule.note})
        if unknown and options.strict:
            raise RuleError(
                f"no sharding rule for {', '.join(unknown)} and options.strict is set: register one with "
                "jaxplan.register_rule(primitive, fn), or plan without strict to have them replicated"
            )

    @property
    def _chip_bytes(self) -> int:
        """Of vector memory, of which the search's rows know nothing."""
        return self.target.profile.on_chip_bytes or 0

    @property
    def rows_bytes(self) -> int:
        """The budget for the search's rows: with vector memory, where that is a share worth looking for."""
        worth_it = self._chip_bytes >= CHIP_SHARE * self.budget_bytes
        return self.budget_bytes + (self._chip_bytes if worth_it else 0)

    def space(self, pins: Mapping[int, Allowed]) -> Space:
        """The decisions under `pins` on arguments, by position."""
        return pinned(self._free, self.values_pinned(pins))

    def values_pinned(self, pins: Mapping[int, Allowed]) -> dict[int, Allowed]:
        """Pins on arguments, by value in the place of position."""
        inputs = self.traced.graph.inputs
        return {inputs[position]: allowed for position, allowed in pins.items()}

    @functools.cached_property
    def _free(self) -> Space:
        """The decisions with no pins on arguments: priced once for all searches."""
        return build(
            self.graph, self.model, rules=self.rules, output_pins=self.output_pins,
            limit_bytes=self.rows_bytes, max_strategies=self.options.max_strategies, crossing=self.crossing,
            waited=self.waited,
        )  # fmt: skip

    def fits_nothing(self, axes: MeshAxes | None = None) -> bool:
        """Whether it is plain without a search that no plan's simulated memory fits; `axes`: of another mesh."""
        if self.target.profile.kind == "gpu":  # runs operations at other times for some layouts
            return False
        devices = math.prod(size for _, size in axes or self.target.axes)
        space = self._free
        least = least_memory(self.graph, self.rules, self.crossing, space.values, space.reads, devices)
        return least - self._chip_bytes > self.budget_bytes

    def under(self, options: Options) -> Pipeline:
        """The same, priced once for both, searched under other options (that no price depends on)."""
        other = copy.copy(self)
        other.__dict__["_free"], other.options = self._free, options
        return other

    def with_budget(self, budget_bytes: int) -> Pipeline:
        """The same, priced once for both, searched within another budget."""
        other = copy.copy(self)
        other.budget_bytes = budget_bytes
        problem = dataclasses.replace(self._free.problem, limit_bytes=other.rows_bytes)
        other.__dict__["_free"] = dataclasses.replace(self._free, problem=problem)
        return other

    def template(self, name: str) -> dict[int, Allowed] | None:
        """Pins of a named template; None when the mesh has too few axes for it."""
        return template_pins(name, self.kinds, self.batch_dims, self.target.axes)

    def given(self, input_pins: Mapping[int, Allowed]) -> dict[str, tuple[int, ...]]:
        """The templates that fit, as assignments of `space(input_pins)`: what a search may begin from."""
        space = self.space(input_pins)
        priced = self.templates(space, input_pins)
        return {name: assignment_in(space, one) for name, one in priced if isinstance(one, Found)}

    def templates(
        self, space: Space, input_pins: Mapping[int, Allowed]
    ) -> Iterator[tuple[str, Found | Nothing]]:
        """Every template that the mesh has axes for, priced in `space`, with `input_pins`; none if nothing fits."""
        for name, pins in self.template_pins(input_pins):
            self.say(f"pricing template {name}")
            yield name, rival(self, space, pins)

    def template_pins(self, input_pins: Mapping[int, Allowed]) -> Iterator[tuple[str, dict[int, Allowed]]]:
        """What every template that the mesh has axes for pins beside `input_pins`; none if nothing fits."""
        for name in () if self.fits_nothing() else TEMPLATES:
            pins = self.template(name)
            if pins is not None:
                yield name, {at: pin for at, pin in pins.items() if at not in input_pins}

    def search(
        self, pins: Mapping[int, Allowed], *, stubborn: bool = False, start: Found | Nothing | None = None,
        begin: Sequence[int] | None = None, space: Space | None = None,
    ) -> Found | Nothing:  # fmt: skip
        """The cheapest decision under `pins` whose simulated memory fits the budget.

        What a search under more pins found is a `start`: nothing dearer is returned; `begin` is a start too, as an
        assignment of `space(pins)`, which is `space` where the caller has it.  Where the memory rows alone say no, a
        `stubborn` search asks the simulation near the least peak.
        """
        space = space or self.space(pins)
        hint = assignment_in(space, start) if isinstance(start, Found) else begin
        found = self.within(space, hint)
        if isinstance(found, Found):
            return ordered(self, found)
        return self._smallest(space, found.result) if stubborn else found

    def within(self, space: Space, hint: Sequence[int] | None) -> Found | Nothing:
        """The cheapest decision of `space` whose simulated memory fits the budget."""
        return within_budget(
            self, space,
            lambda limit, begin=None, told=space: self.solve(told, limit, begin or hint),
            lambda limit, told: self._loosely.solve(told, limit, hint),
        )

    def folds(self, space: Space) -> bool:
        """Whether the search decides what is alike once."""
        if self.options.fold != "auto":
            return self.options.fold is True
        return len(space.problem.nodes) >= FOLD_NODES and space.folds.repeats

    @property
    def _loosely(self) -> Pipeline:
        """The same with less to be proved, where that is a search's to decide."""
        if self.options.search not in ("ilp", *TEMPLATES):
            return self
        return self.ending(LOOSE_GAP)

    def ending(self, relative_gap: float, time_limit_s: float | None = None) -> Pipeline:
        """The same whose searches end with such a gap, and after so long, if its own options don't end them before."""
        gap, options = max(self.options.relative_gap, relative_gap), self.options
        limit_s = min((s for s in (options.time_limit_s, time_limit_s) if s is not None), default=None)
        return self.under(dataclasses.replace(options, relative_gap=gap, time_limit_s=limit_s))

    def as_found(self, space: Space, result: SearchResult, bound_s: float) -> tuple[Found, int]:
        """What was found, as well proved as `bound_s` says, and the bytes that it takes beyond the budget."""
        decision = decide(space, result.assignment)
        memory = self.simulate(decision)
        vouched = _vouched_for(space, dataclasses.replace(result, bound_s=min(bound_s, result.objective_s)))
        vouched = vouched.bounded(bound_s, self.options.relative_gap)
        found = Found(space=space, result=vouched, decision=decision, memory=memory)
        return found, memory.peak_bytes - self.budget_bytes

    def _smallest(self, space: Space, result: SearchResult) -> Found | Nothing:
        """The fastest decision within the budget as simulated, of those near the least peak and on the frontier.

        The rows' least peak need not be the simulation's: copies are counted there alone.
        """
        near, chosen = near_least_peak(space, self.options.seed)
        if near is None:
            return Nothing(space=space, result=result)
        if self.fits_nothing():
            return Nothing(space=space, result=result, least=self.simulate(near))
        self.say("looking for the smallest peak once resharded copies are counted")
        points = tradeoff(space.problem, eps=NEAR - 1, time_limit_s=NEAR_LEAST_S, seed=self.options.seed)[
            0
        ].points
        tried = [(near, chosen.objective_s, chosen.assignment)]
        tried += [(decide(space, p.assignment), p.objective_s, p.assignment) for p in points]
        simulated = [(*one, self.simulate(one[0])) for one in tried]
        fitting = [one for one in simulated if one[3].peak_bytes <= self.budget_bytes]
        if not fitting:
            least = min((memory for *_, memory in simulated), key=lambda memory: memory.peak_bytes)
            return Nothing(space=space, result=result, least=least)
        decision, objective_s, assignment, memory = min(fitting, key=lambda one: one[1])
        feasible = dataclasses.replace(
            chosen,
            assignment=assignment,
            objective_s=objective_s,
            termination=Termination.FEASIBLE,
            bound_s=min(max(result.bound_s, 0.0), objective_s) if space.complete else 0.0,
        )
        return Found(space=space, result=feasible, decision=decision, memory=memory)

    def solve(self, space: Space, limit_bytes: int, hint: Sequence[int] | None) -> SearchResult:
        problem = dataclasses.replace(space.problem, limit_bytes=limit_bytes)
        if self.options.search not in ("ilp", *TEMPLATES):
            return SEARCHES[self.options.search](problem, hint=hint, **self.limits)
        fold, nodes = self.options.fold, len(problem.nodes)
        if self.folds(space):
            return solve_folded(
                problem, hint=hint, unfold_gap=self.options.unfold_gap, folds=space.folds, **self.limits
            )
        proof_s, large_gap = (math.inf, 0.0) if self.options.time_limit_s is None else (PROOF_S, LARGE_GAP)
        matrices = space.folds.matrices
        result = solve(
            problem, hint=hint, matrices=matrices, proof_s=proof_s, large_gap=large_gap, **self.limits
        )  # fmt: skip
        # what hardly repeats has next to no layers to decide alike
        if fold == "auto" and nodes >= RIVAL_NODES and space.folds.repeats and result.found:
            as_good_s = result.bound_s / (1 - self.options.relative_gap)
            alike = space.folds.alike(limit_bytes, enough_s=max(as_good_s, result.objective_s), **self.limits)
            if alike is not None:
                return _alike_where_as_good(result, alike, self.options.relative_gap)
        return result

    @property
    def limits(self) -> dict[str, Any]:
        """What ends a search."""
        options = self.options
        return {
            "time_limit_s": options.time_limit_s,
            "relative_gap": options.relative_gap,
            "seed": options.seed,
        }

    def simulate(self, decision: Decision, axes: MeshAxes | None = None) -> MemoryProfile:
        """Memory of one device at the decided layouts; `axes`: of another mesh than the target's."""
        return step_memory(
            self.graph, axes or self.target.axes, self.model, self.crossing, self.kinds,
            decision.values, decision.reads, self.waited, decision.outputs, decision.compute_s,
        )  # fmt: skip

    def checked(self, name: str, found: Found, beside: Beside | None = None) -> Candidate:
        """`found` lowered and taken through the partitioner, `beside` where that is ready."""
        graph, axes, decision = self.traced.graph, self.target.axes, found.decision
        orders = found.orders or orders_of(self, decision)
        inputs = tuple(
            orders.layout("value", v, 0, decision.values[v], len(graph.values[v].shape)) for v in graph.inputs
        )
        outputs = tuple(
            orders.layout("output", p, 0, decision.outputs[p], len(graph.values[v].shape))
            if p in decision.outputs
            else Layout(dims=((),) * len(graph.values[v].shape))
            for p, v in enumerate(graph.outputs)
        )
        self.say(f"checking {name} against the partitioner")
        checked = check(
            self.traced, self.rules, orders, axes, self.target.abstract, inputs, outputs, decision.values,
            planned_constraints(
                graph, decision.values, decision.reads, decision.copies, orders, self.waited, decision.outputs
            ),
            reads=decision.reads, waited=self.waited, platform=self.target.platform,
            while_trips=self.options.while_trips, beside=beside,
        )  # fmt: skip
        as_made, unplanned = (
            as_sent(self.graph, decision.values, decision.reads, items, axes, self.model)
            for items in (checked.collectives, checked.unplanned)
        )
        checked = dataclasses.replace(checked, collectives=as_made, unplanned=unplanned)
        sent = collective_prices(
            graph, found.space.start_shares, self.model, self.crossing, checked.collectives, self.waited
        )
        return Candidate(
            name=name, found=found, inputs=inputs, outputs=outputs, checked=checked, sent=sent,
            compute_s=sum(decision.compute_s.values()), comm_s=sum(one.seconds_s for one in sent),
            written_s=written_seconds(graph, checked.collectives, sent), lone_s=sum(one.lone_s for one in sent),
        )  # fmt: skip
