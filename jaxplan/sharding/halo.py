"""Halos: the edges that devices exchange where a window moves along a dimension that is cut.

A convolution or a pool whose window reaches over the end of a device's piece reads elements of the devices beside it.
XLA's partitioner sends them by one collective_permute a side.  A dimension is cut so only where its pieces line up:
every device's windows begin as far before its own piece, so that all halos are equally wide, and none is wider than a
piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Halo:
    """What cutting a factor makes a device read of its neighbours.

    Attributes:
      factor: of the rule.
      operand, dim: the tensor that is read, and the dimension that a window moves along; `extent`: how long that is.
      before, after: how many elements of that dimension a device reads of the devices before and after it.
      rather: a factor that stands in the same tensors and needs no halo (a batch): an axis that can cut it doesn't cut
        this one.
      alone: it is cut only where no axis cuts any factor but this one and `rather`.
      fills: ... nor is left idle.
    """

    factor: int
    operand: int
    dim: int
    extent: int
    before: int
    after: int
    rather: int | None = None
    alone: bool = False
    fills: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of the dimension that each collective_permute sends."""
        return tuple(width for width in (self.before, self.after) if width)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window along one dimension, in XLA's terms.

    Attributes:
      size: elements of the window; stride: from one result to the next.
      low, high: padding before and after, of the operand as dilated; negative where it is cut off.
      base, dilation: distance of the operand's elements, and of the window's.
    """

    size: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1
    dilation: int = 1

    @property
    def is_point(self) -> bool:
        """Whether every result is read from the element at its own place."""
        return self.size == self.stride == self.base == 1 and not self.low and not self.high

    def moved_along(self, extent: int, results: int) -> tuple[int, int] | None:
        """(before, after) where operand and result are cut together; None where their pieces don't line up.

        The device with results [a, b) reads positions [a * stride - low, (b - 1) * stride - low + reach] of the dilated
        operand, of which its own piece is [a * stride, b * stride) if both are equally long.
        """
        if extent * self.base != results * self.stride:
            return None
        reach = (self.size - 1) * self.dilation
        return self._read(self.low, reach - self.low - self.stride + 1)

    def summed_over(self, extent: int, results: int) -> tuple[int, int] | None:
        """(before, after) where operand and window are cut together and the results summed: a kernel's gradient.

        The device with the window's elements [a, b) reads positions [a * dilation - low, (b - 1) * dilation - low +
        (results - 1) * stride].
        """
        if extent * self.base != self.size * self.dilation:
            return None
        reach = (results - 1) * self.stride
        return self._read(self.low, reach - self.low - self.dilation + 1)

    def pairs(self, extent: int, results: int) -> int:
        """Pairs of a result and an element of the window that meet an element of an operand `extent` long, not its
        padding and not a gap between its elements."""
        starts, reads = np.arange(results) * self.stride - self.low, np.arange(self.size) * self.dilation
        places = starts[:, None] + reads[None, :]
        return int(((places >= 0) & (places <= (extent - 1) * self.base) & (places % self.base == 0)).sum())

    def _read(self, before: int, after: int) -> tuple[int, int]:
        """Elements among so many positions of the dilated operand before a piece, and after it."""
        return max(before, 0) // self.base, -(-max(after, 0) // self.base)

