"""What eigenvalues take beside the matrix on TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost.decompositions import decomposition_scratch
from jaxplan.ir import Graph, trace


def graph_of(matrices: int) -> Graph:
    return trace(jnp.linalg.eigh, (jax.ShapeDtypeStruct((matrices, 512, 512), jnp.float32),), {}).graph


@pytest.mark.parametrize(("platform", "copies"), [("tpu", 12), ("gpu", 0), ("cpu", 0)])
def test_eigenvalues_take_copies_of_the_matrix_on_tpu(platform: str, copies: int) -> None:
    graph = graph_of(1)
    (op,) = [op for op in graph.ops if op.primitive == "eigh"]
    found = decomposition_scratch(graph, (("data", 1),), {(op.index, 0): np.array([-1], np.int8)}, platform)
    assert found.get(op.index, 0) == copies * 512 * 512 * 4


def test_of_its_own_matrices_alone() -> None:
    graph = graph_of(8)
    (op,) = [op for op in graph.ops if op.primitive == "eigh"]
    found = decomposition_scratch(graph, (("data", 4),), {(op.index, 0): np.array([0], np.int8)}, "tpu")
    assert found[op.index] == 12 * 2 * 512 * 512 * 4
