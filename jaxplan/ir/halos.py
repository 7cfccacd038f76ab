"""What is sliced out of a field and its edges in a row, as a row of what is sliced out of each.

`wide = jnp.pad(u, 1, mode="edge")` (or "wrap") and then `wide[2:, 1:-1] + wide[:-2, 1:-1] + ...`: 8194 rows, which no
device count divides, of which each neighbour is read with 8192.  Sliced first, each is the field and one of its edges
in a row, which is a roll, or what `whole_fields` makes of it, and the wider field is not there at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._jax import Literal
from .rewriting import like, without_calls, without_unread
from .rolls import roll_p

_PARTS = frozenset({"broadcast_in_dim", "concatenate", "reshape", "slice"})

_MOST = 0.75
"""Of what lies in a row, one part has at least so much, and so much of it is sliced out: the rest are edges."""


def without_halos(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with slices of what lies in a row with its edges taken before it is put there."""
    opened = without_calls(equations, results, _PARTS)
    writer = _Writer({v: eqn for eqn in opened for v in eqn.outvars})
    for eqn in opened:
        writer.write(eqn)
    return without_unread(writer.new, results, _PARTS) if writer.found else equations


class _Writer:
    def __init__(self, makers: dict[Any, Any]) -> None:
        self._makers = makers
        self.new: list[Any] = []
        self.found = False

    def write(self, eqn: Any) -> None:
        if _is_window(eqn) and self._row(eqn.invars[0], eqn.outvars[0].aval.shape) is not None:
            self.found = True
            starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
            self._window(eqn.invars[0], [*map(int, starts)], [*map(int, limits)], eqn, eqn.outvars[0])
        else:
            self.new.append(eqn)

    def _row(self, value: Any, size: Sequence[int] | None = None) -> Any:
        """The concatenation that makes a value of a part that is most of it, where most of it is sliced out."""
        eqn = None if isinstance(value, Literal) else self._makers.get(value)
        if eqn is None or eqn.primitive.name != "concatenate":
            return None
        axis, whole = eqn.params["dimension"], value.aval.shape
        most = max(v.aval.shape[axis] for v in eqn.invars) >= _MOST * whole[axis]
        sliced = size is None or whole[axis] > size[axis] >= _MOST * whole[axis] or self._row_behind(eqn, size)
        return eqn if most and sliced else None

    def _row_behind(self, eqn: Any, size: Sequence[int]) -> bool:
        """Whether what is sliced whole here is sliced of the main part further back."""
        axis = eqn.params["dimension"]
        main = max(eqn.invars, key=lambda v: v.aval.shape[axis])
        return size[axis] == eqn.outvars[0].aval.shape[axis] and self._row(main, size) is not None

    def _same(self, value: Any) -> Any:
        """What a value is a mere reshape of, of the same shape: an edge of one element, repeated once."""
        inner = value
        while inner in self._makers and self._makers[inner].primitive.name in ("reshape", "broadcast_in_dim"):
            eqn = self._makers[inner]
            if isinstance(eqn.invars[0], Literal) or len(eqn.invars) != 1:
                break
            before, after = eqn.invars[0].aval.shape, inner.aval.shape
            if [n for n in before if n != 1] != [n for n in after if n != 1]:
                break
            dims = eqn.params.get("broadcast_dimensions")
            if dims is not None and [before[i] for i in range(len(dims))] != [after[d] for d in dims]:
                break
            inner = eqn.invars[0]
        return inner if inner.aval.shape == value.aval.shape else value

    def _window(self, value: Any, starts: list[int], limits: list[int], eqn: Any, out: Any = None) -> Any:
        """A window of a value, written as far back as it is known; `out` is the variable for it, if there is one."""
        value = self._same(value)
        maker = self._makers.get(value)
        if not any(starts) and tuple(limits) == value.aval.shape:
            if out is None:
                return value
            still = {"shift": 0, "axis": 0}
            self.new.append(eqn.replace(primitive=roll_p, invars=[value], outvars=[out], params=still))
            return out
        if maker is not None and _is_window(maker):
            first = [*map(int, maker.params["start_indices"])]
            begin, end = ([a + b for a, b in zip(side, first, strict=True)] for side in (starts, limits))
            return self._window(maker.invars[0], begin, end, eqn, out)
        made = like(eqn.outvars[0], tuple(b - a for a, b in zip(starts, limits, strict=True))) if out is None else out
        row = self._row(value)
        if row is None:
            params = {"start_indices": tuple(starts), "limit_indices": tuple(limits), "strides": None}
            self.new.append(eqn.replace(invars=[value], outvars=[made], params=params))
            return made
        axis, before, inside = row.params["dimension"], 0, []
        for part in row.invars:
            extent = part.aval.shape[axis]
            low, high = max(starts[axis] - before, 0), min(limits[axis] - before, extent)
            if low < high:
                inside.append((part, _with(starts, axis, low), _with(limits, axis, high)))
            before += extent
        if len(inside) == 1:
            return self._window(*inside[0], eqn, out)
        parts = [self._window(*one, eqn) for one in inside]
        self.new.append(row.replace(invars=parts, outvars=[made], source_info=eqn.source_info))
        return made


def _is_window(eqn: Any) -> bool:
    """Whether an equation is a slice of neighbouring elements."""
    strides = eqn.params["strides"] if eqn.primitive.name == "slice" else (0,)
    return all(stride == 1 for stride in strides or ()) and not isinstance(eqn.invars[0], Literal)


def _with(numbers: Sequence[int], axis: int, number: int) -> list[int]:
    return [*numbers[:axis], number, *numbers[axis + 1 :]]
