"""Shardings that a user wrote, as jax.jit takes them -> a Layout for each leaf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import ConstraintError
from ..ir import Leaf
from ..sharding import Layout, MeshAxes


def written_layouts(
    what: str, shardings: Any, tree: Any, leaves: Sequence[Leaf], axes: MeshAxes
) -> tuple[Layout | None, ...]:
    """The layout of every leaf; None where the user left it open.

    Args:
      what: "in_shardings" or "out_shardings", for errors.
      shardings: a tree of NamedSharding, PartitionSpec or None, or a prefix of one, as `jax.jit` takes it.
      tree: the treedef of all leaves.

    Raises:
      ConstraintError: the tree doesn't fit, or a spec names an unknown axis, uses one twice, is longer than its tensor
        or doesn't divide it; all offenders at once.
    """
    if shardings is None:
        return (None,) * len(leaves)
    whole = jax.tree.unflatten(tree, [0] * len(leaves))
    try:
        broad = jax.tree.leaves(
            jax.tree.broadcast(shardings, whole, is_leaf=lambda s: s is None), is_leaf=lambda s: s is None
        )
    except ValueError as error:
        raise ConstraintError(f"{what} is no prefix of the step's own tree: {error}") from error
    faults: list[str] = []
    found = [_layout(sharding, leaf, axes, faults) for sharding, leaf in zip(broad, leaves, strict=True)]
    if faults:
        raise ConstraintError(f"{what} can't be met:\n  " + "\n  ".join(faults))
    return tuple(found)


def _layout(sharding: Any, leaf: Leaf, axes: MeshAxes, faults: list[str]) -> Layout | None:
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        faults.append(f"{leaf.path}: {sharding!r} is neither a NamedSharding, a PartitionSpec nor None")
        return None
    sizes = dict(axes)
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    named = [name for entry in entries for name in entry]
    if len(entries) > len(leaf.shape):
        faults.append(f"{leaf.path}: {spec} has {len(entries)} entries, the tensor {len(leaf.shape)} dimensions")
    elif unknown := sorted(set(named) - set(sizes)):
        faults.append(f"{leaf.path}: {spec} names axis {unknown[0]!r}; the mesh has {', '.join(sizes)}")
    elif len(set(named)) < len(named):
        faults.append(f"{leaf.path}: {spec} uses an axis twice")
    else:
        for dimension, (extent, entry) in enumerate(zip(leaf.shape, entries, strict=False)):
            pieces = math.prod(sizes[name] for name in entry)
            if extent % pieces:
                faults.append(
                    f"{leaf.path}: {spec} cuts dimension {dimension} of {leaf.dtype}{list(leaf.shape)} in {pieces} "
                    f"pieces, which doesn't divide {extent}"
                )
        return Layout(dims=tuple(entries) + ((),) * (len(leaf.shape) - len(entries)))
    return None
