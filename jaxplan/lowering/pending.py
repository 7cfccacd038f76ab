"""Sums that stay in parts through a loop: which values of a plan are held so, and arrays that are.

XLA's programs know no pending sums: a product whose contraction is cut is reduced where it stands, in every iteration
(XLA for TPU moves that out of the simplest loops, not where the sum is cut or added to another first; jax 0.10.2).
So a sum that stays pending over an axis through a loop's carry is held in an array with one more dimension, a part for
each device of the axis and cut over it; what is done to it is done to the parts; and after the loop they are summed.

So are numbers that are added up, as the norm of all gradients is.  XLA adds two pending sums before it sums them over
devices where both are summed in one order of the devices (`AllReduceReassociate`; for CPU never), and that is the order
in which dimensions are cut: a norm is summed once up to the first weight that is cut in another, and from there on
every weight by itself.  For GPU each is then taken out of the combined all_reduce by a kernel of 3 us: 186 and 14
numbers of a language model of 93 weights, 0.59 of 6.16 ms on eight H100 (jax 0.10.2).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..ir import SUMS, Graph
from ..sharding import UNREDUCED, Layout, local_function, sums_locally
from .kernels import ring_of

_MAKE_NUMBERS = frozenset({"reduce_sum", "dot_general"})

HELD = "held"
"""`Constraint.why` of layouts of sums that stay pending, and of the operands of products that make them."""


def held_values(
    graph: Graph, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray]
) -> frozenset[int]:
    """The carries that are pending through their loop, numbers that are added up, and all pending values on the way."""
    producers = graph.producers()
    held: set[int] = set()
    todo = _added_numbers(graph, values, reads)
    for op in graph.ops:
        if op.primitive == "carry_next":
            after, carry = op.operands
            if carry in values and (values[carry] == UNREDUCED).any():
                held.add(carry)
                todo.append(after)
    while todo:
        value = todo.pop()
        if value in held or value not in values or not (values[value] == UNREDUCED).any():
            continue
        held.add(value)
        op = graph.ops[producers[value]]
        todo += [v for i, v in enumerate(op.operands) if (reads[op.index, i] == UNREDUCED).any()]
    return frozenset(held)


def _added_numbers(
    graph: Graph, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray]
) -> list[int]:
    """Pending numbers that are sums of such, back to reductions and products of what is cut.

    Anything else on the way, and the number is summed where it is made.
    """
    found: set[int] = set()
    sums = []
    for op in graph.ops:
        value = op.results[0] if len(op.results) == 1 else -1
        if value not in values or graph.values[value].shape or not (values[value] == UNREDUCED).any():
            continue
        parts = [v for i, v in enumerate(op.operands) if (reads[op.index, i] == UNREDUCED).any()]
        pending = [v for v in parts if v in values and (values[v] == UNREDUCED).any()]  # the 0 of `sum` is not
        if found.issuperset(pending) if parts else op.primitive in _MAKE_NUMBERS:
            found.add(value)
            sums += [value] if op.primitive in SUMS else []
    return sums


@jax.tree_util.register_pytree_node_class
class Held:
    """A sum in parts: `parts` has a leading dimension for each of `axes`, cut over it, before the sum's own `dims`."""

    def __init__(self, parts: Any, axes: tuple[str, ...], dims: tuple[tuple[str, ...], ...]) -> None:
        self.parts, self.axes, self.dims = parts, axes, dims

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        return (self.parts,), (self.axes, self.dims)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], children: Sequence[Any]) -> Held:
        return cls(children[0], *aux)


def _placed(parts: Any, layout: Layout, mesh: Any) -> Held:
    parts = _laid(parts, mesh, layout.unreduced, layout.dims)
    return Held(parts, layout.unreduced, layout.dims)


def _laid(parts: Any, mesh: Any, leading: Sequence[str], dims: Sequence[tuple[str, ...]]) -> Any:
    """Parts with a dimension for each of the `leading` axes, cut over it, before others that `dims` cut."""
    layout = Layout(dims=(*((axis,) for axis in leading), *dims))
    return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, layout.spec()))


def held_as(value: Any, layout: Layout, mesh: Any) -> Held:
    """`value` in parts over the layout's pending axes; what is not a sum yet is its own first part, others are zero."""
    if isinstance(value, Held):
        gone = tuple(i for i, axis in enumerate(value.axes) if axis not in layout.unreduced)
        parts = _summed(value.parts, gone)
        kept = [axis for axis in value.axes if axis in layout.unreduced]
        order = [kept.index(axis) for axis in layout.unreduced]
        rest = range(len(order), parts.ndim)
        return _placed(jnp.transpose(parts, (*order, *rest)), layout, mesh)
    count = len(layout.unreduced)
    sizes = tuple(mesh.shape[axis] for axis in layout.unreduced)
    first = functools.reduce(
        jnp.logical_and,
        (jax.lax.broadcasted_iota(np.int32, (*sizes, *(1,) * value.ndim), i) == 0 for i in range(count)),
    )
    return _placed(jnp.where(first, value, jnp.zeros((), value.dtype)), layout, mesh)


def finished(value: Any, mesh: Any, scope: str = "", read: Sequence[NamedSharding] = ()) -> Any:
    """The sum of the parts, laid out as they are, made under the name `scope`; what is not held as it is.

    Args:
      read: how it is pinned where it is read.  Where some of its axes cut it further there, it is summed over these
        first and laid out as that: XLA would sum all of it over all axes before it is cut, and scatters over all or
        none (an LSTM's recurrent weights' gradients, 24 MB sent for 14 on eight H100, jax 0.10.2).
    """
    if not isinstance(value, Held):
        return value
    dims, further = value.dims, _cut_further(read[0], value.dims) if read else value.dims
    scattered = tuple(axis for axis in value.axes if any(axis in axes for axes in further))
    rest = tuple(axis for axis in value.axes if axis not in scattered)
    steps = [(scattered, further), (rest, further)] if scattered and rest else [(value.axes, dims)]
    parts, left = value.parts, value.axes
    with jax.named_scope(scope) if scope else contextlib.nullcontext():
        for axes, after in steps:
            # in one dimension: of one for each axis XLA for CPU makes a sum over each axis (jax 0.10.2)
            parts = jnp.moveaxis(parts, [left.index(axis) for axis in axes], range(len(axes)))
            left = tuple(axis for axis in left if axis not in axes)
            count = math.prod(parts.shape[: len(axes)])  # not -1: it may hold nothing
            parts = parts.reshape(count, *parts.shape[len(axes) :])
            parts = _laid(parts, mesh, (), (axes, *((axis,) for axis in left), *dims))
            parts = _laid(_summed(parts, (0,)), mesh, left, after)
            dims = after
    return parts


def _cut_further(sharding: NamedSharding, dims: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """The dimensions' axes in `sharding`, or `dims` where these are not the first of them."""
    found = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in sharding.spec]
    found += [()] * (len(dims) - len(found))
    return tuple(found) if all(cut[: len(axes)] == axes for cut, axes in zip(found, dims, strict=True)) else dims


def _summed(parts: Any, over: tuple[int, ...]) -> Any:
    return jnp.sum(parts, axis=over, dtype=parts.dtype) if over else parts


def on_parts(eqn: Any, operands: Sequence[Any], layouts: Sequence[Layout | None], result: Layout, mesh: Any) -> Held:
    """A linear operation on a sum in parts, or what makes the parts: a product whose contraction is cut, or a slice.

    Args:
      layouts: of the operands that are held pending; or, of a product, of all its operands: an axis of the result's
        pending ones that cuts a dimension of an operand makes the parts of that dimension.
    """
    bind = functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))
    if any(layout is not None and layout.unreduced for layout in layouts):
        parts = [
            held_as(x, layout, mesh).parts if layout is not None and layout.unreduced else finished(x, mesh)
            for x, layout in zip(operands, layouts, strict=True)
        ]
        leading = [layout is not None and bool(layout.unreduced) for layout in layouts]
        mapped = [[0 if is_held else None for is_held in leading]] * len(result.unreduced)
    elif eqn.primitive.name == "conv_general_dilated":
        local = local_function(eqn) if sums_locally("conv_general_dilated", eqn.params) else bind
        return _by_device(local, operands, layouts, result, mesh)
    elif (ring := ring_of(eqn, layouts[0], mesh)) is not None:
        return _by_device(local_function(eqn, ring), operands, layouts, result, mesh)
    else:
        split = [
            _split(finished(x, mesh), layout, result.unreduced, mesh)
            for x, layout in zip(operands, layouts, strict=True)
        ]
        if eqn.primitive.name == "scatter-add":  # what is added to counts once
            start = held_as(split[0][0], result, mesh)
            split[0] = start.parts, frozenset(start.axes)
        parts = [x for x, _ in split]
        mapped = [[0 if axis in axes else None for _, axes in split] for axis in result.unreduced]
    for in_axes in reversed(mapped):
        bind = jax.vmap(bind, in_axes=tuple(in_axes))
    return _placed(bind(*parts), result, mesh)


def _by_device(
    bind: Callable[..., Any], operands: Sequence[Any], layouts: Sequence[Layout | None], result: Layout, mesh: Any
) -> Held:
    """A product that each device makes of its pieces: batched, a convolution would become one with groups."""
    mapped = jax.shard_map(
        lambda *pieces: jnp.expand_dims(bind(*pieces), tuple(range(len(result.unreduced)))),
        mesh=mesh,
        in_specs=tuple(PartitionSpec() if layout is None else layout.spec() for layout in layouts),
        out_specs=PartitionSpec(*result.unreduced, *(axes or None for axes in result.dims)),
        check_vma=False,  # no sum is taken inside: the parts are the result
    )
    return _placed(mapped(*(finished(x, mesh) for x in operands)), result, mesh)


def _split(
    x: Any, layout: Layout | None, pending: tuple[str, ...], mesh: Any
) -> tuple[Any, frozenset[str]]:
    """`x` with the dimensions that `pending` axes cut taken apart, their devices leading in the order of `pending`."""
    if layout is None:
        return x, frozenset()
    shape: list[int] = []
    front: dict[str, int] = {}
    entries: list[Any] = []
    for extent, axes in zip(x.shape, layout.dims, strict=True):
        mine = [axis for axis in axes if axis in pending]
        for axis in mine:
            front[axis] = len(shape)
            shape.append(mesh.shape[axis])
            entries.append(axis)
            extent //= mesh.shape[axis]
        shape.append(extent)
        entries.append(tuple(axis for axis in axes if axis not in pending) or None)
    order = [front[axis] for axis in pending if axis in front]
    order += [d for d in range(len(shape)) if d not in order]
    apart = jnp.transpose(x.reshape(shape), order)
    spec = PartitionSpec(*(entries[d] for d in order))
    return jax.lax.with_sharding_constraint(apart, NamedSharding(mesh, spec)), frozenset(front)
