"""The partitioner in process agrees with what XLA compiles: kinds of collectives, axes, bytes, trips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplan._jax import ir, parse_module, run_passes
from jaxplan.lowering.hlo import compiled_collectives
from jaxplan.sharding.imported import scope_of
from jaxplan.sharding.partitioner import Collective, partition, shardy_rules
from tests.sharding.programs import (
    AXES,
    BATCH,
    HIDDEN,
    LAYERS,
    MLPS,
    PROGRAMS,
    SQUARE,
    WIDTH,
    dot,
    experts,
    lowered,
    mlp,
    shape,
    volumes,
)  # fmt: skip


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


_SPECIAL: dict[str, Callable[[jax.Array], jax.Array]] = {
    **{
        name: getattr(jax.lax, name)
        for name in (
            "square", "erfc", "erf_inv", "lgamma", "digamma", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh",
            "atanh", "bessel_i1e",
        )
    },
    "nextafter": lambda x: jax.lax.nextafter(x, x + 1), "zeta": lambda x: jax.lax.zeta(x, x + 1),
    "polygamma": lambda x: jax.lax.polygamma(x + 1, x),
}  # fmt: skip


@pytest.mark.parametrize("name", _SPECIAL)
def test_special_functions_keep_their_operands_sharding(name: str, mesh_4x2: Mesh) -> None:
    """They are no StableHLO; the compiler writes them in it before it propagates."""
    low = lowered(lambda x: _SPECIAL[name](x) * 2, mesh_4x2, (P("data"),), None, shape(8, 16))
    planned, made = partition(low.compiler_ir("stablehlo")), low.compile()
    assert planned.output_layouts == ((("data",), ()),) and not planned.collectives
    assert made.output_shardings.spec == P("data") and not compiled_collectives(made.as_text(), AXES)


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


@pytest.mark.parametrize(("other", "sums"), [(P(("data", "model")), 1), (P(("model", "data")), 2)])
def test_a_total_of_what_is_cut_in_two_orders_is_summed_twice(other: P, sums: int, mesh_4x2: Mesh) -> None:
    """XLA for GPU lists devices in the order of the pieces, and lists that differ are two all_reduces (jax 0.10.2)."""

    def squares(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(a * a) + jnp.sum(b * b)

    low = lowered(squares, mesh_4x2, (P(("data", "model")), other), P(), SQUARE, SQUARE)
    found = partition(low.compiler_ir("stablehlo")).collectives
    assert [(c.kind, c.axes) for c in found] == [("all_reduce", ("data", "model"))] * sums
    assert len({c.order for c in found}) == sums


def test_a_sum_that_is_sliced_along_two_dimensions_is_an_all_reduce(mesh_4x2: Mesh) -> None:
    """As it is priced: XLA scatters sums onto one dimension only."""
    halves = P(None, ("data", "model")), P(("data", "model"))
    low = lowered(dot, mesh_4x2, halves, P("data", "model"), SQUARE, SQUARE)
    kinds = [(c.kind, c.axes) for c in partition(low.compiler_ir("stablehlo")).collectives if c.kind != "all_slice"]
    assert kinds == [("all_reduce", ("data", "model"))]


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


def test_what_one_device_makes_for_all_is_whole(mesh_4x2: Mesh) -> None:
    """A host callback's result is written as a sharding of one device, without dimensions."""

    def step(x: Any) -> Any:
        made = jax.ShapeDtypeStruct((32, 8), jnp.float32)
        return jnp.tanh(jax.pure_callback(lambda _: np.zeros((32, 8), np.float32), made, x.sum()))

    low = lowered(step, mesh_4x2, (P("data"),), P(), shape(64))
    found = [entry for entry in partition(low.compiler_ir("stablehlo")).ops if (32, 8) in entry.shapes]
    assert found
    for entry in found:
        assert [len(dims) for dims in entry.layouts] == [len(s) for s in entry.shapes]


def test_a_name_is_read_as_it_was_written() -> None:
    module = parse_module("module {}")
    with module.context:
        for name in ('jit(f)/a "quoted" name', "back\\slash", "plain/dot_general"):
            assert scope_of(ir.Location.name(name)) == name
        assert scope_of(ir.Location.file("step.py", 3, 1)) == ""


def test_what_is_no_valid_program_is_refused_before_any_pass() -> None:
    module = parse_module("func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    block = module.body.operations[0].regions[0].blocks[0]
    with module.context, ir.Location.unknown():
        ir.Operation.create(
            "stablehlo.add",
            results=[ir.RankedTensorType.get([8], ir.F32Type.get())],
            operands=[block.arguments[0]] * 2,
            ip=ir.InsertionPoint.at_block_begin(block),
        )
    with pytest.raises(Exception, match=r"stablehlo\.add"):
        run_passes(module, ["symbol-dce"])
