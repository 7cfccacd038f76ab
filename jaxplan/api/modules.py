"""Steps that change Flax NNX modules in place, as functions of the modules' states: what jax traces, cuts and donates.

jax hands a traced function copies of its arguments: what the step writes into a module there is lost, and a variable
that two modules share becomes two.  So modules are taken apart into states before the trace and put together inside,
as `nnx.jit` does; the states come back as results, and the caller's own modules are updated with them.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

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


def passes_modules(arguments: Any) -> bool:
    """Whether a module, optimizer, metric or stream of keys is among the arguments, or in a list or dict among them."""
    pytree = getattr(_nnx(), "Pytree", None)
    if pytree is None:
        return False

    def holds(argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(map(holds, argument))
        if isinstance(argument, dict):
            return any(map(holds, argument.values()))
        return isinstance(argument, pytree)

    return holds(arguments)


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


@dataclass(kw_only=True)
class Taken:
    """A call whose modules are taken apart.

    Attributes:
      fn: the step as a function of their states: its result is the arguments with modules as they are afterwards, and
        then what the step returns.
      args, kwargs: its arguments; form: of the caller's.
    """

    fn: FunctionOfStates
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Form

    def put_back(self, fn: FunctionOfStates, result: tuple[Any, ...]) -> Any:
        """Update the caller's modules with a result of `fn`; what the step returned."""
        args = list(self.args)
        for position, after in zip(fn.changing, result, strict=False):
            args[position] = after
        self.form.together(tuple(args), fn.structure_after, inside=False)
        return result[-1]


@contextlib.contextmanager
def taken_apart(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool = True
) -> Iterator[Taken]:
    """A call of `fn` as one of the states of its modules.

    With `update` it is good within the context, where `put_back` updates the caller's modules.
    """
    if passes_modules(kwargs):
        bound = inspect.signature(fn).bind(*args, **kwargs)
        args, kwargs = bound.args, dict(bound.kwargs)
    with contextlib.ExitStack() as stack:
        if update:
            stack.enter_context(_nnx().update_context(_TAG))
            stack.callback(_updating.reset, _updating.set(True))
        form, states = apart(args)
        changing = tuple(i for i, argument in enumerate(args) if passes_modules(argument))
        yield Taken(fn=FunctionOfStates(fn, form, changing), args=states, kwargs=kwargs, form=form)


class FunctionOfStates:
    """A step as a function of its modules' states.

    Attributes:
      changing: positions of the arguments that hold modules, which come back first.
      structure_after: of the modules, once the function was traced.
    """

    def __init__(self, fn: Callable[..., Any], form: Form, changing: tuple[int, ...]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._form, self.changing = fn, form, changing
        self.structure_after: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Raises NothingChanged where the step leaves its modules as they are."""
        given = self._form.together(args)
        before = [_described(given[i]) for i in self.changing]
        returned = self._fn(*given, **kwargs)
        changed = any(not _same(_described(given[i]), was) for i, was in zip(self.changing, before, strict=True))
        if not changed:
            raise NothingChanged
        after, states = apart(given)
        self.structure_after = after.structure
        return (*(_in_form_of(args[i], states[i]) for i in self.changing), returned)


class ModuleSteps:
    """The steps of states that calls with modules run, one for each structure of the modules."""

    def __init__(self, fn: Callable[..., Any], make: Callable[[Callable[..., Any], Sequence[Any]], Any]) -> None:
        """`make(fn, siblings)`: a step of `fn`, beside those that there are."""
        self._fn, self._make = fn, make
        # None: nothing changes them.  One look a call: a structure's hash walks all of it.
        self._known: dict[Hashable, tuple[FunctionOfStates, Any] | None] = {}

    @property
    def steps(self) -> list[Any]:
        """Those made so far."""
        return [known[1] for known in self._known.values() if known]

    def run(
        self, use: Callable[..., Any], otherwise: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        *, put_back: bool = False,
    ) -> Any:  # fmt: skip
        """`use(step, args, kwargs)` of the step of states; of `otherwise` and the modules where nothing changes them.

        Args:
          put_back: the result is the step's: the caller's modules are updated.
        """
        with taken_apart(self._fn, args, kwargs) as taken:
            key, new = taken.form.key, (taken.fn, None)
            fn, step = self._known.get(key, new) or (None, None)
            if fn is not None:
                try:
                    if step is None:
                        step = self._make(fn, self.steps)
                    result = use(step, taken.args, taken.kwargs)
                except NothingChanged:
                    self._known[key] = None
                else:
                    if fn is taken.fn:
                        self._known[key] = fn, step
                    return taken.put_back(fn, result) if put_back else result
        return use(otherwise, args, kwargs)


def of_states(
    fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step and its arguments as they can be traced anywhere: themselves where no module is changed."""
    if not passes_modules(tuple(args)):
        return fn, tuple(args)
    with taken_apart(fn, tuple(args), {}, update=False) as taken:
        try:
            jax.eval_shape(taken.fn, *taken.args)
        except NothingChanged:
            return fn, tuple(args)
    return taken.fn, taken.args


def _nnx() -> Any:
    """`flax.nnx`, where the user's program has imported it: there are no modules elsewhere."""
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
