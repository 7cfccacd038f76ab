"""Edges that devices exchange: what we say of a partitioned program is what XLA compiles."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxplan.sharding import Strategies, Window, layout_of_places, partition, rule_for, strategies

from .cases import CASES, Case
from .equations import equation

AXES = (("data", 4), ("model", 2))
_PERMUTED = re.compile(r"= f32\[([\d,]*)\]\S* collective-permute(?:-start)?\(")


def with_halos(case: Case) -> tuple[Strategies, list[int]]:
    """All strategies, and which of them exchange edges."""
    rule = rule_for(equation(case).shapes)
    found = strategies(rule, AXES)
    factors = {halo.factor for halo in rule.halos if halo.widths}
    return found, [s for s in range(len(found)) if factors & set(found.factors[s].tolist())]


# what a shift is lowered to XLA exchanges twice, once for a pad's pieces and once for a slice's: it sends its own edges
HALOS = [case for case in CASES if with_halos(case)[1] and case.primitive != "shift"]


@pytest.mark.parametrize("case", HALOS, ids=str)
def test_as_many_bytes_as_xla_compiles(case: Case, mesh_4x2: Mesh) -> None:
    eq = equation(case)
    found, chosen = with_halos(case)
    for s in chosen[:3]:
        sides = [
            [NamedSharding(mesh_4x2, layout_of_places(p[s], len(shape), AXES).spec()) for p, shape in side]
            for side in (
                list(zip(found.operands, eq.shapes.operands, strict=True)),
                list(zip(found.results, eq.shapes.results, strict=True)),
            )
        ]
        lowered = jax.jit(eq.fn, in_shardings=tuple(sides[0]), out_shardings=tuple(sides[1])).lower(*eq.operands)
        said = sorted(
            c.bytes
            for c in partition(lowered.compiler_ir("stablehlo")).collectives
            if c.kind == "collective_permute"
        )
        text = lowered.compile().as_text()
        compiled = sorted(
            4 * math.prod(int(n) for n in shape.split(",")) for shape in _PERMUTED.findall(text)
        )
        assert said == compiled, found.factors[s]


@pytest.mark.parametrize(
    ("window", "extent", "results"),
    [
        (Window(size=size, stride=stride, low=low, high=high, dilation=dilation), 48, 48 // stride)
        for size in (1, 2, 3, 5)
        for stride in (1, 2, 3)
        for low in (0, 1, 2)
        for high in (0, 1)
        for dilation in (1, 2)
    ],
)
def test_a_halo_is_what_the_windows_of_a_piece_read_outside_it(window: Window, extent: int, results: int) -> None:
    """Counted: the elements that the results of the second of four devices read, against its own."""
    read = window.moved_along(extent, results)
    assert read is not None
    first, last = results // 4, results // 2 - 1
    places = [
        r * window.stride - window.low + k * window.dilation for r in (first, last) for k in range(window.size)
    ]
    own = range(extent // 4, extent // 2)
    assert read == (max(own.start - min(places), 0), max(max(places) - own.stop + 1, 0))


def test_an_axis_that_can_cut_the_batch_cuts_no_rows() -> None:
    case = next(c for c in HALOS if c.label == "halo")
    rule = rule_for(equation(case).shapes)  # two images
    (halo,) = rule.halos
    for factors in strategies(rule, AXES).factors.tolist():
        if factors[1] == halo.factor:
            assert factors[0] == halo.rather or factors[0] == halo.factor, factors
    assert not (strategies(rule, (("data", 2),)).factors == halo.factor).any()


def test_a_kernels_gradient_cut_by_rows_is_still_wrong_beside_an_idle_axis(mesh_4x2: Mesh) -> None:
    """Why a rule cuts the rows of a kernel's gradient only where the batch and they fill the mesh.

    When this fails the partitioner has been mended: drop `Halo.fills`.
    """
    eq = equation(next(c for c in CASES if c.label == "kernel's gradient, halo"))
    rule = rule_for(eq.shapes)
    (halo,) = rule.halos
    rows = [NamedSharding(mesh_4x2, PartitionSpec(*("data" if halo.factor in f else None for f in dims)))
            for dims in rule.operands]  # fmt: skip
    (cut,) = jax.jit(eq.fn, in_shardings=rows, out_shardings=NamedSharding(mesh_4x2, PartitionSpec()))(
        *(jax.device_put(x, s) for x, s in zip(eq.operands, rows, strict=True))
    )
    (right,) = jax.jit(eq.fn)(*eq.operands)
    np.testing.assert_allclose(np.asarray(cut), 2 * np.asarray(right), rtol=1e-4)
