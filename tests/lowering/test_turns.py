"""A reshard's collectives as they are priced are those that Shardy inserts by way of the layouts that are pinned."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxplan.lowering import Orders
from jaxplan.lowering.turns import turned
from jaxplan.sharding import NONE, Layout, MeshAxes, reshard_path, reshard_steps
from jaxplan.sharding.partitioner import partition

SHAPE = (64, 64, 64)
GRID: MeshAxes = (("a", 4), ("b", 2))
CUBE: MeshAxes = (("a", 2), ("b", 2), ("c", 2))


def spec(layout: Layout) -> PartitionSpec:
    return PartitionSpec(*(dim or None for dim in layout.dims))


def written(row: np.ndarray, axes: MeshAxes) -> list[Layout]:
    """A row in all orders of its axes."""
    dims = [
        [name for (name, _), place in zip(axes, row.tolist(), strict=True) if place == d] for d in range(3)
    ]
    return [Layout(dims=dims) for dims in itertools.product(*(itertools.permutations(dim) for dim in dims))]


def inserted(made: np.ndarray, read: np.ndarray, axes: MeshAxes) -> list[tuple[str, tuple[str, ...], int]]:
    """What moves least of all orders at the two ends: (kind, axes, bytes) of each collective."""
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    mesh = AbstractMesh(tuple(sizes), tuple(names), axis_types=(AxisType.Auto,) * len(axes))

    def moved(start: Layout, stop: Layout) -> list[tuple[str, tuple[str, ...], int]]:
        way = Orders(axes=axes, chosen={}).on_the_way(start, ("read", 0, 0), reshard_path(made, read))[:-1]

        def step(x: jax.Array) -> jax.Array:
            for layout in (*way, stop):
                x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(layout)))
            return x

        before, after = NamedSharding(mesh, spec(start)), NamedSharding(mesh, spec(stop))
        traced = jax.jit(step, in_shardings=before, out_shardings=after).trace(
            jax.ShapeDtypeStruct(SHAPE, jnp.float32)
        )
        module = traced.lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
        found = [c for c in partition(module).collectives if c.kind != "all_slice"]
        return [(c.kind, tuple(sorted(c.axes)), int(c.bytes)) for c in found]

    ends = itertools.product(written(made, axes), written(read, axes))
    # of equals those that turn fewest axes
    return min(
        (moved(*both) for both in ends), key=lambda found: sum(b * 100 + len(names) for _, names, b in found)
    )


def pairs(axes: MeshAxes, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    rows = list(itertools.product((NONE, 0, 1, 2), repeat=len(axes)))
    return random.Random(0).sample([(a, b) for a in rows for b in rows if a != b], count)


CROSSING = [
    ((0, NONE), (1, 0)),
    ((0, 1), (1, 0)),
    ((NONE, 0), (0, NONE)),
    ((0, 1), (NONE, 0)),
    ((0, 1), (1, 2)),
]
"""An axis enters a dimension before another leaves it."""


@pytest.mark.parametrize(
    ("axes", "made", "read"),
    [
        *((GRID, *pair) for pair in CROSSING), *((GRID, *pair) for pair in pairs(GRID, 20)),
        *((CUBE, *pair) for pair in pairs(CUBE, 20)), (CUBE, (NONE, 0, 0), (0, 2, NONE)),
    ],
)  # fmt: skip
def test_priced_collectives_are_those_inserted(
    axes: MeshAxes, made: tuple[int, ...], read: tuple[int, ...]
) -> None:
    rows = np.array(made, np.int8), np.array(read, np.int8)
    steps = reshard_steps(*rows, 4.0 * np.prod(SHAPE), axes)
    priced = [(step.kind, tuple(sorted(step.axes)), int(step.bytes)) for step in steps]
    assert Counter(inserted(*rows, axes)) == Counter(priced)


def test_pieces_turn_once_for_all_that_leave() -> None:
    # "b" leaves next and "c" after it; "a" came last and stays
    then = [[{"a", "c"}, {"b"}], [{"a"}, {"b"}]]
    assert turned([("b", "c", "a"), ()], then) == (("a", "c", "b"), ())
    assert turned([("a", "c", "b"), ()], then) is None
    # what leaves later does not turn yet
    assert turned([("c", "a"), ("b",)], [[{"a", "c"}, set()], [{"a"}, set()]]) is None
