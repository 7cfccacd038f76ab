"""Slices along several dimensions, and where they are put back, as one after the other.

A slice of a field that takes one layer of 256, and rows here and there along another dimension, is a hundredth of the
field.  Where the rows' dimension is cut over devices, they are gathered: of the one layer, if that is taken first (the
receivers of a wave in 384 x 384 x 256 points on eight v5e: 151 MB a step, now 135 KB).  So the dimensions of which
little is taken come first, in a slice each, and the padding of the gradient brings them back last.  XLA makes one slice
of what is sliced on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rewriting import like

_LITTLE = 4
"""A dimension is taken on its own where at most one in so many of its elements is."""


def in_turn(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with slices and paddings along several dimensions done in turn."""
    del results
    return [new for eqn in equations for new in _TURNS.get(eqn.primitive.name, _as_it_is)(eqn)]


def _as_it_is(eqn: Any) -> list[Any]:
    return [eqn]


def _sliced(eqn: Any) -> list[Any]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    whole, part = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    strides = eqn.params["strides"]
    turns, made, read = _turns(whole, part), [], eqn.invars[0]
    for k, dims in enumerate(turns):
        shape = tuple(m if d in dims else n for d, (n, m) in enumerate(zip(read.aval.shape, part, strict=True)))
        params = {
            "start_indices": tuple(starts[d] if d in dims else 0 for d in range(len(whole))),
            "limit_indices": tuple(limits[d] if d in dims else n for d, n in enumerate(read.aval.shape)),
            "strides": strides and tuple(strides[d] if d in dims else 1 for d in range(len(whole))),
        }
        out = eqn.outvars[0] if k == len(turns) - 1 else like(eqn.outvars[0], shape)
        made.append(eqn.replace(invars=[read], outvars=[out], params=eqn.params | params))
        read = out
    return made if len(turns) > 1 else [eqn]


def _padded(eqn: Any) -> list[Any]:
    config = eqn.params["padding_config"]
    operand, filler = eqn.invars
    whole, part = eqn.outvars[0].aval.shape, operand.aval.shape
    if any(low < 0 or high < 0 for low, high, _ in config):
        return [eqn]
    turns, made, read = _turns(whole, part)[::-1], [], operand
    for k, dims in enumerate(turns):
        shape = tuple(n if d in dims else m for d, (n, m) in enumerate(zip(whole, read.aval.shape, strict=True)))
        edges = tuple(config[d] if d in dims else (0, 0, 0) for d in range(len(whole)))
        out = eqn.outvars[0] if k == len(turns) - 1 else like(eqn.outvars[0], shape)
        params = eqn.params | {"padding_config": edges}
        made.append(eqn.replace(invars=[read, filler], outvars=[out], params=params))
        read = out
    return made if len(turns) > 1 else [eqn]


_TURNS = {"slice": _sliced, "pad": _padded}


def _turns(whole: Sequence[int], part: Sequence[int]) -> list[tuple[int, ...]]:
    """The dimensions that are taken in part, those of which little is on their own and first; the least one first, and
    of equals the last dimension, for it is the first ones that are cut as a rule."""
    partly = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
    little = [d for d in partly if _LITTLE * part[d] <= whole[d]]
    little.sort(key=lambda d: (part[d] / whole[d], -d))
    rest = tuple(d for d in partly if d not in little)
    return [*((d,) for d in little), *([rest] if rest else [])]
