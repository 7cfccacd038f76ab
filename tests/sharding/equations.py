"""One equation taken out of traced code, with the values that reach it; and compiling it in a layout."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxplan._jax import Literal, as_closed
from jaxplan.ir import Site, call_of
from jaxplan.lowering.kernels import run_locally
from jaxplan.lowering.pending import finished, on_parts
from jaxplan.sharding import UNREDUCED, Layout, is_cut_locally, runs_locally, sums_locally
from jaxplan.sharding.rule import OpShapes
from jaxplan.sharding.spec import layout_of_places
from jaxplan.sharding.strategy import Strategies

from .cases import Case


@dataclass(frozen=True, kw_only=True)
class Equation:
    """A primitive with its parameters as a function of arrays, the arrays, its shapes for a rule, and its equation
    where there is one."""

    fn: Callable[..., tuple[Any, ...]]
    operands: tuple[Any, ...]
    shapes: OpShapes
    eqn: Any = None


class _Found(Exception):
    """Ends the walk; carries the equation and its operands' values."""


def _walk(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], primitive: str) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name == primitive:
            raise _Found(eqn, values)
        called = call_of(eqn)
        if called is not None:
            arguments = [values[i] for i in called.positions]
            results = _walk(called.jaxpr, called.consts, arguments, primitive)
        else:
            made = eqn.primitive.bind(*values, **eqn.params)
            results = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


@functools.cache
def equation(case: Case) -> Equation:
    """The first equation of the case's primitive; fails when the traced code has none."""
    args = [jax.numpy.asarray(a) for a in case.args]
    if case.stands_in:
        return _equation(case.primitive, case.params, args, lambda *xs: tuple(jax.tree.leaves(case.fn(*xs))))
    lowered = jax.jit(case.fn).trace(*args).lojax
    jaxpr, consts = as_closed(lowered.jaxpr)
    try:
        _walk(jaxpr, consts, args, case.primitive)
    except _Found as found:
        eqn, values = found.args
    else:
        raise AssertionError(f"case {case}: the traced code has no `{case.primitive}`:\n{jaxpr}")

    def fn(*operands: Any) -> tuple[Any, ...]:
        made = eqn.primitive.bind(*operands, **eqn.params)
        return tuple(made) if eqn.primitive.multiple_results else (made,)

    return _equation(case.primitive, eqn.params, values, fn, eqn)


def _equation(
    primitive: str,
    params: Any,
    values: Sequence[Any],
    fn: Callable[..., Any],
    eqn: Any = None,
) -> Equation:
    operands = tuple(jax.numpy.asarray(v) for v in values)
    results = jax.eval_shape(fn, *operands) if eqn is None else [v.aval for v in eqn.outvars]
    return Equation(
        fn=fn,
        eqn=eqn,
        operands=operands,
        shapes=OpShapes(
            primitive=primitive,
            params=params,
            operands=tuple(tuple(v.shape) for v in operands),
            results=tuple(tuple(v.shape) for v in results),
            operand_dtypes=tuple(str(v.dtype) for v in operands),
            result_dtypes=tuple(str(v.dtype) for v in results),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the compiler made of one operation in one or more layouts.

    Attributes:
      results: of each strategy, on the host.
      collectives: how often each (kind, devices in a group) occurs.
    """

    results: tuple[tuple[np.ndarray, ...], ...]
    collectives: Counter[tuple[str, int]]


def run_strategies(eq: Equation, found: Strategies, mesh: Mesh, chosen: Sequence[int]) -> Program:
    """Run the chosen strategies in one program, each on its own copy of the operands."""
    compiled = _compiled(eq, found, mesh, chosen)
    # From the host: what lies on one device would be cut there, by a program compiled for each layout.
    hosted = [x if _is_key(x) else np.asarray(x) for x in eq.operands]
    rows = compiled([hosted for _ in chosen])
    return Program(
        results=tuple(tuple(plain(x) for x in row) for row in rows),
        collectives=collectives(compiled.as_text(), mesh.size),
    )


def compile_strategies(
    eq: Equation, found: Strategies, mesh: Mesh, chosen: Sequence[int]
) -> Counter[tuple[str, int]]:
    """The collectives of a program that runs the chosen strategies; the mesh need not be able to."""
    compiled = _compiled(eq, found, mesh, chosen)
    return collectives(compiled.as_text(), mesh.size)


def _compiled(eq: Equation, found: Strategies, mesh: Mesh, chosen: Sequence[int]) -> Any:
    """A result that is a pending sum is asked for in its layout without the pending axes, or made as plans make it."""
    axes = tuple(mesh.shape.items())

    def shardings(
        tensors: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]
    ) -> list[list[NamedSharding]]:
        return [
            [
                NamedSharding(mesh, layout_of_places(places[s], len(shape), axes).spec())
                for places, shape in zip(tensors, shapes, strict=True)
            ]
            for s in chosen
        ]

    ins = shardings(found.operands, eq.shapes.operands)
    outs = shardings(found.results, eq.shapes.results)
    shapes = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in eq.operands] for _ in chosen]

    def layouts(s: int) -> list[list[Layout]]:
        sides = ((found.operands, eq.shapes.operands), (found.results, eq.shapes.results))
        return [
            [layout_of_places(places[s], len(shape), axes) for places, shape in zip(*side, strict=True)]
            for side in sides
        ]

    def one(s: int, operands: list[Any]) -> list[Any]:
        first = found.operands[0][s] if found.operands else ()
        if runs_locally(eq.shapes.primitive) or is_cut_locally(eq.eqn, first):
            sides = zip(("operand", "result"), layouts(s), strict=True)
            specs = {Site((), kind, 0, i): layout for kind, side in sides for i, layout in enumerate(side)}
            return run_locally(eq.eqn, operands, (), 0, mesh, specs, "cut")
        in_parts = any((places[s] == UNREDUCED).any() for places in found.results)
        if in_parts and sums_locally(eq.shapes.primitive, eq.shapes.params):
            held = on_parts(eq.eqn, operands, layouts(s)[0], layouts(s)[1][0], mesh)
            return [finished(held, mesh, "sum")]
        return list(eq.fn(*operands))

    def every(many: list[list[Any]]) -> list[list[Any]]:
        return [one(s, operands) for s, operands in zip(chosen, many, strict=True)]

    return jax.jit(every, in_shardings=(ins,), out_shardings=outs).lower(shapes).compile()


_KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
_COLLECTIVE = re.compile(rf" ({_KINDS})(?:-start)?\(")
_GROUPS = re.compile(r"replica_groups=(.*?)(?:, (?!device_ids)\w+=|$)")


def collectives(hlo: str, devices: int) -> Counter[tuple[str, int]]:
    """(kind, devices in a group) of every collective in the text of a compiled module."""
    found: Counter[tuple[str, int]] = Counter()
    for line in hlo.splitlines():
        if match := _COLLECTIVE.search(line):
            groups = _GROUPS.search(line)
            found[match[1], _group_size(groups[1] if groups else "", devices)] += 1
    return found


def _group_size(groups: str, devices: int) -> int:
    """Devices in a group, from XLA's spellings (`{}` and none at all mean every device)."""
    if groups.startswith("mesh["):
        declared, _, used = groups.rpartition("{")
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", declared)}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", used)  # 'axis':(2)4 is a part of an axis, 4 long
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota[1])
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return listed[1].count(",") + 1
    return devices


def _is_key(x: Any) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def plain(x: Any) -> np.ndarray:
    """The array on the host; keys as their words."""
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)
