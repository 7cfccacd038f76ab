"""What XLA's passes make of reshards before they become collectives of the program.

They eliminate common subexpressions, and sum before they reduce: all_reduce(a) + all_reduce(b) is
all_reduce(a + b), on TPU and GPU (on CPU each is reduced).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from .equal import SAME
from .mlir import Dims, Visit

_RESHARDS = frozenset(
    {"sdy.all_gather", "sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute", "sdy.reduce_scatter"}
)
_ZERO = re.compile(r"dense<-?0(\.0+e\+00)?> : tensor<\w+>")
_MOVES = frozenset({"sdy.all_slice", "stablehlo.transpose"})


def users_of(visits: Iterable[Visit]) -> dict[int, list[Visit]]:
    """The operations that read each value, in program order, once for each time they read it."""
    users: dict[int, list[Visit]] = defaultdict(list)
    for visit in visits:
        for operand in visit.operands:
            users[operand].append(visit)
    return users


def without_repeats(visits: Sequence[Visit]) -> list[Visit]:
    """`visits` without reshards of one value in one way in one block; whoever reads them reads the first.

    A weight gathered for the forward and again for the backward pass is gathered once, and so is what is computed twice
    (`merge_equal`).
    """
    first: dict[tuple[int, str, int, Dims], int] = {}
    renamed: dict[int, int] = {}
    same: dict[int, int] = {}
    kept = []
    for visit in visits:
        visit = _reading(visit, renamed)
        if visit.op.name == SAME and visit.operands[0] == visit.operands[1]:
            same[visit.results[0]] = same.get(visit.operands[0], visit.operands[0])
        if visit.op.name in _RESHARDS:
            of = same.get(visit.operands[0], visit.operands[0])
            key = (visit.frame, visit.op.name, of, visit.layouts[0])
            if key in first:
                renamed[visit.results[0]] = first[key]
                continue
            first[key] = visit.results[0]
        kept.append(visit)
    return kept


def without_zeros(visits: Sequence[Visit]) -> list[Visit]:
    """`visits` without additions of zero to a number, with which Python's `sum` begins: XLA leaves them out first."""
    zeros: set[int] = set()
    renamed: dict[int, int] = {}
    kept = []
    for visit in visits:
        visit = _reading(visit, renamed)
        if (
            visit.layouts == ((),)
            and "constant" in visit.op.name
            and "complex" not in str(visit.op.results[0].type)  # whose numbers MLIR's bindings can't read
            and _ZERO.match(str(visit.op.attributes["value"]))
        ):
            zeros.add(visit.results[0])
        if visit.op.name == "stablehlo.add" and not zeros.isdisjoint(visit.operands):
            renamed[visit.results[0]] = visit.operands[visit.operands[0] in zeros]
            continue
        kept.append(visit)
    return kept


def _reading(visit: Visit, renamed: Mapping[int, int]) -> Visit:
    """`visit` with the operands that stand in the place of its own."""
    if renamed.keys().isdisjoint(visit.operands):
        return visit
    return visit._replace(operands=tuple([renamed.get(number, number) for number in visit.operands]))


def reassociated(visits: Sequence[Visit]) -> tuple[list[Visit], dict[int, tuple[str, ...]]]:
    """`visits` with each sum of two reduced values reduced once, after the sum, and the order of each number.

    A sum counts when nothing else reads the two, and both were reduced over the same axes, numbers over devices in the
    same order, see `number_orders`, and brought to one layout; the transpositions in between are the compiler's to
    place.
    """
    users, orders = users_of(visits), number_orders(visits)
    made: dict[int, tuple[Visit, ...]] = {}
    dropped: set[int] = set()
    kept: list[Visit] = []
    for visit in visits:
        name = visit.op.name
        if name == "sdy.all_reduce":
            made[visit.results[0]] = (visit,)
        elif name in _MOVES and visit.operands[0] in made and len(users[visit.operands[0]]) == 1:
            made[visit.results[0]] = (*made[visit.operands[0]], visit)
        if name == "stablehlo.add" and visit.operands[0] != visit.operands[1]:
            left, right = (made.get(operand, ()) for operand in visit.operands)
            alone = all(len(users[operand]) == 1 for operand in visit.operands)
            if left and right and alone and _reduction(left, orders) == _reduction(right, orders):
                dropped.update(v.results[0] for v in (*left, *right))
                after = _chain(right, visit)
                orders[after[0].operands[0]] = orders.get(right[0].operands[0], ())
                made[visit.results[0]] = after
                kept += [visit._replace(results=after[0].operands), *after]
                continue
        kept.append(visit)
    return [visit for visit in kept if not dropped.intersection(visit.results)], orders


def number_orders(visits: Iterable[Visit]) -> dict[int, tuple[str, ...]]:
    """For every number that is made of a tensor the order in which mesh axes cut that: XLA lists the devices whose
    shares it sums in the order of the tensor's pieces, and makes one sum of two only where their lists are equal.

    Of a GPT's gradients on four by two H100 those that are cut over "data" first have their squares summed in one
    all_reduce, and those that are cut over "model" first in another (jax 0.10.2).
    """
    return {
        visit.results[0]: tuple(axis for dim in visit.operand_layouts[0] for axis in dim)
        for visit in visits
        if visit.op.name == "stablehlo.reduce" and visit.layouts == ((),)
    }


def _reduction(steps: Sequence[Visit], orders: Mapping[int, tuple[str, ...]]) -> tuple[str, Dims, tuple[str, ...]]:
    """The axes that are summed over, the layout that comes of it, and of a number its order."""
    order = orders.get(steps[0].operands[0], ())
    return str(steps[0].op.attributes["reduction_axes"]), steps[-1].layouts[0], order


def _chain(steps: Sequence[Visit], total: Visit) -> tuple[Visit, ...]:
    """`steps` again, applied to the unreduced sum; the last makes the value that `total` made."""
    numbers = [-total.results[0] * 4 - i for i in range(len(steps))] + [total.results[0]]
    return tuple(
        step._replace(operands=(number,), results=(following,))
        for step, number, following in zip(steps, numbers[:-1], numbers[1:], strict=True)
    )
