"""What is computed twice, and what XLA propagates then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxplan
from jaxplan._jax import parse_module
from jaxplan.hardware import compile_for
from jaxplan.sharding import Partitioned, imported_copy, partition, partition_imported
from jaxplan.sharding.imported import nested

ROWS, WIDTH = 512, 256
SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (ROWS, WIDTH), (WIDTH,), (WIDTH,))]


def step_on(mesh: Any) -> Callable[..., Any]:
    """Features of positions are made twice, once for what is cut by rows and once for what is whole."""

    def features() -> jax.Array:
        at = jnp.arange(ROWS, dtype=jnp.float32)[:, None] * jnp.linspace(0.0, 1.0, WIDTH // 2)[None]
        return jnp.concatenate([jnp.sin(at), jnp.cos(at)], axis=1)

    def step(w: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        first = jax.lax.with_sharding_constraint(features() @ w, NamedSharding(mesh, P("data")))
        second = jax.lax.with_sharding_constraint(jnp.tanh(features() * a) @ w, NamedSharding(mesh, P(None, None)))
        return first * x, second, jnp.sum(features() * b)

    return step


def lowered(mesh: Any, *platforms: str) -> Any:
    specs = P(), P("data"), P(), P()
    jitted = jax.jit(step_on(mesh), in_shardings=[NamedSharding(mesh, spec) for spec in specs])
    return jitted.trace(*SHAPES).lower(lowering_platforms=platforms or None)


def sent(found: Partitioned) -> Counter[tuple[Any, ...]]:
    return Counter((c.kind, c.axes, c.bytes) for c in found.collectives if c.kind != "all_slice")


def test_it_is_computed_once_and_found_by_each_name(mesh_4x2: Mesh) -> None:
    """Where XLA merges, and nowhere else; all results keep their shapes and names."""
    module = lowered(mesh_4x2).compiler_ir("stablehlo")
    names = [Counter(op.name for op in nested(imported_copy(module, p).operation)) for p in ("cpu", "cuda", "tpu")]
    assert names[0]["stablehlo.sine"] == names[1]["stablehlo.sine"] == 3
    assert names[2]["stablehlo.sine"] == 1
    assert imported_copy(module, "tpu").operation.verify()
    made = [Counter((op.scope, op.shapes) for op in partition(module, platform=p).ops) for p in ("cpu", "tpu")]
    assert {key for key in made[0] if len(key[1][0]) == 2} <= {*made[1]}


def test_tokens_are_left_apart() -> None:
    """Two effects that each begin with a token of their own, and a product that is made twice."""
    text = """
    func.func @main(%a: tensor<4xf32>) -> (tensor<4xf32>, !stablehlo.token, !stablehlo.token) {
      %0 = stablehlo.create_token : !stablehlo.token
      %1 = stablehlo.create_token : !stablehlo.token
      %2 = stablehlo.multiply %a, %a : tensor<4xf32>
      %3 = stablehlo.multiply %a, %a : tensor<4xf32>
      %4 = stablehlo.add %2, %3 : tensor<4xf32>
      return %4, %0, %1 : tensor<4xf32>, !stablehlo.token, !stablehlo.token
    }"""
    module = imported_copy(text, "tpu")
    assert module.operation.verify()
    names = Counter(op.name.removeprefix("stablehlo.") for op in nested(module.operation))
    assert (names["create_token"], names["multiply"], names["maximum"]) == (2, 1, 1)


@pytest.mark.aot_tpu
def test_it_is_cut_as_xla_for_tpu_cuts_it(tmp_path: Path, tpu_topology: Callable[[str], Any]) -> None:
    """The same collectives as Shardy's passes make of the module that XLA propagates; not without merging."""
    tpu_topology("v5e:2x4")
    there = jaxplan.target("tpu-v5e:2x4")
    mesh = there.mesh(data=4, model=2)
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "shardy"}
    asked = lowered(mesh, "tpu")
    compile_for(asked, mesh, dict(there.compiler_options) | dump)
    (path,) = tmp_path.glob("shardy/*/01.before_propagation.mlir")
    made = sent(partition_imported(parse_module(path.read_text())))
    module = asked.compiler_ir("stablehlo")
    assert sent(partition(module, platform="tpu")) == made
    assert sent(partition(module)) != made
