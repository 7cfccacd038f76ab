"""Devices whose mesh is yet to be chosen -> the targets among which it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ..errors import MeshError
from ..hardware import CompileTarget, Profile, mesh_over, mesh_shapes
from ..sharding import MeshAxes
from .meshes import Target, target_of

AUTO = "auto"
"""Instead of a mesh: the planner chooses it."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices without a mesh: `count` of one kind, `devices` those that are there (none to plan for alone)."""

    count: int
    devices: tuple[Any, ...]
    profile: Profile

    def targets(self, most_axes: int) -> tuple[Target, ...]:
        """One for every mesh of up to so many axes that differs in sizes or links."""
        return tuple(self.target(axes) for axes in mesh_shapes(self.profile, self.count, most_axes))

    def target(self, axes: MeshAxes) -> Target:
        """The one of these axes.

        Raises:
          MeshError: their sizes don't multiply to the number of devices.
        """
        sizes, names = tuple(size for _, size in axes), tuple(name for name, _ in axes)
        if math.prod(sizes) != self.count:
            asked = ", ".join(f"{name}={size}" for name, size in axes)
            raise MeshError(f"mesh ({asked}) has {math.prod(sizes)} devices, and there are {self.count}")
        mesh = mesh_over(self.devices, dict(axes)) if self.devices else AbstractMesh(sizes, names)
        return target_of(mesh, self.profile)


def devices_of(devices: int | Sequence[Any] | CompileTarget | None, hardware: Any) -> Devices:
    """What a user names as devices.

    Args:
      devices: None, all of `jax.devices()`; a number, of `hardware` where that is named (they need not be there), else
        the first of `jax.devices()`; devices; or compile-only ones, `jaxplan.target(...)`.

    Raises:
      MeshError: no devices, more than there are, or devices of several kinds.  HardwareError: an unknown profile.
    """
    if isinstance(devices, int) and hardware is not None:
        if devices < 1:
            raise MeshError(f"devices={devices}: a mesh has at least one")
        alone = target_of(AbstractMesh((devices,), ("data",)), hardware)
        return Devices(count=devices, devices=(), profile=alone.profile)
    if isinstance(devices, CompileTarget):
        found = devices.devices
    elif devices is None or isinstance(devices, int):
        found = tuple(jax.devices())
        if devices is not None and not 0 < devices <= len(found):
            raise MeshError(
                f"devices={devices}, and this machine has {len(found)} ({found[0].device_kind}): name the hardware to "
                'plan for devices that are not here, hardware="tpu-v5e", or give devices=jaxplan.target("tpu-v5e:2x4")'
            )
        found = found[:devices]
    else:
        found = tuple(devices)
    if not found:
        raise MeshError("devices is empty: a mesh has at least one")
    flat = target_of(mesh_over(found, {"data": len(found)}), hardware)
    return Devices(count=len(found), devices=found, profile=flat.profile)
