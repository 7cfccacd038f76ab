"""What the partitioner says of some of many equal blocks is what it says of all of them."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxplan
from jaxplan.api import candidates
from jaxplan.lowering import check as check_once
from jaxplan.lowering.check import Checked
from jaxplan.lowering.listing import listing_of
from jaxplan.lowering.repeats import Short
from jaxplan.lowering.runs import Run, _grouped, _in_phase
from jaxplan.sharding import Asked

# its front door hides the module behind the function of the same name
CHECK = importlib.import_module("jaxplan.lowering.check")
REPEATS = importlib.import_module("jaxplan.lowering.repeats")
RUNS = importlib.import_module("jaxplan.lowering.runs")

LAYERS, WIDTH, HIDDEN = 9, 512, 2048
MESH = AbstractMesh((4, 2), ("data", "model"))

Layer = Callable[[Any, jax.Array], jax.Array]


def block(layer: Any, x: jax.Array) -> jax.Array:
    x = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * layer["scale"]
    return x + jax.nn.relu(x @ layer["up"]) @ layer["down"]


def looped(layer: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (block(layer, c), None), x, None, length=2)[0]


def step_of(layer: Layer, *, clipped: bool, layers: int = LAYERS) -> Callable[..., Any]:
    """Training of unrolled layers with momentum; `clipped` by the norm of all gradients, a sum over all leaves."""

    def step(state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for i in range(layers):
                y = layer(params[f"layer_{i}"], y)
            return jnp.mean(y**2)

        value, gradient = jax.value_and_grad(loss)(state["params"])
        if clipped:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
            gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradient)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, value

    return step


def shapes(layers: int = LAYERS, odd: int = -1) -> Any:
    def params() -> Any:
        hidden = {i: 2 * HIDDEN if i == odd else HIDDEN for i in range(layers)}
        return {
            f"layer_{i}": {
                "scale": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
                "up": jax.ShapeDtypeStruct((WIDTH, hidden[i]), jnp.float32),
                "down": jax.ShapeDtypeStruct((hidden[i], WIDTH), jnp.float32),
            }
            for i in range(layers)
        }

    return {"params": params(), "momentum": params()}, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[functools.partial[Checked]]:
    """The checks that planning makes, each to be made again."""
    made: list[functools.partial[Checked]] = []

    def recorded(*args: Any, **kwargs: Any) -> Checked:
        made.append(functools.partial(check_once, *args, **kwargs))
        return made[-1]()

    monkeypatch.setattr(candidates, "check", recorded)
    return made


def planned(step: Callable[..., Any], arguments: Any, search: str) -> jaxplan.Plan:
    options = {"search": search, "compare_templates": False, "progress": False}
    sharded = jaxplan.auto_shard(step, MESH, hardware="tpu-v5e", donate_argnums=0, options=options)
    return sharded.plan(*arguments)


def said(checked: Checked) -> tuple[Any, ...]:
    moving = [(c, op) for c, op in checked.collectives if c.kind != "all_slice"]
    collectives = Counter((c.kind, c.axes, c.bytes, c.trips, c.shape, op) for c, op in moving)
    return (
        collectives,
        set(checked.constraints),
        dict(checked.differing),
        len(checked.unplanned),
        checked.warnings,
    )


PROGRAMS = {
    "plain": step_of(block, clipped=False),
    "clipped": step_of(block, clipped=True),
    "remat": step_of(jax.checkpoint(block), clipped=True),
    "jitted": step_of(jax.jit(block), clipped=False),
    "looped": step_of(looped, clipped=False),
}


@pytest.mark.parametrize("search", ["fsdp", "megatron"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_some_blocks_speak_for_all(
    name: str, search: str, checks: list[functools.partial[Checked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[Short | None] = []
    lower = CHECK.lower_flat

    def spied(*args: Any, short: Short | None = None, **kwargs: Any) -> Any:
        lowered.append(short)
        return lower(*args, short=short, **kwargs)

    monkeypatch.setattr(CHECK, "lower_flat", spied)
    planned(PROGRAMS[name], shapes(), search)
    (again,) = checks
    assert lowered and all(short is not None for short in lowered)
    short = lowered[0]
    assert short is not None and len(short.twins) >= LAYERS - 6
    assert said(again()) == said(again(shorten=False))
    assert again().collectives


def test_blocks_that_disagree_do_not_speak(
    checks: list[functools.partial[Checked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(PROGRAMS["plain"], shapes(), "fsdp")
    (again,) = checks
    monkeypatch.setattr(Short, "agrees", lambda self, found: False)
    assert said(again()) == said(again(shorten=False))


def test_a_layer_unlike_the_others_is_kept(checks: list[functools.partial[Checked]]) -> None:
    """Nothing may be said of a block that differs: the stretch that is left out ends before it."""
    planned(step_of(block, clipped=True, layers=16), shapes(16, odd=5), "fsdp")
    (again,) = checks
    assert said(again()) == said(again(shorten=False))


def test_a_listing_is_the_program() -> None:
    """Calls seen through at any depth, literals and captured constants in their places."""
    table = jnp.arange(8.0)

    @jax.jit
    def inner(x: jax.Array, y: jax.Array) -> Any:
        return jnp.where(x > 0, x, y) + table, x * 2.0

    def program(x: jax.Array) -> Any:
        a, b = inner(x, jnp.float32(3.0))
        return jax.jit(inner)(a, b)[0] - 1.0, b

    x = jnp.linspace(-1.0, 1.0, 8)
    closed = jax.make_jaxpr(program)(x)
    listing = listing_of(closed.jaxpr, closed.consts)
    assert not any(e.eqn.primitive.name in ("jit", "pjit") for e in listing.equations)
    env = {**listing.constants, listing.arguments[0]: x}
    for equation in listing.equations:
        results = equation.eqn.primitive.bind(
            *(env[v] for v in equation.operands),
            **equation.eqn.primitive.get_bind_params(equation.eqn.params),
        )
        results = results if equation.eqn.primitive.multiple_results else [results]
        env.update(zip(equation.results, results, strict=True))
    for found, wanted in zip((env[v] for v in listing.results), program(x), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_layers_in_the_order_of_their_names_as_text(
    checks: list[functools.partial[Checked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 10 after layer 1: what the optimizer does layer by layer has another order than the layers."""
    agreed: list[bool] = []
    agrees = Short.agrees
    monkeypatch.setattr(Short, "agrees", lambda self, found: agreed.append(agrees(self, found)) or agreed[-1])
    planned(step_of(block, clipped=True, layers=13), shapes(13), "fsdp")
    assert agreed and all(agreed)
    (again,) = checks
    assert said(again()) == said(again(shorten=False))


def test_blocks_that_begin_elsewhere_than_was_thought_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for another is the same operation: gradients gathered over several steps, eleven layers."""
    optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            for i in range(11):
                params["x"] = block(params[f"layer_{i}"], params.get("x", x))
            return jnp.mean(params["x"] ** 2)

        value, gradient = jax.value_and_grad(lambda params: loss(dict(params)))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(gradient)

    labelled: list[np.ndarray] = []
    found: list[Run] = []
    runs_of, numbered = REPEATS.runs_of, REPEATS.numbered
    monkeypatch.setattr(REPEATS, "runs_of", lambda labels: labelled.append(labels) or runs_of(labels))
    monkeypatch.setattr(
        REPEATS, "numbered", lambda listing, runs: found.extend(all_of := numbered(listing, runs)) or all_of
    )
    state, x = shapes(11)
    options = {"search": "fsdp", "compare_templates": False, "progress": False}
    sharded = jaxplan.auto_shard(step, MESH, hardware="tpu-v5e", donate_argnums=(0, 1), options=options)
    sharded.plan(state["params"], jax.eval_shape(optimizer.init, state["params"]), x)
    (labels,) = labelled
    assert found
    for run in found:
        blocks = labels[run.start : run.start + run.period * len(run.numbers)].reshape(-1, run.period)
        assert run.start + blocks.size <= run.stop
        assert (blocks == blocks[0]).all()


def test_blocks_are_numbered_by_the_run_that_knows_most_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of all layers reads one value of the forward pass, a norm of the first layer, and all of a gradient."""
    forward, gradient, update = (Run(start=at, period=1, stop=at + 3, numbers=(-1,) * 3) for at in (0, 3, 6))
    links = {
        (2, 0): {(0, 0, 1, True): {2: 0}},
        (1, 0): {(0, 0, 0, True): {0: 2, 1: 1, 2: 0}},
        (2, 1): {(0, 0, 0, True): {0: 0, 1: 2, 2: 1}},
    }
    monkeypatch.setattr(RUNS, "_links", lambda listing, runs: links)
    _, of_block = RUNS._numbers(None, [forward, gradient, update])
    assert of_block == {0: [0, 1, 2], 1: [2, 1, 0], 2: [2, 0, 1]}


def test_a_layer_begins_with_what_is_made_for_it_alone() -> None:
    """Layers are known by what they divide, the last of four equations a leaf: the others are of the same layer."""
    names = [0, 1, 10, 11, 12, 2, 3]
    leaves = [name for name in names for _ in range(2)]

    def step(scaled: Any, squares: Any) -> Any:
        return [s / (jnp.sqrt(v + 1e-9) + 1e-8) for s, v in zip(scaled, squares, strict=True)]

    closed = jax.make_jaxpr(step)(*[[jnp.ones(4)] * len(leaves)] * 2)
    listing = listing_of(closed.jaxpr, closed.consts)
    assert len(listing.equations) == 4 * len(leaves)
    known = {4 * i + 3: name for i, name in enumerate(leaves)}
    # a block that begins with the second leaf of layer 0
    run = Run(start=4, period=8, stop=8 * len(names), numbers=(-1,) * (len(names) - 1))
    known = {e - run.start: name for e, name in known.items() if e >= run.start}
    assert _in_phase(listing, run, known).start == 8


def test_a_layer_that_is_nothing_to_the_others_stays_in_its_run_unless_at_an_end() -> None:
    run = Run(start=7, period=3, stop=28, numbers=(-1,) * 7)
    grouped = _grouped(run, [-1, 0, 1, -1, 3, 2, -1])
    assert (grouped.start, grouped.period) == (10, 3)
    assert [n for n in grouped.numbers if n >= 0] == [0, 1, 3, 2]
    assert grouped.numbers[2] < -1
    # each layer's two blocks are one
    pairs = _grouped(replace(run, period=1, stop=17), [0, 0, -1, -1, 2, 2, 1, 1, 4, 5])
    assert pairs.period == 2
    assert [n for n in pairs.numbers if n >= 0] == [0, 2, 1]


@pytest.mark.parametrize("shorten", [True, False])
@pytest.mark.parametrize("search", ["megatron", "tensor_fsdp"])
def test_a_round_with_pins_written_in_is_one_lowered_with_them(
    search: str, shorten: bool, checks: list[functools.partial[Checked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(PROGRAMS["clipped"], shapes(), search)
    (first,) = checks
    # one round does for these: as if what is read otherwise than it is made were not pinned, and nothing that is sent
    # decided
    *args, constraints = first.args
    constraints = tuple(pin for pin in constraints if pin.why != "propagation")
    again = functools.partial(first.func, *args, constraints, **first.keywords)
    monkeypatch.setattr(
        CHECK, "undecided", lambda _, collectives, *__: {op for c, op in collectives if c.kind != "all_slice"}
    )  # fmt: skip
    written: list[bool] = []
    write = Asked.pin

    def spied(*args: Any) -> bool:
        written.append(write(*args))
        return written[-1]

    monkeypatch.setattr(Asked, "pin", spied)
    once = again(shorten=shorten)
    monkeypatch.setattr(Asked, "pin", lambda *args: False)
    assert once == again(shorten=shorten)
    assert once.rounds > 1 and written and all(written)
