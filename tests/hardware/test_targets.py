"""Compile-only devices: what a name means, that their numbers are the profiles' own, and what missing plug-ins say."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxplan
from jaxplan.errors import MeshError, TargetError
from jaxplan.hardware import (
    available_targets,
    compile_for,
    compiler_options,
    heap_bytes,
    load_profile,
    profile_for_device_kind,
)
from jaxplan.hardware import targets as targets_module

GPU_CONFIGS = {p.stem: p.read_text() for p in Path(jaxplan.__file__).parent.glob("hardware/gpu_targets/*")}


def _number(config: str, key: str) -> float:
    found = re.search(rf"\b{key}: ([\d.]+)", config)
    assert found, key
    return float(found.group(1))


@pytest.mark.parametrize("name", available_targets())
def test_every_target_is_priced_by_a_profile_of_its_kind(name: str) -> None:
    assert load_profile(name).kind == ("tpu" if name.startswith("tpu-") else "gpu")
    assert (name in GPU_CONFIGS) == (load_profile(name).kind == "gpu")


@pytest.mark.parametrize("name", sorted(GPU_CONFIGS))
def test_what_the_gpu_compiler_is_told_agrees_with_the_datasheet(name: str) -> None:
    profile, config = load_profile(name), GPU_CONFIGS[name]
    described = re.search(r'device_description_str: "([^"]+)"', config)
    assert described and described.group(1) in profile.device_kinds
    # drivers show a few percent less memory than is sold, and the rate of the memory clock that is set
    assert _number(config, "device_memory_size") == pytest.approx(profile.hbm_bytes, rel=0.03)
    assert _number(config, "memory_bandwidth") == pytest.approx(profile.hbm_bytes_per_s, rel=0.05)
    vector_flops_per_s = 2e9 * math.prod(
        _number(config, key) for key in ("core_count", "fpus_per_core", "clock_rate_ghz")
    )
    assert vector_flops_per_s == pytest.approx(profile.vector_flops_per_s, rel=0.1)


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v9:2x2", "tpu-v5e:2x", "tpu-v5e:0x2", "v5e:2x4", "h100:axbxc"])
def test_a_name_that_is_none_says_what_names_are_made_of(name: str) -> None:
    with pytest.raises(TargetError, match=r"write HARDWARE:DIMS with one of .*h100.*tpu-v5e"):
        jaxplan.target(name)


def test_a_gpu_target_needs_its_three_sizes() -> None:
    with pytest.raises(TargetError, match="slices x hosts x devices, as in h100:1x1x8"):
        jaxplan.target("h100:8")


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("tpu-v5e:2x4", "libtpu", "tpu-aot"), ("h100:1x1x8", "jax_plugins.xla_cuda13", "gpu-aot")],
)
def test_a_missing_compiler_is_named_with_its_extra(name: str, module: str, extra: str) -> None:
    # a process of its own: a plug-in that is loaded can't be taken away
    program = f"import sys; sys.modules[{module!r}] = None; import jaxplan; jaxplan.target({name!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TPU_LIBRARY_PATH", None)  # set by jax in this process, where libtpu is installed
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ran.returncode == 1
    assert f"pip install 'jaxplan[{extra}]'" in ran.stderr


class Lowered:
    """What is refused until it is told what `accepted` says."""

    def __init__(self, message: str, accepted: str) -> None:
        self.message, self.accepted, self.told = message, accepted, list[dict[str, Any]]()

    def compile(self, compiler_options: dict[str, Any]) -> str:
        self.told.append(compiler_options)
        if self.accepted not in compiler_options:
            raise jax.errors.JaxRuntimeError(self.message)
        return "compiled"


NO_TILES = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.1994 = bf16[8192,1152]{1,0}"


@pytest.mark.parametrize(("message", "absent"), [(NO_TILES, True), (NO_TILES, False), ("INTERNAL: other", True)])
def test_products_without_tiles_are_cublas_where_no_gpu_is(
    message: str, absent: bool, mesh_8: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"xla_gpu_autotune_level": "0"} if absent else {}
    monkeypatch.setattr(targets_module, "compiler_options", lambda mesh: dict(told))
    lowered: Any = Lowered(message, "xla_gpu_enable_triton_gemm")
    if message == NO_TILES and absent:
        assert compile_for(lowered, mesh_8, {"xla_dump_to": "there"}) == "compiled"
        first, second = lowered.told
        assert first == told | {"xla_dump_to": "there"}
        assert second == first | {"xla_gpu_enable_triton_gemm": False}
    else:
        with pytest.raises(jax.errors.JaxRuntimeError):
            compile_for(lowered, mesh_8)
        assert len(lowered.told) == 1


def test_a_heap_is_what_main_memory_holds_of_the_temporaries() -> None:
    """Arguments, results, a core's own memory (of some colour) and constants are none."""
    assignment = """BufferAssignment:
allocation 0: size 201326592, parameter 0, shape |f32[4096,4096]| at ShapeIndex {}:
allocation 55: size 512, maybe-live-out:
 value: <3768 copy-start.24{0} @1> (size=40243200,offset=0): f32[50304,200]{0,1:T(8,128)S(1)}
allocation 314: size 4201234944, preallocated-temp:
allocation 315: size 136, color 2, preallocated-temp:
allocation 316: size 64, page 1, preallocated-temp:
"""
    assert heap_bytes(assignment) == 4201234944 + 64


def test_real_devices_need_no_compiler_options(mesh_8: jax.sharding.Mesh) -> None:
    assert compiler_options(mesh_8) == {}


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("tpu-v5e:2x4", {"data": 4, "model": 2}),
        ("tpu-v5e:1x1", {"data": 1}),
        ("tpu-v6e:4x4", {"data": 2, "model": 8}),  # jax has no layout for these sizes on a 4x4 torus
        ("tpu-v5p:2x2x2", {"data": 2, "fsdp": 2, "model": 2}),
        ("tpu-v7x:2x2x1", {"data": 8}),
    ],
)
def test_a_tpu_mesh_holds_each_device_once(
    name: str, axes: dict[str, int], tpu_topology: Callable[[str], object]
) -> None:
    before = dict(os.environ)
    target = jaxplan.target(name)
    assert {k: v for k, v in os.environ.items() if before.get(k) != v and k != "TPU_LIBRARY_PATH"} == {}
    mesh = target.mesh(**axes)
    assert dict(mesh.shape) == axes
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in target.devices)
    assert profile_for_device_kind(target.devices[0].device_kind, "tpu").name == target.hardware


@pytest.mark.aot_tpu
def test_a_mesh_of_another_size_is_refused(tpu_topology: Callable[[str], object]) -> None:
    with pytest.raises(MeshError, match=r"mesh \(data=4, model=4\) has 16 devices, target tpu-v5e:2x4 8"):
        jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=4)


@pytest.mark.aot_gpu
@pytest.mark.parametrize("name", sorted(GPU_CONFIGS))
def test_a_program_compiles_for_every_gpu(name: str, cuda_compiler: None) -> None:
    target = jaxplan.target(f"{name}:1x2x4")
    mesh = target.mesh(data=4, model=2)
    assert [d.process_index for d in target.devices] == [0] * 4 + [1] * 4
    assert profile_for_device_kind(target.devices[0].device_kind, "gpu").name == name
    rows = NamedSharding(mesh, PartitionSpec("data"))
    lowered = jax.jit(jnp.sum, in_shardings=rows).lower(jax.ShapeDtypeStruct((512, 64), jnp.float32))
    compiled = lowered.compile(compiler_options=compiler_options(mesh))
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().argument_size_in_bytes == 512 * 64 * 4 // 4


@pytest.mark.aot_tpu
def test_a_target_that_is_asked_for_twice_has_the_same_devices() -> None:
    """A step's own `shard_map` is written for a mesh of one of them, and planned on a mesh of the other."""
    one, other = (jaxplan.target("tpu-v5e:2x4").mesh(data=4, model=2) for _ in range(2))
    assert one == other
