"""Which layouts must be pinned so that the partitioner does what was decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..ir import Graph, Op, Site
from ..plans import Constraint
from ..sharding import NONE, UNREDUCED, Layout, reshard_path, runs_locally
from .kernels import LOCAL
from .order import Orders


def finished(row: np.ndarray) -> np.ndarray:
    """The layout with its pending sums done, nothing else changed."""
    return np.where(row == UNREDUCED, NONE, row).astype(np.int8)


def planned_constraints(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    orders: Orders,
) -> tuple[Constraint, ...]:
    """Pins where the plan communicates: pending sums are finished where they arise, operands resharded where read.

    Operations that run in a `shard_map` of their own have all their operands and results written down, as its specs.
    A loop's carry and stacked results are pinned too: they have one layout for the whole loop, which propagation
    would take from whichever end it reaches first.
    """
    producers = graph.producers()
    pins: dict[tuple[Site, Layout], Constraint] = {}

    def pin(site: Site | None, layout: Layout, value: int, source: str, primitive: str, why: str) -> None:
        tensor = graph.values[value]
        if site is None or not tensor.shape:
            return
        pins.setdefault(
            (site, layout),
            Constraint(
                site=site, layout=layout, source=source, primitive=primitive, shape=tensor.shape, why=why
            ),
        )

    for value, row in values.items():
        producer = producers[value]
        if producer < 0:
            continue
        op = graph.ops[producer]
        at_edge = op.primitive in ("carry_init", "scan_stack")
        if at_edge or UNREDUCED in row.tolist():
            made = orders.layout("value", value, 0, finished(row), len(graph.values[value].shape))
            why = "propagation" if at_edge else "sum"
            pin(graph.values[value].site, made, value, op.source, op.primitive, why)
    for (index, position), row in sorted(reads.items()):
        op = graph.ops[index]
        value = op.operands[position]
        at_maker = values.get(value)
        if at_maker is None or at_maker.tobytes() == row.tobytes():
            continue  # nothing moves
        for step in reshard_path(finished(at_maker), row):
            layout = orders.on_the_way(value, index, position, step, len(graph.values[value].shape))
            pin(op.sites[position], layout, value, op.source, op.primitive, "reshard")
    return (*pins.values(), *_local_specs(graph, values, reads, orders))


def _local_specs(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    orders: Orders,
) -> list[Constraint]:
    specs: list[Constraint] = []

    def add(op: Op, site: Site | None, kind: str, index: int, position: int, row: np.ndarray, value: int) -> None:
        shape = graph.values[value].shape
        if site is not None and shape:
            layout = orders.layout(kind, index, position, row, len(shape))
            specs.append(
                Constraint(
                    site=site, layout=layout, source=op.source, primitive=op.primitive, shape=shape, why=LOCAL
                )
            )

    for op in graph.ops:
        if runs_locally(op.primitive):
            for position, value in enumerate(op.operands):
                row = reads[op.index, position]
                add(op, op.sites[position], "read", op.index, position, row, value)
            for value in op.results:
                if value in values:
                    add(op, graph.values[value].site, "value", value, 0, values[value], value)
    return specs


def pin_values(
    graph: Graph, values: Mapping[int, np.ndarray], which: Iterable[int], orders: Orders
) -> tuple[Constraint, ...]:
    """Pins on the results `which` (value indices), where the partitioner was seen to choose otherwise."""
    producers = graph.producers()
    pins = []
    for value in which:
        tensor, op = graph.values[value], graph.ops[producers[value]]
        if tensor.site is not None:
            layout = orders.layout("value", value, 0, finished(values[value]), len(tensor.shape))
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
