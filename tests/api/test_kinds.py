"""What the inputs of a step are, where their own batch and their own loops tell it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxplan.api.kinds import input_kinds
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

S = jax.ShapeDtypeStruct
ROWS, DIM, WIDTH = 64, 16, 32
WEIGHTS = {"in": S((DIM, WIDTH), "float32"), "bias": S((WIDTH,), "float32"), "out": S((WIDTH, DIM), "float32")}


def network(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights["in"] + weights["bias"]) @ weights["out"]


def kinds(step: Any, *shapes: Any) -> dict[str, str]:
    traced = trace(step, shapes, {})
    return dict(zip(traced.graph.input_paths, input_kinds(traced.graph, graph_rules(traced.graph)), strict=True))


def test_environments_that_a_policy_acts_in_are_state() -> None:
    """Their rows meet the policy's weights and come back; learning looks at them in another order."""
    optimizer = optax.adam(1e-3)

    def step(state: Any) -> Any:
        def act(where: Any, key: Any) -> Any:
            moved = where + 0.1 * network(state["weights"], where) + jax.random.normal(key, where.shape)
            return moved, where

        where, seen = lax.scan(act, state["where"], jax.random.split(state["key"], 8))
        shuffled = jax.random.permutation(state["key"], seen.reshape(-1, DIM)).reshape(4, -1, DIM)

        def update(learner: Any, part: Any) -> Any:
            weights, moments = learner
            loss, gradients = jax.value_and_grad(lambda w: jnp.mean((network(w, part) - part) ** 2))(weights)
            updates, moments = optimizer.update(gradients, moments, weights)
            return (optax.apply_updates(weights, updates), moments), loss

        (weights, moments), losses = lax.scan(update, (state["weights"], state["moments"]), shuffled)
        return {"weights": weights, "moments": moments, "where": where, "key": state["key"]}, losses.mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    moments = jax.eval_shape(optimizer.init, WEIGHTS)
    state = {"weights": WEIGHTS, "moments": moments, "where": S((ROWS, DIM), "float32"), "key": key}
    found = kinds(step, state)
    assert found["state/where"] == "state"
    assert {kind for path, kind in found.items() if "weights" in path} == {"parameter"}
    # a loss in the loop's next iteration depends on moments, through the weights that they move
    assert {kind for path, kind in found.items() if "/mu/" in path or "/nu/" in path} == {"optimizer"}


def test_what_is_replaced_in_pieces_is_state_and_not_trained() -> None:
    """A replay buffer, a history of the largest values seen, both in products on the way to the loss."""

    def step(state: Any, seen: Any, at: Any, key: Any) -> Any:
        rows = lax.dynamic_update_slice(state["rows"], seen, (at, 0))
        x = rows[jax.random.randint(key, (ROWS,), 0, len(rows))]
        scaled = x / state["largest"].max(1).mean()
        loss, gradients = jax.value_and_grad(lambda w: jnp.mean((network(w, scaled) - x) ** 2))(state["weights"])
        largest = lax.scan(lambda _, row: (None, jnp.roll(row, 1).at[0].set(loss)), None, state["largest"])[1]
        weights = jax.tree.map(lambda w, g: w.at[0].set(0.0) - g, state["weights"], gradients)
        return {"weights": weights, "rows": rows, "largest": largest}, loss

    state = {"weights": WEIGHTS, "rows": S((8 * ROWS, DIM), "float32"), "largest": S((2, 16), "float32")}
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = kinds(step, state, S((4, DIM), "float32"), S((), "int32"), key)
    assert found["state/rows"] == found["state/largest"] == "state"
    assert {kind for path, kind in found.items() if "weights" in path} == {"parameter"}


def test_weights_of_networks_side_by_side_are_no_batch() -> None:
    many = jax.tree.map(lambda s: S((4, *s.shape), s.dtype), WEIGHTS)

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean((jax.vmap(network, (0, None))(weights, x) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    found = kinds(step, many, S((ROWS, DIM), "float32"))
    assert set(found.values()) == {"parameter", "batch"} and found["x"] == "batch"


def test_examples_of_an_ensemble_that_adam_trains_are_batch() -> None:
    """Most products have the ensemble's dimension first, as they would a batch's; so have Adam's moments."""
    optimizer = optax.adam(1e-3)
    many = [S((4, DIM, WIDTH), "float32"), S((4, WIDTH, WIDTH), "float32"), S((4, WIDTH, DIM), "float32")]

    def step(state: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            def one(weights: Any, x: Any) -> Any:
                for w in weights:
                    x = jnp.tanh(x @ w)
                return x

            return jnp.mean((jax.vmap(one, (0, None))(weights, x) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(state[0])
        updates, moments = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), moments), value

    found = kinds(step, (many, jax.eval_shape(optimizer.init, many)), S((ROWS, DIM), "float32"))
    assert found["x"] == "batch"
    assert {kind for path, kind in found.items() if path.startswith("state/0")} == {"parameter"}


def test_experts_that_every_token_goes_through_are_parameters() -> None:
    """Their products lead with the experts' dimension, which tokens have not, as those of a cache do with its batch."""
    optimizer = optax.adam(1e-3)
    weights = {
        "in": S((DIM, DIM), "float32"),
        "router": S((DIM, 4), "float32"),
        "up": S((4, DIM, WIDTH), "float32"),
        "down": S((4, WIDTH, DIM), "float32"),
    }

    def step(state: Any, x: Any) -> Any:
        @jax.checkpoint
        def loss(weights: Any) -> Any:
            hidden = jnp.tanh(x @ weights["in"])
            best, places = lax.top_k(jax.nn.softmax(hidden @ weights["router"]), 2)
            shares = (jax.nn.one_hot(places, 4) * best[..., None]).sum(2)
            made = jax.nn.relu(jnp.einsum("btd,edf->ebtf", hidden, weights["up"]))
            return jnp.mean((jnp.einsum("ebtf,efd,bte->btd", made, weights["down"], shares) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(state[0])
        updates, moments = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), moments), value

    found = kinds(step, (weights, jax.eval_shape(optimizer.init, weights)), S((ROWS, 8, DIM), "float32"))
    assert {kind for path, kind in found.items() if path.startswith("state/0")} == {"parameter"}
    assert found["x"] == "batch"


def test_real_images_beside_those_that_a_generator_makes_are_batch_and_frozen_weights_are_not() -> None:
    """Real ones go through fewer of the products, and have a batch of their own."""

    def step(weights: Any, frozen: Any, noise: Any, images: Any) -> Any:
        def made(up: Any) -> Any:
            return jnp.tanh(jnp.tanh(noise @ up) @ frozen["out"] + frozen["shift"])

        def score(down: Any, x: Any) -> Any:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ down[0]) @ down[1]) @ down[2])

        def fooled(up: Any) -> Any:
            return -score(weights["down"], made(up))

        def told(down: Any) -> Any:
            return score(down, lax.stop_gradient(made(weights["up"]))) - score(down, images)

        of_up, of_down = jax.value_and_grad(fooled)(weights["up"]), jax.value_and_grad(told)(weights["down"])
        gradients = {"up": of_up[1], "down": of_down[1]}
        return jax.tree.map(lambda w, g: w - g, weights, gradients), of_up[0] + of_down[0]

    weights = {
        "up": S((DIM, 32 * WIDTH), "float32"),
        "down": [S((DIM, WIDTH), "float32"), S((WIDTH, WIDTH), "float32"), S((WIDTH, 1), "float32")],
    }
    frozen = {"out": S((32 * WIDTH, DIM), "float32"), "shift": S((DIM,), "float32")}
    found = kinds(step, weights, frozen, S((ROWS, DIM), "float32"), S((ROWS, DIM), "float32"))
    assert found["noise"] == found["images"] == "batch"
    assert {kind for path, kind in found.items() if path not in ("noise", "images")} == {"parameter"}


def test_what_lies_beside_indices_that_are_only_read_is_batch() -> None:
    """Bags of weighted rows: scattering them hides that their batch is that of the products."""

    def step(weights: Any, table: Any, indices: Any, shares: Any, x: Any) -> Any:
        def loss(weights: Any, table: Any) -> Any:
            rows = table[indices.reshape(-1)] * shares.reshape(-1, 1)
            bags = jax.ops.segment_sum(rows, jnp.repeat(jnp.arange(ROWS), 4), num_segments=ROWS)
            return jnp.mean(network(weights, x + bags) ** 2)

        value, (own, rows) = jax.value_and_grad(loss, (0, 1))(weights, table)
        return jax.tree.map(lambda w, g: w - g, weights, own), table - rows, value

    bags = S((ROWS, 4), "int32"), S((ROWS, 4), "float32")
    shapes = (WEIGHTS, S((512, DIM), "float32"), *bags, S((ROWS, DIM), "float32"))
    found = kinds(step, *shapes)
    assert [found[name] for name in ("table", "indices", "shares", "x")] == ["parameter", "batch", "batch", "batch"]


def test_what_a_simulation_carries_is_state() -> None:
    """Products with constants make nothing a weight, and what reaches none is no optimizer's."""
    directions = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)

    def step(flow: Any, place: Any, wall: Any) -> Any:
        def move(flow: Any, _: Any) -> Any:
            speed = jnp.einsum("ia,iyx->ayx", directions, flow) / flow.sum(0)
            wanted = jnp.einsum("ia,ayx->iyx", directions, speed)
            return jnp.where(wall, flow, jnp.roll(wanted, 1, 1)), speed.mean()

        flow, speeds = lax.scan(move, flow, None, 4)
        return flow, {"at": place["at"] + speeds.mean()}, speeds

    shapes = S((9, ROWS, DIM), "float32"), {"at": S((ROWS, 3), "float32")}, S((ROWS, DIM), "bool")
    traced = trace(step, shapes, {}, donate_argnums=(0, 1))
    assert input_kinds(traced.graph, graph_rules(traced.graph)) == ("state", "state", "batch")


def test_what_a_search_of_beams_scores_is_state() -> None:
    """The weights are only read: nothing is optimised."""

    def step(weights: Any, beams: Any) -> Any:
        hidden = jnp.tanh(weights["table"][beams["tokens"]] @ weights["up"])
        total = beams["scores"][..., None] + jax.nn.log_softmax(hidden @ weights["out"])
        best, place = lax.top_k(total.reshape(8, -1), 4)
        return {"tokens": (place % 512).astype(jnp.int32), "scores": best}, best.max()

    weights = {"table": S((512, 64), "float32"), "up": S((64, 256), "float32"), "out": S((256, 512), "float32")}
    found = kinds(step, weights, {"tokens": S((8, 4), "int32"), "scores": S((8, 4), "float32")})
    assert (found.pop("beams/tokens"), found.pop("beams/scores")) == ("state", "state")
    assert set(found.values()) == {"parameter"}


def test_complex_weights_are_parameters_and_totals_of_metrics_are_state() -> None:
    optimizer = optax.adam(1e-3)
    weights = {**WEIGHTS, "spectrum": S((WIDTH, WIDTH), "complex64")}

    def step(weights: Any, moments: Any, totals: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = jnp.fft.ifft(jnp.fft.fft(x @ weights["in"]) @ weights["spectrum"]).real
            return jnp.mean(((hidden + weights["bias"]) @ weights["out"] - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), moments, {"loss": totals["loss"] + value}, value

    moments = jax.eval_shape(optimizer.init, weights)
    found = kinds(step, weights, moments, {"loss": S((), "float32")}, S((ROWS, DIM), "float32"))
    assert [found[f"weights/{name}"] for name in weights] == ["parameter"] * 4
    assert found["moments/0/mu/spectrum"] == found["moments/0/nu/spectrum"] == "optimizer"
    assert found["totals/loss"] == "state"
    assert found["x"] == "batch"


def test_scales_behind_the_last_product_are_parameters() -> None:
    """Quantised weights and a scale for each column, in a network that is only read."""

    def predict(weights: Any, x: Any) -> Any:
        for name in ("in", "out"):
            x = (x @ weights[name].astype(jnp.float32)) * weights[f"{name}_scale"]
        return x

    weights = {"in": S((DIM, WIDTH), "int8"), "out": S((WIDTH, DIM), "int8")}
    scales = {"in_scale": S((WIDTH,), "float32"), "out_scale": S((DIM,), "float32")}
    found = kinds(predict, weights | scales, S((ROWS, DIM), "float32"))
    assert found == {f"weights/{name}": "parameter" for name in (*weights, *scales)} | {"x": "batch"}
