"""Sums that cuDNN's convolutions end with, and what XLA for GPU then has in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.cudnn_sums import cudnn_sums
from jaxplan.hardware import compile_for
from jaxplan.ir import Graph, trace
from jaxplan.sharding import graph_rules

SIDE, CHANNELS = 32, 64
Form = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
FORMS: dict[str, tuple[Form, int]] = {
    "a bias": (lambda made, bias, other: made + bias, 1),
    "another array": (lambda made, bias, other: other + made, 1),
    "both": (lambda made, bias, other: other + (made + bias), 2),
    "both, the array first": (lambda made, bias, other: (made + other) + bias, 2),
    "two arrays": (lambda made, bias, other: (made + other) + jnp.cos(other), 1),
    "scaled": (lambda made, bias, other: 0.5 * made + other, 1),
    "scaled alone": (lambda made, bias, other: jnp.sin(0.5 * made), 0),  # no sum
    "a factor": (lambda made, bias, other: made * bias + other, 0),
    "a difference": (lambda made, bias, other: other - made, 0),
    "a sum that is read twice": (lambda made, bias, other: jax.nn.silu(made + bias) + other, 1),
    "a convolution that is": (lambda made, bias, other: made * jnp.sin(made) + (made + bias), 0),
    "what was converted": (lambda made, bias, other: (made.astype(jnp.float32) + 0.5 * other).astype(made.dtype), 0),
}
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "3 x 3": ({}, 1),
    "1 x 1": ({"size": 1}, 2),  # the image's gradient, with what else reads that
    "dilated": ({"rhs_dilation": (2, 2)}, 2),
    "grouped": ({"feature_group_count": 4}, 2),
    "depthwise": ({"feature_group_count": CHANNELS}, 0),
}


def convolved(image: jax.Array, kernel: jax.Array, **more: Any) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers, **more)


def gradient_of(form: Form, dtype: Any = jnp.bfloat16, size: int = 3, **more: Any) -> tuple[Any, tuple[Any, Any]]:
    def loss(params: Any, image: jax.Array) -> jax.Array:
        first, kernel, bias, last = (p.astype(dtype) for p in params)
        hidden = jnp.tanh(convolved(image.astype(dtype), first))
        made = form(convolved(hidden, kernel, **more), bias, jnp.sin(hidden))
        return jnp.mean(jnp.sin(convolved(jnp.tanh(made), last).astype(jnp.float32)))

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    groups = more.get("feature_group_count", 1)
    plain, inside = of(3, 3, CHANNELS, CHANNELS), of(size, size, CHANNELS // groups, CHANNELS)
    return jax.grad(loss), ((plain, inside, of(CHANNELS), plain), of(64, SIDE, SIDE, CHANNELS))


def graph_of(step: Any, shapes: tuple[Any, Any]) -> Graph:
    return trace(step, shapes, {}).graph


@pytest.mark.parametrize("form", FORMS)
def test_what_a_convolution_ends_with(form: str) -> None:
    """Only the last sum is written, and read by none of them; and so is the array that it adds."""
    graph = graph_of(*gradient_of(FORMS[form][0]))
    found = [*cudnn_sums(graph, graph.producers())]
    assert sum(graph.ops[index].primitive == "add" for one in found for index in one.steps) == FORMS[form][1]
    crossing = traffic(graph, graph_rules(graph), "gpu")
    for one in found:
        *within, last = (graph.ops[index].results[0] for index in one.steps)
        assert crossing.stored[last] and not any(crossing.stored[value] for value in within)
        assert all(crossing.stored[value] for value in one.beside)
        assert crossing.writes[one.convolution] == (0.0,)


@pytest.mark.parametrize("kind", KINDS)
def test_which_convolutions_do(kind: str) -> None:
    more, count = KINDS[kind]
    graph = graph_of(*gradient_of(FORMS["both"][0], **more))
    assert len(cudnn_sums(graph, graph.producers())) == count


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [*FORMS, *KINDS])
def test_compiled_for_gpu_as_many_convolutions_add(case: str, dtype: str) -> None:
    if case == "what was converted" and dtype == "float32":
        pytest.skip("nothing is converted")
    form, more = (FORMS["both"][0], KINDS[case][0]) if case in KINDS else (FORMS[case][0], {})
    step, shapes = gradient_of(form, jnp.dtype(dtype), **more)
    graph = graph_of(step, shapes)
    target = jaxplan.target("h100:1x1x1")
    mesh = target.mesh(data=1)
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    compiled = compile_for(jax.jit(step, in_shardings=placed).lower(*shapes), mesh, target.compiler_options)
    assert compiled.as_text().count('"__cudnn$convBiasActivationForward"') == len(cudnn_sums(graph, graph.producers()))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_relus_mask_is_computed_again_where_one_kernel_wants_it_and_a_dropouts_is_kept(frozen: bool) -> None:
    """A learned scale's gradient is a sum of what is selected, beside which the mask is written."""

    def loss(params: Any, image: jax.Array) -> jax.Array:
        first, kernel, scale, last = (p.astype(jnp.bfloat16) for p in params)
        hidden = jnp.tanh(convolved(image.astype(jnp.bfloat16), first))
        made = convolved(hidden, kernel) * (jax.lax.stop_gradient(scale) if frozen else scale)
        made = jax.nn.relu(made + hidden)
        kept = jax.random.bernoulli(jax.random.key(0), 0.9, made.shape)
        return jnp.mean(convolved(jnp.where(kept, made / 0.9, 0), last).astype(jnp.float32) ** 2)

    graph = graph_of(jax.grad(loss), gradient_of(FORMS["a bias"][0])[1])
    crossing = traffic(graph, graph_rules(graph), "gpu")
    masks = {op.primitive: crossing.stored[op.results[0]] for op in graph.ops if op.primitive in ("gt", "lt")}
    assert masks == {"gt": not frozen, "lt": True}
