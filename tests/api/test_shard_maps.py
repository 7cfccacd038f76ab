"""Steps with a `jax.shard_map` of their own, as ring attention and expert layers are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxplan

BATCH, LENGTH, HEADS, DIM, EXPERTS = 8, 64, 2, 16, 4
WIDTH = HEADS * DIM


def ring(query: Any, key: Any, value: Any) -> Any:
    """Attention of pieces [batch, length, heads, dim] of the sequence, whose keys and values go around."""
    size, me, length = lax.axis_size("model"), lax.axis_index("model"), query.shape[1]
    places = me * length + jnp.arange(length)

    def turn(carry: Any, i: Any) -> Any:
        key, value, out, most, total = carry
        others = (me - i) % size * length + jnp.arange(length)
        scores = jnp.where(places[:, None] >= others, jnp.einsum("bqhd,bkhd->bhqk", query, key), -1e9)
        new = jnp.maximum(most, scores.max(-1))
        shares, kept = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
        out = out * kept[..., None] + jnp.einsum("bhqk,bkhd->bhqd", shares, value)
        onward = [lax.ppermute(x, "model", [(j, (j + 1) % size) for j in range(size)]) for x in (key, value)]
        return (*onward, out, new, total * kept + shares.sum(-1)), None

    def start(fill: float, *shape: int) -> Any:
        return lax.pcast(jnp.full(shape, fill), ("data", "model"), to="varying")

    rows = query.shape[0], HEADS, length
    carry = key, value, start(0, *rows, DIM), start(-1e9, *rows), start(0, *rows)
    (_, _, out, _, total), _ = lax.scan(jax.checkpoint(turn), carry, jnp.arange(size))
    return (out / total[..., None]).transpose(0, 2, 1, 3)


def experts(x: Any, up: Any, down: Any, router: Any) -> Any:
    """Each token of pieces [batch, length, width] to its best expert, which are spread over devices."""
    tokens = x.reshape(-1, WIDTH)
    shares = jax.nn.softmax(tokens @ router)
    room = len(tokens) // EXPERTS * 2
    chosen = jax.nn.one_hot(shares.argmax(-1), EXPERTS)
    place = ((jnp.cumsum(chosen, 0) - 1) * chosen).astype(jnp.int32)
    sent = (chosen * (place < room))[..., None] * jax.nn.one_hot(place, room)
    mine = lax.all_to_all(jnp.einsum("tec,td->ecd", sent, tokens), "model", 0, 1, tiled=True)
    made = jnp.einsum("ecf,efd->ecd", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", mine, up)), down)
    back = lax.all_to_all(made, "model", 1, 0, tiled=True)
    return jnp.einsum("tec,ecd->td", sent * shares.max(-1)[:, None, None], back).reshape(x.shape)


SHAPES = {
    "heads": (3, WIDTH, HEADS, DIM), "out": (HEADS, DIM, WIDTH), "up": (EXPERTS, WIDTH, 2 * WIDTH),
    "down": (EXPERTS, 2 * WIDTH, WIDTH), "router": (WIDTH, EXPERTS),
}  # fmt: skip


def step_on(mesh: Mesh, remat: bool) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    cut = P("data", "model")
    attend: Any = jax.shard_map(ring, mesh=mesh, in_specs=cut, out_specs=cut)
    think: Any = jax.shard_map(experts, mesh=mesh, in_specs=(cut, P("model"), P("model"), P()), out_specs=cut)
    if remat:
        attend, think = jax.checkpoint(attend), jax.checkpoint(think)

    def step(weights: dict[str, Any], x: Any) -> Any:
        def loss(weights: dict[str, Any]) -> Any:
            made = attend(*jnp.einsum("btd,pdhk->pbthk", x, weights["heads"]))
            mixed = x + jnp.einsum("bthk,hkd->btd", made, weights["out"])
            return jnp.mean((think(mixed, weights["up"], weights["down"], weights["router"]) - x) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    random = np.random.default_rng(0)
    weights = {name: random.normal(size=s).astype(np.float32) / s[-2] ** 0.5 for name, s in SHAPES.items()}
    return step, weights, random.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("remat", [False, True])
def test_what_a_shard_map_sends_is_planned_as_written(remat: bool, mesh_4x2: Mesh) -> None:
    step, *arguments = step_on(mesh_4x2, remat)
    sharded = jaxplan.auto_shard(step, mesh_4x2, hardware="tpu-v5e")
    for found, wanted in zip(*(jax.tree.leaves(f(*arguments)) for f in (sharded, jax.jit(step))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    plan = sharded.plan(*arguments)
    own = [c for c in plan.collectives if c.kind in ("collective_permute", "all_to_all")]
    assert {c.primitive for c in own} == {"shard_map"}
    assert all("test_shard_maps.py" in c.where for c in own)
    assert not plan.warnings and not plan.unruled_s


def test_what_a_shard_map_computes_counts(mesh_4x2: Mesh) -> None:
    def product(a: Any, b: Any) -> Any:
        return jnp.tanh(a @ b)

    spec = P("data"), P(None, "model")
    mapped = jax.shard_map(product, mesh=mesh_4x2, in_specs=spec, out_specs=P("data", "model"))
    shapes = [jax.ShapeDtypeStruct((8192, 8192), "bfloat16")] * 2
    pins = {"a": spec[0], "b": spec[1]}
    plans = [jaxplan.plan(f, mesh_4x2, *shapes, hardware="tpu-v5e", constraints=pins) for f in (product, mapped)]
    plain, own = (plan.cost for plan in plans)
    assert own.step_s == pytest.approx(plain.step_s, rel=0.01)
    (flops,) = own.flops_by_source.values()
    by_hand = jaxplan.audit(mapped, mesh_4x2, *shapes, in_shardings=spec, hardware="tpu-v5e")
    assert flops == by_hand.theirs.flops == 2 * 8192**3 / 8

    def loops(a: Any, b: Any) -> Any:
        inner = jax.shard_map(product, in_specs=(P(), P(None, "model")), out_specs=P(None, "model"))
        return lax.scan(lambda c, _: (inner(c, b), None), a, length=3)[0]

    nested = jax.shard_map(
        loops, mesh=mesh_4x2, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    cost = jaxplan.plan(nested, mesh_4x2, *shapes, hardware="tpu-v5e").cost
    assert sum(cost.flops_by_source.values()) == 3 * 2 * 8192**3 / 8

    def wide(a: Any) -> Any:
        return jnp.sum(jnp.sort(a @ a.T, axis=0), axis=1)

    inside = jax.shard_map(wide, mesh=mesh_4x2, in_specs=P(("data", "model")), out_specs=P(("data", "model")))
    plan = jaxplan.plan(inside, mesh_4x2, jax.ShapeDtypeStruct((65536, 64), "float32"), hardware="tpu-v5e")
    assert plan.cost.peak_bytes >= 2 * 8192**2 * 4  # the square and its sorted copy


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_what_a_shard_map_sends_is_in_all_that_is_compared(overlap: float, mesh_4x2: Mesh) -> None:
    """The objective, its bound, other layouts and templates; and weights that only it multiplies are parameters."""

    def pair(up: Any, down: Any, x: Any) -> Any:
        return lax.psum(jnp.tanh(x @ up) @ down, "model")

    specs = P(None, "model"), P("model"), P("data")
    mapped = jax.shard_map(pair, mesh=mesh_4x2, in_specs=specs, out_specs=P("data"))

    def step(weights: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(lambda w: (mapped(w["up"], w["down"], x) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - g, weights, slopes), value

    weights = {"up": jax.ShapeDtypeStruct((512, 2048), "float32"), "down": jax.ShapeDtypeStruct((2048, 512), "float32")}
    x, options = jax.ShapeDtypeStruct((2048, 512), "float32"), {"overlap": overlap}
    plan = jaxplan.plan(step, mesh_4x2, weights, x, hardware="tpu-v5e", donate_argnums=0, options=options)
    cost = plan.cost
    assert cost.objective_s == pytest.approx(cost.step_s, rel=0.02)
    assert cost.gap < 0.001 and cost.bound_s == pytest.approx(cost.step_s, rel=0.02)
    assert all(other.objective_s > cost.step_s for other in plan.alternatives["weights/up"][1:])
    assert all(seconds >= cost.step_s * 0.98 for seconds in plan.templates.values())
    assert {leaf.kind for leaf in plan.inputs if leaf.path != "x"} == {"parameter"}
