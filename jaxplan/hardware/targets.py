"""Devices to compile for that are not there: compile-only TPU slices and GPU nodes, by name.

XLA's own TPU and GPU compilers run on any x86-64 Linux machine once their plug-in is installed.  A mesh over such
devices plans, lowers and compiles as one over real devices does; only running what was compiled is impossible.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .._jax import is_compile_only
from ..errors import MeshError, TargetError
from .assigned import dumping, keep_heap

_GPU_CONFIGS = resources.files(__package__) / "gpu_targets"
_TPU_NAMES = {"tpu-v5e": "v5e", "tpu-v5p": "v5p", "tpu-v6e": "v6e", "tpu-v7x": "tpu7x"}
"""Profile -> libtpu's name.  TPU v4 is left out: libtpu describes its two cores as two devices, the profile one
chip."""
_DIMS = re.compile(r"[1-9]\d*(?:x[1-9]\d*){0,2}")
_TPU_ENVIRONMENT = {
    # No metadata server is asked what machine this is, and no warning says that none answered.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # A compiler needs no device, so several processes may load it at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_GPU_COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}  # autotuning times kernels on the device
_NO_TILES = "Couldn't find output tile sizes"  # see `compile_for`
_ALL_CUBLAS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
_GPU_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # of drivers that a compiler doesn't need


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """Devices of one kind that exist only for the compiler.

    Attributes:
      name: "tpu-v5e:2x4"; hardware: the profile that prices it, "tpu-v5e".
      devices: compile-only `jax.Device`s in the topology's order.
      compiler_options: what `Lowered.compile` has to be told for such devices.
    """

    name: str
    hardware: str
    devices: tuple[Any, ...] = field(repr=False)
    compiler_options: Mapping[str, str] = field(hash=False, repr=False)

    def mesh(self, **axes: int) -> Mesh:
        """A mesh of Auto axes over all devices, laid on the topology as `jax.make_mesh` does.

        Raises:
          MeshError: the sizes don't multiply to the number of devices.
        """
        if math.prod(axes.values()) != len(self.devices):
            asked = ", ".join(f"{name}={size}" for name, size in axes.items())
            raise MeshError(
                f"mesh ({asked}) has {math.prod(axes.values())} devices, target {self.name} {len(self.devices)}: "
                "the sizes must multiply to the target's devices"
            )
        return mesh_over(self.devices, axes)


def mesh_over(devices: Sequence[Any], axes: Mapping[str, int]) -> Mesh:
    """A mesh of Auto axes over all of `devices`, whose number the sizes multiply to, laid on their topology."""
    types = (AxisType.Auto,) * len(axes)
    sizes, names = tuple(axes.values()), tuple(axes)
    try:
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    except NotImplementedError:  # jax has no layout for these sizes on this torus: the topology's order
        return Mesh(np.array(devices).reshape(sizes), names, axis_types=types)


def target(name: str) -> CompileTarget:
    """The compile-only devices that `name` describes.

    Args:
      name: a TPU and its slice in chips, "tpu-v5e:2x4", "tpu-v5p:2x2x2", "tpu-v6e:4x4"; or a GPU and
        slices x hosts x devices, "h100:1x1x8".  See `available_targets` for what stands before the colon.

    Raises:
      TargetError: an unknown name, a shape that the compiler refuses, or its plug-in isn't installed.
    """
    hardware, _, dims = name.partition(":")
    if hardware not in available_targets() or not _DIMS.fullmatch(dims):
        raise TargetError(
            f"unknown target {name!r}: write HARDWARE:DIMS with one of {', '.join(available_targets())}, and the "
            "slice in chips for a TPU (tpu-v5e:2x4, tpu-v5p:2x2x2), slices x hosts x devices for a GPU (h100:1x1x8)"
        )
    if hardware in _TPU_NAMES:
        return CompileTarget(
            name=name, hardware=hardware, devices=_tpu_devices(name, hardware, dims), compiler_options={}
        )
    return CompileTarget(
        name=name,
        hardware=hardware,
        devices=_gpu_devices(name, hardware, dims),
        compiler_options=_GPU_COMPILER_OPTIONS,
    )


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """What `Lowered.compile` has to be told for the devices of `mesh`; nothing for real ones."""
    device = mesh.devices.flat[0]
    return dict(_GPU_COMPILER_OPTIONS) if device.platform == "gpu" and is_compile_only(device) else {}


def compile_for(lowered: jax.stages.Lowered, mesh: Mesh, options: Mapping[str, str | bool] | None = None) -> Any:
    """`lowered`, compiled for the devices of `mesh`, there or not.

    Without a GPU XLA times no kernels, and takes its first choice of tiles for those of Triton's; there are products
    that it finds none for and fails (`bf16[8192, 1152]` of a DiT's normalised images, jax 0.10.2).  All products are
    cuBLAS's then.  Of a TPU program the heap that it takes is kept, see `assigned`.

    Args:
      options: more of what `Lowered.compile` is told.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    own = compiler_options(mesh)
    told = own | dict(options or {})
    dumped = "xla_dump_to" in told or "xla_dump_to" in os.environ.get("XLA_FLAGS", "")  # where the user wants it
    if mesh.devices.flat[0].platform == "tpu" and not dumped:
        with tempfile.TemporaryDirectory(prefix="jaxplan-") as folder:
            compiled = lowered.compile(compiler_options=told | dumping(folder))
            keep_heap(compiled, folder)
        return compiled
    try:
        return lowered.compile(compiler_options=told)
    except jax.errors.JaxRuntimeError as refused:
        if _NO_TILES not in str(refused) or not own:
            raise
    return lowered.compile(compiler_options=told | _ALL_CUBLAS)


def available_targets() -> tuple[str, ...]:
    """What may stand before the colon of a target's name, sorted; each is a hardware profile too."""
    gpus = (entry.name.removesuffix(".txtpb") for entry in _GPU_CONFIGS.iterdir())
    return tuple(sorted((*_TPU_NAMES, *gpus)))


# jax takes the devices of two descriptions for different ones: a mesh of one is no mesh of the other
@functools.cache
def _tpu_devices(name: str, hardware: str, dims: str) -> tuple[Any, ...]:
    sizes = [int(size) for size in dims.split("x")]
    # libtpu takes hosts of 2x2 chips, and refuses a slice that they don't tile unless told otherwise
    bounds = [2 if size % 2 == 0 else 1 for size in (*sizes, 1)[:2]] + [1]
    topology_name = f"{_TPU_NAMES[hardware]}:{dims}"
    with _environment(_TPU_ENVIRONMENT):
        return _devices(name, "tpu", topology_name=topology_name, chips_per_host_bounds=bounds)


@functools.cache
def _gpu_devices(name: str, hardware: str, dims: str) -> tuple[Any, ...]:
    config = (_GPU_CONFIGS / f"{hardware}.txtpb").read_text(encoding="utf-8")
    if dims.count("x") != 2:
        raise TargetError(f"target {name!r}: a GPU target is slices x hosts x devices, as in {hardware}:1x1x8")
    with _environment(_GPU_ENVIRONMENT):
        return _devices(name, "cuda", topology=dims, target_config=config)


def _devices(name: str, platform: str, **description: Any) -> tuple[Any, ...]:
    from jax.experimental import topologies  # slow to import, and only needed here

    try:
        return tuple(topologies.get_topology_desc(platform=platform, **description).devices)
    except jax.errors.JaxRuntimeError as refused:
        raise TargetError(f"target {name!r} is refused by its compiler: {refused}") from refused
    except (NotImplementedError, RuntimeError) as missing:  # what jax raises without libtpu, and without CUDA
        if platform == "tpu":
            way_out = "install it with `pip install 'jaxplan[tpu-aot]'` (x86-64 Linux only)"
        else:
            way_out = (
                "install it with `pip install 'jaxplan[gpu-aot]'` (Linux only); where it is installed and this machine "
                "has no GPU, start Python with JAX_PLATFORMS=cpu, or jax refuses the plug-in"
            )
        raise TargetError(
            f"target {name!r} needs XLA's {platform.upper()} compiler, which jax doesn't find here: {way_out}"
        ) from missing


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """`defaults` in the environment where it doesn't say otherwise; as it was afterwards."""
    added = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
