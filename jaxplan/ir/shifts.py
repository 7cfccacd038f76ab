"""Elements that are moved along a dimension, others coming in at its end, as one operation.

A token's left neighbour, `jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]`, the block before this one, `concatenate` of a
block of zeros and all blocks but the last, and their gradients: slices and pads whose parts no device count divides,
though devices need no more than their neighbours' edges.  So they are one primitive here, `shift`, that is lowered to a
slice and a pad where its dimension is whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._jax import Literal
from .rewriting import Makers, put_together, without_calls
from .rolls import roll_p

shift_p = Primitive("shift")
"""`shift_p.bind(x, by=, axis=, fill=)`: element `i` along `axis` goes to `i + by`, those that leave are lost, and
`fill` comes in; 0 < |by| < extent."""


def _shift(x: Any, *, by: int, axis: int, fill: float) -> Any:
    config = [(by, -by, 0) if d == axis else (0, 0, 0) for d in range(x.ndim)]
    return jax.lax.pad(x, np.asarray(fill, x.dtype), config)


shift_p.def_impl(_shift)
shift_p.def_abstract_eval(lambda x, *, by, axis, fill: x)
mlir.register_lowering(shift_p, mlir.lower_fun(_shift, multiple_results=False))

_PARTS = frozenset({"slice", "split", "pad", "broadcast_in_dim", "convert_element_type"})
"""What shifts are made of, with the numbers that they put in; `jnp.pad` is a call of such."""


class _Ends(NamedTuple):
    """A value with so many elements put before and after it along each dimension, or cut off where fewer than none.

    `fill` is what is put; None where nothing is.
    """

    value: Any
    sides: tuple[tuple[int, int], ...]
    fill: Any

    def after(self, first: _Ends) -> _Ends | None:
        """Both as one, `first` done before; None where one can't do it: what was cut off doesn't come back."""
        pairs = [*zip(first.sides, self.sides, strict=True)]
        back = any(cut < 0 < put for one, two in pairs for cut, put in zip(one, two, strict=True))
        if back or (None not in (self.fill, first.fill) and self.fill != first.fill):
            return None
        sides = tuple((one[0] + two[0], one[1] + two[1]) for one, two in pairs)
        return _Ends(first.value, sides, first.fill if self.fill is None else self.fill)


def shifted(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with `shift_p` in the place of slices and pads, or slices and constants in a row, that shift."""
    opened = _cut_first(without_calls(equations, results, _PARTS), results)
    found = put_together(opened, results, _PARTS, _shifting)
    return equations if found is None else found


def _cut_first(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations in which what is cut out of a sum of padded values is the sum of what is cut out of each.

    So jax writes the gradient of what is padded once for several neighbours.
    """
    reads = Counter(v for eqn in equations for v in eqn.invars if not isinstance(v, Literal))
    reads.update(v for v in results if not isinstance(v, Literal))
    makers = {v: eqn for eqn in equations for v in eqn.outvars}
    gone, instead = set[int](), dict[int, list[Any]]()
    for eqn in equations:
        value = eqn.invars[0] if eqn.primitive.name in ("slice", "pad") else None
        if value is None or isinstance(value, Literal) or not _is_sum(makers.get(value)) or reads[value] != 1:
            continue
        sums: list[Any] = [makers[value]]  # from the last to the first
        parts: list[Any] = []
        for one in sums:
            for v in one.invars:
                maker = None if isinstance(v, Literal) or reads[v] != 1 else makers.get(v)
                (sums if _is_sum(maker) else parts).append(maker)
        if not all(part is not None and part.primitive.name == "pad" for part in parts):
            continue
        cut = {value: eqn.outvars[0]}
        for v in (v for one in sums for v in one.invars):
            cut[v] = copy.copy(eqn.outvars[0])
        made = [eqn.replace(invars=[v, *eqn.invars[1:]], outvars=[cut[v]]) for v in (p.outvars[0] for p in parts)]
        made += [one.replace(invars=[cut[v] for v in one.invars], outvars=[cut[one.outvars[0]]]) for one in sums[::-1]]
        gone.update(map(id, sums))
        instead[id(eqn)] = made
    return [new for eqn in equations if id(eqn) not in gone for new in instead.get(id(eqn), [eqn])]


def _is_sum(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name == "add_any"


def _shifting(eqn: Any, makers: Makers) -> Any:
    """An equation, or `shift_p` in its place."""
    name = eqn.primitive.name
    chains: list[_Ends] = []
    if name == "concatenate":
        chains = _in_a_row(eqn, makers)
    elif name in ("slice", "pad"):
        chains = list(_one_after_another(eqn, 0, makers))
    for ends in reversed(chains):  # from as far back as there is one
        made = _as_shift(eqn, ends)
        if made is not None:
            return made
    return eqn


def _as_shift(eqn: Any, ends: _Ends) -> Any:
    """`shift_p` in the place of an equation that makes this of a value; None where it is none."""
    if ends.fill is None or isinstance(ends.value, Literal):
        return None
    before, after = ends.value.aval, eqn.outvars[0].aval
    same = (before.shape, before.dtype) == (after.shape, after.dtype)
    moved = [d for d, side in enumerate(ends.sides) if any(side)]
    if not same or len(moved) > 1 or any(low != -high for low, high in ends.sides):
        return None
    if not moved:  # what was put on is cut off again: the middle of what is padded for its neighbours
        return eqn.replace(primitive=roll_p, invars=[ends.value], params={"shift": 0, "axis": 0})
    (axis,) = moved
    by = int(ends.sides[axis][0])
    if abs(by) >= after.shape[axis]:
        return None
    params = {"by": by, "axis": axis, "fill": ends.fill}
    return eqn.replace(primitive=shift_p, invars=[ends.value], params=params)


def _one_after_another(eqn: Any, position: int, makers: Makers) -> Iterator[_Ends]:
    """What slices and pads make of a value together: the last one, the last two, as far back as they are one."""
    ends = _ends(eqn, position, makers)
    while ends is not None:
        yield ends
        maker, position = (None, 0) if isinstance(ends.value, Literal) else makers.get(ends.value, (None, 0))
        first = None if maker is None else _ends(maker, position, makers)
        ends = None if first is None else ends.after(first)


def _in_a_row(eqn: Any, makers: Makers) -> list[_Ends]:
    """A slice behind or before a constant, as far back as the slice goes."""
    if len(eqn.invars) != 2 or any(isinstance(v, Literal) for v in eqn.invars):
        return []
    axis = int(eqn.params["dimension"])
    for at, other in ((0, 1), (1, 0)):
        fill, part = _constant(eqn.invars[at], makers), eqn.invars[other]
        maker, position = makers.get(part, (None, 0))
        if fill is not None and maker is not None:
            put = int(eqn.invars[at].aval.shape[axis])
            sides = [(0, 0)] * len(part.aval.shape)
            sides[axis] = (put * (at == 0), put * (at == 1))
            row = _Ends(part, tuple(sides), fill)
            both = map(row.after, _one_after_another(maker, position, makers))
            return [ends for ends in both if ends is not None]
    return []


def _ends(eqn: Any, position: int, makers: Makers) -> _Ends | None:
    """What a slice, a part of a split, or a pad by a number does; None of what does something else."""
    name, params, value = eqn.primitive.name, eqn.params, eqn.invars[0]
    shape = value.aval.shape
    if name == "split":
        begin, axis = sum(params["sizes"][:position]), int(params["axis"])
        cut = -begin, begin + params["sizes"][position] - shape[axis]
        return _Ends(value, tuple(cut if d == axis else (0, 0) for d in range(len(shape))), None)
    if name == "slice":
        if any(stride != 1 for stride in params["strides"] or ()):
            return None
        bounds = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
        sides: list[tuple[int, int]] = [(-begin, end - n) for begin, end, n in bounds]
        fill = None
    elif name == "pad" and (number := _constant(eqn.invars[1], makers)) is not None:
        config = params["padding_config"]
        if any(inside for *_, inside in config):
            return None
        sides, fill = [(low, high) for low, high, _ in config], number
    else:
        return None
    if all(put <= 0 for side in sides for put in side):
        fill = None
    return _Ends(value, tuple(sides), fill)


def _constant(atom: Any, makers: Makers) -> Any:
    """The number of which a value is all made, converted or not; None where it is something else."""
    if isinstance(atom, Literal):
        number = np.asarray(atom.val)
    else:
        eqn, _ = makers.get(atom, (None, 0))
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return None
        made = _constant(eqn.invars[0], makers)
        if made is None:
            return None
        number = np.asarray(made).astype(atom.aval.dtype)
    if number.shape or number.dtype.kind == "c":
        return None
    return int(number) if number.dtype.kind in "iub" else float(number)
