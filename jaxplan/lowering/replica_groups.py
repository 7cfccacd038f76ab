"""Which mesh axes a compiled collective runs over: replica groups, in all their spellings, against the mesh.

Devices are numbered along the mesh, row by row, as XLA numbers the partitions of a jax program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import numpy as np

from ..sharding import MeshAxes

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?(?:=(\d+))?")
_IDS = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")

UNKNOWN = "?"
"""Stands for the axes of groups that no set of mesh axes, or of parts of axes, makes."""


def groups_of(text: str, n_devices: int) -> np.ndarray:
    """The replica groups of an HLO instruction: `int[n_groups, group_size]`.

    One group of all devices where none are written; groups of unlike sizes, which no mesh axis makes, give an
    array of no rows.
    """
    listed = _LISTED.search(text)
    if listed and listed.group(1):
        groups = [_numbers(g) for g in re.findall(r"\{([\d,]*)\}", listed.group(1))]
        return np.array(groups) if len({len(g) for g in groups}) == 1 else np.zeros((0, 0), int)
    iota = _IOTA.search(text)
    if iota:
        return _arranged(iota.group(2), iota.group(3)).reshape(_numbers(iota.group(1)))
    mesh = _MESH.search(text)
    if mesh:
        return _mesh_groups(*mesh.groups())
    return np.arange(n_devices).reshape(1, n_devices)


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


def axes_of_pairs(text: str, mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes along which a collective_permute's sources and targets differ, in mesh order."""
    written = _PAIRS.search(text)
    pairs = [_numbers(p) for p in re.findall(r"\{([\d,]+)\}", written.group(1))] if written else []
    if not pairs:
        return (UNKNOWN,)
    coordinates = np.stack(np.unravel_index(np.array(pairs), [size for _, size in mesh_axes]), axis=-1)
    differs = (coordinates[:, 0] != coordinates[:, 1]).any(axis=0)
    return tuple(name for (name, _), d in zip(mesh_axes, differs, strict=True) if d)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _arranged(shape: str, permutation: str | None) -> np.ndarray:
    dims = _numbers(shape)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_numbers(permutation)) if permutation else ids


def _mesh_groups(axes: str, device_ids: str | None, over: str) -> np.ndarray:
    sizes = {name: int(size) for name, _, _, size in _MESH_AXIS.findall(axes)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        match = _IDS.search(device_ids)
        assert match is not None
        written, iota, permutation = match.groups()
        ids = _arranged(iota or written, permutation).reshape(-1)
    parts = {name: (int(pre or 1), int(part or 0)) for name, pre, part, _ in _MESH_AXIS.findall(over)}
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        pre, part = parts.get(name, (1, 0))
        if name in parts:
            inside.append(len(shape) + 1)
        part = part or (size if name in parts else 1)
        shape += [pre, part, size // (pre * part)]
    outside = [d for d in range(len(shape)) if d not in inside]
    group_size = math.prod(shape[d] for d in inside)
    return ids.reshape(shape).transpose(outside + inside).reshape(-1, group_size)


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
