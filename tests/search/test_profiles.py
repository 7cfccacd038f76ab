"""What a node takes over time is the sum of its usages at every step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.search.profiles import Profiles

STEPS, SIZE = 6, 3

spans = st.tuples(st.integers(0, STEPS - 2), st.integers(1, STEPS - 1)).map(lambda s: (s[0], s[0] + s[1]))
amounts = st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE)


@given(st.lists(st.tuples(spans, amounts), min_size=1, max_size=4, unique_by=lambda usage: usage[0]))
def test_a_profile_is_the_sum_of_its_usages(usages: list[tuple[tuple[int, int], list[int]]]) -> None:
    used = [np.array(amount, dtype=np.int64) for _, amount in usages]
    profiles = Profiles()
    profile = profiles.of([span for span, _ in usages], used, SIZE)
    assert profiles.of([span for span, _ in usages], used, SIZE) is profile
    assert (np.diff(profile.at) > 0).all()
    for step in range(2 * STEPS):
        alive = [amount for ((start, stop), _), amount in zip(usages, used, strict=True) if start <= step < stop]
        total = sum(alive, np.zeros(SIZE, dtype=np.int64))
        last = int(np.searchsorted(profile.at, step, side="right")) - 1
        found = profile.rows[last] if last >= 0 else np.zeros(SIZE, dtype=np.int64)
        np.testing.assert_array_equal(found, total)
        passed = profile.at <= step
        assert profile.least_delta[passed].sum() == total.min()
        assert profile.most_delta[passed].sum() == total.max()


def test_no_usages_take_nothing() -> None:
    profile = Profiles().of((), (), SIZE)
    assert profile.rows.shape == (0, SIZE) and not profile.at.size
