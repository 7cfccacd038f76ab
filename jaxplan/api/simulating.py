"""A space of decisions as the strategy simulator runs it."""

from __future__ import annotations

import numpy as np

from ..cost import CostModel, synchronous
from ..ir import Value
from ..search import Space
from ..sharding import Moves
from ..simulator import Between, Choices


def simulated_choices(space: Space, model: CostModel) -> Choices:
    """Every node of the space's problem as an operation, every edge as what moves between two of them.

    Prices are the problem's own, so that with nothing overlapping a step takes the objective; what is sent counts in
    full, whatever share of it `model.exposed` has the search pay.  Compute units stand still for what is for the larger
    part sent by collectives that they stand still for, as in the timeline of a plan.
    """
    cache: dict[tuple[int, int], tuple[Moves, np.ndarray]] = {}
    stilled: dict[tuple[object, ...], np.ndarray] = {}
    waits = synchronous("all_reduce", model.profile.kind)
    between = []
    for edge, moved in zip(space.problem.edges, space.passages, strict=True):
        key, tensor = (id(moved.tails), id(moved.heads)), moved.tensor
        if key not in cache:
            moves = Moves(moved.tails, moved.heads, model.axes)
            cache[key] = moves, moves.over()
        moves, over = cache[key]
        priced = (*key, tensor.shape, tensor.item_bytes, tensor.narrowed)
        if waits and priced not in stilled:
            stilled[priced] = _mostly_still(moves, tensor, model)
        seconds_s = edge.costs_s / model.exposed if model.exposed != 1 else edge.costs_s
        between.append(
            Between(tail=edge.tail, head=edge.head, seconds_s=seconds_s, axes=over, still=stilled.get(priced))
        )
    streams = [model.streams_of((name,)) for name, _ in model.axes]
    numbers = {stream: i for i, stream in enumerate(dict.fromkeys(streams))}
    return Choices(
        compute_s=tuple(node.costs_s for node in space.problem.nodes), between=tuple(between),
        mesh=tuple(size for _, size in model.axes), links=tuple(numbers[stream] for stream in streams),
    )  # fmt: skip


def _mostly_still(moves: Moves, tensor: Value, model: CostModel) -> np.ndarray:
    """`bool[a, b]`: whether at least half of a move's seconds are in collectives that nothing is computed beside."""

    def sent(kind: str, size: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        return model.collective(kind, size * tensor.as_sent(kind), axes)

    def waited_for(kind: str, size: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        compiled = model.compiled_kind(kind, [model.axes[i][0] for i in axes])
        return sent(kind, size, axes) * synchronous(compiled, model.profile.kind)

    still_s = moves.price(tensor.bytes, waited_for)
    return (still_s > 0) & (2 * still_s >= moves.price(tensor.bytes, sent))
