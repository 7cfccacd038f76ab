"""Kendall's tau and errors of (predicted, made) pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of (predicted, measured) pairs; those within a thousandth of each other are ties."""

    def sign(a: float, b: float) -> int:
        return 0 if abs(a - b) <= 1e-3 * max(a, b) else 1 if a > b else -1

    signs = [(sign(a[0], b[0]), sign(a[1], b[1])) for i, a in enumerate(pairs) for b in pairs[:i]]
    counts = [sum(s[side] != 0 for s in signs) for side in (0, 1)]
    return sum(a * b for a, b in signs) / math.sqrt(counts[0] * counts[1]) if all(counts) else 0.0


def errors(ratios: Sequence[float]) -> str:
    """Median and 90th percentile of the distances from 1, and the extremes."""
    off = sorted(abs(ratio - 1) for ratio in ratios)
    tenth = off[min(len(off) - 1, math.ceil(0.9 * len(off)) - 1)]
    return (
        f"{len(off)} points: median {statistics.median(off):.1%}, 90th percentile {tenth:.1%}, "
        f"from {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
    )
