"""The Plan: where every tensor lies, what it costs and why.  A frozen value; nothing here knows a solver.

What a plan can do (print, save, explain, ...) is one module each beside this one; they need the types defined
here, so the methods import them when they are called.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from ..ir import Leaf, Site
from ..sharding import Layout, MeshAxes
from .schedule import PlannedTask

if TYPE_CHECKING:
    from .axis_rules import AxisRules


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """One argument or result leaf.

    Attributes:
      path: tree path, "state/params/layer_0/kernel".
      layout: how it lies on the mesh.
      bytes: of the whole tensor; local_bytes: of one device's piece.
      alias: path of the argument that this result is the next value of (and the other way round), or "".
      kind: "parameter", "optimizer", "state" (comes back, neither of the two), "batch" (an argument that does
        not come back) or "result".
      donated: the caller gives this argument's buffer away; never so for a result.
      host: it lies in the memory of each device's host.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    bytes: int
    local_bytes: int
    alias: str = ""
    kind: str = "batch"
    donated: bool = False
    host: bool = False


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A layout pinned inside the step with `with_sharding_constraint`.

    Attributes:
      site: where in the nested jaxpr; layout: what is pinned; source: the user's line; primitive: the
      operation whose operand or result it is; why: "reshard" (planned communication), "sum" (a pending sum is
      finished here), "propagation" (the partitioner would have chosen otherwise by itself), "local" (a spec of the
      `shard_map` that a kernel runs in; `layout` then holds its pending sums, finished inside), "held" (of a sum that
      stays in parts, or what makes it) or "broadcast" (of what is broadcast for this operation alone).
    """

    site: Site
    layout: Layout
    source: str
    primitive: str
    shape: tuple[int, ...]
    why: str

    @property
    def is_pin(self) -> bool:
        """Whether it is a `with_sharding_constraint`; else it says what is computed: a kernel, parts, a broadcast."""
        return self.why not in ("local", "held", "broadcast")


@dataclass(frozen=True, kw_only=True)
class PlannedCollective:
    """One communication of the step as the partitioner inserts it.

    Attributes:
      kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
      axes: mesh axes it runs over.
      bytes: of the larger local buffer on one device, one run.
      wire_bytes: what one device sends, one run; of sums that XLA scatters in rounded pieces also what these are longer
        by, with the sum and once more to move it on.
      trips: how often it runs in a step.
      seconds_s: of all its runs in a step.
      where: source line; primitive: the operation it belongs to.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    wire_bytes: int
    trips: float
    seconds_s: float
    where: str
    primitive: str


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """Predicted cost of one step on one device.

    Attributes:
      step_s: the whole step; compute_s: its computation; comm_s: communication, before overlap;
        exposed_comm_s: the part of it that computation doesn't hide (step_s = compute_s + exposed_comm_s).
      comm_s_by_axis, comm_bytes_by_axis: per mesh axis (a collective over several axes is named "a+b").
      comm_bytes: bytes one device sends in a step.
      peak_bytes: most memory alive at once; peak_parts: what it is made of (parameters, optimizer state,
        ...); peak_where: the operation at which it is reached.
      termination: "optimal", "feasible", "time_limit", "interrupted" or "template"; bound_s: no plan of the
        model's space is faster than this; gap: (objective - bound) / objective; objective_s: the search's own
        objective of the chosen plan.
      flops_by_source: arithmetic of matrix products and convolutions that one device does in a step, by the line of
        the program that they stand in.
      search_s: wall time of the search; not kept in files, nor compared.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    comm_s_by_axis: Mapping[str, float]
    comm_bytes: int
    comm_bytes_by_axis: Mapping[str, int]
    peak_bytes: int
    peak_parts: Mapping[str, int]
    peak_where: str
    termination: str
    objective_s: float
    bound_s: float
    gap: float
    flops_by_source: Mapping[str, float] = field(default_factory=dict)
    search_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another layout of one tensor.

    Attributes:
      objective_s: the search's objective with this layout and the rest of the plan as it is: an upper bound,
        a new search with it pinned can only do better.
      fits: whether the peak is then within the budget.
    """

    layout: Layout
    objective_s: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a step is sharded over a mesh.

    Attributes:
      name: of the step; fingerprint: digest of its program; axes: the mesh; device_kind and hardware: what it
        was planned for; budget_bytes: memory limit a device.
      inputs, outputs: leaves in tree order, those of keyword arguments last.
      constraints, collectives, cost, warnings, assumptions: see their types.
      alternatives: by input path, the other layouts of that leaf and what they would cost.
      templates: named hand-written plans and their predicted step_s (inf never: a template that does not fit
        is absent).
      unruled_s: seconds a step of the primitives that have no sharding rule, each replicated: its computation and
        what communication it makes.
      tasks: what runs and what waits for what, in program order; `jaxplan.simulate` makes a timeline of it.
      logical_axes: by input path, the logical names of its dimensions where the argument was annotated with some; ""
        for a dimension without one.
      search: which search made it; jax_version: which jax it was checked with.
      mesh: the mesh itself; None in a plan read from a file without one.
      in_tree, out_tree: treedefs of (args, kwargs), less the static ones, and of the result; a
        `trees.Structure` in a plan read from a file with nodes that this process can't rebuild by name.
    """

    name: str
    fingerprint: str
    axes: MeshAxes
    device_kind: str
    hardware: str
    budget_bytes: int
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    constraints: tuple[Constraint, ...]
    collectives: tuple[PlannedCollective, ...]
    cost: PlanCost
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    alternatives: Mapping[str, tuple[Alternative, ...]] = field(default_factory=dict)
    templates: Mapping[str, float] = field(default_factory=dict)
    unruled_s: Mapping[str, float] = field(default_factory=dict)
    tasks: tuple[PlannedTask, ...] = ()
    logical_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    search: str = "ilp"
    jax_version: str = ""
    mesh: Any = field(default=None, compare=False, repr=False)
    in_tree: Any = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)

    def lies_as(self, other: Plan) -> bool:
        """Whether both make one program: arguments, results and what is pinned inside lie alike."""
        ours, theirs = ((plan.inputs, plan.outputs, plan.constraints) for plan in (self, other))
        return ours == theirs

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of every argument leaf, by tree path."""
        return {tensor.path: tensor.layout.spec() for tensor in self.inputs}

    @property
    def result_specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec of every result leaf, by tree path."""
        return {tensor.path: tensor.layout.spec() for tensor in self.outputs}

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """A pytree of NamedSharding for each positional argument, for `jax.jit(step, in_shardings=...)`.

        The mesh's axes are made Auto.  Raises PlanMismatchError for a plan read from a file that still needs
        a mesh, or arguments to `bind`.
        """
        from .shardings import argument_shardings

        return argument_shardings(self)[0]

    @property
    def kwarg_shardings(self) -> dict[str, Any]:
        """The same for keyword arguments, by name; `jax.jit` itself takes none, `jax.device_put` does."""
        from .shardings import argument_shardings

        return argument_shardings(self)[1]

    @property
    def out_shardings(self) -> Any:
        """A NamedSharding for each leaf of the result, in its structure.  Raises as `in_shardings`."""
        from .shardings import result_shardings

        return result_shardings(self)

    def bind(self, *args: Any, **kwargs: Any) -> Plan:
        """This plan with the tree structure of the step's arguments (arrays or ShapeDtypeStructs, no static
        ones).

        Needed only by a plan read from a file whose trees hold custom nodes (flax.struct, nnx.State).  Raises
        PlanMismatchError, naming the leaves that are new, gone or changed.
        """
        from .binding import bind_arguments

        return bind_arguments(self, args, kwargs)

    def bind_leaves(
        self, inputs: Sequence[Leaf], outputs: Sequence[Leaf], in_tree: Any, out_tree: Any, mesh: Any
    ) -> Plan:
        """This plan for a traced step and its mesh; refuses as `bind` and `load_plan` do."""
        from .binding import bind_leaves

        return bind_leaves(self, inputs, outputs, in_tree, out_tree, mesh)

    def process_batch_slice(self, path: str | None = None, *, process_index: int | None = None) -> slice:
        """The rows (of dimension 0) of the global batch that a process feeds, for data loaders:

            rows = plan.process_batch_slice()
            local = {"x": dataset[rows]}  # whole in every other dimension
            batch = jax.tree.map(jax.make_array_from_process_local_data, plan.in_shardings[1], local)

        Two processes may feed the same rows: the batch is then cut over other dimensions, or not at all.

        Args:
          path: of one argument, where not all need the same rows; process_index: of another process than this one.

        Raises:
          ArgumentError: the process has no device of the mesh, the batch's leaves need different rows, or rows that are
            no slice.  PlanMismatchError: the plan has no mesh of devices.
        """
        from .batch_rows import process_rows

        return process_rows(self, path, process_index)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, the same byte for byte for the same plan; read it with
        `jaxplan.load_plan`."""
        from .serialize import plan_text, write_whole

        write_whole(path, plan_text(self))

    def __str__(self) -> str:
        from .table import plan_table

        return plan_table(self)

    def explain(self, path: str) -> str:
        """Why the tensor at `path` lies as it does, and what each other layout would cost.

        Args:
          path: a tree path as the plan prints it, the end of one ("mlp/kernel"), or a glob.

        Raises:
          ArgumentError: no tensor has that path; names near ones.
        """
        from .explain import explain_tensor

        return explain_tensor(self, path)

    def diff(self, other: Plan) -> str:
        """What `other` does differently: specs, cost, collectives, constraints; "no difference" where
        nothing."""
        from .diff import plan_diff

        return plan_diff(self, other)

    def to_python(self) -> str:
        """Runnable Python that makes the mesh and the shardings with jax alone: take the specs and leave."""
        from .export import python_source

        return python_source(self)

    def to_logical_axis_rules(self, names: Mapping[str, Sequence[str | None]] | None = None) -> AxisRules:
        """Rules from logical axis names to mesh axes, for Flax (`.rules`) and MaxText (`str(...)`, YAML), and where no
        rules say what the plan says: one name may lie on two mesh axes in two tensors (`.conflicts`).

        Args:
          names: a glob on argument paths -> the name of each dimension; by default those that the arguments were
            annotated with.

        Raises:
          ArgumentError: there are no names, or they don't fit their tensor.
        """
        from .axis_rules import axis_rules

        return axis_rules(self, names)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one self-contained page: no script, nothing fetched, light and dark."""
        from .html import plan_page
        from .serialize import write_whole

        write_whole(path, plan_page(self))
