"""Programs as problems: an assignment's objective is what a walk over the program pays, and its optimum is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxplan.cost import CostModel, kernels_beside, narrowed, scattering_seconds, traffic
from jaxplan.hardware import axis_links, load_profile
from jaxplan.ir import Graph, Value, start_shares, trace
from jaxplan.search import SEARCHES, Edge, Node, StrategyProblem, Termination, evaluate
from jaxplan.search.build import build
from jaxplan.search.space import Space, decide
from jaxplan.sharding import graph_rules, reshard_steps

AXIS = (("data", 4),)
GRID = (("data", 2), ("model", 2))


def shape(*extents: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(extents, jnp.float32)


def model_of(axes: tuple[tuple[str, int], ...]) -> CostModel:
    profile = load_profile("tpu-v5e")
    links = axis_links(profile, axes)
    return CostModel(profile=profile, axes=axes, links=tuple(links[name] for name, _ in axes))


def space_of(
    fn: Callable[..., Any], shapes: tuple[Any, ...], axes: Any, limit_bytes: int | None = None
) -> tuple[Graph, Space]:
    graph, model = trace(fn, shapes, {}).graph, model_of(axes)
    graph = narrowed(graph, graph_rules(graph), model.profile.kind)
    return graph, build(graph, model, limit_bytes=limit_bytes)


def _product(x: Any, w: Any) -> Any:
    return x @ w


def _pair(x: Any, a: Any, b: Any) -> Any:
    return jnp.tanh(x @ a) @ b


def _sum(x: Any, a: Any) -> Any:
    return jnp.sum(x @ a)


def _gradient(x: Any, a: Any) -> Any:
    return jax.grad(lambda a: jnp.sum((x @ a) ** 2))(a)


def _transposed(x: Any) -> Any:
    return x @ x.T


def _softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def _reshaped(x: Any) -> Any:
    return jnp.sum(x.reshape(-1, 4, x.shape[1]), axis=1)


def _scanned(x: Any, w: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0]


def _branched(x: Any, w: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x + w)


def _shared(x: Any) -> Any:
    y = jnp.sin(x @ x)
    return y @ y, y.sum()


BIG, SMALL, TALL, FLAT = shape(1024, 1024), shape(64, 64), shape(4096, 64), shape(64, 4096)

# Small programs whose assignments can all be tried.
REAL: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (_product, (BIG, BIG)), (_product, (TALL, SMALL)), (_product, (FLAT, TALL)), (_product, (SMALL, FLAT)),
    (_pair, (SMALL, FLAT, TALL)), (_sum, (BIG, BIG)), (_sum, (TALL, SMALL)), (_gradient, (TALL, SMALL)),
    (_transposed, (TALL,)), (_transposed, (FLAT,)), (_softmax, (TALL,)), (_softmax, (BIG,)),
    (_reshaped, (TALL,)), (_reshaped, (BIG,)), (_scanned, (SMALL, SMALL)), (_scanned, (BIG, BIG)),
    (_branched, (BIG, BIG)), (_branched, (SMALL, SMALL)), (_shared, (BIG,)), (_shared, (SMALL,)),
]  # fmt: skip
NAMES = [f"{fn.__name__[1:]}-{'-'.join(f'{s.shape[0]}x{s.shape[1]}' for s in shapes)}" for fn, shapes in REAL]


def assignments(problem: StrategyProblem) -> int:
    return math.prod(node.costs_s.size for node in problem.nodes)


@pytest.mark.parametrize(("program", "shapes"), REAL, ids=NAMES)
def test_the_ilp_finds_the_optimum_of_all_assignments(
    program: Callable[..., Any], shapes: tuple[Any, ...]
) -> None:
    _, space = space_of(program, shapes, AXIS)
    free = SEARCHES["exhaustive"](space.problem)
    # Without a limit, and with one that the cheapest plan doesn't keep.
    for limit in (None, int(0.7 * free.peak_bytes)):
        problem = StrategyProblem(
            nodes=space.problem.nodes,
            edges=space.problem.edges,
            usages=space.problem.usages,
            limit_bytes=limit,
        )
        wanted = SEARCHES["exhaustive"](problem)
        found = SEARCHES["ilp"](problem, relative_gap=0.0)
        assert found.termination is wanted.termination
        if wanted.termination is Termination.OPTIMAL:
            assert found.objective_s == pytest.approx(wanted.objective_s, rel=1e-9)


def walked_s(graph: Graph, space: Space, model: CostModel, chosen: tuple[int, ...]) -> float:
    """Seconds of a step: each operation's arithmetic, and one by one what is sent between neighbours.

    For programs in which nothing is read twice.
    """
    decision, crossing = decide(space, chosen), traffic(graph, space.rules, model.profile.kind)
    trips = {op.index: op.trips for op in graph.ops}
    total = sum(decision.compute_s.values())
    shares = start_shares(
        graph, [rule.matmul for rule in space.rules], [bool(rule.reduction) for rule in space.rules]
    )
    hops = [
        (graph.taken(graph.ops[op].operands[position], [(op, position)]), row, trips[op])
        for (op, position), row in decision.reads.items()
        if graph.ops[op].operands[position] in decision.values
    ]
    hops += [(graph.values[graph.outputs[position]], row, 1.0) for position, row in decision.outputs.items()]
    for tensor, wanted, times in hops:
        made = decision.values[tensor.index]
        steps = reshard_steps(made, wanted, tensor.bytes, model.axes)
        beside = kernels_beside(tensor, tensor.index in crossing.parted)

        def share(kind: str, tensor: Value = tensor) -> float:
            return shares.of(kind)[tensor.index] if tensor.shape else 1.0

        for step in steps:
            if step.kind != "all_slice":
                sent = step.kind, step.bytes * tensor.as_sent(step.kind), step.axes
                total += times * model.collective_over(*sent, start_share=share(step.kind))
                total += times * float(model.packing_seconds(*sent, beside=beside))
        lanes = scattering_seconds(model, made[None], wanted[None], tensor, start_share=share("all_reduce"))
        total += times * float(np.sum(lanes))
    return total


SINGLE_READERS = [
    (_product, (BIG, BIG)),
    (_product, (TALL, SMALL)),
    (_pair, (SMALL, FLAT, TALL)),
    (_sum, (BIG, BIG)),
]


@pytest.mark.parametrize("axes", [AXIS, GRID])
@pytest.mark.parametrize(("program", "shapes"), SINGLE_READERS)
def test_an_objective_is_what_a_walk_over_the_program_pays(
    program: Callable[..., Any], shapes: tuple[Any, ...], axes: Any
) -> None:
    graph, space = space_of(program, shapes, axes)
    model = model_of(axes)
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(20):
        # The cheapest assignment under random prices of the nodes is a random possible one.
        shuffled = StrategyProblem(
            nodes=tuple(
                Node(name=n.name, costs_s=random.random(n.costs_s.size)) for n in space.problem.nodes
            ),
            edges=tuple(
                Edge(tail=e.tail, head=e.head, costs_s=np.zeros(e.costs_s.shape), allowed=e.allowed)
                for e in space.problem.edges
            ),
        )
        chosen = SEARCHES["ilp"](shuffled).assignment
        seen.add(chosen)
        found = evaluate(space.problem, chosen)
        assert found.feasible
        # Ties between equals are broken by shares of a thousandth of reading the arguments, and less.
        ties = 2e-3 * sum(model.memory_seconds(graph.values[v].bytes) for v in graph.inputs)
        walked = walked_s(graph, space, model, chosen)
        assert found.objective_s == pytest.approx(walked, rel=1e-3, abs=ties)
    assert len(seen) > 5


def test_a_loop_pays_for_each_of_its_iterations() -> None:
    """What is communicated in the body, and weights that don't fit on the chip, cost as often as the body runs."""

    def looped(length: int) -> Callable[..., Any]:
        return lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w, None), x, None, length=length)[0]

    costs = []
    for length in (4, 8):
        _, space = space_of(looped(length), (shape(8, 32768), shape(32768, 32768)), AXIS)
        costs.append(SEARCHES["ilp"](space.problem, relative_gap=0.0).objective_s)
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.02)


@pytest.mark.parametrize(("program", "shapes"), REAL, ids=NAMES)
def test_every_edge_and_usage_fits_its_nodes(program: Callable[..., Any], shapes: tuple[Any, ...]) -> None:
    for axes in (AXIS, GRID, (("data", 1),)):
        graph, space = space_of(program, shapes, axes)
        space.problem.verify()
        decision = decide(space, SEARCHES["ilp"](space.problem).assignment)
        for value, row in decision.values.items():
            for (_, size), place in zip(axes, row, strict=True):
                assert place < 0 or graph.values[value].shape[place] % size == 0
