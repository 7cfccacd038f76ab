"""A space of decisions as the strategy simulator runs it."""

from __future__ import annotations

import numpy as np

from ..cost import CostModel
from ..search import Space
from ..sharding import Moves
from ..simulator import Between, Choices


def simulated_choices(space: Space, model: CostModel) -> Choices:
    """Every node of the space's problem as an operation, every edge as what moves between two of them.

    Prices are the problem's own, so that with nothing overlapping a step takes the objective; what is sent counts in
    full, whatever share of it `model.exposed` has the search pay.
    """
    cache: dict[tuple[int, int], np.ndarray] = {}
    between = []
    for edge, moved in zip(space.problem.edges, space.passages, strict=True):
        key = id(moved.tails), id(moved.heads)
        if key not in cache:
            cache[key] = Moves(moved.tails, moved.heads, model.axes).over()
        seconds_s = edge.costs_s / model.exposed if model.exposed != 1 else edge.costs_s
        between.append(Between(tail=edge.tail, head=edge.head, seconds_s=seconds_s, axes=cache[key]))
    streams = [model.streams_of((name,)) for name, _ in model.axes]
    numbers = {stream: i for i, stream in enumerate(dict.fromkeys(streams))}
    return Choices(
        compute_s=tuple(node.costs_s for node in space.problem.nodes), between=tuple(between),
        mesh=tuple(size for _, size in model.axes), links=tuple(numbers[stream] for stream in streams),
    )  # fmt: skip
