"""Elementwise equations of one operand that lies somewhere: how their result lies, and is moved, is their operand's.

For a program that is only asked how it lies these are written short, or not at all: of a U-Net's training step 6,900 of
18,800 equations are such, the optimizer's for most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Literal
from ..ir import Graph
from ..sharding import ELEMENTWISE

_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "max", "min"})


def alone(eqn: Any) -> int | None:
    """The operand of elementwise arithmetic whose other operand is a number written in the program, or of what takes a
    single operand; None: no such, or another shape or type is made of it."""
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or name not in ELEMENTWISE:
        return None
    made, taken = eqn.outvars[0].aval, [v.aval for v in eqn.invars]
    written = [isinstance(v, Literal) for v in eqn.invars]
    if not getattr(made, "shape", ()) or written.count(False) != 1:
        return None
    if len(taken) > 1 and (len(taken) != 2 or name not in _ARITHMETIC or taken[written.index(True)].shape):
        return None
    found = written.index(False)
    if (taken[found].shape, taken[found].dtype) != (made.shape, made.dtype):
        return None
    return found if made.dtype == bool or jnp.issubdtype(made.dtype, np.number) else None


def turned_over(operand: jax.Array) -> jax.Array:
    """What stands for such an equation: the shortest that is one, of numbers their negative."""
    return jax.lax.bitwise_not(operand) if operand.dtype == bool else jax.lax.neg(operand)


def lying_alike(
    graph: Graph, values: Mapping[int, np.ndarray], reads: Mapping[tuple[int, int], np.ndarray]
) -> frozenset[tuple[tuple[int, ...], int]]:
    """The equations, (frame, position), around which nothing is decided to move: what they take and make lies in one
    layout, which all readers read.

    Args:
      values, reads: the decided layout row of every value, and of every operand as it is read.
    """
    numbers: dict[bytes, int] = {}
    of_row: dict[int, int] = {}

    def row(found: np.ndarray | None) -> int:
        # by identity first: a decision's rows are few arrays, which it keeps
        if id(found) not in of_row:
            of_row[id(found)] = -1 if found is None else numbers.setdefault(found.tobytes(), len(numbers))
        return of_row[id(found)]

    uses, leaving = graph.uses(), set(graph.outputs)
    read = {place: row(layout) for place, layout in reads.items()}
    found = set()
    for op in graph.ops:
        if len(op.results) != 1 or op.results[0] in leaving:
            continue
        value = op.results[0]
        site, shape, lies = graph.values[value].site, graph.values[value].shape, row(values.get(value))
        if (
            lies >= 0
            and site is not None
            and all(read.get(place, -1) == lies for place in uses[value])
            and all(
                row(values.get(taken)) == lies == read.get((op.index, i), -1)
                for i, taken in enumerate(op.operands)
                if graph.values[taken].shape == shape
            )
        ):
            found.add((site.frame, site.equation))
    return frozenset(found)


def left_out(jaxpr: Any) -> frozenset[int]:
    """The equations, by position, whose readers may read their operand instead: nobody else reads that, it is made in
    the same body and doesn't leave it.

    Between two operations that nothing else is attached to there is one place to move a tensor, whatever stands there.
    """
    read = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
    read.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    leaving = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    made: set[Any] = set()
    found = set()
    for position, eqn in enumerate(jaxpr.eqns):
        operand = alone(eqn)
        if operand is not None:
            taken = eqn.invars[operand]
            if taken in made and read[taken] == 1 and taken not in leaving:
                found.add(position)
        made.update(eqn.outvars)
    return frozenset(found)
