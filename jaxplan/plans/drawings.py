"""Inline SVG of a plan's page: bars, and the mesh with the piece that each device holds."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

from ..sharding import Layout, MeshAxes
from .words import spec_text

PALETTE = 7
"""Colours `c0` ... `c6` of the page's style; a part takes them in turn."""

_CELL = 11
_MOST = 8
"""Devices drawn along one side: a larger mesh shows its first corner."""


def stacked_bar(parts: Sequence[tuple[str, float, str]], whole: float, marker: float | None = None) -> str:
    """A bar of `whole` with a coloured piece for each `(name, size, text)`; a line at `marker`.

    Sizes, `whole` and `marker` share one unit; `text` is said by the browser when a piece is pointed at.
    """
    width, height = 1000.0, 34
    scale = width / whole if whole > 0 else 0.0
    pieces = [f'<rect class="track" width="{width:g}" height="{height}" rx="4"/>']
    left = 0.0
    for index, (name, size, text) in enumerate(parts):
        # a sliver stays visible, so that nothing which is there looks absent
        extent = max(size * scale, 2.0) if size > 0 else 0.0
        title = html.escape(f"{name}: {text}")
        pieces.append(
            f'<rect class="c{index % PALETTE}" x="{left:.1f}" width="{extent:.1f}" height="{height}">'
            f"<title>{title}</title></rect>"
        )
        left += size * scale
    if marker is not None:
        x = min(marker * scale, width - 1)
        pieces.append(f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="-4" y2="{height + 4}"/>')
    return (
        f'<svg class="bar" viewBox="0 -5 {width:g} {height + 10}" preserveAspectRatio="none" role="img">'
        f"{''.join(pieces)}</svg>"
    )


def legend(parts: Sequence[tuple[str, float, str]]) -> str:
    """The names of a stacked bar's parts with their colours and texts."""
    items = (
        f'<span class="key"><i class="c{index % PALETTE}"></i>{html.escape(name)} '
        f"<b>{html.escape(text)}</b></span>"
        for index, (name, _, text) in enumerate(parts)
    )
    return f'<p class="legend">{" ".join(items)}</p>'


def share_bar(share: float, kind: str = "c0") -> str:
    """A small bar in a table's cell, `share` of its width filled."""
    width = 100 * min(max(share, 0.0), 1.0)
    return f'<span class="share"><i class="{kind}" style="width:{width:.1f}%"></i></span>'


def mesh_drawing(layout: Layout, axes: MeshAxes) -> str:
    """The devices of the mesh, one square each, shaded by the piece of the tensor that it holds.

    Columns are the first axis, rows the others (the last one fastest).  Squares of one shade hold the same
    piece: a replicated tensor has one shade, a tensor cut over every axis as many as there are devices.
    """
    names = [name for name, _ in axes]
    first, *others = [size for _, size in axes] or [1]
    columns = range(min(first, _MOST))
    rows = list(itertools.islice(itertools.product(*map(range, others)), _MOST))
    pieces = layout.shards(axes)
    cells = []
    for y, rest in enumerate(rows):
        for x in columns:
            index = dict(zip(names, (x, *rest), strict=False))
            shade = 0.22 + 0.78 * _piece(layout, index, dict(axes)) / max(pieces - 1, 1)
            cells.append(
                f'<rect class="device" x="{x * _CELL}" y="{y * _CELL}" width="{_CELL - 1}" '
                f'height="{_CELL - 1}" fill-opacity="{shade:.2f}"/>'
            )
    width, height = len(columns) * _CELL, len(rows) * _CELL
    held = "every device holds all of it" if pieces == 1 else f"{pieces} pieces, by shade"
    whole = len(columns) * len(rows) == math.prod((first, *others))
    title = html.escape(f"{spec_text(layout)}: {held}{'' if whole else '; first corner of the mesh'}")
    return (
        f'<svg class="mesh" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{title}</title>{''.join(cells)}</svg>"
    )


def _piece(layout: Layout, index: dict[str, int], size: dict[str, int]) -> int:
    """The number of the piece that the device at `index` holds, dimensions and axes major first."""
    piece = 0
    for dim in layout.dims:
        for name in dim:
            piece = piece * size[name] + index[name]
    return piece
