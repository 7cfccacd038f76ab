"""Numbers with units, printed and read: bytes in binary units, seconds and rates in SI."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence

from .errors import ArgumentError

#: (how much, its name), the largest first.
BYTES = ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))

_SUFFIX_BYTES = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


#: Digits that a number is printed with, and the most behind its point: more no double has.
SIGNIFICANT, MOST_DIGITS = 3, 16


def format_bytes(size_bytes: float) -> str:
    """`format_bytes(3 * 2**30) == "3.00 GiB"`; three significant digits, exact below 1 KiB."""
    size = float(size_bytes)
    sign = "-" if size < 0 else ""
    size = abs(size)
    scale, unit = next((one for one in BYTES if size >= one[0]), BYTES[-1])
    size /= scale
    if unit == "B":
        return f"{sign}{size:.0f} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{digits}f} {unit}"


def format_seconds(duration_s: float) -> str:
    """`format_seconds(0.0123) == "12.3 ms"`; three significant digits."""
    if duration_s == 0:
        return "0 s"
    scale, unit = next((one for one in SECONDS if abs(duration_s) >= one[0]), SECONDS[-1])
    return f"{duration_s / scale:.3g} {unit}"


def told_apart(values: Sequence[float], units: Sequence[tuple[float, str]]) -> Callable[[float], str]:
    """What prints values in the unit of the largest, with as many digits (three at least) as tell neighbours apart.

    `told_apart([0.17952, 0.17949], SECONDS)(0.17952) == "179.52 ms"`; neighbours that are equal stay so.
    """
    largest = max(map(abs, values))
    scale, unit = next((one for one in units if largest >= one[0]), units[-1])

    def words(value: float, digits: int) -> str:
        return f"{value / scale:.{digits}f} {unit}"

    fewest = 0 if unit == "B" else max(0, SIGNIFICANT - len(f"{largest / scale:.0f}"))
    differ = [(a, b) for a, b in itertools.pairwise(values) if a != b]
    enough = (n for n in range(fewest, MOST_DIGITS) if all(words(a, n) != words(b, n) for a, b in differ))
    return functools.partial(words, digits=next(enough, MOST_DIGITS))


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten: the least that is not under `rough`, which is positive."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def parse_bytes(text: int | float | str) -> int:
    """Bytes from a number or from text such as "14GiB", "512 MB", "1e9".

    Raises:
      ArgumentError: the text has no number, one of less than a byte or an unknown unit.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value, suffix = float(text), ""
    else:
        match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
        if match is None or match.group(2).lower() not in _SUFFIX_BYTES:
            raise ArgumentError(
                f"memory size {text!r} can't be read: write bytes as a number, or a number with one of "
                'B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, such as "14GiB"'
            )
        try:
            value = float(match.group(1))
        except ValueError:
            raise ArgumentError(f"memory size {text!r}: {match.group(1)!r} is not a number") from None
        suffix = match.group(2).lower()
    if not value > 0:
        raise ArgumentError(f"memory size {text!r} must be positive")
    if value * _SUFFIX_BYTES[suffix] < 1:
        raise ArgumentError(f'memory size {text!r} is less than a byte: write bytes, or text such as "14GiB"')
    return int(value * _SUFFIX_BYTES[suffix])
