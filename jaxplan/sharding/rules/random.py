"""Random bits and keys.  A key array's shape is that of its keys, whatever a key is made of."""

from __future__ import annotations

import math
from typing import Any

from ..rule import OpShapes, Rule, RuleBuilder
from .registry import register, replicated

_THREEFRY_FLOPS = 115.0
"""Integer operations of one threefry-2x32 hash: 20 rounds of add, rotate (two shifts and an or) and xor,
and five key injections of three adds each.  jax's partitionable threefry takes one hash a result element.
Source: the algorithm as jax/_src/prng.py writes it."""


@register("random_bits", "random_split")
def from_keys(op: OpShapes) -> Rule:
    """`([k])->([k,i,j])`: every device makes its own piece of the bits (or of the new keys)."""
    b = RuleBuilder()
    result = b.factors(op.results[0])
    keys = result[: len(op.operands[0])]
    return b.rule(operands=[keys], results=[result], flops=_THREEFRY_FLOPS * math.prod(op.results[0]))


@register("random_seed", "random_clone", "random_fold_in")
def per_key(op: OpShapes) -> Rule:
    """`([k],[k])->([k])`, scalars whole."""
    b = RuleBuilder()
    dims = b.factors(op.results[0])
    return b.rule(
        operands=[dims if shape else [] for shape in op.operands],
        results=[dims],
        flops=_THREEFRY_FLOPS * math.prod(op.results[0]),
    )


@register("random_wrap", "random_unwrap")
def key_words(op: OpShapes) -> Rule:
    """`([k,1])->([k])` and back: the words that make a key stay together."""
    b = RuleBuilder()
    rank = min(len(op.operands[0]), len(op.results[0]))
    dims: list[Any] = b.factors(op.operands[0][:rank])
    return b.rule(
        operands=[dims + [None] * (len(op.operands[0]) - rank)],
        results=[dims + [None] * (len(op.results[0]) - rank)],
        follows=True,
    )


@register("rng_bit_generator", "rng_uniform", "random_gamma")
def generator(op: OpShapes) -> Rule:
    """Everything whole: cut, a backend's generator gives other bits, and a rejection loop talks."""
    return replicated(op)
