"""The parts that models share, against plain NumPy and plain Python."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import models
from models.attention import attend, rotate
from models.gpt import Gpt
from models.llama import Llama
from models.lstm import LstmLanguageModel
from models.mamba import Mamba
from models.moe import route
from models.training import token_cross_entropy
from models.transformer import SelfAttention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_attend_is_softmax_attention_head_by_head(n_kv_heads: int, causal: bool) -> None:
    length, n_heads, head_dim = 5, 4, 3
    keys = jax.random.split(jax.random.key(0), 3)
    query = np.asarray(jax.random.normal(keys[0], (2, length, n_heads, head_dim)), np.float64)
    key, value = (
        np.asarray(jax.random.normal(k, (2, length, n_kv_heads, head_dim)), np.float64) for k in keys[1:]
    )
    expected = np.empty_like(query)
    for batch in range(2):
        for head in range(n_heads):
            kv_head = head * n_kv_heads // n_heads
            for position in range(length):
                visible = position + 1 if causal else length
                scores = key[batch, :visible, kv_head] @ query[batch, position, head] / np.sqrt(head_dim)
                weights = np.exp(scores) / np.exp(scores).sum()
                expected[batch, position, head] = weights @ value[batch, :visible, kv_head]
    got = attend(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)), causal=causal)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_rotation_keeps_lengths_and_sees_only_distances() -> None:
    length, head_dim = 12, 8
    query, key = jax.random.normal(jax.random.key(0), (2, head_dim))
    rotated_query, rotated_key = (
        np.asarray(rotate(jnp.broadcast_to(x, (1, length, 1, head_dim)), 100.0))[0, :, 0]
        for x in (query, key)
    )
    np.testing.assert_allclose(np.linalg.norm(rotated_query, axis=-1), np.linalg.norm(query), rtol=1e-5)
    scores = rotated_query @ rotated_key.T
    for distance in range(-length + 1, length):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-3, atol=1e-5)
    assert np.ptp(scores[0]) > 0.1  # and distances do matter


@pytest.mark.parametrize("name", ["gpt", "llama", "lstm", "mamba"])
def test_no_logit_sees_a_later_token(name: str) -> None:
    config = models.get_config(name, "tiny")
    tokens = models.get(name).make_batch(config, jax.random.key(1))["inputs"]
    cut = config.seq_len // 2
    changed = tokens.at[:, cut:].set((tokens[:, cut:] + 1) % config.vocab_size)
    if name == "llama":
        apply = jax.jit(Llama(config, rngs=nnx.Rngs(0)))
    else:
        model = {"gpt": Gpt, "lstm": LstmLanguageModel, "mamba": Mamba}[name](config)
        variables = jax.jit(model.init)(jax.random.key(0), tokens)
        apply = jax.jit(lambda inputs: model.apply(variables, inputs))
    before, after = apply(tokens), apply(changed)
    np.testing.assert_allclose(before[:, :cut], after[:, :cut], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, cut], after[:, cut])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("top_k", "capacity"), [(1, 2), (2, 3), (2, 12), (3, 4)])
def test_route_gives_slots_first_come_first_served(top_k: int, capacity: int, seed: int) -> None:
    n_groups, n_tokens, n_experts = 2, 12, 4
    logits = jax.random.normal(jax.random.key(seed), (n_groups, n_tokens, n_experts))
    dispatch, combine, balance_loss = route(logits, top_k=top_k, capacity=capacity)

    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected_dispatch = np.zeros((n_groups, n_tokens, n_experts, capacity))
    expected_combine = np.zeros_like(expected_dispatch)
    loss = 0.0
    for group in range(n_groups):
        ranked = np.argsort(-probabilities[group], axis=-1)
        taken = [0] * n_experts
        for choice in range(top_k):
            for token in range(n_tokens):
                expert = ranked[token, choice]
                if taken[expert] < capacity:
                    weight = probabilities[group, token, expert]
                    if top_k > 1:
                        weight /= probabilities[group, token, ranked[token, :top_k]].sum()
                    expected_dispatch[group, token, expert, taken[expert]] = 1
                    expected_combine[group, token, expert, taken[expert]] = weight
                taken[expert] += 1
        for expert in range(n_experts):
            fraction = np.mean(ranked[:, 0] == expert)
            loss += n_experts * fraction * probabilities[group, :, expert].mean() / n_groups
    np.testing.assert_array_equal(dispatch, expected_dispatch)
    np.testing.assert_allclose(combine, expected_combine, rtol=1e-5)
    np.testing.assert_allclose(balance_loss, loss, rtol=1e-5)


def test_token_cross_entropy_equals_optax() -> None:
    logits = 30 * jax.random.normal(jax.random.key(0), (3, 5, 17))
    targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 17)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    np.testing.assert_allclose(token_cross_entropy(logits, targets), expected, rtol=1e-5)


def test_layers_that_are_recomputed_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 of GPT-3's, each by itself, took jax three quarters of its trace."""
    calls: list[jax.Array] = []
    call = SelfAttention.__call__

    def counted(layer: SelfAttention, x: jax.Array) -> jax.Array:
        calls.append(x)
        return call(layer, x)

    monkeypatch.setattr(SelfAttention, "__call__", counted)
    config = dataclasses.replace(models.get_config("gpt", "tiny"), n_layers=5, remat=True, scan_layers=False)
    module = models.get("gpt")
    state = jax.eval_shape(lambda key: module.init_state(config, key), jax.random.key(0))
    assert len(calls) == 5
    jax.jit(module.make_train_step(config)).trace(state, module.batch_shapes(config))
    assert len(calls) == 6
