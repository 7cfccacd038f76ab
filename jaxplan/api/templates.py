"""The hand-written plans that experts use, as pins on arguments; the rest is left to the search.

What is the batch and what is state they take from `kinds`, where the batch is from `batch_dims`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..search import Allowed
from ..sharding import MeshAxes


def template_pins(
    name: str, kinds: Sequence[str], batch_dims: Sequence[int], axes: MeshAxes
) -> dict[int, Allowed] | None:
    """Pins by input position of the named template; None when the mesh has too few axes for it.

    - data: the batch cut over all axes, all state replicated.
    - zero1: data, with optimizer state cut over all axes.
    - fsdp: data, with all state cut over all axes.
    - megatron: the batch cut over all axes but the last (of those longer than 1), parameters and their optimizer
      state over the last.
    - tensor_fsdp: the batch as in megatron, all state cut over all axes.

    State that is neither parameters nor an optimizer's (counters, caches) lies as the search likes.
    """
    every = [a for a, (_, size) in enumerate(axes) if size > 1]
    if name == "tensor_fsdp" and len(every) == 1:
        return None
    hybrid = name in ("megatron", "tensor_fsdp") and bool(every)
    outer, last = (every[:-1], every[-1:]) if hybrid else (every, [])
    pins: dict[int, Allowed] = {}
    for position, kind in enumerate(kinds):
        if kind == "batch":
            pins[position] = _along(batch_dims[position], outer, len(axes))
        elif kind == "state":
            continue
        elif name == "data" or (name == "zero1" and kind == "parameter"):
            pins[position] = _within([], len(axes))
        elif name == "megatron":
            pins[position] = _within(last, len(axes))
        elif name in ("zero1", "fsdp", "tensor_fsdp"):
            pins[position] = _most_cut(every)
    return pins


def _along(dim: int, cut: list[int], n_axes: int) -> Allowed:
    """This dimension cut over `cut` where that divides (as many axes as do), nothing else cut."""

    def allowed(places: np.ndarray) -> np.ndarray:
        simple = ((places == dim) | (places < 0)).all(axis=1)
        for axis in range(n_axes):
            if axis not in cut:
                simple &= places[:, axis] < 0
        count = (places[:, cut] == dim).sum(axis=1) if cut else np.zeros(len(places))
        most = count[simple].max()
        return simple & (count == most)

    return allowed


def _within(allowed_axes: list[int], n_axes: int) -> Allowed:
    """Only these axes may cut the tensor."""
    others = [a for a in range(n_axes) if a not in allowed_axes]
    return lambda places: np.asarray((places[:, others] < 0).all(axis=1))


def _most_cut(axes: list[int]) -> Allowed:
    """Cut over as many of the axes as divide."""

    def allowed(places: np.ndarray) -> np.ndarray:
        count = (places[:, axes] >= 0).sum(axis=1)
        return np.asarray(count == count.max())

    return allowed
