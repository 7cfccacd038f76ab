"""The ledger of live bytes against a naive walk, on programs of matrix products alone (nothing is fused)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.cost import MemoryProfile, device_bytes, simulate_memory, traffic
from jaxplan.cost.tiles import gathered_bytes
from jaxplan.ir import Graph, Value, trace
from jaxplan.sharding import NONE, all_places, graph_rules

AXES = (("data", 4), ("model", 2))
WHOLE = np.array([-1, -1], np.int8)
ROWS = np.array([0, -1], np.int8)  # dimension 0 over data
COLUMNS = np.array([-1, 1], np.int8)  # dimension 1 over model
PENDING = np.array([-1, -2], np.int8)  # a sum over model


def square(size: int = 8) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, size), jnp.float32)


def graph_of(fn: Callable[..., Any], count: int, **settings: Any) -> Graph:
    return trace(fn, (square(),) * count, {}, **settings).graph


def profile(
    graph: Graph,
    values: Mapping[int, np.ndarray] | None = None,
    reads: Mapping[tuple[int, int], np.ndarray] | None = None,
) -> MemoryProfile:
    """Everything whole, but for `values` and `reads`; an operand is read as it was made."""
    made = {v.index: WHOLE for v in graph.values if not v.constant} | dict(values or {})
    read = {(op.index, p): made[v] for op in graph.ops for p, v in enumerate(op.operands) if v in made}
    return simulate_memory(
        graph, AXES, [True] * len(graph.values), ["batch"] * len(graph.inputs), made, read | dict(reads or {})
    )


def alive_values(graph: Graph) -> list[set[int]]:
    """For straight-line programs: what exists while each operation runs, by looking ahead from every operation.

    Results lie in the caller's buffers, which are there from the start.
    """
    sets = []
    for now in range(len(graph.ops)):
        made = set(graph.inputs) | {v for op in graph.ops[: now + 1] for v in op.results}
        needed = {v for op in graph.ops[now:] for v in op.operands} | set(graph.ops[now].results)
        sets.append((made & (needed | set(graph.inputs))) | set(graph.outputs))
    return sets


def _chain(a: Any, b: Any) -> Any:
    return ((a @ b) @ a) @ b


def _kept(a: Any, b: Any) -> Any:
    first = a @ b
    return (((first @ a) @ b) @ a) @ first


def _two_results(a: Any, b: Any) -> Any:
    early = a @ b
    return early, (b @ a) @ early


@pytest.mark.parametrize("program", [_chain, _kept, _two_results])
def test_the_curve_is_the_sum_of_what_exists(program: Callable[..., Any]) -> None:
    graph = graph_of(program, 2)
    found = profile(graph)
    wanted = [sum(graph.values[v].bytes for v in alive) for alive in alive_values(graph)]
    assert found.curve.tolist() == wanted
    assert found.peak_bytes == max(wanted) == wanted[found.peak_time]
    assert sum(found.parts.values()) == found.peak_bytes


@pytest.mark.parametrize("row", [ROWS, COLUMNS, np.array([0, 1], np.int8)])
def test_cut_values_count_their_pieces(row: np.ndarray) -> None:
    graph = graph_of(_kept, 2)
    pieces = np.prod([size for (_, size), place in zip(AXES, row, strict=True) if place >= 0])
    everywhere = {v.index: row for v in graph.values}
    assert (profile(graph, everywhere).curve * pieces == profile(graph).curve).all()


def test_a_gathered_copy_counts_while_it_is_read() -> None:
    graph = graph_of(_chain, 2)
    a = graph.inputs[0]
    cut = {a: ROWS}
    as_cut = profile(graph, cut, {(0, 0): ROWS, (1, 1): ROWS}).curve
    gathered_once = profile(graph, cut, {(0, 0): WHOLE, (1, 1): ROWS}).curve
    assert (gathered_once - as_cut).tolist() == [256, 0, 0]
    # Read whole by two operations it is gathered once and kept from the first to the last of them.
    gathered_for_both = profile(graph, cut, {(0, 0): WHOLE, (1, 1): WHOLE}).curve
    assert (gathered_for_both - as_cut).tolist() == [256, 256, 0]


def test_a_pending_sum_lives_until_it_is_finished() -> None:
    """The finished copy takes its place."""
    graph = graph_of(_kept, 2)
    first = graph.ops[0].results[0]
    readers = {(op.index, p): WHOLE for op in graph.ops for p, v in enumerate(op.operands) if v == first}
    pending = profile(graph, {first: PENDING}, readers)
    assert pending.curve[0] == profile(graph).curve[0]
    assert (pending.curve[1:] == profile(graph).curve[1:]).all()


def test_a_gpu_sends_a_pending_sum_beside_the_next_product() -> None:
    """An LSTM's gradient of its vocabulary is there while the next product pads its operands (H100, jax 0.10.2)."""

    def step(a: Any, b: Any) -> Any:
        gradient, other = a @ b, b @ a
        return other, jnp.cumsum(gradient, axis=0)

    graph = graph_of(step, 2)
    first, second, _ = graph.ops
    values = {v.index: WHOLE for v in graph.values if not v.constant} | {first.results[0]: PENDING}
    reads = {(op.index, p): WHOLE for op in graph.ops for p in range(len(op.operands))}

    def alive(platform: str) -> int:
        stored, kinds = [True] * len(graph.values), ["batch"] * len(graph.inputs)
        found = simulate_memory(graph, AXES, stored, kinds, values, reads, platform=platform)
        return int(found.curve[second.index])

    assert alive("gpu") - alive("cpu") == graph.values[first.results[0]].bytes


def test_a_sum_that_is_returned_lies_where_the_caller_wants_it() -> None:
    """Gradients that are returned are there from the beginning (an encoder's on v5e: 816 MB, 757 were told)."""
    graph = graph_of(lambda a, b: (a @ a) @ b, 2)
    size = int(graph.values[graph.outputs[0]].bytes)
    values = {v.index: WHOLE for v in graph.values if not v.constant}
    reads = {(op.index, p): WHOLE for op in graph.ops for p in range(len(op.operands))}

    def curve(row: np.ndarray) -> np.ndarray:
        made = values | {graph.outputs[0]: row}
        return simulate_memory(
            graph, AXES, [True] * 4, ["batch"] * 2, made, reads, platform="tpu", outputs={0: WHOLE}
        ).curve

    assert (curve(PENDING) == curve(WHOLE)).all()
    assert curve(PENDING)[0] >= 4 * size


def test_donated_state_is_written_in_place() -> None:
    def step(state: dict[str, Any], x: Any) -> Any:
        return {"w": state["w"] @ x}, (x @ x).sum()

    shapes = {"w": square()}, square()
    kept, donated = (trace(step, shapes, {}, donate_argnums=d).graph for d in ((), (0,)))
    assert profile(kept).curve[-1] - profile(donated).curve[-1] == 256


def test_what_a_loop_stacks_is_there_from_its_start_to_its_last_reader() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0].sum()

    graph = trace(jax.grad(loss), (square(), square()), {}).graph
    residuals = [op.results[0] for op in graph.ops if op.primitive == "scan_stack"]
    assert residuals and all(graph.values[v].bytes == 5 * 256 for v in residuals)
    found = profile(graph)
    forward, backward = (loop for loop in graph.loops if loop.stop > loop.start)
    for at in range(forward.start, backward.stop):
        assert found.curve[at] >= 5 * 256 * len(residuals)
    assert found.parts["residuals"] == 5 * 256 * len(residuals)


@pytest.mark.parametrize("sliced", [False, True])
def test_what_a_loop_reads_stays_until_it_ends(sliced: bool) -> None:
    """Not until its first reader in the body: every iteration reads it."""

    def step(x: Any, w: Any) -> Any:
        read = jnp.sin(x) if sliced else jnp.sin(w)
        rows = read if sliced else x

        def body(carry: Any, row: Any) -> Any:
            carry = jnp.sin(carry * row.sum()) if sliced else jnp.sin(carry @ read)
            return jnp.cos(jnp.tanh(carry)), None

        return jax.lax.scan(body, w[0], rows)[0]

    graph = graph_of(step, 2)
    (loop,) = graph.loops
    made = next(op for op in graph.ops if op.primitive == "sin").results[0]
    reader = next(op.index for op in graph.ops if made in op.operands)
    found = profile(graph)
    given = sum(graph.values[v].bytes for v in graph.inputs)
    assert loop.start <= reader < loop.stop - 1
    assert all(found.curve[at] >= given + graph.values[made].bytes for at in range(reader, loop.stop))


def test_captured_constants_stay_to_the_end() -> None:
    table = jnp.ones((8, 8))
    graph = trace(lambda x: (x @ table) @ x, (square(),), {}).graph
    without = trace(lambda x: (x @ x) @ x, (square(),), {}).graph
    assert (profile(graph).curve - profile(without).curve).tolist() == [256, 256]


@pytest.mark.parametrize(
    ("shape", "dtype", "rows"),
    [
        ((4096, 1), "float32", 1), ((4096, 1), "bfloat16", 2), ((4096, 1), "int8", 4), ((4096, 2), "int8", 4),
        ((4096, 2), "bfloat16", 2),
    ],
)  # fmt: skip
def test_a_tile_on_tpu_has_as_many_rows_as_four_bytes_hold(shape: tuple[int, ...], dtype: str, rows: int) -> None:
    """{0,1:T(1,128)}, {0,1:T(2,128)(2,1)}, {0,1:T(4,128)(4,1)}, as compiled for v5e (jax 0.10.2, libtpu 0.0.42.1)."""
    item = np.dtype(jnp.dtype(dtype)).itemsize
    tensor = Value(index=0, shape=shape, dtype=dtype, item_bytes=item, name="x")
    assert device_bytes(tensor, np.full((1, len(AXES)), NONE, np.int8), AXES, "tpu").tolist() == [4096 * rows * item]


@given(
    shape=st.lists(st.sampled_from((1, 2, 3, 8, 25, 197, 200, 1024)), min_size=1, max_size=4),
    item=st.sampled_from((2, 4)),
)
def test_a_tpu_pads_what_no_tile_holds_and_nothing_else(shape: list[int], item: int) -> None:
    tensor = Value(index=0, shape=tuple(shape), dtype="x", item_bytes=item, name="x")
    places = all_places(tensor.shape, AXES)
    on_gpu, on_tpu = (device_bytes(tensor, places, AXES, platform) for platform in ("gpu", "tpu"))
    assert (on_tpu >= on_gpu).all()
    for row, plain, padded in zip(places, on_gpu, on_tpu, strict=True):
        local = [
            int(np.ceil(n / np.prod([s for (_, s), d in zip(AXES, row, strict=True) if d == i])))
            for i, n in enumerate(shape)
        ]
        pairs = [(a, b) for a in range(len(local)) for b in range(len(local)) if a != b]
        if any(local[a] % 8 == 0 and local[b] % 128 == 0 for a, b in pairs):
            assert padded == plain
        elif pairs and all(local[b] % 128 for b in range(len(local))):
            assert padded > plain


def test_weights_that_a_loop_converts_are_there_twice_on_tpu() -> None:
    def step(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (x @ w.astype(jnp.bfloat16), None), x, weights)[0]

    stack = jax.ShapeDtypeStruct((6, 128, 128), jnp.float32)
    graph = trace(step, (stack, jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)), {}).graph
    rules = graph_rules(graph)
    (second,) = traffic(graph, rules, "tpu").second_stacks
    assert second.trips == 6 and graph.values[second.value].shape == (128, 128)
    assert graph.values[second.value].dtype == "bfloat16"
    assert not traffic(graph, rules, "gpu").second_stacks


def test_what_is_fused_runs_when_its_last_operand_is_made() -> None:
    """A gradient's arithmetic stands at the end, and holds nothing up till then."""

    def step(w: Any, x: Any, m: Any) -> Any:
        y = x @ w
        grad = y @ x
        for _ in range(5):
            y = jnp.tanh(y) @ w
        return y, 0.9 * m + grad * 2.0

    graph = graph_of(step, 3)
    rules = graph_rules(graph)
    times = traffic(graph, rules, "tpu").times
    products = [op.index for op in graph.ops if op.primitive == "dot_general"]
    last = max(op.index for op in graph.ops if op.primitive in ("add", "add_any"))
    assert last > products[-1] and times[last] == products[1]
    producers = graph.producers()
    for op in graph.ops:
        for value in op.operands:
            if producers[value] >= 0 and op.primitive == "dot_general":
                assert times[producers[value]] <= times[op.index]


def test_a_sum_over_devices_needs_no_scratch() -> None:
    """All_reduces of 8 to 512 MiB and MLPs, compiled for v5e, v5p and v6e, report none and have none in their heap."""
    graph = graph_of(_chain, 2)
    product = graph.ops[0].results[0]
    made = {v.index: WHOLE for v in graph.values if not v.constant}
    reads = {(op.index, p): made[v] for op in graph.ops for p, v in enumerate(op.operands)}

    def peak(platform: str, row: np.ndarray) -> int:
        kinds, stored = ["batch"] * len(graph.inputs), [True] * len(graph.values)
        return simulate_memory(
            graph, AXES, stored, kinds, made | {product: row}, reads, platform=platform
        ).peak_bytes

    for platform in ("tpu", "gpu"):
        assert peak(platform, PENDING) == peak(platform, WHOLE)


def test_what_a_kernel_makes_for_itself_is_in_memory_where_another_reads_a_slice_of_it() -> None:
    """A gradient that its weight's update takes whole, and the gradients' norm in slices."""

    def step(w: Any, x: Any) -> Any:
        gradient = x.T @ x
        return w - gradient, jnp.sum(gradient * gradient)

    graph = graph_of(step, 2, donate_argnums=(0,))
    crossing = traffic(graph, graph_rules(graph), "tpu")
    made = {v.index: WHOLE for v in graph.values if not v.constant}
    alike = {(op.index, p): WHOLE for op in graph.ops for p, v in enumerate(op.operands) if v in made}
    total = next(op for op in graph.ops if op.primitive == "reduce_sum")

    def peak(reads: Mapping[tuple[int, int], np.ndarray]) -> int:
        return simulate_memory(
            graph, AXES, crossing.stored, ["batch"] * 2, made, reads, inside=crossing.inside, times=crossing.times
        ).peak_bytes

    assert crossing.inside[total.operands[0]] and not crossing.stored[total.operands[0]]
    assert peak(alike | {(total.index, 0): ROWS}) - peak(alike) == graph.values[total.operands[0]].bytes


def test_a_sum_that_stays_whole_is_whole_until_its_pieces_are_read() -> None:
    graph = graph_of(_chain, 2)
    product = graph.ops[0].results[0]
    made = {v.index: WHOLE for v in graph.values if not v.constant} | {product: np.array([-2, -2], np.int8)}
    reads = {(op.index, p): made[v] for op in graph.ops for p, v in enumerate(op.operands)}
    reads |= {key: np.array([0, 1], np.int8) for key, row in reads.items() if (row == -2).all()}

    def alive(whole_sums: bool) -> int:
        kinds, stored = ["batch"] * len(graph.inputs), [True] * len(graph.values)
        memory = simulate_memory(graph, AXES, stored, kinds, made, reads, whole_sums=whole_sums)
        return int(memory.curve[1])

    size = int(graph.values[product].bytes)
    assert alive(whole_sums=True) - alive(whole_sums=False) == size - size // 8


def test_gathered_rows_and_small_tables_lie_row_by_row_on_tpu() -> None:
    """Eight columns fill a tile of 128 lanes as rows, and one of 8 sublanes as columns."""

    def peak(table: int, indices: int, platform: str) -> int:
        def step(t: Any, i: Any) -> Any:
            return jnp.sum(jax.lax.sort(t[i], dimension=0))

        shapes = (jax.ShapeDtypeStruct((table, 8), jnp.float32), jax.ShapeDtypeStruct((indices,), jnp.int32))
        graph = trace(step, shapes, {}).graph
        made = {v.index: np.array([-1, -1], np.int8) for v in graph.values if not v.constant}
        read = {(op.index, p): made[v] for op in graph.ops for p, v in enumerate(op.operands) if v in made}
        stored = traffic(graph, graph_rules(graph), platform).stored
        return simulate_memory(graph, AXES, stored, ["batch"] * 2, made, read, platform=platform).peak_bytes

    rows, small, large = 1 << 14, 1 << 12, 1 << 20
    assert peak(small, rows, "gpu") < (small + 3 * rows) * 32
    padded = 16 * rows * 32
    assert peak(small, rows, "tpu") > padded + 16 * small * 32
    # a copy of the large table in rows would take 512 MB: it is left in columns, and what is taken from it too
    assert peak(large, rows, "tpu") - large * 32 < padded


@pytest.mark.parametrize(
    ("shape", "dim", "compiled"),
    [
        ((12, 768, 12, 64), 1, 75_497_472),
        ((12, 12, 64, 768), 3, 75_497_472),
        ((8, 1024, 4096), 0, 0),
        ((8192, 1024), 0, 0),
    ],
)
def test_what_a_tpu_gathers_elsewhere_than_outermost_is_copied(
    shape: tuple[int, ...], dim: int, compiled: int
) -> None:
    """Sizes are buffers of T5 and of a GPT block compiled for v5e; 0: the result itself."""
    tensor = Value(index=0, shape=shape, dtype="float32", item_bytes=4.0, name="w")
    before = np.array([dim, dim], np.int8)
    assert gathered_bytes(tensor, before[None], WHOLE[None], AXES, "tpu") == compiled
    assert gathered_bytes(tensor, before[None], WHOLE[None], AXES, "gpu") == (tensor.bytes if dim else 0)
    assert gathered_bytes(tensor, WHOLE[None], WHOLE[None], AXES, "tpu") == 0


def test_pieces_of_several_dimensions_lie_as_they_were_on_tpu() -> None:
    """f32[5200, 1, 325] is what an LSTM's [650, 4, 650] was gathered to over eight v5e, in tiles of 1 x 128."""
    tensor = Value(index=0, shape=(650, 4, 650), dtype="float32", item_bytes=4.0, name="w")
    before = np.array([1, 2], np.int8)
    assert gathered_bytes(tensor, before[None], WHOLE[None], (("data", 4), ("model", 2)), "tpu") == 5200 * 384 * 4


def test_a_new_parameter_gathered_in_another_order_waits_for_the_end() -> None:
    def step(state: dict[str, Any], x: Any) -> Any:
        new = state["w"] - x
        return {"w": new}, jnp.cumsum(x, axis=0).sum()

    graph = trace(step, ({"w": square(128)}, square(128)), {}, donate_argnums=(0,)).graph
    (settled,) = [graph.outputs[o] for _, o in graph.aliases]
    stored = traffic(graph, graph_rules(graph), "tpu").stored

    def last(row: np.ndarray, platform: str) -> int:
        made = {v.index: WHOLE for v in graph.values if not v.constant} | {settled: row}
        reads = {(op.index, p): made[v] for op in graph.ops for p, v in enumerate(op.operands) if v in made}
        found = simulate_memory(graph, AXES, stored, ["batch"] * 2, made, reads, platform=platform)
        return int(found.curve[-1])

    rows, columns = np.array([0, -1], np.int8), np.array([1, -1], np.int8)
    assert last(columns, "tpu") - last(rows, "tpu") == 128 * 128 * 4
    assert last(columns, "gpu") - last(rows, "gpu") == 128 * 128 * 4
    assert last(columns, "cpu") == last(rows, "cpu")


def test_a_stack_that_a_gpu_writes_again_is_there_twice_while_the_last_product_before_its_loop_runs() -> None:
    """The copy needs nothing of that product: GPT-2's logits are still alive when it is made (H100, jax 0.10.2)."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            def layer(h: Any, _: None) -> Any:
                scores = jnp.einsum("abi,abj->aij", h, h @ w)
                return h + jnp.einsum("iaj,abj->abi", jax.nn.softmax(scores.transpose(1, 0, 2), axis=-1), h), None

            h, _ = jax.lax.scan(layer, x, None, length=4)
            return jnp.tanh(h @ w).sum()

        return jax.grad(loss)(w)

    graph = trace(step, (square(16), jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)), {}).graph
    rules = graph_rules(graph)
    (stack,) = traffic(graph, rules, "gpu").second_stacks
    forward, backward = (loop for loop in graph.loops)
    assert forward.stop <= stack.start < backward.start < stack.stop
    between = [op.index for op in graph.ops if forward.stop <= op.index < backward.start and rules[op.index].matmul]
    assert stack.start == between[-1]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_loop_before_a_product_that_sums_batch_and_time_reads_its_residuals_in_that_products_order(
    batch_first: bool,
) -> None:
    """A hidden Markov model's f32[511, 64, 64, 512] is there twice on H100 where products have the batch first."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            scores = jnp.einsum("btd,ds->bts" if batch_first else "tbd,ds->tbs", x, w)
            steps = scores.swapaxes(0, 1) if batch_first else scores

            def forward(state: Any, score: Any) -> Any:
                return jax.nn.logsumexp(state[:, :, None] + w, axis=1) + score, None

            return jax.lax.scan(forward, steps[0], steps)[0].sum()

        return jax.grad(loss)(w)

    graph = trace(step, (square(16), jax.ShapeDtypeStruct((4, 8, 16), jnp.float32)), {}).graph
    stacks = traffic(graph, graph_rules(graph), "gpu").second_stacks
    if batch_first:
        (stack,) = stacks
        assert graph.values[stack.value].shape == (4, 16, 16)
        assert stack.trips == 8
    else:
        assert not stacks


def test_sums_that_a_loop_accumulates_are_there_as_long_as_it_runs() -> None:
    """A GPT of four layers that accumulates gradients under data parallelism: 1702 MB compiled for v5e, 1459 predicted
    while pending sums were taken to be sent at once, 1762 since (jax 0.10.2, libtpu 0.0.42.1)."""

    def fn(a: Any, batches: Any) -> Any:
        total, _ = jax.lax.scan(lambda total, b: (total + (b @ a) @ b, None), jnp.zeros_like(a), batches)
        return total @ a

    graph = trace(fn, [square(), jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)], {}).graph
    (carry,) = [op for op in graph.ops if op.primitive == "carry_init"]
    (onward,) = [op for op in graph.ops if op.primitive == "carry_next"]
    last = graph.ops[-1]
    summed = profile(
        graph, {carry.results[0]: PENDING, onward.operands[0]: PENDING}, {(last.index, 0): WHOLE}
    )
    kept = profile(graph)
    inside = slice(carry.index + 1, onward.index - 1)
    assert np.all(summed.curve[inside] == kept.curve[inside])
