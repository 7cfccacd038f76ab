"""Products that a loop computes anew in each iteration of what it doesn't change: made once, before it.

A decoder that attends to an encoder's results makes their keys and values in each step of a generation, where nobody
keeps them.  XLA for TPU takes them out of the loop; XLA for GPU and CPU do not, and spend most of the time on them.
Here they are one operation before the loop everywhere, which is priced once and in memory until the loop ends, with
what they are made of, and what is elementwise made of them at once (a bias added).  Heads are split off inside, as XLA
lays what loops read out in the order of its dimensions: bf16[32, 512, 12, 64] takes 67 MB on TPU, [32, 512, 768] 25.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._jax import DropVar, Literal, as_closed, scan_signature, with_constants
from .flatten import SEEN_THROUGH, call_of

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
_MADE_AT_ONCE = frozenset({"add", "sub", "mul", "div", "convert_element_type"})
_APART = frozenset(
    {"scan", "while", "cond", "optimization_barrier", "shard_map", "device_put", "sharding_constraint"}
    | {"checkpoint", "remat", "remat2", "remat_opt"}  # asked to be made anew
)
_LARGER = 2
"""How many times the operands' size a product may make, to be kept for all of a loop."""


class _Loop(NamedTuple):
    """A loop's body, and for what it reads and doesn't change what that is outside."""

    body: Any
    outside: Mapping[Any, Any]


def made_before_loops(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations of a jaxpr with such products before its loops."""
    del results
    found: list[Any] = []
    for eqn in equations:
        found += _parted(eqn, loop) if (loop := _loop(eqn)) is not None and loop.outside else [eqn]
    return found


def _loop(eqn: Any) -> _Loop | None:
    params = eqn.params
    if eqn.primitive.name == "scan":
        signature = scan_signature(eqn)
        body, constants, before = signature.jaxpr, signature.n_consts, 0
        carried = signature.n_carry
    elif eqn.primitive.name == "while":
        body, constants, before = params["body_jaxpr"], params["body_nconsts"], params["cond_nconsts"]
        carried = len(eqn.outvars)
    else:
        return None
    jaxpr, _ = as_closed(body)
    same = [*range(constants)]
    same += [constants + i for i in range(carried) if jaxpr.outvars[i] is jaxpr.invars[constants + i]]
    return _Loop(body, {jaxpr.invars[i]: eqn.invars[before + i] for i in same})


def _parted(eqn: Any, loop: _Loop) -> list[Any]:
    """The products, with what is moved beside them, and the loop without."""
    jaxpr, _ = as_closed(loop.body)
    moved = _moved(jaxpr.eqns, loop.outside)
    if not moved:
        return [eqn]
    ids = {id(inner) for inner in moved}
    rest = [inner for inner in jaxpr.eqns if id(inner) not in ids]
    read = {v for inner in rest for v in inner.invars if not isinstance(v, Literal)}
    read.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    known, before, handed = dict(loop.outside), list[Any](), list[Any]()
    for inner in moved:
        own = [v if isinstance(v, DropVar) else copy.copy(v) for v in inner.outvars]
        reads = [v if isinstance(v, Literal) else known[v] for v in inner.invars]
        before.append(inner.replace(invars=reads, outvars=own))
        known.update(zip(inner.outvars, own, strict=True))
        handed += [v for v in inner.outvars if v in read]
    return [*before, with_constants(eqn, rest, handed, [known[v] for v in handed])]


def _moved(equations: Sequence[Any], outside: Mapping[Any, Any]) -> list[Any]:
    """Equations to be moved out of a body that reads and doesn't change what is `outside`, in order."""
    makers: dict[Any, Any] = {}
    products, still = list[Any](), list[Any]()
    for eqn in equations:
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.effects or not _is_plain(eqn) or not all(v in outside or v in makers for v in read):
            continue
        makers.update((v, eqn) for v in eqn.outvars)
        still.append(eqn)
        if _has_product(eqn) and _bytes(eqn.outvars) <= _LARGER * _bytes(read):
            products.append(eqn)
    chosen = set[int]()

    def choose(eqn: Any) -> None:
        waiting = [eqn]
        while waiting:
            eqn = waiting.pop()
            if id(eqn) not in chosen:
                chosen.add(id(eqn))
                waiting += [makers[v] for v in eqn.invars if not isinstance(v, Literal) and v in makers]

    for eqn in products:
        choose(eqn)
    for eqn in still if products else ():
        made = [v for v in eqn.invars if not isinstance(v, Literal) and v in makers and id(makers[v]) in chosen]
        if made and eqn.primitive.name in _MADE_AT_ONCE and _bytes(eqn.outvars) <= _bytes(made):
            choose(eqn)
    return [eqn for eqn in still if id(eqn) in chosen]


def _is_plain(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name not in _APART and (name not in SEEN_THROUGH or call_of(eqn) is not None)


def _has_product(eqn: Any) -> bool:
    if eqn.primitive.name in _PRODUCTS:
        return True
    called = call_of(eqn)
    return called is not None and any(_has_product(inner) for inner in called.jaxpr.eqns)


def _bytes(variables: Sequence[Any]) -> float:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables if hasattr(v.aval, "shape"))
