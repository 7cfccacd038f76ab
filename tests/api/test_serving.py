"""Steps that serve: weights that are only read, caches that are written, loops that generate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.api.kinds import input_kinds
from jaxplan.ir import trace
from jaxplan.sharding import graph_rules

VOCABULARY, DIM, BATCH = 4096, 256, 8


def _generate(embedding: jax.Array, up: jax.Array, token: jax.Array) -> jax.Array:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, token = state
        logits = embedding[token] @ up @ embedding.T
        return count + 1, lax.top_k(logits, 4)[1][:, 0]

    return lax.while_loop(lambda state: state[0] < 8, body, (jnp.int32(0), token))[1]


def test_weights_that_a_loop_reads_in_two_layouts_stay_as_planned_inside() -> None:
    plan = jaxplan.plan(
        _generate,
        AbstractMesh((4, 2), ("data", "model")),
        jax.ShapeDtypeStruct((VOCABULARY, DIM), "float32"),
        jax.ShapeDtypeStruct((DIM, DIM), "float32"),
        jax.ShapeDtypeStruct((BATCH,), "int32"),
        hardware="cpu-host",
        options={"compare_templates": False},
    )
    # The embedding is whole everywhere and cut differently by its two readers, which is free: propagation would cut it
    # for the first of them at the loop's entry, and gather it for the second in every iteration.
    assert max(c.bytes for c in plan.collectives) < VOCABULARY * DIM
    assert not plan.warnings
    assert plan.cost.step_s <= 1.01 * plan.cost.objective_s


Cache = dict[str, jax.Array]
SHAPES = {
    "token": (512, 64), "position": (32, 64), "query": (2, 64, 4, 16), "key": (2, 64, 4, 16), "value": (2, 64, 4, 16),
    "out": (2, 4, 16, 64), "up": (2, 64, 128), "down": (2, 128, 64),
}  # fmt: skip
WEIGHTS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
CACHE = {name: jax.ShapeDtypeStruct((2, BATCH, 32, 4, 16), jnp.float32) for name in ("keys", "values")}


def _layers(weights: Cache, x: jax.Array, attend: object) -> tuple[jax.Array, Cache]:
    def layer(x: jax.Array, given: tuple[Cache, Cache]) -> tuple[jax.Array, Cache]:
        own, cache = given
        mixed, cache = attend(own, x, cache)  # type: ignore[operator]
        x = x + jnp.einsum("...hk,hkd->...d", mixed, own["out"])
        return x + jax.nn.gelu(x @ own["up"]) @ own["down"], cache

    stacked = {name: array for name, array in weights.items() if name not in ("token", "position")}
    return lax.scan(layer, x, (stacked, weights.pop("cache")))  # type: ignore[return-value]


def _decode(weights: Cache, cache: Cache, token: jax.Array, at: jax.Array) -> tuple[Cache, jax.Array]:
    """The next token's logits, [batch, vocabulary]; a cache of [layers, batch, length, heads, head] is written `at`."""

    def attend(own: Cache, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        query, key, value = (jnp.einsum("bd,dhk->bhk", x, own[name]) for name in ("query", "key", "value"))
        keys = lax.dynamic_update_slice(cache["keys"], key[:, None], (0, at, 0, 0))
        values = lax.dynamic_update_slice(cache["values"], value[:, None], (0, at, 0, 0))
        scores = jnp.where(jnp.arange(32) <= at, jnp.einsum("bhk,bthk->bht", query, keys), -1e9)
        mixed = jnp.einsum("bht,bthk->bhk", jax.nn.softmax(scores), values)
        return mixed, {"keys": keys, "values": values}

    x = weights["token"][token] + weights["position"][at]
    x, cache = _layers({**weights, "cache": cache}, x, attend)  # type: ignore[dict-item]
    return cache, x @ weights["token"].T


def _prefill(weights: Cache, tokens: jax.Array) -> jax.Array:
    """[batch, length] -> [batch, length, vocabulary]."""

    def attend(own: Cache, x: jax.Array, cache: None) -> tuple[jax.Array, None]:
        query, key, value = (jnp.einsum("btd,dhk->bthk", x, own[name]) for name in ("query", "key", "value"))
        weight = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", query, key))
        return jnp.einsum("bhqt,bthk->bqhk", weight, value), None

    x = weights["token"][tokens] + weights["position"]
    x, _ = _layers({**weights, "cache": None}, x, attend)  # type: ignore[dict-item]
    return x @ weights["token"].T


def _kinds(step: object, *shapes: object, donated: tuple[int, ...] = ()) -> dict[str, str]:
    traced = trace(step, shapes, {}, donate_argnums=donated)  # type: ignore[arg-type]
    kinds = input_kinds(traced.graph, graph_rules(traced.graph))
    return dict(zip(traced.graph.input_paths, kinds, strict=True))


def test_weights_that_are_only_read_are_parameters_and_a_cache_is_state() -> None:
    token, at = jax.ShapeDtypeStruct((BATCH,), "int32"), jax.ShapeDtypeStruct((), "int32")
    kinds = _kinds(_decode, WEIGHTS, CACHE, token, at, donated=(1,))
    weights = {f"weights/{name}": "parameter" for name in WEIGHTS}
    assert kinds == weights | {"cache/keys": "state", "cache/values": "state", "token": "batch", "at": "batch"}

    tokens = jax.ShapeDtypeStruct((BATCH, 32), "int32")
    assert _kinds(_prefill, WEIGHTS, tokens) == weights | {"tokens": "batch"}


def test_features_that_a_network_reads_are_its_batch() -> None:
    def predict(up: jax.Array, down: jax.Array, features: jax.Array, scale: jax.Array) -> jax.Array:
        return jax.nn.relu(features * scale @ up) @ down

    def train(up: jax.Array, down: jax.Array, features: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        def loss(up: jax.Array, down: jax.Array) -> jax.Array:
            return jnp.mean(predict(up, down, features, scale) ** 2)

        value, (dup, ddown) = jax.value_and_grad(loss, (0, 1))(up, down)
        return up - dup, down - ddown, value

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 128), (128, 64), (BATCH, 64), (BATCH, 1))]
    expected = {"up": "parameter", "down": "parameter", "features": "batch", "scale": "batch"}
    assert _kinds(predict, *shapes) == expected
    assert _kinds(train, *shapes, donated=(0, 1)) == expected

    def towers(weight: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.sum(left @ weight) + jnp.sum(right @ weight)

    # Their rows have nothing to do with each other: neither is in both products, and the weight's columns are no batch.
    two = [shapes[0], shapes[2], jax.ShapeDtypeStruct((12, 64), "float32")]
    assert _kinds(towers, *two) == dict.fromkeys(("weight", "left", "right"), "batch")
