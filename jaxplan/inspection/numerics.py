"""One step both ways, sharded as planned and on one device: does the compiled program compute the same?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._jax import is_compile_only
from ..api import Options, ShardedStep, auto_shard, of_arrays
from ..errors import ArgumentError
from ..plans import Plan
from .findings import Finding

_SMALLEST_TABLE = 8
"""Made-up indices stay below it: no table is likely to have fewer rows."""


def differing_results(
    step: ShardedStep, plan: Plan, arguments: tuple[Any, ...], donate_argnums: tuple[int, ...]
) -> Iterator[Finding]:
    """A finding for the first result leaf that differs; where none does, a note that they were compared.

    A plan for compile-only devices runs on this machine's own, where there are enough.  Arguments that are shapes are
    made up: small positive numbers, the same in every run.

    Results agree where they differ by no more than the square root of their type's epsilon, relative to their largest
    element: half of the digits, as sums in another order may cost.

    Raises:
      ArgumentError: there are fewer devices here than the plan's mesh has.
    """
    fn = step.__wrapped__  # type: ignore[attr-defined]  # set by functools.update_wrapper
    mesh = plan.mesh
    plain, (fn, arguments) = fn, of_arrays(fn, arguments)
    if is_compile_only(mesh.devices.flat[0]):
        here = jax.devices()
        if len(here) < mesh.size:
            raise ArgumentError(
                f"numerics=True runs the step, and this machine has {len(here)} devices for a mesh of {mesh.size}: set "
                f'JAX_PLATFORMS=cpu and XLA_FLAGS="--xla_force_host_platform_device_count={mesh.size}"'
            )
        devices = np.array(here[: mesh.size]).reshape(mesh.devices.shape)
        mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    if mesh is not plan.mesh or fn is not plain:
        step = auto_shard(
            fn, mesh, hardware=plan.hardware, donate_argnums=donate_argnums, options=Options(plan=plan)
        )
    made = made_up(arguments)
    whole = jax.tree.leaves(jax.device_get(jax.jit(fn)(*made)))
    # donated buffers are the sharded run's own
    sharded = jax.tree.leaves(jax.device_get(step(*jax.tree.map(jnp.copy, made))))
    worst, at = 0.0, f"`{plan.name}`"
    for tensor, expected, found in zip(plan.outputs, whole, sharded, strict=True):
        error = relative_error(expected, found)
        limit = _limit(tensor.dtype)
        if worst < error <= limit:
            worst, at = error, tensor.path
        if not error <= limit:
            yield Finding(
                what="numerics", where=tensor.path,
                text=f"sharded and unsharded differ by {error:.1e} of the largest element (limit {limit:.1e}); leaves "
                "before it agree",
            )  # fmt: skip
            return
    ran = f"{mesh.size} {mesh.devices.flat[0].device_kind} devices and on one"
    largest = f"; the largest difference is {worst:.1e} of a leaf's largest element" if worst else ""
    yield Finding(
        what="numerics", where=at, text=f"all {len(whole)} results agree, sharded over {ran}{largest}", grave=False
    )


def made_up(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays in the place of ShapeDtypeStructs; arrays as they are."""
    leaves, tree = jax.tree.flatten(arguments)
    rng = np.random.default_rng(0)
    return tuple(jax.tree.unflatten(tree, [_array(leaf, rng) for leaf in leaves]))


def _array(leaf: Any, rng: np.random.Generator) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.asarray(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(0), max(int(np.prod(leaf.shape)), 1))
        return keys.reshape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        # positive: second moments of an optimizer are
        return jnp.asarray(rng.uniform(0.0, 0.1, leaf.shape), leaf.dtype)
    return jnp.asarray(rng.integers(0, 2 if leaf.dtype == bool else _SMALLEST_TABLE, leaf.shape), leaf.dtype)


def relative_error(expected: Any, found: Any) -> float:
    """The largest difference as a share of the largest element; infinite where one side alone has NaNs."""
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        expected, found = jax.random.key_data(expected), jax.random.key_data(found)
    wide = np.complex128 if jnp.iscomplexobj(expected) else np.float64
    first, second = np.asarray(expected, wide), np.asarray(found, wide)
    strange = ~np.isfinite(first)
    if (strange != ~np.isfinite(second)).any():
        return float("inf")
    if strange.all():
        return 0.0
    first, second = first[~strange], second[~strange]
    return float(np.abs(first - second).max() / max(np.abs(first).max(), np.finfo(np.float32).tiny))


def _limit(dtype: str) -> float:
    if not jnp.issubdtype(jnp.dtype(dtype) if not dtype.startswith("key") else np.uint32, jnp.inexact):
        return 0.0
    return float(jnp.finfo(dtype).eps) ** 0.5
