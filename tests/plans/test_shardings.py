"""A plan's shardings do with plain jax what the plan says, on meshes of any axis types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxplan.errors import PlanMismatchError
from jaxplan.plans import auto_mesh
from tests.plans.factory import arguments, make_plan

TYPES = [
    (AxisType.Auto, AxisType.Auto),
    (AxisType.Explicit, AxisType.Explicit),
    (AxisType.Auto, AxisType.Explicit),
]


def step(state: Any, batch: Any) -> Any:
    total = jnp.sum(batch["inputs"]).astype(jnp.float32)
    return jax.tree.map(lambda leaf: leaf + 1, state), {"loss": total}


@pytest.mark.parametrize("types", TYPES)
def test_plain_jit_takes_the_shardings_of_a_mesh_of_any_axis_types(mesh_4x2: Mesh, types: Any) -> None:
    mesh = Mesh(mesh_4x2.devices, mesh_4x2.axis_names, axis_types=types)
    plan = make_plan(mesh)
    args = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), arguments())
    state, metrics = jax.jit(step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)(*args)
    assert float(metrics["loss"]) == 32 * 16
    kernel = state["params"]["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == PartitionSpec(None, ("data", "model"))
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(64, 256 // 8)}


def test_device_put_lays_the_arguments_out_as_planned(mesh_4x2: Mesh) -> None:
    plan = make_plan(mesh_4x2)
    args = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), arguments())
    placed = jax.tree.leaves(jax.device_put(args, plan.in_shardings))
    for tensor, array in zip(plan.inputs, placed, strict=True):
        assert array.addressable_shards[0].data.nbytes == tensor.local_bytes, tensor.path


def test_keyword_arguments_have_their_own_shardings(mesh_4x2: Mesh) -> None:
    state, batch = arguments()
    plan = make_plan(mesh_4x2, in_tree=jax.tree.structure(((state,), {"batch": batch})))
    assert len(plan.in_shardings) == 1
    assert plan.kwarg_shardings == {"batch": {"inputs": NamedSharding(mesh_4x2, PartitionSpec("data"))}}


@pytest.mark.parametrize("types", TYPES)
def test_auto_mesh_changes_axis_types_and_nothing_else(mesh_4x2: Mesh, types: Any) -> None:
    for mesh in (
        Mesh(mesh_4x2.devices, mesh_4x2.axis_names, axis_types=types),
        AbstractMesh((4, 2), ("data", "model"), types),
    ):
        made = auto_mesh(mesh)
        assert set(made.axis_types) == {AxisType.Auto}
        assert (made.axis_names, dict(made.shape)) == (mesh.axis_names, dict(mesh.shape))
        if isinstance(mesh, Mesh):
            assert (made.devices == mesh.devices).all()
        assert auto_mesh(made) is made


def test_an_abstract_mesh_keeps_its_device_kind(mesh_4x2: Mesh) -> None:
    abstract = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Explicit,) * 2).abstract_mesh
    assert auto_mesh(abstract).abstract_device == abstract.abstract_device is not None


def test_without_a_mesh_shardings_say_how_to_get_one() -> None:
    plan = make_plan()
    bare = type(plan)(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"mesh": None})
    with pytest.raises(PlanMismatchError, match=r"`train_step`.*data=4, model=2.*load_plan\(path, mesh\)"):
        _ = bare.in_shardings
