"""Which buffers XLA assigns: nets of relus, dropouts and gelus as they were compiled, against what is predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.images import image_lanes
from jaxplan.cost.tiles import device_bytes
from jaxplan.ir import Value, trace
from jaxplan.sharding import graph_rules

ONE = AbstractMesh((1,), ("data",))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gradients(layer: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Of all weights; nothing is donated."""

    def step(weights: Any, x: Any, key: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for number, weight in enumerate(weights):
                y = layer(y, weight, jax.random.fold_in(key, number))
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(weights)

    return step


def relu(x: Any, weight: Any, key: Any) -> Any:
    return jax.nn.relu(x @ weight.astype(x.dtype))


def dropped(x: Any, weight: Any, key: Any) -> Any:
    y = jnp.tanh(x @ weight)
    return jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0)


def convolved(x: Any, weight: Any, key: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=numbers))


@pytest.mark.parametrize(
    ("layer", "weight", "x", "compiled"),
    [
        (relu, f32(2048, 2048), f32(16384, 2048), 805_424_128),
        (relu, f32(2048, 2048), jax.ShapeDtypeStruct((16384, 2048), jnp.bfloat16), 469_863_424),
    ],
)
def test_memory_is_what_the_compiler_assigns(layer: Any, weight: Any, x: Any, compiled: int) -> None:
    """Compiled with jax 0.10.2 and libtpu 0.0.42.1: arguments, results and temporary buffers."""
    plan = jaxplan.plan(
        gradients(layer), ONE, [weight] * 4, x, jax.eval_shape(lambda: jax.random.key(0)), hardware="tpu-v5e",
        options={"compare_templates": False},
    )  # fmt: skip
    assert plan.cost.peak_bytes == pytest.approx(compiled, rel=0.005)


def stored_values(layer: Any, weight: Any, x: Any, platform: str = "tpu") -> list[Value]:
    """What the step makes and keeps in memory, as large as `x` or a mask of it."""
    graph = trace(gradients(layer), ([weight] * 4, x, jax.eval_shape(lambda: jax.random.key(0))), {}).graph
    stored = traffic(graph, graph_rules(graph), platform).stored
    return [v for v in graph.values if stored[v.index] and v.shape == x.shape and v.index not in graph.inputs]


@pytest.mark.parametrize("layer", [relu, dropped])
def test_masks_are_computed_again_on_tpu(layer: Any) -> None:
    kept = stored_values(layer, f32(1024, 1024), f32(64, 512, 1024))
    assert kept and {v.dtype for v in kept} == {"float32"}
    on_gpu = {v.dtype for v in stored_values(layer, f32(1024, 1024), f32(64, 512, 1024), "gpu")}
    assert ("bool" in on_gpu) == (layer is dropped)  # of a relu the product is kept, of f32 as of bf16


def test_pixels_do_not_lie_in_lanes() -> None:
    """f32[8, 224, 224, 64] of VGG's first layers is compiled to 128 lanes of 64 channels, twice its bytes."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    graph = trace(gradients(convolved), ([f32(3, 3, 64, 64)] * 2, f32(8, 224, 224, 64), key), {}).graph
    rules = graph_rules(graph)
    lanes, stored = image_lanes(graph, rules), traffic(graph, rules, "tpu").stored
    kept = [v for v in graph.values if stored[v.index] and v.index not in graph.inputs]
    images = [v for v in kept if v.shape == (8, 224, 224, 64)]
    assert len(images) == 3
    assert {lanes.get(v.index) for v in images} == {(0, 3)}
    assert not set(lanes) & {*graph.inputs, *graph.outputs}
    whole = np.full((1, 1), -1, np.int8)
    size = device_bytes(images[0], whole, (("data", 1),), "tpu", (0, 3))
    assert size == 2 * 8 * 224 * 224 * 64 * 4 > device_bytes(images[0], whole, (("data", 1),), "tpu")


def test_an_error_function_is_computed_again_on_gpu() -> None:
    """One that isn't expanded, in either type: `x * (1 + erf(x))` keeps the product and the result (H100)."""

    def curved(x: Any, weight: Any, key: Any) -> Any:
        made = x @ weight
        return made * (1 + jax.lax.erf(made))

    for dtype in (jnp.bfloat16, jnp.float32):
        shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1024, 1024), (4096, 1024)))
        assert "erf" not in {v.name for v in stored_values(curved, *shapes, "gpu")}


def test_what_is_gathered_is_converted_afterwards() -> None:
    """Of logits in bf16, gathered from by a loss in f32, those in bf16 are kept: FlaxGPT2 compiled for eight v5e."""

    def loss(weight: Any, x: Any, labels: Any) -> Any:
        logits = (x @ weight).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked[:, 0])

    half = jnp.bfloat16
    args = jax.ShapeDtypeStruct((64, 512), half), jax.ShapeDtypeStruct((256, 64), half), jnp.zeros(256, jnp.int32)
    graph = trace(loss, args, {}).graph
    stored = traffic(graph, graph_rules(graph), "tpu").stored
    assert {v.dtype for v in graph.values if stored[v.index] and v.shape == (256, 512)} == {"bfloat16"}


@pytest.mark.parametrize("approximate", [True, False])
def test_a_gelus_tanh_or_error_function_is_kept_on_gpu(approximate: bool) -> None:
    """Beside the layer's argument and the result, as compiled for H100; on TPU it is computed again, and in f32 a tanh:
    what an erfc is expanded into takes longer."""

    def gelu(x: Any, weight: Any, key: Any) -> Any:
        return jax.nn.gelu(x @ weight, approximate=approximate)

    def kept(platform: str, dtype: Any) -> set[str]:
        shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1024, 1024), (4096, 1024)))
        return {v.name for v in stored_values(gelu, *shapes, platform)} & {"tanh", "erf", "erfc"}

    assert kept("gpu", jnp.bfloat16)
    assert not kept("tpu", jnp.bfloat16) and bool(kept("gpu", jnp.float32)) != approximate


def stored_names(function: Callable[..., Any], *shapes: Any) -> list[str]:
    """The operations whose results XLA for GPU has in memory, in order."""
    graph = trace(function, shapes, {}).graph
    stored = traffic(graph, graph_rules(graph), "gpu").stored
    return [op.primitive for op in graph.ops for v in op.results if stored[v] and v not in graph.outputs]


def test_a_product_on_gpu_computes_a_relu_but_no_sum_with_a_bias() -> None:
    """The sum is in memory, as in an MLP compiled for H100."""

    def layers(x: Any, w: Any, bias: Any) -> Any:
        return jax.nn.relu(x @ w + bias) @ w

    assert stored_names(layers, f32(512, 512), f32(512, 512), f32(512)) == ["dot_general", "add"]


def test_probabilities_that_a_product_reads_are_in_memory_on_gpu() -> None:
    """Logits and probabilities both, as in a perceiver in f32 compiled for H100."""

    def attend(x: Any, values: Any) -> Any:
        return jax.nn.softmax(x @ x.T, axis=-1) @ values

    names = stored_names(attend, f32(512, 64), f32(512, 64))
    assert names[0] == "dot_general" and names[-1] == "div"


@pytest.mark.parametrize("weighed", [True, False])
def test_gathered_rows_that_are_summed_up_are_no_buffer_on_gpu(weighed: bool) -> None:
    """Messages of a graph attention network are gathered, weighed and added in one kernel (H100, jax 0.10.2).

    So are those of a GraphSAGE of two million edges: 602 MB compiled, 868 predicted before and 638 since.
    """

    def messages(nodes: Any, weights: Any, senders: Any, receivers: Any) -> Any:
        sent = nodes[senders] * weights[:, None] if weighed else nodes[senders]
        return jax.ops.segment_sum(sent, receivers, nodes.shape[0])

    edges = jax.ShapeDtypeStruct((65536,), jnp.int32)
    names = stored_names(messages, f32(1024, 64), f32(65536), edges, edges)
    assert "gather" not in names and "mul" not in names


def test_gathered_rows_of_one_column_are_not_padded_to_lanes() -> None:
    """f32[400000, 8] whose columns lie on eight devices took 1.6 MB of each, not 205 (v5e)."""
    scores = Value(index=0, shape=(400_000, 8), dtype="float32", item_bytes=4.0, name="scores")
    rows, columns = (np.array([[place]], np.int8) for place in (0, 1))
    assert device_bytes(scores, columns, (("data", 8),), "tpu", "rows") == 400_000 * 4
    assert device_bytes(scores, rows, (("data", 8),), "tpu", "rows") == 50_000 * 128 * 4


def test_rows_of_one_head_are_not_padded_to_several() -> None:
    """A cache of bf16[4, 16384, 8, 128] whose heads lie on eight devices took 16.8 MB of each, not 33.6 (v5e)."""
    heads = Value(index=0, shape=(4, 16384, 8, 128), dtype="bfloat16", item_bytes=2.0, name="cache")
    one = Value(index=1, shape=(4, 16384, 1, 128), dtype="bfloat16", item_bytes=2.0, name="cache")
    cut, whole = (np.array([[place]], np.int8) for place in (2, -1))
    for cache, layout in ((heads, cut), (one, whole)):
        assert device_bytes(cache, layout, (("model", 8),), "tpu", "rows") == 4 * 16384 * 128 * 2
    assert device_bytes(heads, whole, (("model", 8),), "tpu", "rows") == 4 * 16384 * 8 * 128 * 2
