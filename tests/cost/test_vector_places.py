"""Room in vector memory and time for copies, against what a walk through all that is taken finds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxplan.cost.vector_places import Places, SpareTime


@pytest.mark.parametrize("seed", range(20))
def test_copies_take_the_last_time_that_is_left(seed: int) -> None:
    """Where time is found and how much of it is left, of 200 copies in 60 moments, a third of them without any."""
    rng = random.Random(seed)
    left = [rng.choice([0.0, rng.random(), rng.random()]) for _ in range(60)]
    spare, made = SpareTime(np.array(left)), 0
    for _ in range(200):
        until, first, seconds = rng.randrange(61), rng.randrange(60), rng.random() * 2
        since, wanted = until, seconds
        while wanted > 0 and since > first:
            since -= 1
            wanted -= left[since]
        copied = spare.before(until, seconds, first)
        if wanted > 0:
            assert copied is None
            continue
        assert copied == (since, until, -wanted)
        if rng.random() < 0.5:
            spare.take(copied)
            left[since:until] = [0.0] * (until - since)
            left[since] = -wanted
            made += 1
    assert made > 5


@pytest.mark.parametrize("seed", range(20))
def test_buffers_take_the_smallest_piece_that_is_free(seed: int) -> None:
    """Of a hundred bytes, byte by byte."""
    rng = random.Random(seed)
    places, taken, refused = Places(100, 4), np.zeros((20, 100), bool), 0
    for _ in range(60):
        start = rng.randrange(20)
        stop, size = rng.randrange(start + 1, 21), rng.randrange(1, 40)
        free = [int(byte) for byte in np.flatnonzero(~taken[start:stop].any(axis=0))]
        pieces = [[byte for byte in free if byte - free.index(byte) == at] for at in {b - free.index(b) for b in free}]
        fitting = [piece for piece in pieces if len(piece) >= size]
        assert places.take(start, stop, size) == bool(fitting)
        if fitting:
            first = min(fitting, key=lambda piece: (len(piece), piece[0]))[0]
            assert not taken[start:stop, first : first + size].any()
            taken[start:stop, first : first + size] = True
        refused += not fitting
    assert refused
