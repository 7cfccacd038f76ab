"""Merges: what devices tell all others where an operation goes along a dimension that is cut.

A cumulative sum, or the largest elements, of a dimension in pieces: every device works on its own piece, all gather
what it comes to (the last sum, the best candidates), and each finishes its results with that.  XLA's partitioner knows
some of these patterns on some platforms (top_k on TPU; it gathers the whole operand on CPU, jax 0.10.2), so they run
in a `shard_map` of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Merge:
    """What cutting a factor makes every device gather from all along it.

    Attributes:
      factor: of the rule.
      results: (result, share of the whole result's bytes that a device adds) of each all_gather, had no other factor
        been cut.
    """

    factor: int
    results: tuple[tuple[int, float], ...]


def gathered(x: Any, axes: tuple[str, ...], devices: tuple[int, ...]) -> Any:
    """`x` of all devices, [pieces, ...], in the order of the pieces; `devices`: the number of each one's device."""
    every = lax.all_gather(x, axes)
    return every if devices == tuple(range(len(devices))) else every[np.array(devices)]


def piece_number(axes: tuple[str, ...], devices: tuple[int, ...]) -> Any:
    """Which piece this device has."""
    return jnp.asarray(np.argsort(devices))[lax.axis_index(axes)]


def merged_top_k(
    local: Callable[..., Any], k: int, axis: int, axes: tuple[str, ...], devices: tuple[int, ...]
) -> Callable[[Any], list[Any]]:
    """The best of each device's best; of equals the first in the whole dimension, as of one device.

    Args:
      local: `top_k` along `axis` by the keyword `k`.
    """

    def piece(x: Any) -> list[Any]:
        here = x.shape[axis]
        found, places = local(x, k=min(k, here))
        places = places + (piece_number(axes, devices) * here).astype(places.dtype)
        found, places = (_along(gathered(each, axes, devices), axis) for each in (found, places))
        best, which = local(found, k=k)
        return [best, jnp.take_along_axis(places, which, axis)]

    return piece


def merged_arg(
    local: Callable[..., Any], best: Callable[..., Any], axis: int, axes: tuple[str, ...], devices: tuple[int, ...]
) -> Callable[[Any], Any]:
    """The place of the best of each device's best; of equals the first in the whole dimension, as of one device.

    Args:
      local: `argmax` or `argmin` by the keyword `axes`; `best`: the largest or smallest element, by the keyword `axis`.
    """

    def piece(x: Any) -> Any:
        place, value = local(x, axes=(axis,)), best(x, axis=axis)
        place = place + (piece_number(axes, devices) * x.shape[axis]).astype(place.dtype)
        if packs(value.dtype, place.dtype):
            value = value.astype(_IN_A_WORD[value.dtype.kind] if value.dtype.itemsize < 4 else value.dtype)
            words = [lax.bitcast_convert_type(each, jnp.uint32) for each in (value, place.astype(jnp.int32))]
            every = gathered(jnp.stack(words), axes, devices)
            values, places = (lax.bitcast_convert_type(every[:, i], t) for i, t in enumerate((value.dtype, jnp.int32)))
        else:
            values, places = (gathered(each, axes, devices) for each in (value, place))
        which = local(values, axes=(0,))
        return jnp.take_along_axis(places, which[None], 0)[0].astype(place.dtype)

    return piece


_IN_A_WORD = {"f": np.float32, "V": np.float32, "i": np.int32, "u": np.uint32, "b": np.uint32}
"""By kind of a type of fewer than four bytes (bf16 is "V" to NumPy): one of four that holds its numbers."""


def packs(value: Any, place: Any) -> bool:
    """Whether a number and a place of these types go into two words of four bytes, for one all_gather."""
    return np.dtype(value).itemsize <= 4 and np.dtype(place).itemsize <= 4


def _along(pieces: Any, axis: int) -> Any:
    """[pieces, ...] one after the other along `axis`."""
    moved = jnp.moveaxis(pieces, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


_JOINED: dict[str, tuple[Callable[[Any, Any], Any], Callable[..., Any], float]] = {
    "cumsum": (jnp.add, jnp.sum, 0),
    "cumprod": (jnp.multiply, jnp.prod, 1),
    "cummax": (jnp.maximum, jnp.max, -math.inf),
    "cummin": (jnp.minimum, jnp.min, math.inf),
    "cumlogsumexp": (jnp.logaddexp, jax.nn.logsumexp, -math.inf),
}
"""By primitive: what joins a result with what came before it, many of those, and what changes nothing."""


def _number(value: float, dtype: Any) -> Any:
    """`value` in a type, the least or the largest of integers for an infinity."""
    if math.isinf(value) and jnp.issubdtype(dtype, jnp.integer):
        value = jnp.iinfo(dtype).min if value < 0 else jnp.iinfo(dtype).max
    return jnp.asarray(value, dtype)


def merged_cumulative(
    name: str, local: Callable[[Any], Any], axis: int, reverse: bool, axes: tuple[str, ...], devices: tuple[int, ...]
) -> Callable[[Any], Any]:
    """Each device's own, joined with the last results of all pieces before it, or after it in reverse."""
    join, joined, nothing = _JOINED[name]

    def piece(x: Any) -> Any:
        own = local(x)
        end = lax.slice_in_dim(own, 0, 1, axis=axis) if reverse else lax.slice_in_dim(own, -1, None, axis=axis)
        ends, number = gathered(end, axes, devices), piece_number(axes, devices)
        pieces = jnp.arange(len(devices)).reshape(-1, *(1,) * own.ndim)
        before = pieces > number if reverse else pieces < number
        kept = jnp.where(before, ends, _number(nothing, own.dtype))
        return join(own, joined(kept, axis=0)).astype(own.dtype)

    return piece
