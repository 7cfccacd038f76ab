"""Where the user wrote an operation, in words: `"model.py:12 (forward)"`.

The innermost line of the user's own code, with the line of the library that it called beside it, where one did the
work: `"model.py:12 (Mlp.__call__) via linear.py:298"`.  Files stand without their folders, so that the same program
gives the same words on every machine.
"""

from __future__ import annotations

import functools
import os.path
import sysconfig
from typing import Any

from .._jax import Frame, frames_of

UNKNOWN = "unknown"
"""What no line is known of, not even of a call around it."""

_VIA = " via "
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for path in (sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
)


def source_of(eqn: Any, outer: str = UNKNOWN) -> str:
    """Where an equation was written; `outer`, the source of the call around it, where itself it says too little.

    jax keeps no lines of the user's for functions that it jits itself (`jnp.where`, `jax.nn.silu`): their equations
    belong to the line that called them.
    """
    library = ""
    for frame in frames_of(eqn):
        if frame.file.startswith(_OWN):  # from here on outwards it is the tracing
            break
        if not _of_library(frame.file):
            return f"{_line(frame)} ({frame.function})" + (f"{_VIA}{library}" if library else "")
        library = library or _line(frame)
    if outer != UNKNOWN:
        return f"{users_line(outer)}{_VIA}{library}" if library else outer
    return library or UNKNOWN


def users_line(source: str) -> str:
    """`source` without the library's line."""
    return source.partition(_VIA)[0]


def _line(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}:{frame.line}"


@functools.cache
def _of_library(file: str) -> bool:
    """Whether a file is Python's own, an installed package's, or none at all (`<string>`)."""
    parts = file.replace("\\", "/").split("/")
    installed = "site-packages" in parts or "dist-packages" in parts
    return installed or file.startswith(("<", *_LIBRARIES))
