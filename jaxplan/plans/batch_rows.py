"""Which rows of the global batch a process feeds."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh

from ..errors import ArgumentError, PlanMismatchError
from .explain import matching
from .plan import Plan, TensorPlan
from .words import spec_text


def process_rows(plan: Plan, path: str | None, process_index: int | None) -> slice:
    """The rows of the shards on the process's devices; see `Plan.process_batch_slice`.

    Raises:
      PlanMismatchError: the plan has no mesh of devices.
      ArgumentError: no such process in the mesh, no batch, leaves that need different rows, rows with gaps.
    """
    mesh = plan.mesh
    if not isinstance(mesh, Mesh):
        raise PlanMismatchError(
            f"the plan of `{plan.name}` has no mesh of devices, and rows belong to devices: plan on a "
            "jax.sharding.Mesh, or load it with `jaxplan.load_plan(path, mesh)`"
        )
    process = jax.process_index() if process_index is None else process_index
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if process not in processes:
        raise ArgumentError(f"process {process} has no device of the plan's mesh; processes {processes} have")
    tensors = (
        [tensor for tensor in plan.inputs if tensor.kind == "batch" and tensor.shape]
        if path is None
        else matching(plan, path)
    )
    if not tensors:
        raise ArgumentError(
            f"the plan of `{plan.name}` has no batch: each of its arguments comes back as a result, or is a scalar. "
            "Name the argument whose rows you mean: plan.process_batch_slice(path)"
        )
    rows = {tensor.path: _rows(plan, tensor, mesh, process) for tensor in tensors}
    if len({(found.start, found.stop) for found in rows.values()}) > 1:
        lines = "\n".join(f"  {name}: rows {found.start}:{found.stop}" for name, found in rows.items())
        raise ArgumentError(
            f"the arguments of `{plan.name}` that look like a batch need different rows on process {process}:\n"
            f"{lines}\nAsk for each of them: plan.process_batch_slice(path)"
        )
    return next(iter(rows.values()))


def _rows(plan: Plan, tensor: TensorPlan, mesh: Mesh, process: int) -> slice:
    if not tensor.shape:
        raise ArgumentError(f"{tensor.path} is a scalar: it has no rows, and every process feeds it whole")
    size, names = dict(plan.axes), tensor.layout.dims[0]
    extent = tensor.shape[0] // math.prod(size[name] for name in names)
    starts = set()
    for position, device in np.ndenumerate(mesh.devices):
        if device.process_index == process:
            piece = 0
            for name in names:
                piece = piece * size[name] + position[mesh.axis_names.index(name)]
            starts.add(piece)
    first, last = min(starts), max(starts)
    if len(starts) != last - first + 1:
        raise ArgumentError(
            f"{tensor.path} lies as {spec_text(tensor.layout)}, and the pieces of its first dimension on process "
            f"{process} are {sorted(starts)}: no slice. Order the mesh's devices so that a process's lie together on "
            f"{'+'.join(names)}, or feed each piece by jax.make_array_from_callback"
        )
    return slice(first * extent, (last + 1) * extent)
