"""The parts of T5, Whisper, Mamba, DLRM, the U-Net and GraphSAGE, against plain loops and what their papers say."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.attention import attend
from models.dlrm import interact
from models.gnn import mean_of_neighbours
from models.mamba import selective_scan
from models.t5 import T5, relative_buckets
from models.unet import signal_shares, time_features
from models.whisper import sinusoids


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_attention_adds_the_bias_of_its_head_to_scaled_scores(n_kv_heads: int) -> None:
    n_heads, n_queries, n_keys, head_dim = 4, 3, 5, 2
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (1, n_queries, n_heads, head_dim))
    key, value = (jax.random.normal(k, (1, n_keys, n_kv_heads, head_dim)) for k in keys[1:3])
    bias = jax.random.normal(keys[3], (n_heads, n_queries, n_keys))
    got = attend(query, key, value, causal=False, bias=bias, scale=0.3)
    for head in range(n_heads):
        k, v = (np.asarray(x[0, :, head * n_kv_heads // n_heads]) for x in (key, value))
        scores = 0.3 * np.asarray(query[0, :, head]) @ k.T + np.asarray(bias[head])
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got[0, :, head], weights @ v, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("both_sides", [False, True])
def test_buckets_are_exact_when_near_and_shared_when_far(both_sides: bool) -> None:
    length, n_buckets, max_distance = 300, 32, 128
    buckets = relative_buckets(
        length, length, n_buckets=n_buckets, max_distance=max_distance, both_sides=both_sides
    )
    back = buckets[:, 0]  # of key 0, by distance
    assert set(np.unique(buckets)) == set(range(n_buckets)) - ({n_buckets // 2} if both_sides else set())
    assert (np.diff(back) >= 0).all() and len(set(back[max_distance:])) == 1
    side = n_buckets // 2 if both_sides else n_buckets
    assert back[: side // 2 + 1].tolist() == list(range(side // 2 + 1))
    ahead = buckets[0, 1:]
    if both_sides:
        np.testing.assert_array_equal(ahead, back[1:] + side)
    else:
        assert (ahead == 0).all()


def test_a_decoder_sees_all_inputs_and_no_later_target() -> None:
    config = models.get_config("t5", "tiny")
    batch = models.get("t5").make_batch(config, jax.random.key(1))
    inputs, targets = batch["inputs"], batch["targets"]
    variables = jax.jit(T5(config).init)(jax.random.key(0), inputs, targets)
    apply = jax.jit(lambda inputs, targets: T5(config).apply(variables, inputs, targets))
    before, cut = apply(inputs, targets), 4
    later = apply(inputs, targets.at[:, cut:].set((targets[:, cut:] + 1) % config.vocab_size))
    np.testing.assert_allclose(before[:, :cut], later[:, :cut], rtol=1e-5, atol=1e-5)
    assert not np.allclose(before[:, cut], later[:, cut])
    last = apply(inputs.at[:, -1].set((inputs[:, -1] + 1) % config.vocab_size), targets)
    assert not np.allclose(before[:, 0], last[:, 0])


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_the_selective_scan_is_its_recurrence(chunk: int) -> None:
    batch, length, channels, states = 2, 12, 3, 4
    keys = jax.random.split(jax.random.key(0), 3)
    decay = jax.random.uniform(keys[0], (batch, length, channels, states))
    inputs = jax.random.normal(keys[1], decay.shape)
    readout = jax.random.normal(keys[2], (batch, length, states))
    state, expected = np.zeros((batch, channels, states)), []
    for t in range(length):
        state = np.asarray(decay[:, t]) * state + np.asarray(inputs[:, t])
        expected.append((state * np.asarray(readout[:, t])[:, None]).sum(-1))
    got = selective_scan(decay, inputs, readout, chunk=chunk)
    np.testing.assert_allclose(got, np.stack(expected, axis=1), rtol=1e-4, atol=1e-5)


def test_interactions_are_the_products_of_all_pairs() -> None:
    vectors = jax.random.normal(jax.random.key(0), (2, 4, 3))
    expected = [
        [float(row[i] @ row[j]) for i in range(4) for j in range(i)] for row in np.asarray(vectors)
    ]
    np.testing.assert_allclose(interact(vectors), expected, rtol=1e-5)


def test_neighbours_are_averaged_and_padding_is_dropped() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 3))
    senders, receivers = jnp.array([0, 1, 2, 2, 0]), jnp.array([1, 0, 0, 3, 4])  # 4: no node
    got = np.asarray(mean_of_neighbours(x, senders, receivers))
    np.testing.assert_allclose(got, np.stack([(x[1] + x[2]) / 2, x[0], 0 * x[0], x[2]]), rtol=1e-6)


def test_padding_of_a_graph_changes_no_loss() -> None:
    module, config = models.get("gnn"), models.get_config("gnn", "tiny")
    state, batch = module.init_state(config, jax.random.key(0)), module.make_batch(config, jax.random.key(1))
    wider = dataclasses.replace(config, node_multiple=48)
    padded = module.make_batch(wider, jax.random.key(1))
    assert len(padded["senders"]) > len(batch["senders"]) and len(padded["features"]) > len(batch["features"])
    for name in batch:  # the same graph, behind it what was drawn for the padding
        kept = config.n_edges if name in ("senders", "receivers") else config.n_nodes
        padded[name] = padded[name].at[:kept].set(batch[name][:kept])
    _, metrics = jax.jit(module.make_train_step(config))(state, batch)
    _, with_padding = jax.jit(module.make_train_step(wider))(state, padded)
    np.testing.assert_allclose(metrics["loss"], with_padding["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], with_padding["grad_norm"], rtol=1e-5)


def test_noise_grows_from_next_to_nothing_to_next_to_everything() -> None:
    shares = signal_shares(1000)
    assert (np.diff(shares) < 0).all() and shares[0] > 0.999 and shares[-1] < 1e-4


def test_positions_and_times_are_sines_and_cosines() -> None:
    table = sinusoids(7, 8)
    features = np.asarray(time_features(jnp.arange(7), 8))
    for found in (table, features):
        for position in range(7):
            for i, rate in enumerate(10000.0 ** (-np.arange(4) / 3)):
                wanted = [np.sin(position * rate), np.cos(position * rate)]
                np.testing.assert_allclose(found[position, [i, 4 + i]], wanted, rtol=1e-4, atol=1e-6)
