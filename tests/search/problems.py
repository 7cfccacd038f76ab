"""Random small problems: masks, shared matrices, followers, ties, and memory limits from loose to impossible."""

from __future__ import annotations

import numpy as np

from jaxplan.search import Edge, Node, StrategyProblem, Usage, evaluate


def random_problem(seed: int, most_nodes: int = 6, most_strategies: int = 5) -> StrategyProblem:
    """A problem of at most most_strategies**most_nodes assignments; about one in four is infeasible."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_nodes + 1))
    sizes = rng.integers(1, most_strategies + 1, count)
    # Small integers make ties and exact dominance likely; microseconds are what real problems hold.
    whole = rng.random() < 0.4

    def costs(*shape: int) -> np.ndarray:
        if whole:
            return rng.integers(0, 4, shape).astype(np.float64)
        return rng.random(shape) * 10.0 ** rng.uniform(-6, 0)

    nodes = [Node(name=f"n{i}", costs_s=costs(int(size))) for i, size in enumerate(sizes)]
    edges: list[Edge] = []
    for _ in range(int(rng.integers(0, 2 * count))) if count > 1 else []:
        tail, head = (int(n) for n in rng.choice(count, 2, replace=False))
        shape = int(sizes[tail]), int(sizes[head])
        alike = [e for e in edges if e.costs_s.shape == shape]
        kind = rng.integers(0, 9)
        if alike and kind == 0:
            edges.append(Edge(tail=tail, head=head, costs_s=alike[0].costs_s, allowed=alike[0].allowed))
        elif kind == 1:
            edges.append(Edge(tail=tail, head=head, costs_s=costs(*shape), allowed=_follower(rng, shape)))
        elif kind == 2:
            separable = costs(shape[0])[:, None] + costs(shape[1])
            edges.append(Edge(tail=tail, head=head, costs_s=separable))
        elif kind == 3:
            edges.append(Edge(tail=tail, head=head, costs_s=costs(*shape), allowed=rng.random(shape) < 0.7))
        else:
            edges.append(Edge(tail=tail, head=head, costs_s=costs(*shape)))
    usages = []
    # Several long intervals a node make the peaks bind; without any, everything can be minimised out.
    for _ in range(int(rng.integers(0, 3 * count + 1))):
        node, start = int(rng.integers(count)), int(rng.integers(0, 8))
        amount = rng.integers(0, 50, sizes[node]) * int(rng.choice([1, 1000, 2**30]))
        usages.append(Usage(node=node, start=start, stop=start + int(rng.integers(1, 9)), bytes=amount))
    free = StrategyProblem(nodes=tuple(nodes), edges=tuple(edges), usages=tuple(usages))
    if rng.random() < 0.2:
        return free.verify()
    peaks = [evaluate(free, [int(rng.integers(s)) for s in sizes]).peak_bytes for _ in range(4)]
    # At exactly the peak of some assignment the limit is met to the last byte.
    limit = (
        int(np.mean(peaks)) if rng.random() < 0.5 else peaks[0] if rng.random() < 0.5 else min(peaks) * 3 // 4
    )
    return StrategyProblem(nodes=free.nodes, edges=free.edges, usages=free.usages, limit_bytes=limit).verify()


def _follower(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    allowed = np.zeros(shape, dtype=np.bool_)
    if shape[0] == shape[1] and rng.random() < 0.6:
        allowed[np.arange(shape[0]), rng.permutation(shape[0])] = True
    else:
        allowed[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = True
    return allowed


def grid(side: int, strategies: int, seed: int) -> StrategyProblem:
    """A grid of nodes with random prices: nothing folds, its relaxation is fractional, and memory binds."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(name=f"n{i}", costs_s=rng.random(strategies)) for i in range(side * side))
    pairs = [(i, i + 1) for i in range(side * side) if (i + 1) % side]
    pairs += [(i, i + side) for i in range(side * (side - 1))]
    edges = tuple(Edge(tail=a, head=b, costs_s=rng.random((strategies, strategies))) for a, b in pairs)
    usages = tuple(
        Usage(node=i, start=i, stop=i + side, bytes=rng.integers(1, 1000, strategies))
        for i in range(len(nodes))
    )
    return StrategyProblem(nodes=nodes, edges=edges, usages=usages, limit_bytes=400 * side)


def layers(count: int, strategies: int, *, alike: bool, seed: int = 0) -> StrategyProblem:
    """A chain of layers, all alive at once, with lognormal costs: each its own, or all the same."""
    rng = np.random.default_rng(seed)
    nodes, edges, usages = [], [], []
    for number in range(count):
        if not number or not alike:
            costs_s = rng.lognormal(0, 1, strategies) * 1e-4
            size = (rng.lognormal(0, 1, strategies) * 2**26).astype(np.int64)
            between_s = rng.lognormal(0, 1, (strategies, strategies)) * 1e-5
        nodes.append(Node(name=f"l{number}", costs_s=costs_s))
        usages.append(Usage(node=number, start=0, stop=1, bytes=size))
        if number:
            edges.append(Edge(tail=number - 1, head=number, costs_s=between_s))
    return StrategyProblem(nodes=tuple(nodes), edges=tuple(edges), usages=tuple(usages)).verify()
