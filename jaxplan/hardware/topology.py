"""Which link a mesh axis runs over, and how fast a collective along it can go.

Devices are taken in the mesh's row-major order, and a link's domain (a node, a chip, a slice) as a run of
`domain_size` consecutive devices.  An axis of stride s (product of the sizes of the more minor axes) and
size n:

* has `inside = domain_size / s` (between 1 and n) of its devices within one domain;
* runs over every link level that adds devices to it.  Level l, joining e_l of the groups joined below it,
  moves a ring's bytes at `rate_l * inside_below`: the devices of the axis inside one domain drive their
  own NICs side by side (NCCL's rings are spread over the rails the same way).  The slowest level decides.

On a torus level every mesh axis gets a dimension of its own, minor axes first, as `jax.make_mesh` assigns
them.

* An axis longer than `ring_max` takes several dimensions, whose rates add.
* With more mesh axes than dimensions, a further axis shares the least loaded dimension with the axes
  already on it; its neighbours are then as far apart as those axes are long, so its flows share links and
  its rate is divided by that distance.
* A dimension closes into a ring by the profile's wrap rule, and then sends both ways round at once: the ring
  rate is 2x one link's, else 1x (the line's end device receives everything through one link).  This is the
  bandwidth model of "How to Scale Your Model" (jax-ml.github.io/scaling-book, chapter "Sharded Matrices").

The physical shape of the slice is not known here: an 8-long axis on a 2x4 slice is priced as an open line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import MeshError
from .profile import Link, Profile


@dataclass(frozen=True, kw_only=True)
class AxisLink:
    """A mesh axis as collectives see it; rates are achieved ones (datasheet times efficiency).

    Attributes:
      link: name of the outermost link that the axis uses; axes of one torus run side by side.
      kind: of that link.
      size: devices along the axis.
      bytes_per_s: at which a ring collective passes bytes through one device, both directions counted.
      direct_bytes_per_s: at which one device sends to one peer (a permute by one step).
      latency_s: one of the `steps` of a ring collective, averaged over the links it crosses.
      steps: serial steps of an all-gather along the axis.
      launch_s: fixed cost of starting a collective on this link.
      wraparound: the axis closes into a torus ring.
    """

    link: str
    kind: Literal["switch", "torus"]
    size: int
    bytes_per_s: float
    direct_bytes_per_s: float
    latency_s: float
    steps: int
    launch_s: float
    wraparound: bool


@dataclass(frozen=True, kw_only=True)
class _Level:
    """One link's part in one axis: `extent` groups of `inside` devices each, joined at the given rates."""

    link: Link
    extent: int
    inside: int
    ring_bytes_per_s: float
    steps: int
    wraparound: bool


class _Torus:
    """The dimensions of one torus, handed out to mesh axes from the most minor one on."""

    def __init__(self, link: Link, slice_devices: int) -> None:
        assert link.axes_count and link.ring_max and link.wrap_multiple and link.wrap_min_devices
        self.link = link
        self.ring_max = link.ring_max
        self.wrap_multiple = link.wrap_multiple
        self.big_enough = slice_devices >= link.wrap_min_devices
        self.used = [1] * link.axes_count

    def place(self, extent: int) -> tuple[float, int, bool]:
        """(ring bytes/s of one device, serial hops, wraparound) of an axis that joins `extent` groups."""
        lengths = []
        while extent > 1:
            length = math.gcd(extent, self.ring_max) if extent > self.ring_max else extent
            if length == 1:
                length = extent  # no whole ring divides it: one open line
            lengths.append(length)
            extent //= length
        rate = self.link.bytes_per_s * self.link.efficiency
        total, hops, closed = 0.0, 0, True
        for length in lengths:
            dimension = min(range(len(self.used)), key=lambda i: (self.used[i], i))
            apart = self.used[dimension]
            wraps = apart == 1 and self.big_enough and length % self.wrap_multiple == 0
            self.used[dimension] *= length
            total += rate * (2 if wraps else 1) / apart
            hops += length // 2 if wraps else length - 1
            closed = closed and wraps
        return total, hops, closed


def axis_links(profile: Profile, axes: tuple[tuple[str, int], ...]) -> dict[str, AxisLink]:
    """The link of every mesh axis; `axes` are (name, size), major to minor, as `mesh.shape.items()` gives
    them.

    Raises:
      MeshError: an axis is named twice or has no devices.
    """
    names = [name for name, _ in axes]
    faults = [f"axis {name!r} is named twice" for name in sorted({n for n in names if names.count(n) > 1})]
    faults += [f"axis {name!r} has size {size}, must be at least 1" for name, size in axes if size < 1]
    if faults:
        raise MeshError(f"mesh {', '.join(f'{name}={size}' for name, size in axes)}: " + "; ".join(faults))
    total = math.prod(size for _, size in axes)
    tori = {
        link.name: _Torus(link, min(total, link.domain_size or total))
        for link in profile.links
        if link.kind == "torus"
    }
    found: dict[str, AxisLink] = {}
    stride = 1
    for name, size in reversed(axes):
        found[name] = _axis_link(profile, stride, size, total, tori)
        stride *= size
    return {name: found[name] for name in names}


def sums_are_whole(profile: Profile, devices: int) -> bool:
    """Whether sums scattered over all `devices` of a TPU slice are compiled as an all_reduce of the whole and a slice.

    XLA for TPU scatters sums round rings: over parts of a slice, and over all of 2x2, 2x4, 4x8 or 8x16 chips.  Over all
    of 4x4, 8x8 or 16x16, and over a slice of three dimensions, its all_reduce uses all dimensions at once, and is all
    that there is (products, and `psum_scatter`, of bf16 compiled for v5e, v6e and v5p, jax 0.10.2, libtpu 0.0.42.1).
    Slices are taken in the shapes in which they are offered: two dimensions are alike or one is twice the other.
    """
    torus = next((link for link in profile.links if link.kind == "torus"), None)
    if profile.kind != "tpu" or torus is None or devices > (torus.domain_size or devices):
        return False
    side = math.isqrt(devices)
    return devices >= 8 if three_dimensional(profile) else devices >= 16 and side * side == devices


def three_dimensional(profile: Profile) -> bool:
    """Whether its slices are tori of three dimensions."""
    return any(link.kind == "torus" and link.axes_count == 3 for link in profile.links)


def _inside(domain: int | None, stride: int, size: int, total: int) -> int:
    """How many devices of an axis lie in one domain."""
    if domain is None or domain >= total:
        return size
    if domain % stride == 0 and (size % (domain // stride) == 0 or (domain // stride) % size == 0):
        return min(size, domain // stride)
    # The axis straddles domains unevenly: some neighbours of each ring are apart, and the slower link
    # decides.
    return 1


def _axis_link(profile: Profile, stride: int, size: int, total: int, tori: dict[str, _Torus]) -> AxisLink:
    levels: list[_Level] = []
    below = 1
    for link in profile.links:
        inside = max(below, _inside(link.domain_size, stride, size, total))
        extent = inside // below
        if extent > 1:
            if link.kind == "torus":
                rate, steps, closed = tori[link.name].place(extent)
            else:
                rate, steps, closed = link.bytes_per_s * link.efficiency, extent - 1, False
            levels.append(
                _Level(
                    link=link,
                    extent=extent,
                    inside=below,
                    ring_bytes_per_s=rate,
                    steps=steps,
                    wraparound=closed,
                )
            )
        below = inside
    if not levels:
        link = profile.links[0]
        levels = [_Level(link=link, extent=1, inside=1, ring_bytes_per_s=link.bytes_per_s * link.efficiency,
                         steps=0, wraparound=False)]  # fmt: skip
    # A flat ring passes each level's gap once per group below it, so inner steps repeat for every outer
    # group.
    steps, latency_s = 0, 0.0
    for level in levels:
        steps = steps * level.extent + level.steps
        latency_s = latency_s * level.extent + level.steps * level.link.latency_s
    outer = levels[-1]
    return AxisLink(
        link=outer.link.name,
        kind=outer.link.kind,
        size=size,
        bytes_per_s=min(level.ring_bytes_per_s * level.inside for level in levels),
        direct_bytes_per_s=outer.link.bytes_per_s * outer.link.efficiency,
        latency_s=latency_s / steps if steps else outer.link.latency_s,
        steps=steps,
        launch_s=outer.link.launch_s,
        wraparound=outer.wraparound,
    )
