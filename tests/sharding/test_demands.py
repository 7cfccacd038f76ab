"""What a program's own `with_sharding_constraint` demands is all that is left, and what it leaves open stays open."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplan.sharding import OpShapes, all_places, layout_of_places, rule_for, strategies

AXES = (("data", 4), ("model", 2), ("one", 1))
MESH = AbstractMesh((4, 2, 1), ("data", "model", "one"), axis_types=(AxisType.Auto,) * 3)
ENTRIES = (None, "data", "model", ("data", "model"), P.UNCONSTRAINED)


def constraint(spec: P, shape: tuple[int, ...]) -> OpShapes:
    open_dims = {d for d, entry in enumerate(spec) if entry is P.UNCONSTRAINED}
    return OpShapes(
        primitive="sharding_constraint",
        params={"sharding": NamedSharding(MESH, spec), "unconstrained_dims": frozenset(open_dims)},
        operands=(shape,), results=(shape,), operand_dtypes=("float32",), result_dtypes=("float32",),
    )  # fmt: skip


def demanded(spec: P, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    """By walking over every layout: the ones whose closed dimensions are as the spec says."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    wanted = {d: set(names_of(entry)) for d, entry in enumerate(entries) if entry is not P.UNCONSTRAINED}
    return {
        tuple(row.tolist())
        for row in all_places(shape, AXES)
        if all(set(layout_of_places(row, len(shape), AXES).dims[d]) == names for d, names in wanted.items())
    }


def names_of(entry: object) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


@pytest.mark.parametrize(
    "entries",
    [
        pair
        for pair in itertools.product(ENTRIES, repeat=2)
        if not set(names_of(pair[0])) & set(names_of(pair[1]))
    ],
    ids=str,
)
def test_strategies_are_the_layouts_that_the_spec_leaves(entries: tuple[object, ...]) -> None:
    spec, shape = P(*entries), (16, 24)
    op = constraint(spec, shape)
    found = strategies(rule_for(op), AXES)
    rows = {tuple(row.tolist()) for row in found.results[0]}
    assert rows == demanded(spec, shape)
    np.testing.assert_array_equal(found.operands[0], found.results[0])


def test_a_demand_that_does_not_divide_leaves_one_strategy() -> None:
    """XLA pads there, so the demand can be met; what was left open is then uncut."""
    found = strategies(rule_for(constraint(P("data", P.UNCONSTRAINED), (6, 8))), AXES)
    assert found.results[0].tolist() == [[0, -1, -1]]
