"""What kernels read at which level: see `fusion`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..ir import SUMS, Graph, Op
from ..sharding import Rule
from .residency import Flow, origin


def levels_of(
    flow: Flow, here: Callable[[int, Op], bool], is_open: Callable[[Op], bool]
) -> tuple[list[int], list[int]]:
    """The level of every operation and of every value, see `fusion`.

    Args:
      here: whether a value is made in the loop body that an operation stands in; is_open: whether what reads an
        operation may join its kernel.
    """
    graph, kinds = flow.graph, flow.kinds
    op_level, value_level = [0] * len(graph.ops), [0] * len(graph.values)
    floor, highest, before = dict[int, int](), dict[int, int](), -1
    for op in graph.ops:
        loop, kind = flow.loop_of[op.index], kinds[op.index]
        if loop < before:
            floor[loop] = highest.get(loop, 0) + 1  # no kernel runs before and after a loop
        before = loop
        level = floor.get(loop, 0)
        for value in op.operands:
            if here(value, op) and not flow.source[value]:
                complete = kind == "heavy" and kinds[flow.producers[value]] != "edge"
                level = max(level, value_level[value] + complete)
        op_level[op.index] = level
        highest[loop] = max(highest.get(loop, 0), level)
        later = kind == "reduction" or (kind == "heavy" and not is_open(op))
        for result in op.results:
            value_level[result] = level + later
    uses = graph.uses()
    for op in graph.ops:
        if is_open(op) and kinds[op.index] == "heavy":
            _join_later(flow, uses, op, op_level, value_level)
    return op_level, value_level


def _join_later(
    flow: Flow, uses: Sequence[Sequence[tuple[int, int]]], op: Op, op_level: list[int], value_level: list[int]
) -> None:
    """Moves a product to the level of what alone is computed of it, where the rest of that comes later: XLA for TPU
    ends the product's kernel with it, whenever that is, unless another product's kernel does.  What reads more than it
    makes is not put off: gradients of heads that are tied to tables wait for no scatter (GPT-2 and Mamba on v5p)."""
    graph, level, chain = flow.graph, op_level[op.index], [op]
    if any(graph.values[v].bytes > graph.values[op.results[0]].bytes for v in op.operands):
        return
    while len(chain[-1].results) == 1:
        (value,) = chain[-1].results
        readers = {index for index, _ in uses[value]}
        if len(readers) != 1 or value in graph.outputs:
            return
        reader = graph.ops[readers.pop()]
        alike = all(graph.values[v].shape == graph.values[value].shape for v in reader.results)
        if not alike or flow.kinds[reader.index] != "fused" or flow.loop_of[reader.index] != flow.loop_of[op.index]:
            return
        if op_level[reader.index] > level:
            later = op_level[reader.index]
            if not any(_ends_product(flow, v, op_level, later) for v in reader.operands if v != value):
                for one in chain:
                    op_level[one.index] = later
                    value_level[one.results[0]] = later
            return
        chain.append(reader)


def _ends_product(flow: Flow, value: int, op_level: Sequence[int], level: int) -> bool:
    """Whether a product's kernel makes `value` at a level."""
    todo, seen = [value], set[int]()
    while todo:
        value = todo.pop()
        maker = flow.producers[value]
        if value in seen or maker < 0 or flow.source[value] or op_level[maker] != level:
            continue
        seen.add(value)
        if flow.rules[maker].matmul:
            return True
        if flow.kinds[maker] == "fused":
            todo += flow.graph.ops[maker].operands
    return False


def kernels_reading(
    graph: Graph, rules: Sequence[Rule], kinds: Sequence[str], value_levels: Sequence[int], op_levels: Sequence[int],
    platform: str, kept: Collection[int],
) -> list[int]:  # fmt: skip
    """How many kernels read each value from memory or would compute it, where it matters.

    On TPU each product, also one of matrices that reads what is made of it, and one for all else; on GPU, see
    `_levels_reading`; elsewhere nothing.

    Args:
      kept: values that are in memory for sure; what reads them reads nothing that they are made of.
    """
    if platform == "gpu":
        return _levels_reading(graph, rules, kinds, op_levels, kept)
    if platform != "tpu":
        return []
    read, others = _read_by("dot_general", graph, kinds, kept), [False] * len(graph.values)
    for op in graph.ops:
        for value in op.operands:
            if rules[op.index].matmul:
                read[value] |= 1 << op.index
            elif kinds[op.index] == "reduction" or value_levels[value] < op_levels[op.index]:
                others[value] = True
    return [products.bit_count() + other for products, other in zip(read, others, strict=True)]


def convolutions_reading(
    graph: Graph, kinds: Sequence[str], kept: Collection[int], summed: Collection[int]
) -> dict[int, int]:
    """Of sums that are normalised (`summed`): how many kernels read each, that of its statistics and convolutions that
    read it or what it is normalised to; without those that none reads.  `kept`: see `kernels_reading`."""
    read = _read_by("conv_general_dilated", graph, kinds, kept)
    made = {v for op in graph.ops if op.primitive in SUMS for v in op.results}
    return {value: read[value].bit_count() + 1 for value in made.intersection(summed) if read[value]}


def _read_by(primitive: str, graph: Graph, kinds: Sequence[str], kept: Collection[int]) -> list[int]:
    """For every value the kernels of their own, bit by bit, of such operations that read it, or what is computed of
    it and not `kept`."""
    read = [0] * len(graph.values)
    for op in reversed(graph.ops):
        found = (op.primitive == primitive and kinds[op.index] == "heavy") << op.index
        for value in op.results if kinds[op.index] == "fused" else ():
            found |= read[value] * (value not in kept)
        for value in op.operands:
            read[value] |= found
    return read


def _levels_reading(
    graph: Graph, rules: Sequence[Rule], kinds: Sequence[str], op_levels: Sequence[int], kept: Collection[int]
) -> list[int]:
    """Of sums with a scaled branch: at how many levels kernels read them or what is computed of them, but for one."""
    at, producers, uses = [0] * len(graph.values), graph.producers(), graph.uses()
    stays = {v for op in graph.ops if rules[op.index].matmul for v in op.operands}.union(kept)
    scaled = set[int]()
    for op in reversed(graph.ops):
        here = 0
        if kinds[op.index] == "reduction":
            here = 1 << op_levels[op.index]
        elif kinds[op.index] == "fused":
            for value in op.results:
                here |= 1 << op_levels[op.index] if value in stays else at[value]
        for value in op.operands:
            at[value] |= here
        added = [producers[origin(graph, producers, v)] for v in op.operands if op.primitive in SUMS]
        makers = [graph.ops[maker] for maker in added if maker >= 0]
        if any(maker.primitive == "mul" and any(len(uses[v]) > 1 for v in maker.operands) for maker in makers):
            scaled.update(op.results)
    return [max(0, levels.bit_count() - 1) * (value in scaled) for value, levels in enumerate(at)]


def costs_more_again(kernels: int, size: float, leaves: Mapping[int, float]) -> bool:
    """Whether computing a value again in each of the kernels that read it reads more than having it in memory does: of
    n tensors as large by k kernels, n k of them and not n to make it, one to write it, and one by each other kernel.

    XLA for TPU stores the sum of a residual network's two branches, each scaled and shifted, that five kernels read,
    and a normalisation's gradient, made of that behind it and of what was normalised, that the gradients of its
    weights and of its input and its bias' sum read; not the first layer's, whose input needs no gradient (networks
    of group normalisation in f32 and bf16, v5e); and a stream of activations with a scaled branch added, whose
    normalisation two products read, though the branch is kept for the scale's gradient (layer scales of a ConvNeXt and
    a DINO, v5e, v5p and v6e, jax 0.10.2, libtpu 0.0.42.1), or a convolution does and that of its gradient, beside the
    kernel that sums it (where a ConvNeXt's stages end).  So does XLA for GPU, which writes it by a kernel of its own
    or beside the normalisation's sums: one more than there (a BEiT and a DINO in f32, H100).

    Args:
      kernels: how many; size: bytes of the value; leaves: of what it is computed from.
    """
    large = sum(one > size / 2 for one in leaves.values())
    return kernels * large > kernels + large


def run_at_level(
    graph: Graph, kinds: Sequence[str], stored: Sequence[bool], carried: Collection[int], op_levels: Sequence[int]
) -> list[bool]:
    """Whether each operation runs at its level: cheap ones whose readers all run later are computed there only."""
    wanted = [kept or value in carried for value, kept in enumerate(stored)]
    runs = [kind != "edge" for kind in kinds]
    read_at: list[set[int]] = [set() for _ in wanted]
    for op in reversed(graph.ops):
        level = op_levels[op.index]
        if kinds[op.index] == "fused":
            runs[op.index] = any(wanted[v] or level in read_at[v] for v in op.results)
        for value in op.operands:
            if kinds[op.index] == "edge":
                wanted[value] = True
            elif runs[op.index]:
                read_at[value].add(level)
    return runs
