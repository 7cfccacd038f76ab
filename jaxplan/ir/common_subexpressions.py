"""What is computed of the same operands more than once, once.

XLA merges equal instructions whatever they are for: the squares of which a gradient's norm is the sum are those by
which it is clipped, five losses under one mask multiply by it alike.  Here they are one operation too, in one layout,
and what is made of them is sent once.  Calls are looked into, for XLA has none: a network that is run once as it is and
once more for its gradient (a generator's for the discriminator's loss and for its own) is two calls of each function
by jax's count, the second with what the way back needs, and one network by XLA's.  What costs nothing wherever it is
read stays apart: there is nothing to save, and each reader may have it as it lies best for that one.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Sharding

from .._jax import DropVar, Literal
from .flatten import SEEN_THROUGH, call_of
from .graph import VIEWS

_CALLS = frozenset(
    {"jit", "pjit", "call", "core_call", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
)
"""Calls that are nothing but what they call; not blocks to be computed again, which XLA is kept from merging."""
_APART = frozenset({"scan", "while", "cond", "optimization_barrier", "copy", "copy_p", "shard_map", "device_put"})
"""What is left as it is: what runs long is not repeated, and barriers and copies are asked for."""
_MADE_ANEW = VIEWS | {"broadcast_in_dim", "convert_element_type", "iota"}
"""What costs nothing wherever it is read: known to be alike, and left apart."""


def computed_once(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations without those that compute of the same operands what those before them did; what is made anew at no
    price wherever it is read stays apart."""
    numbers, number_of = _Numbers(), dict[Any, int]()
    kept, first, instead = list[Any](), dict[int, Any](), dict[Any, Any]()
    needed = {v for v in results if not isinstance(v, Literal)}
    for eqn in equations:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                first.setdefault(numbers.read(v, number_of), v)
        made = numbers.made(eqn, number_of)
        read = [v if isinstance(v, Literal) else instead.get(v, v) for v in eqn.invars]
        if any(a is not b for a, b in zip(read, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=read)
        own = False
        for v, number in zip(eqn.outvars, made, strict=True):
            if isinstance(v, DropVar):
                continue
            before = first.setdefault(number, v)
            if before is v or v in needed or number in numbers.apart or str(before.aval) != str(v.aval):
                own = True
            else:
                instead[v] = before
        if own or not made or eqn.effects:
            kept.append(eqn)
    return kept


class _Numbers:
    """Numbers what is computed: what has one number is equal.

    Attributes:
      apart: numbers of what is made anew at no price.
    """

    def __init__(self) -> None:
        self.apart = set[int]()
        self._known = dict[Hashable, tuple[int, ...]]()
        self._next = itertools.count()

    def read(self, atom: Any, number_of: dict[Any, int]) -> int:
        """The number of a variable, one of its own where it has none, or of a literal."""
        if isinstance(atom, Literal):
            return self._of(("literal", type(atom.val), str(atom.val), str(atom.aval)))
        if atom not in number_of:
            number_of[atom] = next(self._next)
        return number_of[atom]

    def made(self, eqn: Any, number_of: dict[Any, int]) -> tuple[int, ...]:
        """The numbers of an equation's results, which are noted."""
        read = tuple(self.read(v, number_of) for v in eqn.invars)
        key = _key(eqn, read)
        numbers = self._known.get(key)
        if numbers is None:
            numbers = self._called(eqn, read) or tuple(itertools.islice(self._next, len(eqn.outvars)))
            if key is not None:
                self._known[key] = numbers
            if eqn.primitive.name in _MADE_ANEW:
                self.apart.update(numbers)
        number_of.update(zip(eqn.outvars, numbers, strict=True))
        return numbers

    def _of(self, key: Hashable) -> int:
        """The number of a literal or a constant."""
        if key not in self._known:
            self._known[key] = (next(self._next),)
        return self._known[key][0]

    def _called(self, eqn: Any, read: Sequence[int]) -> tuple[int, ...] | None:
        """The numbers of what a call returns; None where it isn't looked into."""
        if eqn.primitive.name not in _CALLS or eqn.effects or _is_stated(eqn):
            return None
        called = call_of(eqn)
        if called is None:
            return None
        constants = (self._of(("constant", id(const))) for const in called.consts)
        inner = dict(zip(called.jaxpr.constvars, constants, strict=True))
        inner.update(zip(called.jaxpr.invars, (read[i] for i in called.positions), strict=True))
        for one in called.jaxpr.eqns:
            self.made(one, inner)
        return tuple(self.read(v, inner) for v in called.jaxpr.outvars)


def _is_stated(eqn: Any) -> bool:
    """Whether a jitted function says where its arguments or results are to lie."""
    said = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(one, Sharding) for one in said)


def _key(eqn: Any, read: tuple[int, ...]) -> Hashable | None:
    """What equal equations have in common; None of those that are left as they are."""
    name = eqn.primitive.name
    call = name in _CALLS
    if eqn.effects or not eqn.invars or name in _APART or (name in SEEN_THROUGH and not call):
        return None
    if not call and any(isinstance(value, (Jaxpr, ClosedJaxpr)) for value in eqn.params.values()):
        return None
    made = tuple(str(v.aval) for v in eqn.outvars)
    try:
        key = (eqn.primitive, read, made, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
        hash(key)
    except TypeError:
        return None
    return key
