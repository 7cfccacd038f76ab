"""Seconds and wire bytes of a collective: the alpha-beta model on the links of its mesh axes.

`bytes` of a collective is always the LARGER of its two local buffers on one device: the result of an
all-gather, the operand of everything else.  With n devices, B bytes and a link's ring rate W
(`AxisLink.bytes_per_s`, which counts both directions of a closed torus ring):

  all_gather, reduce_scatter   launch + steps * latency + (n-1)/n * B / W
  all_reduce                   a reduce_scatter, then an all_gather: exactly twice either
  all_to_all, switch           launch + steps * latency + (n-1)/n * B / (rate to one peer)
  all_to_all, torus            launch + steps * latency + floor(n*n/4)/n * B / W: what must cross the middle
                               of the line or ring, over the links there
  collective_permute           launch + latency + B / (rate to one peer), to the next device along the axis
  all_slice                    0: every device keeps a part of what it has

Formulas: Thakur et al., "Optimization of Collective Communication Operations in MPICH" (2005) for rings;
"How to Scale Your Model" (jax-ml.github.io/scaling-book, chapter "Sharded Matrices") for the torus and for
all_to_all.

Over several axes the collective is hierarchical.  Axes of one torus work side by side, each on its own
part of the buffer, so their rates add; axes of one switch are one flat group.  Then links take turns, the
fastest with the whole buffer and each slower one with the share that the faster ones have scattered.  An
all_to_all passes its whole buffer over every link in turn.  All sizes multiplied, a device always sends
(N-1)/N * B for a gather.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..hardware import AxisLink

Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute", "all_slice"]
KINDS: tuple[str, ...] = (
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "all_slice",
)
Array = npt.NDArray[np.float64]

_SYNCHRONOUS = {"tpu": frozenset({"all_reduce", "reduce_scatter", "all_to_all"})}
"""By platform, collectives beside which XLA computes nothing, unless told to (MLP and GPT of experiments/quality, DLRM;
jax 0.10.2, libtpu 0.0.42.1): on TPU it spreads all_gathers over kernels' fusions and starts permutes early."""


def synchronous(kind: str, platform: str) -> bool:
    """Whether compute units stand still while a collective is sent on "tpu", "gpu" or "cpu"."""
    return kind in _SYNCHRONOUS.get(platform, ())


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ArgumentError(f"unknown collective {kind!r}: must be one of {', '.join(KINDS)}")


def collective_wire_bytes(kind: str, bytes: npt.ArrayLike, sizes: Sequence[int]) -> Array:
    """Bytes that one device sends, of the shape of `bytes`; independent of the links.

    Args:
      kind: one of `KINDS`.
      bytes: the larger local buffer (see the module), a number or an array.
      sizes: sizes of the mesh axes.

    Raises:
      ArgumentError: unknown kind.
    """
    _check(kind)
    buffer = np.asarray(bytes, np.float64)
    n = math.prod(sizes)
    if n == 1 or kind == "all_slice":
        return buffer * 0.0
    if kind == "collective_permute":
        return buffer * 1.0
    return buffer * ((2.0 if kind == "all_reduce" else 1.0) * (n - 1) / n)


class _Stage:
    """All axes of a collective that share one link, as one link; see the module for how they combine."""

    def __init__(self, axes: Sequence[AxisLink]) -> None:
        self.size = math.prod(axis.size for axis in axes)
        self.launch_s = axes[0].launch_s
        self.direct_bytes_per_s = min(axis.direct_bytes_per_s for axis in axes)
        self.latency_s = sum(axis.steps * axis.latency_s for axis in axes)
        self.hop_s = max(axis.latency_s for axis in axes)
        if axes[0].kind == "torus":
            self.ring_bytes_per_s = sum(axis.bytes_per_s for axis in axes)
            self.exchange_s_per_byte = sum(axis.size**2 // 4 / axis.size / axis.bytes_per_s for axis in axes)
        else:
            self.ring_bytes_per_s = min(axis.bytes_per_s for axis in axes)
            self.exchange_s_per_byte = (self.size - 1) / self.size / self.direct_bytes_per_s


def _stages(links: tuple[AxisLink, ...]) -> tuple[_Stage, ...]:
    """One stage a link, fastest first; axes of size 1 take no part."""
    groups: dict[str, list[AxisLink]] = {}
    for axis in links:
        if axis.size > 1:
            groups.setdefault(axis.link, []).append(axis)
    return tuple(sorted((_Stage(axes) for axes in groups.values()), key=lambda stage: -stage.ring_bytes_per_s))


_MIB = 2**20
_COMBINED: dict[str, dict[str, int]] = {
    "gpu": dict.fromkeys(("all_gather", "all_reduce", "collective_permute", "reduce_scatter"), 30 * _MIB),
    "tpu": {"all_reduce": 30 * _MIB, "reduce_scatter": 10 * _MIB},
}
"""Platform -> the collectives that its compiler puts into one, of at most about this size (the compiled steps of
experiments/quality).  GPU: xla/debug_options_flags.cc, `xla_gpu_all_reduce_combine_threshold_bytes` and its like.  TPU:
not published, taken for all_reduces; the largest of 200 reduce_scatters of several gradients, of 15 steps on eight v5e,
have 9.96 MB, those of a single one up to 154 (jax 0.10.2, libtpu 0.0.42.1)."""


def combined_share(kind: str, bytes: npt.ArrayLike, platform: str) -> Array:
    """The share of a collective's start that is its own, of those that XLA combines: as much as of the whole's size."""
    buffer, most = np.asarray(bytes, np.float64), most_combined_bytes(kind, platform)
    return np.minimum(buffer / most, 1.0) if most else np.ones_like(buffer)


def most_combined_bytes(kind: str, platform: str) -> int:
    """Up to which size of all results, on TPU of all that is summed, a platform's compiler puts collectives of a kind
    into one; 0: it does not."""
    return _COMBINED.get(platform, {}).get(kind, 0)


def collective_seconds(kind: str, bytes: npt.ArrayLike, links: Sequence[AxisLink]) -> Array:
    """Seconds of one collective over all the axes in `links`, of the shape of `bytes`.

    Args:
      kind: one of `KINDS`.
      bytes: the larger local buffer (see the module), a number or an array.
      links: the mesh axes of the collective, from `jaxplan.hardware.axis_links`.

    Raises:
      ArgumentError: unknown kind.
    """
    start_s, s_per_byte = collective_terms(kind, tuple(links))
    return start_s + np.asarray(bytes, np.float64) * s_per_byte


@functools.lru_cache(maxsize=1024)  # a mesh has few sets of axes, and tens of thousands of collectives are priced
def collective_terms(kind: str, links: tuple[AxisLink, ...]) -> tuple[float, float]:
    """What one collective takes to start, in seconds, and then for each byte; see `collective_seconds`."""
    _check(kind)
    stages = _stages(links)
    if not stages or kind == "all_slice":
        return 0.0, 0.0
    launch_s = sum(stage.launch_s for stage in stages)
    if kind == "collective_permute":
        slowest = min(stage.direct_bytes_per_s for stage in stages)
        return max(stage.launch_s + stage.hop_s for stage in stages), 1 / slowest
    latency_s = sum(stage.latency_s for stage in stages)
    if kind == "all_to_all":
        return launch_s + latency_s, sum(stage.exchange_s_per_byte for stage in stages)
    gather_s_per_byte = 0.0
    scattered = 1
    for stage in stages:
        share = 1.0 / scattered
        gather_s_per_byte += share * (stage.size - 1) / stage.size / stage.ring_bytes_per_s
        scattered *= stage.size
    times = 2.0 if kind == "all_reduce" else 1.0
    return times * (launch_s + latency_s), times * gather_s_per_byte
