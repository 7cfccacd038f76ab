"""jraph: its GraphNetwork and GAT, over one padded batch of graphs, as in its ogbg_molpcba example."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jraph

from .training import Case, array, integers, new_key, params_step, shapes_of

PACKAGE = "jraph"

NODES, EDGES, GRAPHS, WIDTH = 8192, 32768, 256, 256


def _graphs() -> jraph.GraphsTuple:
    return jraph.GraphsTuple(
        nodes=array(NODES, 9),
        edges=array(EDGES, 3),
        senders=integers(EDGES),
        receivers=integers(EDGES),
        n_node=integers(GRAPHS),
        n_edge=integers(GRAPHS),
        globals=array(GRAPHS, WIDTH),
    )


def graph_network() -> Any:
    """Four GraphNetwork steps with MLPs for edges, nodes and globals, and a mask for the padding."""

    def forward(graphs: jraph.GraphsTuple) -> jax.Array:
        def mlp() -> Any:
            return jraph.concatenated_args(lambda x: hk.nets.MLP([WIDTH, WIDTH])(x))

        embed = jraph.GraphMapFeatures(hk.Linear(WIDTH), hk.Linear(WIDTH), hk.Linear(WIDTH))
        graphs = embed(graphs)
        for _ in range(4):
            step = jraph.GraphNetwork(
                update_node_fn=mlp(), update_edge_fn=mlp(), update_global_fn=mlp()
            )
            graphs = step(graphs)
        return hk.Linear(128)(graphs.globals)

    network = hk.without_apply_rng(hk.transform(forward))
    graphs = _graphs()
    params = shapes_of(network.init, new_key(), graphs)

    def loss(params: Any, graphs: jraph.GraphsTuple, labels: jax.Array) -> jax.Array:
        logits = network.apply(params, graphs)
        mask = jraph.get_graph_padding_mask(graphs)[:, None]
        losses = jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
        return jnp.sum(losses * mask) / jnp.sum(mask)

    return params_step(loss, params, graphs, array(GRAPHS, 128))


def attention_network() -> Any:
    """Two graph attention layers: softmax over the edges of a node."""

    def forward(graphs: jraph.GraphsTuple) -> jax.Array:
        graphs = graphs._replace(edges=None)
        for width in (WIDTH, 64):
            layer = jraph.GAT(
                attention_query_fn=lambda nodes, width=width: hk.Linear(width)(nodes),
                attention_logit_fn=lambda sent, received, _: hk.Linear(1)(
                    jax.nn.leaky_relu(jnp.concatenate([sent, received], axis=1))
                ),
                node_update_fn=lambda nodes: jax.nn.elu(nodes),
            )
            graphs = layer(graphs)
        return graphs.nodes

    network = hk.without_apply_rng(hk.transform(forward))
    graphs = _graphs()
    params = shapes_of(network.init, new_key(), graphs)

    def loss(params: Any, graphs: jraph.GraphsTuple, labels: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(network.apply(params, graphs))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))

    return params_step(loss, params, graphs, integers(NODES))


CASES: dict[str, Case] = {"GraphNetwork": graph_network, "GAT": attention_network}
