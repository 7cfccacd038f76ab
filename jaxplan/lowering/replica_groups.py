"""The device groups of a compiled collective, in all the spellings of HLO text."""

from __future__ import annotations

import math
import re

import numpy as np

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?(?:=(\d+))?")
_IDS = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


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


def pairs_of(text: str) -> np.ndarray:
    """The (source, target) pairs of a collective_permute: `int[n_pairs, 2]`."""
    written = _PAIRS.search(text)
    pairs = [_numbers(p) for p in re.findall(r"\{([\d,]+)\}", written.group(1))] if written else []
    return np.array(pairs, int).reshape(-1, 2)


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
