"""Shardings that a program names itself, said again on the plan's mesh.

Axes are matched by name, whatever their sizes and devices: `P("data")` means the plan's "data".  Where a name is
missing and the two meshes have the same sizes in the same order, the axis in its place is meant.  An axis of size 1
cuts nothing and is left out.  Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..errors import ConstraintError
from .memory_space import spaces_named

Axes = tuple[tuple[str, int], ...]


def spec_on(sharding: NamedSharding, axes: Axes) -> tuple[PartitionSpec, str]:
    """The spec of `sharding` in the axes of the plan's mesh; and why there is none, or "".

    Dimensions that it leaves open (UNCONSTRAINED) stay so.
    """
    theirs = {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    ours = dict(axes)
    place = dict(zip(theirs, ours, strict=False)) if list(theirs.values()) == list(ours.values()) else {}
    entries: list[Any] = []
    for entry in sharding.spec:
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            entries.append(entry)
            continue
        names = []
        for name in (entry,) if isinstance(entry, str) else entry:
            meant = name if name in ours else place.get(name, "")
            if meant and (meant == name or meant not in theirs):
                names.append(meant)
            elif theirs[name] > 1:
                return PartitionSpec(), (
                    f"{sharding.spec} on mesh ({_text(theirs)}) names axis {name!r}; the plan's mesh has "
                    f"({_text(ours)})"
                )
        entries.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*entries), ""


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def auto_mesh_of(axes: Axes) -> AbstractMesh:
    """A mesh without devices of these axes, all Auto."""
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))


def restated(name: str, params: Mapping[str, Any], axes: Axes, keep: bool, source: str) -> Mapping[str, Any]:
    """Parameters of a `sharding_constraint` with its sharding on a mesh of `axes`, or None where it is not kept.

    Those of a `device_put` likewise: a sharding that cuts is kept, of the others their memory.  Other primitives' stay.

    Raises:
      ConstraintError: it names axes that the plan's mesh doesn't have, or is no NamedSharding.
    """
    if name == "device_put":
        spaces = spaces_named(params)["devices"]
        put = zip(params["devices"], spaces, strict=True)
        return {**params, "devices": tuple(_put(place, space, axes, keep, source) for place, space in put)}
    if name != "sharding_constraint":
        return params
    sharding = params["sharding"]
    if not keep:
        return {**params, "sharding": None}
    if isinstance(sharding, NamedSharding):
        spec, fault = spec_on(sharding, axes)
    else:
        spec, fault = PartitionSpec(), f"{sharding} says devices, not axes of a mesh"
    if fault:
        raise _refused("with_sharding_constraint", source, fault)
    return {**params, "sharding": NamedSharding(auto_mesh_of(axes), spec)}


def _put(place: Any, space: Any, axes: Axes, keep: bool, source: str) -> Any:
    """What a `device_put` says of one value: a sharding on a mesh of `axes`, or else a memory or nothing."""
    if not keep or not isinstance(place, NamedSharding) or place.is_fully_replicated:
        return space
    spec, fault = spec_on(place, axes)
    if fault:
        raise _refused("device_put", source, fault)
    return NamedSharding(auto_mesh_of(axes), spec, memory_kind=place.memory_kind)


def _refused(what: str, source: str, fault: str) -> ConstraintError:
    return ConstraintError(
        f"{what} at {source} can't be honoured: {fault}. Name the plan's axes there, or have such constraints left "
        'out: options={"annotations": "ignore"}'
    )
