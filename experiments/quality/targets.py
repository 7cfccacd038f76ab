"""The machines that are compiled for, none of which has to be there, and the meshes that are planned on them."""

from __future__ import annotations

from jax.sharding import AbstractMesh

Axes = tuple[tuple[str, int], ...]
_EIGHT: dict[str, Axes] = {"4x2": (("data", 4), ("model", 2)), "8": (("data", 8),)}

TARGETS: dict[str, dict[str, Axes]] = {
    "tpu-v5e:2x4": _EIGHT,
    "tpu-v5p:2x2x2": {**_EIGHT, "2x2x2": (("data", 2), ("fsdp", 2), ("model", 2))},
    "tpu-v6e:4x4": {"4x4": (("data", 4), ("model", 4)), "16": (("data", 16),)},
    "h100:1x1x8": _EIGHT,
}
"""Target, as `jaxplan.target` takes it -> name of a mesh -> its axes."""


def hardware(target: str) -> str:
    """The profile of a target."""
    return target.partition(":")[0]


def is_gpu(target: str) -> bool:
    """Whether the target's programs carry no estimate of the compiler's, and compile in seconds."""
    return not target.startswith("tpu")


def abstract_mesh(target: str, mesh: str) -> AbstractMesh:
    """The mesh without devices, to plan for."""
    axes = TARGETS[target][mesh]
    return AbstractMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
