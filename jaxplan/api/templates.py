"""The hand-written plans that experts use, as pins on arguments; the rest is left to the search.

They say what is the batch and what is state by data flow, never by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir import Graph
from ..search import Allowed
from ..sharding import MeshAxes, Rule


def input_kinds(graph: Graph, rules: Sequence[Rule]) -> tuple[str, ...]:
    """For every input: "parameter", "optimizer", "state" or "batch".

    State comes back as a result.  A parameter is floating-point state that reaches a matrix product and, where the step
    returns more than state (a loss), reaches that too: momentum that is orthogonalised or projected meets matrix
    products, but no loss depends on it.  What only reaches the next state (moments, averages) is optimizer state.
    """
    to_products = _reaching(graph, (), [rule.matmul for rule in rules])
    nowhere = [False] * len(graph.ops)
    is_state = {o for _, o in graph.aliases}
    to_results = _reaching(graph, [v for o, v in enumerate(graph.outputs) if o not in is_state], nowhere)
    if not any(to_results[graph.inputs[i]] for i, _ in graph.aliases):
        to_results = [True] * len(graph.values)
    reaches = [product and result for product, result in zip(to_products, to_results, strict=True)]
    comes_back = {i for i, _ in graph.aliases}
    kinds = []
    for position, value in enumerate(graph.inputs):
        tensor = graph.values[value]
        if position not in comes_back:
            kinds.append("batch")
        elif "float" not in tensor.dtype:
            kinds.append("state")
        else:
            kinds.append("parameter" if reaches[value] else "optimizer")
    return tuple(kinds)


def _reaching(graph: Graph, ends: Sequence[int], ending: Sequence[bool]) -> list[bool]:
    """For every value: whether one of the values `ends`, or an operation that is `ending`, depends on it."""
    reaches = [False] * len(graph.values)
    for value in ends:
        reaches[value] = True
    for _ in range(2):  # twice: a loop's carry is read before its next value is made
        for op, is_end in zip(reversed(graph.ops), reversed(ending), strict=True):
            onward = is_end or any(reaches[v] for v in op.results)
            if op.primitive == "carry_next":
                onward = reaches[op.operands[1]]
            if onward:
                for value in op.operands:
                    reaches[value] = True
    return reaches


def template_pins(name: str, graph: Graph, kinds: Sequence[str], axes: MeshAxes) -> dict[int, Allowed] | None:
    """Pins by input position of the named template; None when the mesh has too few axes for it.

    - data: the batch cut over all axes, all state replicated.
    - zero1: data, with optimizer state cut over all axes.
    - fsdp: data, with all state cut over all axes.
    - megatron: the batch cut over all axes but the last (of those longer than 1), parameters and their optimizer
      state over the last.
    - tensor_fsdp: the batch as in megatron, all state cut over all axes.
    """
    every = [a for a, (_, size) in enumerate(axes) if size > 1]
    if name == "tensor_fsdp" and len(every) == 1:
        return None
    hybrid = name in ("megatron", "tensor_fsdp") and bool(every)
    outer, last = (every[:-1], every[-1:]) if hybrid else (every, [])
    pins: dict[int, Allowed] = {}
    for position, kind in enumerate(kinds):
        if kind == "batch":
            pins[position] = _leading(outer, len(axes))
        elif name == "data" or (name == "zero1" and kind == "parameter"):
            pins[position] = _within([], len(axes))
        elif name == "megatron":
            pins[position] = _within(last, len(axes))
        elif name in ("zero1", "fsdp", "tensor_fsdp"):
            pins[position] = _most_cut(every)
    return pins


def _leading(cut: list[int], n_axes: int) -> Allowed:
    """The first dimension cut over `cut` where that divides (as many axes as do), nothing else cut."""

    def allowed(places: np.ndarray) -> np.ndarray:
        simple = ((places == 0) | (places < 0)).all(axis=1)
        for axis in range(n_axes):
            if axis not in cut:
                simple &= places[:, axis] < 0
        count = (places[:, cut] == 0).sum(axis=1) if cut else np.zeros(len(places))
        most = count[simple].max()
        return simple & (count == most)

    return allowed


def _within(allowed_axes: list[int], n_axes: int) -> Allowed:
    """Only these axes may cut the tensor."""
    others = [a for a in range(n_axes) if a not in allowed_axes]
    return lambda places: np.asarray((places[:, others] < 0).all(axis=1))


def _most_cut(axes: list[int]) -> Allowed:
    """Cut over as many of the axes as divide."""

    def allowed(places: np.ndarray) -> np.ndarray:
        count = (places[:, axes] >= 0).sum(axis=1)
        return np.asarray(count == count.max())

    return allowed
