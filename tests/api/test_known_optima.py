"""Plans that experts know, found untold: what the compiled program communicates, in kinds and bytes.

Programs are planned for a TPU, at sizes where its prices decide, and compiled for eight forced host devices: the
CPU compiler keeps a reduce_scatter as an all_reduce with a slice, and combines small all_reduces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.lowering.hlo import CompiledCollective, compiled_collectives

# Scalars: losses, norms.
NEGLIGIBLE_BYTES = 256


def shape(*extents: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype)


def nbytes(tree: Any) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(tree))


def trained(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """One step of plain gradient descent on the first argument."""

    def step(weights: Any, *batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

    return step


def compiled(
    step: Any, mesh: Mesh, *shapes: Any, **settings: Any
) -> tuple[jaxplan.Plan, list[CompiledCollective]]:
    """The plan, and the collectives of the program that XLA made of it, scalars left out."""
    sharded = jaxplan.auto_shard(step, mesh, **{"hardware": "tpu-v5e", **settings})
    plan = sharded.plan(*shapes)
    text = sharded.lower(*shapes).compile().as_text()
    found = compiled_collectives(text, plan.axes)
    return plan, [c for c in found if c.bytes > NEGLIGIBLE_BYTES]


def sent(found: list[CompiledCollective]) -> dict[str, float]:
    """Bytes of each kind in one step."""
    total: dict[str, float] = {}
    for item in found:
        total[item.kind] = total.get(item.kind, 0) + item.bytes * item.trips
    return total


def mesh_over(**sizes: int) -> Mesh:
    count = math.prod(sizes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


# -- dense layers ---------------------------------------------------------------------------------------------


def _pairs(weights: Any, x: jax.Array) -> jax.Array:
    for up, down in weights:
        x = jax.nn.relu(x @ up) @ down
    return x


def _pairs_loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((_pairs(weights, x) - y) ** 2)


def _pair_shapes(count: int, width: int, hidden: int) -> Any:
    return [(shape(width, hidden), shape(hidden, width)) for _ in range(count)]


def test_a_wide_mlp_with_a_big_batch_is_data_parallel() -> None:
    """Only gradients travel, each once; updating in pieces and gathering the new weights costs no more."""
    weights, x = _pair_shapes(2, 1024, 4096), shape(65536, 1024)
    plan, found = compiled(trained(_pairs_loss), mesh_over(data=8), weights, x, x, donate_argnums=0)
    total = sent(found)
    assert set(total) <= {"all_reduce", "reduce_scatter", "all_gather"}
    reduced = total.get("all_reduce", 0) + total.get("reduce_scatter", 0)
    assert reduced == pytest.approx(nbytes(weights), abs=NEGLIGIBLE_BYTES)
    assert total.get("all_gather", 0) in (0, nbytes(weights))
    # All of the work is shared out: an eighth of what one device would do.
    alone = jaxplan.plan(
        trained(_pairs_loss),
        AbstractMesh((1,), ("data",)),
        weights,
        x,
        x,
        hardware="tpu-v5e",
        memory_budget="1TiB",
    )
    assert plan.cost.compute_s < 1.1 * alone.cost.compute_s / 8


@pytest.mark.parametrize("pairs", [1, 3])
def test_a_small_batch_and_huge_weights_give_column_row_pairs(pairs: int) -> None:
    """Forward alone: one all_reduce of the activations a pair, and nothing else."""
    weights, x = _pair_shapes(pairs, 8192, 32768), shape(16, 8192)
    _, found = compiled(_pairs, mesh_over(model=8), weights, x)
    assert [(c.kind, c.bytes, c.trips) for c in found] == [("all_reduce", nbytes(x), 1.0)] * pairs


def test_training_column_row_pairs_sums_once_a_pair_each_way() -> None:
    """The first pair needs no gradient of its input; weights and their gradients stay where they are."""
    weights, x = _pair_shapes(3, 4096, 16384), shape(64, 4096)
    plan, found = compiled(trained(_pairs_loss), mesh_over(model=8), weights, x, x, donate_argnums=0)
    assert sent(found) == {"all_reduce": 5 * nbytes(x)}
    for i in range(3):
        assert plan.specs[f"weights/{i}/0"] == P(None, "model")
        assert plan.specs[f"weights/{i}/1"] == P("model")


def _branches(weights: Any, x: jax.Array) -> jax.Array:
    (a_up, a_down), (b_up, b_down) = weights
    return jax.nn.relu(x @ a_up) @ a_down + jnp.tanh(x @ b_up) @ b_down


@pytest.mark.aot_tpu
def test_a_sum_of_two_contraction_split_products_is_reduced_once(tpu_topology: Callable[[str], Any]) -> None:
    """The TPU compiler moves the sum before the all_reduce; the plan counts on it."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices), ("model",))
    weights, x = _pair_shapes(2, 4096, 16384), shape(64, 4096)
    plan, found = compiled(_branches, mesh, weights, x, hardware=None, constraints={"result": "replicated"})
    assert [(c.kind, c.bytes) for c in found] == [("all_reduce", nbytes(x))]
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_reduce", nbytes(x))]


def test_a_3d_matrix_product_is_two_gathers_and_a_scatter() -> None:
    """Agarwal et al. 1995: each operand gathered along one axis, the product scattered along the third."""
    x = shape(16384, 16384)
    plan, found = compiled(
        lambda x, y: jnp.dot(x, y, precision="highest"),  # all that is sent is f32
        mesh_over(i=2, j=2, k=2),
        x,
        x,
        constraints={"x": P(("i", "j"), "k"), "y": P(("k", "i"), "j"), "result": P("i", ("j", "k"))},
    )
    block = nbytes(x) // 4
    wanted = [("all_gather", ("j",), block), ("all_gather", ("i",), block), ("reduce_scatter", ("k",), block)]
    assert sorted((c.kind, c.axes, c.bytes) for c in plan.collectives) == sorted(wanted)
    on_cpu = [(kind.replace("reduce_scatter", "all_reduce"), axes, size) for kind, axes, size in wanted]
    assert sorted((c.kind, c.axes, c.bytes) for c in found) == sorted(on_cpu)


def _layers_loss(weights: jax.Array, x: jax.Array) -> jax.Array:
    """A loop over stacked layers whose weights are converted where they are used, as mixed precision does."""

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weight.astype(jnp.bfloat16)), None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)


@pytest.mark.parametrize(("memory_budget", "times"), [("1GiB", 1), ("115MiB", 2)])
def test_weights_gathered_in_a_loop_are_kept_for_its_backward_pass(memory_budget: str, times: int) -> None:
    """The loop stacks its weights as they were read, whole; where memory is short, in pieces to be gathered again."""
    weights, x = shape(8, 2048, 2048), shape(8192, 2048, dtype=jnp.bfloat16)
    plan, _ = compiled(
        trained(_layers_loss), mesh_over(data=8), weights, x, donate_argnums=0,
        constraints={"weights": P(None, None, "data"), "batch0": P("data")}, memory_budget=memory_budget,
    )  # fmt: skip
    gathered = sum(c.bytes * c.trips for c in plan.collectives if c.kind == "all_gather")
    assert gathered == times * nbytes(weights) / 2


# -- language models ------------------------------------------------------------------------------------------


def _vocabulary_loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jnp.tanh(params["embed"][tokens] @ params["body"])
    logits = hidden @ params["head"]
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def test_a_large_vocabulary_gives_a_parallel_head_and_loss() -> None:
    """Logits are never gathered: what crosses devices of them is one number a token (maximum, sum, target)."""
    vocabulary, width, batch, length = 131072, 4096, 4, 64
    params = {
        "embed": shape(vocabulary, width), "body": shape(width, width), "head": shape(width, vocabulary),
    }  # fmt: skip
    tokens = shape(batch, length, dtype=jnp.int32)
    plan, found = compiled(
        trained(_vocabulary_loss), mesh_over(model=8), params, tokens, tokens, donate_argnums=0
    )
    assert plan.specs["weights/head"] == P(None, "model")
    assert plan.specs["weights/embed"] != P()
    token_bytes, hidden_bytes = batch * length * 4, batch * length * width * 4
    of_logits = [c for c in found if c.bytes == token_bytes]
    assert len(of_logits) >= 2 and {c.kind for c in of_logits} == {"all_reduce"}
    # Everything else is hidden states, each at most once in and once out of body and head.
    assert sum(sent(found).values()) <= 4 * hidden_bytes + 4 * token_bytes
    assert max(c.bytes for c in found) < batch * length * vocabulary * 4 / 8


# -- experts --------------------------------------------------------------------------------------------------


def _experts_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Top-1 routing with capacity, as in GShard: groups, tokens, experts, capacity, model dimension, hidden."""
    hidden = jnp.tanh(x @ params["in"])
    gate = jax.nn.softmax(hidden @ params["router"])
    chosen = jnp.where(gate == gate.max(-1, keepdims=True), gate, 0.0)
    position = jnp.cumsum((chosen > 0).astype(jnp.int32), axis=1) - 1
    combine = chosen[..., None] * (position[..., None] == jnp.arange(CAPACITY))
    dispatched = jnp.einsum("gtec,gtd->egcd", (combine > 0).astype(x.dtype), hidden)
    inner = jax.nn.relu(jnp.einsum("egcd,edh->egch", dispatched, params["up"]))
    expert_out = jnp.einsum("egch,ehd->egcd", inner, params["down"])
    return jnp.mean((hidden + jnp.einsum("gtec,egcd->gtd", combine, expert_out) - y) ** 2)


GROUPS, TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 64, 1024, 1024, 4096, 8, 128


def test_experts_lie_over_an_axis_and_tokens_go_to_them() -> None:
    """Two all_to_alls forward, two backward, of the dispatched tokens; dense layers stay data parallel."""
    params = {
        "in": shape(WIDTH, WIDTH), "router": shape(WIDTH, EXPERTS),
        "up": shape(EXPERTS, WIDTH, HIDDEN), "down": shape(EXPERTS, HIDDEN, WIDTH),
    }  # fmt: skip
    x = shape(GROUPS, TOKENS, WIDTH)
    plan, found = compiled(trained(_experts_loss), mesh_over(expert=8), params, x, x, donate_argnums=0)
    assert plan.specs["weights/up"] == plan.specs["weights/down"] == P("expert")
    dispatched_bytes = EXPERTS * GROUPS * CAPACITY * WIDTH * 4 // 8
    exchanges = [c for c in found if c.kind == "all_to_all"]
    assert [(c.bytes, c.axes) for c in exchanges] == [(dispatched_bytes, ("expert",))] * 4
    # What else travels are the dense layers' gradients and new values: no token, no expert's weight.
    dense = nbytes([params["in"], params["router"]])
    rest = sent([c for c in found if c.kind != "all_to_all"])
    assert set(rest) <= {"all_reduce", "all_gather", "reduce_scatter"}
    assert sum(rest.values()) <= 2 * dense + 4 * NEGLIGIBLE_BYTES


def test_a_barrier_around_a_tree_changes_no_layout() -> None:
    """Its values wait for each other, and lie each as it likes: decided together, twelve were too many choices."""

    def loss(weights: Any, x: Any, fence: Callable[[Any], Any]) -> Any:
        for up, down in fence(weights):
            x = jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    def step(fence: Callable[[Any], Any], weights: Any, x: Any) -> Any:
        gradients = fence(jax.grad(loss)(weights, x, fence))
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    weights = [(shape(256, 1024), shape(1024, 256))] * 6
    mesh, options = AbstractMesh((4, 2), ("data", "model")), {"compare_templates": False, "time_limit_s": 30.0}
    steps = [functools.partial(step, fence) for fence in (lambda tree: tree, jax.lax.optimization_barrier)]
    plans = [
        jaxplan.plan(one, mesh, weights, shape(4096, 256), hardware="tpu-v5e", options=options) for one in steps
    ]
    assert plans[1].cost.termination == "optimal"
    assert plans[1].cost.step_s == pytest.approx(plans[0].cost.step_s, rel=1e-3)
