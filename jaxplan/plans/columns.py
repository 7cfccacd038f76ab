"""Plain text in aligned columns and bars, for a terminal, a log or a file: no colour, no tabs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

WIDTH = 120
"""No line of a printed plan is longer."""


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    shrink: int = 0,
    indent: int = 2,
    width: int = WIDTH,
) -> list[str]:
    """Lines of `rows` (the first may be a header) with two spaces between columns.

    Args:
      right: columns aligned to the right.
      shrink: the column that is shortened in the middle where a line would be wider than `width`.
    """
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    excess = indent + sum(widths) + 2 * (len(widths) - 1) - width
    widths[shrink] = max(widths[shrink] - max(excess, 0), 12)
    lines = []
    for row in rows:
        cells = [
            shortened(cell, size).rjust(size) if column in right else shortened(cell, size).ljust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines


def shortened(text: str, width: int) -> str:
    """`shortened("state/params/kernel", 12) == "state..ernel"`: the ends of a path say most."""
    if len(text) <= width:
        return text
    head = (width - 2) // 2
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def bar(share: float, width: int = 40) -> str:
    """`#` for `share` of `width`; at least one where there is anything at all."""
    return "#" * max(round(min(share, 1.0) * width), int(share > 0))


def percent(share: float) -> str:
    """`percent(0.123) == "12 %"`; a tenth is shown below 10 %, and what is not nothing is not called 0."""
    if 0 < share < 0.0005:
        return "<0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.0995 else f"{100 * share:.0f} %"
