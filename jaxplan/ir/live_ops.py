"""The operations of a graph that its results need."""

from __future__ import annotations

from .graph import Graph, Loop, Op


def live_ops(graph: Graph) -> Graph:
    """The graph without operations whose results nobody needs: XLA removes them, so they must not be priced."""
    needed = set(graph.outputs)
    keep = [False] * len(graph.ops)
    for op in reversed(graph.ops):
        effect = op.primitive in ("carry_next", "while_test", "pure_callback", "io_callback", "debug_callback")
        if effect or needed.intersection(op.results):
            keep[op.index] = True
            needed.update(op.operands)
    renumber = [-1] * (len(keep) + 1)
    position = 0
    for i, kept in enumerate(keep):
        renumber[i] = position
        position += kept
    renumber[len(keep)] = position
    fields = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    fields["ops"] = tuple(_at(renumber[op.index], op) for op in graph.ops if keep[op.index])
    fields["loops"] = tuple(
        Loop(start=renumber[x.start], stop=renumber[x.stop], trips=x.trips, kind=x.kind, source=x.source)
        for x in graph.loops
    )
    return Graph(**fields)


def _at(index: int, op: Op) -> Op:
    """The same operation in another place; `dataclasses.replace` takes three times as long, a second a million."""
    if op.index == index:
        return op
    return Op(
        index=index, primitive=op.primitive, params=op.params, operands=op.operands, results=op.results,
        trips=op.trips, source=op.source, sites=op.sites, equation=op.equation,
    )  # fmt: skip
