"""What an expert writes by hand: shardings of arguments and results by tree path; propagation does the rest.

The one place that names parameters: it plays the expert, who knows the models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The dimension, counted from the end, that Megatron-style tensor parallelism cuts: columns of what makes
# heads, hidden units or logits, rows of what consumes them, the vocabulary of an embedding, whole experts.
# Shoeybi et al. 2019, arXiv:1909.08053, section 3; Lepikhin et al. 2020, arXiv:2006.16668, for experts.
_TENSOR = (
    (r"attention\w*/(qkv|query|key|value)/(kernel|bias)$", -2),
    (r"attention\w*/out/kernel$", -3),
    (r"experts/(gate|up|down)$", -3),
    (r"mlp\w*/(gate|up)/(kernel|bias)$", -1),
    (r"mlp\w*/down/kernel$", -2),
    (r"(?<!position_)embedding(/embedding)?$", -2),
    (r"head/(kernel|bias)$", -1),
    (r"layer_\d*[02468]/(kernel|bias)$", -1),
    (r"layer_\d*[13579]/kernel$", -2),
)
_STACKED = re.compile(r"(^|/)layers/")

Spec = tuple[tuple[str, ...], ...]
Names = tuple[str, ...]


def _path(keys: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _tensor(path: str, shape: tuple[int, ...], axes: Names, mesh: Mesh) -> list[Names]:
    """The dimension of `_TENSOR` cut over `axes` where it divides, nothing else."""
    dims: list[Names] = [()] * len(shape)
    for pattern, dim in _TENSOR:
        if axes and re.search(pattern, path) and shape[dim] % math.prod(mesh.shape[a] for a in axes) == 0:
            dims[dim] = axes
            break
    return dims


def _cut_largest(
    path: str, shape: tuple[int, ...], dims: list[Names], axes: Names, mesh: Mesh
) -> list[Names]:
    """`axes` added on the largest free dimension that divides; never the dimension of stacked layers."""
    size = math.prod(mesh.shape[a] for a in axes)
    first = 1 if _STACKED.search(path) else 0
    free = [d for d in range(first, len(shape)) if not dims[d] and shape[d] % size == 0]
    if axes and free:
        best = max(free, key=lambda d: shape[d])
        dims = [axes if d == best else names for d, names in enumerate(dims)]
    return dims


Rule = Callable[[str, tuple[int, ...], Mesh], list[Names]]


def _rule(batch: Names, tensor: Names, params: Names, moments: Names) -> Rule:
    """Batch over `batch`; state as Megatron cuts it over `tensor`, then params and moments over theirs."""

    def rule(path: str, shape: tuple[int, ...], mesh: Mesh) -> list[Names]:
        if path.startswith("batch/"):
            return [batch, *([()] * (len(shape) - 1))]
        dims = _tensor(path, shape, tensor, mesh)
        return _cut_largest(path, shape, dims, moments if "opt_state/" in path else params, mesh)

    return rule


def expert_rules(mesh: Mesh) -> dict[str, Rule]:
    """The hand-written plans for a mesh of one axis, or of a data axis and a model axis, by name."""
    every = tuple(mesh.axis_names)
    rules = {
        "data": _rule(every, (), (), ()),
        "zero1": _rule(every, (), (), every),
        "fsdp": _rule(every, (), every, every),
        "megatron": _rule((), every, (), ()),
    }
    if len(every) == 2:
        data, model = every[:1], every[1:]
        rules["megatron x data"] = _rule(data, model, (), ())
        rules["megatron x zero1"] = _rule(data, model, (), data)
        rules["megatron x fsdp"] = _rule(data, model, data, data)
    return rules


def shardings(rule: Rule, tree: Any, mesh: Mesh, prefix: str) -> Any:
    """A NamedSharding for each leaf of `tree`, whose paths begin with `prefix`."""

    def leaf(keys: Any, shape: Any) -> NamedSharding:
        dims = rule(f"{prefix}/{_path(keys)}", shape.shape, mesh) if shape.shape else []
        return NamedSharding(mesh, PartitionSpec(*(names or None for names in dims)))

    return jax.tree_util.tree_map_with_path(leaf, tree)
