"""Weights' gradients that XLA for TPU makes in the kernels of their updates, at the end of a step.

A product to whose result no other device adds anything is fused with the optimizer's arithmetic, where that is cut as
it is; and XLA's latency-hiding scheduler, which works from the last operation to the first, takes updates before
anything else. So what such a product reads is kept until then: the gradient of a head that all axes cut over the words
keeps the logits' gradient (a Llama in f32 and a mixture of experts, compiled for eight v5e, jax 0.10.2, libtpu
0.0.42.1, 2026-11-28: 39 and 41 MB of 150 and 207). Products of several batch dimensions, experts' gradients, are
kernels of their own, and run where they stand.  So do those whose update waits for a sum over the gradient, as where a
norm of all gradients clips them (a mixture of experts on sixteen v6e, 2026-11-29).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..ir import Graph, settled_values
from ..sharding import UNREDUCED, MeshAxes
from .held_back import behind_loops, last_products


def with_updates(graph: Graph, axes: MeshAxes, values: Mapping[int, np.ndarray]) -> dict[int, int]:
    """The products that run with updates of donated arguments, and when: at the end, as the index of an operation.

    Args:
      values: the layout row of every value where it is made.
    """
    if all(size == 1 for _, size in axes):
        return {}
    last, producers = behind_loops(graph), graph.producers()
    within, (gradients, _), uses = {op.index for op in last}, last_products(last, ()), graph.uses()
    elements = [math.prod(tensor.shape) for tensor in graph.values]
    found: dict[int, int] = {}
    for value, argument in settled_values(graph).items():
        row, kept = values.get(value), values.get(argument)
        if row is None or kept is None or not np.array_equal(row, kept):
            continue
        left, seen, scalars, made_last = [value], {value}, set[int](), list[int]()
        while left:
            maker = producers[left.pop()]
            if maker not in within:
                continue
            op = graph.ops[maker]
            if op.primitive != "dot_general":
                scalars.update(v for v in op.operands if elements[v] == 1)
                alike = {v for v in op.operands if elements[v] == elements[value]} - seen
                left += alike
                seen |= alike
            elif op.results[0] in gradients and not op.params["dimension_numbers"][1][0]:
                made = values.get(op.results[0])
                # the same axes cut both: views may have moved the dimensions
                if made is not None and UNREDUCED not in made and np.array_equal(made >= 0, row >= 0):
                    made_last.append(maker)
        for maker in made_last:
            if not _waits_for_sum(graph, producers, uses, elements, graph.ops[maker].results[0], scalars):
                found[maker] = len(graph.ops) - 1
    return dict(sorted(found.items()))


def _waits_for_sum(
    graph: Graph, producers: Sequence[int], uses: Sequence[Sequence[tuple[int, int]]], elements: Sequence[int],
    gradient: int, scalars: Iterable[int],
) -> bool:  # fmt: skip
    """Whether any of these scalars is computed of a sum over a gradient.

    Args:
      elements: of every value, how many.
    """
    sums, left, seen = set[int](), [gradient], {gradient}
    while left:
        for made in (v for reader, _ in uses[left.pop()] for v in graph.ops[reader].results):
            if elements[made] == 1:
                sums.add(made)
            elif elements[made] == elements[gradient] and made not in seen:
                seen.add(made)
                left.append(made)
    left, seen = list(scalars), set(scalars)
    while left:
        value = left.pop()
        if value in sums:
            return True
        if (maker := producers[value]) >= 0:
            before = {v for v in graph.ops[maker].operands if elements[v] == 1} - seen
            left += before
            seen |= before
    return False
