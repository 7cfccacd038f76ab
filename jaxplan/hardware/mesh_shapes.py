"""The meshes that a number of devices can be: sizes of their axes, and with them the links that each axis runs over.

Devices stand in row-major order, so that an axis' place decides its links: of sixteen GPUs in two nodes, (2, 8) joins
the nodes by its first axis and each node's GPUs by its second, (8, 2) the nodes' pairs, and (4, 4) has an axis that
runs over both links.  All ordered factorisations are all such assignments.  Of two whose axes have the same sizes and
links (any order on one switch, or on a torus that gives each axis a dimension of its own) one stands for both.
"""

from __future__ import annotations

from .profile import Profile
from .topology import axis_links

NAMES = {1: ("data",), 2: ("data", "model"), 3: ("replica", "data", "model")}
"""Of the axes of a mesh with so many, major to minor."""


def mesh_shapes(profile: Profile, devices: int, most_axes: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """(name, size) of the axes of every mesh of so many devices; of fewest axes first, then by longest first axes.

    Args:
      most_axes: 1 to 3.
    """
    shapes: list[tuple[int, ...]] = [] if devices > 1 else [(1,)]
    for count in range(1, most_axes + 1):
        shapes += sorted(_factorisations(devices, count), reverse=True)
    kept, seen = [], set()
    for sizes in shapes:
        axes = tuple(zip(NAMES[len(sizes)], sizes, strict=True))
        links = axis_links(profile, axes)
        # repr: a link is told apart by all that prices depend on, whichever name its axis has
        key = tuple(sorted(repr(links[name]) for name, _ in axes))
        if key not in seen:
            seen.add(key)
            kept.append(axes)
    return tuple(kept)


def _factorisations(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write a number as an ordered product of `count` factors of 2 or more."""
    if count == 1:
        return [(number,)] if number > 1 else []
    return [
        (first, *rest)
        for first in range(2, number // 2 + 1)
        if number % first == 0
        for rest in _factorisations(number // first, count - 1)
    ]
