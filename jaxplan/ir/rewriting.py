"""Jaxprs with some of their equations replaced by others, in the jaxprs of their calls, loops and branches too."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._jax import Literal, as_closed
from .flatten import SEEN_THROUGH, call_of

_WALKED = frozenset({*SEEN_THROUGH, "scan", "while", "cond"})
"""Primitives whose jaxprs are looked into: calls, loops and branches."""

Change = Callable[[list[Any], Sequence[Any]], list[Any]]
"""(equations of a jaxpr, its results) -> its equations: those that stay are the same objects."""


Makers = Mapping[Any, tuple[Any, int]]
"""Of what an equation makes: the equation, and which of its results it is."""


def rewritten(jaxpr: Any, changes: Sequence[Change]) -> Any:
    """`jaxpr` (open) with all `changes` made, one after the other; itself where there are none."""
    return _Rewriter(changes).body(jaxpr)


class _Rewriter:
    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity; what was rewritten is kept alive beside it

    def body(self, body: Any) -> Any:
        """An open or closed jaxpr; one that is shared is rewritten once."""
        if id(body) not in self._done:
            jaxpr, _ = as_closed(body)
            equations = [self._equation(eqn) for eqn in jaxpr.eqns]
            for change in self._changes:
                equations = change(equations, jaxpr.outvars)
            new = body
            if len(equations) != len(jaxpr.eqns) or any(
                a is not b for a, b in zip(equations, jaxpr.eqns, strict=True)
            ):
                changed = jaxpr.replace(eqns=equations)
                new = changed if jaxpr is body else body.replace(jaxpr=changed)
            self._done[id(body)] = body, new
        return self._done[id(body)][1]

    def _equation(self, eqn: Any) -> Any:
        if eqn.primitive.name not in _WALKED:
            return eqn
        params = {key: self._parameter(value) for key, value in eqn.params.items()}
        return eqn if all(params[key] is eqn.params[key] for key in params) else eqn.replace(params=params)

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.body(value)
        if type(value) is tuple and any(isinstance(x, (Jaxpr, ClosedJaxpr)) for x in value):  # branches
            made = tuple(self._parameter(x) for x in value)
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
        return value


def put_together(
    equations: Sequence[Any], results: Sequence[Any], parts: Collection[str], one: Callable[[Any, Makers], Any]
) -> list[Any] | None:
    """Equations with those that `one` makes of several in their place, less what nothing reads any more of the latter.

    Args:
      results: of the jaxpr; parts: primitives that such an equation takes the place of.
      one: (an equation, who makes what of `parts`) -> the equation, or another in its place.

    Returns: None where nothing is put together.
    """
    makers = {v: (eqn, i) for eqn in equations if eqn.primitive.name in parts for i, v in enumerate(eqn.outvars)}
    found = [one(eqn, makers) for eqn in equations]
    if all(new is old for new, old in zip(found, equations, strict=True)):
        return None
    return without_unread(found, results, parts)


def without_calls(equations: list[Any], results: Sequence[Any], parts: Collection[str]) -> list[Any]:
    """Equations with calls of nothing but `parts` replaced by what is in them."""
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
            or any(inner.primitive.name not in parts for inner in body.eqns)
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


def without_unread(equations: Sequence[Any], results: Sequence[Any], parts: Collection[str]) -> list[Any]:
    """Equations less those of primitives among `parts` that nothing reads."""
    left: list[Any] = []
    reads = Counter(v for v in results if not isinstance(v, Literal))
    for eqn in reversed(equations):
        if eqn.primitive.name in parts and not any(reads[v] for v in eqn.outvars):
            continue
        reads.update(v for v in eqn.invars if not isinstance(v, Literal))
        left.append(eqn)
    return left[::-1]


def like(variable: Any, shape: tuple[int, ...]) -> Any:
    """A new variable of a variable's type, and of that shape."""
    made = copy.copy(variable)
    made.aval = variable.aval.update(shape=shape)
    return made
