"""What XLA for TPU takes kernels to last where it decides what lies in vector memory.

That is no price: a kernel lasts as long as its arithmetic at a share of the peak or its traffic at a share of memory's
rate, whichever is longer, and nothing else; what is sent is read and written
(xla/service/memory_space_assignment/cost_analysis.cc; libtpu logs "Initial resource" with `TPU_VMODULE=algorithm=3`,
jax 0.10.2, libtpu 0.0.42.1, 2026-11-28). What is said here adds up to 0.87 to 1.04 times what was logged for ten
programs on v5e and v5p, 0.95 in the median, and to 0.74 for one on v6e, where the share of the peak depends on the
product; copies of arguments into other orders are not in it. On v6e convolutions are padded to the matrix unit: a
weight's gradient over eight images of 56 pixels, 64 channels to 64, is taken to last 218 us, which is 108 times its
arithmetic (here 64 times; 29 and 32 with 128 channels). Elements that are scattered by themselves take 11.1 ns each,
those of a row that pad its tile too: 8192 to 32768 scattered into as many took 91 to 364 us on v5e (43 us for 4096 on
v5p, 62 on v6e); a router's 2048, [4, 256, 2], 1.46 ms, longer than anything may wait.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import ELEMENTWISE, NONE, UNREDUCED, MeshAxes
from .crossing import Traffic
from .held_back import PRODUCTS
from .indices import HELD
from .lookups import Lookups, table_tiling
from .selections import is_selection
from .tiles import LANES, SUBLANES, Tiling, lies_in_rows, local_bytes, local_shape

_ELEMENT_S = 11.1e-9
"""An element that is scattered by itself."""

_SCATTERED, _GATHERED, _FEWEST = 16, 8, 16
"""Rows of 128 elements that are taken to be moved for one of a table, and one more; where the table lies in columns,
for each of its elements, and for sixteen at least. 8192 rows of f32 are added in 96.7 us on v5e, 43.6 on v6e and 30.4
on v5p, and gathered in 51.2, of bf16 in 25.6; 16384 rows of 16 columns of ten million in 2.92 and 1.47 ms."""

_SAVED = 0.48, 0.95
"""What those last less for an array of theirs in vector memory: 1.39 of 2.92 and of 1.47 ms."""

_PADDED_ROWS = 128
"""`Profile.matmul_rows` from which on convolutions are taken to be padded: v6e, not v5e and v5p."""


class Estimates(NamedTuple):
    """By operation.

    Attributes:
      seconds: what it is taken to last; saved_s: what it would last less for each array of its in vector memory,
        whatever the array's size.
      busy: products whose arithmetic takes longer than the traffic of their kernels.
    """

    seconds: Mapping[int, float]
    saved_s: Mapping[int, float]
    busy: frozenset[int]


class KernelTimes(NamedTuple):
    """What operations are taken to last, whenever they run.

    Attributes:
      seconds: of the traffic of each, or what else it lasts; work_s: of products' arithmetic.
      saved_s: see `Estimates`.
      joined_s: traffic of what is in the kernel of a product that runs with it; sent_s: of what is sent to operands,
        operation by operation.
    """

    seconds: Mapping[int, float]
    work_s: Mapping[int, float]
    saved_s: Mapping[int, float]
    joined_s: Mapping[int, float]
    sent_s: Sequence[tuple[int, float]]

    def at(self, times: Sequence[int]) -> Estimates:
        """Of operations that run at these times."""
        found, beside = dict(self.seconds), defaultdict[int, float](float)
        for op, traffic_s in self.joined_s.items():
            beside[times[op]] += traffic_s
        busy = frozenset(op for op, work_s in self.work_s.items() if work_s > found[op] + beside[times[op]])
        found.update((op, self.work_s[op] - beside[times[op]]) for op in busy)
        for op, sent_s in self.sent_s:
            found[op] += sent_s
        return Estimates(found, self.saved_s, busy)


def kernel_times(
    graph: Graph,
    axes: MeshAxes,
    crossing: Traffic,
    profile: Profile,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    seconds: Mapping[int, float],
) -> KernelTimes:
    """Of one run of each operation.

    Args:
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
      seconds: prices of all runs of operations, for those of which nothing is known.
    """
    whole = np.full(len(axes), NONE)

    def row_of(op: Op, place: int) -> np.ndarray:
        if place < len(op.operands):
            return np.maximum(reads.get((op.index, place), whole), NONE)
        return np.maximum(values.get(op.results[place - len(op.operands)], whole), NONE)

    def local_share(value: int, row: np.ndarray) -> float:
        """Bytes in one device's tiles for each byte of the tensor."""
        tensor = graph.values[value]
        tiling: Tiling = crossing.images.get(value, "any")
        return local_bytes(tensor, row, axes, "tpu", tiling) / max(tensor.bytes, 1.0)

    def sizes(op: Op, place: int) -> list[float]:
        value = (*op.operands, *op.results)[place]
        return local_shape(graph.values[value].shape, row_of(op, place), axes)

    def arithmetic_s(op: Op) -> float | None:
        peak = profile.peak_for(graph.values[op.operands[0]].dtype)
        left, right = sizes(op, 0), sizes(op, 1)
        if op.primitive == "dot_general":
            (summed, _), (shared, _) = op.params["dimension_numbers"]
            length, both = math.prod(left[dim] for dim in summed), math.prod(left[dim] for dim in shared)
            achieved = peak * (profile.assigned_flops_share or 1.0)
            return float(2 * math.prod(left) * math.prod(right) / (length * both) / achieved)
        if profile.matmul_rows is None or profile.matmul_rows < _PADDED_ROWS:
            return None
        numbers = op.params["dimension_numbers"]
        (made, _, *window), summed = numbers.rhs_spec, numbers.lhs_spec[1]
        length = max(left[summed] // op.params["feature_group_count"], profile.matmul_rows)
        padded = max(right[made], profile.matmul_tile) / right[made]
        result = math.prod(sizes(op, len(op.operands))) * math.prod(right[dim] for dim in window)
        return float(2 * result * length * padded / peak)

    bytes_per_s = profile.assigned_bytes_per_s
    lookups, sent = {op.index for op in graph.lookups()}, set[tuple[int, bytes]]()
    found, work, saved = dict[int, float](), dict[int, float](), dict[int, float]()
    beside, moved = dict[int, float](), list[tuple[int, float]]()
    for op in graph.ops:
        size = 0.0
        for place, part in enumerate((*crossing.reads[op.index], *crossing.writes[op.index])):
            if part:
                size += part * local_share((*op.operands, *op.results)[place], row_of(op, place))
        for place, value in enumerate(op.results, len(op.operands)):  # a share of a sum over devices
            if not crossing.writes[op.index][place - len(op.operands)] and UNREDUCED in values.get(value, whole):
                size += graph.values[value].bytes * local_share(value, row_of(op, place))
        if op.primitive == "scan_slice":  # a kernel of its own takes it out of its stack
            value = op.results[0]
            size += 2 * graph.values[value].bytes * local_share(value, row_of(op, len(op.operands)))
        traffic_s = size / bytes_per_s
        priced_s = seconds.get(op.index, 0.0) / max(op.trips, 1)
        if op.primitive in PRODUCTS:
            work_s = arithmetic_s(op)
            found[op.index], work[op.index] = traffic_s, priced_s if work_s is None else work_s
        elif _scatters_elements(graph, op):
            scattered = sizes(op, 2)
            tiles = [1] * len(scattered) if len(scattered) < 2 else [1] * (len(scattered) - 2) + [SUBLANES, LANES]
            padded = math.prod(math.ceil(n / tile) * tile for n, tile in zip(scattered, tiles, strict=True))
            found[op.index] = max(traffic_s, priced_s, _ELEMENT_S * padded)
        elif op.index in lookups:
            # the last dimension of indices says where one row begins
            each = _row_bytes(graph, axes, op, row_of(op, 0), crossing.lookups)
            rows_s = each * math.prod(sizes(op, 1)[:-1]) / bytes_per_s
            found[op.index] = max(traffic_s, priced_s, rows_s)
            saved[op.index] = _SAVED[op.primitive == "gather"] * rows_s
        else:
            alone = crossing.kernels[op.index] is not None
            joined = not alone and (op.primitive in ELEMENTWISE or op.primitive.startswith("reduce_"))
            found[op.index] = traffic_s if alone or joined else max(traffic_s, priced_s)
            if joined:
                beside[op.index] = traffic_s
    for (index, place), row in sorted(reads.items(), key=lambda read: read[0]):
        value = graph.ops[index].operands[place]
        made = values.get(value)
        if made is None or made is row or not ((made != row) & (made != NONE)).any():
            continue
        key = value, row.tobytes()
        if key not in sent:
            sent.add(key)
            size = graph.values[value].bytes * (local_share(value, np.maximum(made, NONE)) + local_share(value, row))
            moved.append((index, size / bytes_per_s))
    return KernelTimes(found, work, saved, beside, moved)


def _row_bytes(graph: Graph, axes: MeshAxes, op: Op, row: np.ndarray, lookups: Lookups) -> float:
    """What is taken to be moved for each row that is looked up in a table of this layout or added to it."""
    table, gathers = graph.values[op.operands[0]], op.primitive == "gather"
    columns = int(local_shape(table.shape, row, axes)[-1])
    if not gathers and columns % LANES == 0 and local_bytes(table, row, axes, "tpu") <= HELD:
        return 0.0  # whole tiles that vector memory holds are added to as fast as memory is
    each = 1 if lies_in_rows(table, row, axes, table_tiling(lookups, op)) else max(columns, _FEWEST)
    return (each * (_GATHERED if gathers else _SCATTERED) + 1) * LANES * table.item_bytes


def _scatters_elements(graph: Graph, op: Op) -> bool:
    """Whether single elements are scattered, and by index: those of labels are selected, see `selections`."""
    if not op.primitive.startswith("scatter") or len(op.operands) != 3:
        return False
    return not op.params["dimension_numbers"].update_window_dims and not is_selection(graph, op)
