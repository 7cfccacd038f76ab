"""One process of tests/api/test_processes.py: `python process_worker.py INDEX COUNT ADDRESS`, answers in JSON.

It is a whole program of its own: jax can be connected to other processes only once, before its first device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

STEPS, ROWS, WIDTH, HIDDEN = 5, 16, 32, 64


def main(index: int, count: int, address: str) -> dict[str, Any]:
    """What this process saw, by scenario."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, index)
    try:
        return {
            "trains": training(),
            "differs": failure(differing_programs),
            "too little memory": failure(infeasible),
            "agrees again": training(),
        }
    finally:
        jax.distributed.shutdown()


def train_step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    import jax
    import jax.numpy as jnp

    def loss_of(s: dict[str, Any]) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ s["up"]) @ s["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.02 * g, state, grads), loss


def new_state() -> dict[str, Any]:
    import jax

    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": 0.1 * jax.random.normal(up, (WIDTH, HIDDEN)),
        "down": 0.1 * jax.random.normal(down, (HIDDEN, WIDTH)),
    }


def batches() -> list[dict[str, Any]]:
    """The global batches, in NumPy: `y` is a fixed linear map of `x`, so that there is something to learn."""
    import numpy as np

    random = np.random.default_rng(0)
    goal = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    inputs = [random.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(STEPS)]
    return [{"x": x, "y": x @ goal} for x in inputs]


def mesh() -> Any:
    import jax

    return jax.make_mesh((4, 2), ("data", "model"))


def planned_step() -> Any:
    """Cut by hand in both axes, so that processes must communicate."""
    from jax.sharding import PartitionSpec as P

    import jaxplan

    constraints = {"batch/*": P("data"), "state/up": P("data", "model")}
    return jaxplan.auto_shard(train_step, mesh(), donate_argnums=0, constraints=constraints)


def training() -> dict[str, Any]:
    """Losses of a few steps, each process feeding the rows that its plan tells it to."""
    import jax

    from jaxplan.api.processes import plan_digest

    step = planned_step()
    shapes = (
        jax.eval_shape(new_state),
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batches()[0]),
    )
    plan = step.plan(*shapes)
    rows = plan.process_batch_slice()
    state, losses = step.init(new_state), []
    for batch in batches():
        mine = jax.tree.map(lambda a: a[rows], batch)
        placed = jax.tree.map(jax.make_array_from_process_local_data, plan.in_shardings[1], mine)
        state, loss = step(state, placed)
        losses.append(float(loss))
    return {"losses": losses, "rows": [rows.start, rows.stop], "digest": plan_digest(plan)}


def failure(scenario: Callable[[], Any]) -> dict[str, str]:
    try:
        scenario()
    except Exception as error:  # whatever it is, it is what the test looks at
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def differing_programs() -> Any:
    import jax
    import jax.numpy as jnp

    import jaxplan

    factor = 2.0 + jax.process_index()
    return jaxplan.plan(lambda x: x * factor, mesh(), jax.ShapeDtypeStruct((8, 8), jnp.float32))


def infeasible() -> Any:
    import jax
    import jax.numpy as jnp

    import jaxplan

    wide = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    return jaxplan.plan(lambda x: x @ x, mesh(), wide, memory_budget="64KiB")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=4 --xla_cpu_collective_call_terminate_timeout_seconds=300"
    )
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
