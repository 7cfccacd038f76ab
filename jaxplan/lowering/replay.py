"""Run a jaxpr again with layouts pinned at chosen places, inside scan, while, cond and remat too."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._jax import Literal, as_closed, equation_context
from ..ir import Site, call_of
from ..sharding import Layout, runs_locally
from .kernels import run_locally
from .listing import KEPT_CALLS, seen_through
from .repeats import Short

Pins = Mapping[Site, tuple[NamedSharding, ...]]
"""Sharding constraints by place; several at one place are applied one after another."""

Constraints = Mapping[tuple[tuple[int, ...], int], NamedSharding]
"""What the step's own sharding constraints say, by frame and equation."""


class Replay:
    """Evaluates a jaxpr under a jax trace with `pins` applied; `scopes` names equations for the partitioner's report.

    Args:
      pins: what to constrain where.
      scopes: (frame, equation) -> the name of its `jax.named_scope`.
      constraints: (frame, equation) of the step's own `with_sharding_constraint` -> what it says on the plan's mesh.
        One that isn't here is left out.
      mesh, layouts: for operations that run in a `shard_map` of their own, see `kernels`.
    """

    def __init__(
        self,
        pins: Pins,
        scopes: Mapping[tuple[tuple[int, ...], int], str],
        constraints: Constraints,
        mesh: Any,
        layouts: Mapping[Site, Layout],
    ) -> None:
        self._pins = pins
        self._scopes = scopes
        self._constraints = constraints
        self._mesh = mesh
        self._layouts = layouts

    def run(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], frame: tuple[int, ...] = ()
    ) -> list[Any]:
        """The results of `jaxpr` on `arguments`."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        for i, (var, argument) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
            env[var] = self._pin(Site(frame, "enter", -1, i), argument)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for position, eqn in enumerate(jaxpr.eqns):
            operands = [
                self._pin(Site(frame, "operand", position, i), read(atom), eqn)
                for i, atom in enumerate(eqn.invars)
            ]
            scope = self._scope(frame, position, eqn)
            with equation_context(eqn, scope):
                results = self._equation(eqn, position, operands, frame, scope)
            for i, (var, result) in enumerate(zip(eqn.outvars, results, strict=True)):
                env[var] = self._pin(Site(frame, "result", position, i), result, eqn)
        return [self._pin(Site(frame, "leave", -1, i), read(atom)) for i, atom in enumerate(jaxpr.outvars)]

    def run_short(self, short: Short, arguments: Sequence[Any]) -> list[Any]:
        """The results that are left of a shortened step, on the arguments that are left of it."""
        env = dict(short.listing.constants)
        env.update(zip((short.listing.arguments[p] for p in short.inputs), arguments, strict=True))
        for index in short.kept:
            frame, position, eqn, operands, results = short.listing.equations[index]
            read = [
                self._pin(Site(frame, "operand", position, i), env[short.instead.get((index, i), value)], eqn)
                for i, value in enumerate(operands)
            ]
            scope = self._scope(frame, position, eqn)
            with equation_context(eqn, scope):
                made = self._equation(eqn, position, read, frame, scope)
            for i, (value, result) in enumerate(zip(results, made, strict=True)):
                env[value] = self._pin(Site(frame, "result", position, i), result, eqn)
        return [env[short.listing.results[p]] for p in short.outputs]

    def _scope(self, frame: tuple[int, ...], position: int, eqn: Any) -> str:
        """The name of an equation; a call that is seen through is nothing of its own."""
        return "" if seen_through(eqn) else self._scopes.get((frame, position), "")

    def _pin(self, site: Site, value: Any, eqn: Any = None) -> Any:
        for sharding in self._pins.get(site, ()):
            # what is moved here is moved for `eqn`: compiled programs then name the user's line, not this one
            with contextlib.nullcontext() if eqn is None else equation_context(eqn, ""):
                value = jax.lax.with_sharding_constraint(value, sharding)
        return value

    def _equation(
        self, eqn: Any, position: int, operands: list[Any], frame: tuple[int, ...], scope: str
    ) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = (*frame, position)
        if name == "sharding_constraint":
            stated = self._constraints.get((frame, position))
            return operands if stated is None else [jax.lax.with_sharding_constraint(operands[0], stated)]
        called = call_of(eqn)
        if called is not None and name not in KEPT_CALLS:
            arguments = [operands[i] for i in called.positions]
            return self.run(called.jaxpr, called.consts, arguments, inner)
        if name in KEPT_CALLS or name == "scan":
            changed = {"jaxpr": self._body(params["jaxpr"], inner)}
        elif name == "while":
            changed = {
                "cond_jaxpr": self._body(params["cond_jaxpr"], (*inner, 0)),
                "body_jaxpr": self._body(params["body_jaxpr"], (*inner, 1)),
            }
        elif name == "cond":
            changed = {
                "branches": tuple(self._body(b, (*inner, i)) for i, b in enumerate(params["branches"]))
            }
        elif runs_locally(name):
            return run_locally(eqn, operands, frame, position, self._mesh, self._layouts, scope)
        else:
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
            return results if eqn.primitive.multiple_results else [results]
        return eqn.primitive.bind(*operands, **{**params, **changed})

    def _body(self, body: Any, frame: tuple[int, ...]) -> Any:
        """`body` (open or closed, as its primitive wants it) with the pins of `frame` and below written in."""
        jaxpr, consts = as_closed(body)
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in jaxpr.invars
        ]
        closed = jax.make_jaxpr(lambda *arguments: self.run(jaxpr, consts, arguments, frame))(*shapes)
        if (
            jaxpr is body and as_closed(closed)[0] is not closed
        ):  # an open Jaxpr went in, an open one must come out
            if closed.consts:
                raise AssertionError(f"a remat body captured {len(closed.consts)} constants")
            return closed.jaxpr
        return closed
