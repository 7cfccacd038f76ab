"""What XLA for GPU takes products and collectives to last: the figures that its latency-hiding scheduler goes by.

They are no prediction of ours: a step is scheduled by them, and what it has in memory follows (`cost.latency_hiding`).
The tables are those that XLA has for Hopper and Blackwell, its estimates of what they say are written down in
xla/service/gpu/model/sol_latency_estimator.cc, matmul_interpolator.cc and collective_interpolator.cc beside them.
"""

from __future__ import annotations

import functools
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from .profile import Profile

_FILES = {9: "hopper", 10: "blackwell"}
"""By the generation of the GPU, see `Profile.compute_capability`."""

_BATCHES, _SIZES = (1, 2, 4), (256, 512, 1024, 2048, 4096)
_LEAST_BYTES = 1024

CONVOLUTION_S = 1e-5
"""Of a convolution or another product that no table has, whatever its size."""

VIEW_S = 1e-6
"""Between an operation and one that reads it: what a reshape in between takes."""


@dataclass(frozen=True)
class XlaTimes:
    """See the module.

    Attributes:
      products: flop/s by type ("bf16", "f32"), for the batches and sizes of m, n and k above, the last one fastest.
      collectives: bytes/s by kind and devices, for powers of two of bytes from 1 KiB on.
    """

    products: Mapping[str, Sequence[float]]
    collectives: Mapping[str, Mapping[int, Sequence[float]]]

    def product_s(self, batch: float, m: float, n: float, k: float, operands: str, result_bytes: float) -> float:
        """Seconds of a product.

        Args:
          operands: their type.
          result_bytes: of an element of the result.  Where it is of another type than the operands XLA looks for the
            product of its bytes, in all three dimensions.
        """
        exact = {"bfloat16": ("bf16", 2.0), "float32": ("f32", 4.0)}.get(operands)
        if exact is not None and exact[1] == result_bytes:
            return 2 * batch * m * n * k / self._flops(exact[0], (batch, m, n, k))
        m, n, k = m * result_bytes, n * result_bytes, k * result_bytes
        return 2 * batch * m * n * k / self._flops("bf16", (batch, m / 2, n / 2, k / 2))

    def _flops(self, dtype: str, point: tuple[float, float, float, float]) -> float:
        """The mean of the neighbours in the table, each as its squared distance weighs it."""
        grids = (_BATCHES, _SIZES, _SIZES, _SIZES)
        total = weights = 0.0
        for places in itertools.product(*(_around(size, grid) for size, grid in zip(point, grids, strict=True))):
            apart = sum((grid[at] - size) ** 2 for at, size, grid in zip(places, point, grids, strict=True))
            place = 0
            for at, grid in zip(places, grids, strict=True):
                place = place * len(grid) + at
            weight = 1 / (apart + 1)
            total += weight * self.products[dtype][place]
            weights += weight
        return total / weights

    def collective_s(self, kind: str, devices: int, size: float) -> float:
        """Seconds of a collective of `size` bytes in its larger buffer, at the nearest rate that the table has."""
        rows = self.collectives.get(kind, self.collectives["all_to_all"])
        rates = rows[min(rows, key=lambda count: abs(count - devices))]
        below = min(max(int(math.log2(max(size, 1) / _LEAST_BYTES)), 0), len(rates) - 1)
        above = min(below + 1, len(rates) - 1)
        nearer = below if size - _LEAST_BYTES * 2**below < _LEAST_BYTES * 2**above - size else above
        return size / rates[nearer]


def _around(size: float, grid: Sequence[int]) -> tuple[int, int]:
    """The places in `grid` next to `size`, twice the same one where it has that or ends."""
    above = next((place for place, there in enumerate(grid) if there >= size), len(grid) - 1)
    below = next((place for place in reversed(range(len(grid))) if grid[place] <= size), 0)
    return below, above


def xla_times(profile: Profile) -> XlaTimes | None:
    """Those of a machine, None where XLA has none and schedules for memory alone."""
    name = _FILES.get(int(profile.compute_capability or 0))
    return None if name is None or profile.kind != "gpu" else _read(name)


@functools.cache
def _read(name: str) -> XlaTimes:
    table = tomllib.loads((resources.files(__package__) / "xla_tables" / f"{name}.toml").read_text())
    return XlaTimes(
        {dtype: [rate * 1e12 for rate in rates] for dtype, rates in table["products"].items()},
        {
            kind: {int(devices): [rate * 1e9 for rate in rates] for devices, rates in rows.items()}
            for kind, rows in table["collectives"].items()
        },
    )
