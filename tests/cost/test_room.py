"""How much is put off is found with few memories, and is what trying all amounts finds."""

from __future__ import annotations

import random

import pytest

from jaxplan.cost.step_memory import _largest


@pytest.mark.parametrize("seed", range(50))
def test_the_most_that_there_is_room_for(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randrange(1, 700)
    grown, peaks = 0, [100]
    flat = rng.randrange(most + 1)
    for count in range(most):
        grown += 0 if count < flat else rng.randrange(4) ** 3
        peaks.append(100 + grown)
    if peaks[-1] == peaks[0]:
        peaks[-1] += 1
    room = rng.randrange(peaks[0], peaks[-1])
    tried = set[int]()

    def peak_bytes(count: int) -> int:
        tried.add(count)
        return peaks[count]

    assert _largest(peak_bytes, most, room) == max(count for count in range(most) if peaks[count] <= room)
    assert len(tried - {0, most}) <= 2 * most.bit_length()
