"""Users' constraints -> masks over the layouts of argument and result leaves."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import ConstraintError
from ..ir import Graph, Leaf, Traced
from ..lowering import Key
from ..plans import matches
from ..search import Allowed
from ..sharding import MeshAxes, all_places
from .annotations import Annotations

Constraints = Mapping[str, Any]

_SHOWN = 8
"""Annotations that an error lists: a whole model may name one axis that isn't there."""


def pins_of(
    traced: Traced, axes: MeshAxes, constraints: Constraints | None
) -> tuple[dict[int, Allowed], dict[int, Allowed], dict[Key, tuple[int, ...]]]:
    """Masks by input position and by output position, and the orders of axes that the specs say.

    `constraints` maps a glob on tree paths ("state/params/**/kernel", "batch/*") to a PartitionSpec, to
    "replicated", or to a NamedSharding; one that matches inner nodes alone ("state/params/head") means all leaves below
    them.  `PartitionSpec.UNCONSTRAINED` leaves a dimension to the planner; dimensions that the spec doesn't mention are
    uncut, as in JAX.

    Raises:
      ConstraintError: a pattern matches nothing, an axis is unknown, a spec is longer than the tensor, doesn't
        divide, uses an axis twice, or clashes with another; all offenders at once.
    """
    inputs: dict[int, Allowed] = {}
    outputs: dict[int, Allowed] = {}
    faults: list[str] = []
    said: dict[str, tuple[str, str]] = {}
    orders: dict[Key, tuple[int, ...]] = {}
    leaves = [
        *((leaf, position, inputs) for position, leaf in enumerate(traced.inputs)),
        *((leaf, position, outputs) for position, leaf in enumerate(traced.outputs)),
    ]
    for pattern, wish in (constraints or {}).items():
        hits = [at for at in leaves if matches(pattern, at[0].path)]
        # as in jax.jit, what is said of a tree is said of its leaves
        hits = hits or [at for at in leaves if matches(f"{pattern.rstrip('/')}/**", at[0].path)]
        for leaf, position, pins in hits:
            fault, allowed = _mask(pattern, wish, leaf, axes)
            if fault:
                faults.append(fault)
                continue
            other = said.get(leaf.path)
            if other is not None and other[1] != str(wish):
                faults.append(
                    f"{leaf.path}: {pattern!r} says {wish}, {other[0]!r} says {other[1]}; keep one of them"
                )
            said[leaf.path] = (pattern, str(wish))
            pins[position] = allowed
            is_input = pins is inputs
            where = ("value", traced.graph.inputs[position]) if is_input else ("output", position)
            orders |= {(*where, 0, d): order for d, order in _said_orders(wish, axes).items()}
        if not hits:
            paths = [leaf.path for leaf in (*traced.inputs, *traced.outputs)]
            near = difflib.get_close_matches(pattern.replace("*", ""), paths, n=3, cutoff=0.3) or paths[:3]
            faults.append(f"{pattern!r} matches no argument or result; did you mean {', '.join(near)}?")
    aliased_out = {o: i for i, o in traced.graph.aliases}
    for position, allowed in outputs.items():
        source = aliased_out.get(position)
        if source is None:
            continue
        # state keeps one sharding: a pin on its next value pins both
        both = _both(inputs.get(source, _anything), allowed)
        if not both(all_places(traced.inputs[source].shape, axes)).any():
            here, there = traced.inputs[source].path, traced.outputs[position].path
            faults.append(
                f"{here}: {said[here][0]!r} says {said[here][1]}, but {there} is its next value and "
                f"{said[there][0]!r} says {said[there][1]}; state keeps one sharding: keep one of them"
            )
        inputs[source] = both
        for (kind, index, _, d), order in list(orders.items()):
            if (kind, index) == ("output", position):
                orders[("value", traced.graph.inputs[source], 0, d)] = order
    if faults:
        raise ConstraintError("constraints can't be met:\n  " + "\n  ".join(faults))
    return inputs, outputs, orders


def annotated_pins(
    traced: Traced,
    axes: MeshAxes,
    said: Annotations,
    input_pins: Mapping[int, Allowed],
    output_pins: Mapping[int, Allowed],
    *,
    strict: bool,
) -> tuple[dict[int, Allowed], dict[int, Allowed], dict[Key, tuple[int, ...]]]:
    """Masks and orders of the arguments and results that say themselves how they lie, unless constraints speak of them.

    Raises:
      ConstraintError: `strict`, and an annotation can't be met; all offenders at once.  Else they are left out.
    """
    asked = set(input_pins) | {i for i, o in traced.graph.aliases if o in output_pins}
    pins: tuple[dict[int, Allowed], dict[int, Allowed]] = ({}, {})
    orders: dict[Key, tuple[int, ...]] = {}
    faults = []
    ends = ((pins[0], said.inputs, traced.inputs, asked), (pins[1], said.outputs, traced.outputs, set(output_pins)))
    for found, spoken, leaves, known in ends:
        for position, one in sorted(spoken.items()):
            if position in known or one.spec is None:
                continue
            leaf = leaves[position]
            fault, allowed = _mask(one.by, one.spec, leaf, axes)
            if one.fault:
                fault = f"{leaf.path}: {one.fault}"
            if fault:
                faults.append(f"{fault} (so says {one.by})")
                continue
            found[position] = allowed
            where = ("value", traced.graph.inputs[position]) if found is pins[0] else ("output", position)
            orders |= {(*where, 0, d): order for d, order in _said_orders(one.spec, axes).items()}
    if faults and strict:
        raise ConstraintError(
            "what the step or its arguments say of their own shardings can't be met:\n  "
            + "\n  ".join(faults[:_SHOWN])
            + (f"\n  and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")
            + "\nChange it, overrule it with `constraints`, or leave it to the planner: options="
            '{"annotations": "start"} or "ignore"'
        )
    return *pins, orders


def stated_orders(graph: Graph, axes: MeshAxes) -> dict[Key, tuple[int, ...]]:
    """The orders of axes that the step's own `with_sharding_constraint`s say."""
    orders: dict[Key, tuple[int, ...]] = {}
    for op in graph.ops:
        if op.primitive == "sharding_constraint":
            for d, order in _said_orders(op.params["sharding"], axes).items():
                orders[("read", op.index, 0, d)] = orders[("value", op.results[0], 0, d)] = order
    return orders


def _said_orders(wish: Any, axes: MeshAxes) -> dict[int, tuple[int, ...]]:
    """By dimension, the mesh axes that a spec puts on it, major first, where it names several."""
    spec = wish.spec if isinstance(wish, NamedSharding) else wish
    index = {name: i for i, (name, _) in enumerate(axes)}
    if not isinstance(spec, PartitionSpec):
        return {}
    named = {d: [n for n in e if dict(axes)[n] > 1] for d, e in enumerate(spec) if isinstance(e, tuple)}
    return {d: tuple(index[n] for n in names) for d, names in named.items() if len(names) > 1}


def _mask(pattern: str, wish: Any, leaf: Leaf, axes: MeshAxes) -> tuple[str, Allowed]:
    if isinstance(wish, NamedSharding):
        wish = wish.spec
    if isinstance(wish, str):
        if wish != "replicated":
            return f'{leaf.path}: {pattern!r} -> {wish!r}: write a PartitionSpec or "replicated"', _anything
        wish = PartitionSpec()
    if not isinstance(wish, PartitionSpec):
        hint = f"; write jax.sharding.PartitionSpec{wish!r}" if isinstance(wish, tuple) and len(wish) > 1 else ""
        return f'{leaf.path}: {pattern!r} -> {wish!r} is neither a PartitionSpec nor "replicated"{hint}', _anything
    if len(wish) > len(leaf.shape):
        return (
            f"{leaf.path}: {wish} has {len(wish)} entries, the tensor {leaf.dtype}{list(leaf.shape)} "
            f"{len(leaf.shape)} dimensions",
            _anything,
        )
    sizes = dict(axes)
    index = {name: i for i, (name, _) in enumerate(axes)}
    fixed: dict[int, int] = {}
    free_dims = set()
    for d, entry in enumerate(wish):
        if entry is PartitionSpec.UNCONSTRAINED:
            free_dims.add(d)
            continue
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [n for n in names if n not in sizes]
        if unknown:
            return (
                f"{leaf.path}: {wish} names axis {unknown[0]!r}; the mesh has {', '.join(sizes)}",
                _anything,
            )
        product = math.prod(sizes[n] for n in names)
        if leaf.shape[d] % product:
            return (
                f"{leaf.path}: {wish} cuts dimension {d} of {leaf.dtype}{list(leaf.shape)} in {product} pieces, "
                f"which doesn't divide {leaf.shape[d]}; pad it to {-(-leaf.shape[d] // product) * product} or leave it "
                "uncut"
            ), _anything
        for name in names:
            if index[name] in fixed:
                return f"{leaf.path}: {wish} uses axis {name!r} twice", _anything
            if sizes[name] > 1:
                fixed[index[name]] = d
    return "", _fixed_or_free(fixed, free_dims, len(axes))


def _both(first: Allowed, second: Allowed) -> Allowed:
    return lambda places: first(places) & second(places)


def _anything(places: np.ndarray) -> np.ndarray:
    return np.ones(len(places), bool)


def _fixed_or_free(
    fixed: Mapping[int, int], free_dims: set[int], n_axes: int
) -> Callable[[np.ndarray], np.ndarray]:
    def allowed(places: np.ndarray) -> np.ndarray:
        keep = np.ones(len(places), bool)
        for axis in range(n_axes):
            column = places[:, axis]
            if axis in fixed:
                keep &= column == fixed[axis]
            else:
                keep &= (column < 0) | np.isin(column, sorted(free_dims))
        return keep

    return allowed
