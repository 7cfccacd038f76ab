"""Steps on Equinox modules, as functions of the arrays in them: functions and flags among the leaves stay as they are.

As `equinox.filter_jit` has it, what is no array in a module is fixed: other values of it are another program.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from ..errors import ArgumentError
from .returned import Returned


def kind() -> type | None:
    """What all modules are; None where the program has no Equinox."""
    return getattr(sys.modules.get("equinox"), "Module", None)


kept_in_mind = contextlib.nullcontext
"""A step returns its modules: there is nothing to update."""


class Form:
    """A tree without its arrays."""

    def __init__(self, treedef: Any, fixed: Sequence[tuple[int, Any]], count: int) -> None:
        self._treedef, self._fixed, self._count = treedef, tuple(fixed), count

    @property
    def key(self) -> Hashable:
        """Equal where the same step is to be traced.

        Raises:
          ArgumentError: something fixed can't be hashed.
        """
        for _, leaf in self._fixed:
            try:
                hash(leaf)
            except TypeError:
                raise ArgumentError(
                    f"a module among the arguments holds a {type(leaf).__name__}, {leaf!r}: neither an array nor "
                    "anything that can be hashed. Make it an array, or a tuple"
                ) from None
        # True and 1 are equal and different programs
        return self._treedef, tuple((place, type(leaf), leaf) for place, leaf in self._fixed)

    def together(self, tree: Any) -> Any:
        """The tree with these arrays."""
        arrays, fixed = iter(jax.tree.leaves(tree)), dict(self._fixed)
        leaves = [fixed[i] if i in fixed else next(arrays) for i in range(self._count)]
        return jax.tree.unflatten(self._treedef, leaves)


def apart(arguments: Any) -> tuple[Form, Any]:
    """A tree with None in the place of what is fixed, and all but its arrays."""
    module = kind()
    assert module is not None
    leaves: list[Any] = []
    fixed: list[tuple[int, Any]] = []
    for part in jax.tree.leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, module)):
        within = isinstance(part, module)
        for leaf in jax.tree.leaves(part) if within else [part]:
            if _is_fixed(leaf, within):
                fixed.append((len(leaves), leaf))
                leaf = None
            leaves.append(leaf)
    treedef: Any = jax.tree.structure(arguments)
    return Form(treedef, fixed, len(leaves)), jax.tree.unflatten(treedef, leaves)


class Function:
    """A step as a function of the arrays in its modules."""

    def __init__(self, fn: Callable[..., Any], form: Form, args: tuple[Any, ...]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._form = fn, form
        self._returned = Returned()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned, arrays = apart(self._fn(*self._form.together(args), **kwargs))
        self._returned.note((args, kwargs), returned)
        return arrays

    def finished(self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What the step returns, its modules whole."""
        return self._returned.of((args, kwargs)).together(result)


def _is_fixed(leaf: Any, within: bool) -> bool:
    """Whether a leaf is no array: `within` modules numbers and flags are none either, and functions nowhere."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return False
    return within or not isinstance(leaf, (bool, int, float, complex))
