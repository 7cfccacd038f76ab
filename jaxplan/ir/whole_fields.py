"""What is computed of a field's inside, as what is computed of all of it and put where its inside is.

No device count divides the 8190 inner rows of 8192, though devices need no more than their neighbours' edges.  So each
slice of an inside becomes a shift of the whole field, what is computed of slices is computed of all 8192, and a
comparison with the index says where it counts.  On one device XLA does that in the one kernel which writes the field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .._jax import Literal, as_closed
from .insides import ELEMENTWISE, TOTALS, Inside, Place, insides, is_narrow
from .rewriting import like, without_calls, without_unread
from .shifts import shift_p

_OPENED = ELEMENTWISE | {"broadcast_in_dim", "concatenate", "pad", "slice"}


def of_whole_fields(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with what is computed of the inside of fields computed of all of them."""
    opened = without_calls(equations, results, _OPENED)
    found = insides(opened, results)
    return without_unread(_Writer(found).written(opened), results, _OPENED | {"gather"}) if found else equations


class _Writer:
    def __init__(self, found: Sequence[Inside]) -> None:
        self._put = {at: inside for inside in found for at in inside.put}
        self._members = {i: inside for inside in found for i in inside.members}
        self._whole: dict[tuple[Any, int], Any] = {}
        self._new: list[Any] = []

    def written(self, equations: Sequence[Any]) -> list[Any]:
        for i, eqn in enumerate(equations):
            inside = self._members.get(i)
            if inside is not None:
                read = [self._of_field(v, inside, eqn) for v in eqn.invars]
                (v,) = eqn.outvars
                out = self._whole[v, id(inside)] = like(v, inside.shape)
                self._new.append(eqn.replace(invars=read, outvars=[out]))
            else:
                pieces = [(n, self._put[i, n]) for n in range(len(eqn.invars)) if (i, n) in self._put]
                self._write_put(i, eqn, pieces)
        return self._new

    def _write_put(self, i: int, eqn: Any, pieces: Sequence[tuple[int, Inside]]) -> None:
        """An equation that puts insides into a field, or adds one up."""
        name, out = eqn.primitive.name, eqn.outvars[0] if eqn.outvars else None
        if not pieces:
            self._new.append(eqn)
        elif name in TOTALS:
            ((_, inside),) = pieces
            value = self._of_field(eqn.invars[0], inside, eqn)
            neutral = _neutral(name, value.aval.dtype)
            counted = like(value, inside.shape)
            mask = _Mask(inside, inside.place)
            self._inline(lambda x: lax.select(mask(), x, lax.full_like(x, neutral)), eqn, [value], counted)
            self._new.append(eqn.replace(invars=[counted]))
        else:
            values, masks = [], []
            for n, inside in pieces:
                place = inside.put[i, n]
                assert place is not None
                value = self._of_field(eqn.invars[n], inside, eqn)
                values.append(self._moved(value, inside.place, place, eqn))
                masks.append(_Mask(inside, place))
            if name == "concatenate":
                self._inline(lambda *parts: _side_by_side(parts, masks), eqn, values, out)
            elif name == "pad":
                self._inline(
                    lambda fill, x: lax.select(masks[0](), x, lax.broadcast(fill, x.shape)),
                    eqn, [eqn.invars[1], *values], out,
                )  # fmt: skip
            else:
                adds = name == "scatter-add"
                self._inline(
                    lambda u, x: lax.select(masks[0](), u + x if adds else x, u), eqn, [eqn.invars[0], *values], out
                )

    def _of_field(self, v: Any, inside: Inside, eqn: Any) -> Any:
        """A value of the size of a field that has `v` at the inside's place; of one extent where `v` is."""
        if isinstance(v, Literal) or not v.aval.shape:
            return v
        key = v, id(inside)
        if key in self._whole:
            return self._whole[key]
        if is_narrow(v, inside.size):
            return self._narrow(v, range(len(v.aval.shape)), inside, eqn)
        if v in inside.taken:
            value, place = inside.taken[v]
            self._whole[key] = self._moved(value, place, inside.place, eqn)
        else:
            spread = inside.spread[v]
            dims = spread.params["broadcast_dimensions"]
            self._whole[key] = like(v, inside.shape)
            narrow = self._narrow(spread.invars[0], dims, inside, spread)
            self._inline(lambda x: lax.broadcast_in_dim(x, inside.shape, dims), spread, [narrow], self._whole[key])
        return self._whole[key]

    def _narrow(self, v: Any, dims: Sequence[int], inside: Inside, eqn: Any) -> Any:
        """A value whose dimensions are some of an inside's, or of one extent, as long as a field."""
        shape = () if isinstance(v, Literal) else v.aval.shape
        cut = {at: d for at, (d, n) in enumerate(zip(dims, shape, strict=True)) if d in inside.cut and n != 1}
        if not cut:
            return v
        low = {at: inside.place[d] for at, d in cut.items()}
        high = {at: inside.shape[d] - inside.size[d] - inside.place[d] for at, d in cut.items()}
        config = [(low.get(at, 0), high.get(at, 0), 0) for at in range(len(shape))]
        made = like(v, tuple(n + a + b for n, (a, b, _) in zip(shape, config, strict=True)))
        self._inline(lambda x: lax.pad(x, np.zeros((), x.dtype), config), eqn, [v], made)
        return made

    def _moved(self, value: Any, start: Place, end: Place, eqn: Any) -> Any:
        for axis, (a, b) in enumerate(zip(start, end, strict=True)):
            if a != b:
                made = like(value, value.aval.shape)
                params = {"by": b - a, "axis": axis, "fill": 0}
                self._new.append(eqn.replace(primitive=shift_p, invars=[value], outvars=[made], params=params))
                value = made
        return value

    def _inline(self, fn: Callable[..., Any], eqn: Any, operands: Sequence[Any], out: Any) -> None:
        """The equations of `fn` of some operands, with the source line of `eqn`; `out` is its result."""
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
        jaxpr, _ = as_closed(jax.make_jaxpr(fn)(*shapes))
        now: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        now[jaxpr.outvars[0]] = out
        for inner in jaxpr.eqns:
            invars = [v if isinstance(v, Literal) else now[v] for v in inner.invars]
            outvars = [now.setdefault(v, copy.copy(v)) for v in inner.outvars]
            self._new.append(inner.replace(invars=invars, outvars=outvars, source_info=eqn.source_info))


class _Mask:
    """Where an inside is in a field."""

    def __init__(self, inside: Inside, place: Place) -> None:
        self._inside, self._place = inside, place

    def __call__(self) -> Any:
        """Counted in ones, twos, threes, ...: XLA makes one value of what says the same of rows and of columns, and
        gathers it where rows alone are cut (jax 0.10.2, eight v5e)."""
        shape, size = self._inside.shape, self._inside.size
        mask = None
        for d in sorted(self._inside.cut):
            each = d + 1
            index = lax.mul(lax.iota(np.int32, shape[d]), np.int32(each))
            first, last = self._place[d], self._place[d] + size[d] - 1
            side = lax.bitwise_and(lax.ge(index, np.int32(each * first)), lax.le(index, np.int32(each * last)))
            side = lax.broadcast_in_dim(side, shape, (d,))
            mask = side if mask is None else lax.bitwise_and(mask, side)
        return mask


def _side_by_side(parts: Sequence[Any], masks: Sequence[_Mask]) -> Any:
    made = parts[0]
    for part, mask in zip(parts[1:], masks[1:], strict=True):
        made = lax.select(mask(), part, made)
    return made


def _neutral(name: str, dtype: Any) -> Any:
    """What a total takes no notice of."""
    if name == "reduce_sum":
        return 0
    if jax.numpy.issubdtype(dtype, np.floating):
        return -np.inf if name == "reduce_max" else np.inf
    if dtype == np.bool_:
        return name == "reduce_min"
    limits = jax.numpy.iinfo(dtype)
    return limits.min if name == "reduce_max" else limits.max
