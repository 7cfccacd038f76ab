"""DLRM (Naumov et al. 2019, arXiv:1906.00091) in plain jax: big embedding tables, their products, two small MLPs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.training import Batch, Metrics, State, TrainStep, gradient_step, new_state, round_up


@dataclass(frozen=True, kw_only=True)
class Config:
    """`table_rows` rows in each table, rounded up to `vocab_multiple`; `bottom_dims` end in `embedding_dim`.

    `top_dims` are the hidden widths of the upper MLP: one logit follows.
    """

    table_rows: tuple[int, ...]
    embedding_dim: int
    bottom_dims: tuple[int, ...]
    top_dims: tuple[int, ...]
    batch_size: int
    n_dense: int = 13
    vocab_multiple: int = 8
    dtype: str = "bfloat16"
    learning_rate: float = 0.01


_TINY = Config(
    table_rows=(256, 100, 64, 30, 7, 3),
    embedding_dim=16,
    bottom_dims=(32, 16),
    top_dims=(64, 32),
    n_dense=5,
    batch_size=16,
    dtype="float32",
)

# Rows of the 26 categorical features, as the published preprocessing counts them.
_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_TERABYTE_ROWS = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip

# Sources: the paper's repository (facebookresearch/dlrm), bench/dlrm_s_criteo_kaggle.sh, and MLPerf Training's
# reference for DLRM on Criteo's terabyte set (indices below 40 million),
# bench/run_and_time.sh.  Kaggle's batch size is ours.
CONFIGS: dict[str, Config] = {
    "tiny": _TINY,
    "tiny-bf16": replace(_TINY, dtype="bfloat16"),
    "criteo-kaggle": Config(
        table_rows=_KAGGLE_ROWS,
        embedding_dim=16,
        bottom_dims=(512, 256, 64, 16),
        top_dims=(512, 256),
        batch_size=16384,
    ),
    "criteo-terabyte": Config(
        table_rows=_TERABYTE_ROWS,
        embedding_dim=128,
        bottom_dims=(512, 256, 128),
        top_dims=(1024, 1024, 512, 256),
        batch_size=55296,
    ),
}


def _layers(key: jax.Array, dims: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """Dense layers from dims[0] to dims[-1]; normal with variance 2 / (in + out), biases 1 / out, as released."""
    layers = []
    for n_in, n_out in itertools.pairwise(dims):
        key, kernel_key, bias_key = jax.random.split(key, 3)
        kernel = np.sqrt(2 / (n_in + n_out)) * jax.random.normal(kernel_key, (n_in, n_out))
        bias = np.sqrt(1 / n_out) * jax.random.normal(bias_key, (n_out,))
        layers.append({"kernel": kernel, "bias": bias})
    return layers


def _apply(layers: list[dict[str, jax.Array]], x: jax.Array, dtype: str) -> jax.Array:
    """The layers one after the other, with a ReLU behind each but the last."""
    for index, layer in enumerate(layers):
        x = (jax.nn.relu(x) if index else x) @ layer["kernel"].astype(dtype) + layer["bias"].astype(dtype)
    return x


def interact(vectors: jax.Array) -> jax.Array:
    """The products of all pairs of different vectors: [batch, vector, dim] to [batch, n * (n - 1) / 2]."""
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], -1)
    return products[:, rows, columns]


def _forward(config: Config, params: Any, dense: jax.Array, features: jax.Array) -> jax.Array:
    """Dense features [batch, n_dense] f32 and a row of every table [batch, n_tables] int32 to logits [batch] f32."""
    bottom = jax.nn.relu(_apply(params["bottom"], dense.astype(config.dtype), config.dtype))
    embedded = [
        jnp.take(table, features[:, index], axis=0).astype(config.dtype)
        for index, table in enumerate(params["tables"])
    ]
    pairs = interact(jnp.stack([bottom, *embedded], axis=1))
    return _apply(params["top"], jnp.concatenate([bottom, pairs], axis=1), config.dtype)[:, 0].astype(jnp.float32)


def _optimizer(config: Config) -> optax.GradientTransformation:
    """Adagrad, as the paper's section 5 trains; a number of state for every number in the tables."""
    return optax.adagrad(config.learning_rate)


def init_state(config: Config, key: jax.Array) -> State:
    """The state at step 0; f32 parameters and optimizer state."""
    table_key, bottom_key, top_key = jax.random.split(key, 3)
    tables = []
    for index, rows in enumerate(config.table_rows):
        bound = float(np.sqrt(1 / rows))  # as released
        shape = (round_up(rows, config.vocab_multiple), config.embedding_dim)
        tables.append(
            jax.random.uniform(jax.random.fold_in(table_key, index), shape, minval=-bound, maxval=bound)
        )
    n_vectors = len(config.table_rows) + 1
    n_pairs = n_vectors * (n_vectors - 1) // 2
    params = {
        "tables": tables,
        "bottom": _layers(bottom_key, (config.n_dense, *config.bottom_dims)),
        "top": _layers(top_key, (config.embedding_dim + n_pairs, *config.top_dims, 1)),
    }
    return new_state(params, _optimizer(config))


def make_train_step(config: Config) -> TrainStep:
    """The step of one batch; metrics: `loss` in nats a click, `grad_norm`, `accuracy`."""

    def loss_function(params: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits = _forward(config, params, batch["dense"], batch["features"])
        clicked = batch["clicks"].astype(jnp.float32)
        right = (logits > 0) == (batch["clicks"] > 0)
        loss = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))
        return loss, {"accuracy": jnp.mean(right.astype(jnp.float32))}

    return gradient_step(loss_function, _optimizer(config))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """`dense` [batch_size, n_dense] f32, `features` [batch_size, n_tables] and `clicks` [batch_size] int32."""
    dense_key, feature_key, click_key = jax.random.split(key, 3)
    rows = jnp.asarray(config.table_rows, jnp.int32)
    shape = (config.batch_size, len(config.table_rows))
    return {
        "dense": jax.random.normal(dense_key, (config.batch_size, config.n_dense), jnp.float32),
        "features": jax.random.randint(feature_key, shape, 0, rows, jnp.int32),
        "clicks": jax.random.randint(click_key, (config.batch_size,), 0, 2, jnp.int32),
    }


def batch_shapes(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of `make_batch`, allocating nothing."""
    return jax.eval_shape(lambda: make_batch(config, jax.random.key(0)))
