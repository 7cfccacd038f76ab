"""What the inputs of a step are: parameters, optimizer state, other state, the batch; by data flow, never by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..disjoint import Disjoint
from ..ir import Graph, Op, Value, graph_of_body
from ..sharding import Rule, graph_rules
from .buffers import written_buffers

EVERY = 0.999
"""A dimension that runs through so much of the products' arithmetic runs through all of them."""

MOST = 5 / 6
"""Where gradients are, a batch is the first dimension of two products of each weight and summed away in the third; no
dimension of the weight is so in more than two.  Products among weights alone (low-rank updates) have no batch."""


def input_kinds(graph: Graph, rules: Sequence[Rule]) -> tuple[str, ...]:
    """For every input: "parameter", "optimizer", "state" or "batch".

    State comes back as a result.  A parameter is floating-point state that reaches a matrix product of two that depend
    on inputs and, where the step returns more than state (a loss), reaches that too: momentum that is orthogonalised or
    projected meets matrix products, but no loss depends on it.  What only reaches the next state (moments, averages) is
    optimizer state, also where the next state is that of the next iteration of a loop of updates.

    What has a batch of its own and comes back (a cache, environments that a policy acts in) is state, no parameter: its
    batch is the first dimension of every product that it goes through beside something without it.  So is what comes
    back with pieces of it replaced (a replay buffer, a pool of a cache's pages).

    A step that only reads its parameters (it predicts, it generates) has one such dimension in every product's result:
    inputs of numbers that meet products and don't have it are parameters.  A gradient is a product that sums this
    dimension away: what a step with gradients only reads and what has it in no product (frozen weights, a reference
    model) are parameters too, unless all that has their first dimension is read alone, and has it first, and products
    keep it as the first of their results: a second batch (real images beside those that a generator makes, images
    beside texts).  Indices that a step only reads are data: where they don't have this dimension (edges of
    a graph, bags of rows), what shares one with them is batch as they are.
    """
    to_products = _reaching(graph, (), _products_of_two(graph, rules))
    nowhere = [False] * len(graph.ops)
    is_state = {o for _, o in graph.aliases}
    to_results = _reaching(graph, [v for o, v in enumerate(graph.outputs) if o not in is_state], nowhere)
    if not any(to_results[graph.inputs[i]] for i, _ in graph.aliases):
        to_results = [True] * len(graph.values)
    reaches = [product and result for product, result in zip(to_products, to_results, strict=True)]
    comes_back = {i for i, _ in graph.aliases}
    weights = [
        _is_number(graph.values[value]) and reaches[value] and position not in comes_back
        for position, value in enumerate(graph.inputs)
    ]
    carried = [i in comes_back and reaches[v] and _is_inexact(graph.values[v]) for i, v in enumerate(graph.inputs)]
    dims = _Dims(graph, rules) if any(weights) or any(carried) else None
    # what has a moment each is trained, and its dimensions no batch, though products of experts, say, lead with one
    trained = [v for v, is_carried in zip(graph.inputs, carried, strict=True) if is_carried and graph.values[v].shape]
    shapes = {graph.values[v].shape for v in trained}
    back = [v for i, v in enumerate(graph.inputs) if i in comes_back and not reaches[v]]
    aside = dims.paired(trained, [v for v in back if graph.values[v].shape in shapes]) if dims else set()
    batch = (dims.batches(aside) or dims.batches(aside, summed_too=True)) if dims else set()
    groups = dims.batches_of_their_own(batch) - aside if dims else set()
    own = dims.having(groups) if dims else set()
    read_only = [v for i, v in enumerate(graph.inputs) if i not in comes_back]
    fed = dims.having(batch | dims.rows(groups, read_only)) if dims and batch else set()
    if dims and fed:
        read = [graph.values[v] for v in read_only if v not in fed]
        fed |= dims.beside([tensor.index for tensor in read if "int" in tensor.dtype and not _is_number(tensor)])
    buffers = written_buffers(graph)
    kinds = []
    for position, value in enumerate(graph.inputs):
        tensor = graph.values[value]
        if position not in comes_back:
            # scales and biases of the last layer meet no product any more
            kinds.append("parameter" if _is_number(tensor) and fed and value not in fed else "batch")
        elif not _is_inexact(tensor):
            kinds.append("state")
        elif reaches[value]:
            kinds.append("state" if value in own or value in buffers else "parameter")
        else:
            kinds.append("optimizer" if tensor.shape else "state")  # or a metric's total
    if not any(kinds[i] == "parameter" for i in comes_back):  # a simulation, a search of beams: nothing is optimised
        kinds = ["state" if kind == "optimizer" else kind for kind in kinds]
    return tuple(kinds)


def _products_of_two(graph: Graph, rules: Sequence[Rule]) -> list[bool]:
    """For every operation whether it is a product in which inputs meet; one with a constant (a stencil, a transform) is
    as linear as any other operation."""
    given = [False] * len(graph.values)
    for value in graph.inputs:
        given[value] = True
    for op in graph.ops:  # what a loop carries starts out as what it becomes
        for value in op.results:
            given[value] = any(given[v] for v in op.operands)
    return [
        sum(given[v] for v in op.operands) > 1 and (rule.matmul or _multiplies(op))
        for op, rule in zip(graph.ops, rules, strict=True)
    ]


def _multiplies(op: Op) -> bool:
    """Whether an operation is a `shard_map` with products inside."""
    if op.primitive != "shard_map":
        return False
    body = graph_of_body(op.params["jaxpr"], op.source)
    return any(rule.matmul for rule in graph_rules(body))


def _is_inexact(tensor: Value) -> bool:
    """Whether gradients may be taken of it."""
    return "float" in tensor.dtype or "complex" in tensor.dtype


def _is_number(tensor: Value) -> bool:
    """Whether products may meet it as it is: floats, and what floats are quantised to; not indices, nor a scalar."""
    return bool(tensor.shape) and (_is_inexact(tensor) or ("int" in tensor.dtype and tensor.item_bytes <= 1))


class _Dims:
    """The dimensions of all values, those that are one and the same joined, and what products do with them.

    Dimensions of several factors go with the first of them: a batch is merged as the major one.
    """

    def __init__(self, graph: Graph, rules: Sequence[Rule]) -> None:
        self._inputs = graph.inputs
        first = self._first = [0]
        for tensor in graph.values:
            first.append(first[-1] + len(tensor.shape))
        joined = self._joined = Disjoint(first[-1])
        self._summed: list[tuple[tuple[int, ...], float]] = []
        self._kept: list[tuple[range, float]] = []
        # kept, and in one operand alone: whether it is the result's first, and what the product sums
        self._alone: list[tuple[int, bool, tuple[int, ...], float]] = []
        known: dict[int, tuple[tuple[_Place, _Place], ...]] = {}
        for op, rule in zip(graph.ops, rules, strict=True):
            if id(rule) not in known:
                known[id(rule)] = tuple(_one_and_the_same(rule))
            begin = [first[value] for value in (*op.operands, *op.results)]
            for (side, dim), (other, like) in known[id(rule)]:
                joined.join(begin[side] + dim, begin[other] + like)
            if rule.matmul:
                met = {name: begin[place] + at for name, (place, at) in _met(rule).items()}
                flops = rule.flops * op.trips
                if graph.values[op.results[0]].shape:
                    self._kept.append((self._dims_of(op.results[0]), flops))
                summed = tuple(met[factor] for factor in sorted(rule.reduction) if factor in met)
                self._summed.append((summed, flops))
                for dim, names in enumerate(rule.results[0]):
                    if names and sum(any(names[0] in d for d in side) for side in rule.operands) == 1:
                        self._alone.append((met[names[0]], dim == 0, summed, flops))

    def paired(self, values: Sequence[int], moments: Sequence[int]) -> set[int]:
        """The dimensions that at least as many of `moments` have as of `values`, and some of these."""
        find = self._joined.find
        of_values, of_moments = (
            Counter(group for value in some for group in {find(dim) for dim in self._dims_of(value)})
            for some in (values, moments)
        )
        return {group for group, times in of_values.items() if of_moments[group] >= times}

    def batches(self, aside: set[int], *, summed_too: bool = False) -> set[int]:
        """The dimensions that are the first of every product's result, but for those `aside`, and that none sums away.

        With `summed_too`, the dimension that is most often the first of a product's result or what it sums away.

        Empty where there is none, and where a single product can't tell the batch from its weights.
        """
        find = self._joined.find
        share: dict[int, float] = {}
        for made, flops in self._kept:
            leading = next((find(dim) for dim in made if find(dim) not in aside), None)
            if leading is not None:
                share[leading] = share.get(leading, 0.0) + flops
        for dims, flops in self._summed:
            for dim in dims:
                if find(dim) in share:
                    share[find(dim)] += flops if summed_too else -flops
        whole = sum(flops for _, flops in self._kept)
        enough = max((MOST * whole, *share.values())) if summed_too else EVERY * whole
        return {group for group, flops in share.items() if flops >= enough and len(self._kept) > 1}

    def batches_of_their_own(self, batch: set[int]) -> set[int]:
        """The dimensions that products keep, as the first of their results, more than they sum them away.

        Products of two that both have one say nothing: such are also those of networks side by side.  Those that sum
        the `batch` away are gradients, of weights' dimensions.
        """
        find = self._joined.find
        first: dict[int, float] = {}
        other: dict[int, float] = {}
        for place, leads, summed, flops in self._alone:
            side = first if leads and not any(find(dim) in batch for dim in summed) else other
            side[find(place)] = side.get(find(place), 0.0) + flops
        for dims, flops in self._summed:
            for dim in dims:
                if find(dim) in first:
                    first[find(dim)] -= flops
        return {group for group, flops in first.items() if flops > 0 and other.get(group, 0.0) <= (1 - EVERY) * flops}

    def having(self, groups: set[int]) -> set[int]:
        """The inputs with such a dimension."""
        return {v for v in self._inputs if any(self._joined.find(dim) in groups for dim in self._dims_of(v))}

    def rows(self, groups: set[int], read: Sequence[int]) -> set[int]:
        """Those of `groups` that inputs have as their first dimension alone, none but those that are only `read`."""
        found = set(groups)
        for value in self._inputs:
            for at, dim in enumerate(self._dims_of(value)):
                if at or value not in read:
                    found.discard(self._joined.find(dim))
        return found

    def beside(self, values: Sequence[int]) -> set[int]:
        """The inputs that share a dimension with one of these values."""
        return self.having({self._joined.find(d) for v in values for d in self._dims_of(v)})

    def _dims_of(self, value: int) -> range:
        return range(self._first[value], self._first[value + 1])


_Place = tuple[int, int]
"""A tensor of an operation, its operands before its results, and a dimension of it."""


def _met(rule: Rule) -> dict[int, _Place]:
    """Where each factor that a dimension goes with is met first."""
    sides = enumerate((*rule.operands, *rule.results))
    places = [(names[0], (side, dim)) for side, dims in sides for dim, names in enumerate(dims) if names]
    return dict(reversed(places))


def _one_and_the_same(rule: Rule) -> Iterator[tuple[_Place, _Place]]:
    """The dimensions of an operation's tensors that are one: of one factor, or joined or taken apart lengthwise."""
    met = _met(rule)
    for side, dims in enumerate((*rule.operands, *rule.results)):
        for dim, names in enumerate(dims):
            if names and met[names[0]] != (side, dim):
                yield (side, dim), met[names[0]]
    for side, factors in enumerate(rule.operands):
        for result, others in enumerate(rule.results, len(rule.operands)):
            for dim, (names, other) in enumerate(zip(factors, others, strict=False)):
                if len(factors) == len(others) and not names and not other:
                    yield (side, dim), (result, dim)


def _reaching(graph: Graph, ends: Sequence[int], ending: Sequence[bool]) -> list[bool]:
    """For every value: whether one of the values `ends`, or an operation that is `ending`, depends on it.

    Not counting what the next state does in a loop's next iteration.
    """
    reaches = [False] * len(graph.values)
    state = {graph.inputs[i] for i, _ in graph.aliases}
    for op in graph.ops:
        if op.primitive == "carry_init" and op.operands[0] in state:
            state.update(op.results)
    for value in ends:
        reaches[value] = True
    for _ in range(2):  # twice: a loop's carry is read before its next value is made
        for op, is_end in zip(reversed(graph.ops), reversed(ending), strict=True):
            onward = is_end or any(reaches[v] for v in op.results)
            if op.primitive == "carry_next":
                onward = reaches[op.operands[1]] and op.operands[1] not in state
            if onward:
                for value in op.operands:
                    reaches[value] = True
    return reaches
