"""Programs that became something else than was decided, until more of the decision was written down."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

import jaxplan

MESH = AbstractMesh((4, 2), ("data", "model"))


def surprises(step: Any, *shapes: Any) -> list[str]:
    """What the plan warns of, no template to fall back on."""
    plan = jaxplan.plan(step, MESH, *shapes, hardware="tpu-v5e", options={"compare_templates": False})
    return [warning for warning in plan.warnings if "the partitioner adds" in warning]


def test_what_is_made_whole_and_reshaped_for_one_reader_stays_whole() -> None:
    """Evolution strategies: a population, made whole on every device, of which one reader cuts the members, and others
    the numbers of each. Propagation cut the numbers, and the reshape before the first reader gathered them."""
    members, numbers = 1024, 64 * 416

    def step(mean: jax.Array, best: jax.Array, key: jax.Array, x: jax.Array) -> Any:
        half = jax.random.normal(key, (members // 2, numbers))
        population = mean + 0.1 * jnp.concatenate([half, -half])
        fitness = jax.vmap(lambda w: jnp.mean((jnp.tanh(x @ w.reshape(64, -1)) - 1) ** 2))(population)
        better = population[jnp.argmin(fitness)]
        slope = jnp.dot(fitness, population - mean) / members
        return mean - 0.01 * slope, jnp.where(fitness[0] < 1, better, best)

    vector = jax.ShapeDtypeStruct((numbers,), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert surprises(step, vector, vector, key, jax.ShapeDtypeStruct((1024, 64), jnp.float32)) == []


def descents(weights: jax.Array, limits: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    """Many logistic regressions, each for as long as it takes: batched loops in a batched loop."""

    def one(w: jax.Array, limit: jax.Array) -> Any:
        def inner(state: Any) -> Any:
            count, w, error = state
            residual = jax.nn.sigmoid(x @ w) - y
            return count + 1, w - 0.1 * (residual @ x), error + (w * w).sum()

        def outer(state: Any) -> Any:
            count, w, error, seen = state
            _, w, error = jax.lax.while_loop(lambda s: (s[0] < limit) & (s[2] < 9.0), inner, (0, w, error))
            return count + 1, w, error, seen.at[count % 6].set(w)

        first = (0, w, 0.0, jnp.zeros((6, *w.shape)))
        return jax.lax.while_loop(lambda s: (s[0] < limit) & (s[2] < 7.0), outer, first)

    return jax.vmap(one)(weights, limits)


def test_a_batched_loop_of_which_one_carry_is_cut_keeps_its_other_carries_whole() -> None:
    """What went into, through and out of the loops was cut, from the one carry on, and gathered in every iteration."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 128), (8192, 128), (8192,))]
    assert surprises(descents, shapes[0], jax.ShapeDtypeStruct((256,), jnp.int32), *shapes[1:]) == []


def test_what_a_loop_goes_through_is_read_by_both_of_two_networks_as_decided() -> None:
    """An actor whose batch is cut over both axes beside an ensemble of critics cut over one: the slice that both read
    was cut as for the actor, and what the critics read, joined to its actions, gathered again in every update."""

    def network(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.tanh(x @ weights["in"]) @ weights["hidden"]) @ weights["out"]

    def step(actor: Any, critics: Any, seen: jax.Array) -> Any:
        def update(state: Any, x: jax.Array) -> Any:
            actor, critics = state

            def values(actor: Any, critics: Any) -> jax.Array:
                both = jnp.concatenate([x, jnp.tanh(network(actor, x))], -1)
                return jax.vmap(lambda weights: network(weights, both))(critics)

            def errors(critics: Any) -> jax.Array:
                return jnp.mean((values(actor, critics) - x[:, :1]) ** 2)

            critics = jax.tree.map(lambda w, g: w - g, critics, jax.grad(errors)(critics))
            slopes = jax.grad(lambda actor: -values(actor, critics).mean())(actor)
            return (jax.tree.map(lambda w, g: w - g, actor, slopes), critics), None

        return jax.lax.scan(update, (actor, critics), seen)[0]

    def weights(*ensemble: int, inputs: int, outputs: int) -> Any:
        shapes = {"in": (inputs, 1024), "hidden": (1024, 1024), "out": (1024, outputs)}
        return {name: jax.ShapeDtypeStruct((*ensemble, *shape), jnp.float32) for name, shape in shapes.items()}

    actor, critics = weights(inputs=376, outputs=17), weights(10, inputs=393, outputs=1)
    assert surprises(step, actor, critics, jax.ShapeDtypeStruct((8, 4096, 376), jnp.float32)) == []


def test_its_numbers_are_those_of_one_device(mesh_4x2: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    weights, x = jax.random.normal(keys[0], (16, 8)) / 3, jax.random.normal(keys[1], (64, 8))
    args = weights, jnp.arange(16) % 5, x, (jax.random.uniform(keys[2], (64,)) > 0.5).astype(jnp.float32)
    planned = jaxplan.auto_shard(descents, mesh_4x2, hardware="tpu-v5e", options={"compare_templates": False})
    for one, sharded in zip(jax.jit(descents)(*args), planned(*map(np.asarray, args)), strict=True):
        np.testing.assert_allclose(sharded, one, rtol=1e-5, atol=1e-6)


def test_complex_numbers_among_a_programs_constants_are_no_hindrance() -> None:
    """A spectral solver's."""
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    assert surprises(lambda x: jnp.fft.ifft(jnp.fft.fft(x) * (2j * jnp.pi)).real, x) == []


def test_what_is_computed_again_takes_what_it_reads_as_it_was_decided_behind_its_barrier() -> None:
    """A loss in chunks: the second product of each cut the vocabulary's matrix, through the barrier, for the first."""
    width, words, chunk = 2048, 50257, 1024

    def step(weights: Any, x: jax.Array, tokens: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            @jax.checkpoint
            def of(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
                scores = (rows[0] @ weights["words"]).astype(jnp.float32)
                right = jnp.take_along_axis(scores, rows[1][:, None], -1)[:, 0]
                return (jax.nn.logsumexp(scores, -1) - right).sum()

            return jax.lax.map(of, (x * weights["scale"], tokens)).sum()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    weights = {"scale": shape(width), "words": shape(width, words)}
    tokens = jax.ShapeDtypeStruct((32, chunk), jnp.int32)
    assert surprises(step, weights, shape(32, chunk, width), tokens) == []
