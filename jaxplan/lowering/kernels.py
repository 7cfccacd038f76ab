"""Operations that run in a `shard_map` of their own: kernels, which XLA neither cuts nor always takes, and what it cuts
wrong; and what stands for those that are not to be run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ..ir import Site
from ..plans import Constraint
from ..sharding import Layout, Ring, cut_locally, local_function
from .memory_order import row_major, runs_on_cpu

LOCAL = "local"
"""`Constraint.why` of the layouts of such an operation: its specs."""


def local_layouts(constraints: Iterable[Constraint]) -> dict[Site, Layout]:
    """The planned layout of every operand and result of such operations, pending sums included."""
    return {c.site: c.layout for c in constraints if c.why == LOCAL}


def run_locally(
    eqn: Any,
    operands: Sequence[Any],
    frame: tuple[int, ...],
    position: int,
    mesh: Any,
    layouts: Mapping[Site, Layout],
    scope: str,
) -> list[Any]:
    """The results of equation `position` of `frame`, each device's piece made from its pieces of the operands.

    Sums that its results leave pending are finished inside, under the name `scope`; what has no layout (numbers) is
    whole.
    """
    several = eqn.primitive.multiple_results

    def layout(kind: str, i: int) -> Layout | None:
        return layouts.get(Site(frame, kind, position, i))

    local = local_function(eqn, ring_of(eqn, layout("operand", 0), mesh))

    def spec(kind: str, i: int) -> PartitionSpec:
        found = layout(kind, i)
        return PartitionSpec() if found is None else found.spec()

    def piece(*pieces: Any) -> list[Any]:
        made = local(*pieces)
        if eqn.primitive.name == "fft" and runs_on_cpu(mesh):
            made = row_major(made)
        finished = []
        for i, result in enumerate(made if several else [made]):
            found = layout("result", i)
            pending = found.unreduced if found is not None else ()
            with jax.named_scope(scope):  # a shard_map begins a new stack of names
                finished.append(jax.lax.psum(result, pending) if pending else result)
        return finished

    mapped = jax.shard_map(
        piece,
        mesh=mesh,
        in_specs=tuple(spec("operand", i) for i in range(len(operands))),
        out_specs=[spec("result", i) for i in range(len(eqn.outvars))],
        check_vma=False,  # what a kernel does with its pieces is its author's word
    )
    return list(mapped(*operands))


def opaque(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """What stands for a callback to this process where a step is lowered for no devices in particular: jax lowers one
    only for devices of its own."""
    results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return list(jax.ffi.ffi_call("jaxplan_callback", results, has_side_effect=True)(*operands))


def ring_of(eqn: Any, read: Layout | None, mesh: Any) -> Ring | None:
    """The devices along the dimension of `cut_locally`; None where an equation has none or several, or `read`, its
    first operand, is not cut there."""
    dims = cut_locally(eqn)
    axes = () if len(dims) != 1 or read is None else read.dims[dims[0]]
    if not axes:
        return None
    ordered = tuple(name for name in mesh.axis_names if name in axes)
    numbers = np.arange(math.prod(mesh.shape[name] for name in ordered)).reshape([mesh.shape[n] for n in ordered])
    return Ring(ordered, tuple(numbers.transpose([ordered.index(name) for name in axes]).ravel().tolist()))
