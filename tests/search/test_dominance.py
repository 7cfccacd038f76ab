"""Which strategies are deleted is told from a few columns for most; it is what all of them say."""

from __future__ import annotations

import numpy as np
import pytest

import jaxplan.search.dominance as dominance_module
from jaxplan.search.dominance import Dominance
from jaxplan.search.problem import Floats, Ints


def by_definition(costs_s: Floats, edges: list[Floats], used: Ints) -> list[int]:
    """From the last strategy on, whatever one that is left replaces is gone."""

    def replaces(j: int, i: int) -> bool:
        extra_s = costs_s[j] - costs_s[i]
        for matrix in edges:
            allowed = np.isfinite(matrix[i])
            extra_s += (matrix[j] - np.where(allowed, matrix[i], 0.0))[allowed].max()
        return bool((used[:, j] <= used[:, i]).all() and extra_s <= 0)

    left = list(range(costs_s.size))
    for i in reversed(range(costs_s.size)):
        if any(replaces(j, i) for j in left if j != i):
            left.remove(i)
    return left


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_what_is_left_is_what_the_definition_leaves(
    seed: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dominance_module, "COMPILED_FROM", 1 if compiled else 1 << 60)
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 40))
    # Few different numbers, so that strategies replace one another and many are equal.
    costs_s = rng.integers(0, 3, size).astype(np.float64)
    used = rng.integers(0, 2, (int(rng.integers(0, 3)), size))
    edges = []
    for _ in range(int(rng.integers(0, 4))):
        matrix = rng.integers(0, 2, (size, int(rng.integers(1, 120)))) * (rng.random((size, 1)) < 0.7)
        forbidden = (rng.random(matrix.shape) < 0.2) & (rng.random((size, 1)) < 0.5)
        forbidden[:, 0] = False
        edges.append(np.where(forbidden, np.inf, matrix.astype(np.float64)))
    dominance = Dominance()
    expected = by_definition(costs_s, edges, used)
    assert dominance.left(costs_s, edges, used).tolist() == expected
    dominance.forget_sizeable()
    assert dominance.left(costs_s.copy(), list(edges), used.copy()).tolist() == expected


def test_a_row_that_differs_in_the_last_column_alone_is_kept() -> None:
    matrix = np.zeros((2, 1000))
    matrix[0, -2] = matrix[1, -3] = 1.0
    nothing = np.zeros((0, 2), dtype=np.int64)
    assert Dominance().left(np.zeros(2), [matrix], nothing).tolist() == [0, 1]
    assert Dominance().left(np.array([0.0, 1.0]), [matrix], nothing).tolist() == [0]
