"""How large the matrix product is that a contraction leaves each device."""

from __future__ import annotations

import math

import numpy as np

from ..sharding import MeshAxes, Rule, Strategies


def local_dims(
    rule: Rule, axes: MeshAxes, options: Strategies, elements: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`float64[n]` each: local (m, n, k) of a contraction under every strategy.

    They are products of the factors only in lhs, only in rhs, and reduced.  A convolution is the product that it is
    lowered to: result dimensions without a factor (`elements` is the size of the whole result) are rows, and each
    element is the sum of flops / 2 / elements products.
    """
    sizes = np.repeat(np.array(rule.sizes, np.float64)[None, :], len(options), axis=0)
    for axis, (_, extent) in enumerate(axes):
        chosen = options.factors[:, axis]
        rows = np.nonzero(chosen >= 0)[0]
        sizes[rows, chosen[rows]] /= extent
    lhs = {f for d in rule.operands[0] for f in d}
    rhs = {f for d in rule.operands[1] for f in d}
    out = {f for r in rule.results for d in r for f in d}

    def product(factors: set[int]) -> np.ndarray:
        return sizes[:, sorted(factors)].prod(axis=1) if factors else np.ones(len(options))

    named = math.prod(rule.sizes[f] for f in out)
    terms = math.prod(rule.sizes[f] for f in rule.reduction)
    outer = elements / max(named, 1)  # result dimensions without a factor
    inner = rule.flops / 2 / max(elements, 1) / terms
    return (
        product((lhs & out) - rhs) * outer,
        product((rhs & out) - lhs),
        product(set(rule.reduction)) * inner,
    )
