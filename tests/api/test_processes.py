"""Two processes of four devices plan once, hold the same plan, and train as one process does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.api.processes import plan_digest
from tests.api import process_worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    """What each of two processes reports of the worker's scenarios."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = str(ROOT)
    running = [
        subprocess.Popen(
            [sys.executable, process_worker.__file__, str(index), "2", address],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def test_both_hold_the_plan_that_one_process_makes(answers: list[dict[str, Any]]) -> None:
    state = jax.eval_shape(process_worker.new_state)
    plan = process_worker.planned_step().plan(state, process_worker.batches()[0])
    assert [answer["trains"]["digest"] for answer in answers] == [plan_digest(plan)] * 2


def test_they_train_as_one_device_does(answers: list[dict[str, Any]]) -> None:
    state, losses = process_worker.new_state(), []
    for batch in process_worker.batches():
        state, loss = jax.jit(process_worker.train_step)(state, batch)
        losses.append(float(loss))
    assert losses[0] > losses[-1]
    for answer in answers:
        np.testing.assert_allclose(answer["trains"]["losses"], losses, rtol=1e-6)


def test_each_feeds_its_own_half(answers: list[dict[str, Any]]) -> None:
    half = process_worker.ROWS // 2
    assert [answer["trains"]["rows"] for answer in answers] == [[0, half], [half, 2 * half]]


def test_differing_programs_are_refused_by_both(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        refusal = answer["differs"]
        assert refusal["error"] == "PlanMismatchError"
        assert "program: process 0: " in refusal["message"] and "; process 1: " in refusal["message"]
        assert "the same order" in refusal["message"] and "\n  arguments" not in refusal["message"]


def test_the_planning_process_s_error_reaches_both(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["too little memory"]["error"] == "InfeasibleError"
        assert "fits 64.0 KiB a device" in answer["too little memory"]["message"]
    assert "on process 0, which plans for all" in answers[1]["too little memory"]["message"]


def test_after_a_refusal_they_plan_on(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["agrees again"] == answer["trains"]


# -- rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """As much of a device as the rows of a process depend on."""

    id: int
    process_index: int
    device_kind: str = "cpu"
    platform: str = "cpu"


def mesh_of(processes: Any) -> Mesh:
    """A mesh (data, model) whose device at each position belongs to the process given there."""
    owners = np.array(processes)
    devices = np.array([Device(i, int(p)) for i, p in enumerate(owners.flat)], object)
    return Mesh(devices.reshape(owners.shape), ("data", "model"))


def plan_on(mesh: Mesh, spec: P, **others: P) -> jaxplan.Plan:
    def step(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return sum(jax.numpy.sum(leaf @ w) for leaf in batch.values())

    leaf = jax.ShapeDtypeStruct((16, 8), np.float32)
    abstract = AbstractMesh(tuple(mesh.shape.values()), mesh.axis_names)
    pins = {"w": P(), "batch/x": spec} | {f"batch/{name}": other for name, other in others.items()}
    plan = jaxplan.plan(
        step, abstract, jax.ShapeDtypeStruct((8, 8), np.float32), {name: leaf for name in ("x", *others)},
        hardware="cpu-host", constraints=pins, options={"compare_templates": False},
    )  # fmt: skip
    return plan.bind_leaves(plan.inputs, plan.outputs, plan.in_tree, plan.out_tree, mesh)


ALONG_DATA = [[0, 0], [0, 0], [1, 1], [1, 1]]
ALONG_MODEL = [[0, 1], [0, 1], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("owners", "spec", "wanted"),
    [
        (ALONG_DATA, P("data"), [(0, 8), (8, 16)]),
        (ALONG_DATA, P("model"), [(0, 16), (0, 16)]),
        (ALONG_DATA, P(None, "data"), [(0, 16), (0, 16)]),
        (ALONG_DATA, P(("data", "model")), [(0, 8), (8, 16)]),
        (ALONG_MODEL, P("data"), [(0, 16), (0, 16)]),
        (ALONG_MODEL, P("model"), [(0, 8), (8, 16)]),
        (ALONG_MODEL, P(("model", "data")), [(0, 8), (8, 16)]),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], P(("data", "model")), [(2 * i, 2 * i + 2) for i in range(8)]),
    ],
)
def test_rows_are_those_of_the_shards(owners: Any, spec: P, wanted: list[tuple[int, int]]) -> None:
    plan = plan_on(mesh_of(owners), spec)
    for process, rows in enumerate(wanted):
        assert plan.process_batch_slice("batch/x", process_index=process) == slice(*rows)


def test_rows_with_gaps_are_no_slice() -> None:
    plan = plan_on(mesh_of(ALONG_MODEL), P(("data", "model")))
    with pytest.raises(jaxplan.ArgumentError, match=r"(?s)batch/x lies as .*are \[0, 2, 4, 6\]: no slice"):
        plan.process_batch_slice("batch/x", process_index=0)


def test_leaves_that_need_different_rows_are_named() -> None:
    plan = plan_on(mesh_of(ALONG_DATA), P("data"), mask=P())
    with pytest.raises(jaxplan.ArgumentError, match=r"(?s)batch/mask: rows 0:16.*batch/x: rows 8:16"):
        plan.process_batch_slice(process_index=1)
    assert plan.process_batch_slice("batch/mask", process_index=1) == slice(0, 16)


def test_a_process_without_devices_of_the_mesh() -> None:
    plan = plan_on(mesh_of(ALONG_DATA), P("data"))
    with pytest.raises(jaxplan.ArgumentError, match=r"process 7 has no device .* \[0, 1\] have"):
        plan.process_batch_slice(process_index=7)


def test_an_abstract_mesh_has_no_processes() -> None:
    with pytest.raises(jaxplan.PlanMismatchError, match="no mesh of devices"):
        jaxplan.plan(
            lambda x: x + 1,
            AbstractMesh((4,), ("data",)),
            jax.ShapeDtypeStruct((8,), np.float32),
            hardware="h100",
        ).process_batch_slice()
