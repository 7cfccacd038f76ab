"""One plan of a step and the jitted function made from it: what runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from ..errors import ArgumentError, PlanMismatchError
from ..ir import Traced, on_host, shape_as
from ..lowering import planned_function, sharding_of
from ..plans import Plan
from .arguments import (
    brought_over,
    cut_copies,
    describe_deleted,
    describe_misplaced,
    is_explicit,
    outside_any_mesh,
    shape_of,
    without_repeats,
)
from .held import Held, peak_as_compiled
from .meshes import Target


def bound_plan(plan: Plan, traced: Traced, target: Target) -> Plan:
    """A plan from a file, for this step; refused when the step's leaves or program are not those it was made for."""
    bound = plan.bind_leaves(traced.inputs, traced.outputs, traced.in_tree, traced.out_tree, target.mesh)
    if plan.fingerprint != traced.fingerprint and plan.jax_version == jax.__version__:
        raise PlanMismatchError(
            f"the plan was made for another program than `{traced.name}`: all its leaves agree, but its computation "
            f"differs (fingerprint {plan.fingerprint} in the plan, {traced.fingerprint} now). Plan it again."
        )
    return bound


class OtherSignature(Exception):
    """Raised while jax traces a planned step for arguments that it was not planned for."""


class ExplicitArguments(Exception):
    """Raised while jax traces a planned step for arrays whose mesh axes are Explicit."""


class Variant:
    """One plan and the jitted step made from it; another plan once the first is compiled to more than its budget."""

    def __init__(
        self, traced: Traced, plan: Plan, target: Target, donate: Sequence[int], has_kwargs: bool, held: Held | None
    ) -> None:
        """`held`: makes that other plan; None: the plan stays, whatever is compiled."""
        self.traced, self.plan, self.target = traced, plan, target
        self._held = held
        self._former: tuple[Any, ...] = ()  # `in_trees` of earlier plans, which arguments may still lie by
        self.donate, self.has_kwargs = tuple(donate), has_kwargs
        # Set by the first call with such arguments, so that later ones need no failed trace.
        self.takes_explicit = False
        self._hosted = [i for i, tensor in enumerate(plan.inputs) if tensor.host]

    @functools.cached_property
    def _run(self) -> Callable[..., list[Any]]:
        return planned_function(self.traced, self.plan.constraints, self.target.mesh)

    @functools.cached_property
    def in_trees(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """NamedShardings in the structure of (dynamic args, dynamic kwargs)."""
        leaves = [sharding_of(self.target.mesh, tensor.layout, tensor.host) for tensor in self.plan.inputs]
        args, kwargs = jax.tree.unflatten(self.traced.in_tree, leaves)
        return tuple(args), dict(kwargs)

    @functools.cached_property
    def out_tree(self) -> Any:
        leaves = [sharding_of(self.target.mesh, tensor.layout, tensor.host) for tensor in self.plan.outputs]
        return jax.tree.unflatten(self.traced.out_tree, leaves)

    def shardings_like(self, shapes: Any) -> Any:
        """The shardings of the argument that has this structure and these shapes; of several, for a tuple of such.

        None where there is none.
        """
        wanted = [(s.shape, s.dtype) for s in jax.tree.leaves(shapes)]
        tree: Any = jax.tree.structure(shapes)
        first = 0
        for shardings in self.in_trees[0]:
            size = len(jax.tree.leaves(shardings))
            planned = self.traced.jaxpr.invars[first : first + size]
            first += size
            if jax.tree.structure(shardings) == tree:
                if [(v.aval.shape, v.aval.dtype) for v in planned] == wanted:
                    return shardings
        if type(shapes) is not tuple or not shapes:
            return None
        parts = tuple(self.shardings_like(part) for part in shapes)
        return None if any(part is None for part in parts) else parts

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The planned step, traced by jax; refuses arguments of another signature than the plan's."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.traced.in_tree:
            raise OtherSignature
        for leaf, planned in zip(leaves, self.traced.jaxpr.invars, strict=True):
            aval = jax.typeof(leaf)
            known = planned.aval
            if (aval.shape, aval.dtype, aval.weak_type) != (known.shape, known.dtype, known.weak_type):
                raise OtherSignature
            if on_host(aval) != on_host(known):
                raise OtherSignature
            if is_explicit(aval):
                raise ExplicitArguments
        return jax.tree.unflatten(self.traced.out_tree, self._run(*leaves))

    @functools.cached_property
    def jitted(self) -> Any:
        """jax.jit of the planned step over the dynamic arguments."""
        if self.has_kwargs:  # jax.jit takes no in_shardings for keywords: `lower` states them with the shapes
            return jax.jit(self._named(), out_shardings=self.out_tree, donate_argnums=self.donate)
        return jax.jit(
            self._named(),
            in_shardings=self.in_trees[0],
            out_shardings=self.out_tree,
            donate_argnums=self.donate,
        )

    def _named(self) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            return self.apply(*args, **kwargs)

        step.__name__ = step.__qualname__ = self.traced.name
        return step

    @functools.cached_property
    def jitted_with_keywords(self) -> Any:
        """`jitted` called as (*args, kwargs): jax.jit takes in_shardings for positions alone."""

        def step(*args: Any) -> Any:
            return self.apply(*args[:-1], **args[-1])

        step.__name__ = step.__qualname__ = self.traced.name
        args_shardings, kwargs_shardings = self.in_trees
        return jax.jit(
            step,
            in_shardings=(*args_shardings, kwargs_shardings),
            out_shardings=self.out_tree,
            donate_argnums=self.donate,
        )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step on its dynamic arguments.

        Raises:
          OtherSignature: they are not those that it was planned for.
        """
        if self._hosted:
            args, kwargs = self._on_the_host(args, kwargs)
        if self.donate:
            args, kwargs = without_repeats(args, kwargs, self.donate)
        try:
            return self._call(args, kwargs)
        except ExplicitArguments:
            self.takes_explicit = True
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with outside_any_mesh():
                if self.takes_explicit:
                    args, kwargs = self._without_explicit(args, kwargs)
                if self._held is not None:
                    self._hold(args, kwargs)
                return self.jitted_with_keywords(*args, kwargs) if kwargs else self.jitted(*args)
        except ValueError as error:
            cut = cut_copies(error, self.in_trees, args, kwargs)
            if cut is None and self._former:
                cut = brought_over(error, self.in_trees, self._former, self.donate, args, kwargs)
            if cut is None:
                raise describe_misplaced(error, self.plan, self.in_trees, args, kwargs) from error
        except RuntimeError as error:
            self.say_deleted(error, args, kwargs)
            raise
        return self._call(*cut)

    def _hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for these arguments, as their call does (jax keeps it); plan anew where that overruns, or fails."""
        jitted, arguments = (self.jitted_with_keywords, (*args, kwargs)) if kwargs else (self.jitted, args)

        def compile_step() -> Any:
            if adopted:  # by shapes: arguments are moved to where a plan wants them once it holds
                return self.lower(args, kwargs).compile()
            return jitted.lower(*arguments).compile()

        held, adopted = self._held, False
        assert held is not None
        while True:
            try:
                peak_bytes = peak_as_compiled(compile_step)
            except jax.errors.JaxRuntimeError as failure:
                if not held.instead(failure):
                    raise
            else:
                self._held = None
                if peak_bytes is None or not held.again(peak_bytes):
                    break
            self._adopt(held.plan)
            adopted = True
        self._adopt(held.plan)

    def _adopt(self, plan: Plan) -> None:
        before, self.plan = self.plan, plan
        if plan.lies_as(before):
            return
        self._former = (*self._former, self.in_trees)
        for made in ("in_trees", "out_tree", "jitted", "jitted_with_keywords", "_run"):
            self.__dict__.pop(made, None)

    def say_deleted(self, error: RuntimeError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises an ArgumentError that names what is deleted, where that is the error."""
        described = describe_deleted(self.plan, args, kwargs)
        if described:
            raise ArgumentError(described) from error

    def _on_the_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with those brought to the host's memory that are planned there, as before a first step."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        planned = self.traced.jaxpr.invars
        if tree != self.traced.in_tree or any(np.shape(leaves[i]) != planned[i].aval.shape for i in self._hosted):
            raise OtherSignature
        away = [i for i in self._hosted if not on_host(leaves[i])]
        shardings = jax.tree.leaves(self.in_trees)
        for i, leaf in zip(away, jax.device_put([leaves[i] for i in away], [shardings[i] for i in away]), strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    def _without_explicit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arrays whose mesh axes are Explicit moved to the plan's shardings; the others as they are."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.traced.in_tree:
            raise OtherSignature
        explicit = [i for i, leaf in enumerate(leaves) if is_explicit(jax.typeof(leaf))]
        if any(leaves[i].shape != self.traced.jaxpr.invars[i].aval.shape for i in explicit):
            raise OtherSignature
        shardings = jax.tree.leaves(self.in_trees)
        moved = jax.device_put([leaves[i] for i in explicit], [shardings[i] for i in explicit])
        for i, leaf in zip(explicit, moved, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes, keyword_shapes = jax.tree.map(shape_of, (args, kwargs))
        if self.has_kwargs:

            def with_sharding(shape: Any, sharding: Any) -> Any:
                return jax.ShapeDtypeStruct(
                    shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=sharding
                )

            shapes, keyword_shapes = jax.tree.map(with_sharding, (shapes, keyword_shapes), self.in_trees)
        shapes = jax.tree.map(lambda shape, there: shape_as(shape, host=on_host(there)), shapes, self.in_trees[0])
        stage = self.jitted.trace(*shapes, **keyword_shapes)
        if isinstance(self.target.mesh, AbstractMesh):
            return stage.lower(lowering_platforms=(self.target.platform,))
        return stage.lower()
