"""From what the user typed, `MODULE:FUNCTION`, to a step and the abstract arguments to plan it for."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """A step, one abstract argument for each of its parameters, and which of them it may donate."""

    step: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()


def load_step(target: str, shapes_target: str | None = None) -> StepSource:
    """The step that `target` names.

    `target` is a function of no arguments that returns `(step, shapes)`; or the step itself, where
    `shapes_target` names its shapes (a tuple, or a function of no arguments that returns one); or
    `module:config`, an entry of the module's `CONFIGS`, where the module also has `make_train_step(config)`,
    `init_state(config, key)` and `batch_shapes(config)`: such a step takes (state, batch), the state donated.

    Raises:
      ArgumentError: a module or function doesn't exist, or is not of the promised form.
    """
    module, name = _split(target)
    if shapes_target is not None:
        return StepSource(step=_function(module, name), shapes=_shapes(shapes_target))
    configs = vars(module).get("CONFIGS", {})
    if name in configs:
        return _model(module, configs[name])
    made = _call(
        _function(module, name),
        target,
        "if it is the step itself, name its arguments with --args MODULE:FUNCTION",
    )
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple)):
        raise ArgumentError(
            f"{target} returned {_describe(made)}: it must return a pair (step, shapes), "
            "where shapes is a tuple with one entry for each argument of the step"
        )
    return StepSource(step=made[0], shapes=made[1])


def load_shardings(target: str) -> tuple[Any, Any]:
    """`(in_shardings, out_shardings)` that the function `target` returns.

    Raises:
      ArgumentError: a module or function doesn't exist, or it returns no pair.
    """
    made = _call(_function(*_split(target)), target, "it must take no arguments")
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ArgumentError(
            f"{target} returned {_describe(made)}: it must return a pair (in_shardings, out_shardings)"
        )
    return made


def model_targets() -> Iterator[str]:
    """Every `models.NAME:CONFIG` that `load_step` takes, in the order of the files and of their `CONFIGS`.

    Raises:
      ArgumentError: there is no package `models` here, or one of its dependencies isn't installed.
    """
    package = _import("models")
    for found in pkgutil.iter_modules(package.__path__):
        for name in vars(_import(f"models.{found.name}")).get("CONFIGS", {}):
            yield f"models.{found.name}:{name}"


def _model(module: ModuleType, config: Any) -> StepSource:
    import jax

    state = jax.eval_shape(lambda: module.init_state(config, jax.random.key(0)))
    return StepSource(
        step=module.make_train_step(config), shapes=(state, module.batch_shapes(config)), donate_argnums=(0,)
    )


def _shapes(target: str) -> tuple[Any, ...]:
    module, name = _split(target)
    shapes = vars(module).get(name)
    if not isinstance(shapes, tuple):
        shapes = _call(
            _function(module, name),
            f"--args {target}",
            "it must be a tuple, or return one without being told more",
        )
    if not isinstance(shapes, tuple):
        raise ArgumentError(
            f"--args {target} returned {_describe(shapes)}: "
            "it must return a tuple with one entry for each argument of the step"
        )
    return shapes


def _split(target: str) -> tuple[ModuleType, str]:
    module, _, name = target.partition(":")
    if not (module and name):
        raise ArgumentError(
            f"{target!r} names no function: write MODULE:FUNCTION, as in mypackage.train:step"
        )
    return _import(module), name


def _import(name: str) -> ModuleType:
    """The module `name`, looked for in the working directory too, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise ArgumentError(
                f"there is no module {missing!r} in {os.getcwd()} or on sys.path: "
                "run jaxplan from the directory that holds it, or set PYTHONPATH"
            ) from None
        raise ArgumentError(
            f"module {name!r} imports {missing!r}, which is not installed in the environment {sys.prefix}"
        ) from error


def _function(module: ModuleType, name: str) -> Callable[..., Any]:
    members = vars(module)
    found = members.get(name)
    if callable(found):
        return found
    functions = [other for other in members if callable(members[other]) and not other.startswith("_")]
    near = difflib.get_close_matches(name, [*functions, *members.get("CONFIGS", {})])
    advice = (
        f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(functions) or 'no functions'}"
    )
    problem = "does not exist" if name not in members else f"is {_describe(found)}, not a function"
    raise ArgumentError(f"{name!r} of module {module.__name__} {problem}; {advice}")


def _call(factory: Callable[..., Any], target: str, advice: str) -> Any:
    """`factory()`; that it wants arguments is found beforehand: a `TypeError` of its own stays visible."""
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ArgumentError(f"{target} can't be called without arguments ({error}): {advice}") from None
    return factory()


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple ({', '.join(type(entry).__name__ for entry in value)})"
    return f"an object of type {type(value).__name__}"
