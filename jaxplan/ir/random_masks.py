"""Random masks of what is normalised, kept apart from that: on some TPUs XLA fails to make both in one kernel well.

A softmax in f32 that is rounded to bf16 and then dropped out of, by `jax.random`'s default generator, becomes one
kernel, in which each number that the generator adds and shifts by is an operand of the scores' size, written to memory
before: 32 of them, 8.6 GB for scores of f32[4, 16, 1024, 1024] where 0.2 are enough.  So does what else is divided by
sums of a dimension and rounded.  It is so in plain jax too, where no softmax is kept: in a forward pass, or a layer
that is computed again; on v5e of rows of 640, 1000, 1024, 1280, 1408 and 1664, on v6e of 1280, not of others (of 256 to
2048), nor on v5p and v7x.  Of f32 throughout, of sums of bf16, of masks that are multiplied or smaller, and of layer
normalisations nothing of the sort is seen (jax 0.10.2 and 0.12.0, libtpu 0.0.42.1 and 0.0.50.1, 2026-11-27).  Behind a
barrier the mask is a kernel of its own, which writes one byte an element.

A mask waits for nothing but a key then: XLA makes those of four layers in one kernel, all of them ahead of the first
layer, to which they are kept (a Whisper whose 24 layers are computed again: 1.2 GB on v5e of 3.7).  So the key of one
waits for what its scores are multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from .._jax import Literal
from .flatten import call_of
from .graph import Graph
from .insides import ELEMENTWISE
from .rewriting import like, rewritten

_MOVES = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"})

_OF_BITS = frozenset(
    {"add", "and", "bitcast_convert_type", "clamp", "concatenate", "ge", "gt", "le", "lt", "max", "min", "mul", "ne",
     "not", "or", "shift_right_logical", "slice", "sub", "xor"}
)  # fmt: skip
"""What makes numbers, and then choices, of random bits."""


def random_masks(graph: Graph) -> list[tuple[Any, int]]:
    """(equation, which of its results) of the masks by which a step chooses of what is divided by its sums and rounded
    to bf16."""
    found = []
    for op in graph.ops:
        mask = op.operands[0] if op.primitive == "select_n" else -1
        if mask < 0 or math.prod(graph.values[mask].shape) == 1:
            continue
        if any(_is_rounded(graph, v) for v in op.operands[1:]) and _is_random(graph, mask):
            maker = graph.ops[graph.producers()[mask]]
            found.append((maker.equation, maker.results.index(mask)))
    return found


def _is_rounded(graph: Graph, value: int) -> bool:
    """Whether a value is elementwise made of one tensor alone that is divided by its sums and rounded to bf16."""
    producers, rounded = graph.producers(), False
    while (maker := producers[value]) >= 0:
        op, size = graph.ops[maker], math.prod(graph.values[value].shape)
        if op.primitive == "div" and rounded and _is_summed(graph, op.operands[1]):
            return True
        large = [v for v in op.operands if math.prod(graph.values[v].shape) == size]
        if op.primitive not in ELEMENTWISE | _MOVES or len(large) != 1:
            return False
        to_bf16 = graph.values[value].dtype == "bfloat16"
        rounded = rounded or (to_bf16 and graph.values[large[0]].dtype == "float32")
        value = large[0]
    return False


def _is_summed(graph: Graph, value: int) -> bool:
    producers = graph.producers()
    while (maker := producers[value]) >= 0 and graph.ops[maker].primitive in _MOVES:
        value = graph.ops[maker].operands[0]
    return maker >= 0 and graph.ops[maker].primitive == "reduce_sum"


def _is_random(graph: Graph, mask: int) -> bool:
    """Whether a mask is elementwise made of random bits, by jax's default generator, of as many elements."""
    producers, seen, left = graph.producers(), set[int](), [mask]
    while left:
        value = left.pop()
        if value in seen or (maker := producers[value]) < 0:
            continue
        seen.add(value)
        op = graph.ops[maker]
        if op.primitive == "random_bits":
            return "fry" in graph.values[op.operands[0]].dtype
        if op.primitive in _OF_BITS | _MOVES:
            size = math.prod(graph.values[value].shape)
            left += [v for v in op.operands if math.prod(graph.values[v].shape) == size]
    return False


def behind_barriers(jaxpr: Any, made: Sequence[tuple[Any, int]]) -> Any:
    """`jaxpr` (open) with these results of equations read behind a barrier."""
    barrier = _barrier(0)
    apart = {id(eqn): position for eqn, position in made}

    def change(equations: list[Any], results: Any) -> list[Any]:
        changed: list[Any] = []
        for eqn in equations:
            if (position := apart.get(id(eqn))) is None:
                changed.append(eqn)
                continue
            read = eqn.outvars[position]
            before = like(read, read.aval.shape)
            outvars = [*eqn.outvars[:position], before, *eqn.outvars[position + 1 :]]
            wall = barrier.replace(invars=[before], outvars=[read], source_info=eqn.source_info)
            changed += [eqn.replace(outvars=outvars), wall]
        return changed

    return rewritten(jaxpr, [change, _waiting])


def _barrier(*of: Any) -> Any:
    return jax.make_jaxpr(lambda *values: jax.lax.optimization_barrier(values))(*of).eqns[0]


def _waiting(equations: list[Any], results: Any) -> list[Any]:
    """Equations in which the key of a mask is read together with the other operand of the product behind the mask.

    Of masks that calls make, as `jax.random.bernoulli` is one; both are read behind one barrier, or XLA drops it.
    """
    made = {v: position for position, eqn in enumerate(equations) for v in eqn.outvars}
    barrier = _barrier(0, 0)
    walls: dict[int, Any] = {}
    instead: dict[tuple[int, int], Any] = {}
    for position, product in enumerate(equations):
        if product.primitive.name != "dot_general":
            continue
        for place, read in enumerate(product.invars):
            call, other = _mask_behind(equations, made, read), product.invars[1 - place]
            if call < 0 or call in walls or isinstance(other, Literal) or made.get(other, -1) > call:
                continue
            keys = [i for i, v in enumerate(equations[call].invars) if _is_key(v)]
            if keys and not _is_key(other):
                key = equations[call].invars[keys[0]]
                outvars = [like(v, v.aval.shape) for v in (key, other)]
                walls[call] = barrier.replace(
                    invars=[key, other], outvars=outvars, source_info=equations[call].source_info
                )
                instead[call, keys[0]], instead[position, 1 - place] = outvars
    changed: list[Any] = []
    for position, eqn in enumerate(equations):
        changed += [walls[position]] if position in walls else []
        read = [instead.get((position, i), v) for i, v in enumerate(eqn.invars)]
        changed.append(eqn if all(a is b for a, b in zip(read, eqn.invars, strict=True)) else eqn.replace(invars=read))
    return changed if walls else equations


def _is_key(atom: Any) -> bool:
    return not isinstance(atom, Literal) and jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)


def _mask_behind(equations: Sequence[Any], made: dict[Any, int], read: Any) -> int:
    """The equation that calls for the mask of what `read` is elementwise made of; -1: there is none."""
    seen, left = set[int](), [read]
    while left:
        value = left.pop()
        position = -1 if isinstance(value, Literal) else made.get(value, -1)
        if position < 0 or position in seen:
            continue
        seen.add(position)
        eqn = equations[position]
        called = call_of(eqn)
        if called is not None and value.aval.dtype == bool and any(map(_is_wall, called.jaxpr.eqns)):
            return position
        if called is not None or eqn.primitive.name in ELEMENTWISE | _MOVES:
            left += [v for v in eqn.invars if v.aval.size == value.aval.size]
    return -1


def _is_wall(eqn: Any) -> bool:
    """Whether an equation is the barrier behind a mask, or calls for one."""
    if eqn.primitive.name == "optimization_barrier":
        return len(eqn.outvars) == 1 and eqn.outvars[0].aval.dtype == bool
    called = call_of(eqn)
    return called is not None and any(_is_wall(inner) for inner in called.jaxpr.eqns)
