"""The factor rules of a whole program."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Graph, Starts, start_shares
from .rule import OpShapes, Rule
from .rules import rule_for


def graph_rules(graph: Graph) -> tuple[Rule, ...]:
    """The factor rule of every operation; equal operations share one Rule object."""
    cache: dict[tuple[object, ...], Rule] = {}
    words: dict[int, str] = {}
    rules = []

    def said(value: object) -> str:
        # by identity: the graph keeps them, and its operations share most
        if id(value) not in words:
            words[id(value)] = repr(value)
        return words[id(value)]

    types = [(value.shape, value.dtype) for value in graph.values]
    for op in graph.ops:
        operands, results = tuple([types[v] for v in op.operands]), tuple([types[v] for v in op.results])
        settings = tuple([(k, said(v)) for k, v in sorted(op.params.items()) if "jaxpr" not in k])
        key = op.primitive, operands, results, settings
        if key not in cache:
            cache[key] = rule_for(
                OpShapes(
                    primitive=op.primitive,
                    params=op.params,
                    operands=tuple(shape for shape, _ in operands),
                    results=tuple(shape for shape, _ in results),
                    operand_dtypes=tuple(dtype for _, dtype in operands),
                    result_dtypes=tuple(dtype for _, dtype in results),
                    equation=op.equation,
                )
            )
        rules.append(cache[key])
    return tuple(rules)


def start_shares_of(graph: Graph, rules: Sequence[Rule]) -> Starts:
    """`ir.start_shares` of a program: of every value, how much of the start of what sends it is its own."""
    return start_shares(graph, [rule.matmul for rule in rules], [bool(rule.reduction) for rule in rules])
