"""The plans that predictions are held against: distinct, and of all kinds."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh

from experiments.quality import diverse
from jaxplan.api import target_of
from models import abstract_arguments, get, get_config


def test_plans_of_a_step_are_the_search_s_a_template_s_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("_POOL", 1), ("TEMPLATES", ("data",)), ("_BUDGETS", (0.8,))):
        monkeypatch.setattr(diverse, name, few)
    target = target_of(AbstractMesh((4, 2), ("data", "model")), "h100")
    step = get("mlp").make_train_step(get_config("mlp", "tiny"))
    pipeline = diverse.pipeline_of(step, abstract_arguments("mlp", "tiny"), target)
    found = dict(diverse.diverse_plans(pipeline, 4, seed=0))
    assert next(iter(found)) == diverse.OWN
    assert "data" in found
    best_s = found[diverse.OWN].found.result.objective_s
    assert all(one.found.result.objective_s >= best_s * (1 - 1e-3) for one in found.values())
    layouts = {(one.inputs, one.outputs, frozenset(one.checked.constraints)) for one in found.values()}
    assert len(layouts) == len(found) == 4
