"""GraphSAGE (Hamilton et al. 2017, arXiv:1706.02216) on a whole graph in plain jax: gathers and segment_sum.

As in the Open Graph Benchmark's examples, less the dropout: a layer is W1 x + W2 mean(x of the neighbours).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.training import (
    TINY_ADAM_EPSILON,
    Batch,
    Metrics,
    State,
    TrainStep,
    adamw,
    gradient_step,
    new_state,
    round_up,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A graph of `n_nodes` and `n_edges` directed edges; both are rounded up to `node_multiple` by padding.

    `multi_label`: `n_outputs` yes-or-no questions a node; else one class of as many.
    """

    n_nodes: int
    n_edges: int
    n_features: int
    n_outputs: int
    hidden_dim: int = 256
    n_layers: int = 3
    multi_label: bool = False
    node_multiple: int = 512
    dtype: str = "float32"
    learning_rate: float = 0.01
    adam_epsilon: float = 1e-5


_TINY = Config(
    n_nodes=64,
    n_edges=250,
    n_features=16,
    n_outputs=8,
    hidden_dim=32,
    node_multiple=8,
    adam_epsilon=TINY_ADAM_EPSILON,
)

# Graphs: Hu et al. 2020, arXiv:2005.00687, table 2, each edge in both directions; models: the "GraphSAGE" entries of
# the benchmark's leaderboards (examples/nodeproppred: 3 layers of 256).
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "tiny-multi-label": replace(_TINY, multi_label=True),
    "ogbn-products": Config(n_nodes=2449029, n_edges=2 * 61859140, n_features=100, n_outputs=47),
    "ogbn-proteins": Config(
        n_nodes=132534, n_edges=2 * 39561252, n_features=8, n_outputs=112, multi_label=True
    ),
}


def mean_of_neighbours(x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """For every node the mean of x [node, feature] over its incoming edges, 0 where it has none; sums in f32.

    Edges that only pad the lists have a receiver past the last node: segment_sum drops them.
    """
    n_nodes = x.shape[0]
    sums = jax.ops.segment_sum(x[senders].astype(jnp.float32), receivers, n_nodes)
    degrees = jax.ops.segment_sum(jnp.ones(receivers.shape, jnp.float32), receivers, n_nodes)
    return (sums / jnp.maximum(degrees, 1.0)[:, None]).astype(x.dtype)


def _forward(config: Config, params: Any, batch: Batch) -> jax.Array:
    """Logits [node, n_outputs] f32."""
    x = batch["features"].astype(config.dtype)
    for index, layer in enumerate(params):
        around = mean_of_neighbours(x, batch["senders"], batch["receivers"])
        x = x @ layer["own"].astype(config.dtype) + around @ layer["around"].astype(config.dtype)
        x = x + layer["bias"].astype(config.dtype)
        if index < len(params) - 1:
            x = jax.nn.relu(x)
    return x.astype(jnp.float32)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer moments."""
    dims = (config.n_features, *[config.hidden_dim] * (config.n_layers - 1), config.n_outputs)
    initialize = jax.nn.initializers.glorot_uniform()
    params = []
    for n_in, n_out in itertools.pairwise(dims):
        key, own_key, around_key = jax.random.split(key, 3)
        own, around = (initialize(k, (n_in, n_out)) for k in (own_key, around_key))
        params.append({"own": own, "around": around, "bias": jnp.zeros((n_out,))})
    return new_state(params, adamw(config.learning_rate, config.adam_epsilon))


def make_train_step(config: Config) -> TrainStep:
    """The step of the whole graph; metrics: `loss` in nats over the nodes that are no padding, `grad_norm`."""

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = _forward(config, params, batch)
        if config.multi_label:
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).mean(axis=-1)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        is_node = (jnp.arange(losses.shape[0]) < config.n_nodes).astype(jnp.float32)
        return jnp.sum(losses * is_node) / config.n_nodes, {}

    return gradient_step(loss_function, adamw(config.learning_rate, config.adam_epsilon))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """A random graph: `features` [node, n_features] f32, `senders` and `receivers` [edge] int32, and `labels`.

    Labels are [node] int32, or [node, n_outputs] f32 of 0 and 1 with `multi_label`.
    """
    feature_key, sender_key, receiver_key, label_key = jax.random.split(key, 4)
    n_nodes = round_up(config.n_nodes, config.node_multiple)
    edges = (round_up(config.n_edges, config.node_multiple),)
    is_edge = jnp.arange(edges[0]) < config.n_edges
    receivers = jax.random.randint(receiver_key, edges, 0, config.n_nodes, jnp.int32)
    if config.multi_label:
        labels = jax.random.bernoulli(label_key, 0.5, (n_nodes, config.n_outputs)).astype(jnp.float32)
    else:
        labels = jax.random.randint(label_key, (n_nodes,), 0, config.n_outputs, jnp.int32)
    return {
        "features": jax.random.normal(feature_key, (n_nodes, config.n_features), jnp.float32),
        "senders": jax.random.randint(sender_key, edges, 0, config.n_nodes, jnp.int32),
        "receivers": jnp.where(is_edge, receivers, n_nodes),
        "labels": labels,
    }


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
