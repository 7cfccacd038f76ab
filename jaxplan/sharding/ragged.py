"""The rule by which XLA cuts a product of ragged groups, which Shardy's passes by themselves have none for.

Rows that are ragged, and the groups, are whole on every device: a step that has them in pieces gathers them first.
(`lax.ragged_dot`, its gradients and products like it compiled for v5e 2x4, jax 0.10.2, libtpu 0.0.42.1: what is summed
over pieces is one all_reduce, ragged rows and groups that are cut are gathered.)
"""

from __future__ import annotations

import string
from typing import Any

from .._jax import ir
from .dots import listed_dimensions

RAGGED_DOT = "chlo.ragged_dot"


def state_rule(op: Any) -> None:
    """Say the rule of a `chlo.ragged_dot` in an attribute of its own, which Shardy's passes take."""
    dims = listed_dimensions(op.attributes["ragged_dot_dimension_numbers"])
    lhs_batch, rhs_batch = (dims.get(f"{side}_batching_dimensions", []) for side in ("lhs", "rhs"))
    lhs_sum, rhs_sum = (dims.get(f"{side}_contracting_dimensions", []) for side in ("lhs", "rhs"))
    ragged, groups = dims.get("lhs_ragged_dimensions", []), dims.get("rhs_group_dimensions", [])
    lhs_shape, rhs_shape, group_shape = (tuple(operand.type.shape) for operand in op.operands)
    sizes: list[int] = []

    def factor(extent: int) -> int:
        sizes.append(extent)
        return len(sizes) - 1

    lhs = [factor(extent) for extent in lhs_shape]
    shared = dict(zip((*rhs_batch, *rhs_sum), (lhs[d] for d in (*lhs_batch, *lhs_sum)), strict=True))
    rhs = [shared[d] if d in shared else factor(extent) for d, extent in enumerate(rhs_shape)]
    counts = [factor(extent) for extent in group_shape]
    whole = {*(lhs[d] for d in ragged), *(rhs[d] for d in groups), *counts}
    result = [lhs[d] for d in lhs_batch]
    result += [lhs[d] for d in range(len(lhs)) if d not in (*lhs_batch, *lhs_sum)]
    result += [rhs[d] for d in range(len(rhs)) if d not in (*rhs_batch, *rhs_sum, *groups)]
    if set(ragged) & set(lhs_sum):  # each group has a result of its own, which leads
        result.insert(0, factor(op.results[0].type.shape[0]))
        whole.add(result[0])
    summed = [lhs[d] for d in lhs_sum if lhs[d] not in whole]
    tensors = [f"[{', '.join(map(_name, tensor))}]" for tensor in (lhs, rhs, counts, result)]
    rule = f"({', '.join(tensors[:3])})->({tensors[3]}) {{{', '.join(f'{_name(f)}={n}' for f, n in enumerate(sizes))}}}"
    for label, factors in (("reduction", summed), ("need_replication", sorted(whole))):
        rule += f" {label}={{{', '.join(map(_name, factors))}}}" if factors else ""
    op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(f"#sdy.op_sharding_rule<{rule}>")


def _name(factor: int) -> str:
    return string.ascii_lowercase[8 + factor]
