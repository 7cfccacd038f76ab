"""A traced step and its layouts -> a jitted function, ready to lower, compile or call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..ir import HOST_KIND, Graph, Site, Traced, on_host, shape_as
from ..plans import Constraint
from ..sharding import Layout
from .broadcasts import ANEW
from .kernels import local_layouts
from .pending import HELD, finished
from .repeats import Short
from .replay import Replay

SCOPE = "jaxplan"
"""Prefix of the `jax.named_scope` of every equation; profiles show it too, beside the user's own scopes."""


Alike = Collection[tuple[tuple[int, ...], int]]
"""Equations, (frame, position), around which nothing is decided to move."""


def scopes_of(graph: Graph) -> dict[tuple[tuple[int, ...], int], str]:
    """A name for every equation that the planner knows: "jaxplan12" is operation 12 of the graph.

    What an equation with a body does on its own account (a loop reshards what it carries, remat passes its operands
    through a barrier) goes by the first operation inside: "jaxplan_in12".
    """
    names: dict[tuple[tuple[int, ...], int], str] = {}
    seen: set[tuple[int, ...]] = {()}
    for op in graph.ops:
        frame = op.sites[0].frame if op.sites else ()
        if frame not in seen:
            seen.add(frame)
            for depth, position in enumerate(frame):
                names.setdefault((frame[:depth], position), f"{SCOPE}_in{op.index}")
    for op in graph.ops:
        for value in op.results:
            site = graph.values[value].site
            if site is not None and site.kind == "result" and op.primitive != "scan_stack":
                names[site.frame, site.equation] = f"{SCOPE}{op.index}"
    return names


def own_constraints(graph: Graph, mesh: Any) -> dict[tuple[tuple[int, ...], int], NamedSharding]:
    """The step's own `with_sharding_constraint`s that are kept, on `mesh`, by frame and equation."""
    return {
        (op.sites[0].frame, op.sites[0].equation): NamedSharding(mesh, op.params["sharding"].spec)
        for op in graph.ops
        if op.primitive == "sharding_constraint" and isinstance(op.params["sharding"], NamedSharding)
    }


def sharding_of(mesh: Any, layout: Layout, host: bool = False) -> NamedSharding:
    """The NamedSharding of a layout without pending sums, in the devices' memory or their hosts'."""
    return NamedSharding(mesh, layout.spec(), memory_kind=HOST_KIND if host else None)


def planned_function(
    traced: Traced, constraints: Sequence[Constraint], mesh: Any, *, alike: Alike | None = None
) -> Callable[..., list[Any]]:
    """`leaves -> leaves`: the step with the plan's constraints written in; `mesh` has Auto axes.

    `alike`: for the partitioner alone, see `Replay`.
    """
    replay = _replay(traced, constraints, mesh, alike)
    whole = range(len(traced.graph.outputs))

    def run(*leaves: Any) -> list[Any]:
        return _finished(traced.graph, replay.run(traced.jaxpr, traced.consts, leaves), whole, mesh)

    run.__name__ = traced.name
    return run


def _replay(traced: Traced, constraints: Sequence[Constraint], mesh: Any, alike: Alike | None) -> Replay:
    pins: dict[Site, tuple[NamedSharding, ...]] = {}
    held = {c.site: c.layout for c in constraints if c.why == HELD}
    for constraint in (c for c in constraints if c.why != HELD):
        pins[constraint.site] = (*pins.get(constraint.site, ()), sharding_of(mesh, constraint.layout))
    for site, sharding in _put(traced.graph, mesh):
        pins[site] = (sharding, *pins.get(site, ()))
    stated = own_constraints(traced.graph, mesh)
    return Replay(
        pins, scopes_of(traced.graph), stated, mesh, local_layouts(constraints), held,
        broadcast=[c.site for c in constraints if c.why == ANEW], alike=alike,
    )  # fmt: skip


def _put(graph: Graph, mesh: Any) -> Iterator[tuple[Site, NamedSharding]]:
    """The shardings on `mesh` that `device_put`s in the step name, and the results that they are of."""
    for op in graph.ops:
        for value, place in zip(op.results, op.params["devices"] if op.primitive == "device_put" else (), strict=False):
            site = graph.values[value].site
            if isinstance(place, NamedSharding) and site is not None:
                yield site, NamedSharding(mesh, place.spec)


def _finished(graph: Graph, results: Sequence[Any], positions: Iterable[int], mesh: Any) -> list[Any]:
    """The step's results at `positions`, those that are sums in parts summed under their maker's name."""
    producers = graph.producers()
    return [
        finished(result, mesh, f"{SCOPE}{producers[graph.outputs[position]]}")
        for result, position in zip(results, positions, strict=True)
    ]


def lower_flat(
    traced: Traced,
    constraints: Sequence[Constraint],
    mesh: Any,
    inputs: Sequence[Layout | None],
    outputs: Sequence[Layout | None],
    *,
    platform: str | None = None,
    donate: Collection[int] = (),
    short: Short | None = None,
    alike: Alike | None = None,
) -> Any:
    """`jax.stages.Lowered` of the planned step over flat leaves; no device is needed for an AbstractMesh.

    A layout of None leaves the leaf to the partitioner's propagation.  `donate`: positions of donated leaves.  With
    `short`, of the shortened step, over the leaves that are left of it.  `alike`: see `planned_function`.
    """
    avals, results = [v.aval for v in traced.jaxpr.invars], [v.aval for v in traced.jaxpr.outvars]
    if short is None:
        function = planned_function(traced, constraints, mesh, alike=alike)
    else:
        replay = _replay(traced, constraints, mesh, alike)

        def function(*leaves: Any) -> list[Any]:
            return _finished(traced.graph, replay.run_short(short, leaves), short.outputs, mesh)

        avals = [avals[p] for p in short.inputs]
        results = [results[p] for p in short.outputs]
        inputs, outputs = [inputs[p] for p in short.inputs], [outputs[p] for p in short.outputs]
        donate = [i for i, p in enumerate(short.inputs) if p in donate]
    said = zip((*inputs, *outputs), map(on_host, (*avals, *results)), strict=True)
    shardings = [None if layout is None else sharding_of(mesh, layout, host) for layout, host in said]
    jitted = jax.jit(
        function,
        in_shardings=tuple(shardings[: len(avals)]),
        out_shardings=shardings[len(avals) :],
        keep_unused=True,
        donate_argnums=tuple(sorted(donate)),
    )
    stage = jitted.trace(*map(shape_as, avals))
    return (
        stage.lower()
        if platform is None or isinstance(mesh, Mesh)
        else stage.lower(lowering_platforms=(platform,))
    )
