"""Steps whose arguments are modules of Flax NNX or Equinox, as the functions of arrays that jax traces."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from . import equinox_modules, nnx_modules
from .arguments import holds
from .nnx_modules import NothingChanged


def apart(arguments: Any) -> tuple[Any, Any]:
    """The form and the arrays of a tree, for `form.together(arrays)`; None and the tree itself if it has no modules."""
    library = _library_of(arguments)
    return (None, arguments) if library is None else library.apart(arguments)


def _library_of(*arguments: Any) -> Any:
    """Which of the libraries the arguments hold modules of, if any."""
    for library in (nnx_modules, equinox_modules):
        kind = library.kind()
        if kind is not None and holds(arguments, kind):
            return library
    return None


@dataclass(kw_only=True)
class _Call:
    """A call whose modules are taken apart.

    Attributes:
      fn: the step as a function of arrays; args, kwargs: its arguments; form: what is left of the caller's.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Any


@contextlib.contextmanager
def _taken_apart(
    library: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, update: bool
) -> Iterator[_Call]:
    """A call of `fn` as one of arrays; with `update` it is good within the context, and can update them."""
    if holds(kwargs, library.kind()):
        bound = inspect.signature(fn).bind(*args, **kwargs)
        args, kwargs = bound.args, dict(bound.kwargs)
    with library.kept_in_mind() if update else contextlib.nullcontext():
        form, arrays = library.apart(args)
        yield _Call(fn=library.Function(fn, form, args), args=arrays, kwargs=kwargs, form=form)


class ModuleSteps:
    """The steps of arrays that calls with modules run, one for each structure of the modules."""

    def __init__(self, fn: Callable[..., Any], make: Callable[[Callable[..., Any], Sequence[Any]], Any]) -> None:
        """`make(fn, siblings)`: a step of `fn`, beside those that there are."""
        self._fn, self._make = fn, make
        # None: nothing changes them.  One look a call: a structure's hash walks all of it.
        self._known: dict[Hashable, tuple[Any, Any] | None] = {}

    @property
    def steps(self) -> list[Any]:
        """Those made so far."""
        return [known[1] for known in self._known.values() if known]

    def run(
        self, use: Callable[..., Any], otherwise: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
        *, put_back: bool = False,
    ) -> Any:  # fmt: skip
        """`use(step, args, kwargs)` of the step of arrays; of `otherwise` where there are no modules, or mere pytrees.

        Args:
          put_back: the result is the step's: the caller's modules are updated, those that are returned are whole.
        """
        library = _library_of(args, kwargs)
        if library is None:
            return use(otherwise, args, kwargs)
        with _taken_apart(library, self._fn, args, kwargs, update=True) as call:
            key, new = call.form.key, (call.fn, None)
            fn, step = self._known.get(key, new) or (None, None)
            if fn is not None:
                try:
                    if step is None:
                        step = self._make(fn, self.steps)
                    result = use(step, call.args, call.kwargs)
                except NothingChanged:
                    self._known[key] = None
                else:
                    if fn is call.fn:
                        self._known[key] = fn, step
                    return fn.finished(call.form, call.args, call.kwargs, result) if put_back else result
        return use(otherwise, args, kwargs)


def of_arrays(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step and its arguments as jax traces them: themselves where they hold no modules, or those are pytrees."""
    args = tuple(args)
    library = _library_of(args)
    if library is None:
        return fn, args
    with _taken_apart(library, fn, args, {}, update=False) as call:
        try:
            jax.eval_shape(call.fn, *call.args)
        except NothingChanged:
            return fn, args
    return call.fn, call.args
