"""What a search believes its plan to cost is what the evaluator says, which asks the partitioner and no search."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxplan
from jaxplan.api import Found, Options, Pipeline, model_of, target_of
from jaxplan.ir import trace
from jaxplan.lowering import Priced, price
from jaxplan.sharding import UNREDUCED
from models import gpt, llama, mlp, moe, nmt, vit

_BLOCK = {"n_layers": 2, "seq_len": 512, "batch_size": 32, "vocab_size": 8192, "scan_layers": True}
CASES: dict[str, tuple[ModuleType, Any]] = {
    "mlp": (mlp, mlp.Config(input_dim=4096, hidden_dims=(8192, 4096), n_classes=1024, batch_size=8192)),
    "gpt": (gpt, gpt.Config(dim=1024, n_heads=8, **_BLOCK)),
    "moe": (
        moe,
        moe.Config(
            dim=1024, n_heads=8, n_kv_heads=8, head_dim=128, hidden_dim=2048, n_experts=8, top_k=2, **_BLOCK
        ),
    ),
    "llama": (llama, llama.Config(dim=1024, n_heads=16, n_kv_heads=8, hidden_dim=2816, **_BLOCK)),
    # its cells' gradients are summed in parts, a loop long
    "nmt": (nmt, replace(nmt.CONFIGS["flexflow"], n_layers=1)),
    "vit": (vit, replace(vit.CONFIGS["vit-b16"], n_layers=2, scan_layers=True, batch_size=64)),
}
"""Steps large enough that bytes decide: of a tiny one, what starting the summing of a few scalars takes."""

OWN_SHARE, TEMPLATE_SHARE = 0.005, 0.02
"""Of the step: where a template makes axes change their order on the way, that is in no plan."""


@functools.cache
def pipeline(case: str, hardware: str) -> Pipeline:
    model, config = CASES[case]
    state = jax.eval_shape(lambda: model.init_state(config, jax.random.key(0)))
    traced = trace(model.make_train_step(config), (state, model.batch_shapes(config)), {}, donate_argnums=(0,))
    target = target_of(AbstractMesh((4, 2), ("data", "model")), hardware)
    options = Options(time_limit_s=60.0)
    return Pipeline(
        traced, target, model_of(target, options), target.profile.usable_bytes, options, {}, {}, lambda _: None
    )


def evaluated(planner: Pipeline, found: Found) -> Priced:
    candidate = planner.checked("plan", found)
    return price(
        planner.traced, planner.rules, planner.kinds, planner.model, planner.target.abstract,
        candidate.inputs, candidate.outputs, candidate.checked.constraints, platform=planner.target.platform,
    )  # fmt: skip


def beliefs(planner: Pipeline, template: str | None) -> tuple[float, float]:
    """Seconds of a step: by the search's problem, less what it adds to tell equals apart; and by the evaluator."""
    found = planner.search({} if template is None else planner.template(template) or {})
    assert isinstance(found, Found)
    chosen, problem = found.result.assignment, found.space.problem
    sent_s = sum(float(edge.costs_s[chosen[edge.tail], chosen[edge.head]]) for edge in problem.edges)
    # what results are copied for is a price of edges, which the decision counts as computing
    sent_s -= sum(float(x.seconds[chosen[x.made], chosen[x.kept]]) for x in found.space.settling)
    sent_s += planner.checked("plan", found).lone_s  # starts that others were taken to share
    return sum(found.decision.compute_s.values()) + sent_s, evaluated(planner, found).step_s()


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "hardware"),
    [
        ("mlp", "tpu-v5e"), ("moe", "tpu-v5e"), ("mlp", "h100"),
        *(pytest.param(case, "tpu-v5e", marks=_SLOW) for case in ("gpt", "llama", "vit")),
        *(pytest.param(case, "h100", marks=_SLOW) for case in ("gpt", "moe", "llama", "vit")),
    ],
)  # fmt: skip
def test_the_search_and_the_evaluator_price_its_plan_alike(case: str, hardware: str) -> None:
    believed_s, evaluated_s = beliefs(pipeline(case, hardware), None)
    model = pipeline(case, hardware).model
    start_s = model.collective_over("all_reduce", 0.0, ["data", "model"])  # of a loss beside a norm, which may be one
    assert abs(believed_s - evaluated_s) <= OWN_SHARE * evaluated_s + start_s


def test_sums_that_a_loop_adds_up_in_parts_are_computed_as_decided() -> None:
    planner = pipeline("nmt", "h100")
    found = planner.search({})
    assert isinstance(found, Found)
    values, ops = found.decision.values, planner.traced.graph.ops
    pending = {v for v, row in values.items() if (row == UNREDUCED).any()}
    in_parts = [op for op in ops if op.trips > 1 and not pending.isdisjoint(op.results)]
    assert {op.primitive for op in in_parts} >= {"add_any", "dot_general"}
    found_s, decided_s = evaluated(planner, found).op_seconds, found.decision.compute_s
    for op in in_parts:
        if op.index in decided_s:
            assert found_s[op.index] == pytest.approx(decided_s[op.index], rel=OWN_SHARE), op.primitive


def _template_cases() -> list[Any]:
    """(case, hardware, template); the slow ones marked."""
    cases = []
    for case in ("mlp", "gpt", "moe", "llama"):
        for template in ("data", "zero1", "fsdp", "megatron"):
            marks = [] if case == "mlp" or (case, template) == ("moe", "zero1") else [_SLOW]
            cases.append(pytest.param(case, "tpu-v5e", template, marks=marks))
    return cases


@pytest.mark.parametrize(("case", "hardware", "template"), _template_cases())
def test_the_search_and_the_evaluator_price_templates_alike(case: str, hardware: str, template: str) -> None:
    believed_s, evaluated_s = beliefs(pipeline(case, hardware), template)
    assert believed_s == pytest.approx(evaluated_s, rel=TEMPLATE_SHARE)


def test_what_one_operand_of_a_product_is_sent_as_the_other_that_stays_does_not_decide() -> None:
    """Roots of a matrix, as Shampoo takes them: each product's left operand stays in pieces that others read in f32."""

    def step(matrix: jax.Array) -> jax.Array:
        def iterate(_: int, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            left, root = both
            turn = (5 * jnp.eye(4096) - left) / 4
            return jnp.linalg.matrix_power(turn, 4) @ left, root @ turn

        return jax.lax.fori_loop(0, 10, iterate, (matrix, jnp.eye(4096)))[1]

    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plan = jaxplan.plan(step, AbstractMesh((4, 2), ("data", "model")), shape, hardware="tpu-v5e")
    assert plan.cost.gap < 0.001 and plan.cost.step_s == pytest.approx(plan.cost.objective_s, rel=1e-3)


def test_what_a_product_reads_of_a_carry_is_priced_rounded() -> None:
    """A direction of conjugate gradients, in f32, which TPUs' products round before it is gathered."""

    def step(x: Any, direction: Any) -> Any:
        def again(_: int, p: Any) -> Any:
            moved = x.T @ jnp.tanh(x @ p)
            return moved / jnp.vdot(p, moved) - 0.1 * p

        return jax.lax.fori_loop(0, 16, again, direction)

    shape = jax.ShapeDtypeStruct
    plan = jaxplan.plan(
        step, AbstractMesh((4, 2), ("data", "model")), shape((65536, 2048), jnp.float32),
        shape((2048, 4096), jnp.float32), hardware="tpu-v5e", options={"compare_templates": False},
    )  # fmt: skip
    assert any(c.kind == "all_gather" and c.trips == 16 for c in plan.collectives)
    assert plan.cost.objective_s == pytest.approx(plan.cost.step_s, rel=OWN_SHARE)


def test_numbers_that_wait_for_one_another_or_lie_in_other_loops_are_not_summed_together() -> None:
    """Two solves by conjugate gradients, one after the other: each iteration's second product waits for its first."""

    def step(x: Any, target: Any) -> Any:
        def again(_: int, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            w, r, p = state
            moved = (x * p).sum(1)[:, None] * x
            left = jnp.vdot(r, r)
            at = left / jnp.vdot(p, moved)
            rest = r - at * moved
            return w + at * p, rest, rest + jnp.vdot(rest, rest) / left * p

        once = jax.lax.fori_loop(0, 16, again, (target, target, target))[0]
        return jax.lax.fori_loop(0, 16, again, (once, once, once))[0]

    shape = jax.ShapeDtypeStruct((65536, 1024), jnp.float32)
    plan = jaxplan.plan(
        step, AbstractMesh((4, 2), ("data", "model")), shape, shape, hardware="tpu-v5e",
        options={"compare_templates": False},
    )  # fmt: skip
    sums = [c for c in plan.collectives if c.kind == "all_reduce" and c.trips == 16]
    assert len(sums) == 6
    model = model_of(target_of(AbstractMesh((4, 2), ("data", "model")), "tpu-v5e"), Options())
    start_s = model.collective_over("all_reduce", 4.0, ["data", "model"])
    assert sum(c.seconds_s for c in sums) == pytest.approx(2 * 16 * 2 * start_s, rel=0.02)  # two at once, then one


@pytest.mark.parametrize(("depth", "rows", "bias"), [(2, 4096, False), (2, 16384, False), (3, 16384, True)])
def test_three_axes_send_in_a_loop_what_was_decided(depth: int, rows: int, bias: bool) -> None:
    """Conjugate gradients with products by Gauss-Newton: in their loop weights are read whole and in pieces, and
    gradients are turned before they are scattered over two of three axes.

    Weights entered it in pieces, since equally many bytes are gathered once behind it (21 % below its evaluation), and
    sums were pinned on their way to who scatters them, so that they were made whole (8 %).
    """

    def network(layers: Any, x: Any) -> Any:
        for i, layer in enumerate(layers):
            x = x @ layer["w"] + layer.get("b", 0)
            x = jnp.tanh(x) if i < depth else x
        return x

    def step(layers: Any, x: Any, y: Any) -> Any:
        def of(layers: Any) -> Any:
            return network(layers, x)

        def loss(z: Any) -> Any:
            return jnp.mean((z - y) ** 2)

        made, back = jax.vjp(of, layers)

        def product(direction: Any) -> Any:
            pushed = jax.jvp(of, (layers,), (direction,))[1]
            (pulled,) = back(jax.jvp(jax.grad(loss), (made,), (pushed,))[1])
            return jax.tree.map(lambda a, b: a + 0.1 * b, pulled, direction)

        gradients = jax.tree.map(jnp.negative, back(jax.grad(loss)(made))[0])
        found = jax.scipy.sparse.linalg.cg(product, gradients, maxiter=10)[0]
        slope = sum(map(jnp.vdot, jax.tree.leaves(gradients), jax.tree.leaves(found)))
        return jax.tree.map(lambda w, d: w + slope * d, layers, found)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "float32")

    sizes = [3072, *[4096] * depth, 1000]
    layers = [
        {"w": array(a, b), **({"b": array(b)} if bias else {})} for a, b in itertools.pairwise(sizes)
    ]
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "model"))
    cost = jaxplan.plan(step, mesh, layers, array(rows, 3072), array(rows, 1000), hardware="tpu-v5p").cost
    assert cost.objective_s == pytest.approx(cost.step_s, rel=0.01)


def test_what_is_scattered_into_zeros_starts_by_itself() -> None:
    """Sums of rows by group: the zeros they are added to are not fetched with the weights of later products."""

    def step(weights: Any, rows: Any, groups: Any) -> Any:
        for w in weights:
            sums = jax.ops.segment_sum(rows @ w, groups, 16384)
            rows = rows + jnp.tanh(sums @ w)[groups]
        return jnp.sum(rows**2)

    weights = [jax.ShapeDtypeStruct((128, 128), "float32")] * 3
    rows = jax.ShapeDtypeStruct((2**20, 128), "float32"), jax.ShapeDtypeStruct((2**20,), "int32")
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "model"))
    cut = {"rows": PartitionSpec(("data", "fsdp", "model"))}
    cost = jaxplan.plan(step, mesh, weights, *rows, hardware="tpu-v5p", constraints=cut).cost
    assert cost.comm_s > 1e-4 and cost.objective_s == pytest.approx(cost.step_s, rel=0.002)
