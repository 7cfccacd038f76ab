"""The partitioner in process agrees with what XLA compiles: kinds of collectives, axes, bytes, trips."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplan.lowering.hlo import compiled_collectives
from jaxplan.sharding.partitioner import Collective, partition, shardy_rules

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


@pytest.mark.parametrize("name", MLPS)
def test_train_steps_communicate_as_compiled(name: str, mesh_4x2: Mesh) -> None:
    low = mlp(mesh_4x2, *MLPS[name])
    planned = partition(low.compiler_ir("stablehlo"))
    compiled = compiled_collectives(low.compile().as_text(), AXES)
    assert volumes(planned.collectives, scatter=False) == volumes(compiled, scatter=False) != {}
    assert not planned.warnings


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_communicate_as_compiled(name: str, mesh_4x2: Mesh) -> None:
    fn, ins, outs, *shapes = PROGRAMS[name]
    low = lowered(fn, mesh_4x2, ins, outs, *shapes)
    planned = partition(low.compiler_ir("stablehlo"))
    compiled = compiled_collectives(low.compile().as_text(), AXES)
    assert volumes(planned.collectives, scatter=False) == volumes(compiled, scatter=False) != {}


def test_experts_exchange_tokens_by_one_all_to_all(mesh_4x2: Mesh) -> None:
    low = experts(mesh_4x2)
    (exchange,) = partition(low.compiler_ir("stablehlo")).collectives
    assert (exchange.kind, exchange.axes, exchange.bytes) == ("all_to_all", ("data",), 8 * 8 * 32 * 4 // 4)
    compiled = compiled_collectives(low.compile().as_text(), AXES)
    assert volumes([exchange], scatter=False) == volumes(compiled, scatter=False)


def test_megatron_needs_five_all_reduces(mesh_4x2: Mesh) -> None:
    """One for the forward and one for the backward pass of a layer, one a gradient, one for the loss."""
    found = partition(mlp(mesh_4x2, *MLPS["megatron"]).compiler_ir("stablehlo")).collectives
    activations = BATCH // 4 * WIDTH * 4
    weight = WIDTH * HIDDEN // 2 * 4
    assert {c.kind for c in found} == {"all_reduce"}
    assert sorted((c.axes, c.bytes, c.trips) for c in found) == [
        (("data",), 4, 1.0),
        (("data",), weight, float(LAYERS)),
        (("data",), weight, float(LAYERS)),
        (("model",), activations, float(LAYERS)),
        (("model",), activations, float(LAYERS)),
    ]


@pytest.mark.aot_tpu
@pytest.mark.parametrize("name", MLPS)
def test_train_steps_communicate_as_compiled_for_tpu(name: str, tpu_topology: Any) -> None:
    """Reduce-scatters included, which the TPU compiler fuses unless the tensors are tiny."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    low = mlp(mesh, *MLPS[name], scale=16)
    planned = partition(low.compiler_ir("stablehlo"))
    compiled = compiled_collectives(low.compile().as_text(), AXES)
    assert volumes(planned.collectives, scatter=True) == volumes(compiled, scatter=True)


def shared_weight_gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(dot(jnp.tanh(dot(x, w)), w) ** 2))(w)


SHARED_WEIGHT = (shared_weight_gradient, (P("data"), P("data")), P("data"), shape(512, 512), shape(1024, 512))


def test_a_shared_weight_is_gathered_once_and_its_gradients_summed_first(mesh_4x2: Mesh) -> None:
    fn, ins, outs, *shapes = SHARED_WEIGHT
    found = partition(lowered(fn, mesh_4x2, ins, outs, *shapes).compiler_ir("stablehlo")).collectives
    whole = 512 * 512 * 4
    assert [(c.kind, c.bytes) for c in found] == [("all_gather", whole), ("reduce_scatter", whole)]


@pytest.mark.aot_tpu
def test_a_shared_weight_communicates_as_compiled_for_tpu(tpu_topology: Any) -> None:
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    fn, ins, outs, *shapes = SHARED_WEIGHT
    low = lowered(fn, mesh, ins, outs, *shapes)
    planned = partition(low.compiler_ir("stablehlo")).collectives
    compiled = compiled_collectives(low.compile().as_text(), AXES)
    assert volumes(planned, scatter=True) == volumes(compiled, scatter=True)


def test_a_weight_is_sliced_once_before_the_loop_that_wants_its_slice(mesh_4x2: Mesh) -> None:
    """XLA lets a loop read what it doesn't change in another layout than what is around it."""

    cut = NamedSharding(mesh_4x2, P("data", "model"))

    def step(x: Any, w: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            return h + 1, jax.lax.with_sharding_constraint(dot(h, w), cut)

        return jax.lax.scan(body, x, None, length=5)[1]

    low = lowered(step, mesh_4x2, (P("data"), P()), P(None, "data", "model"), SQUARE, SQUARE)
    assert [(c.kind, c.trips) for c in partition(low.compiler_ir("stablehlo")).collectives] == [
        ("all_slice", 1.0)
    ]
    assert not compiled_collectives(low.compile().as_text(), AXES)


def test_collectives_written_in_shard_map_are_counted(mesh_4x2: Mesh) -> None:
    def local(x: Any, w: Any) -> Any:
        whole = jax.lax.all_gather(dot(x, w), "data", tiled=True)
        part = jax.lax.psum_scatter(jnp.tanh(whole), "data", tiled=True)
        swapped = jax.lax.all_to_all(x, "data", 1, 0, tiled=True)
        turned = jax.lax.ppermute(swapped, "data", [(i, (i + 1) % 4) for i in range(4)])
        return jax.lax.psum(part, "model"), turned

    spread = jax.shard_map(
        local, mesh=mesh_4x2, in_specs=(P("data", "model"), P("model")), out_specs=(P("data"), P("data", "model")),
        check_vma=False,
    )  # fmt: skip
    low = lowered(
        spread, mesh_4x2, (P("data", "model"), P("model")), (P("data"), P("data", "model")), SQUARE, SQUARE
    )
    found = partition(low.compiler_ir("stablehlo")).collectives
    compiled = compiled_collectives(low.compile().as_text(), AXES)
    assert len(found) == 5
    assert volumes(found, scatter=True) == volumes(compiled, scatter=True)


def test_an_all_reduce_over_two_axes_sliced_over_one_is_split(mesh_4x2: Mesh) -> None:
    low = lowered(
        dot, mesh_4x2, (P(None, ("data", "model")), P(("data", "model"))), P("data"), SQUARE, SQUARE
    )
    found = partition(low.compiler_ir("stablehlo")).collectives
    assert [(c.kind, c.axes, c.bytes) for c in found] == [
        ("reduce_scatter", ("data",), 64 * 64 * 4),
        ("all_reduce", ("model",), 64 * 64 * 4 // 4),
    ]


@pytest.mark.parametrize(("whole", "kind"), [(True, "all_reduce"), (False, "reduce_scatter")])
def test_an_all_reduce_is_a_reduce_scatter_only_if_nobody_reads_it_whole(
    whole: bool, kind: str, mesh_4x2: Mesh
) -> None:
    def step(x: Any, w: Any) -> Any:
        y = jax.lax.with_sharding_constraint(dot(x, w), NamedSharding(mesh_4x2, P()))
        part = jax.lax.with_sharding_constraint(y, NamedSharding(mesh_4x2, P("data")))
        return part, jnp.tanh(y if whole else x)

    low = lowered(step, mesh_4x2, (P(None, "data"), P("data")), (P("data"), None), SQUARE, SQUARE)
    kinds = [c.kind for c in partition(low.compiler_ir("stablehlo")).collectives if c.kind != "all_slice"]
    assert kinds == [kind]


@pytest.mark.parametrize("length", [1, 5])
def test_nested_loops_multiply(length: int, mesh_4x2: Mesh) -> None:
    def step(x: Any, w: Any) -> Any:
        def inner(h: Any, _: Any) -> Any:
            return dot(dot(h, w), w.T), None

        def outer(h: Any, _: Any) -> Any:
            return jax.lax.scan(inner, h, None, length=length)[0], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    low = lowered(step, mesh_4x2, (P("data"), P(None, "model")), P("data"), shape(16, 32), shape(32, 64))
    (reduce,) = partition(low.compiler_ir("stablehlo")).collectives
    assert (reduce.kind, reduce.trips) == ("all_reduce", 3.0 * length)


def test_a_loop_of_unknown_length_is_assumed_and_named(mesh_4x2: Mesh) -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.lax.while_loop(lambda h: jnp.sum(h) < 3, lambda h: dot(dot(h, w), w.T), x)

    low = lowered(step, mesh_4x2, (P("data"), P(None, "model")), P("data"), shape(16, 32), shape(32, 64))
    result = partition(low.compiler_ir("stablehlo"), while_trips=7.0)
    assert {c.trips for c in result.collectives if c.axes == ("model",)} == {7.0}
    assert len(result.warnings) == 1 and "7 is assumed" in result.warnings[0]


def test_operations_carry_their_scope_through_calls_and_loops(mesh_4x2: Mesh) -> None:
    """Each equation wrapped in a named scope is found again, with the layout that propagation gave it."""

    @jax.jit
    def layer(h: Any, w: Any) -> Any:
        with jax.named_scope("jp3"):
            up = dot(h, w)
        with jax.named_scope("jp4"):
            return dot(up, w.T)

    def step(x: Any, w: Any) -> Any:
        with jax.named_scope("jp1"):
            h, _ = jax.lax.scan(lambda h, _: (layer(h, w), None), x, None, length=2)
        with jax.named_scope("jp2"):
            return jnp.transpose(h)

    result = partition(
        lowered(
            step, mesh_4x2, (P("data"), P(None, "model")), P(None, "data"), shape(16, 32), shape(32, 64)
        ).compiler_ir("stablehlo")
    )
    layouts = {
        op.scope.split("/")[-2]: (op.layouts, op.trips)
        for op in result.ops
        if (op.op, op.scope.split("/")[-2])
        in {("dot_general", "jp3"), ("dot_general", "jp4"), ("transpose", "jp2")}
    }
    assert layouts == {
        "jp3": (((("data",), ("model",)),), 2.0),
        "jp4": (((("data",), ()),), 2.0),
        "jp2": ((((), ("data",)),), 1.0),
    }
    assert all("jp1" in op.scope for op in result.ops if "jp3" in op.scope)
    (reduce,) = result.collectives
    assert reduce.scope.split("/")[-2] == "jp4"
    assert result.input_layouts == ((("data",), ()), ((), ("model",)))
    assert result.output_layouts == (((), ("data",)),)


def test_a_reshard_is_named_after_the_operation_that_needs_it(mesh_4x2: Mesh) -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("made"):
            doubled = x * 2
        with jax.named_scope("needed"):
            return jnp.sort(doubled)

    low = lowered(step, mesh_4x2, (P("data", "model"),), P("data"), SQUARE)
    found = partition(low.compiler_ir("stablehlo")).collectives
    assert found and all("needed" in c.scope and "made" not in c.scope for c in found)


def test_text_and_module_give_the_same_and_the_module_is_left_alone(mesh_4x2: Mesh) -> None:
    module = mlp(mesh_4x2, *MLPS["fsdp"]).compiler_ir("stablehlo")
    text = module.operation.get_asm(enable_debug_info=True)
    first = partition(module)
    assert partition(text) == first == partition(module)
    assert module.operation.get_asm(enable_debug_info=True) == text


@pytest.mark.parametrize(
    ("dtype", "size"), [("bfloat16", 2), ("float32", 4), ("int8", 1), ("bool", 1), ("complex64", 8)]
)
def test_bytes_and_names_of_element_types(dtype: str, size: int, mesh_4x2: Mesh) -> None:
    x = shape(64, 64, dtype=jnp.dtype(dtype))
    low = lowered(lambda x: x, mesh_4x2, (P("data"),), P(), x)
    (gather,) = partition(low.compiler_ir("stablehlo")).collectives
    assert gather == Collective(
        kind="all_gather", axes=("data",), bytes=64 * 64 * size, trips=1.0, scope=gather.scope,
        shape=(64, 64), dtype=dtype,
    )  # fmt: skip


def test_shardy_rules_are_the_contraction_that_dot_general_is() -> None:
    text = jax.jit(lambda x, w: jnp.tanh(x @ w)).lower(shape(16, 32), shape(32, 8)).as_text()
    rules = dict(shardy_rules(text))
    assert rules["dot_general"] == "([i, k], [k, j])->([i, j]) {i=16, j=8, k=32} reduction={k}"
    assert rules["tanh"] == "([i, j])->([i, j]) {i=16, j=8}"
