"""Run a jaxpr again with layouts pinned at chosen places, inside scan, while, cond and remat too."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from .._jax import Literal, as_closed, equation_context, opened, scan_signature
from ..ir import HOST_KIND, Site, call_of, on_host, shape_as, spaces_named
from ..sharding import Layout, runs_locally
from .ahead import Ahead, ahead_of_loops
from .broadcasts import Broadcasts
from .complex_sums import of_two_parts
from .kernels import opaque, run_locally
from .listing import KEPT_CALLS, seen_through
from .outer_products import on_their_own
from .pending import Held, finished, held_as, on_parts
from .repeats import Short
from .starts import SLICES, in_range
from .taken_as_it_lies import alone, left_out, turned_over

Pins = Mapping[Site, tuple[NamedSharding, ...]]
"""Sharding constraints by place; several at one place are applied one after another."""

Pinned = dict[tuple[int, NamedSharding | None], tuple[Any, Any]]
"""What values of one body were brought into already: (identity of a value, layout) -> that value, and as pinned; with
no layout, of a sum in parts -> the parts, and the sum; and of what is pinned where it is made, that twice.

What several read in one layout is brought there once: of constraints of their own, XLA for GPU was seen to make gathers
of their own (activations that two products and a sum read, five all_gathers for two in a layer; jax 0.10.2).
"""

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
      held: the layouts of sums that stay in parts through a loop, see `pending`.
      broadcast: the pinned operands that are broadcast anew for their readers, see `broadcasts`.
      alike: what is made is only asked how it lies, and around these equations, (frame, position), nothing is
        decided to move.  Arithmetic with a number is written with one operand then, which lies, and is moved, the same
        (a third of a network's operations make numbers and broadcast them), or left out, see `taken_as_it_lies`.
    """

    def __init__(
        self,
        pins: Pins,
        scopes: Mapping[tuple[tuple[int, ...], int], str],
        constraints: Constraints,
        mesh: Any,
        layouts: Mapping[Site, Layout],
        held: Mapping[Site, Layout],
        *,
        broadcast: Collection[Site] = (),
        alike: Collection[tuple[tuple[int, ...], int]] | None = None,
    ) -> None:
        self._pins = pins
        self._anew, self._broadcasts = frozenset(broadcast), Broadcasts()
        self._alike = alike
        # few equations have any: the others are not asked for each of their operands and results, or are left out
        self._pinned_at = {(site.frame, site.equation) for site in (*pins, *held, *layouts)}
        self._held = held
        self._scopes = scopes
        self._constraints = constraints
        self._mesh = mesh
        self._layouts = layouts

    def run(
        self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], frame: tuple[int, ...] = (),
        pinned: Pinned | None = None,
    ) -> list[Any]:  # fmt: skip
        """The results of `jaxpr` on `arguments`; `pinned`: of the body around it, where it is part of that."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        pinned = {} if pinned is None else pinned
        for i, (var, argument) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
            env[var] = self._pin(Site(frame, "enter", -1, i), argument, None, pinned)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        waiting = ahead_of_loops(jaxpr)
        passed = frozenset() if self._alike is None else left_out(jaxpr)
        for position, eqn in enumerate(jaxpr.eqns):
            if position in passed and position not in waiting and self._says_nothing((frame, position)):
                env[eqn.outvars[0]] = read(eqn.invars[alone(eqn) or 0])
                continue
            scope = self._scope(frame, position, eqn)
            operands = self._read(eqn, position, map(read, eqn.invars), frame, scope, pinned)
            if position in waiting:
                self._finish(jaxpr, waiting[position], env, operands, frame)
            with equation_context(eqn, scope):
                results = self._equation(eqn, position, operands, frame, scope, pinned)
            results = self._pin_results(eqn, position, results, frame, pinned)
            if self._anew:
                self._broadcasts.note(eqn, operands, results)
            env.update(zip(eqn.outvars, results, strict=True))
        leaving = map(read, jaxpr.outvars)
        return [self._pin(Site(frame, "leave", -1, i), value, None, pinned) for i, value in enumerate(leaving)]

    def _says_nothing(self, place: tuple[tuple[int, ...], int]) -> bool:
        return self._alike is not None and place in self._alike and place not in self._pinned_at

    def _finish(
        self, jaxpr: Any, ahead: Ahead, env: dict[Any, Any], operands: list[Any], frame: tuple[int, ...]
    ) -> None:
        """Tie an operand of a loop to what is finished before it, see `ahead`; both are replaced in place.

        What is read in one layout waits in that, else in the one that is pinned where it is made, and leaves the
        barrier in it: propagation from its readers ends at the pin before.  What is read in several is left out.
        """
        kept: list[tuple[Any, Any]] = []
        layouts: list[Sequence[Any]] = []
        for value, dtype, reads, made in ahead.values:
            array = env[value]
            pins = {self._pins.get(Site(frame, "operand", *read), ()) for read in reads}
            if isinstance(array, Held) or isinstance(operands[ahead.tied], Held) or len(pins) > 1:
                continue
            reader = jaxpr.eqns[reads[0].equation] if reads else None
            with contextlib.nullcontext() if reader is None else equation_context(reader, ""):
                for sharding in next(iter(pins), ()):
                    array = jax.lax.with_sharding_constraint(array, sharding)
                kept.append((value, jax.lax.convert_element_type(array, dtype)))
                layouts.append(next(iter(pins), ()) or self._pins.get(Site(frame, "result", *made), ()))
        if kept:
            finished_ones = [array for _, array in kept]
            operands[ahead.tied], *arrays = jax.lax.optimization_barrier((operands[ahead.tied], *finished_ones))
            for (value, _), array, pinned in zip(kept, arrays, layouts, strict=True):
                array = jax.lax.convert_element_type(array, value.aval.dtype)
                for sharding in pinned[-1:]:  # the type that it is read in again: readers' axes end there
                    array = jax.lax.with_sharding_constraint(array, sharding)
                env[value] = array

    def run_short(self, short: Short, arguments: Sequence[Any]) -> list[Any]:
        """The results that are left of a shortened step, on the arguments that are left of it."""
        env, pinned = dict(short.listing.constants), Pinned()
        env.update(zip((short.listing.arguments[p] for p in short.inputs), arguments, strict=True))
        for index in short.kept:
            frame, position, eqn, operands, results = short.listing.equations[index]
            scope = self._scope(frame, position, eqn)
            given = (env[short.instead.get((index, i), value)] for i, value in enumerate(operands))
            read = self._read(eqn, position, given, frame, scope, pinned)
            with equation_context(eqn, scope):
                made = self._equation(eqn, position, read, frame, scope, pinned)
            env.update(zip(results, self._pin_results(eqn, position, made, frame, pinned), strict=True))
        return [self._pin(Site((), "leave", -1, p), env[short.listing.results[p]], None, pinned) for p in short.outputs]

    def _scope(self, frame: tuple[int, ...], position: int, eqn: Any) -> str:
        """The name of an equation; a call that is seen through is nothing of its own."""
        return "" if seen_through(eqn) else self._scopes.get((frame, position), "")

    def _read(
        self, eqn: Any, position: int, values: Iterable[Any], frame: tuple[int, ...], scope: str, pinned: Pinned
    ) -> list[Any]:
        """An equation's operands: pinned, and finished where it doesn't take sums in parts."""
        there, sliced = (frame, position) in self._pinned_at, eqn.primitive.name in SLICES
        operands = []
        for i, value in enumerate(values):
            if isinstance(value, Held) and not self._takes_parts(eqn, position, frame):
                value = self._summed(value, eqn, scope, pinned, Site(frame, "operand", position, i))
            read = value
            if there:  # few are: no site for each of the others
                site = Site(frame, "operand", position, i)
                value = self._broadcasts.anew(value, eqn) if site in self._anew else value
                read = self._pin(site, value, eqn, pinned)
            apart = sliced and (read is not value or (id(value), None) in pinned)
            operands.append(jax.lax.optimization_barrier(read) if apart else read)
        return operands

    def _summed(self, value: Held, eqn: Any, scope: str, pinned: Pinned, site: Site) -> Any:
        """The sum of what is held in parts: one for all that read it, made for the first."""
        key = id(value), None
        if key not in pinned:
            with equation_context(eqn, scope):
                pinned[key] = value, finished(value, self._mesh, read=self._pins.get(site, ()))
        return pinned[key][1]

    def _takes_parts(self, eqn: Any, position: int, frame: tuple[int, ...]) -> bool:
        loop_or_call = eqn.primitive.name in ("scan", "while") or call_of(eqn) is not None
        return loop_or_call or Site(frame, "result", position, 0) in self._held

    def _pin_results(
        self, eqn: Any, position: int, results: Sequence[Any], frame: tuple[int, ...], pinned: Pinned
    ) -> Sequence[Any]:
        if (frame, position) not in self._pinned_at:
            return results
        made = [self._pin(Site(frame, "result", position, i), result, eqn) for i, result in enumerate(results)]
        pinned.update({(id(one), None): (one, one) for one, was in zip(made, results, strict=True) if one is not was})
        return made

    def _pin(self, site: Site, value: Any, eqn: Any = None, pinned: Pinned | None = None) -> Any:
        if isinstance(value, Held):  # laid out where it was made
            return value
        for sharding in self._pins.get(site, ()):
            key = id(value), sharding
            if pinned is not None and key in pinned:
                value = pinned[key][1]
                continue
            # what is moved here is moved for `eqn`: compiled programs then name the user's line, not this one
            if on_host(jax.typeof(value)):
                sharding = sharding.with_memory_kind(HOST_KIND)
            with contextlib.nullcontext() if eqn is None else equation_context(eqn, ""):
                moved = jax.lax.with_sharding_constraint(value, sharding)
            if pinned is not None:
                pinned[key] = value, moved
            value = moved
        return value

    def _equation(
        self, eqn: Any, position: int, operands: list[Any], frame: tuple[int, ...], scope: str, pinned: Pinned
    ) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        inner = (*frame, position)
        if name == "sharding_constraint":
            stated = self._constraints.get((frame, position))
            return operands if stated is None else [jax.lax.with_sharding_constraint(operands[0], stated)]
        if name == "device_put":
            return list(eqn.primitive.bind(*operands, **spaces_named(params)))
        if name == "reshard":  # of the mesh that the step was written for: its axes aren't Explicit here
            return operands
        called = call_of(eqn)
        if called is not None and name not in KEPT_CALLS:
            arguments = [operands[i] for i in called.positions]
            return self.run(called.jaxpr, called.consts, arguments, inner, pinned)
        result = Site(frame, "result", position, 0)
        if name == "scan":
            return self._scan(eqn, operands, inner)
        if name == "while":
            return self._while(eqn, operands, inner)
        if name in KEPT_CALLS:
            body, tree = self._body(params["jaxpr"], inner, operands)
            changed, constants = {"jaxpr": body}, ()
            if as_closed(params["jaxpr"])[0] is params["jaxpr"]:  # where an open one went in, one must come out
                changed["jaxpr"], constants = opened(body)
                cse = params["prevent_cse"]
                changed["prevent_cse"] = cse if isinstance(cse, bool) else (False,) * len(constants) + cse
            made = eqn.primitive.bind(*constants, *jax.tree.leaves(operands), **{**params, **changed})
            return jax.tree.unflatten(tree, made)
        if name == "cond":
            branches = enumerate(params["branches"])
            changed = {"branches": tuple(self._whole_body(b, (*inner, i), operands[1:]) for i, b in branches)}
        elif result in self._held:
            return [self._on_parts(eqn, position, operands, frame, self._held)]
        elif "callback" in name and isinstance(self._mesh, AbstractMesh):
            return opaque(eqn, operands)
        elif runs_locally(name) or self._finishes_itself(result):
            return run_locally(eqn, operands, frame, position, self._mesh, self._layouts, scope)
        elif result in self._layouts:
            parts = self._on_parts(eqn, position, operands, frame, self._layouts)
            return [finished(parts, self._mesh, scope)]
        elif self._alike is not None and (there := alone(eqn)) is not None:
            return [turned_over(operands[there])]
        elif (whole := of_two_parts(eqn, operands, self._mesh)) is not None:
            return [whole]
        else:
            operands = on_their_own(eqn, in_range(eqn, operands))
            results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
            return results if eqn.primitive.multiple_results else [results]
        return eqn.primitive.bind(*operands, **{**params, **changed})

    def _finishes_itself(self, result: Site) -> bool:
        """Whether an equation runs in a `shard_map` and leaves no sum pending."""
        layout = self._layouts.get(result)
        return layout is not None and not layout.unreduced

    def _on_parts(
        self, eqn: Any, position: int, operands: list[Any], frame: tuple[int, ...], written: Mapping[Site, Layout]
    ) -> Held:
        layouts = [written.get(Site(frame, "operand", position, i)) for i in range(len(operands))]
        return on_parts(eqn, operands, layouts, written[Site(frame, "result", position, 0)], self._mesh)

    def _scan(self, eqn: Any, operands: list[Any], inner: tuple[int, ...]) -> Sequence[Any]:
        """A loop whose carries and stacked results stay in parts where the plan says so."""
        n_consts, n_carry, _, _ = scan_signature(eqn)
        carries = {i: self._held.get(Site(inner, "enter", -1, n_consts + i)) for i in range(n_carry)}
        stacks = {
            i: self._held.get(Site(inner[:-1], "result", inner[-1], i)) for i in range(n_carry, len(eqn.outvars))
        }
        leaves = {
            **carries,
            **{i: x and Layout(dims=x.dims[1:], unreduced=x.unreduced) for i, x in stacks.items()},
        }
        entering = [self._brought(x, carries.get(i - n_consts)) for i, x in enumerate(operands)]
        body, tree = self._body(eqn.params["jaxpr"], inner, entering, leaves, sliced=n_consts + n_carry)
        made = eqn.primitive.bind(*jax.tree.leaves(entering), **{**eqn.params, "jaxpr": body})
        results = jax.tree.unflatten(tree, made)
        for i, layout in stacks.items():
            if layout is not None:  # the loop puts its iterations first, before the parts
                parts = jax.numpy.moveaxis(results[i].parts, 0, len(layout.unreduced))
                results[i] = Held(parts, layout.unreduced, layout.dims)
        return results

    def _while(self, eqn: Any, operands: list[Any], inner: tuple[int, ...]) -> Sequence[Any]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first = n_cond + n_body
        carries = {
            i: self._held.get(Site((*inner, 1), "enter", -1, n_body + i)) for i in range(len(operands) - first)
        }
        entering = [self._brought(x, carries.get(i - first)) for i, x in enumerate(operands)]
        cond, _ = self._body(eqn.params["cond_jaxpr"], (*inner, 0), [*entering[:n_cond], *entering[first:]])
        body, tree = self._body(eqn.params["body_jaxpr"], (*inner, 1), entering[n_cond:], carries)
        changed = {"cond_jaxpr": cond, "body_jaxpr": body}
        made = eqn.primitive.bind(*jax.tree.leaves(entering), **{**eqn.params, **changed})
        return jax.tree.unflatten(tree, made)

    def _brought(self, value: Any, layout: Layout | None) -> Any:
        """`value` in parts as `layout` says, finished where there is none."""
        return finished(value, self._mesh) if layout is None else held_as(value, layout, self._mesh)

    def _whole_body(self, body: Any, frame: tuple[int, ...], operands: Sequence[Any]) -> Any:
        """A branch: its results are finished, as those of the other branches are."""
        count = len(as_closed(body)[0].outvars)
        return self._body(body, frame, operands, dict.fromkeys(range(count)))[0]

    def _body(
        self,
        body: Any,
        frame: tuple[int, ...],
        operands: Sequence[Any],
        leaving: Mapping[int, Layout | None] | None = None,
        sliced: int | None = None,
    ) -> tuple[Any, Any]:
        """`body`, open or closed, with the pins of `frame` and below written in, closed.

        Also the tree of its results, of which some are sums in parts: as `leaving` says by position, or as they come.
        Operands from `sliced` on are given to it in slices.
        """
        jaxpr, consts = as_closed(body)
        shapes: list[Any] = []
        for i, (v, operand) in enumerate(zip(jaxpr.invars, operands, strict=True)):
            shape = shape_as(v.aval)
            if isinstance(operand, Held) and (sliced is None or i < sliced):
                parts = jax.ShapeDtypeStruct(operand.parts.shape, operand.parts.dtype)
                shapes.append(Held(parts, operand.axes, operand.dims))
            else:
                shapes.append(shape)
        flat, tree = jax.tree.flatten(shapes)

        def run(*leaves: Any) -> list[Any]:
            results = self.run(jaxpr, consts, jax.tree.unflatten(tree, leaves), frame)
            if leaving is None:
                return results
            return [self._brought(x, leaving[i]) for i, x in enumerate(results)]

        closed, out = jax.make_jaxpr(run, return_shape=True)(*flat)
        return closed, jax.tree.structure(out)
