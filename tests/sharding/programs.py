"""Small programs with shardings, and what they communicate: the ground on which the partitioner is held."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = (("data", 4), ("model", 2))
LAYERS, BATCH, WIDTH, HIDDEN = 3, 16, 32, 64
HIGHEST = jax.lax.Precision.HIGHEST


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def lowered(fn: Any, mesh: Any, ins: Any, outs: Any, *shapes: Any) -> Any:
    def placed(spec: Any) -> Any:
        return jax.tree.map(lambda s: NamedSharding(mesh, s), spec, is_leaf=lambda s: isinstance(s, P))

    return jax.jit(fn, in_shardings=placed(ins), out_shardings=placed(outs)).lower(*shapes)


def dot(x: Any, w: Any) -> Any:
    return jnp.dot(x, w, precision=HIGHEST)


def mlp_step(params: Any, x: Any, y: Any) -> Any:
    """One SGD step of a scanned residual MLP."""

    def loss_of(params: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + dot(jnp.tanh(dot(h, w["up"])), w["down"]), None

        h, _ = jax.lax.scan(layer, x, params)
        return jnp.mean((h - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


REPLICATED = {"up": P(), "down": P()}
MEGATRON = {"up": P(None, None, "model"), "down": P(None, "model")}
FSDP = {"up": P(None, "data"), "down": P(None, None, "data")}
FSDP_TENSOR = {"up": P(None, "data", "model"), "down": P(None, "model", "data")}
CROSSED = {"up": P(None, None, "data"), "down": P(None, "data")}


def mlp(mesh: Any, before: Any, after: Any, batch: P, *, scale: int = 1) -> Any:
    """The step lowered, `scale` times as wide and long in each dimension but the layers."""
    width, hidden = scale * WIDTH, scale * HIDDEN
    params = {"up": shape(LAYERS, width, hidden), "down": shape(LAYERS, hidden, width)}
    x = shape(scale * BATCH, width)
    return lowered(mlp_step, mesh, (before, batch, batch), (after, P()), params, x, x)


MLPS = {
    "data parallel": (REPLICATED, REPLICATED, P(("data", "model"))),
    "megatron": (MEGATRON, MEGATRON, P("data")),
    "gradients scattered": (REPLICATED, FSDP, P("data")),
    "fsdp": (FSDP, FSDP, P(("data", "model"))),
    "fsdp x tensor": (FSDP_TENSOR, FSDP_TENSOR, P("data")),
    "activations cut by features": (CROSSED, CROSSED, P(None, "model")),
}


def attention(x: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
    heads = [jnp.einsum("bsd,dhk->bshk", x, w) for w in (q, k, v)]
    weights = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", heads[0], heads[1]))
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", weights, heads[2]), out)


def attention_gradients(x: Any, *weights: Any) -> Any:
    return jax.grad(lambda ws: jnp.sum(attention(x, *ws) ** 2))(weights)


def convolution(x: Any, kernel: Any) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=HIGHEST
    )


def kernel_gradient(x: Any, kernel: Any) -> Any:
    return jax.grad(lambda k: jnp.sum(convolution(x, k) ** 2))(kernel)


def embedding_gradient(table: Any, tokens: Any, cotangent: Any) -> Any:
    return jax.grad(lambda t: jnp.sum(t[tokens] * cotangent))(table)


def vocabulary_loss(x: Any, w: Any, targets: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(dot(x, w)), targets[:, None], 1))


def experts(mesh: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        tokens = jax.lax.with_sharding_constraint(x.transpose(1, 0, 2), NamedSharding(mesh, P("data")))
        return jnp.einsum("egd,edf->egf", tokens, w)

    return lowered(step, mesh, (P("data"), P("data")), P("data"), shape(8, 8, 32), shape(8, 32, 16))


def grouped_kernel_gradient(x: Any, cotangent: Any) -> Any:
    """Of a convolution in four groups, summed over the channels that it makes."""

    def grouped(kernel: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=4, precision=HIGHEST
        )

    _, pull = jax.vjp(grouped, jnp.zeros((3, 3, 4, 16)))
    return jnp.sum(jnp.tanh(pull(cotangent)[0]), 3)


SQUARE, IMAGES, KERNEL = shape(64, 64), shape(16, 8, 8, 16), shape(3, 3, 16, 32)
TOKENS = shape(64, dtype=jnp.int32)
TABLE = (shape(128, 32), TOKENS)
HEADS = (shape(8, 16, 32), *(shape(32, 4, 8),) * 3, shape(4, 8, 32))
HEADS_TENSOR = (*(P(None, "model"),) * 3, P("model"))
HEADS_FSDP = (*(P("data"),) * 3, P(None, None, "data"))
HEADS_2D = (*(P("data", "model"),) * 3, P("model", None, "data"))
PROGRAMS = {
    "dimension changed": (lambda x: x * 2, (P("data"),), P(None, "data"), SQUARE),
    "gathered": (lambda x: x * 2, (P("data"),), P(), SQUARE),
    "axes swapped in place": (lambda x: x * 2, (P("data", "model"),), P("model", "data"), SQUARE),
    "axes of one dimension": (lambda x: x * 2, (P(("data", "model")),), P(("model", "data")), SQUARE),
    "operands disagree": (jnp.add, (P("data"), P(None, "data")), P("data"), SQUARE, SQUARE),
    "result disagrees": (jnp.add, (P("data"), P("data")), P(None, "data"), SQUARE, SQUARE),
    "contraction cut twice": (dot, (P(None, "data"), P("data")), P("data"), SQUARE, SQUARE),
    "contraction cut once": (dot, (P(None, "data"), P()), P(), shape(64, 512), shape(512, 64)),
    "lone contraction beside": (dot, (P("model", "data"), P()), P("model"), shape(64, 512), shape(512, 64)),
    "weight gathered": (dot, (P("data"), P(None, "data")), P("data"), SQUARE, SQUARE),
    "features gathered": (dot, (P("data"), P(None, "data")), P(None, "data"), SQUARE, SQUARE),
    "2-D weight": (dot, (P("data", "model"), P("model", "data")), P("data", "model"), SQUARE, SQUARE),
    "summed and scattered": (dot, (P("data", "model"), P("model")), P("data", "model"), SQUARE, SQUARE),
    "normalised": (lambda x: x / jnp.sum(x, -1, keepdims=True), (P("data", "model"),), P("data"), SQUARE),
    "sorted": (jnp.sort, (P("data", "model"),), P("data", "model"), SQUARE),
    "transposed": (jnp.transpose, (P("data", "model"),), P("data", "model"), SQUARE),
    "embedding rows": (lambda t, i: t[i], (P("model"), P("data")), P("data"), *TABLE),
    "embedding gradient": (
        embedding_gradient, (P("model"), P("data"), P("data")), P("model"), *TABLE, shape(64, 32),
    ),
    "vocabulary loss": (
        vocabulary_loss, (P("data"), P(None, "model"), P("data")), P(), shape(64, 32), shape(32, 128), TOKENS,
    ),
    "convolution, kernel gathered": (
        convolution, (P("data"), P(None, None, "data")), P("data"), IMAGES, KERNEL,
    ),
    "convolution, channels summed": (
        convolution, (P("data", None, None, "model"), P(None, None, "model")), P("data"), IMAGES, KERNEL,
    ),
    "grouped kernel gradient, groups cut": (
        grouped_kernel_gradient, (P(None, None, None, "data"), P(None, None, None, "data")), P(), IMAGES, IMAGES,
    ),
    "kernel gradient scattered": (
        kernel_gradient, (P("data"), P(None, None, "data")), P(None, None, "data"), IMAGES, KERNEL,
    ),
    "attention, heads cut": (attention_gradients, (P("data"), *HEADS_TENSOR), HEADS_TENSOR, *HEADS),
    "attention, fsdp": (attention_gradients, (P("data"), *HEADS_FSDP), HEADS_FSDP, *HEADS),
    "attention, fsdp x heads": (attention_gradients, (P("data"), *HEADS_2D), HEADS_2D, *HEADS),
}  # fmt: skip


def volumes(collectives: Any, *, scatter: bool) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes a step by kind and axes; without `scatter` (CPU) a reduce_scatter counts as its all_reduce."""
    total: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for c in collectives:
        if c.kind != "all_slice":
            kind = "all_reduce" if c.kind == "reduce_scatter" and not scatter else c.kind
            total[kind, c.axes] += c.bytes * c.trips
    return dict(total)
