"""Gather and scatter: embedding lookups, take_along_axis, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import LocalFunction, Ring, register, register_cut, register_sends
from .slices import NUMBERS


@register("gather")
def gather(op: OpShapes) -> Rule:
    """`([v,d],[b,1])->([b,d]) reduction={v}`: an embedding lookup, and everything like it.

    - Dimensions of the indices, and batching dimensions, pass through.
    - Dimensions of the operand that are taken in full pass through; those taken in part stay whole.
    - A collapsed dimension that the indices choose from is a sum: each device looks up what it holds, masks
      the rest, and the results are added.  Of several that one index chooses a single row from, the longest.
    """
    numbers = op.params["dimension_numbers"]
    sizes = op.params["slice_sizes"]
    operand_shape, indices_shape = op.operands
    (result_shape,) = op.results
    b = RuleBuilder()
    operand: list[Any] = [None] * len(operand_shape)
    indices: list[Any] = [None] * len(indices_shape)
    result: list[Any] = [None] * len(result_shape)
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d_operand, d_indices in batching:
        operand[d_operand] = indices[d_indices] = b.factor(operand_shape[d_operand])
    for d in range(len(indices_shape) - 1):  # the last holds the components of one index
        if indices[d] is None:
            indices[d] = b.factor(indices_shape[d])
    looked_up = [d for d in range(len(result_shape)) if d not in numbers.offset_dims]
    for d, factor in zip(looked_up, indices, strict=False):
        result[d] = factor
    outside = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
    window = [d for d in range(len(operand_shape)) if d not in outside]
    for d_operand, d_result in zip(window, sorted(numbers.offset_dims), strict=True):
        if sizes[d_operand] == operand_shape[d_operand]:
            operand[d_operand] = result[d_result] = b.factor(operand_shape[d_operand])
    reduction = []
    cut = _looked_up_once(numbers, operand_shape, indices_shape, op.operand_dtypes[0])
    for d in numbers.collapsed_slice_dims:
        if d in numbers.start_index_map and cut in (None, d):
            operand[d] = b.factor(operand_shape[d])
            reduction.append(operand[d])
    return b.rule(operands=[operand, indices], results=[result], reduction=reduction)


@register_cut("gather")
def single_row(eqn: Any) -> int | None:
    """The dimension that a gather takes a single row out of, by one index: of several the longest.

    XLA makes it a slice, and its partitioner for GPU gathers all of a dimension that is cut for that (the gradient of
    `field.at[x, y, z].add(u)`, 8 H100, jax 0.10.2).
    """
    operand, indices = (var.aval for var in eqn.invars[:2])
    return _looked_up_once(eqn.params["dimension_numbers"], operand.shape, indices.shape, str(operand.dtype))


def _looked_up_once(
    numbers: Any, operand_shape: Sequence[int], indices_shape: Sequence[int], dtype: str
) -> int | None:
    """See `single_row`."""
    if not dtype.startswith(NUMBERS) or numbers.operand_batching_dims:
        return None
    return _longest_of_one_index(numbers.start_index_map, numbers.collapsed_slice_dims, operand_shape, indices_shape)


@register_sends("gather")
def row_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """The row on the device that has it, zeros on the others; what is out of range of the whole is filled on one."""
    dim = single_row(eqn)
    assert dim is not None
    into = eqn.params["dimension_numbers"].start_index_map
    at, modes = into.index(dim), jax.lax.GatherScatterMode
    pieces = np.argsort(ring.devices)  # which piece each device has

    def piece(operand: Any, index: Any) -> Any:
        params = dict(eqn.primitive.get_bind_params(eqn.params))  # it may be the equation's own
        shape, here_size = eqn.invars[0].aval.shape, operand.shape[dim]
        number = jax.numpy.asarray(pieces)[jax.lax.axis_index(ring.axes)]
        known = index.astype(number.dtype).reshape(-1)
        last = np.asarray([shape[d] - 1 for d in into], known.dtype)
        inside = ((known >= 0) & (known <= last)).all()
        known = jax.numpy.clip(known, 0, last)
        along = known[at] - number * here_size
        mine = (along >= 0) & (along < here_size)
        here = known.at[at].set(jax.numpy.clip(along, 0, here_size - 1)).reshape(index.shape)
        taken = zip(operand.shape, shape, params["slice_sizes"], strict=True)
        sizes = tuple(local if n == m else m for local, n, m in taken)
        params |= {"mode": modes.CLIP, "slice_sizes": sizes}
        row = eqn.primitive.bind(operand, here, **params)
        found = jax.numpy.where(mine, row, np.zeros((), row.dtype))
        if eqn.params["mode"] == modes.FILL_OR_DROP:
            filled = jax.numpy.where(number == 0, np.asarray(params["fill_value"], row.dtype), np.zeros((), row.dtype))
            found = jax.numpy.where(inside, found, filled)
        return found

    return piece


_COMBINERS = {
    "scatter": "",
    "scatter-add": "sum",
    "scatter-sub": "",  # the partitioner gathers the updates: it knows no pending difference
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}


@register(*_COMBINERS)
def scatter(op: OpShapes) -> Rule:
    """`([v,d],[b,1],[b,d])->([v,d]) reduction={b}`: an embedding's gradient, and everything like it.

    - Batching dimensions pass through, as do dimensions that an update replaces in full; those replaced in
      part stay whole.
    - A dimension that is scattered into passes through operand and result: each device keeps the updates that
      fall on its part.  Of several that a single update is put into by one index, the longest.
    - The indices' dimensions are summed (or multiplied, ...): each device scatters its updates.  In a plain
      `scatter` the last update wins, so there they stay whole.
    - A pending result starts from the operand on one device and from the combiner's identity on the others.
    """
    numbers = op.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = op.operands
    b = RuleBuilder()
    operand: list[Any] = [None] * len(operand_shape)
    indices: list[Any] = [None] * len(indices_shape)
    updates: list[Any] = [None] * len(updates_shape)
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for d_operand, d_indices in batching:
        operand[d_operand] = indices[d_indices] = b.factor(operand_shape[d_operand])
    combined = []
    for d in range(len(indices_shape) - 1):  # the last holds the components of one index
        if indices[d] is None:
            indices[d] = b.factor(indices_shape[d])
            combined.append(indices[d])
    scattered = [d for d in range(len(updates_shape)) if d not in numbers.update_window_dims]
    for d, factor in zip(scattered, indices, strict=False):
        updates[d] = factor
    outside = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window = [d for d in range(len(operand_shape)) if d not in outside]
    for d_operand, d_updates in zip(window, sorted(numbers.update_window_dims), strict=True):
        if updates_shape[d_updates] == operand_shape[d_operand]:
            operand[d_operand] = updates[d_updates] = b.factor(operand_shape[d_operand])
    cut = _put_in_once(numbers, operand_shape, indices_shape)
    for d in numbers.inserted_window_dims:
        if d in numbers.scatter_dims_to_operand_dims and cut in (None, d):
            operand[d] = b.factor(operand_shape[d])
    reducer = _COMBINERS[op.primitive]
    return b.rule(
        operands=[operand, indices, updates],
        results=[operand],
        flops=float(math.prod(updates_shape)) if reducer else 0.0,
        **({"reduction": combined, "reducer": reducer} if reducer else {"need_replication": combined}),
    )


def single_update(eqn: Any) -> int | None:
    """The dimension that a scatter puts a single row into, by one index: of several the longest.

    XLA makes it an update of a slice, which takes what is there already: where that dimension is cut its partitioner
    gathers all of it for that (a cache's row by `cache.at[:, position].set`, a field's element by `field.at[x, y,
    z].add`, 8 v5e and 8 H100, jax 0.10.2).
    """
    return _put_in_once(eqn.params["dimension_numbers"], *(var.aval.shape for var in eqn.invars[:2]))


def _put_in_once(numbers: Any, operand_shape: Sequence[int], indices_shape: Sequence[int]) -> int | None:
    """See `single_update`."""
    into, outside = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
    return _longest_of_one_index(into, outside, operand_shape, indices_shape)


def _longest_of_one_index(
    into: Sequence[int], outside: Sequence[int], operand_shape: Sequence[int], indices_shape: Sequence[int]
) -> int | None:
    """The longest dimension that a single index goes `into`, if these are all that lie `outside` of the window."""
    if math.prod(indices_shape[:-1]) != 1 or set(into) != set(outside):
        return None
    return max(into, key=lambda d: operand_shape[d], default=None)


def update_piece(eqn: Any, ring: Ring) -> LocalFunction:
    """The device that has the row puts it in; for the others the index is out of range."""
    dim = single_update(eqn)
    assert dim is not None
    into = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    shape, at = eqn.invars[0].aval.shape, into.index(dim)
    pieces = np.argsort(ring.devices)  # which piece each device has

    def piece(operand: Any, index: Any, updates: Any) -> Any:
        params = dict(eqn.primitive.get_bind_params(eqn.params))  # it may be the equation's own
        if params["mode"] == jax.lax.GatherScatterMode.CLIP:
            last = np.asarray([shape[d] - 1 for d in into], index.dtype)
            index = jax.lax.clamp(np.zeros((), index.dtype), index, jax.numpy.broadcast_to(last, index.shape))
        first = jax.numpy.asarray(pieces)[jax.lax.axis_index(ring.axes)] * operand.shape[dim]
        here = index.astype(first.dtype)
        along = here[..., at] - first
        here = here.at[..., at].set(jax.numpy.where(along < 0, operand.shape[dim], along))
        # else XLA takes the slice of what is there from before the cut, see `lowering.starts`
        operand = jax.lax.optimization_barrier(operand)
        params["mode"] = jax.lax.GatherScatterMode.FILL_OR_DROP
        return eqn.primitive.bind(operand, here, updates, **params)

    return piece


for _primitive in _COMBINERS:
    register_cut(_primitive)(single_update)
    register_sends(_primitive)(update_piece)
