"""A decided program -> the tasks that the simulator runs.

Computation between two communications is one task: an operation joins the last one as long as it waits for the same
collectives, and nothing that the task made is already being sent.  Collectives that
finish sums follow their operation; those that bring operands into layout stand before it.  An operand that is there
from the start (an argument, a slice of a stack) is fetched no earlier than needed to hide it: a scheduler that fetched
all weights at once would fill the memory with them.  On GPU what is alike is put into one first, and what is sent waits
for the kernels that cast it.

What only rewrites such an operand (slices residuals off their stacks, casts a weight) is a task of its own where it is
read first, which waits for nothing: it fills what communication leaves idle, as in what XLA compiles, whose schedules
put a layer's slices beside the collectives of its backward pass (experiments/quality).

Where XLA hides latency by its own estimates (Hopper, Blackwell), its schedule is followed, kernel by kernel: see
`xla_writer`.  On GPUs before them a collective starts as soon as it can, and nothing is computed in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..cost import CostModel
from ..ir import Graph
from ..lowering import Sending
from ..plans import PlannedTask
from ..sharding import Collective
from .writer import Writer
from .xla_writer import Kernels, XlaWriter


def planned_tasks(
    graph: Graph,
    compute_s: Mapping[int, float],
    settled_s: Mapping[int, float],
    collectives: Sequence[tuple[Collective, int]],
    sent: Sequence[Sending],
    model: CostModel,
    alive_bytes: np.ndarray,
    kernels: Kernels | None = None,
) -> tuple[PlannedTask, ...]:
    """The tasks of a step.

    Args:
      compute_s: seconds of every operation, all its runs; settled_s: of these what copies its results into place.
      collectives: what the partitioner inserts, each with its operation (-1: unknown, run last); sent: what each
        takes.
      alive_bytes: `int64[n_ops]`, memory at every operation.
      kernels: where the compiler hides latency by a schedule of its own.
    """
    if kernels is not None:
        return XlaWriter(graph, compute_s, settled_s, collectives, sent, model, alive_bytes, kernels).write()
    return Writer(graph, compute_s, settled_s, collectives, sent, model, alive_bytes).write()
