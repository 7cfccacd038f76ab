"""What stands before any search: a step traced, what is said of its shardings, and the pipeline that prices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .._jax import jit_settings
from ..ir import Traced, trace
from ..search import Allowed, start_solver
from ..sharding import MeshAxes, registered
from .annotations import Annotations, annotations_of
from .arguments import as_auto_mesh_in_force, collector_paused, outside_any_mesh, shape_of
from .candidates import Pipeline
from .meshes import Target, model_of
from .modules import of_arrays
from .options import Options, speaker
from .pins import annotated_pins, pins_of, stated_orders


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A traced step on a target, before it is searched.

    Attributes:
      pins: by input position, what constraints and honoured annotations leave of the layouts.
      start_pins: the same with all annotations; where they only say where the search begins, they are more than `pins`.
      annotated, annotated_outputs: positions of inputs and of results that annotations speak of.
      said: what the step and its arguments say, heeded or not.
    """

    pipeline: Pipeline
    pins: Mapping[int, Allowed]
    start_pins: Mapping[int, Allowed]
    annotated: tuple[int, ...]
    annotated_outputs: tuple[int, ...]
    said: Annotations


def prepared(
    traced: Traced,
    target: Target,
    budget_bytes: int,
    constraints: Mapping[str, Any] | None,
    options: Options,
    said: Annotations | None = None,
) -> Prepared:
    """A traced step on a target.

    Args:
      said: what the step and its arguments say of their own shardings.

    Raises:
      ConstraintError: see `pins.pins_of` and `pins.annotated_pins`.
      RuleError: `options.strict` and a primitive without a rule.
    """
    pins, output_pins, said_orders = pins_of(traced, target.axes, constraints)
    said = said or Annotations()
    heeded = Annotations() if options.annotations == "ignore" else said
    annotated, annotated_outputs, orders = annotated_pins(
        traced, target.axes, heeded, pins, output_pins, strict=options.annotations == "pin"
    )
    if options.annotations == "pin":
        output_pins = {**annotated_outputs, **output_pins}
    else:  # a search begins from arguments; results follow
        annotated_outputs = {}
    said_orders = {**stated_orders(traced.graph, target.axes), **orders, **said_orders}
    start_pins = {**annotated, **pins}
    pipeline = Pipeline(
        traced, target, model_of(target, options), budget_bytes, options, output_pins, said_orders, speaker(options)
    )
    return Prepared(
        pipeline=pipeline, pins=start_pins if options.annotations == "pin" else pins, start_pins=start_pins,
        annotated=tuple(annotated), annotated_outputs=tuple(annotated_outputs), said=said,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepOfShapes:
    """A step and the arguments that it is to be planned for, arrays or ShapeDtypeStructs; nothing is allocated."""

    fn: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate_argnums: tuple[int, ...]
    options: Options

    def traced(self, target: Target) -> Traced:
        """The step's program on a target."""
        ambient = as_auto_mesh_in_force()
        shaped = tuple(jax.tree.map(shape_of, shape) for shape in self.shapes)
        # It loads beside the trace.
        start_solver()
        with outside_any_mesh(), collector_paused(), ambient:
            return trace(
                self.fn, shaped, {}, donate_argnums=self.donate_argnums, while_trips=self.options.while_trips,
                axes=target.axes, keep_constraints=self.options.annotations == "pin", ruled=registered(),
                platform=target.platform, masks_apart=bool(target.profile.masks_apart),
            )  # fmt: skip

    def said(self, traced: Traced, axes: MeshAxes) -> Annotations:
        """What the step, traced, and its arguments say of their own shardings."""
        return annotations_of(traced, (self.shapes, {}), axes, self.options.axis_rules)


def step_of_shapes(
    fn: Callable[..., Any], shapes: Sequence[Any], donate_argnums: int | Sequence[int], options: Options
) -> StepOfShapes:
    """A step and its arguments, as `frontier`, `audit` and `curve` take them."""
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    donated += jit_settings(fn).donate_argnums
    fn, shapes = of_arrays(fn, shapes)
    return StepOfShapes(fn=fn, shapes=tuple(shapes), donate_argnums=donated, options=options)
