"""Which mesh axes a collective runs over, from the groups of devices that it is written with.

Devices are numbered along the mesh, row by row, as XLA numbers the partitions of a jax program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from .spec import MeshAxes

UNKNOWN = "?"
"""Stands for the axes of groups that no set of mesh axes, or of parts of axes, makes."""


def axes_of_groups(groups: np.ndarray, mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes along which the devices of each group differ, in mesh order; `("?",)` for none that fit.

    Part of an axis is given as `"model:(1)2"`: (pre-size)size.
    """
    names, shape = _prime_axes(mesh_axes)
    if not shape:  # one device: nothing varies
        return ()
    coordinates = np.stack(np.unravel_index(groups, shape), axis=-1)
    varying = (coordinates != coordinates[:, :1]).any(axis=1)
    if not len(groups) or (varying != varying[0]).any():
        return (UNKNOWN,)
    varies = [bool(v) for v in varying[0]]
    if math.prod(size for size, v in zip(shape, varies, strict=True) if v) != groups.shape[1]:
        return (UNKNOWN,)
    return tuple(_merged(names, shape, varies, mesh_axes))


def axes_of_pairs(pairs: np.ndarray, mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes along which sources and targets, `int[n_pairs, 2]`, differ, in mesh order."""
    coordinates = np.stack(np.unravel_index(pairs, [size for _, size in mesh_axes]), axis=-1)
    differs = (coordinates[:, 0] != coordinates[:, 1]).any(axis=0)
    return tuple(name for (name, _), d in zip(mesh_axes, differs, strict=True) if d)


def _prime_axes(mesh_axes: MeshAxes) -> tuple[list[str], list[int]]:
    """The mesh with each axis split into prime ones, major first."""
    names, shape = [], []
    for name, size in mesh_axes:
        for factor in _prime_factors(size):
            names.append(name)
            shape.append(factor)
    return names, shape


def _prime_factors(size: int) -> Iterator[int]:
    factor = 2
    while size > 1:
        if size % factor:
            factor += 1
        else:
            yield factor
            size //= factor


def _merged(names: list[str], shape: list[int], varies: list[bool], mesh_axes: MeshAxes) -> Iterable[str]:
    for name, size in mesh_axes:
        mine = [(s, v) for n, s, v in zip(names, shape, varies, strict=True) if n == name]
        if mine and all(v for _, v in mine):
            yield name
            continue
        pre = 1
        while mine:
            run = 1
            while mine and mine[0][1]:
                run *= mine.pop(0)[0]
            if run > 1:
                yield f"{name}:({pre}){run}"
            pre *= run
            if mine:
                pre *= mine.pop(0)[0]
        assert pre == size
