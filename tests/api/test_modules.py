"""NNX steps that change their modules in place, as `nnx.jit` users write them: the caller's modules are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import jaxplan

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
LABELS = np.arange(16) % 8


class Net(nnx.Module):
    """Two layers that share a weight, batch statistics and a stream of keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(8, 8, rngs=rngs)
        self.last.kernel = self.first.kernel

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def build() -> tuple[Net, nnx.Optimizer[Net]]:
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)


def loss_of(net: Any, x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(net(x), labels).mean()


def train(net: Net, optimizer: nnx.Optimizer[Net], metric: nnx.metrics.Average, x: Any, labels: Any) -> Any:
    net.train()
    loss, gradients = nnx.value_and_grad(loss_of)(net, x, labels)
    optimizer.update(net, gradients)
    metric.update(values=loss)
    return loss


def sharded(mesh: Any, fn: Callable[..., Any] = train, **settings: Any) -> Any:
    return jaxplan.auto_shard(fn, mesh, options={"compare_templates": False}, **settings)


def planned_steps(step: Any) -> int:
    """Plans that a step holds, those of its modules' states included."""
    return len({id(v) for s in (step, *step._of_modules.steps) for v in s._variants.values()})


def leaves(*modules: Any) -> list[Any]:
    return [
        jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        for leaf in map(jnp.asarray, jax.tree.leaves(nnx.state(modules)))
    ]


@pytest.mark.parametrize("donate", [(), (0, 1, 2)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_modules_are_trained_as_under_nnx_jit(wrapped: bool, donate: tuple[int, ...], mesh_4x2: Mesh) -> None:
    step = sharded(mesh_4x2, nnx.jit(train) if wrapped else train, donate_argnums=donate)
    reference = nnx.jit(train)
    ours, theirs = (*build(), nnx.metrics.Average()), (*build(), nnx.metrics.Average())
    for module in (ours[0], theirs[0]):
        module.eval()  # the step changes that: no array, and its second call is of another structure
    for _ in range(4):
        np.testing.assert_allclose(step(*ours, X, LABELS), reference(*theirs, X, LABELS), rtol=1e-5)
    for one, other in zip(leaves(*ours), leaves(*theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    assert ours[0].last.kernel is ours[0].first.kernel
    assert not ours[0].dropout.deterministic and int(ours[1].step[...]) == 4
    assert ours[2].compute() == pytest.approx(float(theirs[2].compute()), rel=1e-5)
    assert isinstance(ours[0].first.kernel[...].sharding, NamedSharding)
    assert planned_steps(step) == 1


def test_paths_are_those_of_the_modules(mesh_4x2: Mesh) -> None:
    plan = sharded(mesh_4x2, donate_argnums=(0, 1)).plan(*build(), nnx.metrics.Average(), X, LABELS)
    kinds = {tensor.path: tensor.kind for tensor in plan.inputs}
    assert kinds["net/first/kernel/value"] == "parameter" and "net/last/kernel/value" not in kinds
    assert kinds["optimizer/opt_state/0/mu/first/kernel/value"] == "optimizer" and kinds["x"] == "batch"
    # the metric is no argument that is given away, yet it comes back like the others
    assert [tensor.path for tensor in plan.outputs if not tensor.alias] == ["result/3"]


def test_modules_by_keyword_and_in_containers(mesh_4x2: Mesh) -> None:
    net, optimizer = build()
    metric = nnx.metrics.Average()
    first = sharded(mesh_4x2)(net, optimizer, metric, labels=LABELS, x=X)
    step = sharded(mesh_4x2)
    twin, twin_optimizer = build()
    assert step(optimizer=twin_optimizer, net=twin, metric=nnx.metrics.Average(), x=X, labels=LABELS) == first
    assert int(twin_optimizer.step[...]) == int(optimizer.step[...]) == 1

    def packed(state: dict[str, Any], batch: Any) -> Any:
        return train(state["net"], state["optimizer"], state["metric"], *batch)

    last, last_optimizer = build()
    state = {"net": last, "optimizer": last_optimizer, "metric": nnx.metrics.Average()}
    assert sharded(mesh_4x2, packed, donate_argnums=0)(state, (X, LABELS)) == first
    np.testing.assert_allclose(last.first.kernel[...], net.first.kernel[...], rtol=1e-5)


def test_modules_that_nothing_changes_are_pytrees(mesh_4x2: Mesh) -> None:
    net, _ = build()
    net.eval()
    predict = sharded(mesh_4x2, lambda net, x: net(x))
    np.testing.assert_allclose(predict(net, X), net(X), rtol=1e-5, atol=1e-6)
    assert planned_steps(predict) == 1 and not predict._of_modules.steps
    net = nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # as pytrees, modules share nothing

    def functional(net: Any, x: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(net, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, net, gradients), loss

    step = sharded(mesh_4x2, functional, donate_argnums=0)
    losses = []
    for _ in range(3):
        net, loss = step(net, X, LABELS)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]


def test_modules_are_made_on_the_plans_shardings(mesh_4x2: Mesh) -> None:
    step = sharded(mesh_4x2, constraints={"net/first/kernel/*": jax.P("data")})
    plan = step.plan(*nnx.eval_shape(build), nnx.metrics.Average(), X, LABELS)
    net, optimizer = step.init(build)
    assert net.first.kernel[...].sharding.spec == plan.specs["net/first/kernel/value"] == jax.P("data")
    assert net.first.kernel is net.last.kernel
    np.testing.assert_array_equal(net.first.kernel[...], build()[0].first.kernel[...])
    assert isinstance(step.init(lambda: build()[0]), Net)
    before = float(loss_of(net, X, LABELS))
    for _ in range(5):
        step(net, optimizer, nnx.metrics.Average(), X, LABELS)
    assert float(loss_of(net, X, LABELS)) < before
    assert planned_steps(step) == 1


def test_a_plan_of_modules_is_taken_away_as_python(mesh_4x2: Mesh) -> None:
    settings = {"constraints": {"net/first/kernel/*": jax.P("data")}}
    plan = sharded(mesh_4x2, **settings).plan(*build(), nnx.metrics.Average(), X, LABELS)
    source = plan.to_python()
    names: dict[str, Any] = {}
    exec(source, names)
    net, optimizer = build()
    names.update(nnx=nnx, train=train, net=net, optimizer=optimizer, metric=nnx.metrics.Average(), x=X, labels=LABELS)
    usage = [line.removeprefix("    ") for line in source.split('"""')[1].splitlines() if line.startswith("    ")]
    exec("\n".join(usage), names)
    assert net.first.kernel[...].sharding.spec == jax.P("data") and net.first.kernel is net.last.kernel
    loss = names["step"](net, optimizer, names["metric"], X, LABELS)
    np.testing.assert_allclose(loss, nnx.jit(train)(*build(), nnx.metrics.Average(), X, LABELS), rtol=1e-5)
    assert net.first.kernel[...].sharding.spec == jax.P("data")


def test_several_arguments_are_made_at_once(mesh_4x2: Mesh) -> None:
    def step(params: Any, moments: Any, x: Any) -> Any:
        return {"w": params["w"] - x.sum()}, {"m": moments["m"] + x.mean()}

    def init() -> Any:
        return {"w": jnp.ones((8, 8))}, {"m": jnp.zeros((16,))}

    planned = sharded(mesh_4x2, step, constraints={"params/w": jax.P("data"), "moments/m": jax.P("model")})
    planned.plan(*jax.eval_shape(init), X)
    params, moments = planned.init(init)
    assert (params["w"].sharding.spec, moments["m"].sharding.spec) == (jax.P("data"), jax.P("model"))


def test_state_that_comes_back_in_another_type_is_named(mesh_4x2: Mesh) -> None:
    def drift(net: Net, x: Any) -> None:
        net.first.bias[...] = net.first.bias[...] + x.sum()
        net.norm.mean.set_value(net.norm.mean[...].astype(jnp.bfloat16))

    with pytest.raises(jaxplan.TraceError, match=r"net/norm/mean/value: goes in as float32\[8\], comes out as bf"):
        sharded(mesh_4x2, drift)(build()[0], X)


def test_what_modules_become_may_depend_on_shapes(mesh_4x2: Mesh) -> None:
    class Seen(nnx.Module):
        def __init__(self) -> None:
            self.total, self.rows = nnx.Variable(jnp.zeros(())), 0

    def look(seen: Seen, x: Any) -> Any:
        seen.total[...] += x.sum()
        seen.rows = len(x)

    step = sharded(mesh_4x2, look)
    for rows in (X, X[:8], X):
        seen = Seen()
        step(seen, rows)
        assert seen.rows == len(rows) and float(seen.total[...]) == pytest.approx(rows.sum(), rel=1e-4)


def test_what_else_takes_a_step_takes_modules(mesh_4x2: Mesh) -> None:
    arguments = (*build(), nnx.metrics.Average(), X, LABELS)
    verification = jaxplan.verify(sharded(mesh_4x2), *arguments, numerics=True)
    assert [finding.grave for finding in verification.findings if finding.what == "numerics"] == [False]
    assert int(arguments[1].step[...]) == 0
    mesh = AbstractMesh((4, 2), ("data", "model"))
    shapes = (*nnx.eval_shape(build), nnx.metrics.Average(), X, LABELS)
    whole = jaxplan.plan(train, mesh, *shapes, hardware="tpu-v5e", options={"compare_templates": False})
    frontier = jaxplan.frontier(train, mesh, *shapes, hardware="tpu-v5e")
    assert frontier.points[-1].step_s == pytest.approx(whole.cost.step_s, rel=1e-3)
    audit = jaxplan.audit(train, mesh, *shapes, template="data", hardware="tpu-v5e")
    assert audit.plan.cost.step_s == pytest.approx(whole.cost.step_s, rel=1e-3)
