"""The memory order of Fourier transforms' results on CPU.

XLA's CPU runtime transforms arrays in row-major order only, and its compiler doesn't know: where what follows wants
another order, an all_to_all for one, it asks the transform for that, and its own check fails when the step runs (jax
0.10.2, xla/backends/cpu/runtime/fft_thunk.cc).  So the order is said.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh


def runs_on_cpu(mesh: Any) -> bool:
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"


def row_major(value: Any) -> Any:
    return with_layout_constraint(value, Layout(major_to_minor=tuple(range(value.ndim))))
