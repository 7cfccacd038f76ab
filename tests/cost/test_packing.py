"""Where buffers lie: laws against the live bytes and against every order of placing."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jaxplan.cost.packing import gap_bytes, lent

Buffer = tuple[int, int, int]
buffers = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 50)).map(
        lambda b: (b[0], b[0] + b[1], b[2])
    ),
    max_size=7,
)


def most_alive(found: list[Buffer]) -> int:
    return max((sum(size for a, b, size in found if a <= t < b) for t in range(21)), default=0)


def lowest_fits(order: tuple[Buffer, ...]) -> int:
    """The height when each buffer in turn takes the lowest offset that is free for all its life."""
    placed: list[tuple[Buffer, int]] = []
    for start, stop, size in order:
        beside = [(offset, offset + s) for (a, b, s), offset in placed if a < stop and start < b]
        free = min(o for o in [0, *(e for _, e in beside)] if all(o + size <= a or b <= o for a, b in beside))
        placed.append(((start, stop, size), free))
    return max((offset + b[2] for b, offset in placed), default=0)


platforms = st.sampled_from(["gpu", "tpu"])


@given(buffers, platforms)
def test_buffers_take_at_least_what_is_alive_and_at_most_their_sum(found: list[Buffer], platform: str) -> None:
    alive = most_alive(found)
    assert 0 <= gap_bytes(found, platform) <= sum(size for _, _, size in found) - alive


@given(buffers, platforms)
def test_no_layout_is_lower_than_the_best_order_of_placing(found: list[Buffer], platform: str) -> None:
    best = min(lowest_fits(order) for order in itertools.permutations(found))
    assert most_alive(found) + gap_bytes(found, platform) >= best


def test_on_tpu_a_small_buffer_made_beside_a_large_one_leaves_its_gap() -> None:
    """The logits, the head's gradient that outlives them, and what is larger than the logits after that."""
    logits, gradient, scores = (0, 2, 21), (1, 9, 1), (3, 8, 40)
    assert gap_bytes([logits, gradient, scores], "tpu") == 21
    assert gap_bytes([logits, gradient, scores], "gpu") == 0


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), max_size=8))
def test_buffers_that_all_live_to_the_end_leave_no_gaps(found: list[tuple[int, int]]) -> None:
    assert gap_bytes([(start, 30, size) for start, size in found], "gpu") == 0


def test_copies_of_arguments_lie_where_others_were() -> None:
    """Of four arguments all but the first lie in the place of one that was copied before."""
    copies = [(0, 9, 8), (0, 8, 8), (0, 7, 8), (0, 6, 4)]
    assert sorted(lent(copies, [0, 1, 2, 3])) == [1, 2, 3]


def test_what_is_computed_lies_in_the_smallest_place_that_is_free() -> None:
    found = [(0, 9, 8), (2, 5, 6), (5, 7, 8), (4, 6, 1), (3, 4, 9)]
    assert sorted(lent(found, [0])) == [1, 2]  # one after the other; too many at once; too large


@given(buffers, st.integers(0, 7))
def test_places_that_are_lent_hold_one_buffer_at_a_time(found: list[Buffer], count: int) -> None:
    """No more is alive in them at once than they hold, and nothing that is larger than all of them."""
    copied = [(0, stop, size) for _, stop, size in found[:count]]
    every = [*copied, *found[count:]]
    found_there = lent(every, range(len(copied)))
    gone = [every[i] for i in found_there]
    assert most_alive(gone) <= sum(size for *_, size in copied)
    assert max((size for *_, size in gone), default=0) <= max((size for *_, size in copied), default=0)
    assert not copied or 0 not in found_there  # nothing was copied before the first
    assert len(copied) < 2 or len(set(copied)) > 1 or copied[1] in gone
