"""The partitioner in a process of its own says what it says here, and whatever becomes of that process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan import child
from jaxplan.api import planner
from jaxplan.lowering.check import _around_scope, operation_of
from jaxplan.sharding import Asked, Beside, Layout, Partitioned
from jaxplan.sharding.partitioner import imported_copy

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
PINS = {0: (((64, 64), Layout(dims=((), ("data",)))),)}


def lowered() -> Any:
    def step(x: jax.Array) -> Any:
        with jax.named_scope("jaxplan0"):
            y = x @ x
        with jax.named_scope("jaxplan1"):
            return jnp.tanh(y), y.sum(axis=0)

    jitted = jax.jit(step, in_shardings=NamedSharding(MESH, P("data")))
    stage = jitted.trace(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    return stage.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")


def said(asked: Asked) -> Partitioned:
    return asked.partition(16.0)


def pinned(asked: Asked) -> Partitioned:
    assert asked.pin(PINS, operation_of, _around_scope)
    return said(asked)


def ready(beside: Beside) -> Beside:
    deadline = time.monotonic() + 120
    while not beside.ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return beside


@pytest.fixture(scope="module")
def beside() -> Iterator[Beside]:
    with Beside() as one:
        yield ready(one)


def test_the_answers_are_those_given_here(beside: Beside) -> None:
    here, there = Asked(lowered()), Asked(lowered(), beside)
    first = said(here)
    assert said(there) == first
    assert pinned(there) == pinned(here) != first
    assert there._here is None, "it was done here after all"
    # the process takes another module after the first
    assert said(Asked(lowered(), beside)) == first


def test_what_can_not_be_pinned_there_is_not_pinned(beside: Beside) -> None:
    of_two = {0: (*PINS[0], ((64,), None))}
    assert not Asked(lowered(), beside).pin(of_two, operation_of, _around_scope)


def test_what_fails_there_is_raised_here_and_not_done_again(beside: Beside) -> None:
    with pytest.raises(Exception, match=r"[Pp]ars") as here:
        imported_copy(b"no module")
    with pytest.raises(Exception, match=r"[Pp]ars") as there:
        beside.ask("load", b"no module")
    assert str(here.value) in str(there.value)
    assert "imported_copy" in there.value.__notes__[0]
    asked = Asked(lowered(), beside)
    with pytest.raises(TypeError, match="int"):
        asked.pin({0: 1}, operation_of, _around_scope)  # type: ignore[dict-item]
    assert asked._here is None, "it was done here once more"
    assert said(asked) == said(Asked(lowered()))


@pytest.mark.parametrize("seen_to_end", [False, True])
def test_a_process_that_is_killed_loses_no_answer(seen_to_end: bool) -> None:
    first, second = said(Asked(lowered())), pinned(Asked(lowered()))
    with Beside() as beside:
        asked = Asked(lowered(), ready(beside))
        assert said(asked) == first
        assert pinned(asked) == second
        assert beside._child is not None
        os.kill(beside._child.pid, signal.SIGKILL)
        if seen_to_end:
            # its pipe is broken then, where it is only closed in time else
            os.waitid(os.P_PID, beside._child.pid, os.WEXITED | os.WNOWAIT)
        assert said(asked) == second
        assert not beside.ready()


def test_a_process_that_is_killed_while_it_answers_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    script.write_text("import os, pickle\nos.write(1, pickle.dumps(list(range(100)))[:50])\nos.kill(os.getpid(), 9)\n")
    half = child.start(script)
    with pytest.raises(EOFError):
        child.receive(half)
    child.end(half)


def test_where_none_can_be_started_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with Beside() as beside:
        assert not beside.ready()
        assert said(Asked(lowered(), beside)) == said(Asked(lowered()))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Beside() as beside:
        time.sleep(0.5)
        assert not beside.ready()
        assert said(Asked(lowered(), beside)) == said(Asked(lowered()))


def test_the_process_ends_with_its_context() -> None:
    with Beside() as beside:
        process = beside._child
    assert process is not None and process.poll() is not None


def test_a_plan_is_the_same_with_the_partitioner_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(params: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(lambda p: (jnp.tanh(x @ p["up"]) @ p["down"]).sum())(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    shapes = jax.eval_shape(lambda: ({"up": jnp.ones((256, 1024)), "down": jnp.ones((1024, 256))}, jnp.ones((64, 256))))
    here = jaxplan.plan(step, MESH, *shapes, hardware="tpu-v5e")
    waited: list[bool] = []

    def awaited(self: Asked, module: Any, beside: Beside | None = None, **said: Any) -> None:
        assert beside is not None
        made(self, module, ready(beside), **said)
        waited.append(self._beside is not None)

    made = Asked.__init__
    monkeypatch.setattr(planner, "BESIDE_OPS", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Asked, "__init__", awaited)
    there = jaxplan.plan(step, MESH, *shapes, hardware="tpu-v5e")
    assert waited and all(waited)
    assert (there.inputs, there.collectives, there.constraints) == (here.inputs, here.collectives, here.constraints)
    assert there.templates == here.templates and there.cost.step_s == here.cost.step_s
