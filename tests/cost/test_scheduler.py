"""XLA's latency-hiding scheduler on a few kernels and collectives at a time."""

from __future__ import annotations

import random

import pytest

from jaxplan.cost.scheduler import Node, _Ready, scheduled


def kernel(place: int, *reads: Node, seconds: float = 1e-4) -> Node:
    return Node(float(place), place, seconds, list(reads))


def view(place: float, read: Node) -> Node:
    return Node(place, reads=[read], is_view=True)


# they last a microsecond here, so that what is before them need not wait and nothing else gets in
def sent(place: int, *reads: Node, seconds: float = 3e-4) -> tuple[Node, Node]:
    start = Node(place + 0.3, seconds=1e-6, reads=list(reads), latency_s=seconds)
    return start, Node(place + 0.4, seconds=1e-6, reads=[start], start=start)


def ran(*nodes: Node) -> list[int]:
    return [node.op for node in scheduled(nodes) if node.op >= 0]


def test_kernels_alone_stay_where_they_stand() -> None:
    first = kernel(0)
    second = kernel(1, first)
    assert ran(first, second, kernel(2, first), kernel(3, second)) == [0, 1, 2, 3]


def test_a_gradient_runs_beside_a_later_collective() -> None:
    first = kernel(0)
    gradient = kernel(1, first)
    second = kernel(2, first)
    start, end = sent(2, second)
    third = kernel(3, end)
    assert ran(first, gradient, second, start, end, third) == [0, 2, 1, 3]


def test_only_what_covers_the_collective_runs_beside_it() -> None:
    """Of three gradients of 0.1 ms two cover 0.15 ms; the last ones are used up first."""
    given = kernel(0)
    before = sent(0, given)
    first = kernel(1, before[1])
    gradients = [kernel(i, given) for i in (2, 3, 4)]
    second = kernel(5, first)
    start, end = sent(5, second, seconds=1.5e-4)
    order = ran(given, *before, first, *gradients, second, start, end, kernel(6, end))
    assert order == [0, 2, 1, 5, 3, 4, 6]


def test_beside_a_collective_runs_what_lasts_as_long() -> None:
    given = kernel(0)
    before = sent(0, given)
    first = kernel(1, before[1])
    long, short = kernel(2, given, seconds=3e-4), kernel(3, given)
    second = kernel(4, first)
    start, end = sent(4, second)
    order = ran(given, *before, first, long, short, second, start, end, kernel(5, end))
    assert order == [0, 3, 1, 4, 2, 5]


def test_a_start_with_no_collective_before_it_is_put_off() -> None:
    first = kernel(0)
    gradients = [kernel(i, first) for i in (1, 2, 3)]
    start, end = sent(4, first, seconds=1e-5)
    order = scheduled([first, *gradients, start, end, kernel(5, end)])
    assert order.index(start) < min(map(order.index, gradients))


def test_collectives_go_one_at_a_time() -> None:
    first = kernel(0)
    one, other = sent(0, first), sent(1, first)
    nodes = [first, *one, *other, kernel(5, one[1], other[1])]
    order = scheduled(nodes)
    places = [order.index(node) for node in (*one, *other)]
    assert max(places[:2]) < min(places[2:]) or max(places[2:]) < min(places[:2])


def test_what_more_collectives_lead_to_is_taken_first() -> None:
    """From the end on: what nothing leads to runs sooner than where it stands."""
    first = kernel(0)
    start, end = sent(0, first)
    deep = kernel(1, end)
    shallow = kernel(2, first)
    assert ran(first, start, end, deep, shallow) == [0, 2, 1]


@pytest.mark.parametrize("viewed", [False, True])
def test_behind_a_view_there_is_time_for_another(viewed: bool) -> None:
    """A gradient of less depth waits for the products of the next layer where those read through reshapes."""
    zeroth = kernel(0)
    gradient = kernel(1, zeroth)
    start, end = sent(1, zeroth, seconds=1e-5)
    first = kernel(2, end)
    between = view(2.5, first)
    second = kernel(3, between if viewed else first)
    third = kernel(4, second)
    nodes = [zeroth, gradient, start, end, first, *([between] if viewed else []), second, third]
    assert ran(*nodes) == ([0, 2, 1, 3, 4] if viewed else [0, 1, 2, 3, 4])


def test_all_run_behind_what_they_read() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        nodes: list[Node] = []
        for place in range(40):
            reads = rng.sample(nodes, min(len(nodes), rng.randint(0, 3)))
            reads = [node for node in reads if node.latency_s is None]
            kind = rng.random()
            if kind < 0.2 and reads:
                nodes += sent(place, *reads, seconds=rng.choice([1e-5, 3e-4]))
            elif kind < 0.4 and reads:
                nodes.append(view(float(place), reads[0]))
            else:
                nodes.append(kernel(place, *reads, seconds=rng.choice([1e-6, 1e-4])))
        order = scheduled(nodes)
        at = {node: place for place, node in enumerate(order)}
        assert len(at) == len(nodes)
        assert all(at[before] < at[node] for node in nodes for before in node.reads)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_are_kept_as_operations_are_taken(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what waits: whether it reads a collective's end, of how many it is the only one left that wants them."""
    rng, nodes = random.Random(seed), list[Node]()
    for place in range(60):
        reads = rng.sample(nodes, min(len(nodes), rng.randrange(4)))
        nodes += sent(place, *reads) if place % 7 == 0 else [kernel(place, *reads, *reads[:1])]
    take, looked_at = _Ready.take, [0]

    def checked(ready: _Ready, now: float) -> Node | None:
        for node in (node for alike in ready.of_depth.values() for node in alike):
            reads_end = any(before.start is not None for before in node.reads)
            assert node.rank == (reads_end, sum(before.wanted == 1 for before in node.reads), node.place)
            looked_at[0] += 1
        return take(ready, now)

    monkeypatch.setattr(_Ready, "take", checked)
    assert len(scheduled(nodes)) == len(nodes)
    assert looked_at[0] > 100
