"""Gradients of dilated kernels on GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost.dilated import transposed_for_kernels
from jaxplan.ir import trace

IMAGES, TIME, NARROW, WIDE = 4, 4096, 256, 512


@pytest.mark.parametrize(("dilation", "stride", "copied"), [(16, 1, True), (1, 1, False), (1, 2, False)])
def test_what_a_dilated_kernels_gradient_is_made_of_is_transposed(dilation: int, stride: int, copied: bool) -> None:
    """A WaveNet's bf16[4, 4096, 512] and what it was convolved from (H100, jax 0.10.2)."""

    def loss(w: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            jnp.sin(x), w, (stride,), "VALID", rhs_dilation=(dilation,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.sum(jnp.sin(made).astype(jnp.float32))

    shapes = [(2, NARROW, WIDE), (IMAGES, TIME + dilation, NARROW)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    graph = trace(jax.grad(loss), arguments, {}).graph
    reads = {(op.index, i): np.array([-1], np.int8) for op in graph.ops for i in range(len(op.operands))}
    gradient = next(op for op in graph.ops if graph.values[op.results[0]].shape == shapes[0])
    found = list(transposed_for_kernels(graph, (("data", 1),), range(len(graph.ops)), reads))
    sizes = [IMAGES * (TIME + dilation) * NARROW * 2, IMAGES * TIME * WIDE * 2]
    assert sorted(size for *_, size in found) == (sizes if copied else [])
    made = graph.producers()[gradient.operands[1]]
    assert all((start, stop) == (made + 1, gradient.index + 1) for start, stop, _ in found)
