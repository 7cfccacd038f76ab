"""Measured rows -> the numbers of a profile.

The rates of a device are the best that were seen: large products, a long stream.  A link's three numbers are those of
the alpha-beta model (`jaxplan.cost.collectives`) whose logarithms lie nearest to the measured ones, row by row; the sum
of absolute logarithms, unlike one of squares, is not bent by the few rows that another program disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..cost import collective_seconds
from ..hardware import AxisLink, Link

Row = Mapping[str, Any]
_GRID = 24
_ROUNDS = 4
_FIRST = {"launch_s": (1e-7, 1e-3), "latency_s": (1e-8, 1e-3), "bytes_per_s": (1e7, 1e12)}


def product_rates(rows: Sequence[Row]) -> dict[str, float]:
    """FLOP/s of the fastest product of each dtype."""
    rates: dict[str, float] = {}
    for row in rows:
        if row["what"] == "product":
            rate = 2.0 * math.prod(row["dims"]) / row["seconds"]
            rates[row["dtype"]] = max(rates.get(row["dtype"], 0.0), rate)
    return rates


def stream_rate(rows: Sequence[Row]) -> float | None:
    """Bytes a second, in and out; None when it was not measured."""
    return next((row["bytes"] / row["seconds"] for row in rows if row["what"] == "stream"), None)


def arithmetic_rate(rows: Sequence[Row]) -> float | None:
    """FLOP/s outside the matrix unit."""
    return next((row["flops"] / row["seconds"] for row in rows if row["what"] == "arithmetic"), None)


def smallest_s(rows: Sequence[Row]) -> float | None:
    """Seconds of the smallest operation."""
    return next((row["seconds"] for row in rows if row["what"] == "smallest"), None)


def hidden_share(rows: Sequence[Row]) -> float | None:
    """Share of the shorter of a product and an all_reduce that is hidden behind the other: `options.overlap`."""
    found = {row["how"]: row["seconds"] for row in rows if row["what"] == "overlap"}
    if len(found) < 3:
        return None
    saved = found["product"] + found["collective"] - found["both"]
    return float(np.clip(saved / min(found["product"], found["collective"]), 0.0, 0.99))


def fitted_link(rows: Sequence[Row], link: Link) -> tuple[Link, float] | None:
    """`link` with fitted rate, latency and launch, and the median error of the fit; None without enough rows."""
    measured = [row for row in rows if row["what"] == "collective"]
    if len(measured) < len(_FIRST) + 1:
        return None
    seconds = np.array([row["seconds"] for row in measured])
    ranges = dict(_FIRST)
    best: dict[str, float] = {}
    for _ in range(_ROUNDS):
        grids = {name: np.geomspace(low, high, _GRID) for name, (low, high) in ranges.items()}
        best = _best(measured, seconds, link, grids)
        ranges = {
            name: (best[name] * (low / high) ** (1.5 / _GRID), best[name] * (high / low) ** (1.5 / _GRID))
            for name, (low, high) in ranges.items()
        }
    error = float(np.median(np.abs(_predicted(measured, link, **best) / seconds - 1)))
    changes: dict[str, Any] = {"efficiency": 1.0, **best}
    return replace(link, **changes), error


def _best(
    measured: Sequence[Row], seconds: np.ndarray, link: Link, grids: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """The point of the grids that fits best.  Seconds are linear in the three, so three runs of the model serve all."""
    zero = {"launch_s": 1e-30, "latency_s": 1e-30, "bytes_per_s": 1e30}
    parts = [
        _predicted(measured, link, **{**zero, name: 1.0}) for name in ("launch_s", "latency_s", "bytes_per_s")
    ]
    launch, latency, rate = (grids[name] for name in ("launch_s", "latency_s", "bytes_per_s"))
    total = (
        parts[0] * launch[:, None, None, None] + parts[1] * latency[:, None, None] + parts[2] / rate[:, None]
    )
    error = np.abs(np.log(total / seconds)).sum(axis=-1)
    a, b, c = np.unravel_index(int(np.argmin(error)), error.shape)
    return {"launch_s": float(launch[a]), "latency_s": float(latency[b]), "bytes_per_s": float(rate[c])}


def _predicted(
    measured: Sequence[Row], link: Link, *, launch_s: float, latency_s: float, bytes_per_s: float
) -> np.ndarray:
    found = []
    for row in measured:
        axis = AxisLink(
            link=link.name, kind="switch", size=row["devices"], bytes_per_s=bytes_per_s,
            direct_bytes_per_s=bytes_per_s, latency_s=latency_s, steps=row["devices"] - 1, launch_s=launch_s,
            wraparound=False,
        )  # fmt: skip
        found.append(float(collective_seconds(row["kind"], row["bytes"], [axis])))
    return np.array(found)
