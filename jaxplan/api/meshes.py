"""Meshes of every kind -> what the planner needs: named sizes, a device kind, and Auto axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from ..cost import CostModel
from ..errors import MeshError
from ..hardware import Profile, axis_links, load_profile, profile_for_device_kind
from ..sharding import MeshAxes
from .options import Options


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a step will run.

    Attributes:
      axes: (name, size) of each mesh axis; mesh: the user's mesh with Auto axes; abstract: its device-free twin.
      profile: the hardware; device_kind: as jax names it, "" for an abstract mesh; platform: to lower for.
    """

    axes: MeshAxes
    mesh: Any
    abstract: AbstractMesh
    profile: Profile
    device_kind: str
    platform: str

    @property
    def is_profiled(self) -> bool:
        """Whether the devices are of the profile's kind, and not stand-ins for what is planned for."""
        return self.platform == _PLATFORMS[self.profile.kind]


_PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}


def target_of(mesh: Any, hardware: Any = None) -> Target:
    """Read a Mesh (any axis types) or an AbstractMesh, and find its hardware.

    Raises:
      MeshError: not a mesh, no axes, or devices of several kinds.
      HardwareError: an unknown profile, or an AbstractMesh without one.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise MeshError(
            f"mesh must be a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}: make one with "
            'jax.make_mesh((4, 2), ("data", "model")), or have it chosen: mesh="auto"'
        )
    axes = tuple((str(name), int(size)) for name, size in mesh.shape.items())
    if not axes:
        raise MeshError("the mesh has no axes: there is nothing to shard over")
    auto = (AxisType.Auto,) * len(axes)
    names, sizes = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    abstract = AbstractMesh(sizes, names, axis_types=auto)
    kind, platform = "", ""
    concrete: Any = abstract
    if isinstance(mesh, Mesh):
        kinds = sorted({d.device_kind for d in mesh.devices.flat})
        if len(kinds) > 1:
            raise MeshError(f"the mesh mixes device kinds {kinds}: one plan is one program for equal devices")
        kind, platform = kinds[0], mesh.devices.flat[0].platform
        concrete = Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    if hardware is not None:
        profile = load_profile(hardware)
    elif kind:
        profile = profile_for_device_kind(kind, platform)
    else:
        raise MeshError(
            'an AbstractMesh has no devices to tell the hardware from: pass hardware="tpu-v5e" or another profile '
            "(jaxplan.hardware.available_profiles())"
        )
    platform = {"gpu": "cuda"}.get(platform, platform) or _PLATFORMS[profile.kind]
    return Target(
        axes=axes, mesh=concrete, abstract=abstract, profile=profile, device_kind=kind, platform=platform
    )


def model_of(target: Target, options: Options) -> CostModel:
    """The prices on a target."""
    links = axis_links(target.profile, target.axes)
    return CostModel(
        profile=target.profile,
        axes=target.axes,
        links=tuple(links[name] for name, _ in target.axes),
        exposed=1 - options.overlap,
    )
