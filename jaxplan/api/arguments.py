"""The arguments of a call: their shapes, whether they lie where the plan wants them, and what to say if not."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from ..errors import ArgumentError
from ..ir import auto_mesh_of, shape_as
from ..plans import Plan


def shape_of(leaf: Any, where: str = "an argument of the step") -> jax.ShapeDtypeStruct:
    """Shape, dtype and memory of an array, Python scalar or ShapeDtypeStruct; any layout is left behind.

    Raises:
      ArgumentError: the leaf is none of these, or a mutable array; `where` it stands is said.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return shape_as(leaf)
    if isinstance(leaf, jax.Ref):
        raise ArgumentError(
            f"{where} is a mutable array (jax.Ref), which no plan can lay out: pass what it holds, ref[...], and "
            "return its next value"
        )
    try:
        aval = jax.typeof(leaf)
    except TypeError as error:
        raise ArgumentError(
            f"{where} is a {type(leaf).__name__}, {leaf!r}: neither an array nor a ShapeDtypeStruct. "
            "Mark it static (static_argnums / static_argnames), or convert it"
        ) from error
    return shape_as(aval)


def check_arguments(named: Iterable[tuple[str, Any]]) -> None:
    """Of (name, argument) pairs: raises ArgumentError, naming it, for the first leaf that `shape_of` doesn't know."""
    for name, argument in named:
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            inner = jax.tree_util.keystr(path, simple=True, separator="/")
            shape_of(leaf, f"`{name}/{inner}`" if inner else f"`{name}`")


def holds(arguments: Any, kind: type) -> bool:
    """Whether an instance of `kind` is among the arguments, or in a list, tuple or dict among them."""
    if isinstance(arguments, (list, tuple)):
        return any(holds(argument, kind) for argument in arguments)
    if isinstance(arguments, dict):
        return any(holds(argument, kind) for argument in arguments.values())
    return isinstance(arguments, kind)


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
    full collection looks at all of them again: a quarter of the time for 60,000 equations.  Those that are left count
    as old afterwards, as if the collector had seen them: it would look at all of them at once when it is back.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what somebody else has frozen stays so
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def as_auto_mesh_in_force() -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh of `jax.set_mesh`, of Auto axes; nothing where none is in force.

    A step that names its axes is traced there: Flax's logical constraints, for one, are nothing without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(auto_mesh_of(tuple(mesh.shape.items())))


def _misplaced(leaf: Any, sharding: NamedSharding) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.committed
        and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    )


def cut_copies(
    error: ValueError, shardings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with whole copies on all the plan's devices cut as planned; None where that can't be the error.

    Under `jax.set_mesh` every new array is such a copy.  Each device keeps a part of what it has: nothing is sent.
    """
    if not _about_placement(error):
        return None
    leaves, tree = jax.tree.flatten((args, kwargs))
    wanted = jax.tree.leaves(shardings)
    whole = [
        i
        for i, (leaf, sharding) in enumerate(zip(leaves, wanted, strict=True))
        if _misplaced(leaf, sharding)
        and leaf.sharding.is_fully_replicated
        and leaf.sharding.device_set == sharding.device_set
    ]
    if not whole:
        return None
    for i, leaf in zip(
        whole, jax.device_put([leaves[i] for i in whole], [wanted[i] for i in whole]), strict=True
    ):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


def argument_numbers(name: str, fn: Callable[..., Any], numbers: int | Sequence[int]) -> tuple[int, ...]:
    """Numbers of arguments of `fn`; refused where it has no such arguments."""
    found = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if not all(isinstance(number, int) for number in found):
        raise ArgumentError(f"{name}={numbers!r} must be numbers of arguments: 0 is the first")
    try:
        kinds = [parameter.kind for parameter in inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):  # a builtin or C callable has no signature
        return found
    count = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    if inspect.Parameter.VAR_POSITIONAL not in kinds and any(not -count <= number < count for number in found):
        step = getattr(fn, "__name__", type(fn).__name__)
        raise ArgumentError(f"{name}={numbers!r}: `{step}` has {count} positional arguments, 0 is the first")
    return found


def brought_over(
    error: ValueError, shardings: Any, former: Sequence[Any], donated: Sequence[int], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:  # fmt: skip
    """The arguments with those brought over that lie as one of `former` shardings has them; None where none does.

    Those that are donated give up their place at once: there may be none for both.
    """
    if not _about_placement(error):
        return None
    leaves, tree = jax.tree.flatten((args, kwargs))
    wanted = jax.tree.leaves(shardings)
    before = [jax.tree.leaves(one) for one in former]
    flags = [n in donated for n, argument in enumerate(args) for _ in jax.tree.leaves(argument)]
    flags += [False] * (len(leaves) - len(flags))
    found = False
    for i, (leaf, sharding) in enumerate(zip(leaves, wanted, strict=True)):
        if _misplaced(leaf, sharding) and any(not _misplaced(leaf, one[i]) for one in before):
            leaves[i] = jax.device_put(leaf, sharding, donate=flags[i])
            found = True
    return jax.tree.unflatten(tree, leaves) if found else None


def without_repeats(
    args: tuple[Any, ...], kwargs: dict[str, Any], donated: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with an array that is donated and passed in several places copied in all of these but the first.

    A state whose moving averages begin as its parameters holds each array twice; jax gives one buffer away twice then,
    which XLA refuses on one device and crashes on over several (CPU, jax 0.10.2).
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    if len(set(map(id, leaves))) == len(leaves):
        return args, kwargs
    given = {id(leaf) for position in donated for leaf in jax.tree.leaves(args[position])}
    seen: set[int] = set()
    for i, leaf in enumerate(leaves):
        if id(leaf) in given and id(leaf) in seen and isinstance(leaf, jax.Array):
            leaves[i] = leaf.copy()
        seen.add(id(leaf))
    return jax.tree.unflatten(tree, leaves)


def _about_placement(error: ValueError) -> bool:
    return "Sharding passed to jit does not match" in str(error) or "incompatible devices" in str(error)


def describe_misplaced(error: ValueError, plan: Plan, shardings: Any, args: Any, kwargs: Any) -> Exception:
    """An ArgumentError naming the leaves that lie elsewhere than planned; the error itself when that isn't it."""
    if not _about_placement(error):
        return error
    leaves = jax.tree.leaves((args, kwargs))
    wanted = jax.tree.leaves(shardings)
    lines = [
        f"  {tensor.path}: lies on {leaf.sharding}, planned is {sharding.spec} on mesh {dict(plan.axes)}"
        for tensor, leaf, sharding in zip(plan.inputs, leaves, wanted, strict=True)
        if _misplaced(leaf, sharding)
    ]
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


def describe_deleted(plan: Plan, args: Any, kwargs: Any) -> str:
    """Which leaves are deleted, and what to do; "" where none is."""
    gone = [
        tensor.path
        for tensor, leaf in zip(plan.inputs, jax.tree.leaves((args, kwargs)), strict=False)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
    ]
    more = f" and {len(gone) - 8} more" if len(gone) > 8 else ""
    if not gone:
        return ""
    return (
        f"arguments of `{plan.name}` are deleted: {', '.join(gone[:8])}{more}. What is donated (donate_argnums) is "
        "gone after its call: go on with what the step returned"
    )
