"""What is computed of the same operands more than once, once.

XLA merges equal instructions whatever they are for: the squares of which a gradient's norm is the sum are those by
which it is clipped, five losses under one mask multiply by it alike.  Here they are one operation too, in one layout,
and what is made of them is sent once.  What costs nothing wherever it is read stays apart: there is nothing to save,
and each reader may have it as it lies best for that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._jax import DropVar, Literal
from .flatten import SEEN_THROUGH
from .graph import VIEWS

_CALLS = frozenset({"jit", "pjit"})
_APART = frozenset({"scan", "while", "cond", "optimization_barrier", "copy", "copy_p", "shard_map", "device_put"})
"""What is left as it is: what runs long is not repeated, and barriers and copies are asked for."""
_MADE_ANEW = VIEWS | {"broadcast_in_dim", "convert_element_type", "iota"}
"""What costs nothing wherever it is read: known to be alike, and left apart."""


def computed_once(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations without those that compute of the same operands what one before them did; what is made anew at no
    price wherever it is read stays apart."""
    kept, known, alike, instead = list[Any](), dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()
    needed = {v for v in results if not isinstance(v, Literal)}
    for eqn in equations:
        read = [v if isinstance(v, Literal) else instead.get(v, v) for v in eqn.invars]
        if any(a is not b for a, b in zip(read, eqn.invars, strict=True)):
            eqn = eqn.replace(invars=read)
        key = _key(eqn, alike)
        before = known.setdefault(key, eqn) if key is not None else eqn
        made = list(zip(eqn.outvars, before.outvars, strict=True))
        if before is eqn or any(isinstance(b, DropVar) and not isinstance(a, DropVar) for a, b in made):
            kept.append(eqn)
            continue
        alike.update((a, alike.get(b, b)) for a, b in made)
        if eqn.primitive.name in _MADE_ANEW or needed.intersection(eqn.outvars):
            kept.append(eqn)
        else:
            instead.update(made)
    return kept


def _key(eqn: Any, alike: Mapping[Any, Any]) -> Any:
    """What equal equations have in common; None of those that are left as they are."""
    name = eqn.primitive.name
    call = name in _CALLS
    if eqn.effects or not eqn.invars or name in _APART or (name in SEEN_THROUGH and not call):
        return None
    if not call and any(isinstance(value, (Jaxpr, ClosedJaxpr)) for value in eqn.params.values()):
        return None
    read = tuple(
        (type(v.val), str(v.val), str(v.aval)) if isinstance(v, Literal) else id(alike.get(v, v)) for v in eqn.invars
    )
    made = tuple(str(v.aval) for v in eqn.outvars)
    try:
        key = (eqn.primitive, read, made, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
        hash(key)
    except TypeError:
        return None
    return key
