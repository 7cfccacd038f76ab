"""Products that XLA simplifies before it propagates shardings: as what, and that they are cut and summed as before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan.hardware import compile_for
from jaxplan.sharding import imported_copy, partition
from jaxplan.sharding.imported import nested, scope_of

AXES = ("data", "model")
DOT, SUM, PRODUCT = "dot", "sum", "multiply"

# einsum, shapes, what it is for TPU
PRODUCTS: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = [
    ("bk,kn->bn", (16, 512), (512, 256), DOT),
    ("bk,kn->bn", (2, 512), (512, 256), DOT),
    ("bk,kn->bn", (1, 512), (512, 256), SUM),
    ("bk,kn->bn", (256, 512), (512, 1), SUM),
    ("bk,kn->bn", (256, 1), (1, 512), PRODUCT),
    ("kb,kn->bn", (256, 512), (256, 1), SUM),
    ("bk,k->b", (256, 512), (512,), SUM),
    ("k,bkn->bn", (512,), (64, 512, 32), SUM),
    ("k,knm->nm", (512,), (512, 64, 32), SUM),
    ("m,n->mn", (64,), (32,), PRODUCT),
    ("bm,bn->bmn", (256, 64), (256, 32), PRODUCT),
    ("bk,bk->b", (256, 512), (256, 512), SUM),
    ("bk,bkn->bn", (256, 512), (256, 512, 64), DOT),
    ("bk,bkn->bn", (64, 512), (64, 512, 63), SUM),
    ("bk,bkn->bn", (64, 63), (64, 63, 512), SUM),
    ("bk,nbk->nb", (256, 512), (64, 256, 512), DOT),
    ("bk,nbk->nb", (256, 512), (32, 256, 512), SUM),
    ("bqk,bkn->bqn", (256, 1, 512), (256, 512, 64), SUM),
    ("bhqk,bhnk->bhqn", (64, 8, 1, 128), (64, 8, 256, 128), SUM),
    ("kl,xkly->xy", (16, 32), (8, 16, 32, 64), SUM),
    ("kl,klb->b", (256, 512), (256, 512, 64), DOT),
    ("bk,bkxy->bxy", (64, 512), (64, 512, 64, 8), DOT),
    ("bk,bkxy->bxy", (64, 512), (64, 512, 8, 64), SUM),
]


def step(*operands: jax.Array) -> list[jax.Array]:
    made = []
    for number, (spec, *_) in enumerate(PRODUCTS):
        with jax.named_scope(f"product{number}x"):
            made.append(jnp.einsum(spec, *operands[2 * number : 2 * number + 2]))
    return made


def lowered(mesh: Any, platform: str, dtype: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for _, *both, _ in PRODUCTS for shape in both]
    laid = [NamedSharding(mesh, P())] * len(shapes)
    laid[0] = NamedSharding(mesh, P("data"))  # a module without shardings isn't propagated
    return jax.jit(step, in_shardings=laid).trace(*shapes).lower(lowering_platforms=(platform,))


def kinds(module: Any) -> list[str]:
    """What each of the products is in a module."""
    names: dict[int, set[str]] = {}
    for op in nested(module.operation):
        if found := re.search(r"product(\d+)x", scope_of(op.location) or str(op.location)):
            names.setdefault(int(found[1]), set()).add(op.name.removeprefix("stablehlo."))
    known = [names.get(number, set()) for number in range(len(PRODUCTS))]
    return [DOT if {"dot", "dot_general"} & one else SUM if "reduce" in one else PRODUCT for one in known]


def expected(platform: str) -> list[str]:
    return [DOT if kind == SUM and platform == "cuda" else kind for *_, kind in PRODUCTS]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.float8_e4m3fn])
def test_they_are_what_is_known_of_xla(platform: str, dtype: Any) -> None:
    mesh = AbstractMesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    module = imported_copy(lowered(mesh, platform, dtype).compiler_ir("stablehlo"), platform)
    assert module.operation.verify()
    assert kinds(module) == expected(platform)
    assert kinds(imported_copy(lowered(mesh, platform, dtype).compiler_ir("stablehlo"))).count(DOT) == len(PRODUCTS)


def as_compiled(target: str, folder: Path) -> Counter[str]:
    """How many are what in the module that a target's XLA propagates; XLA for GPU writes no names there."""
    there = jaxplan.target(target)
    platform = "cuda" if target.startswith("h100") else "tpu"
    dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "shardy"}
    told = dict(there.compiler_options) | dump
    compile_for(lowered(there.mesh(data=4, model=2), platform, jnp.float32), there.mesh(data=8), told)
    (path,) = folder.glob("shardy/*/01.before_propagation.mlir")
    made = Counter(re.findall(r"= \"?stablehlo\.(\w+)", path.read_text()))
    products, sums = made["dot"] + made["dot_general"], made["reduce"]
    return Counter({DOT: products, SUM: sums, PRODUCT: made["multiply"] - sums})


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_they_are_what_xla_for_tpu_makes_of_them(
    chip: str, tmp_path: Path, tpu_topology: Callable[[str], Any]
) -> None:
    tpu_topology(f"{chip}:2x4")
    assert as_compiled(f"tpu-{chip}:2x4", tmp_path) == Counter(expected("tpu"))


@pytest.mark.aot_gpu
@pytest.mark.usefixtures("cuda_compiler")
def test_they_are_what_xla_for_gpu_makes_of_them(tmp_path: Path) -> None:
    assert as_compiled("h100:1x1x8", tmp_path) == Counter(expected("cuda"))


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_they_are_cut_and_summed_as_before(number: int, mesh_4x2: Mesh) -> None:
    """By whatever dimension each operand is cut: the same collectives, and the same layout of the result."""
    spec, lhs, rhs, _ = PRODUCTS[number]
    left, right = spec.split("->")[0].split(",")
    for name in dict.fromkeys(left + right):
        sizes = [shape[names.index(name)] for names, shape in ((left, lhs), (right, rhs)) if name in names]
        if min(sizes) % 8:
            continue
        laid = [P(*(AXES if n == name else None for n in names)) for names in (left, right)]
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs)]
        jitted = jax.jit(
            lambda a, b: jnp.einsum(spec, a, b), in_shardings=[NamedSharding(mesh_4x2, one) for one in laid]
        )
        module = jitted.lower(*shapes).compiler_ir("stablehlo")
        found = [partition(module, platform=platform) for platform in ("cpu", "cuda", "tpu")]
        asked = [Counter((c.kind, c.axes, c.bytes) for c in one.collectives) for one in found]
        assert asked[0] == asked[1] == asked[2], (spec, name)
        assert found[0].output_layouts == found[1].output_layouts == found[2].output_layouts, (spec, name)
