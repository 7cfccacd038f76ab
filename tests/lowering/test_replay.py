"""A step run again with layouts pinned anywhere computes what it computed before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxplan.ir import Graph, Site, Traced, trace
from jaxplan.lowering import lower_flat, planned_function
from jaxplan.lowering.taken_as_it_lies import lying_alike
from jaxplan.plans import Constraint
from jaxplan.sharding import Collective, Layout, Partitioned, all_places, layout_of_places, partition


@jax.custom_vjp
def _scaled(x: Any) -> Any:
    return x * 2


_scaled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))


def _straight(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T, x.sum(axis=0)


def _calls(w: Any, x: Any) -> Any:
    return jax.jit(jax.jit(jnp.matmul))(x, w) + jax.grad(lambda x: jnp.sum(_scaled(x) ** 2))(x)


def _scan(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, row: (jnp.tanh(c @ w) + row, c.sum()), x, jnp.arange(4.0))


def _grad_of_remat_scan(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        body = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0] ** 2)

    return jax.value_and_grad(loss)(w)


def _while(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


def _cond(w: Any, x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x - 1) + jax.lax.switch(
        jnp.int32(1), [lambda: x, lambda: x @ w, lambda: x * 3]
    )


def _captured(w: Any, x: Any) -> Any:
    table = jnp.asarray(np.linspace(0, 1, 64).reshape(8, 8), jnp.float32)
    return jax.lax.map(lambda row: row @ table, x @ w)


def _between_loops(w: Any, x: Any) -> Any:
    out, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=2)
    scores = jnp.exp(out @ w)
    back, _ = jax.lax.scan(lambda c, _: (c @ w.T, None), scores @ w, None, length=2)
    return back, (out.T @ scores) @ w  # the product is finished before the second loop


PROGRAMS = [_straight, _calls, _scan, _grad_of_remat_scan, _while, _cond, _captured, _between_loops]


def arguments() -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    w, x = (jnp.asarray(random.standard_normal(s) / 3, jnp.float32) for s in ((8, 8), (16, 8)))
    return w, x


def places_to_pin(graph: Graph) -> list[tuple[Site, tuple[int, ...]]]:
    """Every place that a plan can pin, with the shape of what is there."""
    places = [(v.site, v.shape) for v in graph.values if v.site is not None]
    places += [
        (site, graph.values[v].shape)
        for op in graph.ops
        for site, v in zip(op.sites, op.operands, strict=True)
    ]
    return [(site, shape) for site, shape in places if shape]


def random_pins(traced: Traced, mesh: Mesh, seed: int, share: float) -> list[Constraint]:
    random = np.random.default_rng(seed)
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
    # XLA wants one sharding of all branches of a conditional: what leaves them is pinned, and alike.
    joined = {
        site: op.results[0] for op in traced.graph.ops if op.primitive == "cond_join" for site in op.sites[1:]
    }
    of_join: dict[int, Any] = {}
    pins = []
    for site, shape in places_to_pin(traced.graph):
        if random.random() < share or site in joined:
            rows = all_places(shape, axes)
            layout = layout_of_places(rows[random.integers(len(rows))], len(shape), axes)
            if site in joined:
                layout = of_join.setdefault(joined[site], layout)
            pins.append(
                Constraint(site=site, layout=layout, source="", primitive="", shape=shape, why="propagation")
            )
    return pins


def run(traced: Traced, pins: list[Constraint], mesh: Mesh, args: Any) -> list[np.ndarray]:
    results = jax.jit(planned_function(traced, pins, mesh))(*args)
    return [np.asarray(leaf) for leaf in results]


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_pins_nothing_changes(program: Callable[..., Any], mesh_4x2: Mesh) -> None:
    args = arguments()
    traced = trace(program, args, {})
    for found, wanted in zip(
        run(traced, [], mesh_4x2, args), jax.tree.leaves(jax.jit(program)(*args)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("program", PROGRAMS)
def test_random_pins_at_random_places_change_no_result(
    program: Callable[..., Any], seed: int, mesh_4x2: Mesh
) -> None:
    args = arguments()
    traced = trace(program, args, {})
    pins = random_pins(traced, mesh_4x2, seed, share=0.5)
    assert any(any(pin.layout.dims) for pin in pins)
    for found, wanted in zip(
        run(traced, pins, mesh_4x2, args), jax.tree.leaves(jax.jit(program)(*args)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_pin_is_in_the_lowered_program(program: Callable[..., Any], mesh_4x2: Mesh) -> None:
    """One constraint for each, inside loops, branches and remat too; what several read alike is brought there once."""
    args = arguments()
    traced = trace(program, args, {})
    pins = random_pins(traced, mesh_4x2, seed=2, share=1.0)
    places = {pin.site: pin for pin in pins}
    jaxpr = jax.make_jaxpr(planned_function(traced, list(places.values()), mesh_4x2))(*args)
    read = {(op.sites[i], v) for op in traced.graph.ops for i, v in enumerate(op.operands) if op.sites[i] in places}
    shared = {(v, places[site].layout) for site, v in read if site.kind == "operand"}
    made = [site for site in places if site.kind == "result"]
    assert str(jaxpr).count("sharding_constraint[") >= len(shared) + len(made)


def test_what_several_read_in_one_layout_is_brought_there_once(mesh_4x2: Mesh) -> None:
    """Each constraint of its own may become a collective of its own (XLA for GPU)."""
    x = jax.ShapeDtypeStruct((16, 8), np.float32)

    def step(x: Any) -> Any:
        made = jnp.tanh(x)
        return made @ made.T, jax.jit(jnp.sin)(made), made  # a call is part of the body that it stands in

    traced = trace(step, (x,), {})
    layout = layout_of_places(np.array([0, 1], np.int8), 2, (("data", 4), ("model", 2)))
    pins = [
        Constraint(site=site, layout=layout, source="", primitive="", shape=(16, 8), why="reshard")
        for op in traced.graph.ops for site, v in zip(op.sites, op.operands, strict=True)
        if site is not None and traced.graph.values[v].shape == (16, 8)
    ]  # fmt: skip
    frames = {pin.site.frame for pin in pins}
    pins += [replace(pins[0], site=Site((), "leave", -1, 2))]
    values = {v for op in traced.graph.ops for v in op.operands if traced.graph.values[v].shape == (16, 8)}
    assert len(pins) > len(values) and len(frames) > 1
    jaxpr = jax.make_jaxpr(planned_function(traced, pins, mesh_4x2))(x)
    assert str(jaxpr).count("sharding_constraint[") == len(values)


def test_what_is_rematerialised_stays_so(mesh_4x2: Mesh) -> None:
    args = arguments()
    traced = trace(_grad_of_remat_scan, args, {})
    again = str(
        jax.make_jaxpr(planned_function(traced, random_pins(traced, mesh_4x2, 0, 0.5), mesh_4x2))(*args)
    )
    assert again.count("prevent_cse") == str(traced.jaxpr).count("prevent_cse") > 0


def test_a_pin_decides_the_layout_of_a_result(mesh_4x2: Mesh) -> None:
    args = arguments()
    traced = trace(_straight, args, {})
    site = traced.graph.values[traced.graph.outputs[0]].site
    assert site is not None
    axes = (("data", 4), ("model", 2))
    layout = layout_of_places(np.array([0, 1], np.int8), 2, axes)
    pin = Constraint(site=site, layout=layout, source="", primitive="", shape=(16, 8), why="propagation")
    result = jax.jit(planned_function(traced, [pin], mesh_4x2))(*args)[0]
    assert result.sharding.is_equivalent_to(NamedSharding(mesh_4x2, layout.spec()), 2)


def test_what_is_only_asked_how_it_lies_is_sent_the_same_without_its_numbers() -> None:
    """A third of a network's operations make numbers and broadcast them; the ends' own numbers stay."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(w: jax.Array, x: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = jnp.maximum(x * 0.5 @ w - 1.0, 0.0) / (1 + x.sum()) + 2.0
        return made * 3.0, jax.lax.fori_loop(0, 5, lambda i, c: c + 2 * i, n)

    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in [((64, 32), "f4"), ((16, 64), "f4"), ((), "i4")]]
    traced = trace(step, shapes, {})
    inputs = [Layout(dims=(("model",), ())), Layout(dims=(("data",), ())), Layout(dims=())]
    outputs = [Layout(dims=((), ("model",))), Layout(dims=())]
    whole, asked = (
        lower_flat(traced, (), mesh, inputs, outputs, platform="tpu", alike=alike) for alike in (None, ())
    )
    whole, asked = (partition(lowered.compiler_ir("stablehlo")) for lowered in (whole, asked))
    numbers = [sum(op.op in ("constant", "broadcast_in_dim") for op in found.ops) for found in (whole, asked)]
    assert numbers[1] < numbers[0] - 2
    assert whole.collectives and not (whole.warnings or asked.warnings)

    def sent(found: Partitioned) -> list[Collective]:
        return [replace(one, scope=one.scope.rpartition("/")[0]) for one in found.collectives]

    assert sent(whole) == sent(asked)
    ends = [{op.scope.rpartition("/")[0]: op.layouts for op in found.ops} for found in (whole, asked)]
    assert ends[0] == ends[1]


def test_elementwise_equations_between_two_others_are_left_out_of_what_is_only_asked() -> None:
    """Not those whose operand somebody else reads, is an argument or a carry, is pinned, or of another type."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = jnp.tanh(jnp.exp(x @ w) * 2.0)  # all three are left out
        read_twice = jnp.sin(made)  # made again: left out; what it is made into is read twice
        one = jnp.cos(read_twice) @ w.T
        two = jnp.log1p(read_twice).astype(jnp.bfloat16)
        looped = jax.lax.fori_loop(0, 5, lambda _, c: jnp.floor(c), one)
        return looped, two

    shapes = [jax.ShapeDtypeStruct(s, "f4") for s in [(64, 32), (16, 64)]]
    traced = trace(step, shapes, {})
    inputs = [Layout(dims=(("model",), ())), Layout(dims=(("data",), ()))]
    outputs = [Layout(dims=((), ("model",))), Layout(dims=(("model",), ()))]
    site = next(
        graph.values[op.results[0]].site for graph in [traced.graph] for op in graph.ops if op.primitive == "exp"
    )
    assert site is not None
    pin = Constraint(
        site=site, layout=Layout(dims=((), ("model",))), source="", primitive="", shape=(16, 32), why="propagation"
    )

    every = {(s.frame, s.equation) for value in traced.graph.values if (s := value.site) is not None}

    def asked(pins: tuple[Constraint, ...], short: bool) -> Partitioned:
        alike = every if short else None
        lowered = lower_flat(traced, pins, mesh, inputs, outputs, platform="tpu", alike=alike)
        return partition(lowered.compiler_ir("stablehlo"))

    def left(found: Partitioned) -> list[int]:
        names = [op.scope.rpartition("/")[0].rpartition("jaxplan")[2] for op in found.ops]
        return sorted({int(name) for name in names if name.isdigit()})

    def primitives(found: Partitioned) -> set[str]:
        unary = {"exp", "tanh", "sin", "cos", "log1p", "floor"}
        return {traced.graph.ops[op].primitive for op in left(found)} & unary

    whole, short, pinned = asked((), False), asked((), True), asked((pin,), True)
    assert primitives(whole) == {"exp", "tanh", "sin", "cos", "log1p", "floor"}
    assert primitives(short) == {"cos", "log1p", "floor"}
    assert primitives(pinned) == primitives(short) | {"exp"}

    def sent(found: Partitioned) -> list[tuple[str, tuple[str, ...], int]]:
        return sorted((one.kind, one.axes, one.bytes) for one in found.collectives)

    assert sent(whole) == sent(short) and sent(whole)


def test_masks_and_keys_are_asked_how_they_lie() -> None:
    """A mask has no negative, and a PRNG key has none either."""
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(x: jax.Array, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = x > 0
        keys = jax.lax.optimization_barrier(jax.random.wrap_key_data(seeds))
        bits = jax.vmap(jax.random.bits)(jnp.copy(keys)) + jax.random.bits(keys[0])
        return jnp.where(~mask, x * 2.0, 0.0) + mask, bits

    traced = trace(step, [jax.ShapeDtypeStruct((16, 32), "f4"), jax.ShapeDtypeStruct((16, 2), "u4")], {})
    inputs = [Layout(dims=(("data",), ())), Layout(dims=(("data",), ()))]
    outputs = [Layout(dims=(("data",), ())), Layout(dims=(("data",),))]
    every = {(s.frame, s.equation) for value in traced.graph.values if (s := value.site) is not None}
    lowered = lower_flat(traced, (), mesh, inputs, outputs, platform="tpu", alike=every)
    found = partition(lowered.compiler_ir("stablehlo"))
    assert not found.warnings and "not" in {op.op for op in found.ops}


def test_an_equation_lies_alike_where_nothing_is_decided_to_move_around_it() -> None:
    traced = trace(lambda x: jnp.tanh(jnp.exp(jnp.sin(x)) * 2.0).sum(0), [jax.ShapeDtypeStruct((8, 16), "f4")], {})
    graph = traced.graph
    rows = {name: np.array(row, np.int8) for name, row in (("cut", [0, -1]), ("whole", [-1, -1]))}
    values = {value: rows["cut"] for value in range(len(graph.values))}
    values[graph.outputs[0]] = rows["whole"][:1]
    reads = {(op.index, i): rows["cut"] for op in graph.ops for i, _ in enumerate(op.operands)}
    names = [op.primitive for op in graph.ops]
    place = {name: (s.frame, s.equation) for name, op in zip(names, graph.ops, strict=True)
             if (s := graph.values[op.results[0]].site) is not None}  # fmt: skip
    before = lying_alike(graph, values, reads)
    assert {place[name] for name in ("sin", "exp", "mul", "tanh")} <= before
    reads[names.index("tanh"), 0] = rows["whole"]  # it reads what lies cut
    assert before - lying_alike(graph, values, reads) == {place["mul"], place["tanh"]}
