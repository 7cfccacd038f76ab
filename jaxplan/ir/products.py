"""Products in the order in which they are wanted.

jax makes a weight's gradient as a product and its transposition: `dot_general(g, x)`, then `transpose`.  XLA merges the
two into `dot_general(x, g)`, unless the product is pinned to a layout where its sum is taken.  Then the gradient comes
out in column-major order; the optimizer's kernel takes that order over, and XLA copies the weight and its moments into
it and back: two thirds more memory and six passes over all of them (an MLP and a transformer under data parallelism,
compiled for eight v5e and eight H100, jax 0.10.2).  So the two are merged here, before anything is pinned.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.lax import DotAlgorithm

from .._jax import Literal, as_closed
from .flatten import SEEN_THROUGH

_WALKED = frozenset({*SEEN_THROUGH, "scan", "while", "cond"})
"""Primitives whose jaxprs are looked into: calls, loops and branches."""


def products_as_wanted(jaxpr: Any) -> Any:
    """`jaxpr` (open) with products that are only read transposed made with their operands exchanged instead, in the
    jaxprs of its calls, loops and branches too; itself where there are none."""
    return _Exchange().body(jaxpr)


class _Exchange:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity; what was rewritten is kept alive beside it

    def body(self, body: Any) -> Any:
        """An open or closed jaxpr; one that is shared is rewritten once."""
        if id(body) not in self._done:
            jaxpr, _ = as_closed(body)
            equations = _exchanged([self._equation(eqn) for eqn in jaxpr.eqns], jaxpr.outvars)
            new = body
            if len(equations) != len(jaxpr.eqns) or any(
                a is not b for a, b in zip(equations, jaxpr.eqns, strict=True)
            ):
                changed = jaxpr.replace(eqns=equations)
                new = changed if jaxpr is body else body.replace(jaxpr=changed)
            self._done[id(body)] = body, new
        return self._done[id(body)][1]

    def _equation(self, eqn: Any) -> Any:
        if eqn.primitive.name not in _WALKED:
            return eqn
        params = {key: self._parameter(value) for key, value in eqn.params.items()}
        return eqn if all(params[key] is eqn.params[key] for key in params) else eqn.replace(params=params)

    def _parameter(self, value: Any) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.body(value)
        if type(value) is tuple and any(isinstance(x, (Jaxpr, ClosedJaxpr)) for x in value):  # branches
            made = tuple(self._parameter(x) for x in value)
            return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
        return value


def _exchanged(equations: list[Any], results: list[Any]) -> list[Any]:
    """Equations with the products among them exchanged that are read by one transposition alone."""
    reads = Counter(v for eqn in equations for v in eqn.invars if not isinstance(v, Literal))
    reads.update(v for v in results if not isinstance(v, Literal))
    made = {eqn.outvars[0]: i for i, eqn in enumerate(equations) if eqn.primitive.name == "dot_general"}
    found: list[Any] = list(equations)
    for i, eqn in enumerate(equations):
        value = eqn.invars[0] if eqn.primitive.name == "transpose" else None
        if value is None or isinstance(value, Literal) or value not in made or reads[value] != 1:
            continue
        product = equations[made[value]]
        if tuple(eqn.params["permutation"]) == _exchange(product) and _alike(product.params):
            found[made[value]] = product.replace(
                invars=product.invars[::-1], outvars=eqn.outvars, params=_params(product.params)
            )
            found[i] = None
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
