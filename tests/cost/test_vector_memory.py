"""What lies in a TPU's vector memory for all of its life takes no main memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxplan
from jaxplan.cost import CostModel, step_memory, traffic
from jaxplan.cost.estimates import Estimates
from jaxplan.cost.ledger import Ledger
from jaxplan.cost.vector_memory import Stay, VectorMemory, vector_memory
from jaxplan.cost.vector_places import Places
from jaxplan.hardware import compile_for, load_profile
from jaxplan.ir import Graph, trace
from jaxplan.lowering import compiled_memory
from jaxplan.sharding import graph_rules
from models import Case, dlrm, gpt, llama, lstm, mlp

MIB = 2**20


def chip(
    seconds: list[float],
    uses: dict[int, list[int]] | None = None,
    loops: tuple[tuple[int, int], ...] = (),
    busy: tuple[int, ...] = (),
    written: frozenset[int] | None = None,
) -> VectorMemory:
    """Of 100 bytes that are copied in an eighth of a second; `seconds` of kernels at every moment, loops five times."""
    depth = np.array([sum(a <= t < b for a, b in loops) for t in range(len(seconds))])
    return VectorMemory(
        room=100, bytes_per_s=800.0, elapsed_s=np.concatenate(([0.0], np.cumsum(seconds * 5.0**depth))),
        weight=np.where(np.isin(range(len(seconds)), busy), 0.0, 5.0**depth), loops=loops,
        uses=uses or {}, outside=frozenset(), written=written, saved_s={},
    )  # fmt: skip


def test_short_lives_that_fit_are_kept() -> None:
    both = [Stay("activations", 0, 2, 60), Stay("copies", 2, 4, 70)]
    assert sorted(chip([0.2] * 4).kept(both, 0)[0]) == sorted(both)


def test_what_waits_long_for_its_next_read_is_copied_out() -> None:
    near, far = Stay("activations", 0, 12, 10, value=1), Stay("activations", 0, 12, 10, value=2)
    kept, gone = chip([0.2] * 12, {1: [3, 7, 11], 2: [3, 11]}).kept([far, near], 0)[:2]
    assert kept == [near, far._replace(start=11)] and gone == [far]  # once it is back main memory has it no longer


def test_those_first_that_save_most_for_the_root_of_their_bytes() -> None:
    large, small = Stay("activations", 1, 4, 70, value=1), Stay("activations", 0, 4, 40, value=2)
    assert chip([0.1] * 4, {1: [3], 2: [3]}).kept([small, large], 0)[0] == [large]
    assert chip([0.1] * 4, {1: [3], 2: [1, 2, 3]}).kept([small, large], 0)[0] == [small]


def test_kernels_that_compute_longer_than_they_read_are_saved_nothing() -> None:
    large, small = Stay("activations", 1, 4, 70, value=1), Stay("activations", 0, 4, 40, value=2)
    assert chip([0.1] * 4, {1: [3], 2: [2]}, busy=(1, 3)).kept([large, small], 0)[0] == [small]


def test_what_is_copied_out_has_room_until_it_is_and_before_it_is_read() -> None:
    gone = Stay("activations", 0, 12, 90, value=1)
    memory = chip([0.2] * 12, {1: [1, 2, 11]})
    during, between, before = (Stay("activations", t, t + 1, 20) for t in (2, 5, 10))
    assert memory.kept([gone, during, between, before], 0)[:2] == ([between], [gone])


def test_arguments_that_are_about_to_be_read_take_room() -> None:
    argument, other = Stay("parameter", 0, 4, 90, value=1, given=True), Stay("activations", 2, 4, 30)
    assert chip([0.2] * 4, {1: [2, 3]}).kept([argument, other], 0)[:2] == ([], [])
    assert chip([0.2] * 4, {1: [1]}).kept([argument, other], 0)[:2] == ([other], [])


@pytest.mark.parametrize(
    ("slices", "slice_bytes", "first", "of_a_copy"),
    [(4, 10, 8, 8), (4, 10, 3, 6), (4, 10, 1, 1), (4, 60, 8, 1), (0, 20, 8, 6), (1, 10, 8, 1)],
)
def test_copies_have_tables(slices: int, slice_bytes: int, first: int, of_a_copy: int) -> None:
    """One there and back, two for each slice."""
    memory = chip([0.2] * 12, {1: [3, 11], 2: [1, 11]})._replace(
        of_several=7, slices=slices, slice_bytes=slice_bytes, firsts={1: first, 2: first}
    )
    argument = Stay("parameter", 0, 12, 50, value=1, given=True)
    assert memory.kept([argument], 0).tables == 7 + 2 * of_a_copy
    made = Stay("activations", 0, 12, 50, value=2)
    assert memory.kept([made], 0).tables == 7 + of_a_copy + 1
    assert memory.kept([made._replace(stop=2)], 0).tables == 7


def test_small_buffers_have_tables_by_their_number() -> None:
    given, made = Stay("parameter", 0, 4, 10, given=True), Stay("activations", 0, 4, 10)
    memory = chip([0.2] * 4)._replace(room=10**6)
    assert memory.kept([given] * 5 + [made] * 17, 0).tables == 5 + 2


def test_a_wait_in_a_loop_is_that_of_one_iteration() -> None:
    inside = Stay("activations", 1, 4, 10, value=1)
    seconds = [0.0, 0.6, 0.6, 0.6, 0.0]
    assert chip(seconds, {1: [3]}, loops=((0, 5),)).kept([inside], 0)[0] == [inside]
    assert inside not in chip([5 * s for s in seconds], {1: [3]}).kept([inside], 0)[0]


def test_what_a_loop_reads_has_its_place_for_all_of_its_iterations() -> None:
    outside = Stay("copies", 0, 3, 10, value=1)
    assert chip([0.1, 0.15, 0.15, 0.1], {1: [1]}, ((1, 3),)).kept([outside], 0)[0] == [outside]
    assert not chip([0.1, 0.25, 0.25, 0.1], {1: [1]}, ((1, 3),)).kept([outside], 0)[0]
    made = outside._replace(part="activations")
    assert not chip([0.1, 0.15, 0.15, 0.1], {1: [1]}, ((1, 3),)).kept([made], 0)[0]


def test_what_loops_stack_has_a_place_between_two_loops() -> None:
    stack = Stay("residuals", 0, 5, 10)
    memory = chip([0.06, 0.06, 0.3, 0.06, 0.06], loops=((0, 2), (3, 5)))
    assert sorted((one.start, one.stop) for one in memory.kept([stack], 0)[0]) == [(0, 2), (2, 3), (3, 5)]
    longer = chip([0.3, 0.3, 0.3, 0.06, 0.06], loops=((0, 2), (3, 5)))
    assert sorted(one.start for one in longer.kept([stack], 0)[0]) == [2, 3]
    assert not memory.kept([stack._replace(part="activations")], 0)[0]


def graph_of(f: Any, *shapes: tuple[int, ...]) -> Graph:
    return trace(f, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), {}).graph


def on_chip(graph: Graph, hardware: str) -> VectorMemory | None:
    times = range(len(graph.ops))
    nothing, every = Estimates({}, {}, frozenset()), [True] * len(graph.values)
    return vector_memory(
        graph, times, [t + 1 for t in times], nothing, load_profile(hardware), [None] * len(times), every
    )


def test_what_is_sorted_is_in_main_memory() -> None:
    graph = graph_of(lambda x: jnp.cos(jnp.sort(jnp.sin(x))), (64, 128))
    found = on_chip(graph, "tpu-v5e")
    (sort,) = [op for op in graph.ops if op.primitive == "sort"]
    assert found is not None and found.outside == {*sort.operands, *sort.results}


@pytest.mark.parametrize(("hardware", "there"), [("tpu-v5e", True), ("tpu-v4", False), ("h100", False)])
def test_only_machines_with_room_on_the_chip_have_it(hardware: str, there: bool) -> None:
    assert (on_chip(graph_of(jnp.sin, (8, 128)), hardware) is not None) is there


def peak(f: Any, seconds: float | None, *shapes: tuple[int, ...]) -> int:
    """Of a v5e that has everything whole, every operation of which takes that long."""
    graph = graph_of(f, *shapes)
    crossing = traffic(graph, graph_rules(graph), "tpu")
    row = np.zeros(0, np.int8)
    values = {v.index: row for v in graph.values if not v.constant}
    reads = {(op.index, place): row for op in graph.ops for place, v in enumerate(op.operands) if v in values}
    model, kinds = CostModel(profile=load_profile("tpu-v5e"), axes=(), links=()), ["batch"] * len(graph.inputs)
    took = None if seconds is None else {op.index: seconds for op in graph.ops}
    found = step_memory(graph, (), model, crossing, kinds, values, reads, {}, seconds=took)
    return found.peak_bytes - found.parts.get("tables", 0)  # their number is found otherwise without vector memory


def chain(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x.sum()


def test_the_peak_is_without_what_lies_on_the_chip() -> None:
    shapes = (2048, 2048), (2048, 2048)
    everything, quick = (peak(chain, s, *shapes) for s in (None, 1e-6))
    assert everything - quick >= 16 * MIB
    assert quick < 33 * MIB  # the arguments and tables


@pytest.mark.parametrize("step", [lambda x: jnp.abs(jnp.fft.fft(x)), lambda x: jnp.linalg.eigh(x @ x.T)[1]])
def test_with_transforms_and_decompositions_all_is_in_main_memory(step: Any) -> None:
    """A Fourier operator was 70 % under, a step of Shampoo 76."""
    assert peak(step, 1e-6, (512, 512)) == peak(step, 1.0, (512, 512))


@pytest.mark.parametrize(("images", "there"), [(8, True), (7, False)])
def test_where_a_device_has_few_images_they_are_in_main_memory(images: int, there: bool) -> None:
    def net(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(jax.lax.conv(x, w, (1, 1), "SAME"))
        return x.sum()

    shapes = (images, 128, 64, 64), (128, 128, 3, 3)
    assert (peak(net, 1e-6, *shapes) < peak(net, None, *shapes)) is there


@pytest.mark.aot_tpu
def test_a_small_step_is_compiled_to_what_is_planned(tpu_topology: Any) -> None:
    """Its activations are 50 MB, of which the compiled program has next to nothing in main memory."""

    def step(w: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(w: list[jax.Array]) -> jax.Array:
            y = x
            for one in w:
                y = y + jax.nn.gelu(y @ one)
            return (y.astype(jnp.float32) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, b: a - 1e-3 * b, w, gradients), value

    shapes = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 6, jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
    mesh = jaxplan.target("tpu-v5e:2x2").mesh(d=4)
    planned = jaxplan.auto_shard(step, mesh, donate_argnums=(0,))
    promised = planned.plan(*shapes).cost.peak_bytes
    found = compiled_memory(planned.lower(*shapes).compile())
    compiled = found.argument_bytes + found.output_bytes - found.alias_bytes + found.temp_bytes
    assert promised == pytest.approx(compiled, rel=0.2)


def test_places_are_pieces_of_addresses() -> None:
    """What is left beside a buffer that stays is 70 bytes, in pieces of 40 and 30."""
    places = Places(100, 3)
    assert places.take(0, 2, 40) and places.take(0, 4, 30)
    assert not places.take(2, 4, 41)
    assert places.take(2, 4, 30)  # behind it, in the smaller one
    assert places.take(2, 4, 40)


def test_large_buffers_are_kept_where_others_contend_for_the_room_if_they_are_read_often() -> None:
    one, other = Stay("activations", 0, 2, 60, value=1), Stay("activations", 2, 4, 50)
    often = Stay("activations", 0, 5, 60, value=2)
    memory = chip([0.1] * 5, {2: [1, 2, 3, 4]})
    assert sorted(memory.kept([one, other], 100)[0]) == [one, other]
    assert memory.kept([one, other], 200)[0] == [other]
    assert memory.kept([often], 200)[0] == [often]
    assert not memory.kept([often._replace(size=76)], 200)[0]
    assert not chip([0.1] * 5, {2: [1, 2, 3, 4]}, busy=(0, 1, 2, 3, 4)).kept([often], 200)[0]


def test_two_cores_write_results_of_fused_loops_alone_into_vector_memory() -> None:
    """What else is made is in main memory, at least until it has been copied for its next read."""
    fused, made = Stay("activations", 0, 8, 10, value=1), Stay("activations", 0, 8, 10, value=2)
    uses = {1: [2, 7], 2: [2, 5, 7]}
    whole, split = (chip([0.1] * 8, uses, written=written) for written in (None, frozenset({1})))
    assert sorted(whole.kept([fused, made], 0)[0]) == sorted([fused, made])
    kept, gone = split.kept([fused, made], 0)[:2]
    assert sorted(kept) == [fused, made._replace(start=2)] and gone == [made]
    stack, copy = (Stay(part, 0, 8, 10, value=1) for part in ("residuals", "copies"))
    assert split.kept([stack], 0)[0] == []
    assert split.kept([copy], 0)[0] == [copy._replace(start=2)]


def test_copies_break_up_the_order_of_many_buffers() -> None:
    """Six hundredths of what is copied out of the chip's hundred bytes, up to twice them; of a few buffers less."""

    def gaps(count: int, room: int) -> int:
        """Of buffers that are read at once, and again after too long a time."""
        seconds = [0.01] * (count + 2) + [2.0] * 2
        memory = chip(seconds, {value: [value + 1, count + 3] for value in range(count)})
        ledger = Ledger(count + 4, memory._replace(room=room, bytes_per_s=8.0 * room))
        for value in range(count):
            ledger.add("activations", value, count + 4, 40, value=value)
        return ledger.profile("tpu").parts.get("gaps", 0)

    assert gaps(100, 100) == 12
    assert gaps(25, 100) == 3
    assert gaps(25, 30) == 0  # none is ever there


NETWORKS: dict[str, tuple[Any, Any]] = {
    "gpt": (gpt, gpt.Config(
        n_layers=4, dim=512, n_heads=8, seq_len=256, batch_size=32, vocab_size=8192, dtype="float32"
    )),
    "llama": (llama, llama.Config(
        n_layers=4, dim=768, n_heads=12, n_kv_heads=4, hidden_dim=2048, vocab_size=16000, seq_len=256, batch_size=16,
        dtype="float32",
    )),
    "dlrm": (dlrm, dlrm.CONFIGS["criteo-kaggle"]),
    "columns": (dlrm, replace(
        dlrm.CONFIGS["criteo-kaggle"], table_rows=(100_000, 50_000, 20_000, 5_000, 1_000), batch_size=8192
    )),
    "lstm": (lstm, lstm.CONFIGS["ptb-medium"]),
    "mlp": (mlp, mlp.Config(
        input_dim=784, hidden_dims=(2048, 2048), n_classes=10, batch_size=4096, dtype="float32"
    )),
}  # fmt: skip


BEFORE_0_12 = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason="XLA of jax 0.12 leaves the gradient of 16 columns in main memory, 160 MB for 109: not modelled",
)


GAPS = pytest.mark.xfail(
    strict=True, reason="112 MB planned since tables of results go by the copies there are, 120 compiled: gaps of 16"
)

@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("case", "target", "search", "least", "most"),
    [
        pytest.param("gpt", "tpu-v5e:2x4", "ilp", 0.95, 1.15, id="f32", marks=[pytest.mark.aot_broad, GAPS]),
        pytest.param("llama", "tpu-v5e:2x4", "ilp", 0.93, 1.15, id="16000 words", marks=pytest.mark.aot_broad),
        pytest.param("dlrm", "tpu-v5e:2x4", "ilp", 0.95, 1.1, id="tables"),
        pytest.param("columns", "tpu-v6e:4x4", "ilp", 0.95, 1.1, id="a column of wider rows", marks=BEFORE_0_12),
        pytest.param("lstm", "tpu-v5p:2x2x2", "fsdp", 0.95, 1.15, id="stacks", marks=pytest.mark.aot_broad),
        pytest.param("mlp", "tpu-v5p:2x2x2", "ilp", 0.9, 1.1, id="products in main memory, and a bias' gradient"),
    ],
)
def test_networks_are_compiled_to_what_is_planned(
    case: str, target: str, search: str, least: float, most: float
) -> None:
    """120, 225, 612, 112, 83 and 67 MB; before vector memory was walked through as the compiler does, 41 % over, 2 %
    over, exact, 94, 33 and 66 % under."""
    model, config = NETWORKS[case]
    step = Case(name=case, model=model, config=config, what=case)
    there = jaxplan.target(target)
    mesh = there.mesh(data=4, model=len(there.devices) // 4)
    options: Any = {"search": search}
    sharded = jaxplan.auto_shard(step.step(), mesh, donate_argnums=0, hardware=target.split(":")[0], options=options)
    predicted = sharded.plan(*step.shapes()).cost.peak_bytes
    compiled = compiled_memory(compile_for(sharded.lower(*step.shapes()), mesh)).peak_bytes
    assert least * compiled < predicted < most * compiled
