"""How a plan's text names tensors, specs and counts: as jax prints them, and short."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..sharding import Layout

_SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def spec_text(layout: Layout) -> str:
    """`"P(None, 'model')"`, canonical as PartitionSpec is: without the trailing None of uncut dimensions."""
    pending = f" unreduced={{{', '.join(layout.unreduced)}}}" if layout.unreduced else ""
    return f"P({', '.join(map(repr, layout.spec()))}){pending}"


def type_text(dtype: str, shape: Sequence[int], host: bool = False) -> str:
    """`type_text("float32", (4, 256)) == "f32[4,256]"`, as jaxprs print it; f32<host>[4,256] in the host's memory."""
    for long, short in _SHORT:
        if re.match(rf"{long}\d", dtype):
            dtype = short + dtype.removeprefix(long)
            break
    return f"{dtype}{'<host>' * host}[{','.join(map(str, shape))}]"


def shape_text(shape: Sequence[int]) -> str:
    """`"4096x1024"`; a scalar is `"scalar"`."""
    return "x".join(map(str, shape)) or "scalar"


def runs_text(runs: float) -> str:
    """How often something runs in a step: whole where it is whole."""
    return f"{runs:,.0f}" if runs == round(runs) else f"{runs:,.2f}"
