"""What every test stands on: eight forced host devices, meshes over them, compile-only TPU topologies.

The environment is set when this file is read, before anything imports jax: jax reads it once.
What the user's own environment already says is kept, so that a test can be rerun on real devices.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxplan.api import Pipeline
    from jaxplan.ir import Traced

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # The timeout: eight devices share the cores there are, a loaded machine is no deadlock.
    "XLA_FLAGS": (
        "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=300"
        # Its newer code generator kills the process on some slices of slices, even of plain jax.jit; 0.12 has no other.
        + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")
        # A step of a tiny model runs in a millisecond however badly LLVM compiles it: two thirds of the compilation
        # are saved.  Partitioning, scheduling and buffers are decided before.
        + " --xla_backend_optimization_level=0"
    ),
    # An executable from another run's cache would hide what this run compiles.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # libtpu as a compiler on a machine without a TPU: don't ask a metadata server, don't warn about the
    # missing host, let several test processes load it at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

from hypothesis import settings  # noqa: E402  (after the environment: nothing may import jax before it)

# The same examples in every run, and no deadline: what a first call takes is compilation.
settings.register_profile("jaxplan", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("jaxplan")


def _host_mesh(**sizes: int) -> Mesh:
    """A mesh of Auto axes over the first devices; fails, naming the cause, where there are too few."""
    import jax
    import numpy as np

    needed = math.prod(sizes.values())
    devices = jax.devices()
    if len(devices) < needed:
        pytest.fail(
            f"mesh {sizes} needs {needed} devices and jax has {len(devices)} ({devices[0].platform}): "
            f"XLA_FLAGS={os.environ['XLA_FLAGS']!r} has no --xla_force_host_platform_device_count={needed}, "
            "or jax was started before tests/conftest.py was read"
        )
    return jax.sharding.Mesh(np.array(devices[:needed]).reshape(tuple(sizes.values())), tuple(sizes))


@pytest.fixture(scope="session")
def mesh_8() -> Mesh:
    """One axis over all the devices."""
    return _host_mesh(data=8)


@pytest.fixture(scope="session")
def mesh_4x2() -> Mesh:
    """Two axes of different sizes, so that a swapped axis is seen."""
    return _host_mesh(data=4, model=2)


@pytest.fixture(scope="session")
def mesh_2x2x2() -> Mesh:
    """Three axes, of equal sizes: only their names tell them apart."""
    return _host_mesh(data=2, fsdp=2, model=2)


@pytest.fixture(scope="session")
def planner_for() -> Callable[..., Pipeline]:
    """`planner_for(traced, sizes, hardware)`: what searches a step, over axes "data", "model" and "more"."""

    def make(traced: Traced, sizes: tuple[int, ...], hardware: str, budget_bytes: int | None = None) -> Pipeline:
        from jax.sharding import AbstractMesh

        from jaxplan.api import Options, Pipeline, model_of, target_of

        target = target_of(AbstractMesh(sizes, ("data", "model", "more")[: len(sizes)]), hardware)
        options, budget_bytes = Options(), budget_bytes or target.profile.usable_bytes
        return Pipeline(traced, target, model_of(target, options), budget_bytes, options, {}, {}, lambda _: None)

    return make


@pytest.fixture(scope="session")
def chain() -> Callable[[int, int], Traced]:
    """`chain(layers, rows)`: a train step through so many products of 4096 x 4096, of a batch of so many rows."""

    def make(layers: int, rows: int) -> Traced:
        import jax
        import jax.numpy as jnp

        from jaxplan.ir import trace

        def step(weights: Any, batch: Any) -> Any:
            def loss(weights: Any) -> Any:
                hidden = batch
                for name in sorted(weights):
                    hidden = jnp.tanh(hidden @ weights[name])
                return jnp.mean(hidden**2)

            return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

        weights = {f"w{layer}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for layer in range(layers)}
        return trace(step, (weights, jax.ShapeDtypeStruct((rows, 4096), jnp.float32)), {}, donate_argnums=(0,))

    return make


@functools.cache
def _tpu_topology(name: str) -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology_name=name, platform="tpu")


@pytest.fixture(scope="session")
def tpu_topology() -> Callable[[str], Any]:
    """`tpu_topology("v5e:2x4").devices`: compile-only devices; mark the test `aot_tpu`.

    Skipped where libtpu is not installed. Where it is and can't describe the topology, that is a failure.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: `pip install -e .[tpu-aot]` brings it (x86-64 Linux only)")
    return _tpu_topology


@pytest.fixture(scope="session")
def cuda_compiler() -> None:
    """For a test marked `aot_gpu`: skipped where jax's CUDA plug-in is not installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    paths = [] if plugins is None else plugins.submodule_search_locations or []
    if not any(os.path.isdir(os.path.join(path, "xla_cuda13")) for path in paths):
        pytest.skip("jax's CUDA plug-in is not installed: `pip install -e .[gpu-aot]` brings it (Linux only)")
