"""Which tables XLA for TPU keeps in rows because many rows are added to them, from jax 0.11 on."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import device_bytes
from jaxplan.cost.lookups import lookups_of
from jaxplan.cost.tiles import RowsOf, Table, lies_in_rows
from jaxplan.hardware import load_profile
from jaxplan.ir import Graph, trace
from jaxplan.sharding import NONE

LOOKUPS = sys.modules[lookups_of.__module__]
WHOLE = np.array([NONE, NONE], np.int8)


def updated(rows: int, columns: int, added: int, dtype: Any = jnp.float32) -> Graph:
    """A table that as many rows are taken from, and added to."""

    def step(table: Any, at: Any) -> Any:
        gradient = jax.grad(lambda table: jnp.tanh(table[at]).sum().astype(jnp.float32))(table)
        return table - gradient

    shapes = jax.ShapeDtypeStruct((rows, columns), dtype), jax.ShapeDtypeStruct((added,), jnp.int32)
    return trace(step, shapes, {}, donate_argnums=(0,)).graph


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "most"),
    [
        (1_000_000, 2, jnp.float32, 4096),
        (1_000_000, 16, jnp.float32, 3640),
        (1_000_000, 32, jnp.float32, 3120),
        (1_500_000, 8, jnp.float32, 5856),
        (600_000, 32, jnp.float32, 1872),
        (2_000_000, 16, jnp.bfloat16, 7288),
    ],
)
def test_a_table_lies_in_rows_where_many_are_added(
    rows: int, columns: int, dtype: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most rows that were added in columns (compiled for one v5e, jax 0.12.0.1, libtpu 0.0.50.1)."""
    monkeypatch.setattr(LOOKUPS, "ADDED_ROWS_ARE_COUNTED", True)
    for added, in_rows in ((most, False), (most + 1, True)):
        graph = updated(rows, columns, added, dtype)
        lookups = lookups_of(graph, load_profile("tpu-v5e").usable_bytes)
        (scatter,) = [op for op in graph.lookups() if op.primitive != "gather"]
        table = graph.values[scatter.results[0]]
        tiling = dict(lookups[scatter.index])[scatter.results[0]]
        assert lies_in_rows(table, WHOLE, (), tiling) == in_rows
        lanes = 128 if in_rows else columns
        assert device_bytes(table, WHOLE[None], (), "tpu", tiling)[0] == pytest.approx(
            rows * lanes * table.item_bytes, rel=2e-4
        )
        rows_of = dict(lookups[scatter.index])[scatter.operands[2]]
        assert isinstance(rows_of, RowsOf) and not lies_in_rows(table, WHOLE, (), "table")
        padded = device_bytes(graph.values[scatter.operands[2]], WHOLE[None], (), "tpu", rows_of)[0]
        assert (padded >= added * 128 * table.item_bytes) == in_rows


@pytest.mark.parametrize(
    ("target", "rows", "in_rows"),
    [
        ("tpu-v5e", 1_677_720, True),
        ("tpu-v5e", 1_677_721, False),
        ("tpu-v5p", 10_064_000, True),
        ("tpu-v5p", 10_066_497, False),
        ("tpu-v6e", 3_302_764, True),
        ("tpu-v6e", 3_303_405, False),
    ],
)
def test_no_table_takes_more_than_a_twentieth_of_memory_for_that(
    target: str, rows: int, in_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 columns, compiled for one device (jax 0.12.0.1, libtpu 0.0.50.1); on v5p up to 10,065,856 at least."""
    monkeypatch.setattr(LOOKUPS, "ADDED_ROWS_ARE_COUNTED", True)
    graph = updated(rows, 8, 60_000)
    (scatter,) = [op for op in graph.lookups() if op.primitive != "gather"]
    tiling = dict(lookups_of(graph, load_profile(target).usable_bytes)[scatter.index])[scatter.results[0]]
    assert lies_in_rows(graph.values[scatter.results[0]], WHOLE, (), tiling) == in_rows


@pytest.mark.parametrize(("counted", "usable_bytes"), [(False, 2**34), (True, 0)])
def test_what_is_added_is_not_counted_before_jax_0_11(
    counted: bool, usable_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a device's memory is not known; of what is only looked up never."""
    graph = updated(1_000_000, 32, 65_536)
    monkeypatch.setattr(LOOKUPS, "ADDED_ROWS_ARE_COUNTED", counted)
    found = [tiling for moved in lookups_of(graph, usable_bytes).values() for _, tiling in moved]
    assert found and not any(isinstance(tiling, Table) for tiling in found)
    monkeypatch.setattr(LOOKUPS, "ADDED_ROWS_ARE_COUNTED", True)
    (gather,) = [op for op in graph.lookups() if op.primitive == "gather"]
    assert dict(lookups_of(graph, 2**34)[gather.index])[gather.operands[0]] == "table"
