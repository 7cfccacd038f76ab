"""What the pictures of frontiers and curves are drawn with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..units import round_step

#: Ticks on an axis, about.
TICKS = 8

_STYLE = (
    ".page{fill:#fff}.title{font-size:18px;font-weight:650;fill:#1d2126}.soft{font-size:12px;fill:#616a75}"
    ".tick{stroke:#e3e5e8}.line{fill:none;stroke:#2f6db5;stroke-width:2}.area{fill:#2f6db5;opacity:.08}"
    ".dot{fill:#2f6db5}.knee{fill:#e58b2d}.limit{stroke:#b03a3a;stroke-dasharray:5 4}.name{font-size:12px;fill:#1d2126}"
    ".ideal{fill:none;stroke:#9aa3ad;stroke-dasharray:5 4}.warn{font-size:12px;fill:#b03a3a}"
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis from `low` to `high`: round ticks in one unit, with as many digits as tell them apart."""

    low: float
    high: float
    unit: float
    name: str
    step: float

    @classmethod
    def around(cls, low: float, high: float, units: Sequence[tuple[float, str]]) -> Scale:
        """A little wider than from `low` to `high`, or than what is one value."""
        margin = (high - low) * 0.08 or abs(high) * 0.02 or 1.0
        unit, name = next(((size, name) for size, name in units if size <= high), units[-1])
        step = round_step((high - low + 2 * margin) / TICKS / unit)
        return cls(low=max(low - margin, 0.0), high=high + margin, unit=unit, name=name, step=step * unit)

    @property
    def ticks(self) -> list[float]:
        """The round values within."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [number * self.step for number in range(first, last + 1)]

    def words(self, value: float, finer: int = 0) -> str:
        """A value in the axis' unit, with `finer` digits more than its ticks have."""
        digits = max(0, finer - math.floor(math.log10(self.step / self.unit) + 1e-9))
        return f"{value / self.unit:.{digits}f} {self.name}"


def text(x: float, y: float, words: str, kind: str = "soft", anchor: str = "start") -> str:
    """Words at a place, `anchor` of them there."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def page(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">\n'
        f'<style>{_STYLE}</style>\n<rect width="100%" height="100%" class="page"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
