"""What arguments are read as: each function is a `type` of argparse, and says what it would have taken."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """`duration_s("60s") == duration_s("1min") == 60`."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(s|min|h|)", text)
    if match is None or not float(match[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 60s, 5min or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def ratio(text: str) -> float:
    """A part of one, or per cent: `ratio("1%") == ratio("0.01") == 0.01`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a gap such as 0.0001 or 1%")
    return value


def mesh_axes(text: str) -> dict[str, int]:
    """`mesh_axes("data=4,model=2") == {"data": 4, "model": 2}`, in the order written: major first."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and size.isdecimal() and int(size) > 0):
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r} is not AXIS=SIZE with a size of 1 or more"
            )
        if name in axes:
            raise argparse.ArgumentTypeError(f"{text!r} names axis {name!r} twice")
        axes[name] = int(size)
    return axes


def mesh_axes_or_auto(text: str) -> dict[str, int] | str:
    """`mesh_axes(text)`, or "auto"."""
    return text if text == "auto" else mesh_axes(text)


def positions(text: str) -> tuple[int, ...]:
    """`positions("0,2") == (0, 2)`, and nothing from an empty text."""
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of argument positions such as 0,1")
    return tuple(int(part) for part in parts)


def counts(text: str) -> tuple[int, ...]:
    """`counts("1,2,8") == (1, 2, 8)`: numbers of devices, ascending."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers in ascending order such as 1,2,4,8"
        )
    return tuple(numbers)


def output(text: str) -> Path:
    """A file to write; that its directory is missing is found now, not after minutes of planning."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} can't be written: there is no directory {path.parent}")
    return path
