"""Choices of two branches as XLA for GPU has them by the time it propagates shardings.

It makes each an `if`, of the number that chooses being 0, through which Shardy takes nothing in jax 0.10 (in 0.12 it
does): what a choice within another one makes is replicated, unless something says how it lies, and is gathered in
every branch (the bases of SOAP, f32[24, 4096, 4096] of a decomposition by devices, eight H100, jax 0.10.2).  XLA for
TPU and for CPU leaves the `case` that jax writes, through which shardings go; so does XLA for GPU of three branches or
more.
"""

from __future__ import annotations

from typing import Any

from .._jax import ir

CASE, CHOICE = "stablehlo.case", "stablehlo.if"


def choose_of_two(op: Any, platform: str) -> None:
    """Rewrite a `stablehlo.case` of two branches as XLA does for "cuda" or "rocm"; for others it stays as it is."""
    if platform not in ("cuda", "rocm") or len(op.regions) != 2:
        return
    before, index = ir.InsertionPoint(op), op.operands[0]
    zero = ir.Operation.create(
        "stablehlo.constant",
        results=[index.type],
        attributes={"value": ir.Attribute.parse(f"dense<0> : {index.type}")},
        loc=op.location,
        ip=before,
    ).results[0]
    chooses = ir.Operation.create(
        "stablehlo.compare",
        results=[ir.Type.parse("tensor<i1>")],
        operands=[index, zero],
        attributes={"comparison_direction": ir.Attribute.parse("#stablehlo<comparison_direction EQ>")},
        loc=op.location,
        ip=before,
    ).results[0]
    kinds = [result.type for result in op.results]
    made = ir.Operation.create(
        CHOICE, results=kinds, operands=[chooses], regions=2, loc=op.location, ip=before
    )
    for branch, region in zip(op.regions, made.regions, strict=True):
        branch.blocks[0].append_to(region)
    for result, instead in zip(op.results, made.results, strict=True):
        result.replace_all_uses_with(instead)
    op.erase()
