"""Which layouts must be pinned so that the partitioner does what was decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..ir import LOOP_EDGES, SUMS, Graph, Op, Site
from ..plans import Constraint
from ..sharding import NONE, UNREDUCED, Layout, is_cut_locally, reshard_path, runs_locally, sums_locally
from .axis_orders import Orders
from .broadcasts import ANEW, broadcast_anew
from .in_loops import behind_barriers
from .kernels import LOCAL
from .outer_products import multiplied
from .pending import HELD, held_values


def finished(row: np.ndarray) -> np.ndarray:
    """The layout with its pending sums done, nothing else changed."""
    return np.where(row == UNREDUCED, NONE, row).astype(np.int8)


def planned_constraints(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    copies: Mapping[tuple[int, int], np.ndarray],
    orders: Orders,
    waited: Collection[int] = (),
    outputs: Mapping[int, np.ndarray] | None = None,
) -> tuple[Constraint, ...]:
    """Pins where the plan communicates: pending sums are finished where they arise, operands resharded where read.

    An operand that is taken from a copy goes by way of it (`copies`), or the partitioner would bring it straight from
    where it is made, which is communication of its own.

    Sums that a loop accumulates stay pending, see `pending`: their layouts are written down, pending axes included.
    Operations that run in a `shard_map` of their own (kernels, and sums in parts that XLA gets wrong) have all their
    operands and results written down, as its specs.
    Between a transposed sum and what reads the addition it goes to nothing is pinned (`turned_sums`).
    A loop's carry and stacked results are pinned too: they have one layout for the whole loop, which propagation
    would take from whichever end it reaches first.  So is what a choice makes (`sharding.choices`), and what a reader
    takes otherwise than it is made (`read_otherwise`): its maker would be computed as it is read; and what XLA cuts
    wrongly (`cut_wrongly`) or multiplies (`multiplied`).
    A result that is brought to where it lies in several moves (`outputs`: its row, by position) is asked for one by
    one: weights updated in pieces of rows and kept in columns were gathered whole, see `reshard_path`.
    """
    producers = graph.producers()
    moved = []
    for (index, position), row in reads.items():
        at_maker = values.get(graph.ops[index].operands[position])
        if at_maker is not None and at_maker is not row and at_maker.tobytes() != row.tobytes():
            moved.append((index, position))
    held = held_values(graph, values, reads)
    turned, at_once = turned_sums(graph, values, reads, held), _scattered_at_once(graph, values, reads, held, waited)
    kept = made_alike(graph, read_otherwise(graph, moved)) | cut_wrongly(graph) | multiplied(graph)
    pins: dict[tuple[Site, Layout], Constraint] = {}

    def pin(site: Site | None, layout: Layout, value: int, source: str, primitive: str, why: str) -> None:
        tensor = graph.values[value]
        if site is None or not tensor.shape:
            return
        pins.setdefault(
            (site, layout),
            Constraint(
                site=site, layout=layout, source=source, primitive=primitive, shape=tensor.shape, why=why
            ),
        )

    for value, row in values.items():
        producer = producers[value]
        if producer < 0 or value in held or value in turned:
            continue
        op, rank = graph.ops[producer], len(graph.values[value].shape)
        at_edge = op.primitive in ("carry_init", "scan_stack", "cond_join")
        if value in at_once:
            index, position = at_once[value]
            made = orders.layout("value", value, 0, finished(row), rank)
            *_, scattered = orders.on_the_way(made, ("read", index, position), [reads[index, position]])
            pin(graph.values[value].site, scattered, value, op.source, op.primitive, "sum")
            if op.primitive == "reduce_sum" and (read := reads.get((op.index, 0))) is not None:
                summed = op.operands[0]
                there = orders.layout("value", summed, 0, finished(read), len(graph.values[summed].shape))
                pin(op.sites[0], there, summed, op.source, op.primitive, "propagation")
        elif at_edge or UNREDUCED in row.tolist() or value in kept:
            made = orders.layout("value", value, 0, finished(row), rank)
            why = "sum" if UNREDUCED in row.tolist() and not at_edge else "propagation"
            pin(graph.values[value].site, made, value, op.source, op.primitive, why)
    for value, site in behind_barriers(graph, values, set(moved)):
        if value not in held:
            made = orders.layout("value", value, 0, finished(values[value]), len(graph.values[value].shape))
            pin(site, made, value, graph.values[value].name, "", "propagation")
    for index, position in sorted(moved):
        op, row = graph.ops[index], reads[index, position]
        value = op.operands[position]
        if value in held and (row == UNREDUCED).any():
            continue
        start = finished(values[value])
        by_way = copies.get((index, position), row)
        steps = reshard_path(start, finished(by_way)) if _on_the_way(start, by_way, row) else []
        for layout in orders.on_the_way(
            orders.layout("value", value, 0, start, len(graph.values[value].shape)), ("read", index, position),
            [*steps, *reshard_path(steps[-1] if steps else start, row)],
        ):  # fmt: skip
            pin(op.sites[position], layout, value, op.source, op.primitive, "reshard")
    for index, position in compared(graph):
        op, value, place = graph.ops[index], graph.ops[index].operands[position], (index, position)
        if place in reads and place not in moved and value in values:
            there = orders.layout("value", value, 0, finished(reads[place]), len(graph.values[value].shape))
            pin(op.sites[position], there, value, op.source, op.primitive, "propagation")
    for position, row in (outputs or {}).items():
        value = graph.outputs[position]
        steps = reshard_path(start := finished(values[value]), row) if value in values and value not in held else []
        if len(steps) > 1 and (producer := producers[value]) >= 0:
            made = orders.layout("value", value, 0, start, len(graph.values[value].shape))
            for layout in orders.on_the_way(made, ("output", position, 0), steps):
                op = graph.ops[producer]
                pin(Site((), "leave", -1, position), layout, value, op.source, op.primitive, "reshard")
    written = [*_local_specs(graph, values, reads, orders), *_held_layouts(graph, values, reads, orders, held)]
    for index, position in broadcast_anew(graph, values, reads, orders):
        op, shape = graph.ops[index], graph.values[graph.ops[index].operands[position]].shape
        there = orders.layout("read", index, position, finished(reads[index, position]), len(shape))
        written += _constraint(op, op.sites[position], there, shape, ANEW)
    return (*pins.values(), *written)


def read_otherwise(graph: Graph, moved: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Values that one of the `moved` reads, (operation, operand), takes otherwise than they are made.

    Shardy hands a reader's layout on to the maker and its operands, as far as nothing is pinned, and from there to all
    around them.  The logits of a classifier, whole on every device, were cut by the batch since one product reads their
    gradient so, and then gathered and summed for the others (ResNet-50).  Made explicit, such a reshard stands where it
    moves least, so that collectives look as decided; XLA computes every operation in the layout of its result: it
    gathered weights in f32 that were to be gathered as bf16, the mask of a select beside what it selects (an MLP
    on eight H100: 459 us of sending for 375), and the logits' gradients, bf16[32, 256, 16000], for a head's
    f32[512, 16000] (TPU v5e).  jax 0.10.2, libtpu 0.0.42.1.  What the user's own constraint moves is left to the user.
    """
    return frozenset(
        graph.ops[index].operands[position]
        for index, position in moved
        if graph.ops[index].primitive != "sharding_constraint"
    )


def made_alike(graph: Graph, values: frozenset[int]) -> frozenset[int]:
    """`values`, and what is made as one of them is: by the same operations of the same tensors.

    XLA makes them once, before Shardy, to which whoever reads a tensor then reads it as the last pin on it says.  Of
    weights that were cast once for rows to be gathered, by rows and columns, and once for a product, by rows, the
    product took the former: it gathered them and its other operand, bf16[64, 512, 50304], which no plan knew of (a
    language model under PPO on eight v5e, jax 0.10.2, libtpu 0.0.42.1).  Rows that a mixture of experts looks up and
    scatters back have one index, made twice: cut for the latter, the former's rows were cut and gathered.  A cast of
    transposed weights is the cast of the weights (tied heads, `x @ w.T`: bf16[32, 1024, 50272] gathered on eight v5e).
    """
    number, alike = list(range(len(graph.values))), dict[tuple[object, ...], list[Op]]()
    turned = dict[int, int]()
    for op in graph.ops if values else ():
        if len(op.results) == 1 and op.primitive not in LOOP_EDGES:
            (result,) = op.results
            site = graph.values[result].site
            cast, made_of = op.primitive == "convert_element_type", [number[v] for v in op.operands]
            if cast:
                made_of = [turned.get(v, v) for v in made_of]
            elif op.primitive == "transpose":
                turned[result] = turned.get(made_of[0], made_of[0])
            known = alike.setdefault((op.primitive, site and site.frame, *made_of), [])
            same = [other for other in known if _as(graph, op, other)] if op.operands else []
            number[result] = same[0].results[0] if same else result
            known += [] if same else [op]
    wanted = {number[value] for value in values}
    return frozenset(value for value in range(len(number)) if number[value] in wanted)


def _as(graph: Graph, one: Op, other: Op) -> bool:
    """Whether operations of one kind and the same operands make the same."""
    made, found = (graph.values[op.results[0]] for op in (one, other))
    shapes = [tuple(tensor.shape) for tensor in (made, found)]
    if one.primitive == "convert_element_type":  # of what may be transposed
        shapes = [tuple(sorted(shape)) for shape in shapes]
    return shapes[0] == shapes[1] and made.dtype == found.dtype and str(one.params) == str(other.params)


def cut_wrongly(graph: Graph) -> frozenset[int]:
    """Results of pads that cut something off or put something between elements, and of shifts, which are such pads.

    Where the operand is whole and what reads the result cuts it, XLA's partitioner pads the pieces: of a shift it makes
    none at all, as it leaves the extent as it was, and at others it stops the process (jax 0.10.2, in plain jax too;
    what is only lengthened is right).  Made as planned and cut afterwards, they are right.
    """
    return frozenset(
        op.results[0]
        for op in graph.ops
        if op.primitive == "shift"
        or (
            op.primitive == "pad"
            and any(min(low, high) < 0 or inside for low, high, inside in op.params["padding_config"])
        )
    )


def compared(graph: Graph) -> Iterator[tuple[int, int]]:
    """(operation, operand) of the places that are scattered to in each row of a batch.

    XLA for TPU compares them with every place instead of scattering, and computes that where the places came from
    unless they are pinned: of labels whose batch two axes cut, next to logits whose words one of them does, all truth
    values were gathered over that, pred[16, 512, 50304] (v6e, jax 0.10.2, libtpu 0.0.42.1).
    """
    for op in graph.lookups():
        if op.primitive != "gather" and op.params["dimension_numbers"].operand_batching_dims:
            yield op.index, 1


def turned_sums(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    held: frozenset[int],
) -> frozenset[int]:
    """Pending sums that are transposed, and what they are added up to where one operation reads it, or several scatter
    it over all of its axes into one layout.

    Pinned on the way, Shardy reduces all of it and cuts it afterwards; left alone, it scatters it as it is read.
    """
    uses, found = graph.uses(), set[int]()
    for op in graph.ops:
        turned = op.primitive == "transpose" or (op.primitive in SUMS and found.intersection(op.operands))
        for value in op.results if turned else ():
            if value in values and value not in held and (values[value] == UNREDUCED).any():
                pending, read = values[value] == UNREDUCED, [reads[use] for use in uses[value] if use in reads]
                several = len({row.tobytes() for row in read}) == 1 and bool((read[0][pending] >= 0).all())
                if len(uses[value]) == 1 or several:
                    found.add(value)
    return frozenset(found)


def _scattered_at_once(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    held: frozenset[int],
    waited: Collection[int],
) -> dict[int, tuple[int, int]]:
    """Sums that are pinned as they are read, scattered where they are made; with (operation, operand) of that.

    - Over several axes of which their readers scatter some only, all in one layout.  Pinned whole before it is read,
      XLA reduces it over all axes and cuts it afterwards (a hidden layer's gradient on v5e, a Mixer's clipped ones on
      H100, jax 0.10.2); pinned as it is read, it scatters over the ones and reduces over the others.
    - What is `waited` for, and read in one layout: the barrier stands between a pin and a reader that is further out
      than it, and no compiler scatters across that.
    - What is negated or scaled before it is summed, and read in one layout: XLA does that to the sum, between it and
      where it is cut (the gradient of a batch's mean, H100, jax 0.10.2).
    - What is looked up in a larger tensor, and read in one layout: between the sum and the result stands what fills in
      for indices out of bounds.  Of a tensor and what is looked up in it Shardy moves the smaller one: a table of
      32768 words was gathered for as many tokens.

    Of a sum over dimensions what it reads is pinned, too: the pin on the sum would be handed on to that, and to what
    XLA makes once of several like it (a vocabulary's targets, cut by the batch alone, and with them the logits'
    gradient: 512 MiB that no plan knew of; PaliGemma's head, f32[64, 128, 32768], H100, jax 0.10.2).
    """
    uses, producers, found = graph.uses(), graph.producers(), dict[int, tuple[int, int]]()
    for value, row in values.items():
        if UNREDUCED not in row.tolist() or value in held:
            continue
        if not uses[value] or any(use not in reads for use in uses[value]):
            continue
        pending = row == UNREDUCED
        read = reads[uses[value][0]]
        scattered = read[pending] >= 0
        alike = all(np.array_equal(reads[use], read) for use in uses[value])
        fits = not (read == UNREDUCED).any() and (read == row)[~pending].all() and scattered.any()
        several = pending.sum() > 1 and not scattered.all()
        maker = graph.ops[producers[value]]
        looked_up = maker.primitive == "gather" and graph.values[maker.operands[0]].bytes > graph.values[value].bytes
        apart = value in waited or looked_up or _factored(graph, maker, producers)
        if fits and alike and (several or apart):
            found[value] = uses[value][0]
    return found


def _factored(graph: Graph, maker: Op, producers: Sequence[int]) -> bool:
    """Whether a sum is of what is negated, or scaled by a number: XLA does that to the sum instead."""
    before = producers[maker.operands[0]] if maker.primitive == "reduce_sum" else -1
    if before < 0:
        return False
    op = graph.ops[before]
    scaled = op.primitive in ("mul", "div") and any(not graph.values[v].shape for v in op.operands)
    return op.primitive == "neg" or scaled


def _on_the_way(start: np.ndarray, copy: np.ndarray, row: np.ndarray) -> bool:
    """Whether a copy is another layout than where it comes from, and what is read a part of it: free to cut out."""
    return not np.array_equal(start, finished(copy)) and bool(((copy == row) | (copy < 0)).all())


def _constraint(op: Op, site: Site | None, layout: Layout, shape: tuple[int, ...], why: str) -> list[Constraint]:
    if site is None:
        return []
    return [
        Constraint(site=site, layout=layout, source=op.source, primitive=op.primitive, shape=shape, why=why)
    ]


def _held_layouts(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    orders: Orders,
    held: frozenset[int],
) -> list[Constraint]:
    """The layouts of held values, of held operands, and of the operands of the products that make them."""
    found: list[Constraint] = []
    for op in graph.ops:
        for value in held.intersection(op.results):
            shape = graph.values[value].shape
            layout = orders.layout("value", value, 0, values[value], len(shape))
            found += _constraint(op, graph.values[value].site, layout, shape, HELD)
            rows = [reads[op.index, i] for i in range(len(op.operands))]
            handed_on = any((row == UNREDUCED).any() for row in rows)
            for i, row in enumerate(rows):
                if not handed_on or (row == UNREDUCED).any():
                    shape = graph.values[op.operands[i]].shape
                    layout = orders.layout("read", op.index, i, row, len(shape))
                    found += _constraint(op, op.sites[i], layout, shape, HELD)
    return found


def _local_specs(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    orders: Orders,
) -> list[Constraint]:
    specs: list[Constraint] = []

    def add(op: Op, site: Site | None, kind: str, index: int, position: int, row: np.ndarray, value: int) -> None:
        shape = graph.values[value].shape
        if shape or (row == UNREDUCED).any():
            specs.extend(_constraint(op, site, orders.layout(kind, index, position, row, len(shape)), shape, LOCAL))

    for op in graph.ops:
        if (
            runs_locally(op.primitive)
            or is_cut_locally(op.equation, reads.get((op.index, 0), ()))
            or (
                sums_locally(op.primitive, op.params)
                and any((values[value] == UNREDUCED).any() for value in op.results if value in values)
            )
        ):
            for position, value in enumerate(op.operands):
                row = reads[op.index, position]
                add(op, op.sites[position], "read", op.index, position, row, value)
            for value in op.results:
                if value in values:
                    add(op, graph.values[value].site, "value", value, 0, values[value], value)
    return specs


def pin_values(
    graph: Graph,
    values: Mapping[int, np.ndarray],
    places: Iterable[tuple[int, Site | None]],
    orders: Orders,
) -> tuple[Constraint, ...]:
    """Pins on values at `places`, (value index, site), where the partitioner was seen to choose otherwise.

    A site is where the value is made, or where it enters a loop that doesn't change it; None can't be pinned.
    """
    producers = graph.producers()
    pins: list[Constraint] = []
    for value, site in places:
        shape, maker = graph.values[value].shape, producers[value]
        if site is not None and shape:
            layout = orders.layout("value", value, 0, finished(values[value]), len(shape))
            source, primitive = ("", "argument") if maker < 0 else (graph.ops[maker].source, graph.ops[maker].primitive)
            pins.append(
                Constraint(
                    site=site, layout=layout, source=source, primitive=primitive, shape=shape, why="propagation"
                )
            )
    return tuple(pins)
