"""Products in the order in which they are wanted.

jax makes a weight's gradient as a product and its transposition: `dot_general(g, x)`, then `transpose`.  XLA merges the
two into `dot_general(x, g)`, unless the product is pinned to a layout where its sum is taken.  Then the gradient comes
out in column-major order; the optimizer's kernel takes that order over, and XLA copies the weight and its moments into
it and back: two thirds more memory and six passes over all of them (an MLP and a transformer under data parallelism,
compiled for eight v5e and eight H100, jax 0.10.2).  So the two are merged here, before anything is pinned.

Of `x @ w.T` the weight's gradient is turned twice.  Turned once it would be summed by itself where `w` is looked up
too, as a tied embedding is: XLA adds two pending sums and sums once (`AllReduceReassociate`), but not through a
transposition (f32[8192, 512] and f32[512, 8192] beside each other on eight v5e and H100, twice the bytes; bf16 too).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.lax import DotAlgorithm

from .._jax import Literal
from .graph import Value


def exchanged(equations: list[Any], results: Sequence[Any]) -> list[Any]:
    """Equations with products that are read by one transposition alone made with their operands exchanged instead."""
    reads = Counter(v for eqn in equations for v in eqn.invars if not isinstance(v, Literal))
    reads.update(v for v in results if not isinstance(v, Literal))
    made = {eqn.outvars[0]: i for i, eqn in enumerate(equations) if eqn.primitive.name == "dot_general"}
    found: list[Any] = list(equations)
    for i, eqn in enumerate(equations):
        value = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        if value is None or isinstance(value, Literal) or value not in made or reads[value] != 1:
            continue
        product = found[made[value]]
        if tuple(eqn.params["permutation"]) == _exchange(product) and _alike(product.params):
            found[made[value]] = product.replace(
                invars=product.invars[::-1], outvars=eqn.outvars, params=_params(product.params)
            )
            found[i] = None
            made[eqn.outvars[0]] = made[value]  # which may be turned back
    return [eqn for eqn in found if eqn is not None]


def _alike(params: dict[str, Any]) -> bool:
    """Whether nothing is said of one operand or of the result that an exchange would have to say of another."""
    return params["out_sharding"] is None and not isinstance(params["precision"], DotAlgorithm)


def _exchange(product: Any) -> tuple[int, ...]:
    """The permutation of a product's result that exchanging its operands undoes."""
    (lhs_sum, _), (batch, _) = product.params["dimension_numbers"]
    n_batch, rank = len(batch), len(product.outvars[0].aval.shape)
    n_lhs = len(product.invars[0].aval.shape) - len(lhs_sum) - n_batch
    return (*range(n_batch), *range(n_batch + n_lhs, rank), *range(n_batch, n_batch + n_lhs))


def _params(params: dict[str, Any]) -> dict[str, Any]:
    """A product's parameters with its operands exchanged."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    precision = params["precision"]
    return {
        **params,
        "dimension_numbers": ((rhs_sum, lhs_sum), (rhs_batch, lhs_batch)),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }


_ALIKE = frozenset({"add", "add_any", "convert_element_type"})
"""What sums over devices go through and lies as it is."""


def laid_by(eqn: Any, operands: Sequence[Value]) -> dict[str, Any]:
    """What an equation says of how its result lies: `Value.sides`, `image` or `ordered`."""
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name.startswith("ragged_dot"):
        return {"ordered": True}
    if eqn.primitive.name in _ALIKE and any(value.ordered for value in operands):
        return {"ordered": all(value.ordered or not value.shape for value in operands)}
    if eqn.primitive.name == "conv_general_dilated":
        return {"image": tuple(numbers.out_spec)}
    if eqn.primitive.name != "dot_general":
        return {}
    (contracted, _), (batch, _) = numbers
    return {"sides": (len(batch), len(eqn.invars[0].aval.shape) - len(contracted))}
