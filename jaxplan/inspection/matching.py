"""Which planned collective a compiled one is, and what is left on either side.

A compiler may combine collectives, split them, move them out of loops, put a reduce_scatter and an all_gather in an
all_reduce's place (or the other way round), sum before it reduces, send in another type, or send one piece at a time
around a ring while it multiplies.  So collectives are matched in rounds, each looser than the one before, and always
over the same mesh axes; every run of every tensor is matched once at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..cost import collective_wire_bytes
from ..lowering import CompiledCollective
from ..plans import PlannedCollective
from ..sharding import MeshAxes

_PLACE = re.compile(r"[^\s/]+\.\w+:\d+")
_EQUAL = 0.02
"""Padding changes a buffer's size by less."""
_RING = (0.45, 1.35)
"""Bytes that the permutes of a ring send, as a share of those of the collective that they make up: a ring of n devices
sends n - 1 or n times one part in n; where both directions are used, each direction does half, or one more in all."""
_RINGS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(kw_only=True)
class Part:
    """One tensor of a collective, with how many of its runs are still unmatched.

    Attributes:
      kind, axes, bytes: as of a collective; lines: the places ("model.py:12") that it comes from; where: what to
        call it.
      together_bytes: of all the tensors that the same collective moves: they share its start.
      trips: runs in a step; left: those of them that are not matched yet.
      notes: how it was matched, where not as it is.
      instead: of a compiled one, what stands in its place in the plan where that sends less: kind, share of its bytes,
        runs.
      rounded: of a compiled one, see `CompiledCollective`.
    """

    kind: str
    axes: frozenset[str]
    names: tuple[str, ...]
    bytes: int
    together_bytes: int
    trips: float
    lines: frozenset[str]
    where: str
    left: float
    rounded: bool = False
    notes: list[str] = field(default_factory=list)
    instead: list[tuple[str, float, float]] = field(default_factory=list)

    def stands_for(self, planned: Part, share: float, runs: float) -> None:
        """Note what was planned in the place of so many runs, where they send more."""
        if share < 1 or (planned.kind, self.kind) == ("reduce_scatter", "all_reduce"):
            self.instead.append((planned.kind, share, runs))

    def wire_bytes(self, axes: MeshAxes) -> float:
        """Bytes that one device sends for the unmatched runs."""
        return float(collective_wire_bytes(self.kind, self.bytes, self.sizes(axes))) * self.left

    def sizes(self, axes: MeshAxes) -> list[int]:
        """Devices along each of the axes; of part of an axis its own, of unknown groups the whole mesh."""
        known = dict(axes)
        if self.names == ("?",):
            return list(known.values())
        return [int(n.partition(")")[2]) if ":" in n else known[n] for n in self.names]


def places(sources: Iterable[str]) -> frozenset[str]:
    """`places(["model.py:12 (f) via linear.py:9"])`: file and line alone, `{"model.py:12", "linear.py:9"}`."""
    return frozenset(place for source in sources for place in _PLACE.findall(source))


def planned_parts(collectives: Iterable[PlannedCollective], axes: MeshAxes) -> list[Part]:
    """The plan's collectives; an axis of one device takes no part.

    A sum that is scattered in rounded pieces is as large as these, and a permute of what they are moved on by.
    """
    return [part for c in collectives for part in _planned(c, axes)]


def _planned(one: PlannedCollective, axes: MeshAxes) -> Iterator[Part]:
    sizes = dict(axes)
    part = Part(
        kind=one.kind, axes=frozenset(a for a in one.axes if sizes.get(a) != 1), names=one.axes, bytes=one.bytes,
        together_bytes=one.bytes, trips=one.trips, lines=places((one.where,)),
        where=f"{one.primitive} at {one.where}".removeprefix(" at "), left=one.trips,
    )  # fmt: skip
    devices = math.prod(part.sizes(axes))
    longer = one.wire_bytes - float(collective_wire_bytes(one.kind, one.bytes, part.sizes(axes)))
    if one.kind != "reduce_scatter" or longer < 1:
        yield part
        return
    moved = int(longer / 2)
    whole = one.bytes + moved * devices // (devices - 1)
    yield replace(part, bytes=whole, together_bytes=whole, notes=[], instead=[])
    yield replace(part, kind="collective_permute", bytes=moved, together_bytes=moved, notes=[], instead=[])


def compiled_parts(collectives: Iterable[CompiledCollective]) -> list[Part]:
    """The compiled collectives, each tensor of a combined one by itself."""
    return [
        Part(
            kind=c.kind, axes=frozenset(c.axes), names=c.axes, bytes=size, together_bytes=c.bytes, trips=c.trips,
            lines=places(c.sources),
            where=c.sources[0] if c.sources else c.op_name or "no line of the program", left=c.trips,
            rounded=c.rounded,
        )
        for c in collectives
        for size in c.parts
    ]  # fmt: skip


def match(planned: Sequence[Part], compiled: Sequence[Part], axes: MeshAxes) -> None:
    """Match in place: afterwards `left` of each part is what the other side doesn't have."""
    for near in (True, False):  # first what comes from the same line
        _each(planned, compiled, near, lambda p, c: p.kind == c.kind and _alike(p, c, 1.0), "")
    _halves(planned, compiled)
    for scatter in ("reduce_scatter", "all_reduce"):
        other = "all_reduce" if scatter == "reduce_scatter" else "reduce_scatter"
        _each(
            planned,
            compiled,
            False,
            lambda p, c, s=scatter, o=other: (p.kind, c.kind) == (s, o) and _alike(p, c, 1.0),  # type: ignore[misc]
            f"compiled as {other}",
        )
    # a compiler casts before it sends where that is narrower, whoever reads it; wider, only what it can't send
    for ratio, near, note in ((0.5, True, "half"), (0.5, False, "half"), (2.0, True, "twice")):
        _each(
            planned,
            compiled,
            near,
            lambda p, c, r=ratio: p.kind == c.kind and _alike(p, c, r),  # type: ignore[misc]
            f"sent in a type {note} as wide",
        )
    _rings(planned, compiled, axes)
    _volumes(planned, compiled)


def _alike(planned: Part, compiled: Part, ratio: float) -> bool:
    return abs(compiled.bytes - ratio * planned.bytes) <= _EQUAL * ratio * planned.bytes


def _near(planned: Part, compiled: Part) -> bool:
    return bool(planned.lines & compiled.lines)


def _each(
    planned: Sequence[Part],
    compiled: Sequence[Part],
    near: bool,
    fits: Callable[[Part, Part], bool],
    note: str,
) -> None:
    for c in compiled:
        for p in planned:
            if c.left > 0 and p.left > 0 and c.axes == p.axes and fits(p, c) and (not near or _near(p, c)):
                runs = min(c.left, p.left)
                p.left -= runs
                c.left -= runs
                c.stands_for(p, p.bytes / c.bytes if p.bytes < c.bytes * (1 - _EQUAL) else 1.0, runs)
                if note:
                    c.notes.append(note)


def _halves(planned: Sequence[Part], compiled: Sequence[Part]) -> None:
    """A planned all_reduce that was compiled as a reduce_scatter and an all_gather of the whole."""
    for p in planned:
        if p.kind != "all_reduce" or p.left <= 0:
            continue
        found = {
            kind: next(
                (c for c in compiled if c.kind == kind and c.left > 0 and c.axes == p.axes and _alike(p, c, 1.0)), None
            )
            for kind in ("reduce_scatter", "all_gather")
        }  # fmt: skip
        if found["reduce_scatter"] is None:
            continue
        runs = min([p.left, *(c.left for c in found.values() if c is not None)])
        p.left -= runs
        for c in found.values():
            if c is not None:
                c.left -= runs
                c.notes.append("half of an all_reduce")


def _rings(planned: Sequence[Part], compiled: Sequence[Part], axes: MeshAxes) -> None:
    """Permutes that pass the pieces of an all_gather or a reduce_scatter around a ring, one after another.

    Several on one line are told apart by the size of their pieces, and those of one size count together.
    """
    for of_a_size in (True, False):
        for p in planned:
            if p.left <= 0 or p.kind not in _RINGS:
                continue
            chain = [c for c in compiled if c.kind == "collective_permute" and c.left > 0 and c.axes == p.axes]
            alike = [p]
            if of_a_size:
                piece = p.bytes / math.prod(p.sizes(axes))
                chain = [c for c in chain if any(abs(c.bytes - size) <= _EQUAL * size for size in (piece, piece / 2))]
                others = (o for o in planned if o is not p and o.left > 0 and o.kind in _RINGS and o.axes == p.axes)
                alike += [o for o in others if _alike(p, o, 1.0)]
            for near in (True, False):
                group = [c for c in chain if not near or _near(p, c)]
                if _passed_on([o for o in alike if not near or o.lines & p.lines], group, axes):
                    break


def _passed_on(planned: Sequence[Part], permutes: Sequence[Part], axes: MeshAxes) -> bool:
    """Match the first so many of `planned` that `permutes` send as much as rings of them do, if there are so many."""
    sent, wire = sum(c.wire_bytes(axes) for c in permutes), 0.0
    for count, p in enumerate(planned, 1):
        wire += p.wire_bytes(axes)
        if _RING[0] * wire <= sent <= _RING[1] * wire:
            for done in planned[:count]:
                done.left = 0.0
            for c in permutes:
                c.left = 0.0
                c.notes.append(f"part of a ring that makes up an {p.kind}")
            return True
    return False


def _volumes(planned: Sequence[Part], compiled: Sequence[Part]) -> None:
    """Several tensors summed or gathered as one, or one as several: the bytes that are left, by kind, axes and line.

    Never across lines: what came up elsewhere instead of what was planned is a difference worth telling.  But a
    collective that the compiler made itself, out of several, has no line.
    """
    for c in compiled:
        for p in planned:
            joins = _near(p, c) or not c.lines
            if c.left <= 0 or p.left <= 0 or p.axes != c.axes or not joins or _CLASS[p.kind] != _CLASS[c.kind]:
                continue
            moved = min(c.bytes * c.left, p.bytes * p.left)
            c.stands_for(p, 1.0, moved / c.bytes)
            c.left = _rest(c.left - moved / c.bytes, c.trips)
            p.left = _rest(p.left - moved / p.bytes, p.trips)
            c.notes.append("split or joined")


_CLASS = {"reduce_scatter": "reduction", "all_reduce": "reduction", "all_gather": "gather", "all_to_all": "exchange",
          "collective_permute": "permute", "all_slice": "slice"}  # fmt: skip


def _rest(left: float, trips: float) -> float:
    """What is left, less rounding."""
    return left if left > 1e-9 * trips else 0.0
