"""The arguments of a call: their shapes, whether they lie where the plan wants them, and what to say if not."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from ..errors import ArgumentError
from ..plans import Plan


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, Python scalar or ShapeDtypeStruct; any sharding is left behind.

    Raises:
      ArgumentError: the leaf is none of these.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise ArgumentError(
            f"an argument of the step is a {type(leaf).__name__}, {leaf!r}: neither an array nor a ShapeDtypeStruct. "
            "Mark it static (static_argnums / static_argnames), or convert it"
        ) from error
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_explicit(aval: Any) -> bool:
    """Whether an array type carries a mesh with Explicit axes, as arrays on a `jax.make_mesh` mesh do."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and AxisType.Explicit in mesh.axis_types


@contextlib.contextmanager
def outside_any_mesh() -> Iterator[None]:
    """Trace as if no `jax.set_mesh` were in force: the plan's mesh has Auto axes, whatever the user's has."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
    else:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            yield


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which a plan has no work for and much to walk through.

    Tracing and planning make objects by the million that live until the plan is there, and next to no cycles; every
    full collection looks at all of them again: a quarter of the time for 60,000 equations.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def describe_misplaced(error: ValueError, plan: Plan, shardings: Any, args: Any, kwargs: Any) -> Exception:
    """An ArgumentError naming the leaves that lie elsewhere than planned; the error itself when that isn't it."""
    if "Sharding passed to jit does not match" not in str(error) and "incompatible devices" not in str(error):
        return error
    leaves = jax.tree.leaves((args, kwargs))
    wanted = jax.tree.leaves(shardings)
    lines = []
    for tensor, leaf, sharding in zip(plan.inputs, leaves, wanted, strict=True):
        committed = getattr(leaf, "committed", getattr(leaf, "_committed", False))
        if (
            isinstance(leaf, jax.Array)
            and committed
            and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        ):
            lines.append(
                f"  {tensor.path}: lies on {leaf.sharding}, planned is {sharding.spec} on mesh {dict(plan.axes)}"
            )
    if not lines:
        return error
    more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
    return ArgumentError(
        f"{len(lines)} arguments of `{plan.name}` already lie on another sharding or other devices than planned:\n"
        + "\n".join(lines[:8])
        + more
        + "\nMove them once, before the loop: jax.device_put(argument, plan.in_shardings[i]); or create the state with "
        "step.init(init_fn, ...)."
    )
