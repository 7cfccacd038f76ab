"""Which memory a tensor lies in: its device's own, or its host's.

jax says it in the types of a traced program (`f32<host>[8]`), and brings tensors from one to the other by `device_put`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

Space: Any = jax.memory.Space

HOST_KIND = "pinned_host"
"""What jax calls the memory of a host that its devices read and write by themselves."""

_HOST = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=HOST_KIND)


def on_host(array: Any) -> bool:
    """Whether an array, its type, its sharding or a ShapeDtypeStruct is in its host's memory."""
    sharding = array if isinstance(array, Sharding) else getattr(array, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    return getattr(array, "memory_space", None) is Space.Host or (kind is not None and "host" in kind)


def shape_as(array: Any, *, host: bool | None = None) -> jax.ShapeDtypeStruct:
    """Shape and type of an array, a type or a ShapeDtypeStruct, in its memory or the one that is said; no layout."""
    there = on_host(array) if host is None else host
    weak = bool(getattr(array, "weak_type", False))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak, sharding=_HOST if there else None)


def spaces_named(params: Any) -> dict[str, Any]:
    """Parameters of a `device_put` with memories in the place of the devices and shardings that it names.

    Where a value lies among the devices is the plan's business.
    """
    return {**params, "devices": tuple(map(_space, params["devices"]))}


def _space(place: Any) -> Any:
    if isinstance(place, Space) or not isinstance(place, Sharding) or place.memory_kind is None:
        return place if isinstance(place, Space) else None
    return Space.Host if on_host(place) else Space.Device


def returned_to_host(jaxpr: Jaxpr, positions: set[int]) -> Jaxpr:
    """`jaxpr` (open) with its results at `positions` brought to the host's memory."""

    def moved(*values: Any) -> Any:
        return [jax.device_put(value, Space.Host) for value in values]

    results = [jaxpr.outvars[i] for i in sorted(positions)]
    call: ClosedJaxpr = jax.make_jaxpr(moved)(*(shape_as(v.aval) for v in results))
    known = dict(zip(call.jaxpr.invars, results, strict=True))
    equations = [eqn.replace(invars=[known[v] for v in eqn.invars]) for eqn in call.jaxpr.eqns]
    outvars = list(jaxpr.outvars)
    for position, made in zip(sorted(positions), call.jaxpr.outvars, strict=True):
        outvars[position] = made
    return jaxpr.replace(eqns=[*jaxpr.eqns, *equations], outvars=outvars)


def put_one_by_one(equations: list[Any], _: Any) -> list[Any]:
    """Equations with a `device_put` for each value in the place of one for a whole tree: each lies as it likes.

    One that leaves a value in its memory names none.
    """
    found = []
    for eqn in equations:
        pairs = zip(eqn.invars, eqn.outvars, strict=False) if eqn.primitive.name == "device_put" else ()
        for i, (value, result) in enumerate(pairs):
            params = {name: (said[i],) for name, said in eqn.params.items()}
            if on_host(value.aval) == on_host(result.aval) and not isinstance(params["devices"][0], NamedSharding):
                params["devices"] = (None,)
            found.append(eqn.replace(invars=[value], outvars=[result], params=params))
        if eqn.primitive.name != "device_put":
            found.append(eqn)
    return found
