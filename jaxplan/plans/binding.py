"""A plan meets a mesh and arguments: it takes them, or says what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ..errors import PlanMismatchError
from ..ir import Leaf
from .plan import Plan, TensorPlan
from .trees import children_of, leaf_counts, leaf_paths, structure_of

_SHOWN = 8
"""Leaves that an error lists before it says how many more there are."""


def bind_mesh(plan: Plan, mesh: Mesh | AbstractMesh) -> Plan:
    """The plan on `mesh`, which has its axes: the same names and sizes in the same order, of any axis type.

    A mesh of another device kind is taken with a line in the plan's warnings: the plan is correct there, but
    was priced elsewhere.

    Raises:
      PlanMismatchError: names or sizes of the axes differ.
    """
    axes = tuple((str(name), int(mesh.shape[name])) for name in mesh.axis_names)
    if axes != plan.axes:
        raise PlanMismatchError(
            f"the plan of `{plan.name}` was made for mesh ({_sizes(plan.axes)}) and this one is "
            f"({_sizes(axes)}): "
            f"{_axes_difference(plan.axes, axes)}. Axes are matched by name and size, in order: give a mesh "
            "with the plan's axes, or plan again for this one"
        )
    kind = device_kind(mesh)
    warnings = plan.warnings
    if kind and plan.device_kind and kind != plan.device_kind:
        line = f"planned for {plan.device_kind!r}, used on {kind!r}: seconds and budget are the former's"
        warnings = (*warnings, *(() if line in warnings else (line,)))
    return replace(plan, mesh=mesh, warnings=warnings)


def device_kind(mesh: Mesh | AbstractMesh) -> str:
    """The kind of the mesh's devices, as jax names it; "" where an abstract mesh doesn't say."""
    if isinstance(mesh, AbstractMesh):
        return getattr(mesh.abstract_device, "device_kind", "")
    return str(mesh.devices.flat[0].device_kind)


def _sizes(axes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)


def _axes_difference(planned: Sequence[tuple[str, int]], given: Sequence[tuple[str, int]]) -> str:
    theirs, ours = dict(given), dict(planned)
    faults = [f"axis {name!r} is missing" for name in ours if name not in theirs]
    faults += [f"axis {name!r} is not in the plan" for name in theirs if name not in ours]
    faults += [
        f"axis {name!r} has size {theirs[name]} instead of {size}"
        for name, size in ours.items()
        if name in theirs and theirs[name] != size
    ]
    return "; ".join(faults) or "the axes stand in another order"


def bind_arguments(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
    """The plan with the tree structure of `(args, kwargs)`: arrays or ShapeDtypeStructs, no static arguments.

    Raises:
      PlanMismatchError: a leaf is new, gone, or of another shape or dtype; all are counted, 8 listed.
    """
    kwargs = {name: kwargs[name] for name in sorted(kwargs)}
    roots = argument_roots(plan, len(args))
    paths = [path for root, arg in zip(roots, args, strict=True) for path in leaf_paths(arg, root)]
    paths += [path for name, value in kwargs.items() for path in leaf_paths(value, name)]
    leaves = jax.eval_shape(lambda *leaves: leaves, *jax.tree.leaves((tuple(args), kwargs)))
    given = [
        Leaf(path=path, shape=tuple(leaf.shape), dtype=str(leaf.dtype))
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    inputs = _matched(plan.name, "arguments", plan.inputs, given)
    return replace(plan, inputs=inputs, in_tree=jax.tree.structure((tuple(args), kwargs)))


def bind_leaves(
    plan: Plan,
    inputs: Sequence[Leaf],
    outputs: Sequence[Leaf],
    in_tree: Any,
    out_tree: Any,
    mesh: Mesh | AbstractMesh,
) -> Plan:
    """The plan for a traced step and its mesh; raises as `bind_mesh` and `bind_arguments`."""
    bound = bind_mesh(plan, mesh)
    return replace(
        bound,
        inputs=_matched(plan.name, "arguments", plan.inputs, inputs),
        outputs=_matched(plan.name, "results", plan.outputs, outputs),
        in_tree=in_tree,
        out_tree=out_tree,
    )


def argument_roots(plan: Plan, count: int | None = None) -> list[str]:
    """The names of the positional arguments: the first part of their leaves' paths, `arg0` where there is
    none."""
    roots: list[str] = []
    if plan.in_tree is not None:
        positional = children_of(structure_of(plan.in_tree))[0]
        first = 0
        for index, (_, leaves) in enumerate(leaf_counts(positional)):
            roots.append(plan.inputs[first].path.split("/")[0] if leaves else f"arg{index}")
            first += leaves
    if count is None:
        return roots
    return (roots + [f"arg{index}" for index in range(len(roots), count)])[:count]


def _matched(
    name: str, what: str, tensors: Sequence[TensorPlan], leaves: Sequence[Leaf]
) -> tuple[TensorPlan, ...]:
    """The plan's tensors in the order of `leaves`: a custom node's order may change, its paths may not."""
    planned = {tensor.path: tensor for tensor in tensors}
    given = {leaf.path: leaf for leaf in leaves}
    faults = [f"  {path}: gone, was {_kind(old)}" for path, old in planned.items() if path not in given]
    for path, leaf in given.items():
        old = planned.get(path)
        if old is None:
            faults.append(f"  {path}: new, {_kind(leaf)}")
        elif (old.shape, old.dtype) != (leaf.shape, leaf.dtype):
            faults.append(f"  {path}: {_kind(old)} -> {_kind(leaf)}")
    if faults:
        rest = [f"  and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise PlanMismatchError(
            f"the plan of `{name}` was made for other {what}; {len(faults)} of "
            f"{len(planned.keys() | given.keys())} leaves differ:\n"
            + "\n".join([*faults[:_SHOWN], *rest])
            + f"\nPlan again for these {what}, or give the ones that it was made for."
        )
    return tuple(planned[leaf.path] for leaf in leaves)


def _kind(leaf: TensorPlan | Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
