"""What starts together, as XLA's combiners put it into one."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from jax.sharding import AbstractMesh

from jaxplan.api import Options, model_of, target_of
from jaxplan.cost import CostModel, traffic
from jaxplan.ir import trace
from jaxplan.lowering import collective_prices
from jaxplan.lowering.ahead import waited_values
from jaxplan.lowering.shared_starts import shared_starts
from jaxplan.sharding import Collective, graph_rules, start_shares_of
from models import gpt

MIB = 2**20
BOTH = ("data", "model")


def model(hardware: str = "h100") -> CostModel:
    return model_of(target_of(AbstractMesh((4, 2), BOTH), hardware), Options())


def sent(
    kind: str, axes: tuple[str, ...] = BOTH, mib: float = 1.0, dtype: str = "bfloat16", trips: float = 1.0,
    shape: tuple[int, ...] = (512, 1024),
) -> Collective:  # fmt: skip
    return Collective(
        kind=kind, axes=axes, bytes=int(mib * MIB), trips=trips, scope="", shape=shape, dtype=dtype
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("items", "shares"),
    [
        # weights over other axes are gathered apart, and together take no less than a start
        ([sent("all_gather"), sent("all_gather"), sent("all_gather", ("data",))], [1 / 2, 1 / 2, 1.0]),
        ([sent("all_gather"), sent("all_reduce"), sent("all_gather", trips=2.0)], [1.0, 1.0, 1.0]),
        # sums of one element type alone; what is gathered is bytes
        ([sent("all_reduce"), sent("all_reduce", dtype="float32")], [1.0, 1.0]),
        ([sent("all_gather"), sent("all_gather", dtype="float32")], [1 / 2, 1 / 2]),
        # until they are too large together, scattered sums by what is left of them
        ([sent("all_reduce", mib=20), sent("all_reduce", mib=20), sent("all_reduce", mib=5)], [1.0, 1 / 2, 1 / 2]),
        ([sent("reduce_scatter", mib=20), sent("reduce_scatter", mib=20)], [1 / 2, 1 / 2]),
        ([sent("all_to_all"), sent("all_to_all")], [1.0, 1.0]),
    ],
)  # fmt: skip
def test_what_is_alike_and_unordered_starts_once(items: list[Collective], shares: list[float]) -> None:
    assert shared_starts(model(), [(item, "ends") for item in items]) == shares


def test_what_is_ordered_starts_by_itself() -> None:
    one = sent("all_gather")
    assert shared_starts(model(), [(one, None), (one, None), (one, "early"), (one, "late")]) == [1.0] * 4


def test_numbers_are_summed_at_once_on_every_platform() -> None:
    number = sent("all_reduce", mib=0.0, dtype="float32", shape=())
    assert shared_starts(model("tpu-v5e"), [(number, "total")] * 4) == [1 / 4] * 4
    otherwise = replace(number, order=("model", "data"))  # of devices in another order
    assert shared_starts(model(), [(one, "total") for one in (number, otherwise, number)]) == [1 / 2, 1.0, 1 / 2]


def test_what_is_finished_before_a_loop_does_not_start_with_what_ends_behind_it() -> None:
    """A GPT's tied embedding: the head's gradient waits behind a barrier while a loop goes back through the layers."""
    config = gpt.Config(
        n_layers=2, dim=256, n_heads=4, seq_len=128, batch_size=32, vocab_size=4096, scan_layers=True
    )  # fmt: skip
    state = jax.eval_shape(lambda: gpt.init_state(config, jax.random.key(0)))
    traced = trace(gpt.make_train_step(config), (state, gpt.batch_shapes(config)), {}, donate_argnums=(0,))
    graph, waited = traced.graph, waited_values(traced)
    rules = graph_rules(graph)
    tables = [
        op.index for op in graph.ops
        if op.primitive in ("dot_general", "scatter-add") and graph.values[op.results[0]].shape == (4096, 256)
    ]  # fmt: skip
    sums = [(sent("all_reduce", shape=(4096, 256)), op) for op in tables]

    def sent_s(waited: dict[int, tuple[int, float]]) -> float:
        crossing, starts = traffic(graph, rules, "gpu"), start_shares_of(graph, rules)
        return sum(one.sent_s for one in collective_prices(graph, starts, model(), crossing, sums, waited))

    assert len(tables) == 2 and waited
    start_s = model().collective_over("all_reduce", 0.0, BOTH)
    assert sent_s(waited) - sent_s({}) == pytest.approx(start_s)
