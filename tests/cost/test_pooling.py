"""What max-pooling's gradient needs beside its result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxplan.cost.pooling import pooling_scratch
from jaxplan.hardware import load_profile
from jaxplan.ir import trace


def test_a_gpu_finds_the_place_of_every_windows_largest_element() -> None:
    """Four integers for each of a piece's bf16[32, 56, 56, 64]: 103 MB on H100, as compiled by jax 0.10.2."""

    def pooled(x: Any) -> Any:
        made = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.sum(made.astype(jnp.float32) ** 2)

    graph = trace(jax.grad(pooled), (jax.ShapeDtypeStruct((256, 112, 112, 64), jnp.bfloat16),), {}).graph
    (op,) = [op for op in graph.ops if op.primitive == "select_and_scatter_add"]
    axes, reads = (("data", 4), ("model", 2)), {(op.index, 0): np.array([0, 0], np.int8)}
    assert pooling_scratch(graph, axes, reads, load_profile("h100")) == {op.index: 4 * 4 * 32 * 56 * 56 * 64}
    assert not pooling_scratch(graph, axes, reads, load_profile("tpu-v5e"))
