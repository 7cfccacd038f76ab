"""What is computed again in every kernel that reads it, and what is in memory since that reads less."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxplan
from jaxplan.cost import traffic
from jaxplan.cost.levels import costs_more_again
from jaxplan.hardware import compile_for
from jaxplan.ir import trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules

BF16, CHANNELS, GROUPS = jnp.bfloat16, 64, 8


def convolved(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def normalised(x: Any) -> Any:
    """Group normalisation, its variance the mean of squares less the mean's square."""
    grouped = x.reshape(*x.shape[:3], GROUPS, -1).astype(jnp.float32)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = (grouped * grouped).mean((1, 2, 4), keepdims=True) - mean * mean
    return ((grouped - mean) * jax.lax.rsqrt(variance + 1e-6)).reshape(x.shape).astype(x.dtype)


def plain(weights: Any, x: Any) -> Any:
    """Convolutions with biases, normalised."""
    for w, b in weights:
        x = jax.nn.relu(normalised(convolved(x, w) + b))
    return x


def residual(weights: Any, x: Any) -> Any:
    """Two normalised branches are added up in every block."""
    for one, other in weights:
        x = jax.nn.relu(normalised(convolved(x, one)) + normalised(convolved(x, other)))
    return x


def step(net: Any) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(net(weights, x).astype(jnp.float32)))

    return lambda weights, x: jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def shapes(net: Any, layers: int = 3, images: int = 64, side: int = 64) -> tuple[Any, Any]:
    kernels = [jax.ShapeDtypeStruct((3, 3, CHANNELS if i else 3, CHANNELS), BF16) for i in range(layers)]
    bias = jax.ShapeDtypeStruct((CHANNELS,), BF16)
    weights = [(k, k if net is residual else bias) for k in kernels]
    return weights, jax.ShapeDtypeStruct((images, side, side, 3), BF16)


def test_what_costs_more() -> None:
    one, two = {1: 8.0, 9: 0.1}, {1: 8.0, 2: 8.0, 9: 0.1}
    assert not costs_more_again(5, 8.0, one)
    assert [costs_more_again(kernels, 8.0, two) for kernels in (1, 2, 3)] == [False, False, True]


def kept(net: Any, primitive: str, readers: int) -> list[bool]:
    """Whether images that such operations make and so many convolutions read are in memory, in program order."""
    graph = trace(step(net), shapes(net), {}).graph
    stored, uses = traffic(graph, graph_rules(graph), "tpu").stored, graph.uses()
    made = [op.results[0] for op in graph.ops if op.primitive == primitive]
    made = [v for v in made if graph.values[v].shape == (64, 64, 64, CHANNELS)]
    read = {v: sum(graph.ops[r].primitive == "conv_general_dilated" for r, _ in uses[v]) for v in made}
    return [stored[v] for v in made if read[v] == readers]


def test_a_normalisations_gradient_is_kept_for_two_products_and_the_sum_of_a_bias() -> None:
    """The first layer's input has no gradient, and the last one's is made of its own image alone."""
    assert kept(plain, "reshape", 2) == [False, True]
    assert kept(plain, "reshape", 1) == [False]


def test_the_sum_of_two_branches_is_kept_for_the_next_block() -> None:
    """As the argument of the relu that four convolutions read, which is computed again."""
    graph = trace(step(residual), shapes(residual), {}).graph
    stored = traffic(graph, graph_rules(graph), "tpu").stored
    relus = [op for op in graph.ops if op.primitive == "max" and op.results[0] in
             {o.operands[0] for o in graph.ops if o.primitive == "conv_general_dilated"}]  # fmt: skip
    assert relus and all(stored[op.operands[0]] or stored[op.results[0]] for op in relus)


@pytest.mark.aot_tpu
def test_a_network_is_compiled_to_what_is_planned(tpu_topology: Any) -> None:
    given = shapes(plain, layers=4, images=256)
    mesh = jaxplan.target("tpu-v5e:2x2").mesh(data=4)
    sharded = jaxplan.auto_shard(step(plain), mesh, donate_argnums=(0,), options={"search": "data"})
    compiled = compiled_memory(compile_for(sharded.lower(*given), mesh)).peak_bytes
    planned = sharded.plan(*given).cost.peak_bytes
    assert 0.97 * compiled < planned < 1.15 * compiled


def shortcut(weights: Any, x: Any) -> Any:
    """Blocks whose input a 1 x 1 convolution brings to their channels, with nothing normalised of that."""
    for first, second, beside in weights:
        y = jax.nn.silu(normalised(convolved(x, first)))
        x = jax.nn.silu(convolved(x, beside) + normalised(convolved(y, second)))
    return x


def two_products(weights: Any, x: Any) -> Any:
    """The last product's kernel ends with the sum; the other one writes what it makes."""
    for first, second, beside in weights:
        x = jax.nn.silu(convolved(x, beside) + convolved(jax.nn.silu(normalised(convolved(x, first))), second))
    return x


@pytest.mark.parametrize(("net", "written"), [(shortcut, False), (two_products, True)])
def test_a_products_kernel_ends_with_what_alone_reads_it_whenever_that_is(net: Any, written: bool) -> None:
    weights = [[jax.ShapeDtypeStruct((n, n, CHANNELS, CHANNELS), BF16) for n in (3, 3, 1)] for _ in range(2)]
    graph = trace(step(net), (weights, jax.ShapeDtypeStruct((64, 32, 32, CHANNELS), BF16)), {}).graph
    stored = traffic(graph, graph_rules(graph), "tpu").stored
    convolutions = [op for op in graph.ops if op.primitive == "conv_general_dilated"]
    beside = next(op for op in convolutions if graph.values[op.operands[1]].shape == (1, 1, CHANNELS, CHANNELS))
    (total,) = (op for op in graph.ops if op.primitive == "add" and beside.results[0] in op.operands)
    assert stored[beside.results[0]] is written
    assert stored[total.results[0]]


def test_the_gradient_of_a_tied_head_waits_for_no_scatter() -> None:
    """It is added to what is scattered into the table, at the very end, and the logits' gradient is larger than it."""

    def loss(table: Any, words: Any) -> Any:
        return jnp.mean(jnp.square((jnp.tanh(table[words]) @ table.T).astype(jnp.float32)))

    table, words = jax.ShapeDtypeStruct((512, 128), BF16), jax.ShapeDtypeStruct((4096,), jnp.int32)
    graph = trace(jax.grad(loss), (table, words), {}).graph
    stored = traffic(graph, graph_rules(graph), "tpu").stored
    (gradient,) = (op for op in graph.ops if graph.values[op.results[0]].shape in ((512, 128), (128, 512))
                   and op.primitive == "dot_general")  # fmt: skip
    assert stored[unmoved_reader(graph, gradient.results[0])]


def unmoved_reader(graph: Any, value: int) -> int:
    """A value, or what alone is a view of it."""
    (reader, _), *others = graph.uses()[value]
    seen = graph.ops[reader].primitive in ("transpose", "reshape", "convert_element_type")
    return unmoved_reader(graph, graph.ops[reader].results[0]) if seen and not others else value


def gated(weights: Any, x: Any) -> Any:
    """A gate that is split off, with a bias."""
    for w, b, out in weights:
        a, g = jnp.split(x @ w + b, 2, -1)
        x = x + (a * jax.nn.relu(g)) @ out
    return x


def summed_apart(weights: Any, x: Any) -> Any:
    """Halves of a product that are added up over different rows."""
    a, b = jnp.split(x @ weights, 2, -1)
    return a.sum(1), b.sum(2)


def test_what_is_split_is_written_whole_and_no_part_of_it() -> None:
    layer = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((256, 1024), (1024,), (512, 256))]
    gates = trace(step(gated), ([layer] * 2, jax.ShapeDtypeStruct((4096, 256), BF16)), {}).graph
    rows = jax.ShapeDtypeStruct((32, 32, 32, 128), BF16)
    sums = trace(summed_apart, (jax.ShapeDtypeStruct((128, 256), BF16), rows), {}).graph
    for graph in (gates, sums):
        stored = traffic(graph, graph_rules(graph), "tpu").stored
        splits = [op for op in graph.ops if op.primitive == "split"]
        assert splits and all(stored[op.operands[0]] for op in splits)
        assert not any(stored[part] for op in splits for part in op.results)


def stages(weights: Any, x: Any) -> Any:
    """A ConvNeXt's: a scaled branch is added, and what a stage ends with is normalised and convolved."""
    for (wide, narrow, scale), down in weights:
        x = x + scale * (jax.nn.gelu(over_channels(x) @ wide) @ narrow)
        x = jax.lax.conv_general_dilated(
            over_channels(x), down, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    return x


def over_channels(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def stages_graph(side: int) -> Any:
    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, BF16)

    block = of(CHANNELS, 4 * CHANNELS), of(4 * CHANNELS, CHANNELS), of(CHANNELS)
    weights = [(block, of(2, 2, CHANNELS, CHANNELS))] * 2
    return trace(step(stages), (weights, of(64, side, side, CHANNELS)), {}).graph


def test_what_a_stage_ends_with_is_in_memory_once_it_is_normalised_and_convolved() -> None:
    """Both that it is made of are, too: the input, and the branch for its scale's gradient."""
    graph = stages_graph(64)
    stored, producers = traffic(graph, graph_rules(graph), "tpu").stored, graph.producers()
    ends = [op for op in graph.ops if op.primitive == "add"
            and {graph.ops[producers[v]].primitive for v in op.operands if producers[v] >= 0} & {"mul"}
            and graph.values[op.results[0]].shape in ((64, 64, 64, CHANNELS), (64, 32, 32, CHANNELS))]  # fmt: skip
    assert len(ends) == 2
    assert all(stored[op.results[0]] for op in ends)


@pytest.mark.parametrize("side", [64, 28])
def test_a_root_is_not_taken_again(side: int) -> None:
    """Whether or not what is normalised by it is in memory for a product: rows of 64 pixels are, of 28 are not.  The
    first one is for the forward pass alone: the step's input has no gradient."""
    graph = stages_graph(side)
    stored = traffic(graph, graph_rules(graph), "tpu").stored
    roots = [op.results[0] for op in graph.ops if op.primitive == "rsqrt"]
    assert len(roots) == 4
    assert [stored[v] for v in roots] == [False, True, True, True]


def test_a_root_of_no_statistics_is_taken_again() -> None:
    """That of an optimizer's squares of gradients, where it is scaled by its own mean."""

    def update(w: Any, squares: Any, grad: Any) -> Any:
        root = jax.lax.rsqrt(squares + 1e-8)
        return w - grad * (root / jnp.mean(root))

    graph = trace(update, [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 3, {}).graph
    stored = traffic(graph, graph_rules(graph), "tpu").stored
    (root,) = (op.results[0] for op in graph.ops if op.primitive == "rsqrt")
    assert not stored[root]
