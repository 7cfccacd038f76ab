"""Which layouts must be pinned so that the partitioner does what was decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..ir import Graph, Site
from ..plans import Constraint
from ..sharding import NONE, UNREDUCED, MeshAxes, Rule, layout_of_places, reshard_path


def finished(row: np.ndarray) -> np.ndarray:
    """The layout with its pending sums done, nothing else changed."""
    return np.where(row == UNREDUCED, NONE, row).astype(np.int8)


def planned_constraints(
    graph: Graph,
    axes: MeshAxes,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
) -> tuple[Constraint, ...]:
    """Pins where the plan communicates: pending sums are finished where they arise, operands resharded where read.

    A loop's carry and stacked results are pinned too: they have one layout for the whole loop, which propagation
    would take from whichever end it reaches first.
    """
    producers = graph.producers()
    pins: dict[tuple[Site, bytes], Constraint] = {}

    def pin(site: Site | None, row: np.ndarray, value: int, source: str, primitive: str, why: str) -> None:
        tensor = graph.values[value]
        if site is None or not tensor.shape:
            return
        layout = layout_of_places(row, len(tensor.shape), axes)
        pins.setdefault(
            (site, row.tobytes()),
            Constraint(
                site=site, layout=layout, source=source, primitive=primitive, shape=tensor.shape, why=why
            ),
        )

    for value, row in values.items():
        producer = producers[value]
        if producer < 0:
            continue
        op = graph.ops[producer]
        if op.primitive in ("carry_init", "scan_stack"):
            pin(graph.values[value].site, finished(row), value, op.source, op.primitive, "propagation")
        elif (row == UNREDUCED).any():
            pin(graph.values[value].site, finished(row), value, op.source, op.primitive, "sum")
    for (index, position), row in sorted(reads.items()):
        op = graph.ops[index]
        value = op.operands[position]
        made = values.get(value)
        if made is not None and not np.array_equal(finished(made), row):
            for step in reshard_path(finished(made), row):
                pin(op.sites[position], step, value, op.source, op.primitive, "reshard")
    return tuple(pins.values())


def pin_values(
    graph: Graph,
    axes: MeshAxes,
    values: Mapping[int, np.ndarray],
    which: Iterable[int],
    rules: tuple[Rule, ...],
) -> tuple[Constraint, ...]:
    """Pins on the results `which` (value indices), where the partitioner was seen to choose otherwise."""
    producers = graph.producers()
    pins = []
    for value in which:
        tensor, op = graph.values[value], graph.ops[producers[value]]
        if tensor.site is not None:
            layout = layout_of_places(finished(values[value]), len(tensor.shape), axes)
            pins.append(
                Constraint(
                    site=tensor.site,
                    layout=layout,
                    source=op.source,
                    primitive=op.primitive,
                    shape=tensor.shape,
                    why="propagation",
                )
            )
    return tuple(pins)
