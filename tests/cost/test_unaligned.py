"""Reshapes that XLA for TPU copies for, as they cut memory tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.unaligned import cuts_tiles
from jaxplan.hardware import compile_for
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

WORDS, DIM, BATCH = 16384, 512, 64


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((16, 1023, 500), (16368, 500)),
        ((16368, 500), (16, 1023, 500)),
        ((256, 14, 14), (256, 196)),
        ((8, 197, 12, 64), (1576, 768)),
        ((64, 14, 14, 16, 16, 3), (64, 196, 768)),
    ],
)
def test_what_cuts_tiles(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    assert cuts_tiles(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((16, 1024, 500), (16384, 500)),
        ((8, 14, 14, 768), (8, 196, 768)),  # images and channels lie in tiles
        ((8, 197, 12, 64), (8, 197, 768)),
        ((8, 1024, 12, 64), (8192, 768)),
        ((4, 7, 7, 512), (4, 25088)),
        ((1, 1023, 500), (1023, 500)),
        ((16, 1023), (16368,)),
        ((0, 3), (3, 0)),
        ((5, 1), (5,)),
    ],
)
def test_what_is_a_view(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    assert not cuts_tiles(before, after)


def step_of(told: bool = True) -> Callable[..., Any]:
    """The next token is told from all but the last, all of which are put into one list; with the loss or without."""

    def step(weights: Any, tokens: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            table, hidden, head = (w.astype(jnp.bfloat16) for w in weights)
            x = table[tokens]
            x = x + jnp.tanh(x @ hidden)
            logits = (x @ head)[:, :-1].reshape(-1, head.shape[1]).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].reshape(-1)).mean()

        lost, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), lost if told else 0.0

    return step


def shapes(batch: int = 64, length: int = 512, words: int = WORDS) -> tuple[Any, Any]:
    weights = [(words, DIM), (DIM, DIM), (DIM, words)]
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return [jax.ShapeDtypeStruct(w, jnp.float32) for w in weights], tokens


@pytest.mark.parametrize(("platform", "told", "copies"), [("tpu", True, 1), ("tpu", False, 0), ("gpu", True, 0)])
def test_shifted_logits_are_copied_where_labels_are_gathered(platform: str, told: bool, copies: int) -> None:
    graph = trace(step_of(told), shapes(), {}).graph
    crossing = traffic(graph, graph_rules(graph), platform)
    large = [op for op in graph.ops if op.results and graph.values[op.results[0]].shape == (64 * 511, WORDS)]
    wide = [op for op in large if op.primitive == "convert_element_type" and crossing.stored[op.results[0]]]
    assert sum(graph.values[op.results[0]].item_bytes == 4 for op in wide) == copies


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("search", "batch", "length", "words", "told"),
    [
        ("megatron", 16, 1024, 32000, True),
        ("megatron", 16, 1025, 32768, True),
        ("data", 64, 512, WORDS, True),
        ("data", 64, 512, WORDS, False),
    ],
)
def test_compiled_for_tpu_the_step_takes_as_much(
    search: str, batch: int, length: int, words: int, told: bool, tpu_topology: Callable[[str], Any]
) -> None:
    """Words cut, where all but the last of 1024 tokens don't fill tiles (of 1025 they do), and sequences cut."""
    target = jaxplan.target("tpu-v5e:2x4")
    mesh = target.mesh(model=8) if search == "megatron" else target.mesh(data=8)
    sharded = jaxplan.auto_shard(step_of(told), mesh, donate_argnums=0, options={"search": search})
    arguments = shapes(batch, length, words)
    predicted = sharded.plan(*arguments).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*arguments), mesh, target.compiler_options)).peak_bytes
    least = 0.95 if jax.__version_info__ < (0, 11) else 0.75  # XLA of jax 0.12 leaves gaps of 135 MB in two of them
    assert least * compiled < predicted < 1.1 * compiled
