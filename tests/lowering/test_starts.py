"""Slices that start out of range, of operands and into results that are cut: they are moved until they fit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxplan

TABLE = np.arange(64, dtype=np.int32).reshape(8, 8)
UPDATE = -np.ones((8, 4), np.int32)
LAYOUTS = (PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "model"), PartitionSpec(None, ("data", "model")))


def slices(table: Any, update: Any, start: Any) -> Any:
    return {
        "columns": lax.dynamic_slice(table, (0, start), (8, 4)) * 2,
        "update": lax.dynamic_update_slice(table, update, (0, start)),
        "known": lax.dynamic_slice(table, (np.int32(9), start), (4, 8)),
        "row": table[start],
        "twice": lax.dynamic_slice(lax.dynamic_slice(table, (start, 0), (4, 8)), (start, start), (2, 4)),
    }


def taken(table: np.ndarray, starts: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray:
    """By NumPy, a view (XLA merges two slices in a row wrongly on one device too).  Negative starts: from the end."""
    whole = zip(starts, sizes, table.shape, strict=True)
    fitting = [min(max(start + (extent if start < 0 else 0), 0), extent - size) for start, size, extent in whole]
    return table[tuple(slice(start, start + size) for start, size in zip(fitting, sizes, strict=True))]


def expected(start: int) -> dict[str, np.ndarray]:
    updated = TABLE.copy()
    taken(updated, (0, start), UPDATE.shape)[...] = UPDATE
    return {
        "columns": taken(TABLE, (0, start), (8, 4)) * 2,
        "update": updated,
        "known": taken(TABLE, (9, start), (4, 8)),
        "row": taken(TABLE, (start, 0), (1, 8))[0],
        "twice": taken(taken(TABLE, (start, 0), (4, 8)), (start, start), (2, 4)),
    }


CUT = {f"result/{name}": PartitionSpec(None, "model") for name in ("columns", "update", "known", "twice")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_they_take_what_one_device_takes(layout: PartitionSpec, mesh_4x2: Mesh) -> None:
    planned = jaxplan.auto_shard(
        slices, mesh_4x2, options={"compare_templates": False}, constraints={"table": layout, **CUT}
    )
    for start in (3, 4, 5, 7, 20, -1, -20):
        found = planned(TABLE, UPDATE, np.int32(start))
        for name, wanted in expected(start).items():
            np.testing.assert_array_equal(found[name], wanted, err_msg=f"{name} from {start}")


def test_a_start_of_few_bits_reaches_as_far_as_it_can(mesh_4x2: Mesh) -> None:
    def take(table: Any, start: Any) -> Any:
        return lax.dynamic_slice(table, (start,), (4,))

    table = np.arange(512)
    for cut in (PartitionSpec(), PartitionSpec("model")):
        planned = jaxplan.auto_shard(
            take, mesh_4x2, constraints={"table": PartitionSpec(), "result": cut}, options={"compare_templates": False}
        )
        np.testing.assert_array_equal(planned(table, np.int8(127)), table[127:131])


def test_a_single_update_goes_where_it_belongs_when_the_operand_has_just_been_cut(mesh_4x2: Mesh) -> None:
    """On the other devices too, which have no such element: they wrote what stands at the start of the whole."""
    cut = NamedSharding(mesh_4x2, PartitionSpec("data", "model"))
    rows = NamedSharding(mesh_4x2, PartitionSpec("data"))

    def step(table: jax.Array, update: jax.Array) -> Any:
        whole = lax.with_sharding_constraint(table * 2, rows)
        pieces = lax.with_sharding_constraint(whole, cut)
        column = lax.with_sharding_constraint(update, rows)
        return {"set": pieces.at[:, 0].set(column), "add": pieces.at[:, 5].add(column)}

    table, update = TABLE.astype(np.float32), np.arange(8, dtype=np.float32) + 1000
    pinned = {"result/*": cut.spec, "table": PartitionSpec()}
    found = jaxplan.auto_shard(step, mesh_4x2, constraints=pinned)(table, update)
    wanted = {name: table * 2 for name in ("set", "add")}
    wanted["set"][:, 0] = update
    wanted["add"][:, 5] += update
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
