"""Steps that change Flax NNX modules in place, as functions of the modules' states: what jax traces, cuts and donates.

jax hands a traced function copies of its arguments: what the step writes into a module there is lost, and a variable
that two modules share becomes two.  So modules are taken apart into states before the trace and put together inside,
as `nnx.jit` does; the states come back as results, and the caller's own modules are updated with them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax

from .arguments import holds
from .returned import Returned

_TAG = "jaxplan"

_updating: contextvars.ContextVar[bool] = contextvars.ContextVar("updating", default=False)
"""Whether flax keeps book of which object outside is which inside."""


class NothingChanged(Exception):
    """Raised while a step is traced that changes none of its modules: as pytrees they say all there is to say."""


@jax.tree_util.register_pytree_with_keys_class
class ModuleState:
    """The variables of one module, by name; what it shares with a module before it is left to that one."""

    def __init__(self, variables: dict[Any, Any]) -> None:
        self.variables = variables

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """Its variables, each under its name."""
        names = sorted(self.variables, key=str)
        return [(jax.tree_util.DictKey(name), self.variables[name]) for name in names], tuple(names)

    @classmethod
    def tree_unflatten(cls, names: tuple[Any, ...], variables: Sequence[Any]) -> ModuleState:
        """The inverse."""
        return cls(dict(zip(names, variables, strict=True)))


class Form:
    """Where the modules of a tree of arguments are, and all in them that is no array.

    Attributes:
      structure: the modules without arrays, as flax describes them.
    """

    def __init__(self, treedef: Any, places: Sequence[int], structure: Any) -> None:
        self._treedef, self._places, self.structure = treedef, tuple(places), structure

    @property
    def key(self) -> Hashable:
        """Equal where the same step is to be traced; its hash walks all of the modules."""
        return self.structure, self._treedef, self._places

    def together(self, tree: Any, structure: Any = None, *, inside: bool = True) -> Any:
        """A tree with modules in the place of states; `structure`: as the step leaves them, to update the caller's."""
        leaves = jax.tree.leaves(tree, is_leaf=_is_state)
        modules = _merge(structure or self.structure, [leaves[i] for i in self._places], inside)
        for place, module in zip(self._places, modules, strict=True):
            leaves[place] = module
        return jax.tree.unflatten(self._treedef, leaves)


def apart(arguments: Any) -> tuple[Form, Any]:
    """A tree of arguments with a `ModuleState` in the place of every module, and what is left of them."""
    pytree = _nnx().Pytree
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, pytree))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, pytree)]
    structure, state = _split(tuple(leaves[i] for i in places))
    for number, place in enumerate(places):
        leaves[place] = ModuleState(dict(state.get(number, {})))
    return Form(treedef, places, structure), jax.tree.unflatten(treedef, leaves)


@contextlib.contextmanager
def kept_in_mind() -> Iterator[None]:
    """Within it, what `apart` takes apart first are the caller's modules, and a function's result updates them."""
    token = _updating.set(True)
    try:
        with _nnx().update_context(_TAG):
            yield
    finally:
        _updating.reset(token)


class Function:
    """A step as a function of its modules' states, to the arguments as it leaves them and what it returns."""

    def __init__(self, fn: Callable[..., Any], form: Form, args: tuple[Any, ...]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._form = fn, form
        self._changing = [i for i, argument in enumerate(args) if holds(argument, _nnx().Pytree)]
        self._structure_after = Returned()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Raises NothingChanged where the step leaves its modules as they are."""
        given = self._form.together(args)
        before = [_described(given[i]) for i in self._changing]
        returned = self._fn(*given, **kwargs)
        changed = any(not _same(_described(given[i]), was) for i, was in zip(self._changing, before, strict=True))
        if not changed:
            raise NothingChanged
        after, states = apart(given)
        self._structure_after.note((args, kwargs), after.structure)
        return (*(_in_form_of(args[i], states[i]) for i in self._changing), returned)

    def finished(self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], result: Sequence[Any]) -> Any:
        """What the step returned; the modules that `form` is of are the caller's and updated."""
        after = list(args)
        for position, argument in zip(self._changing, result, strict=False):
            after[position] = argument
        form.together(tuple(after), self._structure_after.of((args, kwargs)), inside=False)
        return result[-1]


def kind() -> type | None:
    """What all modules are, with optimizers, metrics and streams of keys; None where the program has no flax.nnx."""
    return getattr(_nnx(), "Pytree", None)


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, ModuleState)


def _split(modules: tuple[Any, ...]) -> tuple[Any, Any]:
    if not _updating.get():
        structure, state = _nnx().split(modules)
        return structure, state
    with _nnx().split_context(_TAG) as context:
        structure, state = context.split(modules)
    return structure, state


def _merge(structure: Any, states: Sequence[ModuleState], inside: bool) -> tuple[Any, ...]:
    nnx = _nnx()
    joined = nnx.State({i: nnx.State(state.variables) for i, state in enumerate(states) if state.variables})
    if not _updating.get():
        return tuple(nnx.merge(structure, joined))
    with nnx.merge_context(_TAG, inner=inside) as context:
        return tuple(context.merge(structure, joined))


def _described(argument: Any) -> tuple[Any, list[Any]]:
    """What an argument's modules are, and the arrays in them."""
    structure, state = _nnx().split(argument)
    return structure, jax.tree.leaves(state)


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    return one[0] == other[0] and all(a is b for a, b in zip(one[1], other[1], strict=True))


def _in_form_of(before: Any, after: Any) -> Any:
    """`after` in the tree of `before` where their leaves have the same paths, whatever notes its variables carry."""
    old, new = map(jax.tree_util.tree_leaves_with_path, (before, after))
    if [path for path, _ in old] != [path for path, _ in new]:
        return after
    return jax.tree.unflatten(jax.tree.structure(before), [leaf for _, leaf in new])
