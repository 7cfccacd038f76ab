"""What a user may set about the planning itself."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from ..errors import ArgumentError
from ..plans import AxisRule, Plan
from ..search import SEARCHES

ANNOTATIONS = ("pin", "start", "ignore")
"""What may be done with the shardings that a program brings along."""

TEMPLATES = ("data", "zero1", "fsdp", "megatron", "tensor_fsdp")
"""The hand-written plans that every search is compared with, also available by name."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the planner.

    Attributes:
      search: "ilp" (default), exact; or a template by name: "data", "zero1", "fsdp", "megatron", "tensor_fsdp"; or a
        rival of the exact search, which begins from the best template and proves little or nothing: "ft", "optcnn",
        "dp", "mcmc", "lambda", "random", "templates", and those that `jaxplan.search.SEARCHES` has besides.
      time_limit_s: of one solve; a large one ends within 0.1 % of what is proved, and ten seconds after it came within
        1 %.  None waits for the proof.  A limit that strikes makes the result depend on the machine's speed, and the
        plan says so.
      relative_gap: the search stops when the proved bound is this close.
      while_trips: iterations assumed for a `while` whose trip count is unknown before it runs.
      overlap: share of every collective that is hidden behind computation, 0 to 1.  0 is the careful default.
      compare_templates: also plan the templates and never return a worse plan than the best of them.
      fold: decide layers that are alike once, and search a problem that does not grow with depth: "auto" where that
        pays (large programs), True wherever layers repeat, False never.
      unfold_gap: a folded search whose proved gap stays over this goes on with layers that may differ.
      mesh_axes: the most axes, 1 to 3, of a mesh that the planner chooses (`mesh="auto"`).
      refine: how many of the best distinct plans (the search's and the templates') are compiled for the mesh's devices,
        of which the fastest as compiled is kept.  0 compiles none.
      hold: the first call of a signature, which compiles the step, compares what XLA made of it with the memory budget,
        and plans again what takes more, within less; where the compiler fails on a plan, a template takes its place.
      strict: a primitive without a sharding rule is an error instead of a warning.
      max_strategies: of one operation; see `search.build`. Where it strikes (four axes and more), nothing is proved.
      seed: of the search.
      annotations: what becomes of the shardings that the program brings along: Flax's boxes and NNX metadata among the
        arguments, arrays and ShapeDtypeStructs that are cut by a NamedSharding, `with_sharding_constraint` inside, the
        shardings that the step's own `jax.jit` states of its arguments and results (before what arguments say).
        "pin" (default) honours them, as `jax.jit` does: who wrote one meant it, and an array stays where it is.
        "start" lets the search begin with those of the arguments, so that its plan is never worse by the model, and
        decide everything again.  "ignore" leaves them out.  `constraints` always win.
      axis_rules: pairs (logical axis name, mesh axis or tuple of them or None) for annotations by logical names, in
        order of precedence as in Flax; by default those that the annotation has itself, else those in force in Flax.
      plan: a Plan to run instead of searching, such as `jaxplan.load_plan(path, mesh)`; refused when the step, its
        leaves or the mesh are not those it was made for.
      progress: print what is going on to stderr; None: only when it is a terminal.
    """

    search: str = "ilp"
    time_limit_s: float | None = 120.0
    relative_gap: float = 1e-4
    while_trips: float = 16.0
    overlap: float = 0.0
    compare_templates: bool = True
    mesh_axes: int = 2
    refine: int = 0
    hold: bool = True
    fold: Literal["auto"] | bool = "auto"
    unfold_gap: float = 0.01
    strict: bool = False
    max_strategies: int = 512
    seed: int = 0
    annotations: str = "pin"
    axis_rules: Sequence[AxisRule] = ()
    plan: Plan | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.search not in SEARCHES and self.search not in TEMPLATES:
            raise ArgumentError(
                f"options.search={self.search!r} is unknown: use a search, one of {', '.join(SEARCHES)}, or a "
                f"template, one of {', '.join(TEMPLATES)}"
            )
        if self.annotations not in ANNOTATIONS:
            raise ArgumentError(
                f"options.annotations={self.annotations!r} is unknown: use one of {', '.join(map(repr, ANNOTATIONS))}"
            )
        if not 0 <= self.overlap < 1:
            raise ArgumentError(
                f"options.overlap={self.overlap!r} must be in [0, 1): the share of communication hidden"
            )
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ArgumentError(
                f"options.time_limit_s={self.time_limit_s!r} must be positive, or None for no limit"
            )
        if self.fold not in ("auto", True, False):
            raise ArgumentError(f'options.fold={self.fold!r} is unknown: use "auto", True or False')
        if not self.unfold_gap >= 0:
            raise ArgumentError(f"options.unfold_gap={self.unfold_gap!r} must not be negative")
        if self.mesh_axes not in (1, 2, 3):
            raise ArgumentError(f"options.mesh_axes={self.mesh_axes!r} must be 1, 2 or 3, the most axes of a mesh")
        if self.refine < 0:
            raise ArgumentError(f"options.refine={self.refine!r} must be a number of plans to compile, or 0 for none")
        if not self.while_trips > 0:
            raise ArgumentError(f"options.while_trips={self.while_trips!r} must be positive")


def as_options(options: Options | Mapping[str, Any] | None) -> Options:
    """Options from an Options, a mapping of its fields, or None.

    Raises:
      ArgumentError: an unknown field or a bad value.
    """
    if options is None:
        return Options()
    if isinstance(options, Options):
        return options
    known = {field.name for field in dataclasses.fields(Options)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ArgumentError(f"unknown options {unknown}: the options are {sorted(known)}")
    return Options(**dict(options))


def speaker(options: Options) -> Callable[[str], None]:
    """Says what is being done, on stderr: where a terminal is, or `options.progress` says so, in the first process."""
    show = sys.stderr.isatty() if options.progress is None else options.progress
    if not show or jax.process_index() != 0:
        return lambda _: None
    return lambda text: print(f"jaxplan: {text}", file=sys.stderr, flush=True)
