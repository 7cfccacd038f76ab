"""`jaxplan.curve` and `jaxplan.min_devices`: one step on ever more devices, each number on its best mesh."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from ..api import (
    NEAR_BUDGET,
    Devices,
    MeshSearch,
    MeshTrial,
    Options,
    as_options,
    best_plan,
    budget_of,
    devices_of,
    speaker,
    step_of_shapes,
)
from ..errors import ArgumentError, InfeasibleError
from ..hardware import CompileTarget
from ..plans import Plan
from ..units import format_bytes
from .counts import Curve, DevicesPoint, TooFew

COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of devices that a curve is drawn over, unless it is told others."""

MOST_DEVICES = 1024
"""That `min_devices` looks for, unless it is told otherwise: each power of two up to it."""


def curve(
    train_step: Callable[..., Any],
    *shapes: Any,
    devices: Sequence[int | CompileTarget] = COUNTS,
    hardware: Any = None,
    memory: int | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    constraints: Mapping[str, Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Curve:
    """The best step time for each number of devices, over all meshes that they can be.

    Args:
      shapes: the step's arguments, arrays or ShapeDtypeStructs.
      devices: numbers of devices of `hardware`, or compile-only ones, `jaxplan.target(...)`; ascending.
      memory: bytes a device, or text such as "14GiB"; by default the profile's memory less its reserve.
      donate_argnums, constraints: as of `auto_shard`; options: too, `mesh_axes` is the most axes of a mesh.

    Raises:
      ArgumentError: numbers without `hardware`, or not ascending.  InfeasibleError: nothing fits on any of them.
      What planning raises.
    """
    places = _places(devices, hardware)
    walk = _Walk(train_step, shapes, places, memory, donate_argnums, constraints, as_options(options))
    tried = [walk.on(place) for place in places]
    points = tuple(one for one in tried if isinstance(one, DevicesPoint))
    too_few = tuple(one for one in tried if isinstance(one, TooFew))
    if not points:
        raise walk.nothing(too_few)
    return Curve(
        name=walk.name,
        hardware=places[0].profile.name,
        memory_bytes=walk.budget_bytes,
        points=points,
        too_few=too_few,
    )


def min_devices(
    train_step: Callable[..., Any],
    *shapes: Any,
    memory: int | str | None = None,
    hardware: Any = None,
    devices: Sequence[int | CompileTarget] | None = None,
    donate_argnums: int | Sequence[int] = (),
    constraints: Mapping[str, Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> DevicesPoint:
    """The fewest devices on which a plan fits, and the fastest plan there.

    Numbers on which nothing can fit by what is proved of fewer devices are not searched, save for the most.

    Args:
      devices: the numbers to try, ascending; by default powers of two up to `MOST_DEVICES`.  The others as of `curve`.

    Raises:
      InfeasibleError: nothing fits on the most devices either; says what is needed.  What `curve` raises.
    """
    powers = [2**power for power in range(MOST_DEVICES.bit_length())]
    places = _places(powers if devices is None else devices, hardware)
    walk = _Walk(train_step, shapes, places, memory, donate_argnums, constraints, as_options(options))
    refused = []
    for place in places:
        if place is not places[-1] and walk.floor_bytes(place.count) > NEAR_BUDGET * walk.budget_bytes:
            continue
        found = walk.on(place)
        if isinstance(found, DevicesPoint):
            return found
        refused.append(found)
    raise walk.nothing(refused)


def _places(devices: Iterable[int | CompileTarget], hardware: Any) -> list[Devices]:
    asked = list(devices)
    if hardware is None and any(isinstance(one, int) for one in asked):
        raise ArgumentError(
            'numbers of devices say nothing of their kind: name it, hardware="tpu-v5e", or give targets instead, '
            'devices=[jaxplan.target("tpu-v5e:2x2"), jaxplan.target("tpu-v5e:2x4")]'
        )
    places = [devices_of(one, hardware) for one in asked]
    counts = [place.count for place in places]
    if not counts or any(a >= b for a, b in itertools.pairwise(counts)):
        raise ArgumentError(f"devices={counts} must be numbers in ascending order, one at least")
    return places


class _Walk:
    """The searches of one step, the same program on every number of devices."""

    def __init__(
        self, train_step: Callable[..., Any], shapes: Sequence[Any], places: Sequence[Devices],
        memory: int | str | None, donate_argnums: int | Sequence[int], constraints: Mapping[str, Any] | None,
        options: Options,
    ) -> None:  # fmt: skip
        self.name = getattr(train_step, "__name__", type(train_step).__name__)
        self.budget_bytes = budget_of(places[0], memory)
        self.options, self.say = options, speaker(options)
        step = step_of_shapes(train_step, shapes, donate_argnums, options)
        self.search = MeshSearch(step, self.budget_bytes, constraints, options, self.say)
        self._floors: dict[int, int] = {}

    def floor_bytes(self, count: int) -> int:
        """No plan on so many devices has a smaller peak a device, by what is proved of fewer.

        Of any mesh of k times as many devices, k can be divided out of the axes' sizes; each tensor cut by the smaller
        axes then has pieces at most k times as large.
        """
        return max((least * few // count for few, least in self._floors.items() if count % few == 0), default=0)

    def on(self, place: Devices) -> DevicesPoint | TooFew:
        trials = self.search.first(place.targets(self.options.mesh_axes))
        best = trials[0]
        if best.found is None:
            least = min((trial.least_bytes for trial in trials if trial.least_bytes), default=0)
            self._floors[place.count] = min(trial.floor_bytes for trial in trials)
            return TooFew(devices=place.count, least_bytes=least)
        return DevicesPoint(
            devices=place.count, axes=best.target.axes, step_s=best.step_s,
            bound_s=min(trial.bound_s for trial in trials), peak_bytes=best.found.memory.peak_bytes,
            tried=tuple(str(trial) for trial in trials), make=_maker(self.search, trials),
        )  # fmt: skip

    def nothing(self, refused: Sequence[TooFew]) -> InfeasibleError:
        most = refused[-1]
        needs = f", which need at least {format_bytes(most.least_bytes)} a device" if most.least_bytes else ""
        return InfeasibleError(
            f"no plan for `{self.name}` fits {format_bytes(self.budget_bytes)} a device on up to {most.devices} devices"
            f"{needs}. Raise `memory`, allow more devices, or recompute more (jax.checkpoint)"
        )


def _maker(search: MeshSearch, trials: Sequence[MeshTrial]) -> Callable[[], Plan]:
    return cache(lambda: best_plan(search, trials))
