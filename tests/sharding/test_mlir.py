"""A module read with and without who reads what."""

from __future__ import annotations

import pytest
from jax.sharding import Mesh

from jaxplan.sharding import imported_copy
from jaxplan.sharding.mlir import Walk, shape_of
from tests.sharding.programs import PROGRAMS, lowered


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_operations_make_is_told_alike_by_both_walks(name: str, mesh_4x2: Mesh) -> None:
    fn, ins, outs, *shapes = PROGRAMS[name]
    module = imported_copy(lowered(fn, mesh_4x2, ins, outs, *shapes).compiler_ir("stablehlo"))
    visits = [visit for visit in Walk(module, 3.0).visits() if visit.results]
    assert list(Walk(module, 3.0).made()) == [
        (v.op.name, v.scope, tuple(shape_of(result)[0] for result in v.op.results), v.layouts, v.trips)
        for v in visits
    ]
    assert any(v.trips > 1 for v in visits) or "while" not in {v.op.name for v in visits}
