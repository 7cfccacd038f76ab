"""Prices of reshards, pair by pair, against the module's prose spelled out for one pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxplan.sharding import UNREDUCED, MeshAxes, Moves, all_places, reshard_path, reshard_steps

RATES = {"collective_permute": 13.0, "all_gather": 1.0, "all_reduce": 2.0, "reduce_scatter": 1.5, "all_to_all": 0.7}


def a_price(kind: str, size_bytes: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Another price for every kind and set of axes, not proportional to bytes, nor the sum of its axes' prices."""
    return np.asarray(RATES[kind] * (1 + size_bytes) * sum(3**i for i in axes) ** 1.5)


def expected(source: np.ndarray, target: np.ndarray, size_bytes: float, axes: MeshAxes) -> float:
    """What one reshard costs, one move after another, as the module's docstring says."""
    here = list(source)
    total = 0.0
    order: dict[int, list[int]] = {}
    for i, place in enumerate(source.tolist()):
        if place >= 0 and axes[i][1] > 1:
            order.setdefault(place, []).append(i)
    # what stays leads, and what leaves last: `lowering.order`
    for dim, cut in order.items():
        cut.sort(key=lambda i: (target[i] != dim, target[i] != -1, -int(target[i])))

    def local() -> float:
        return size_bytes / np.prod([s for p, (_, s) in zip(here, axes, strict=True) if p >= 0], initial=1.0)

    def step(kind: str, moving: list[int], to: list[int]) -> None:
        nonlocal total
        moving = [i for i in moving if axes[i][1] > 1]
        before = local()
        for dim in {here[i] for i in moving if here[i] >= 0}:
            leaves = [i for i in moving if here[i] == dim]
            if set(order[dim][-len(leaves) :]) != set(leaves):
                stay = [i for i in order[dim] if target[i] == dim]
                went = [i for i in order[dim] if target[i] != dim]
                turned = [i for i in stay if source[i] != dim] + went
                total += float(a_price("collective_permute", np.asarray(before), tuple(sorted(turned))))
                order[dim] = stay + went
            order[dim] = [i for i in order[dim] if i not in leaves]
        for i, place in zip(moving, to, strict=False):
            here[i] = place
            if place >= 0:
                order.setdefault(place, []).append(i)
        if moving and kind != "all_slice":
            total += float(a_price(kind, np.asarray(max(before, local())), tuple(moving)))

    n = range(len(axes))
    onto = {int(target[i]) for i in n if source[i] == UNREDUCED and target[i] >= 0 and axes[i][1] > 1}
    scattered = [i for i in n if source[i] == UNREDUCED and target[i] >= 0 and axes[i][1] > 1]
    reduced = [i for i in n if source[i] == UNREDUCED and target[i] == -1 and axes[i][1] > 1]
    if len(onto) == 1:
        step("reduce_scatter", scattered, [int(target[i]) for i in scattered])
    else:
        reduced = sorted(reduced + scattered)
    step("all_reduce", reduced, [-1] * len(reduced))
    sliced = [i for i in n if here[i] == -1 and target[i] >= 0 and axes[i][1] > 1]
    step("all_slice", sliced, [int(target[i]) for i in sliced])
    for left in range(8):
        for entered in range(8):
            crossing = [i for i in n if here[i] == left != entered == target[i] and source[i] == left]
            step("all_to_all", crossing, [entered] * len(crossing))
    for dim in range(8):
        gathered = [i for i in n if here[i] == dim and target[i] == -1]
        step("all_gather", gathered, [-1] * len(gathered))
    return total


@st.composite
def layouts(draw: st.DrawFn) -> tuple[MeshAxes, np.ndarray, np.ndarray, float]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    axes = tuple((f"a{i}", size) for i, size in enumerate(sizes))
    rank = draw(st.integers(0, 3))
    rows = st.lists(
        st.lists(st.integers(UNREDUCED, rank - 1), min_size=len(sizes), max_size=len(sizes)), min_size=1, max_size=6
    )  # fmt: skip
    source, target = (np.array(draw(rows), np.int8) for _ in range(2))
    # no collective makes a pending sum
    target = np.where(target == UNREDUCED, -1, target).astype(np.int8)
    return axes, source, target, draw(st.sampled_from([1.0, 96.0, 1e6 + 7]))


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_every_pair_is_priced_move_by_move(case: tuple[MeshAxes, np.ndarray, np.ndarray, float]) -> None:
    axes, source, target, size_bytes = case
    table = Moves(source, target, axes).price(size_bytes, a_price)
    for i, a in enumerate(source):
        for j, b in enumerate(target):
            assert table[i, j] == pytest.approx(expected(a, b, size_bytes, axes), rel=1e-12)
            steps = reshard_steps(a, b, size_bytes, axes)
            index = {name: k for k, (name, _) in enumerate(axes)}
            said = [float(a_price(s.kind, np.asarray(s.bytes), tuple(index[n] for n in s.axes))) for s in steps]
            assert sum(said) == pytest.approx(table[i, j], rel=1e-12)


def test_axes_that_cross_together_cross_at_once() -> None:
    """As Shardy and the compilers do: one after the other they would end in the wrong order."""
    axes = (("x", 4), ("y", 2))
    source, target = np.array([1, 1], np.int8), np.array([0, 0], np.int8)
    (step,) = reshard_steps(source, target, 800.0, axes)
    assert (step.kind, step.axes, step.bytes) == ("all_to_all", ("x", "y"), 100.0)
    assert [row.tolist() for row in reshard_path(source, target)] == [[0, 0]]
    apart = np.array([0, 2], np.int8)
    assert [s.axes for s in reshard_steps(source, apart, 800.0, axes)] == [("x",), ("y",)]
    assert [row.tolist() for row in reshard_path(source, apart)] == [[0, 1], [0, 2]]


def test_moves_of_one_size_serve_every_size() -> None:
    axes = (("x", 4), ("y", 2))
    places = all_places((16, 8, 8), axes)
    moves = Moves(places, places, axes)
    assert np.allclose(
        moves.price(2e6, lambda kind, size, over: size), 2 * moves.price(1e6, lambda kind, size, over: size)
    )
    assert not moves.price(1e6, a_price).diagonal().any()
