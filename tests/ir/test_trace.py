"""From a step to the flat Graph: calls seen through, loop bodies once, dead code gone, state paired."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.ir import Graph, trace


def shape(*extents: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, dtype)


def graph_of(fn: Callable[..., Any], *args: Any, **settings: Any) -> Graph:
    graph = trace(fn, args, {}, **settings).graph
    graph.verify()
    return graph


def primitives(graph: Graph) -> Counter[str]:
    return Counter(op.primitive for op in graph.ops)


def product_flops(graph: Graph) -> float:
    """Floating point operations of all matrix products, times their trips."""
    total = 0.0
    for op in graph.ops:
        if op.primitive == "dot_general":
            (contracted, _), _ = op.params["dimension_numbers"]
            lhs, result = graph.values[op.operands[0]], graph.values[op.results[0]]
            total += 2 * math.prod(result.shape) * math.prod(lhs.shape[d] for d in contracted) * op.trips
    return total


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@jax.custom_jvp
def _jvp_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return layer(w, x)


_jvp_layer.defjvp(lambda primals, tangents: jax.jvp(layer, primals, tangents))


@jax.custom_vjp
def _vjp_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return layer(w, x)


_vjp_layer.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, g: jax.vjp(layer, *kept)[1](g))


@pytest.mark.parametrize(
    "wrapped",
    [jax.jit(layer), jax.jit(jax.jit(layer)), jax.checkpoint(layer), _jvp_layer, _vjp_layer],
    ids=["jit", "nested jit", "checkpoint", "custom_jvp", "custom_vjp"],
)
def test_calls_are_seen_through(wrapped: Callable[..., jax.Array]) -> None:
    plain, seen = (graph_of(fn, shape(8, 8), shape(4, 8)) for fn in (layer, wrapped))
    assert [(op.primitive, op.trips) for op in seen.ops] == [(op.primitive, op.trips) for op in plain.ops]
    assert [v.shape for v in seen.values if v.site] == [v.shape for v in plain.values if v.site]


@pytest.mark.parametrize(
    ("wrapped", "products"),
    [(layer, 3), (jax.jit(layer), 3), (_jvp_layer, 3), (jax.checkpoint(layer), 4), (_vjp_layer, 3)],
    ids=["plain", "jit", "custom_jvp", "checkpoint", "custom_vjp"],
)
def test_backward_passes_are_seen_through(wrapped: Callable[..., jax.Array], products: int) -> None:
    """Forward, two gradients, and one product again behind a checkpoint; else XLA makes one of two that are equal."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda w, x: wrapped(w, x).sum(), argnums=(0, 1))(w, x)

    graph = graph_of(step, shape(8, 8), shape(4, 8))
    assert primitives(graph)["dot_general"] == products


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_does_the_work_of_its_unrolled_loop(length: int, remat: bool) -> None:
    body = jax.checkpoint(layer) if remat else layer

    def loss(weights: jax.Array, x: jax.Array, *, scanned: bool) -> jax.Array:
        if scanned:
            x = jax.lax.scan(lambda x, w: (body(w, x), None), x, weights)[0]
        else:
            for i in range(length):
                x = body(weights[i], x)
        return x.sum()

    def step(scanned: bool) -> Callable[..., Any]:
        return lambda weights, x: jax.value_and_grad(loss)(weights, x, scanned=scanned)

    shapes = shape(length, 16, 16), shape(4, 16)
    scanned, unrolled = graph_of(step(True), *shapes), graph_of(step(False), *shapes)
    # The first layer needs no gradient of its input when unrolled; a loop's body always makes it.
    first = 2 * 4 * 16 * 16
    assert product_flops(scanned) == product_flops(unrolled) + first
    loops = [x for x in scanned.loops if x.stop > x.start]
    assert [x.trips for x in loops] == [length, length]
    for loop in loops:
        assert all(op.trips == length for op in scanned.ops[loop.start : loop.stop])


def test_nested_loops_multiply_their_trips() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def outer(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=5)[0], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    graph = graph_of(step, shape(8, 8), shape(4, 8))
    (product,) = (op for op in graph.ops if op.primitive == "dot_general")
    assert product.trips == 15
    outer, inner = graph.loops
    assert outer.start <= inner.start < inner.stop <= outer.stop


def test_stacked_operands_and_results_are_related_to_their_slices() -> None:
    def step(xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda c, x: (c + x, c * x), jnp.zeros(8), xs)

    graph = graph_of(step, shape(6, 8))
    by_name = {op.primitive: op for op in graph.ops}
    slices, stacks = by_name["scan_slice"], by_name["scan_stack"]
    assert graph.values[slices.operands[0]].shape == (6, *graph.values[slices.results[0]].shape) == (6, 8)
    assert graph.values[stacks.results[0]].shape == (6, *graph.values[stacks.operands[0]].shape) == (6, 8)
    assert stacks.results[0] == graph.outputs[1]
    # One value is the carry, from its first value to the result.
    assert by_name["carry_init"].results[0] == by_name["carry_next"].operands[1] == graph.outputs[0]


def test_a_while_states_its_assumption_and_a_fori_loop_needs_none() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    graph = graph_of(step, shape(8, 8), while_trips=9.0)
    (product,) = (op for op in graph.ops if op.primitive == "dot_general")
    assert product.trips == 9
    (assumption,) = graph.assumptions
    assert "9 iterations" in assumption and "while_trips" in assumption

    counted = graph_of(lambda n, x: jax.lax.fori_loop(n, n + 4, lambda _, x: x @ x, x), 0, shape(8, 8))
    assert counted.assumptions  # its bounds are values

    def seven(x: jax.Array) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ c[1]), (2, x))

    known = graph_of(seven, shape(8, 8))
    (product,) = (op for op in known.ops if op.primitive == "dot_general")
    assert product.trips == 5 and known.assumptions == ()


def test_branches_of_a_cond_are_joined() -> None:
    def step(flag: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(flag, lambda x: x @ x, lambda x: x + 1, x)

    graph = graph_of(step, shape(dtype=jnp.bool_), shape(8, 8))
    (join,) = (op for op in graph.ops if op.primitive == "cond_join")
    makers = graph.producers()
    assert graph.values[join.operands[0]].shape == ()
    assert {graph.ops[makers[v]].primitive for v in join.operands[1:]} == {"dot_general", "add"}
    assert graph.outputs == join.results


def test_dead_operations_are_gone_and_effects_stay() -> None:
    def step(x: jax.Array) -> jax.Array:
        unused = jnp.sin(x) @ x
        del unused
        jax.debug.callback(print, x.sum())
        return jnp.cos(x)

    found = primitives(graph_of(step, shape(8, 8)))
    assert found["cos"] == 1 and found["sin"] == 0 and found["dot_general"] == 0
    assert found["debug_callback"] == found["reduce_sum"] == 1


def test_dead_code_removal_keeps_loops_around_their_operations() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        dead = jnp.sin(x)
        del dead

        def body(c: jax.Array, _: Any) -> tuple[jax.Array, None]:
            unused = jnp.exp(c)
            del unused
            return layer(w, c), None

        return jax.lax.scan(body, x, None, length=4)[0]

    graph = graph_of(step, shape(8, 8), shape(4, 8))
    assert primitives(graph)["exp"] == 0
    (loop,) = graph.loops
    inside = {op.primitive for op in graph.ops[loop.start : loop.stop]}
    assert inside == {"dot_general", "tanh", "carry_next"}
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))


# -- leaves ---------------------------------------------------------------------------------------------------


def test_state_is_paired_with_its_next_value() -> None:
    def step(state: Any, batch: jax.Array) -> Any:
        return {"loss": batch.sum(), "state": {"a": state["a"] + batch, "b": state["b"] * 2}}

    traced = trace(step, ({"a": shape(8), "b": shape(4)}, shape(8)), {}, donate_argnums=(0,))
    pairs = {(traced.inputs[i].path, traced.outputs[o].path) for i, o in traced.graph.aliases}
    assert pairs == {("state/a", "result/state/a"), ("state/b", "result/state/b")}
    assert traced.graph.donated == {0, 1}


def test_a_result_is_the_next_value_of_one_argument_only() -> None:
    def step(a: Any, b: Any) -> Any:
        return jax.tree.map(jnp.add, a, b)

    state = {"u": shape(8), "v": shape(8)}
    traced = trace(step, (state, state), {})
    assert traced.graph.aliases == ((0, 0), (1, 1))


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_lone_array_comes_back_only_where_it_is_donated(donate: tuple[int, ...]) -> None:
    """x @ w is not the next x, unless its buffer is given away for it."""
    traced = trace(lambda x, w: x @ w, (shape(8, 8), shape(8, 8)), {}, donate_argnums=donate)
    assert traced.graph.aliases == (((0, 0),) if donate else ())


def test_a_lone_array_with_a_name_comes_back() -> None:
    """The smallest model there is: one matrix in a dict."""
    traced = trace(lambda p, x: ({"w": p["w"] + x.sum()}, x.mean()), ({"w": shape(8, 8)}, shape(4)), {})
    assert traced.graph.aliases == ((0, 0),)
    drifting = trace(lambda p: {"w": p["w"].sum()}, ({"w": shape(8, 8)},), {})
    assert drifting.graph.aliases == ()


def test_drifting_leaves_are_named_and_only_they() -> None:
    def step(state: Any) -> Any:
        return {"a": state["a"], "b": state["b"].astype(jnp.bfloat16), "c": state["c"]}

    with pytest.raises(
        jaxplan.TraceError, match=r"state/b: goes in as float32\[8\], comes out as bfloat16\[8\]"
    ):
        trace(step, ({"a": shape(8), "b": shape(8), "c": shape(8)},), {})


def test_a_batch_that_is_as_long_as_the_results_is_no_state() -> None:
    def step(batch: Any) -> Any:
        return [batch[0] * 2, batch[1].sum(), batch[2]]

    batch = ([shape(8), shape(8), shape(4)],)
    assert trace(step, batch, {}).graph.aliases == ()
    with pytest.raises(jaxplan.TraceError, match=r"batch/1: goes in as float32\[8\], comes out as float32\[\]"):
        trace(step, batch, {}, donate_argnums=(0,))


def test_captured_constants_count_their_bytes() -> None:
    table = jnp.asarray(np.arange(1000.0), jnp.float32)
    graph = graph_of(lambda x: x + table[:8], shape(8))
    assert sum(graph.values[v].bytes for v in graph.constants) == 4000


def test_fingerprints_tell_programs_and_constants_apart() -> None:
    one, two = (jnp.full(8, c) for c in (1.0, 2.0))

    def digest(fn: Callable[..., Any], *args: Any) -> str:
        return trace(fn, args, {}).fingerprint

    assert digest(lambda x: x + one, shape(8)) == digest(lambda x: x + one, shape(8))
    different = {
        digest(lambda x: x + one, shape(8)),
        digest(lambda x: x + two, shape(8)),
        digest(lambda x: x - one, shape(8)),
        digest(lambda x: x + 1, shape(16)),
    }
    assert len(different) == 4


def test_fingerprints_are_of_what_is_computed_not_of_which_objects_say_so() -> None:
    def step(x: jax.Array, scale: float, length: int) -> jax.Array:
        table = np.full(3, scale, np.float32)

        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.cond(carry[0] > 0, lambda y: jax.nn.relu(y) * table, lambda y: -y, carry), None

        return jax.lax.scan(body, x, None, length=length)[0]

    def digest(scale: float, length: int) -> str:
        jax.clear_caches()
        return trace(lambda x: step(x, scale, length), (shape(3),), {}).fingerprint

    assert digest(1.0, 2) == digest(1.0, 2)
    assert len({digest(1.0, 2), digest(2.0, 2), digest(1.0, 3)}) == 3
