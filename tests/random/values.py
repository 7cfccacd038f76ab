"""What random programs are made of: values with their types, and programs as lists of written-out lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

MOST = 2048
"""Elements of the largest tensor: compilation takes the time, not the arithmetic."""

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Line:
    """`text` says what `fn` does with the values `operands`; `makes` are the types of its results."""

    text: str
    fn: Callable[..., Any]
    operands: tuple[int, ...]
    makes: tuple[Type, ...]


@dataclass(frozen=True)
class Program:
    """Lines over numbered values: first the inputs, then what each line makes."""

    inputs: tuple[Type, ...]
    lines: tuple[Line, ...]
    outputs: tuple[int, ...]

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        values = list(arguments)
        for line in self.lines:
            made = line.fn(*(values[i] for i in line.operands))
            values += jax.tree.leaves(made)
        return tuple(values[i] for i in self.outputs)

    def __repr__(self) -> str:
        texts = [f"  v{i}: {t.dtype}{list(t.shape)}" for i, t in enumerate(self.inputs)]
        count = len(texts)
        for line in self.lines:
            names = ", ".join(f"v{count + i}: {t.dtype}{list(t.shape)}" for i, t in enumerate(line.makes))
            operands = ", ".join(f"v{i}" for i in line.operands)
            texts.append(f"  {names} = {line.text}({operands})".replace("\n", "\n    "))
            count += len(line.makes)
        return "\n".join(["", *texts, f"  return {', '.join(f'v{i}' for i in self.outputs)}"])


@dataclass
class Scope:
    """A program being drawn.

    Attributes:
      smooth: only what has a derivative everywhere (inside `grad`), so that rounding can't decide a branch.
      depth: how many more loops, branches and transformations may be nested here.
    """

    draw: Callable[..., Any]
    inputs: tuple[Type, ...]
    smooth: bool
    depth: int
    types: list[Type] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.types = list(self.inputs)

    # -- choosing -----------------------------------------------------------------------------------------

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choose(self, options: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def flip(self) -> bool:
        return self.draw(st.booleans())

    def value(self, wanted: Callable[[Type], bool] = lambda t: True) -> int | None:
        """A value of such a type, later ones rather than earlier; None where there is none."""
        fitting = [i for i, t in enumerate(self.types) if wanted(t) and not is_key(t)]
        if not fitting:
            return None
        recent = fitting[-3:]
        return self.choose(recent if self.flip() else fitting)

    # -- adding -------------------------------------------------------------------------------------------

    def add(self, text: str, fn: Callable[..., Any], *operands: int) -> bool:
        """Add a line, unless jax refuses it or what it makes is empty or large; whether it was added."""
        try:
            made = jax.tree.leaves(jax.eval_shape(fn, *(self.types[i] for i in operands)))
        except (TypeError, ValueError):
            return False
        makes = tuple(Type(m.shape, m.dtype) for m in made)
        if not makes or any(m.size > MOST or m.size == 0 or m.ndim > 5 for m in makes):
            return False
        self.lines.append(Line(text, fn, operands, makes))
        self.types += makes
        return True

    def program(self, outputs: Sequence[int]) -> Program:
        return Program(self.inputs, tuple(self.lines), tuple(outputs))

    def latest(self, most: int) -> list[int]:
        """One to `most` values made here, the last one among them."""
        made = [i for i in range(len(self.inputs), len(self.types))] or list(range(len(self.types)))
        others = self.draw(st.lists(st.sampled_from(made), max_size=most - 1))
        return list(dict.fromkeys([made[-1], *others]))


def is_key(t: Any) -> bool:
    return bool(jax.dtypes.issubdtype(t.dtype, jax.dtypes.prng_key))


def is_real(t: Any) -> bool:
    return bool(jnp.issubdtype(t.dtype, np.floating))


def is_int(t: Any) -> bool:
    return bool(jnp.issubdtype(t.dtype, np.integer))


def number(s: Scope) -> int | None:
    """A value that is not boolean."""
    return s.value(lambda t: is_real(t) or (is_int(t) and not s.smooth))


def fitted(value: Any, target: Type) -> Any:
    """`value` brought to another type: broadcast where it fits, else summed up first; the same in every run."""
    if is_key(value):
        value = jax.random.key_data(value)
    if jnp.iscomplexobj(value):
        value = value.real
    if is_real(target) and not is_real(value):
        value = value % 8 if is_int(value) else value
    if not is_real(target) and is_real(value):
        value = jnp.zeros((), target.dtype)  # rounding a real would let noise decide
    value = value.astype(target.dtype)
    if _fits(value.shape, target.shape):
        return jnp.broadcast_to(value, target.shape)
    if is_real(target):
        whole = value.mean()
    else:
        whole = value.any() if target.dtype == bool else value.sum(dtype=target.dtype)
    return jnp.broadcast_to(whole, target.shape)


def _fits(shape: Sequence[int], onto: Sequence[int]) -> bool:
    return len(shape) <= len(onto) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(onto), strict=False)
    )
