"""Digest of a program: equal for equal programs in every process, another for any that computes something else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._jax import as_closed

if TYPE_CHECKING:
    from .trace import Leaf

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
"""Where an object lies in memory, as a function in a parameter prints it: no two processes agree on it."""


def fingerprint(jaxpr: Any, consts: Sequence[Any], inputs: tuple[Leaf, ...], outputs: tuple[Leaf, ...]) -> str:
    """32 hexadecimal digits; of the program, its constants, and what its arguments and results are called."""
    words = _Words()
    words.say(jaxpr, consts)
    digest = hashlib.sha256(repr((inputs, outputs)).encode())
    digest.update("\n".join(words.lines).encode())
    for array in words.arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


class _Words:
    """A program as lines, one an equation, inner programs before the equation that runs them.

    jax's printer, which lays it all out for people, takes four times as long.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.arrays: list[np.ndarray] = []
        # By identity, with the object, so that its id is not given to another: equations share most of these.
        self._said: dict[int, tuple[Any, str]] = {}
        self._types: dict[int, tuple[Any, str]] = {}

    def say(self, jaxpr: Any, consts: Sequence[Any]) -> None:
        """Say an open program and its constants."""
        names: dict[Any, str] = {}

        def make(var: Any) -> str:
            names[var] = str(len(names))
            return f"{names[var]}:{self._type(var.aval)}"

        def read(atom: Any) -> str:
            return f"{self._word(atom.val)}:{self._type(atom.aval)}" if hasattr(atom, "val") else names[atom]

        lines = [" ".join(["program", *map(make, jaxpr.constvars), "of", *map(make, jaxpr.invars)])]
        for eqn in jaxpr.eqns:
            params = [f"{key}={self._word(eqn.params[key])}" for key in sorted(eqn.params)]
            operands, results = [read(atom) for atom in eqn.invars], [make(var) for var in eqn.outvars]
            lines.append(" ".join([*results, "=", eqn.primitive.name, *params, *operands]))
        lines.append(" ".join(["returns", *map(read, jaxpr.outvars), *map(self._word, consts)]))
        self.lines += lines

    def _type(self, aval: Any) -> str:
        if id(aval) not in self._types:
            self._types[id(aval)] = aval, str(aval)
        return self._types[id(aval)][1]

    def _word(self, value: Any) -> str:
        if id(value) not in self._said:
            self._said[id(value)] = value, self._new(value)
        return self._said[id(value)][1]

    def _new(self, value: Any) -> str:
        inner, consts = as_closed(value)
        if hasattr(inner, "eqns"):
            self.say(inner, consts)
            return f"program at {len(self.lines)}"
        if isinstance(value, (np.ndarray, jax.Array)):
            keys = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
            self.arrays.append(np.asarray(jax.random.key_data(value) if keys else value))
            return f"{self.arrays[-1].dtype}{self.arrays[-1].shape}"
        if isinstance(value, (set, frozenset)):
            return f"{{{' '.join(sorted(map(self._word, value)))}}}"
        if type(value) in (tuple, list):
            return f"({' '.join(map(self._word, value))})"
        return _ADDRESS.sub("", repr(value))
