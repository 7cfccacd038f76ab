"""What is computed of a field's inside, between the slices it is taken with and the place where it is put.

`u.at[1:-1, 1:-1].set(f(u[2:, 1:-1], u[:-2, 1:-1], ...))`, `jnp.pad(f(...), 1)`, `concatenate([edge, f(...), edge])`,
`sum(f(...))`, and their gradients: 8190 rows of 8192.  `whole_fields` makes use of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._jax import Literal

ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh",
    "div", "eq", "erf", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt",
    "select_n", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})  # fmt: skip
"""What is computed of each element by itself, and can be of some more."""

TOTALS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})

_LEAST_SHARE = 0.75
"""An inside has at least so much of each dimension: what is computed beside it is little."""

Place = tuple[int, ...]
"""Where a window begins in its field, along each dimension."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What is computed of windows of one size in fields of one shape, and read by nothing else.

    Attributes:
      shape, size: of the fields, of the windows.
      taken: what is sliced out of a field: the field, and from where.
      spread: what is a number, or has fewer dimensions, spread out: its equation.
      members: the elementwise equations, by position among all.
      put: (equation, operand): where in a field it is put; None where all of it is added up.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    taken: dict[Any, tuple[Any, Place]] = field(default_factory=dict)
    spread: dict[Any, Any] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    put: dict[tuple[int, int], Place | None] = field(default_factory=dict)

    @property
    def cut(self) -> frozenset[int]:
        """Dimensions of which a window is not all."""
        return frozenset(d for d, (n, m) in enumerate(zip(self.shape, self.size, strict=True)) if n != m)

    @property
    def place(self) -> Place:
        """Where it is computed: where least has to be moved, and least far."""
        places = [place for _, place in self.taken.values()]
        places += [place for place in self.put.values() if place is not None]

        def moved(here: Place) -> tuple[int, int]:
            far = [abs(a - b) for place in places for a, b in zip(here, place, strict=True)]
            return sum(map(bool, far)), sum(far)

        return min(sorted(set(places)), key=moved)

    @property
    def divides_better_whole(self) -> bool:
        """Whether it is most of its field, and the field can be halved more often along what is cut."""
        pairs = [(self.shape[d], self.size[d]) for d in self.cut]
        halved = [((n & -n), (m & -m)) for n, m in pairs]
        most = all(m >= _LEAST_SHARE * n for n, m in pairs)
        return most and all(n >= m for n, m in halved) and any(n > m for n, m in halved)


def is_narrow(atom: Any, size: Sequence[int]) -> bool:
    """Whether a value is one number, or of one extent somewhere, that elementwise work spreads out by itself."""
    shape = () if isinstance(atom, Literal) else atom.aval.shape
    return shape != tuple(size) and (not shape or 1 in shape)


def insides(equations: Sequence[Any], results: Sequence[Any]) -> list[Inside]:
    """All that is computed of insides of fields which divide better as wholes, with the edges concatenated to them."""
    return _worth_it(equations, list(_Search(equations, results).all()))


def _worth_it(equations: Sequence[Any], found: list[Inside]) -> list[Inside]:
    """Those that divide better as wholes; edges where they are beside such a one, and rows with nothing unknown."""
    while True:
        put = {at for inside in found for at in inside.put}
        most = {i for inside in found if inside.divides_better_whole for i, _ in inside.put}
        rows = {i for i, _ in put if equations[i].primitive.name == "concatenate"}
        good = {i for i in rows & most if all((i, n) in put for n in range(len(equations[i].invars)))}
        left = [
            inside
            for inside in found
            if (inside.divides_better_whole or all(i in rows for i, _ in inside.put))
            and all(i in good for i, _ in inside.put if i in rows)
        ]
        if len(left) == len(found):
            return found
        found = left


class _Search:
    def __init__(self, equations: Sequence[Any], results: Sequence[Any]) -> None:
        self._equations = equations
        self._results = {v for v in results if not isinstance(v, Literal)}
        self._makers = {v: i for i, eqn in enumerate(equations) for v in eqn.outvars}
        self._readers: dict[Any, list[tuple[int, int]]] = {}
        for i, eqn in enumerate(equations):
            for operand, v in enumerate(eqn.invars):
                if not isinstance(v, Literal):
                    self._readers.setdefault(v, []).append((i, operand))

    def all(self) -> Iterator[Inside]:
        known: set[Any] = set()
        for i, eqn in enumerate(self._equations):
            for operand, v in enumerate(eqn.invars):
                if isinstance(v, Literal) or v in known or self._place(i, operand) is None:
                    continue
                inside = Inside(shape=eqn.outvars[0].aval.shape, size=v.aval.shape)
                values = [v]
                if inside.cut and self._filled_in(inside, values):
                    yield inside
                known.update(values)

    def _filled_in(self, inside: Inside, values: list[Any]) -> bool:
        """Fills in what is computed together with `values`; whether nothing else is read, and nothing else reads it."""
        seen = set(values)
        for v in values:  # which grow
            if v.aval.shape != inside.size or v not in self._makers:
                return False
            eqn = self._equations[self._makers[v]]
            taken = self._taken(eqn)
            if taken is not None and taken[0].aval.shape == inside.shape:
                inside.taken[v] = taken
            elif eqn.primitive.name == "broadcast_in_dim" and len(eqn.invars) == 1:
                inside.spread[v] = eqn
            elif eqn.primitive.name in ELEMENTWISE and v not in self._results:
                inside.members.add(self._makers[v])
                more = [x for x in eqn.invars if not is_narrow(x, inside.size) and x not in seen]
                seen.update(more)
                values.extend(more)
            else:
                return False
            for i, operand in self._readers.get(v, ()):
                reader, place = self._equations[i], self._place(i, operand)
                if place is not None and reader.outvars[0].aval.shape == inside.shape:
                    inside.put[i, operand] = place
                elif v in inside.taken or v in inside.spread:
                    continue  # others may go on reading what is only sliced
                elif reader.primitive.name in ELEMENTWISE:
                    if reader.outvars[0] not in seen:
                        seen.add(reader.outvars[0])
                        values.append(reader.outvars[0])
                elif reader.primitive.name in TOTALS and inside.cut <= set(reader.params["axes"]):
                    inside.put[i, operand] = None
                else:
                    return False
        return True

    def _taken(self, eqn: Any) -> tuple[Any, Place] | None:
        """(field, place) of what an equation takes a window of."""
        name, params = eqn.primitive.name, eqn.params
        if name == "slice" and all(stride == 1 for stride in params["strides"] or ()):
            return eqn.invars[0], tuple(map(int, params["start_indices"]))
        if name == "gather":
            numbers, shape = params["dimension_numbers"], eqn.invars[0].aval.shape
            if len(numbers.offset_dims) == len(shape):
                place = self._indexed(eqn.invars[1], numbers.start_index_map, shape, params["slice_sizes"])
                return None if place is None else (eqn.invars[0], place)
        return None

    def _place(self, i: int, operand: int) -> Place | None:
        """Where in a field an equation puts this operand; None where it does something else."""
        eqn = self._equations[i]
        name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape if eqn.outvars else ()
        size = eqn.invars[operand].aval.shape
        if name in ("scatter", "scatter-add") and operand == 2:
            numbers = params["dimension_numbers"]
            dims = numbers.scatter_dims_to_operand_dims
            whole = len(numbers.update_window_dims) == len(shape)
            return self._indexed(eqn.invars[1], dims, shape, size) if whole else None
        if name == "dynamic_update_slice" and operand == 1:
            starts = [self._numbers(v) for v in eqn.invars[2:]]
            known = [int(start) for start in starts if start is not None]
            return _within(known, shape, size) if len(known) == len(shape) else None
        if name == "pad" and operand == 0:
            config, number = params["padding_config"], self._numbers(eqn.invars[1])
            if number is None or any(low < 0 or high < 0 or inner for low, high, inner in config):
                return None
            return tuple(int(low) for low, _, _ in config)
        if name == "concatenate":
            before = sum(v.aval.shape[params["dimension"]] for v in eqn.invars[:operand])
            return tuple(before if d == params["dimension"] else 0 for d in range(len(shape)))
        return None

    def _indexed(self, indices: Any, dims: Sequence[int], shape: Sequence[int], size: Sequence[int]) -> Place | None:
        """Where a window is by constant indices of some dimensions."""
        numbers = self._numbers(indices)
        if numbers is None or numbers.shape != (len(dims),):
            return None
        places = dict(zip(dims, numbers.tolist(), strict=True))
        return _within([int(places.get(d, 0)) for d in range(len(shape))], shape, size)

    def _numbers(self, atom: Any) -> np.ndarray | None:
        """A few constants, as indices are written; None of anything else."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self._makers or math.prod(atom.aval.shape) > len(atom.aval.shape) * 8 + 1:
            return None
        eqn = self._equations[self._makers[atom]]
        if eqn.primitive.name not in ("broadcast_in_dim", "concatenate", "convert_element_type"):
            return None
        parts = [part for part in map(self._numbers, eqn.invars) if part is not None]
        if len(parts) != len(eqn.invars):
            return None
        if eqn.primitive.name == "concatenate":
            return np.concatenate(parts, eqn.params["dimension"])
        (part,) = parts
        if eqn.primitive.name == "convert_element_type":
            return part.astype(atom.aval.dtype)
        return None if part.shape else np.full(atom.aval.shape, part)


def _within(place: Sequence[int], shape: Sequence[int], size: Sequence[int]) -> Place | None:
    """A place, where the window is all in its field: what isn't, is dropped or moved."""
    fits = all(0 <= p <= n - m for p, n, m in zip(place, shape, size, strict=True))
    return tuple(place) if fits else None
