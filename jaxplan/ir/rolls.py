"""Elements that are moved around a dimension, as one operation.

`jnp.roll` is written as two slices and a concatenation, and its gradient as two parts that are padded with zeros and
added: dimensions that none of the parts can be cut along, though devices need no more than their neighbours' edges.
So both are one primitive here, `roll`, that is lowered to the concatenation where its dimension is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .._jax import Literal
from .rewriting import Makers, put_together

roll_p = Primitive("roll")
"""`roll_p.bind(x, shift=, axis=)`: element `i` along `axis` goes to `i + shift`, those at the end to the start;
0 <= shift < extent, as `jnp.roll` by nothing is written as slices too."""


def _roll(x: Any, *, shift: int, axis: int) -> Any:
    if not shift:
        return x
    last = x.shape[axis] - shift
    parts = [jax.lax.slice_in_dim(x, last, None, axis=axis), jax.lax.slice_in_dim(x, 0, last, axis=axis)]
    return jax.lax.concatenate(parts, axis)


roll_p.def_impl(_roll)
roll_p.def_abstract_eval(lambda x, *, shift, axis: x)
mlir.register_lowering(roll_p, mlir.lower_fun(_roll, multiple_results=False))


_PARTS = frozenset({"slice", "split", "pad"})


def rolled(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with `roll_p` in the place of concatenated slices, and of padded slices that are added, that roll."""
    found = put_together(equations, results, _PARTS, _rolling)
    return equations if found is None else found


def _rolling(eqn: Any, makers: Makers) -> Any:
    """An equation, or `roll_p` in its place."""
    name, parts = eqn.primitive.name, list(eqn.invars)
    if name not in ("concatenate", "add_any") or len(parts) != 2 or any(isinstance(v, Literal) for v in parts):
        return eqn
    if name == "concatenate":
        axis = int(eqn.params["dimension"])
        places = [0, parts[0].aval.shape[axis]]
    else:
        one, two = _padded(parts[0], makers), _padded(parts[1], makers)
        if one is None or two is None or one[1] != two[1]:
            return eqn
        axis, parts, places = one[1], [one[0], two[0]], [one[2], two[2]]
    if places[0]:  # the one that comes first, first
        parts, places = parts[::-1], places[::-1]
    first_part, second_part = (_taken(v, axis, makers) for v in parts)
    if first_part is None or second_part is None:
        return eqn
    (value, begin, end), (other, first, last) = first_part, second_part
    aval = eqn.outvars[0].aval
    extent = aval.shape[axis]
    whole = value is other and (value.aval.shape, value.aval.dtype) == (aval.shape, aval.dtype)
    # the value's end goes to the start, and its start behind that
    if not whole or (first, last, end) != (0, begin, extent) or places != [0, extent - begin] or begin == extent:
        return eqn
    return eqn.replace(primitive=roll_p, invars=[value], params={"shift": (extent - begin) % extent, "axis": axis})


def _taken(part: Any, axis: int, makers: Makers) -> tuple[Any, int, int] | None:
    """(value, begin, end) of what is a slice along `axis` alone."""
    eqn, position = makers.get(part, (None, 0))
    if eqn is None or eqn.primitive.name == "pad" or isinstance(eqn.invars[0], Literal):
        return None
    value, params = eqn.invars[0], eqn.params
    if eqn.primitive.name == "split":
        begin = sum(params["sizes"][:position])
        return (value, begin, begin + params["sizes"][position]) if params["axis"] == axis else None
    bounds = list(zip(params["start_indices"], params["limit_indices"], strict=True))
    others = [(b, e) != (0, n) for d, ((b, e), n) in enumerate(zip(bounds, value.aval.shape, strict=True)) if d != axis]
    if any(others) or any(stride != 1 for stride in params["strides"] or ()):
        return None
    return value, *bounds[axis]


def _padded(whole: Any, makers: Makers) -> tuple[Any, int, int] | None:
    """(part, axis, place) of what is a part with zeros around it, along one dimension."""
    eqn, _ = makers.get(whole, (None, 0))
    if eqn is None or eqn.primitive.name != "pad" or not isinstance(eqn.invars[1], Literal):
        return None
    config = eqn.params["padding_config"]
    axes = [d for d, sides in enumerate(config) if any(sides)]
    if eqn.invars[1].val != 0 or len(axes) != 1 or min(config[axes[0]]) < 0 or config[axes[0]][2]:
        return None
    return eqn.invars[0], axes[0], config[axes[0]][0]
