"""Repeated leaves and collectives folded to one row: a model of 96 layers reads like a model of one."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ..sharding import Layout
from .plan import PlannedCollective, TensorPlan

Alike = TypeVar("Alike", bound=Hashable)

_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"\{[\d,-]+\}")


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Leaves that lie alike.

    Attributes:
      pattern: their paths: `*` where a number varies, `{0-3,7}` where only some numbers lie like this,
        `{mu,nu}` where a name does.
      kind, shape, dtype, layout, host: what all of them share.
      count: how many; companions: how many optimizer leaves of the same suffix, shape, dtype and layout come
        with these parameters.
      bytes, local_bytes: of all of them together, companions included.
    """

    pattern: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    host: bool
    count: int
    companions: int
    bytes: int
    local_bytes: int

    @property
    def leaves(self) -> str:
        """`"12+24"`: 12 parameters and their 24 optimizer leaves."""
        return f"{self.count}+{self.companions}" if self.companions else str(self.count)


@dataclass(frozen=True, kw_only=True)
class Fold(Generic[Alike]):
    """Paths that are alike, and the pattern that stands for them."""

    pattern: str
    alike: Alike
    paths: tuple[str, ...]


def fold_paths(leaves: Iterable[tuple[str, Alike]]) -> list[Fold[Alike]]:
    """Folds of `(path, what must be equal)`, in order of first appearance."""
    groups: dict[tuple[str, Alike], list[str]] = {}
    for path, alike in leaves:
        groups.setdefault((_NUMBER.sub("*", path), alike), []).append(path)
    templates: dict[str, list[str]] = {}
    for (template, _), paths in groups.items():
        templates.setdefault(template, []).extend(paths)
    folds = [
        Fold(pattern=_pattern(template, paths, templates[template]), alike=alike, paths=tuple(paths))
        for (template, alike), paths in groups.items()
    ]
    return _braced(folds)


def fold_tensors(tensors: Iterable[TensorPlan]) -> list[TensorRow]:
    """Rows in order of first appearance; no two leaves of one row differ in kind, shape, dtype, layout or memory."""
    by_path = {tensor.path: tensor for tensor in tensors}
    folds = fold_paths((t.path, (t.kind, t.shape, t.dtype, t.layout, t.host)) for t in by_path.values())
    rows = [
        TensorRow(
            pattern=fold.pattern,
            kind=fold.alike[0],
            shape=fold.alike[1],
            dtype=fold.alike[2],
            layout=fold.alike[3],
            host=fold.alike[4],
            count=len(fold.paths),
            companions=0,
            bytes=sum(by_path[path].bytes for path in fold.paths),
            local_bytes=sum(by_path[path].local_bytes for path in fold.paths),
        )
        for fold in folds
    ]
    return _with_companions(rows)


def _pattern(template: str, paths: Sequence[str], among: Sequence[str]) -> str:
    """The template with each `*` replaced by its number where it is always the same one.

    Where that stands for others of the paths that it is `among` too, and one number alone tells them apart, that
    number's ranges stand.
    """
    columns = [sorted(set(column)) for column in zip(*map(_numbers, paths), strict=True)]
    told = [column if len(column) == 1 else None for column in columns]
    stands_for = sum(
        all(c is None or n in c for n, c in zip(_numbers(path), told, strict=True)) for path in among
    )
    ranges = stands_for > len(paths) and told.count(None) == 1
    shown = iter(
        str(column[0]) if len(column) == 1 else f"{{{_ranges(column)}}}" if ranges else "*" for column in columns
    )
    return re.sub(r"\*", lambda _: next(shown), template)


def _numbers(path: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(path)]


def _ranges(numbers: Sequence[int]) -> str:
    """`_ranges([0, 1, 2, 7]) == "0-2,7"`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _braced(folds: list[Fold[Alike]]) -> list[Fold[Alike]]:
    """Merge folds that are alike and whose patterns differ in one name only: `0/{mu,nu}/kernel`."""
    for position in range(1, max((fold.pattern.count("/") + 1 for fold in folds), default=0)):
        merged: dict[object, Fold[Alike]] = {}
        for fold in folds:
            parts = fold.pattern.split("/")
            fits = position < len(parts) and not _RANGE.search(parts[position])
            rest = (*parts[:position], None, *parts[position + 1 :])
            key = (rest, len(fold.paths), fold.alike) if fits else (fold.pattern, fold.alike)
            first = merged.get(key)
            merged[key] = fold if first is None else _merge(first, fold, position)
        folds = list(merged.values())
    return folds


def _merge(first: Fold[Alike], fold: Fold[Alike], position: int) -> Fold[Alike]:
    parts, other = first.pattern.split("/"), fold.pattern.split("/")[position]
    parts[position] = f"{{{parts[position].strip('{}')},{other.strip('{}')}}}"
    return replace(first, pattern="/".join(parts), paths=first.paths + fold.paths)


def _with_companions(rows: list[TensorRow]) -> list[TensorRow]:
    """Optimizer rows that lie as their parameters do join the parameters' row."""
    parameters: dict[object, int] = {}
    for index, row in enumerate(rows):
        if row.kind == "parameter":
            parts = tuple(row.pattern.split("/"))
            # a parameter is known by its path less the root, however deep the root is
            for start in range(1, len(parts)):
                parameters.setdefault((parts[start:], row.shape, row.dtype, row.layout, row.host), index)
    kept: list[TensorRow | None] = list(rows)
    for index, row in enumerate(rows):
        if row.kind != "optimizer":
            continue
        parts = tuple(row.pattern.split("/"))
        starts = (
            parameters.get((parts[start:], row.shape, row.dtype, row.layout, row.host))
            for start in range(1, len(parts))
        )
        owner = next((start for start in starts if start is not None), None)
        parameter = None if owner is None else kept[owner]
        if owner is not None and parameter is not None and row.count % parameter.count == 0:
            kept[index] = None
            kept[owner] = replace(
                parameter,
                companions=parameter.companions + row.count,
                bytes=parameter.bytes + row.bytes,
                local_bytes=parameter.local_bytes + row.local_bytes,
            )
    return [row for row in kept if row is not None]


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Communication of one kind, axes, size and place; `runs`, `wire_bytes` and `seconds_s` are of the whole
    step."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    where: str
    primitive: str
    runs: float
    wire_bytes: float
    seconds_s: float


def fold_collectives(collectives: Iterable[PlannedCollective]) -> list[CollectiveRow]:
    """Identical collectives as one row, the longest first."""
    groups: dict[object, list[PlannedCollective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axes, one.bytes, one.where, one.primitive), []).append(one)
    rows = [
        CollectiveRow(
            kind=group[0].kind,
            axes=group[0].axes,
            bytes=group[0].bytes,
            where=group[0].where,
            primitive=group[0].primitive,
            runs=sum(one.trips for one in group),
            wire_bytes=sum(one.wire_bytes * one.trips for one in group),
            seconds_s=sum(one.seconds_s for one in group),
        )
        for group in groups.values()
    ]
    return sorted(rows, key=lambda row: (-row.seconds_s, row.kind, row.axes, row.where))
