"""One step both ways, sharded as planned and on one device: does the compiled program compute the same?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._jax import as_closed, is_compile_only, subjaxprs
from ..api import Options, ShardedStep, auto_shard, of_arrays
from ..errors import ArgumentError
from ..plans import Plan
from .findings import Finding

_SMALLEST_TABLE = 8
"""Made-up indices stay below it: no table is likely to have fewer rows."""
_NEARBY_RUNS = 2
_OF_A_MOVEMENT = 4.0
"""How far one draw of rounding errors may lie beside the larger of `_NEARBY_RUNS` draws from their distribution."""
_TELLS_NOTHING = 0.1
"""A result that rounding errors move by more of its largest element is not said to agree: they may hide anything."""


def differing_results(
    step: ShardedStep, plan: Plan, arguments: tuple[Any, ...], donate_argnums: tuple[int, ...]
) -> Iterator[Finding]:
    """A finding for the first result leaf that differs; where none does, a note that they were compared.

    A plan for compile-only devices runs on this machine's own, where there are enough.  Arguments that are shapes are
    made up: small positive numbers, the same in every run.

    Results agree where they differ by no more than the square root of their type's epsilon, relative to their largest
    element: half of the digits, as sums in another order may cost.  Where they differ by more, the unsharded step runs
    again from arguments that differ in the last bit of the coarsest type it computes in, and a result may differ as
    far as it moves then: f32 parameters of a step in bf16 do so.  Some results are made of rounding errors alone (an
    attention's key bias, or a bias before a normalisation, has the gradient zero, of which Adam makes steps of full
    length): these tell nothing, and are counted.

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
    nearby, noise = _Nearby(fn, made, whole), list[str]()
    for number, (tensor, expected, found) in enumerate(zip(plan.outputs, whole, sharded, strict=True)):
        error = relative_error(expected, found)
        limit = _limit(tensor.dtype)
        if not error <= limit:
            limit = max(limit, _OF_A_MOVEMENT * nearby.movements[number])
            if _TELLS_NOTHING < error <= limit:
                noise.append(tensor.path)
                continue
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
    agree, rest = f"all {len(whole)} results", ""
    if noise:
        agree = f"{len(whole) - len(noise)} of {len(whole)} results"
        rest = f"; the others, as {noise[0]}, are rounding errors: the last bit of the arguments moves them as far"
    text = f"{agree} agree, sharded over {ran}{largest}{rest}"
    yield Finding(what="numerics", where=at, text=text, grave=False)


class _Nearby:
    """How far results move, unsharded, when every argument changes in the last bit of the step's arithmetic."""

    def __init__(self, fn: Any, made: tuple[Any, ...], whole: list[Any]) -> None:
        self._fn, self._made, self._whole = fn, made, whole

    @cached_property
    def movements(self) -> list[float]:
        """A relative error for each result leaf: the largest of some runs.  They run when first asked for."""
        bits, movements = _epsilon(jax.make_jaxpr(self._fn)(*self._made)), [0.0] * len(self._whole)
        run = jax.jit(self._fn)
        for seed in range(_NEARBY_RUNS):
            rng = np.random.default_rng(seed)
            near = jax.tree.map(lambda leaf, rng=rng: _nudged(leaf, bits, rng), self._made)
            found = jax.tree.leaves(jax.device_get(run(*near)))
            movements = [
                max(so_far, relative_error(expected, moved))
                for so_far, expected, moved in zip(movements, self._whole, found, strict=True)
            ]
        return movements


def _nudged(leaf: Any, epsilon: float, rng: np.random.Generator) -> Any:
    """Each element of a floating-point leaf larger or smaller by its last bit, or by `epsilon` where that is more."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    by = max(epsilon, float(jnp.finfo(leaf.dtype).eps))
    return (leaf * (1.0 + by * rng.choice((-1.0, 1.0), leaf.shape))).astype(leaf.dtype)


def _epsilon(closed: Any) -> float:
    """Of the coarsest type that the step computes in.  Eight bits are for storage: what is summed has sixteen."""
    jaxpr = as_closed(closed)[0]
    types = {v.aval.dtype for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "dtype")}
    known = (jnp.finfo(t) for t in types if jnp.issubdtype(t, jnp.inexact))
    own = [float(info.eps) for info in known if info.bits >= 16]
    return max([0.0, *own, *map(_epsilon, subjaxprs(closed))])


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
