"""`auto_shard`: a single-device step made to run over a mesh; called like `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from .._jax import jit_settings
from ..errors import ArgumentError
from ..hardware import CompileTarget
from ..ir import Traced, argument_names, on_host, positions_of, trace
from ..plans import Plan
from ..search import Allowed, StrategyProblem, start_solver
from ..sharding import MeshAxes, registered
from ..units import parse_bytes
from .annotations import Annotations, annotations_of
from .arguments import (
    argument_numbers,
    as_auto_mesh_in_force,
    check_arguments,
    collector_paused,
    outside_any_mesh,
    shape_of,
)
from .candidates import Pipeline
from .devices import AUTO, Devices, devices_of
from .held import Held
from .mesh_search import plan_on_devices
from .meshes import Target, target_of
from .modules import ModuleSteps, apart
from .options import Options, as_options, speaker
from .planner import make_pipeline, make_plan
from .processes import agreed_plan, plan_digest
from .variant import ExplicitArguments, OtherSignature, Variant, bound_plan


class ShardedStep:
    """A step that plans and compiles itself on the first call of each abstract signature.  Made by `auto_shard`."""

    def __init__(
        self, fn: Callable[..., Any], place: Target | Devices, *, donate_argnums: Sequence[int],
        static_argnums: Sequence[int], static_argnames: Sequence[str], memory_budget: int | str | None,
        constraints: Mapping[str, Any] | None, options: Options, siblings: Sequence[ShardedStep] = (),
    ) -> None:  # fmt: skip
        """`siblings`: of the same step, of which a plan will do where the program is the same."""
        functools.update_wrapper(self, fn)
        # devices until the first plan chooses their mesh, for all signatures: they share their state
        self._fn, self._place = fn, place
        own = jit_settings(fn)
        self._donate, self._static = (*donate_argnums, *own.donate_argnums), (*static_argnums, *own.static_argnums)
        self._static_names = (*static_argnames, *own.static_argnames)
        self._budget = budget_of(place, memory_budget)
        self._constraints, self._options = constraints, options
        self._variants: dict[Hashable, Variant] = {}
        self._last: dict[Hashable, Variant] = {}  # by static arguments, the latest
        self._direct: Variant | None = None  # the latest, if jax.jit can take its arguments as they come
        self._siblings = siblings
        self._of_modules = ModuleSteps(fn, self._sibling)

    def _sibling(self, fn: Callable[..., Any], others: Sequence[ShardedStep]) -> ShardedStep:
        """The same settings for `fn`, on the mesh that others have chosen."""
        place = next((step._place for step in others if isinstance(step._place, Target)), self._place)
        return ShardedStep(
            fn, place, donate_argnums=self._donate, static_argnums=self._static, static_argnames=self._static_names,
            memory_budget=self._budget, constraints=self._constraints, options=self._options, siblings=others,
        )  # fmt: skip

    @property
    def options(self) -> Options:
        """What the step is planned with."""
        return self._options

    def _through(
        self, use: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, put_back: bool = False
    ) -> Any:
        """`use(step, args, kwargs)` of this step, or where arguments are modules of that on the arrays in them."""
        return self._of_modules.run(use, self, args, kwargs, put_back=put_back)

    # -- signatures ---------------------------------------------------------------------------------------

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, tuple[Any, ...], dict[str, Any]]:
        """(static part, dynamic args, dynamic kwargs)."""
        if not self._static and not self._static_names:
            return tuple(sorted(kwargs)), args, kwargs
        positions = self._positions(args)
        fixed = tuple((i, args[i]) for i in sorted(positions))
        fixed_names = tuple((k, kwargs[k]) for k in self._static_names if k in kwargs)
        dynamic = {k: v for k, v in kwargs.items() if k not in self._static_names}
        try:
            hash((fixed, fixed_names))
        except TypeError:
            raise ArgumentError(
                f"a static argument of `{self._fn.__name__}` can't be hashed: {[*fixed, *fixed_names]}; pass a "
                "tuple or a frozen dataclass, or make it a dynamic argument"
            ) from None
        return (
            (fixed, fixed_names, tuple(sorted(dynamic))),
            tuple(a for i, a in enumerate(args) if i not in positions),
            dynamic,
        )

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The plan of this signature, made now if it is new."""
        static, dynamic, dynamic_kwargs = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, dynamic_kwargs))
        try:
            shapes = [shape_of(leaf) for leaf in leaves]
        except ArgumentError:
            fixed, names = self._positions(args), argument_names(self._fn, len(args))
            check_arguments((names[i], argument) for i, argument in enumerate(args) if i not in fixed)
            check_arguments(dynamic_kwargs.items())
            raise
        key = (static, tree, tuple((s.shape, str(s.dtype), s.weak_type, on_host(s)) for s in shapes))
        if key not in self._variants:
            ambient = as_auto_mesh_in_force()
            with outside_any_mesh(), collector_paused():
                self._variants[key] = self._plan_variant(args, kwargs, dynamic, dynamic_kwargs, ambient)
        self._last[static] = self._variants[key]
        return self._variants[key]

    def _plan_variant(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic: tuple[Any, ...],
        dynamic_kwargs: dict[str, Any],
        ambient: Any,
    ) -> Variant:
        """A plan made now; `ambient` is the context to trace in."""
        positions = self._positions(args)
        donated = positions_of(self._donate, len(args))
        donate = [i for i, n in enumerate(n for n in range(len(args)) if n not in positions) if n in donated]
        call = _Call(
            traced=lambda target: self._traced(args, kwargs, ambient, target),
            said=lambda traced, axes: annotations_of(
                traced, (dynamic, dynamic_kwargs), axes, self._options.axis_rules
            ),
        )
        if isinstance(self._place, Devices) and self._options.plan is not None:
            self._place = self._place.target(self._options.plan.axes)
        if isinstance(self._place, Devices):
            plan, traced, self._place = plan_on_devices(
                self._place, call, self._budget, self._constraints, self._options, self._settings(None)
            )
            held = self._holding(plan, traced, self._place, call.said(traced, self._place.axes))
            return Variant(traced, plan, self._place, donate, bool(dynamic_kwargs), held)
        target = self._place
        traced = call.traced(target)
        said = call.said(traced, target.axes)
        for variant in (v for step in self._siblings for v in step._variants.values()):
            known = variant.traced
            trees = (known.in_tree, known.out_tree) == (traced.in_tree, traced.out_tree)
            if trees and known.fingerprint == traced.fingerprint:
                return variant

        def make() -> Plan:
            if self._options.plan is not None:
                return bound_plan(self._options.plan, traced, target)
            return make_plan(traced, target, self._budget, self._constraints, self._options, said)

        plan = agreed_plan(traced, target, self._settings(said), make)
        return Variant(traced, plan, target, donate, bool(dynamic_kwargs), self._holding(plan, traced, target, said))

    def _holding(self, plan: Plan, traced: Traced, target: Target, said: Annotations) -> Held | None:
        """What plans the step again, within less or by a template; None where a plan stays as it is."""
        if not self._options.hold or self._options.plan is not None or not target.is_profiled:
            return None

        def again(limit_bytes: int, options: Options, changed: dict[str, str]) -> Plan:
            def make() -> Plan:
                return make_plan(traced, target, limit_bytes, self._constraints, options, said)

            return agreed_plan(traced, target, self._settings(said) | changed, make)

        def within(limit_bytes: int) -> Plan:
            return again(limit_bytes, self._options, {"held to": f"{limit_bytes} bytes"})

        def template(name: str) -> Plan:
            return again(plan.budget_bytes, dataclasses.replace(self._options, search=name), {"instead": name})

        return Held(plan, within, speaker(self._options), template)

    def _positions(self, args: tuple[Any, ...]) -> set[int]:
        """Where the static arguments are."""
        return positions_of(self._static, len(args))

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Any, target: Target) -> Traced:
        """The step's program, traced in a context for a target."""
        positions = self._positions(args)
        shaped = tuple(a if i in positions else jax.tree.map(shape_of, a) for i, a in enumerate(args))
        shaped_kwargs = {
            k: v if k in self._static_names else jax.tree.map(shape_of, v) for k, v in kwargs.items()
        }
        if self._options.plan is None:
            # It loads beside the trace.
            start_solver()
        with ambient:
            return trace(
                self._fn, shaped, shaped_kwargs, static_argnums=tuple(sorted(positions)),
                static_argnames=self._static_names, donate_argnums=self._donate, while_trips=self._options.while_trips,
                axes=target.axes, keep_constraints=self._options.annotations == "pin", ruled=registered(),
                platform=target.platform, masks_apart=bool(target.profile.masks_apart),
            )  # fmt: skip

    def _settings(self, said: Annotations | None) -> dict[str, str]:
        """What a plan depends on besides the program, in words that are the same in every process."""
        options = dataclasses.replace(self._options, plan=None, progress=None)
        return {
            "memory budget": f"{self._budget} bytes",
            "constraints": str(dict(self._constraints or {})),
            "options": repr(options),
            "annotations": str([sorted(said.inputs.items()), sorted(said.outputs.items())] if said else []),
            "given plan": plan_digest(self._options.plan) if self._options.plan is not None else "none",
        }

    # -- what users call ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        variant = self._direct
        if variant is not None and not kwargs and jax.sharding.get_abstract_mesh().empty:
            # What every step of a training loop pays beside jax.jit: a few microseconds, and no look at the leaves.
            try:
                return variant.jitted(*args)
            except (OtherSignature, ExplicitArguments, ValueError):
                pass  # `_call` plans anew, or moves an argument that lies elsewhere, or says so
            except RuntimeError as error:
                variant.say_deleted(error, args, {})
                raise
        return self._through(ShardedStep._call, args, kwargs, put_back=True)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any call: the first of its signature, with static or keyword arguments, under a mesh, Explicit arrays."""
        static, dynamic, dynamic_kwargs = self._split(args, kwargs)
        variant = self._last.get(static) or self._variant(args, kwargs)
        try:
            result = variant.call(dynamic, dynamic_kwargs)
        except OtherSignature:
            variant = self._variant(args, kwargs)
            result = variant.call(dynamic, dynamic_kwargs)
        plain = not kwargs and not self._static and not self._static_names and not variant.takes_explicit
        self._direct = variant if plain else None
        return result

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The Plan for these arguments: arrays or ShapeDtypeStructs; nothing is allocated."""
        return self._through(lambda step, args, kwargs: step._variant(args, kwargs).plan, args, kwargs)

    def problem(self, *args: Any, **kwargs: Any) -> StrategyProblem:
        """What the search is given for these arguments or shapes: for other solvers, and for `jaxplan solve`."""
        pipeline, input_pins = self.pipeline(args, kwargs)
        with outside_any_mesh(), collector_paused():
            return pipeline.space(input_pins).problem

    def pipeline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Pipeline, dict[int, Allowed]]:
        """Where searches of this signature begin, and the pins of the constraints; for those that compare searches.

        Raises:
          ArgumentError: the mesh is yet to be chosen.
        """
        place = self._place
        if isinstance(place, Devices):
            raise ArgumentError(
                f"what is searched for `{self._fn.__name__}` depends on its mesh: name one instead of {AUTO!r}"
            )
        ambient = as_auto_mesh_in_force()
        with outside_any_mesh(), collector_paused():
            traced = self._through(lambda step, a, k: step._traced(a, k, ambient, place), args, kwargs)
            return make_pipeline(traced, place, self._budget, self._constraints, self._options)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the planned step; `.compile()` works for compile-only TPU and GPU meshes too."""
        return self._through(ShardedStep._lowered, args, kwargs)

    def _lowered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _, dynamic, dynamic_kwargs = self._split(args, kwargs)
        variant = self._variant(args, kwargs)
        with outside_any_mesh():
            return variant.lower(dynamic, dynamic_kwargs)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """`init_fn(*args)` under jit, its result created on the plan's shardings: never whole on one device.

        The result must have the structure of one of the step's planned arguments, or be a tuple of such, so `plan` (or
        a call) comes first.

        Raises:
          ArgumentError: nothing is planned yet, or no planned argument has this structure and these shapes.
        """
        form: Any = None

        def arrays(*args: Any) -> Any:
            nonlocal form
            form, made = apart(init_fn(*args))
            return made

        with outside_any_mesh():
            shapes = jax.eval_shape(arrays, *args)
            for step in (self, *self._of_modules.steps):
                for variant in reversed(step._variants.values()):
                    shardings = variant.shardings_like(shapes)
                    if shardings is not None:
                        made = jax.jit(arrays, out_shardings=shardings)(*args)
                        return made if form is None else form.together(made)
        raise ArgumentError(
            f"`{getattr(init_fn, '__name__', 'init_fn')}` makes a state that no planned argument of "
            f"`{self._fn.__name__}` has the structure and shapes of. Plan the step first: "
            "step.plan(jax.eval_shape(init_fn, ...), batch_shapes)."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """The program and the annotations of one call, for whatever mesh."""

    traced: Callable[[Target], Traced]
    said: Callable[[Traced, MeshAxes], Annotations]


def budget_of(place: Target | Devices, memory_budget: int | str | None) -> int:
    """Bytes a device: the user's, or the profile's memory less its reserve."""
    return place.profile.usable_bytes if memory_budget is None else parse_bytes(memory_budget)


def auto_shard(
    train_step: Callable[..., Any] | None = None,
    mesh: Any = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    devices: int | Sequence[Any] | CompileTarget | None = None,
    hardware: Any = None,
    memory_budget: int | str | None = None,
    constraints: Mapping[str, Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Any:
    """Shard a single-device step over a mesh.

    Args:
      train_step: any function that `jax.jit` can trace, written for one device.  Omitted: a decorator.
      mesh: a `jax.sharding.Mesh` of any axis types, or an `AbstractMesh` (with `hardware`) for planning alone.  "auto":
        the first plan chooses it, for all later calls too, among the meshes of "data", "model" (and, with
        `options.mesh_axes=3`, "replica" before them) that the devices can be.
      devices: for "auto": by default all of `jax.devices()`; a number, of `hardware` where that is named (they need not
        be there); devices, or a `jaxplan.target(...)`.
      donate_argnums, static_argnums, static_argnames: as in `jax.jit`; a step under `jax.jit` keeps its own, too.
      hardware: a profile or its name; by default found from the mesh's devices.
      memory_budget: bytes a device, or text such as "14GiB"; by default the profile's memory less its reserve.
        A hard limit.
      constraints: glob on tree paths of arguments and results -> PartitionSpec (UNCONSTRAINED dims are left open) or
        "replicated".
      options: see `Options`; a mapping of its fields will do.

    Returns:
      A `ShardedStep`: called like the step itself; with `.plan`, `.lower` and `.init`.

    Raises:
      MeshError, HardwareError, ArgumentError: at once.  ConstraintError, InfeasibleError: when it plans.
    """
    if isinstance(train_step, (Mesh, AbstractMesh)) and mesh is None:  # @auto_shard(mesh, ...)
        train_step, mesh = None, train_step
    if train_step is not None and not callable(train_step):
        raise ArgumentError(
            f"auto_shard's first argument must be the step, a function; got {type(train_step).__name__}"
        )
    if devices is not None and mesh is not None and not _is_auto(mesh):
        raise ArgumentError("auto_shard takes a mesh, or devices= of which it makes one (mesh=\"auto\"), not both")
    if mesh is None and devices is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ArgumentError(
                'auto_shard needs a mesh: pass one, call it under jax.set_mesh(mesh), or write mesh="auto"'
            )
    place = devices_of(devices, hardware) if mesh is None or _is_auto(mesh) else target_of(mesh, hardware)

    def wrap(fn: Callable[..., Any]) -> ShardedStep:
        return ShardedStep(
            fn, place, donate_argnums=argument_numbers("donate_argnums", fn, donate_argnums),
            static_argnums=argument_numbers("static_argnums", fn, static_argnums),
            static_argnames=(static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
            memory_budget=memory_budget, constraints=constraints, options=as_options(options),
        )  # fmt: skip

    return wrap if train_step is None else wrap(train_step)


def _is_auto(mesh: Any) -> bool:
    return isinstance(mesh, str) and mesh == AUTO


def plan(train_step: Callable[..., Any], mesh: Any, *shapes: Any, **settings: Any) -> Plan:
    """The Plan of a step on a mesh; `settings` as in `auto_shard`, everything else in `shapes` is an argument."""
    return auto_shard(train_step, mesh, **settings).plan(*shapes)
