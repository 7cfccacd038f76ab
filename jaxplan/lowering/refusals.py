"""What XLA's compilers say of programs that they don't compile."""

from __future__ import annotations

import re

import jax

_USED = re.compile(r"(?:Used |temporaries \()([\d.]+)([KMGT]?)(?: of [\d.]+[KMGT]? hbm|\) exceeds available HBM)")
"""What XLA for TPU says of a program that it has no room for: all of it, arguments included (libtpu 0.0.42)."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_FAULT = re.compile(r"(INTERNAL|UNIMPLEMENTED)\b")
"""How errors begin that are a compiler's own, whatever the program."""


def refused_bytes(refused: jax.errors.JaxRuntimeError) -> int | None:
    """Bytes a device that a program takes which XLA refuses for want of memory; None where that isn't what it says."""
    used = _USED.search(str(refused)) if "RESOURCE_EXHAUSTED" in str(refused) else None
    return int(float(used[1]) * _UNITS[used[2]]) if used else None


def is_fault(refused: jax.errors.JaxRuntimeError) -> bool:
    """Whether the compiler failed by a fault of its own, which other layouts may not meet."""
    return bool(_FAULT.match(str(refused)))
