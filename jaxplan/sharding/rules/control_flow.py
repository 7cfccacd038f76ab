"""The graph's own operations around loops and branches, and calls that leave the program."""

from __future__ import annotations

from typing import Any

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import register, replicated


@register("scan_slice")
def scan_slice(op: OpShapes) -> Rule:
    """`([t,i,j])->([i,j]) need_replication={t}`: each iteration takes its slice on every device."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    return b.rule(operands=[dims], results=[dims[1:]], need_replication=[dims[0]], follows=True)


@register("scan_stack")
def scan_stack(op: OpShapes) -> Rule:
    """`([i,j])->([t,i,j]) need_replication={t}`."""
    b = RuleBuilder()
    dims = b.factors(op.results[0])
    return b.rule(operands=[dims[1:]], results=[dims], need_replication=[dims[0]], follows=True)


@register("carry_init", "carry_next")
def carry(op: OpShapes) -> Rule:
    """`([i,j])->([i,j])` into the loop, `([i,j],[i,j])->()` from each iteration to the next: one layout."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    return b.rule(operands=[dims] * len(op.operands), results=[dims] * len(op.results), follows=True)


@register("while_any")
def while_any(op: OpShapes) -> Rule:
    """`([i])->([]) reduction={i}`, by or."""
    b = RuleBuilder()
    dims = b.factors(op.operands[0])
    return b.rule(operands=[dims], results=[[]], reduction=dims, reducer="or", follows=True)


@register("while_test")
def while_test(op: OpShapes) -> Rule:
    """`([])->()`: every device has to know whether the loop goes on."""
    return replicated(op)


@register("cond_join")
def cond_join(op: OpShapes) -> Rule:
    """`([],[i,j],[i,j])->([i,j])`: every branch hands over the result's layout."""
    b = RuleBuilder()
    dims = b.factors(op.results[0])
    predicate: list[Any] = [None] * len(op.operands[0])
    return b.rule(operands=[predicate, *([dims] * (len(op.operands) - 1))], results=[dims], follows=True)


@register("platform_index")
def platform_index(op: OpShapes) -> Rule:
    """`()->([])`: which branch of `lax.platform_dependent` this platform takes; a number known to the compiler."""
    return replicated(op)


@register("pallas_call", "tpu_custom_call")
def kernel(op: OpShapes) -> Rule:
    """Everything whole: a kernel is written for its shapes; `register_rule(..., local=...)` cuts what calls it."""
    return replicated(op, note="a kernel that can't be cut: replicated")


@register("pure_callback", "io_callback", "debug_callback", "debug_print", "ffi_call")
def outside(op: OpShapes) -> Rule:
    """Everything whole: what the called code does with its arrays is not known."""
    return replicated(op, note="calls code outside the program: replicated")
