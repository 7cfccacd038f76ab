"""Bytes of one node over time: what its usages add up to, by strategy; equal ones are worked out once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .problem import Ints

Span = tuple[int, int]


class Profile(NamedTuple):
    """At the steps `at` (ascending) the sum of usages changes; `rows[i]` is it from there on, by strategy.

    `least_delta`, `most_delta`: by how much the least and the most of the strategies change there.
    """

    at: Ints
    rows: Ints
    least_delta: Ints
    most_delta: Ints


class Profiles:
    """Profiles by the identity of what they are made of, which their owner keeps."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[Span, ...], tuple[int, ...]], Profile] = {}

    def of(self, spans: Sequence[Span], used: Sequence[Ints], size: int) -> Profile:
        """The profile of usages `used` over `spans`, of a node with `size` strategies."""
        key = tuple(spans), tuple(map(id, used))
        if not used:
            return _profile((), (), size)
        if key not in self._known:
            self._known[key] = _profile(spans, used, size)
        return self._known[key]


def _profile(spans: Sequence[Span], used: Sequence[Ints], size: int) -> Profile:
    if len(spans) == 1:  # most of them
        (span,), (amount,) = spans, used
        rows = np.stack([amount, np.zeros_like(amount)])
        least, most = amount.min(keepdims=True), amount.max(keepdims=True)
        return Profile(np.array(span), rows, np.concatenate([least, -least]), np.concatenate([most, -most]))
    at = sorted({step for span in spans for step in span})
    where = {step: i for i, step in enumerate(at)}
    rows = np.zeros((len(at), size), dtype=np.int64)
    for (start, stop), amount in zip(spans, used, strict=True):
        rows[where[start] : where[stop]] += amount
    least, most = rows.min(axis=1), rows.max(axis=1)
    least[1:], most[1:] = np.diff(least), np.diff(most)
    return Profile(np.array(at, dtype=np.int64), rows, least, most)
