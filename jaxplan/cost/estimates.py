"""What XLA for TPU takes kernels to last where it decides what lies in vector memory.

That is no price: a kernel lasts as long as its arithmetic at the peak or its traffic, whichever is longer, and nothing
else (xla/service/memory_space_assignment/cost_analysis.cc; libtpu logs "Initial resource" with `TPU_VMODULE=
algorithm=3`, jax 0.10.2, libtpu 0.0.42.1, 2026-11-28). Six networks' estimates for v5e add up to 0.8 to 1.2 times what
is said here. On v6e convolutions are padded to the matrix unit: a weight's gradient over eight images of 56 pixels, 64
channels to 64, is taken to last 218 us, which is 108 times its arithmetic (here 64 times; 29 and 32 with 128
channels). Elements that are scattered by themselves take 11.1 ns each, those of a row that pad its tile too: 8192 to
32768 scattered into as many took 91 to 364 us on v5e (43 us for 4096 on v5p, 62 on v6e); a router's 2048, [4, 256, 2],
1.46 ms, longer than anything may wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..hardware import Profile
from ..ir import Graph, Op
from ..sharding import NONE, UNREDUCED, MeshAxes
from .crossing import Traffic
from .held_back import PRODUCTS
from .selections import is_selection
from .tiles import LANES, SUBLANES, Tiling, device_bytes, local_sizes

_SCATTERED_S, _GATHERED_S = 11.1e-9, 3.1e-9
"""An element that is scattered by itself, and a row that is looked up: 8192 of 64 to 512 columns take 25.6 us, single
elements and rows of eight twice as long."""

_PADDED_ROWS = 128
"""`Profile.matmul_rows` from which on convolutions are taken to be padded: v6e, not v5e and v5p."""


def estimated(
    graph: Graph,
    axes: MeshAxes,
    crossing: Traffic,
    profile: Profile,
    values: Mapping[int, np.ndarray],
    reads: Mapping[tuple[int, int], np.ndarray],
    seconds: Mapping[int, float],
) -> tuple[dict[int, float], frozenset[int]]:
    """Seconds of one run of each operation, and those of products whose arithmetic takes longer than their traffic.

    Args:
      values, reads: the layout row of every value where it is made, and of every operand as it is read.
      seconds: prices of all runs of operations, for those of which nothing is known.
    """
    whole = np.full(len(axes), NONE)
    grown: dict[tuple[int, bytes], float] = {}

    def row_of(op: Op, place: int) -> np.ndarray:
        if place < len(op.operands):
            return np.maximum(reads.get((op.index, place), whole), NONE)
        return np.maximum(values.get(op.results[place - len(op.operands)], whole), NONE)

    def local_share(value: int, row: np.ndarray) -> float:
        """Bytes in one device's tiles for each byte of the tensor."""
        key = value, row.tobytes()
        if key not in grown:
            tensor = graph.values[value]
            tiling: Tiling = crossing.images.get(value, "any")
            grown[key] = float(device_bytes(tensor, row[None], axes, "tpu", tiling)[0]) / max(tensor.bytes, 1.0)
        return grown[key]

    def sizes(op: Op, place: int) -> np.ndarray:
        value = (*op.operands, *op.results)[place]
        return np.asarray(local_sizes(graph.values[value].shape, row_of(op, place)[None], axes)[0])

    def arithmetic_s(op: Op) -> float | None:
        peak = profile.peak_for(graph.values[op.operands[0]].dtype)
        left, right = sizes(op, 0), sizes(op, 1)
        if op.primitive == "dot_general":
            (summed, _), (shared, _) = op.params["dimension_numbers"]
            length, both = math.prod(left[dim] for dim in summed), math.prod(left[dim] for dim in shared)
            return float(2 * math.prod(left) * math.prod(right) / (length * both) / peak)
        if profile.matmul_rows is None or profile.matmul_rows < _PADDED_ROWS:
            return None
        numbers = op.params["dimension_numbers"]
        (made, _, *window), summed = numbers.rhs_spec, numbers.lhs_spec[1]
        length = max(left[summed] // op.params["feature_group_count"], profile.matmul_rows)
        padded = max(right[made], profile.matmul_tile) / right[made]
        result = math.prod(sizes(op, len(op.operands))) * math.prod(right[dim] for dim in window)
        return float(2 * result * length * padded / peak)

    found, busy = dict[int, float](), set[int]()
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
        traffic_s = size / (profile.hbm_bytes_per_s * profile.hbm_efficiency)
        priced_s = seconds.get(op.index, 0.0) / max(op.trips, 1)
        if op.primitive in PRODUCTS:
            work_s = arithmetic_s(op)
            found[op.index] = max(traffic_s, priced_s if work_s is None else work_s)
            if found[op.index] > traffic_s:
                busy.add(op.index)
        elif _scatters_elements(graph, op):
            scattered = sizes(op, 2)
            tiles = [1] * len(scattered) if len(scattered) < 2 else [1] * (len(scattered) - 2) + [SUBLANES, LANES]
            padded = math.prod(math.ceil(n / tile) * tile for n, tile in zip(scattered, tiles, strict=True))
            found[op.index] = max(traffic_s, priced_s, _SCATTERED_S * padded)
        elif op.primitive == "gather":
            rows = math.prod(sizes(op, 1)[:-1])  # the last dimension of indices says where one row begins
            found[op.index] = max(traffic_s, priced_s, float(_GATHERED_S * rows))
        else:
            found[op.index] = traffic_s if crossing.kernels[op.index] is not None else max(traffic_s, priced_s)
    return found, frozenset(busy)


def _scatters_elements(graph: Graph, op: Op) -> bool:
    """Whether single elements are scattered, and by index: those of labels are selected, see `selections`."""
    if not op.primitive.startswith("scatter") or len(op.operands) != 3:
        return False
    return not op.params["dimension_numbers"].update_window_dims and not is_selection(graph, op)
