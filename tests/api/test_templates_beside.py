"""Templates are searched in another process as they are here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxplan
from jaxplan.api import candidates, planner, rivals
from jaxplan.api.templates_beside import TemplatesBeside
from jaxplan.search import Alike
from jaxplan.search.folds import Folds
from jaxplan.sharding import Beside

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LAYERS = 12


def step(params: Any, x: jax.Array) -> Any:
    """A stack of equal layers, written out: its problem folds."""

    def loss(params: Any) -> jax.Array:
        y = x
        for up, down in params:
            y = y + jnp.tanh(y @ up) @ down
        return y.sum()

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def planned(widths: Sequence[int] = (1024,) * LAYERS, **options: Any) -> jaxplan.Plan:
    weights = [(jnp.ones((256, width)), jnp.ones((width, 256))) for width in widths]
    shapes = jax.eval_shape(lambda: (weights, jnp.ones((64, 256))))
    return jaxplan.plan(step, MESH, *shapes, hardware="tpu-v5e", donate_argnums=0, options=options)


def until_ready(beside: Beside) -> Beside:
    entered(beside)
    deadline = time.monotonic() + 120
    while beside.there and not beside.ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return beside


def noted(templates: TemplatesBeside, layers: Any, questions: Any) -> dict[str, Alike]:
    answers.append(asked(templates, layers, questions))
    return answers[-1]


def when_asked(templates: TemplatesBeside, than_s: float) -> None:
    deadline = time.monotonic() + 120
    while templates._beside.there and not answers:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    price(templates, than_s)


entered, asked, price = Beside.__enter__, TemplatesBeside._asked, TemplatesBeside.price
answers: list[dict[str, Alike]] = []


def test_what_another_process_finds_of_templates_is_what_is_found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "RIVAL_NODES", 0)
    monkeypatch.setattr(planner, "BESIDE_OPS", 0)
    monkeypatch.setattr(Beside, "__enter__", until_ready)
    monkeypatch.setattr(TemplatesBeside, "_asked", noted)
    monkeypatch.setattr(TemplatesBeside, "price", when_asked)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    here = planned()
    assert not answers
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    there = planned()
    (known,) = answers
    assert set(known) >= set(here.templates) != set()
    assert there.templates == here.templates
    assert (there.inputs, there.outputs, there.cost.step_s) == (here.inputs, here.outputs, here.cost.step_s)


def test_a_process_that_can_not_answer_leaves_templates_to_be_priced_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def mute(beside: Beside, question: str, *about: Any, **of: Any) -> Any:
        return True if question == "hold" else None if question == "search" else ask(beside, question, *about, **of)

    monkeypatch.setattr(rivals, "RIVAL_NODES", 0)
    here = planned()
    ask = Beside.ask
    monkeypatch.setattr(planner, "BESIDE_OPS", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Beside, "__enter__", until_ready)
    monkeypatch.setattr(Beside, "ask", mute)
    assert planned().templates == here.templates


@pytest.mark.parametrize("equal", [True, False])
def test_layers_that_decide_alike_are_searched_for_where_there_are_some(
    equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The U-Net's and Inception's plans are the same without, half a second of processor time later."""
    monkeypatch.setattr(candidates, "RIVAL_NODES", 0)
    searched: list[Folds] = []
    alike = Folds.alike

    def noted(folds: Folds, *args: Any, **kwargs: Any) -> Any:
        searched.append(folds)
        return alike(folds, *args, **kwargs)

    monkeypatch.setattr(Folds, "alike", noted)
    widths = [512] * 40 if equal else [512 + 128 * layer for layer in range(LAYERS)]
    planned(widths, compare_templates=False)
    assert bool(searched) == equal
