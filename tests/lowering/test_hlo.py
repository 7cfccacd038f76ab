"""Compiled HLO is read as written: groups in each spelling, loops multiplied, each collective once."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.errors import ArgumentError
from jaxplan.hardware import compile_for, kept_heap
from jaxplan.lowering.hlo import compiled_collectives, compiled_memory, estimated_cycles
from jaxplan.lowering.hlo_text import Sources
from jaxplan.lowering.replica_groups import groups_of, pairs_of
from jaxplan.sharding.groups import axes_of_groups, axes_of_pairs

AXES = (("data", 4), ("model", 2))


def members(groups: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(int(d) for d in group) for group in groups}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        ("replica_groups=[4,2]<=[8]", [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [{0, 2, 4, 6}, {1, 3, 5, 7}]),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", [set(range(8))]),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2}", [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (
            "replica_groups=mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
            [{0, 1}, {2, 3}, {4, 5}, {6, 7}],
        ),
        ("replica_groups={}", [set(range(8))]),
        ("channel_id=1", [set(range(8))]),
    ],
)
def test_replica_groups_in_every_spelling(text: str, expected: list[set[int]]) -> None:
    assert members(groups_of(f"channel_id=3, {text}, use_global_device_ids=true", 8)) == {
        frozenset(g) for g in expected
    }


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), pick=st.integers(0, 15))
def test_groups_made_by_axes_are_named_by_them(sizes: list[int], pick: int) -> None:
    """For each subset of axes: devices that agree on all the other coordinates form a group."""
    axes = tuple((f"a{i}", size) for i, size in enumerate(sizes))
    over = [i for i in range(len(sizes)) if pick >> i & 1]
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(size) for size in sizes))):
        groups.setdefault(tuple(c for i, c in enumerate(place) if i not in over), []).append(device)
    found = axes_of_groups(np.array(list(groups.values())), axes)
    assert found == tuple(f"a{i}" for i in over if sizes[i] > 1)


def test_groups_within_an_axis_are_named_as_part_of_it() -> None:
    axes = (("model", 8),)
    assert axes_of_groups(np.array([[0, 1], [2, 3], [4, 5], [6, 7]]), axes) == ("model:(4)2",)
    assert axes_of_groups(np.array([[0, 4], [1, 5], [2, 6], [3, 7]]), axes) == ("model:(1)2",)
    assert axes_of_groups(np.array([[0, 2, 4, 6], [1, 3, 5, 7]]), axes) == ("model:(1)4",)


@pytest.mark.parametrize(
    "groups", [[[0, 3], [1, 2], [4, 7], [5, 6]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 4], [3, 5], [6, 7]]]
)
def test_groups_that_no_axes_make_are_not_given_a_name(groups: list[list[int]]) -> None:
    assert axes_of_groups(np.array(groups), (("model", 8),)) == ("?",)
    assert axes_of_groups(groups_of("replica_groups={{0,1,2},{3}}", 4), (("model", 4),)) == ("?",)


def test_pairs_name_the_axes_along_which_they_move() -> None:
    ring = ",".join(f"{{{d},{(d + 2) % 8}}}" for d in range(8))
    assert axes_of_pairs(pairs_of(f"source_target_pairs={{{ring}}}"), AXES) == ("data",)
    assert axes_of_pairs(pairs_of("source_target_pairs={{0,1},{1,0}}"), AXES) == ("model",)
    assert axes_of_pairs(pairs_of("source_target_pairs={{1,2},{2,1}}"), AXES) == ("data", "model")


LOOP = """HloModule step

%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %unrelated = s32[] constant(99)
  %limit = s32[] constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0:T(8,128)S(1)} get-tuple-element(%p), index=1
  %start = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={op_name="jit(f)/dot"}
  %done = f32[32]{0} all-gather-done(%start), metadata={op_name="jit(f)/dot"}
  %heavy = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner, backend_config={"estimated_cycles":"100"}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %heavy)
}

%inner (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%a), backend_config={"estimated_cycles":"7"}
}

%all-reduce-scatter.1 (a: f32[8,4]) -> f32[2,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %sum = f32[8,4]{1,0} all-reduce(%a), channel_id=2, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %ds = f32[2,4]{1,0} dynamic-slice(%sum, %a), dynamic_slice_sizes={2,4}
}

%async_begin (a: bf16[4]) -> bf16[16] {
  %a = bf16[4]{0} parameter(0)
  ROOT %g = bf16[16]{0} all-gather(%a), channel_id=9, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

%async_end (a: bf16[4]) -> bf16[16] {
  %a = bf16[4]{0} parameter(0)
  ROOT %g = bf16[16]{0} all-gather(%a), channel_id=9, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

ENTRY %main (x: f32[8], y: f32[8,4], z: bf16[4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8,4]{1,0} parameter(1)
  %z = bf16[4]{0} parameter(2)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%cond, body=%body
  %known = (s32[], f32[8]{0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %rs = f32[2,4]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/grad"}, backend_config={"estimated_cycles":"40"}
  %other = f32[2,4]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/other"}
  %begin = bf16[16]{0} fusion(%z), kind=kCustom, calls=%async_begin
  %end = bf16[16]{0} fusion(%z), kind=kCustom, calls=%async_end
  %both = (f32[8]{0}, f32[8,4]{1,0}) all-reduce(%x, %y), channel_id=4, replica_groups={}, to_apply=%add
  %move = f32[8]{0} collective-permute(%x), channel_id=5, source_target_pairs={{0,1},{1,0}}
  ROOT %out = f32[8]{0} copy(%x)
}
"""  # noqa: E501


def test_loops_pairs_fusions_and_combined_collectives() -> None:
    found = [(c.kind, c.axes, c.bytes, c.trips, c.op_name) for c in compiled_collectives(LOOP, AXES)]
    assert found == [
        ("all_gather", ("data",), 4 * 8 * 4, 5.0, "jit(f)/dot"),
        ("all_gather", ("data",), 4 * 8 * 4, 3.0, "jit(f)/dot"),
        ("reduce_scatter", ("data",), 8 * 4 * 4, 1.0, "jit(f)/grad"),
        ("reduce_scatter", ("data",), 8 * 4 * 4, 1.0, "jit(f)/other"),  # XLA gives combined sums one channel
        ("all_gather", ("data",), 16 * 2, 1.0, ""),
        ("all_reduce", ("data", "model"), 8 * 4 + 8 * 4 * 4, 1.0, ""),
        ("collective_permute", ("model",), 8 * 4, 1.0, ""),
    ]


def test_cycles_are_a_fusions_own_times_its_trips() -> None:
    assert estimated_cycles(LOOP) == 100 * (5 + 3) + 40
    unknown = LOOP.replace('"estimated_cycles":"100"', '"estimated_cycles":"9223372036854775807"')
    assert estimated_cycles(unknown) == 40


def test_a_loop_that_asks_for_more_than_its_bound_runs_as_often_as_told() -> None:
    """A search that stops when all its beams are done: five times at most says nothing of how often."""
    text = LOOP.replace(
        "  ROOT %lt = pred[] compare(%i, %limit), direction=LT",
        "  %lt = pred[] compare(%i, %limit), direction=LT\n"
        "  %going = pred[] get-tuple-element(%p), index=1\n"
        "  ROOT %both = pred[] and(%lt, %going)",
    )
    assert compiled_collectives(text, AXES, while_trips=11.0)[0].trips == 11.0


def test_a_loop_without_a_bound_runs_as_often_as_told() -> None:
    text = LOOP.replace("%limit = s32[] constant(5)", "%limit = s32[] get-tuple-element(%p), index=2")
    assert compiled_collectives(text, AXES, while_trips=11.0)[0].trips == 11.0


def test_a_loop_that_may_end_before_its_bound_runs_as_often_as_told() -> None:
    text = LOOP.replace(
        "  ROOT %lt = pred[] compare(%i, %limit), direction=LT",
        "  %lt = pred[] compare(%i, %limit), direction=LT\n"
        "  %far = pred[] compare(%e, %least), direction=GT\n  ROOT %go = pred[] and(%lt, %far)",
    )
    assert compiled_collectives(text, AXES, while_trips=11.0)[0].trips == 11.0


WINDOWS = """HloModule step

%cond (p: (f32[8], u32[], bf16[4])) -> pred[] {
  %limit = u32[]{:T(128)} constant(7)
  %p = (f32[8]{0}, u32[], bf16[4]{0}) parameter(0)
  %i = u32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (p: (f32[8], u32[], bf16[4])) -> (f32[8], u32[], bf16[4]) {
  %one = u32[] constant(1)
  %p = (f32[8]{0}, u32[], bf16[4]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %i = u32[] get-tuple-element(%p), index=1
  %z = bf16[4]{0} get-tuple-element(%p), index=2
  %move = f32[8]{0} collective-permute(%x), channel_id=5, source_target_pairs={{0,1},{1,0}}
  %next = u32[] add(%i, %one)
  %meanwhile = bf16[16]{0} fusion(%z), kind=kCustom, calls=%async
  %later = u32[] add(%one, %next)
  %counted = u32[] copy(%later)
  ROOT %t = (f32[8]{0}, u32[], bf16[4]{0}) tuple(%move, %counted, %z)
}

%async (a: bf16[4]) -> bf16[16] {
  %a = bf16[4]{0} parameter(0)
  ROOT %g = bf16[16]{0} all-gather(%a), channel_id=9, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

ENTRY %main (x: f32[8], z: bf16[4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %z = bf16[4]{0} parameter(1)
  %one = u32[] constant(1)
  %first = u32[] copy(%one)
  %init = (f32[8]{0}, u32[], bf16[4]{0}) tuple(%x, %first, %z)
  %begin = bf16[16]{0} fusion(%z), kind=kCustom, calls=%async
  %loop = (f32[8]{0}, u32[], bf16[4]{0}) while(%init), condition=%cond, body=%body
  %end = bf16[16]{0} fusion(%z), kind=kCustom, calls=%async
  ROOT %out = f32[8]{0} copy(%x)
}
"""


def test_a_product_in_windows_runs_from_its_first_to_its_last_in_its_own_steps() -> None:
    """What the compiler itself loops over counts unsigned, here 1, 3, 5; a collective beside it goes on through it."""
    found = [(c.kind, c.trips) for c in compiled_collectives(WINDOWS, AXES)]
    assert found == [("all_gather", 1.0), ("collective_permute", 3.0)]


def test_text_that_is_not_hlo_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no ENTRY computation"):
        compiled_collectives("module @jit_step {}", AXES)


def scanned(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) @ w.T, None), x, None, length=6)[0]


def compiled(mesh: Mesh) -> Any:
    shardings = [NamedSharding(mesh, spec) for spec in (P("data"), P(None, "model"))]
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 256), (256, 512))]
    return jax.jit(scanned, in_shardings=shardings, out_shardings=shardings[0]).lower(*shapes).compile()


def test_a_compiled_scan_reduces_its_activations_each_iteration(mesh_4x2: Mesh) -> None:
    (reduce,) = compiled_collectives(compiled(mesh_4x2).as_text(), AXES)
    assert (reduce.kind, reduce.axes, reduce.trips) == ("all_reduce", ("model",), 6.0)
    assert reduce.bytes == 512 // 4 * 256 * 4


def test_memory_holds_one_devices_shares(mesh_4x2: Mesh) -> None:
    memory = compiled_memory(compiled(mesh_4x2))
    assert memory.argument_bytes == 512 // 4 * 256 * 4 + 256 * 512 // 2 * 4
    assert memory.output_bytes == 512 // 4 * 256 * 4
    total = memory.argument_bytes + memory.output_bytes + memory.temp_bytes
    assert memory.peak_bytes == total - memory.alias_bytes and memory.temp_bytes > 0


def test_a_donated_argument_is_counted_once(mesh_4x2: Mesh) -> None:
    sharding = NamedSharding(mesh_4x2, P("data"))
    step = jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding, donate_argnums=0)
    memory = compiled_memory(step.lower(jax.ShapeDtypeStruct((1024, 256), jnp.float32)).compile())
    assert memory.alias_bytes == 1024 // 4 * 256 * 4
    assert memory.peak_bytes < memory.argument_bytes + memory.output_bytes


def test_a_backend_without_memory_analysis_is_named() -> None:
    class Silent:
        def memory_analysis(self) -> None:
            return None

    with pytest.raises(ArgumentError, match="no memory analysis"):
        compiled_memory(Silent())


@pytest.mark.aot_tpu
def test_gaps_between_a_tpus_buffers_count_once(tpu_topology: Any) -> None:
    """Two convolutions and a pooling: the pooled image's place is free where its gradient's image is made."""
    device = jax.sharding.SingleDeviceSharding(tpu_topology("v5e:2x2").devices[0])

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return x.astype(jnp.float32).var()

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for shape in ((64, 64, 3, 3), (64, 64, 224, 224))
    ]
    lowered = jax.jit(jax.grad(loss)).lower(*shapes)
    program = compile_for(lowered, jax.sharding.Mesh([tpu_topology("v5e:2x2").devices[0]], ("data",)))
    assert program.memory_analysis().temp_size_in_bytes > 1.03 * (heap := compiled_memory(program).temp_bytes)
    untold = lowered.compile()
    assert kept_heap(untold) is None and program.memory_analysis().temp_size_in_bytes == (
        untold.memory_analysis().temp_size_in_bytes
    )
    assert heap <= compiled_memory(untold).temp_bytes <= 1.001 * heap


@pytest.mark.aot_tpu
def test_compiled_for_tpu_cycles_and_collectives_grow_with_the_trips(tpu_topology: Any) -> None:
    """The text of a loop of 6 is that of a loop of 12 but for its bound; what it costs doubles."""
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    text = compiled(mesh).as_text()
    (reduce,) = compiled_collectives(text, AXES)
    assert (reduce.kind, reduce.axes, reduce.trips) == ("all_reduce", ("model",), 6.0)
    bound = next(line for line in text.splitlines() if "= s32[]" in line and "constant(6)" in line)
    longer = text.replace(bound, bound.replace("constant(6)", "constant(12)"))
    assert compiled_collectives(longer, AXES)[0].trips == 12.0
    outside = 2 * estimated_cycles(text) - estimated_cycles(longer)
    assert 0 <= outside < estimated_cycles(text) / 2
    assert math.isfinite(estimated_cycles(text)) and estimated_cycles(text) > 0


@pytest.mark.aot_tpu
def test_pieces_that_are_rounded_up_are_moved_on_by_the_sum_that_made_them() -> None:
    """5632 rows over eight chips are summed in pieces of 720, and up to 7 x 16 of them belong to the neighbour."""
    mesh = jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2)

    pieces = NamedSharding(mesh, P(("data", "model")))

    def compiled(rows: int) -> list[Any]:
        parts = jax.ShapeDtypeStruct((8, rows, 2048), jnp.bfloat16)
        step = jax.jit(lambda x: jnp.tanh(x).sum(0), in_shardings=pieces, out_shardings=pieces)
        return list(compiled_collectives(step.lower(parts).compile().as_text(), AXES))

    summed, moved = compiled(5632)
    assert (summed.kind, summed.rounded) == ("reduce_scatter", False)
    assert (moved.kind, moved.axes, moved.rounded) == ("collective_permute", ("data", "model"), True)
    assert moved.bytes == 7 * 16 * 2048 * 2
    assert moved.sources == summed.sources and moved.op_name == summed.op_name != ""
    assert [c.rounded for c in compiled(4096)] == [False]


def test_the_calls_that_had_a_step_lowered_are_no_lines_of_it() -> None:
    ours = Path(jaxplan.__file__).parent / "api" / "variant.py"
    text = f'''HloModule m

FileNames
1 "/home/user/model.py"
2 "{ours}"

FunctionNames
1 "forward"
2 "Variant.lower"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=12}}
2 {{file_name_id=2 function_name_id=2 line=196}}

StackFrames
1 {{file_location_id=2 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=1}}

ENTRY %main () -> f32[] {{
}}
'''
    assert Sources(text).lines(1) == ()
    assert Sources(text).lines(2) == ("model.py:12 (forward)",)
