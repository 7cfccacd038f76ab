"""`MODULE:FUNCTION` in each of its forms, and what is said of everything that is not one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

from jaxplan.cli.step_source import load_step
from jaxplan.errors import ArgumentError

MODULE = """
SHAPES = (1, 2)

def step(w, x):
    return w

def shapes():
    return SHAPES

def factory():
    return step, SHAPES

def forgets_shapes():
    return step

def gives_a_list():
    return step, [1, 2]

def raises_type_error():
    return len(3)
"""


@pytest.fixture(autouse=True)
def module_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working directory, not on sys.path, with the module `sources_here`."""
    (tmp_path / "sources_here.py").write_text(MODULE)
    (tmp_path / "wants_missing.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "sources_here", raising=False)


@pytest.mark.parametrize(
    ("target", "shapes_target"),
    [
        ("sources_here:factory", None),
        ("sources_here:step", "sources_here:shapes"),
        ("sources_here:step", "sources_here:SHAPES"),
    ],
)
def test_every_form_gives_the_step_and_its_shapes(target: str, shapes_target: str | None) -> None:
    source = load_step(target, shapes_target)
    assert (source.step.__name__, source.shapes, source.donate_argnums) == ("step", (1, 2), ())


def test_a_models_shapes_are_those_that_its_step_takes_and_gives_back() -> None:
    source = load_step("models.mlp:tiny")
    state, _ = jax.eval_shape(source.step, *source.shapes)
    assert state == source.shapes[0]
    assert source.donate_argnums == (0,)
    leaves = jax.tree.leaves(source.shapes)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves), "nothing may be allocated"


@pytest.mark.parametrize(
    ("target", "shapes_target", "said"),
    [
        ("sources_here", None, "write MODULE:FUNCTION"),
        (":step", None, "write MODULE:FUNCTION"),
        ("no_such_module:step", None, "there is no module 'no_such_module'"),
        ("sources_here.inner:step", None, "there is no module 'sources_here.inner'"),
        ("wants_missing:step", None, "imports 'a_package_nobody_has', which is not installed"),
        ("sources_here:stepp", None, "did you mean step"),
        ("models.mlp:tinny", None, "did you mean tiny"),
        ("sources_here:SHAPES", None, "is a tuple \\(int, int\\), not a function"),
        ("sources_here:step", None, "name its arguments with --args"),
        ("sources_here:forgets_shapes", None, "must return a pair \\(step, shapes\\)"),
        ("sources_here:gives_a_list", None, "a tuple \\(function, list\\)"),
        ("sources_here:step", "sources_here:step", "missing a required argument: 'w'"),
        ("sources_here:step", "sources_here:forgets_shapes", "one entry for each argument"),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(target: str, shapes_target: str | None, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        load_step(target, shapes_target)


def test_a_type_error_inside_the_factory_stays_visible() -> None:
    with pytest.raises(TypeError, match="has no len"):
        load_step("sources_here:raises_type_error")
