"""The Curve value: the best step time of each number of devices, and its forms as text, JSON and picture."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError, InfeasibleError
from ..plans import Plan
from ..units import format_bytes, format_seconds
from .document import reading, write_document


@dataclass(frozen=True, kw_only=True)
class DevicesPoint:
    """The best mesh of a number of devices.

    Attributes:
      axes: (name, size) of the mesh, major to minor.
      step_s, peak_bytes: what the search prices a step at, and the peak of its simulated memory on one device.
      bound_s: no plan on any of the meshes tried is faster.
      tried: a line for each mesh, the fastest first.
      make: makes the plan; None in a curve read from a file.
    """

    devices: int
    axes: tuple[tuple[str, int], ...]
    step_s: float
    bound_s: float
    peak_bytes: int
    tried: tuple[str, ...] = ()
    make: Callable[[], Plan] | None = field(default=None, compare=False, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan, searched to the end and checked against the partitioner now.

        Raises:
          ArgumentError: the curve was read from a file.
        """
        if self.make is None:
            raise ArgumentError(
                "a curve read from a file has no plans: make this one with "
                f'jaxplan.plan(step, "auto", *shapes, devices={self.devices}, ...)'
            )
        return self.make()

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes)
        return (
            f"{self.devices} devices as ({mesh}): {format_seconds(self.step_s)} a step, "
            f"peak {format_bytes(self.peak_bytes)} a device"
        )


@dataclass(frozen=True, kw_only=True)
class TooFew:
    """A number of devices on which nothing fits: its least peak, or a bound of it (0: not known)."""

    devices: int
    least_bytes: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Numbers of devices, ascending, each with its best mesh.

    Attributes:
      name: of the step; hardware: of the devices; memory_bytes: what one of them may use.
      points: at least one; too_few: the numbers on which nothing fits.
    """

    name: str
    hardware: str
    memory_bytes: int
    points: tuple[DevicesPoint, ...]
    too_few: tuple[TooFew, ...] = ()

    def at_most(self, devices: int) -> DevicesPoint:
        """The fastest point of no more than so many devices: some may better stay idle.

        Raises:
          InfeasibleError: nothing fits on so few.
        """
        within = [point for point in self.points if point.devices <= devices]
        if not within:
            raise InfeasibleError(
                f"no plan for `{self.name}` fits {format_bytes(self.memory_bytes)} a device on {devices} devices. The "
                f"fewest that do: {self.points[0].devices}"
            )
        return min(within, key=lambda point: (point.step_s, point.devices))

    def __str__(self) -> str:
        lines = [
            f"Curve of `{self.name}` on {self.hardware}, {format_bytes(self.memory_bytes)} a device",
            f"  {'devices':>7}  {'step':>9}  {'speedup':>7}  {'not faster than':>15}  {'peak a device':>13}  mesh",
        ]
        for few in self.too_few:
            needs = f"needs about {format_bytes(few.least_bytes)}" if few.least_bytes else "nothing fits"
            lines.append(f"  {few.devices:>7}  {needs}")
        first = self.points[0]
        for point in self.points:
            mesh = ",".join(f"{name}={size}" for name, size in point.axes)
            lines.append(
                f"  {point.devices:>7}  {format_seconds(point.step_s):>9}  {first.step_s / point.step_s:>6.2f}x  "
                f"{format_seconds(point.bound_s):>15}  {format_bytes(point.peak_bytes):>13}  {mesh}"
            )
        return "\n".join(lines)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the points, without their plans; the same file for the same curve."""
        document = {
            "name": self.name, "hardware": self.hardware,
            "memory_bytes": self.memory_bytes,
            "too_few": [[few.devices, few.least_bytes] for few in self.too_few],
            "points": [
                {
                    "devices": point.devices, "axes": [list(axis) for axis in point.axes], "step_s": point.step_s,
                    "bound_s": point.bound_s, "peak_bytes": point.peak_bytes, "tried": list(point.tried),
                }
                for point in self.points
            ],
        }  # fmt: skip
        write_document(path, document)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Curve:
        """Read what `to_json` wrote.

        Raises:
          PlanFileError: the file is no curve, or of another schema.
        """
        with reading(path, "curve") as document:
            points = tuple(
                DevicesPoint(
                    **{**row, "axes": tuple((n, s) for n, s in row["axes"]), "tried": tuple(row["tried"])}
                )
                for row in document.pop("points")
            )
            too_few = tuple(TooFew(devices=n, least_bytes=size) for n, size in document.pop("too_few"))
            return cls(points=points, too_few=too_few, **document)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve as an SVG."""
        from .curve_picture import curve_picture

        Path(path).write_text(curve_picture(self), encoding="utf-8")
