"""What a step says about its own shardings: Flax's boxes, NNX metadata, placed arrays, those of its own `jax.jit`.

Flax is asked through its public getters, and only where it is imported already: no argument can be a box of a library
that is not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..ir import Stated, Traced, spec_on
from ..plans import AxisRule, Names, dims_by_rules
from ..sharding import MeshAxes


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one argument leaf says.

    Attributes:
      spec: in the axes of the plan's mesh; None where it has logical names that no rule speaks of: nothing is said yet.
      fault: why what it says can't be said on this mesh, or "".
      by: who says it, in words.
      names: the logical names of its dimensions, () where it has none.
    """

    spec: PartitionSpec | None
    by: str
    fault: str = ""
    names: Names = ()


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """What is said of arguments and of results that are no state, by position; state keeps one sharding."""

    inputs: Mapping[int, Said] = field(default_factory=dict)
    outputs: Mapping[int, Said] = field(default_factory=dict)


def annotations_of(
    traced: Traced, arguments: Any, axes: MeshAxes, rules: Sequence[AxisRule]
) -> Annotations:
    """What the arguments say, and before them the step's own `jax.jit`; `rules`: see `of_arguments`."""
    inputs = {**of_arguments(arguments, axes, rules), **_of_jit(traced.stated_inputs, axes)}
    outputs = _of_jit(traced.stated_outputs, axes)
    for i, o in traced.graph.aliases:
        said = outputs.pop(o, None)
        if said is None:
            continue
        if i not in traced.stated_inputs:
            inputs[i] = said
        elif inputs[i].spec != said.spec and not inputs[i].fault:
            fault = f"{inputs[i].spec} going in and {said.spec} coming out: state keeps one sharding"
            inputs[i] = replace(inputs[i], fault=said.fault or fault)
    return Annotations(inputs=inputs, outputs=outputs)


def _of_jit(stated: Mapping[int, Stated], axes: MeshAxes) -> dict[int, Said]:
    found = {position: (one, *spec_on(one.sharding, axes)) for position, one in stated.items()}
    return {
        position: Said(spec=spec, by=f"`{one.jitted}`'s own jax.jit", fault=fault)
        for position, (one, spec, fault) in found.items()
    }


def of_arguments(arguments: Any, axes: MeshAxes, rules: Sequence[AxisRule]) -> dict[int, Said]:
    """By position among the leaves of `arguments`, what those that say something say.

    A box speaks before the array in it.  A spec without entries says nothing, nor does an array that is not cut: under
    `jax.set_mesh` every array starts out as a whole copy on each device.

    Args:
      rules: for logical names; where there are none, those that the box has or that are in force in Flax.
    """
    boxes = _box_types()
    said: dict[int, Said] = {}
    position = 0
    for node in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, boxes)):
        inside = jax.tree.leaves(node)
        annotation = _boxed(node, axes, rules) if isinstance(node, boxes) else None
        for leaf in inside:
            found = annotation or _placed(leaf, axes)
            if annotation is not None and annotation.spec is None:
                placed = _placed(leaf, axes)
                found = annotation if placed is None else replace(placed, names=annotation.names)
            if found is not None:
                said[position] = found
            position += 1
    return said


def _box_types() -> tuple[type, ...]:
    """`flax.core.meta.AxisMetadata` (all of Linen's boxes) and `flax.nnx.Variable`, as far as they are imported."""
    names = (("flax.core.meta", "AxisMetadata"), ("flax.nnx", "Variable"))
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _boxed(box: Any, axes: MeshAxes, rules: Sequence[AxisRule]) -> Said | None:
    by, logical, named = f"{type(box).__module__.split('.')[0]}'s {type(box).__name__}", True, None
    if "flax.nnx" in sys.modules and isinstance(box, sys.modules["flax.nnx"].Variable):
        getter, in_force = sys.modules["flax.nnx"].get_partition_spec, sys.modules["flax.core.spmd"]
        with in_force.logical_axis_rules(()):  # its getter would replace the names
            named = getter(box).get_value()
        spec = named if rules else getter(box).get_value()
        own: Sequence[AxisRule] = ()  # its getter has applied its own and those in force
    else:
        spec = sys.modules["flax.core.meta"].get_partition_spec(box)
        own = getattr(box, "rules", None) or sys.modules["flax.core.spmd"].get_logical_axis_rules()
        logical = hasattr(box, "rules")  # LogicallyPartitioned; Partitioned names mesh axes
    if not isinstance(spec, PartitionSpec) or not len(spec):
        return None
    said = _resolved(spec, by, axes, rules or own, logical)
    return said if named is None else replace(said, names=_names(named))


def _names(spec: PartitionSpec) -> Names:
    return tuple(entry if isinstance(entry, str) else None for entry in spec)


def _resolved(spec: PartitionSpec, by: str, axes: MeshAxes, rules: Sequence[AxisRule], logical: bool) -> Said:
    """A box's entries are logical names where a rule has them, else mesh axes.

    Logical names say nothing where there are no rules at all, as in Flax; mesh axes that aren't there are a fault.
    """
    ours, known = dict(axes), {rule[0] for rule in rules}
    names = _names(spec)
    ruled = dims_by_rules(names, rules)
    entries: list[Any] = []
    for entry, dim in zip(spec, ruled, strict=True):
        if isinstance(entry, str) and entry in known:
            entries.append(dim or None)
        elif isinstance(entry, str) and entry not in ours:
            if logical and not rules:
                return Said(spec=None, by=by, names=names)
            if not rules:
                fault = (
                    f"{spec} names {entry!r}, neither an axis of the plan's mesh ({', '.join(ours)}) nor one with a "
                    'rule: give options={"axis_rules": [(name, axis), ...]}'
                )
                return Said(spec=PartitionSpec(), by=by, fault=fault, names=names)
            entries.append(None)  # as in Flax: a name that no rule has is uncut
        else:
            entries.append(entry)
    return Said(spec=PartitionSpec(*entries), by=by, names=names)


def _placed(leaf: Any, axes: MeshAxes) -> Said | None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    spec, fault = spec_on(sharding, axes)
    return Said(spec=spec, by="its own sharding", fault=fault)


def unruled(said: Mapping[int, Said]) -> tuple[str, ...]:
    """A warning for the plan: logical names that say nothing, because no rules came with them."""
    silent = [one for one in said.values() if one.spec is None]
    if not silent:
        return ()
    names = sorted({name for one in silent for name in one.names if name})
    return (
        f"{len(silent)} argument{'s' if len(silent) > 1 else ''} bear logical names ({', '.join(names)}) that no rule "
        "speaks of, and are planned freely; options.axis_rules gives rules",
    )


def summary(arguments: Sequence[Said], results: Sequence[Said], annotations: str) -> tuple[str, ...]:
    """A line for the plan's assumptions: what of it is heeded, and who said it."""
    if not arguments and not results:
        return ()
    sources: dict[str, int] = {}
    for one in (*arguments, *results):
        sources[one.by] = sources.get(one.by, 0) + 1
    who = ", ".join(f"{count} by {by}" for by, count in sorted(sources.items()))
    what = "pinned as they say" if annotations == "pin" else "as they say, where the search started"
    counts = [(len(arguments), "argument"), (len(results), "result")]
    heeded = " and ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)
    return (f"{heeded} {what} ({who}; options.annotations={annotations!r})",)
