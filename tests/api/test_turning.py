"""Orders of axes that suit no reader of a tensor: what pieces take to change places is in the price and in the gap."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from models import get, get_config


@pytest.mark.parametrize("size", [4, 8])
def test_a_plan_that_turns_pieces_is_no_better_proved_than_without_them(size: int) -> None:
    gnn, config = get("gnn"), get_config("gnn", "ogbn-products")
    state = jax.eval_shape(lambda key: gnn.init_state(config, key), jax.random.key(0))
    mesh = AbstractMesh((size, size), ("data", "model"))
    step = jaxplan.auto_shard(
        gnn.make_train_step(config), mesh, donate_argnums=0, hardware="tpu-v5p",
        options={"compare_templates": False},
    )  # fmt: skip
    cost = step.plan(state, gnn.batch_shapes(config)).cost
    assert 0.001 < cost.gap < 0.02
    assert cost.termination == "feasible"
