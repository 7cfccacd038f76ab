"""Elements that are moved along a dimension, others coming in at its end, as one operation.

A token's left neighbour, `jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]`, the block before this one, `concatenate` of a
block of zeros and all blocks but the last, and their gradients: slices and pads whose parts no device count divides,
though devices need no more than their neighbours' edges.  So they are one primitive here, `shift`, that is lowered to a
slice and a pad where its dimension is whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._jax import Literal
from .flatten import call_of
from .rewriting import Makers, put_together

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
    """A value with so many elements put before and after it along one dimension, or cut off where fewer than none.

    `fill` is what is put; None where nothing is.  `axis` is None where nothing is done at all.
    """

    value: Any
    axis: int | None
    low: int
    high: int
    fill: Any

    def after(self, first: _Ends) -> _Ends | None:
        """Both as one, `first` done before; None where one can't do it: what was cut off doesn't come back."""
        back = any(cut < 0 < put for cut, put in ((first.low, self.low), (first.high, self.high)))
        apart = None not in (self.axis, first.axis) and self.axis != first.axis
        unlike = None not in (self.fill, first.fill) and self.fill != first.fill
        if back or apart or unlike:
            return None
        axis, fill = (b if a is None else a for a, b in ((self.axis, first.axis), (self.fill, first.fill)))
        return _Ends(first.value, axis, first.low + self.low, first.high + self.high, fill)


def shifted(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with `shift_p` in the place of slices and pads, or slices and constants in a row, that shift."""
    opened = _without_calls(equations, results)
    found = put_together(opened, results, _PARTS, _shifting)
    return equations if found is None else found


def _without_calls(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with calls of nothing but `_PARTS` replaced by what is in them."""
    known: dict[Any, Any] = {}

    def now(atoms: Iterable[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else known.get(atom, atom) for atom in atoms]

    opened: list[Any] = []
    for eqn in equations:
        read = now(eqn.invars)
        called = call_of(eqn) if eqn.primitive.name in ("jit", "pjit") else None
        body = None if called is None or called.consts else called.jaxpr
        made = set() if body is None else {v for inner in body.eqns for v in inner.outvars}
        handed_on = [] if body is None else [(v, out) for v, out in zip(body.outvars, eqn.outvars, strict=True)]
        own = [v for v, _ in handed_on if not isinstance(v, Literal) and v in made]
        if (
            body is None
            or not _PARTS.issuperset(inner.primitive.name for inner in body.eqns)
            or len(own) != len(set(own))
            or any(out in results for v, out in handed_on if isinstance(v, Literal) or v not in made)
        ):
            as_it_was = all(a is b for a, b in zip(read, eqn.invars, strict=True))
            opened.append(eqn if as_it_was else eqn.replace(invars=read))
            continue
        known.update(zip(body.invars, read, strict=True))
        for v in made:  # the same body is called elsewhere too
            known[v] = copy.copy(v)
        for v, out in handed_on:
            if v in own:
                known[v] = out
            else:
                known[out] = now([v])[0]
        for inner in body.eqns:  # a body that is called elsewhere too says the line of its first call
            said = eqn.source_info
            opened.append(inner.replace(invars=now(inner.invars), outvars=now(inner.outvars), source_info=said))
    return opened


def _shifting(eqn: Any, makers: Makers) -> Any:
    """An equation, or `shift_p` in its place."""
    name = eqn.primitive.name
    ends = None
    if name == "concatenate":
        ends = _in_a_row(eqn, makers)
    elif name in ("slice", "pad"):
        ends = _one_after_another(eqn, 0, makers)
    if ends is None or ends.axis is None or ends.fill is None or isinstance(ends.value, Literal):
        return eqn
    before, after = ends.value.aval, eqn.outvars[0].aval
    same = (before.shape, before.dtype) == (after.shape, after.dtype)
    if not same or ends.low != -ends.high or not 0 < abs(ends.low) < after.shape[ends.axis]:
        return eqn
    params = {"by": int(ends.low), "axis": ends.axis, "fill": ends.fill}
    return eqn.replace(primitive=shift_p, invars=[ends.value], params=params)


def _one_after_another(eqn: Any, position: int, makers: Makers) -> _Ends | None:
    """What slices and pads make of a value together, as far back as they are one."""
    ends = _ends(eqn, position, makers)
    while ends is not None and not isinstance(ends.value, Literal):
        maker, position = makers.get(ends.value, (None, 0))
        first = None if maker is None else _ends(maker, position, makers)
        both = None if first is None else ends.after(first)
        if both is None:
            break
        ends = both
    return ends


def _in_a_row(eqn: Any, makers: Makers) -> _Ends | None:
    """A slice behind or before a constant."""
    if len(eqn.invars) != 2 or any(isinstance(v, Literal) for v in eqn.invars):
        return None
    axis = int(eqn.params["dimension"])
    for at, other in ((0, 1), (1, 0)):
        fill, part = _constant(eqn.invars[at], makers), eqn.invars[other]
        maker, position = makers.get(part, (None, 0))
        ends = None if maker is None else _one_after_another(maker, position, makers)
        if fill is not None and ends is not None:
            put = int(eqn.invars[at].aval.shape[axis])
            return _Ends(part, axis, put * (at == 0), put * (at == 1), fill).after(ends)
    return None


def _ends(eqn: Any, position: int, makers: Makers) -> _Ends | None:
    """What a slice, a part of a split, or a pad by a literal does along one dimension; None of what does more."""
    name, params, value = eqn.primitive.name, eqn.params, eqn.invars[0]
    shape = value.aval.shape
    if name == "split":
        begin, axis = sum(params["sizes"][:position]), int(params["axis"])
        return _Ends(value, axis, -begin, begin + params["sizes"][position] - shape[axis], None)
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
    axes = [d for d, side in enumerate(sides) if any(side)]
    if not axes:
        return _Ends(value, None, 0, 0, None)
    return _Ends(value, axes[0], *sides[axes[0]], fill) if len(axes) == 1 else None


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
