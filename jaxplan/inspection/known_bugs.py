"""Reported miscompiles that a plan may run into; to be taken as a hint to check the numbers, not as proof."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..plans import Plan
from .findings import Finding

_SCATTER_IN_LOOP = (
    "a scattered gradient is summed over devices in each iteration of a loop, which XLA for TPU was reported to move "
    "out of the loop wrongly (openxla/xla#49143, libtpu 0.0.48): check with numerics=True on the TPU, or compile with "
    "xla_disable_hlo_passes=while-loop-all-reduce-code-motion"
)
_UNREDUCED = (
    "the program itself says that tensors are unreduced or reduced over mesh axes; XLA was reported to reduce such "
    "tensors wrongly (openxla/xla#40034, and with scatters up to jaxlib 0.10.2 openxla/xla#42481): check with "
    "numerics=True"
)
_PENDING = re.compile(r"\b(un)?reduced=\{")


def known_bugs(plan: Plan, platform: str, program: str) -> Iterator[Finding]:
    """Notes on `plan` for `platform` ("tpu", "gpu", "cpu"); `program` is the lowered StableHLO text."""
    if platform == "tpu":
        for c in plan.collectives:
            if c.primitive == "scatter-add" and c.trips > 1 and c.kind in ("all_reduce", "reduce_scatter"):
                yield Finding(what="known bug", where=c.where, text=_SCATTER_IN_LOOP, grave=False)
                break
    if _PENDING.search(program):
        yield Finding(what="known bug", where=f"`{plan.name}`", text=_UNREDUCED, grave=False)
