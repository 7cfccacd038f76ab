"""A traced step and its layouts -> a jitted function, ready to lower, compile or call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from ..ir import Graph, Site, Traced
from ..plans import Constraint
from ..sharding import Layout
from .kernels import local_layouts
from .replay import Replay

SCOPE = "jaxplan"
"""Prefix of the `jax.named_scope` of every equation; profiles show it too, beside the user's own scopes."""


def scopes_of(graph: Graph) -> dict[tuple[tuple[int, ...], int], str]:
    """A name for every equation that the planner knows: "jaxplan12" is operation 12 of the graph."""
    names: dict[tuple[tuple[int, ...], int], str] = {}
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


def sharding_of(mesh: Any, layout: Layout) -> NamedSharding:
    """The NamedSharding of a layout without pending sums."""
    return NamedSharding(mesh, layout.spec())


def planned_function(
    traced: Traced, constraints: Sequence[Constraint], mesh: Any
) -> Callable[..., list[Any]]:
    """`leaves -> leaves`: the step with the plan's constraints written in; `mesh` has Auto axes."""
    pins: dict[Site, tuple[NamedSharding, ...]] = {}
    for constraint in constraints:
        pins[constraint.site] = (*pins.get(constraint.site, ()), sharding_of(mesh, constraint.layout))
    stated = own_constraints(traced.graph, mesh)
    replay = Replay(pins, scopes_of(traced.graph), stated, mesh, local_layouts(constraints))

    def run(*leaves: Any) -> list[Any]:
        return replay.run(traced.jaxpr, traced.consts, leaves)

    run.__name__ = traced.name
    return run


def lower_flat(
    traced: Traced,
    constraints: Sequence[Constraint],
    mesh: Any,
    inputs: Sequence[Layout | None],
    outputs: Sequence[Layout | None],
    *,
    platform: str | None = None,
    donate: Collection[int] = (),
) -> Any:
    """`jax.stages.Lowered` of the planned step over flat leaves; no device is needed for an AbstractMesh.

    A layout of None leaves the leaf to the partitioner's propagation.  `donate`: positions of donated leaves.
    """
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in traced.jaxpr.invars
    ]
    jitted = jax.jit(
        planned_function(traced, constraints, mesh),
        in_shardings=tuple(None if layout is None else sharding_of(mesh, layout) for layout in inputs),
        out_shardings=[None if layout is None else sharding_of(mesh, layout) for layout in outputs],
        keep_unused=True,
        donate_argnums=tuple(sorted(donate)),
    )
    stage = jitted.trace(*shapes)
    return (
        stage.lower()
        if platform is None or isinstance(mesh, Mesh)
        else stage.lower(lowering_platforms=(platform,))
    )
