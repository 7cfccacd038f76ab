"""Hardware profiles as text: one line a profile, or one line a number with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..hardware import Profile
from ..units import format_bytes, format_seconds


def profiles_table(profiles: Sequence[Profile]) -> str:
    """One line a profile: memory and its rate, peak of bf16 products, links."""
    rows = [("name", "memory", "usable", "memory rate", "bf16 peak", "links (innermost first)")]
    for profile in profiles:
        links = ", ".join(
            f"{link.name} {_format('bytes_per_s', link.bytes_per_s)}"
            + (f" x{link.domain_size}" if link.domain_size else "")
            for link in profile.links
        )
        rows.append(
            (
                profile.name,
                format_bytes(profile.hbm_bytes),
                format_bytes(profile.usable_bytes),
                _format("bytes_per_s", profile.hbm_bytes_per_s),
                _format("flops_per_s", profile.peak_for("bfloat16")),
                links,
            )
        )
    return _aligned(rows)


def profile_page(profile: Profile) -> str:
    """Every number of a profile that has a source: its path, its value, the source."""
    rows = [
        (path, _format(path, _value_at(profile, path)), source) for path, source in profile.sources.items()
    ]
    kinds = ", ".join(profile.device_kinds) or "no device kind"
    return f"{profile.name} ({profile.kind}; {kinds})\n{_aligned(rows)}"


def _value_at(profile: Profile, path: str) -> Any:
    """The value at a path of `Profile.sources`, such as "links.ici.bytes_per_s"."""
    value: Any = profile
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value[step]
        elif isinstance(value, tuple):
            value = next(link for link in value if link.name == step)
        else:
            value = getattr(value, step)
    return value


def _format(path: str, value: Any) -> str:
    """A number in the unit that its name ends in; anything else as it is."""
    if "flops_per_s" in path:
        return f"{value / 1e12:g} TFLOP/s"
    if path.endswith("bytes_per_s"):
        return f"{value / 1e9:g} GB/s"
    if path.endswith("_bytes"):
        return format_bytes(value)
    if path.endswith("_s"):
        return format_seconds(value)
    return str(value)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
