"""Starts of dynamic slices, brought into range before the slice.

A start out of range is moved until the slice fits.  XLA forgets that where a slice is cut over devices afterwards: it
adds each device's own offset to the start as it was given (openxla/xla#49122, and #49118 for updates; so does merging
two slices into one, jax 0.10 to 0.12), and devices take other elements than one device would.

A scatter of a single update is made an update of a slice, which takes what is there already where the index is another
device's.  Where that slice and one that has just cut the operand become one, the device writes elements from the start
of the whole: column 0 of a cut image into every device's piece (on CPU, in plain jax 0.10.2 too).  A barrier keeps them
apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_MOVED = {"dynamic_slice": 1, "dynamic_update_slice": 2}
"""Primitive -> position of its first start."""

SLICES = frozenset({"slice", "split"})
"""What reads a sum over devices behind a barrier.

XLA for TPU makes one slice of a device's piece of the sum and of what is sliced out of it, and takes that for the
piece: it fails ("The shape doesn't match when replacing ... all-reduce-scatter"; the gradient of [x, t] @ w, f32[512,
2049] scattered by rows and sliced to 2048 columns, in plain jax 0.10.2 too, libtpu 0.0.42.1).
"""


def in_range(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of an equation: of one that takes or replaces a slice with starts at which the slice fits, of one
    that scatters a single update with a barrier behind what it is put into."""
    if eqn.primitive.name.startswith("scatter") and math.prod(eqn.invars[1].aval.shape[:-1]) == 1:
        return [jax.lax.optimization_barrier(operands[0]), *operands[1:]]
    first = _MOVED.get(eqn.primitive.name)
    if first is None:
        return list(operands)
    shapes = [var.aval.shape for var in (*eqn.invars[:first], *eqn.outvars)]
    whole, part = shapes[0], shapes[1]
    starts = zip(operands[first:], whole, part, strict=True)
    return [*operands[:first], *(_fitting(start, extent - size) for start, extent, size in starts)]


def _fitting(start: Any, last: int) -> Any:
    """`start` within 0 to `last`, of four bytes at least; one that is known to be is left alone.

    Where XLA makes one slice of two it brings the start of the first into range again, by a limit of the start's own
    type: 508 to it is -4 of eight bits (jax 0.10.2).
    """
    last = min(last, int(np.iinfo(start.dtype).max))
    fits: Any
    if isinstance(start, jax.core.Tracer):
        fits = jax.lax.clamp(np.zeros((), start.dtype), start, np.asarray(last, start.dtype))
    else:
        fits = start if 0 <= int(start) <= last else np.asarray(min(max(int(start), 0), last), start.dtype)
    return fits.astype(np.int32) if start.dtype.itemsize < 4 else fits
