"""What a decision turns out to cost is told to the search: on the edge and between the layouts where it arises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.search import Charge, Crossed, charged, evaluate, solve
from jaxplan.search.space import Space

from .test_build import GRID, shape, space_of


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(jnp.dot(x, w), w)


def moved(space: Space, assignment: tuple[int, ...]) -> Charge:
    """The first edge on which an assignment moves something."""
    for number, (edge, what) in enumerate(zip(space.problem.edges, space.passages, strict=True)):
        tail, head = what.tails[assignment[edge.tail]], what.heads[assignment[edge.head]]
        if not np.array_equal(tail, head):
            return Charge(number, tail.tobytes(), head.tobytes())
    raise AssertionError("nothing moves")


def test_a_charge_is_paid_between_its_two_layouts_alone() -> None:
    _, space = space_of(twice, (shape(64, 64), shape(64, 64)), GRID)
    rng = np.random.default_rng(0)
    sizes = [len(node.costs_s) for node in space.problem.nodes]
    every = [tuple(int(rng.integers(n)) for n in sizes) for _ in range(200)]
    charge = moved(space, every[0])
    dearer = charged(space, {charge: 1.0})
    edge, what = space.problem.edges[charge.edge], space.passages[charge.edge]
    paid = 0
    for one in every:
        rows = what.tails[one[edge.tail]].tobytes(), what.heads[one[edge.head]].tobytes()
        allowed = edge.allowed is None or bool(edge.allowed[one[edge.tail], one[edge.head]])
        added_s = evaluate(dearer.problem, one).objective_s - evaluate(space.problem, one).objective_s
        assert added_s == pytest.approx(float(allowed and rows == (charge.tail, charge.head)), abs=1e-9)
        paid += added_s > 0.5
    assert 0 < paid < len(every)


def test_equal_matrices_charged_alike_stay_one() -> None:
    _, space = space_of(lambda x: jnp.dot(x, x) + jnp.dot(x, x), (shape(64, 64),), GRID)
    ids: dict[tuple[int, int, int], list[int]] = {}
    for number, (edge, what) in enumerate(zip(space.problem.edges, space.passages, strict=True)):
        ids.setdefault((id(edge.costs_s), id(what.tails), id(what.heads)), []).append(number)
    alike = next(numbers for numbers in ids.values() if len(numbers) > 1)
    rows = space.passages[alike[0]].tails[0].tobytes(), space.passages[alike[0]].heads[1].tobytes()
    dearer = charged(space, {Charge(number, *rows): 1.0 for number in alike}).problem
    assert len({id(dearer.edges[number].costs_s) for number in alike}) == 1


def test_a_use_is_found_by_the_layouts_that_it_is_brought_between() -> None:
    graph, space = space_of(twice, (shape(64, 64), shape(64, 64)), GRID)
    assignment = solve(space.problem).assignment
    crossed = Crossed(space, assignment)
    found = 0
    for (op, position), port in space.reads.items():
        value = graph.ops[op].operands[position]
        if (
            (op, position) in space.copies
            or value not in space.values
            or space.values[value].node == port.node
        ):
            continue
        made = space.values[value].places[assignment[space.values[value].node]].tobytes()
        taken = port.places[assignment[port.node]].tobytes()
        charge = crossed.between(value, ("read", op, position), made, taken)
        assert charge is not None and (charge.tail, charge.head) == (made, taken)
        edge = space.problem.edges[charge.edge]
        assert (edge.tail, edge.head) == (space.values[value].node, port.node)
        assert crossed.between(value, ("read", op, position), b"\x7f\x7f", taken) is None
        found += 1
    assert found
