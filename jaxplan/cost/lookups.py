"""Which dimensions lie in tiles of the tables that rows are taken from or added to, and of the rows, on TPU.

See `tiles` for how each lies; from jax 0.11 on XLA's compiler keeps larger tables in rows where many rows are added to
them (`Table`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._jax import ADDED_ROWS_ARE_COUNTED
from ..ir import Graph, Op
from .tiles import RowsOf, Table, Tiling

Lookups = Mapping[int, Sequence[tuple[int, Tiling]]]
"""By operation that gathers or scatters the rows, then the tables, each with what of it lies in tiles; nothing where
rows are not moved whole."""

_TABLE_SHARE, _RESERVED = 0.05, 2**28
"""What a table in rows may take for that of a device's memory, with what XLA keeps of it for itself: 1,677,720 rows of
512 bytes of 16 GiB on v5e, not one more; on v5p and v6e 10,065,856 and 3,302,764 of 96 and 31.5 GiB, not a thousand
more (compiled, jax 0.12.0.1, libtpu 0.0.50.1, 2026-11-29)."""


def lookups_of(graph: Graph, usable_bytes: int = 0) -> Lookups:
    """See `Lookups`.

    Args:
      usable_bytes: memory of a device; 0: only what every release of XLA keeps in rows is.
    """
    most = _TABLE_SHARE * (usable_bytes + _RESERVED) if ADDED_ROWS_ARE_COUNTED and usable_bytes else 0.0
    return {op.index: tuple(_rows_of(op, graph, most)) for op in graph.lookups()}


def table_tiling(lookups: Lookups, op: Op) -> Tiling:
    """What lies in tiles of the table of an operation that moves rows of one dimension whole."""
    return next((tiling for _, tiling in lookups[op.index][1:] if not isinstance(tiling, frozenset)), "table")


def _rows_of(op: Op, graph: Graph, most: float) -> list[tuple[int, Tiling]]:
    if op.primitive == "gather":
        rows, windows = op.results[0], op.params["dimension_numbers"].offset_dims
    else:
        rows, windows = op.operands[2], op.params["dimension_numbers"].update_window_dims
    if len(graph.values[rows].shape) - 1 not in windows:
        return []
    tables = [op.operands[0]] if op.primitive == "gather" else [op.operands[0], *op.results]
    if len(dims := _wide_rows(graph.values[rows].shape, windows)) > 1:
        alone = {*_alone(op.params["dimension_numbers"])}
        of_table = [d for d in range(len(graph.values[tables[0]].shape)) if d not in alone]
        spanned = frozenset(of_table[sorted(windows).index(d)] for d in dims)
        return [(rows, dims), *((table, spanned) for table in tables)]
    places = [size for d, size in enumerate(graph.values[rows].shape) if d not in windows and size > 1]
    added = most > 0 and op.primitive != "gather"
    tiling: Tiling = Table(math.prod(places), most) if added else "table"
    listed = RowsOf(((graph.values[op.operands[0]], tiling),), len(places) > 1)
    return [(rows, listed), *((table, tiling) for table in tables)]


def _wide_rows(shape: Sequence[int], windows: Sequence[int]) -> frozenset[int]:
    """Of rows the dimensions of one of them that have more than one element."""
    return frozenset(d for d in windows if shape[d] > 1)


def _alone(numbers: Any) -> tuple[int, ...]:
    """Dimensions of a table of which a row has one place, and no dimension of its own."""
    if hasattr(numbers, "offset_dims"):
        return (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    return (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
