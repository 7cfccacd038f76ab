"""What a verification says: findings with their places, quantities side by side, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference between what was planned and what was compiled.

    Attributes:
      what: "mesh", "argument", "result", "sharding", "donation", "collective", "computation", "memory",
        "numerics" or "known bug".
      where: the tensor's tree path, or the line of the program.
      text: planned against compiled, in words.
      seconds_s: what it adds to a step; 0 where it costs memory or nothing.
      grave: whether the compiled program is another one than was planned; else a note.
    """

    what: str
    where: str
    text: str
    seconds_s: float = 0.0
    grave: bool = True

    def __str__(self) -> str:
        cost = f" (+{format_seconds(self.seconds_s)} a step)" if self.seconds_s > 0 else ""
        return f"{self.what} {self.where}: {self.text}{cost}"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One figure of the plan beside the compiled program's, of one device and one step; None: not known.

    Attributes:
      unit: "B", "s" or "FLOP".
    """

    name: str
    planned: float | None
    compiled: float | None
    unit: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A compiled step beside its plan.

    Attributes:
      name: of the step; platform: what it was compiled for.
      findings: grave ones first, dearest first.
      quantities: FLOPs, memory, and what is sent over each set of mesh axes by each kind of collective.
      assumptions: what both sides stand on, as how often a loop runs that may end early.
    """

    name: str
    platform: str
    findings: tuple[Finding, ...]
    quantities: tuple[Quantity, ...]
    assumptions: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether what was compiled is what was planned: no grave finding."""
        return not any(finding.grave for finding in self.findings)

    def __str__(self) -> str:
        grave = [finding for finding in self.findings if finding.grave]
        notes = [finding for finding in self.findings if not finding.grave]
        verdict = "as planned" if self.ok else f"NOT as planned: {len(grave)} findings"
        lines = [f"`{self.name}` compiled for {self.platform}: {verdict}", "", *_table(self.quantities)]
        for title, chosen in (("Findings", grave), ("Notes", notes)):
            if chosen:
                lines += ["", title, *(f"  {finding}" for finding in chosen)]
        if self.assumptions:
            lines += ["", "Assumptions", *(f"  - {line}" for line in self.assumptions)]
        return "\n".join(lines)


def ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Grave ones first, then by what they cost, in the order found where equal."""
    return tuple(sorted(findings, key=lambda f: (not f.grave, -f.seconds_s)))


def _table(quantities: Sequence[Quantity]) -> list[str]:
    rows = [("one device, one step", "planned", "compiled", "")]
    for q in quantities:
        both = q.planned is not None and q.compiled is not None
        change = ""
        if both and q.planned != q.compiled:
            change = "" if not q.planned else f"{(q.compiled or 0.0) / q.planned - 1:+.1%}"
        rows.append((q.name, _said(q.planned, q.unit), _said(q.compiled, q.unit), change))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip()
        for row in rows
    ]


def _said(value: float | None, unit: str) -> str:
    if value is None:
        return "?"
    if unit == "B":
        return format_bytes(value)
    return format_seconds(value) if unit == "s" else f"{value:.3e} {unit}"
