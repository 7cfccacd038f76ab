"""Weights' gradients that XLA for TPU v5e runs behind the backward pass, beside gathers of updated weights."""

import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxplan
from jaxplan.cost.beside_gathers import beside_gathers
from jaxplan.hardware import compile_for, load_profile
from jaxplan.lowering import compiled_memory

LAYERS, WIDTH, BATCH, LENGTH = 3, 1024, 16, 2048
HIDDEN = 4 * WIDTH
HIDDEN_BYTES = BATCH // 8 * LENGTH * HIDDEN * 2
OPTIMIZER = optax.adamw(1e-3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(8, dtype=jnp.bfloat16, use_bias=False)(y, y, mask=mask)
        y = nn.Dense(HIDDEN, dtype=jnp.bfloat16, use_bias=False)(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16, use_bias=False)(nn.gelu(y))


class Gpt(nn.Module):
    words: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.words, WIDTH, dtype=jnp.bfloat16)
        x = embedding(tokens)
        for _ in range(LAYERS):
            x = nn.remat(Block)()(x)
        return embedding.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def step_and_shapes(words: int) -> tuple[Any, Any]:
    net = Gpt(words)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    weights = jax.eval_shape(net.init, jax.random.key(0), tokens)

    def step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        def loss(weights: Any) -> jax.Array:
            logits = net.apply(weights, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        weights, moments = state
        lost, gradients = jax.value_and_grad(loss)(weights)
        updates, moments = OPTIMIZER.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), lost

    return step, ((weights, jax.eval_shape(OPTIMIZER.init, weights)), tokens, tokens)


def planned(search: str, target: str, words: int) -> tuple[Any, Any, Any, Any]:
    chips = jaxplan.target(target)
    mesh = chips.mesh(data=8 if "4x4" in target else 4, model=2)
    step, shapes = step_and_shapes(words)
    hardware = target.split(":")[0]
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware=hardware, options={"search": search})
    return sharded, shapes, mesh, chips.compiler_options


def test_recomputed_layers_are_kept_where_weights_are_gathered_beside_products() -> None:
    """On eight v5e; v6e gathers in kernels of their own, and sixteen v5e make sums whole, in one."""

    def kept(target: str) -> int:
        sharded, shapes, *_ = planned("zero1", target, 8000)
        return int(sharded.plan(*shapes).cost.peak_parts["activations"])

    assert kept("tpu-v5e:2x4") > kept("tpu-v6e:2x4") + LAYERS * HIDDEN_BYTES
    assert kept("tpu-v5e:4x4") < kept("tpu-v6e:4x4") + HIDDEN_BYTES


@pytest.mark.aot_tpu
@pytest.mark.parametrize("words", [8000, 64000])
def test_compiled_for_tpu_the_step_takes_as_much(words: int, tpu_topology: Callable[[str], Any]) -> None:
    """Layers' gradients run late, and the loss' lookups in logits that are cut over 64000 words."""
    sharded, shapes, mesh, options = planned("zero1", "tpu-v5e:2x4", words)
    predicted = sharded.plan(*shapes).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*shapes), mesh, options)).peak_bytes
    assert 0.93 * compiled < predicted < 1.1 * compiled


def test_which_chips_gather_in_products() -> None:
    assert [load_profile(f"tpu-{name}").gathers_in_products for name in ("v5e", "v5p", "v6e")] == [1, 0, 0]


def gated_step(biased: bool, layers: int = 4) -> tuple[Any, Any]:
    """Blocks that are computed again, whose condition scales what they add: a diffusion transformer's."""
    width, tokens, heads = 512, 1024, 8

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w.astype(jnp.bfloat16)

    def normed(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide -= wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(jnp.bfloat16)

    @jax.checkpoint
    def block(w: Any, x: jax.Array, condition: jax.Array) -> jax.Array:
        gates = jnp.split(dense(jax.nn.silu(condition), w["gates"])[:, None], 6, -1)
        y = normed(x) * (1 + gates[1]) + gates[0]
        q, k, v = jnp.split(dense(y, w["qkv"]).reshape(*y.shape[:2], 3 * heads, -1), 3, 2)
        x = x + gates[2] * dense(jax.nn.dot_product_attention(q, k, v).reshape(x.shape), w["out"])
        y = normed(x) * (1 + gates[4]) + gates[3]
        y = dense(jax.nn.gelu(dense(y, w["up"])), w["down"])
        return x + gates[5] * (y + w["bias"].astype(jnp.bfloat16) if biased else y)

    def step(state: Any, x: jax.Array, condition: jax.Array) -> tuple[Any, jax.Array]:
        def loss(weights: Any) -> jax.Array:
            y, c = x.astype(jnp.bfloat16), dense(condition.astype(jnp.bfloat16), weights["condition"])
            for w in weights["blocks"]:
                y = block(w, y, c)
            return jnp.square(y.astype(jnp.float32)).mean()

        weights, moments = state
        lost, gradients = jax.value_and_grad(loss)(weights)
        updates, moments = OPTIMIZER.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), lost

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    names = {"gates": (1, 6), "qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    block_of = {name: of(a * width, b * width) for name, (a, b) in names.items()} | {"bias": of(width)}
    weights = {"blocks": [block_of] * layers, "condition": of(256, width)}
    return step, ((weights, jax.eval_shape(OPTIMIZER.init, weights)), of(64, tokens, width), of(64, 256))


def gated(target: str, biased: bool) -> tuple[Any, Any, Any, Any]:
    chips = jaxplan.target(target)
    step, shapes = gated_step(biased)
    options = {"search": "data", "compare_templates": False}
    mesh = chips.mesh(data=4, model=2)
    hardware = target.split(":")[0]
    sharded = jaxplan.auto_shard(step, mesh, donate_argnums=0, hardware=hardware, options=options)
    return sharded, shapes, mesh, sharded.plan(*shapes)


def test_products_for_gates_wait_for_the_gathers_that_wait_for_them_alone() -> None:
    """Of each block what its last product reads is kept on v5e, where gathers are beside products."""
    hidden = 64 // 8 * 1024 * 4 * 512 * 2
    *_, plan = gated("tpu-v5e:2x4", biased=True)
    *_, other = gated("tpu-v5e:2x4", biased=False)
    assert any(one.kind == "all_gather" for one in plan.collectives)
    assert plan.cost.peak_parts["activations"] > other.cost.peak_parts["activations"] + 2 * hidden


@pytest.mark.aot_tpu
@pytest.mark.parametrize("biased", [True, False])
def test_gated_blocks_take_as_much_when_compiled(biased: bool) -> None:
    sharded, shapes, mesh, plan = gated("tpu-v5e:2x4", biased)
    compiled = compile_for(sharded.lower(*shapes), mesh, jaxplan.target("tpu-v5e:2x4").compiler_options)
    # gaps are another model's (`packing`), which says 46 and 63 MB here where XLA leaves 19 and none
    alive = plan.cost.peak_bytes - plan.cost.peak_parts.get("gaps", 0)
    assert abs(alive / compiled_memory(compiled).peak_bytes - 1) < 0.03
    assert -0.08 < plan.cost.peak_bytes / compiled_memory(compiled).peak_bytes - 1 < 0.09


def mlp_step(small: str, clipped: bool, rows: int) -> tuple[Any, Any]:
    """Adam's step of residual layers with scales or biases, with or without clipping of their gradients."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for layer in weights:
            y = x * layer["scale"].astype(x.dtype) if small == "scale" else x
            y = y @ layer["in"].astype(x.dtype)
            y = nn.gelu(y + layer["bias"].astype(x.dtype) if small == "bias" else y)
            x = x + y @ layer["out"].astype(x.dtype)
        return jnp.square(x.astype(jnp.float32)).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), OPTIMIZER) if clipped else OPTIMIZER

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        weights, moments = state
        lost, gradients = jax.value_and_grad(loss)(weights, x)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), lost

    sizes = {"in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH), "scale": (WIDTH,), "bias": (HIDDEN,)}
    kept = {name: jax.ShapeDtypeStruct(sizes[name], jnp.float32) for name in ("in", "out", small)}
    weights = [kept] * 6
    state = weights, jax.eval_shape(optimizer.init, weights)
    return step, (state, jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16))


def mlp(small: str, clipped: bool, rows: int, search: str = "zero1") -> tuple[Any, Any, Any, Any]:
    step, shapes = mlp_step(small, clipped, rows)
    chips = jaxplan.target("tpu-v5e:2x4")
    mesh = chips.mesh(data=8)
    options = {"search": search, "compare_templates": False}
    return jaxplan.auto_shard(step, mesh, donate_argnums=0, options=options), shapes, mesh, chips.compiler_options


def test_where_scales_are_gathered_all_gradients_wait() -> None:
    """The backward pass goes on with what is made beside what their one sum over devices adds up."""

    def peak(clipped: bool) -> int:
        sharded, shapes, *_ = mlp("scale", clipped, 2**16)
        return int(sharded.plan(*shapes).cost.peak_bytes)

    assert peak(clipped=False) > peak(clipped=True) + 4 * (2**16 // 8 * HIDDEN * 2)


@pytest.mark.parametrize("search", ["zero1", "fsdp"])
def test_clipped_gradients_are_summed_behind_the_backward_pass(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for the norm; where the step gathers nothing at its end, sums stand where gradients are made."""
    found: list[tuple[Any, Any]] = []

    def recorded(graph: Any, *others: Any) -> Any:
        found.append((graph, beside_gathers(graph, *others)))
        return found[-1][1]

    monkeypatch.setattr(sys.modules["jaxplan.cost.deferred"], "beside_gathers", recorded)
    sharded, shapes, *_ = mlp("scale", True, 2**16, search)
    sharded.plan(*shapes)
    graph, late = found[-1]
    products = [op.index for op in graph.ops if op.primitive == "dot_general"]
    sums = [at for value, at in late.sums.items() if graph.producers()[value] in products]
    assert [at >= products[-2] for at in sums] == ([True] * 12 if search == "zero1" else [])


@pytest.mark.slow
@pytest.mark.aot_tpu
@pytest.mark.parametrize(("small", "clipped"), [("scale", False), ("bias", False), ("scale", True)])
def test_layers_take_as_much_when_compiled(small: str, clipped: bool) -> None:
    sharded, shapes, mesh, options = mlp(small, clipped, 2**15)
    predicted = sharded.plan(*shapes).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*shapes), mesh, options)).peak_bytes
    assert 0.93 * compiled < predicted < 1.1 * compiled
