"""A plan's layouts as trees of NamedSharding, for plain `jax.jit`, `jax.device_put` and Orbax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from ..errors import PlanMismatchError
from ..ir import HOST_KIND
from .plan import Plan, TensorPlan
from .trees import Structure, UnknownNodes, treedef_of


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with every axis of type Auto; the mesh itself where it is so already.

    `jax.make_mesh` gives Explicit axes, for which a NamedSharding would make the shardings part of the types
    of the user's program; the planner's shardings are the partitioner's business alone.
    """
    if all(axis_type is AxisType.Auto for axis_type in mesh.axis_types):
        return mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, types, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def argument_shardings(plan: Plan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(in_shardings, kwarg_shardings)`: the structure of the step's dynamic arguments, a NamedSharding a
    leaf.

    Raises:
      PlanMismatchError: the plan was read from a file and has no mesh yet, or holds node classes that only
        the arguments themselves can bring back.
    """
    args, kwargs = _unflatten(plan, plan.inputs, _treedef(plan, "in_tree"))
    return args, kwargs


def result_shardings(plan: Plan) -> Any:
    """The structure of the step's result, a NamedSharding a leaf; raises as `argument_shardings`."""
    return _unflatten(plan, plan.outputs, _treedef(plan, "out_tree"))


def _unflatten(plan: Plan, tensors: Sequence[TensorPlan], treedef: Any) -> Any:
    if plan.mesh is None:
        sizes = ", ".join(f"{name}={size}" for name, size in plan.axes)
        raise PlanMismatchError(
            f"the plan of `{plan.name}` was read without a mesh, and shardings need one ({sizes}): "
            "load it with `jaxplan.load_plan(path, mesh)`, or use `plan.specs`, which needs none"
        )
    mesh = auto_mesh(plan.mesh)
    kinds = [HOST_KIND if tensor.host else None for tensor in tensors]
    placed = zip(tensors, kinds, strict=True)
    return jax.tree.unflatten(treedef, [NamedSharding(mesh, t.layout.spec(), memory_kind=k) for t, k in placed])


def _treedef(plan: Plan, which: str) -> Any:
    tree = getattr(plan, which)
    by_path = "specs" if which == "in_tree" else "result_specs"
    if tree is None:
        raise PlanMismatchError(
            f"the plan of `{plan.name}` has no tree structure: take the PartitionSpecs from "
            f"`plan.{by_path}`, by path"
        )
    if not isinstance(tree, Structure):
        return tree
    known = () if plan.in_tree is None or isinstance(plan.in_tree, Structure) else (plan.in_tree,)
    try:
        return treedef_of(tree, known)
    except UnknownNodes as unknown:
        names = ", ".join(name.replace(":", ".") for name in unknown.names)
        raise PlanMismatchError(
            f"the plan of `{plan.name}` was read from a file, which holds only the names of these tree "
            f"nodes: {names}. "
            "Import the modules that define them; where that is not enough, bind the plan to the step's "
            "arguments "
            "(arrays or ShapeDtypeStructs) with `plan = plan.bind(*args, **kwargs)`; or take the "
            "PartitionSpecs "
            f"from `plan.{by_path}`, by path"
        ) from None
