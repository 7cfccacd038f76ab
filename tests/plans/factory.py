"""Plans made by hand: a small transformer's state as a user would have it, laid out by a rule of the test's
own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxplan.ir import Site
from jaxplan.plans import Alternative, Constraint, Plan, PlanCost, PlannedCollective, TensorPlan
from jaxplan.sharding import Layout

AXES = (("data", 4), ("model", 2))


class Moments(NamedTuple):
    """As an optax state is."""

    count: Any
    mu: Any
    nu: Any


def shape(*extents: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype)


def parameters(layers: int = 4, width: int = 64) -> dict[str, Any]:
    layer = {
        "mlp": {"up": {"kernel": shape(width, 4 * width), "bias": shape(4 * width)}},
        "norm": {"scale": shape(width)},
    }
    return {f"layer_{i}": layer for i in range(layers)} | {"embedding": shape(256, width)}


def arguments(layers: int = 4) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(state, batch)`."""
    params = parameters(layers)
    state = {
        "params": params,
        "opt_state": (Moments(shape(dtype="int32"), params, params), ()),
        "step": shape(dtype="int32"),
    }
    return state, {"inputs": shape(32, 16, dtype="int32")}


def layout_of(path: str, extents: tuple[int, ...]) -> Layout:
    """Kernels cut over both axes, batches over data; the rest is replicated."""
    dims: list[tuple[str, ...]] = [()] * len(extents)
    if path.endswith("kernel"):
        dims[-1] = ("data", "model")
    elif path.startswith("batch"):
        dims[0] = ("data",)
    elif path.endswith("embedding"):
        dims[0] = ("model",)
    return Layout(dims=tuple(dims))


def kind_of(path: str) -> str:
    parts = path.split("/")
    names = {"params": "parameter", "opt_state": "optimizer"}
    return next((names[part] for part in parts if part in names), "batch" if parts[0] == "batch" else "state")


def tensor(
    path: str, leaf: Any, axes: Any = AXES, layout: Layout | None = None, **changes: Any
) -> TensorPlan:
    extents = tuple(leaf.shape)
    layout = layout or layout_of(path, extents)
    size = math.prod(extents) * np.dtype(leaf.dtype).itemsize
    fields: dict[str, Any] = {
        "kind": kind_of(path),
        "bytes": size,
        "local_bytes": size // layout.shards(axes),
    }
    return TensorPlan(path=path, shape=extents, dtype=str(leaf.dtype), layout=layout, **(fields | changes))


def paths_of(root: str, tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keyed = [(jax.tree_util.keystr(key, simple=True, separator="/"), leaf) for key, leaf in leaves]
    return [(f"{root}/{key}" if key else root, leaf) for key, leaf in keyed]


def collective(kind: str = "all_reduce", **changes: Any) -> PlannedCollective:
    fields: dict[str, Any] = {
        "axes": ("data",), "bytes": 4096, "wire_bytes": 6144, "trips": 1.0, "seconds_s": 2e-5,
        "where": "step.py:7 (loss)", "primitive": "dot_general",
    }  # fmt: skip
    return PlannedCollective(kind=kind, **(fields | changes))


def cost(**changes: Any) -> PlanCost:
    fields: dict[str, Any] = {
        "step_s": 1.3e-3, "compute_s": 1e-3, "comm_s": 5e-4, "exposed_comm_s": 3e-4,
        "comm_s_by_axis": {"data": 4e-4, "model": 1e-4}, "comm_bytes": 3 * 2**20,
        "comm_bytes_by_axis": {"data": 2**21, "model": 2**20}, "peak_bytes": 6 * 2**20,
        "peak_parts": {"parameters": 2 * 2**20, "optimizer state": 4 * 2**20}, "peak_where": "step.py:9 "
        "(loss)",
        "termination": "optimal", "objective_s": 1.4e-3, "bound_s": 1.4e-3, "gap": 0.0, "search_s": 2.5,
    }  # fmt: skip
    return PlanCost(**(fields | changes))


def make_plan(
    mesh: Any = None,
    args: tuple[Any, ...] | None = None,
    roots: tuple[str, ...] = ("state", "batch"),
    layout: Callable[[str, tuple[int, ...]], Layout] = layout_of,
    **changes: Any,
) -> Plan:
    """The plan of `step(state, batch) -> (state, {"loss"})` over data=4, model=2."""
    args = arguments() if args is None else args
    inputs = [
        tensor(path, leaf, layout=layout(path, tuple(leaf.shape)))
        for root, arg in zip(roots, args, strict=True)
        for path, leaf in paths_of(root, arg)
    ]
    first = [t for t in inputs if t.path.split("/")[0] == roots[0]]
    outputs = [replace(t, path=f"result/0/{t.path.partition('/')[2]}", alias=t.path) for t in first] + [
        tensor("result/1/loss", shape(), kind="result")
    ]
    kernel = next((t.path for t in inputs if t.path.endswith("kernel")), inputs[0].path)
    whole = Layout(dims=((),) * len(inputs[0].shape))
    pinned = Constraint(
        site=Site((3, 0), "result", 5, 0),
        layout=Layout(dims=(("data",), ())),
        source="step.py:7 (loss)",
        primitive="dot_general",
        shape=(32, 256),
        why="reshard",
    )
    fields: dict[str, Any] = {
        "name": "train_step",
        "fingerprint": "0123abcd",
        "axes": AXES,
        "device_kind": "cpu",
        "hardware": "cpu-host",
        "budget_bytes": 16 * 2**20,
        "inputs": tuple(inputs),
        "outputs": tuple(outputs),
        "constraints": (pinned,),
        "collectives": (
            collective(),
            collective("all_gather", axes=("data", "model"), seconds_s=4e-5, trips=4.0),
        ),
        "cost": cost(),
        "warnings": ("`weird_op` at step.py:3 (loss) has no rule: replicated, 12.0 us",),
        "assumptions": ("`while` at step.py:4 runs 16 times",),
        "alternatives": {
            kernel: (
                Alternative(layout=Layout(dims=((), ())), objective_s=2.6e-3, fits=True),
                Alternative(layout=Layout(dims=(("model",), ())), objective_s=1.5e-3, fits=False),
            ),
            inputs[-1].path: (Alternative(layout=whole, objective_s=9e-3, fits=True),),
        },
        "templates": {"fsdp": 1.5e-3, "data-parallel": 2.2e-3},
        "unruled_s": {"weird_op": 1.2e-5},
        "jax_version": "0.10.2",
        "mesh": AbstractMesh((4, 2), ("data", "model")) if mesh is None else mesh,
        "in_tree": jax.tree.structure((args, {})),
        "out_tree": jax.tree.structure((args[0], {"loss": 0})),
    }  # fmt: skip
    return Plan(**(fields | changes))
