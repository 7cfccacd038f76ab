"""Tables whose rows are gathered and added to: predicted memory against what XLA's TPU compiler assigns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxplan


def step(state: Any, batch: Any) -> Any:
    """Updates a table by its gradient's rows and as many moments as the state has."""

    def loss(table: Any) -> Any:
        return jnp.mean((jnp.tanh(table[batch["rows"]]) @ batch["w"]) ** 2)

    gradient = jax.grad(loss)(state["table"])
    moments = [0.9 * moment + gradient**2 for moment in state["moments"]]
    scale = sum(jnp.sqrt(moment) for moment in moments) + 1
    return {"table": state["table"] - gradient / scale, "moments": moments}


@pytest.mark.parametrize(
    ("columns", "moments", "compiled"),
    [(200, 2, 2_598_687_744), (200, 1, 1_869_087_744), (64, 1, 819_495_936), (64, 2, 614_695_936)],
)
def test_a_table_is_updated_in_rows_unless_they_pad_a_lot_and_moments_are_many(
    columns: int, moments: int, compiled: int
) -> None:
    """Compiled for one v5e (jax 0.10.2, libtpu 0.0.42.1): a copy in rows of the table and each moment, or a copy of the
    gradient in columns."""
    table = jax.ShapeDtypeStruct((400_000, columns), jnp.float32)
    batch = {
        "rows": jax.ShapeDtypeStruct((8192,), jnp.int32),
        "w": jax.ShapeDtypeStruct((columns, 256), jnp.float32),
    }
    planned = jaxplan.auto_shard(step, AbstractMesh((1,), ("data",)), hardware="tpu-v5e", donate_argnums=(0,))
    peak = planned.plan({"table": table, "moments": [table] * moments}, batch).cost.peak_bytes
    assert 0 <= peak / compiled - 1 < 0.01
