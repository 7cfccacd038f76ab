"""Primitives of other libraries that are written in jax themselves: seen through, like a call.

Such a primitive (Equinox has some) carries rules of its own for derivatives or batching, and is otherwise a function of
jax: the one that it is lowered to, or its `impl`, which runs outside jit.  Where primitive and function give the same
StableHLO on the platform that is planned for, the primitive's equation is replaced by a call of the function's jaxpr,
whose operations have rules.  Anything else (a kernel, a callback, another program on this platform) stays as it is.

So are primitives of jax that are one operation on one platform only.  A ragged product is that on TPU.  For CPU jax
writes it as a product with every group's matrix, of rows that are zero where they are another group's, and so does XLA
for GPU (xla/service/ragged_dot_rewriter.cc): as many times the arithmetic as there are groups, which can be cut by
groups and rows like any other product.

Of what is written for each platform, `lax.platform_dependent` (`jnp.diagonal` is), the platform's own is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core.primitives import closed_call_p

from .._jax import as_closed, equation_context, lowered_function, subjaxprs
from .flatten import SEEN_THROUGH

_WALKED = frozenset({*SEEN_THROUGH, "scan", "while", "cond"})
"""Primitives whose jaxprs are looked into: calls, loops and branches."""

_EXPANDED = {"ragged_dot_general": ("cpu", "cuda", "rocm")}
"""The platforms whose compilers expand a primitive that has a rule as one operation."""

_OWN_KERNEL = "jax_ragged_dot_use_gpu_pallas_triton_lowering"
"""jax's setting for ragged products in a kernel of its own on GPU."""

_DEPTH = 4
"""How often such primitives are looked for inside each other."""


class _Rewriter:
    """Rewrites jaxprs; one for each program, as it remembers what equal equations became."""

    def __init__(self, known: Collection[str], platform: str) -> None:
        self._known, self._platform = known, platform
        self._bodies: dict[Any, Any] = {}

    def jaxpr(self, body: Any, depth: int = 0) -> Any:
        """`body`, open or closed, with what could be seen through as calls; itself where nothing could."""
        jaxpr, _ = as_closed(body)
        equations = [self._equation(eqn, depth) for eqn in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
            return body
        changed = jaxpr.replace(eqns=equations)
        return changed if jaxpr is body else body.replace(jaxpr=changed)

    def _equation(self, eqn: Any, depth: int) -> Any:
        name = eqn.primitive.name
        if (branch := self._branch(eqn)) is not None:
            body = self.jaxpr(eqn.params["branches"][branch], depth)
            return eqn.replace(primitive=closed_call_p, params={"call_jaxpr": body}, invars=eqn.invars[1:])
        if name in _WALKED:
            params = {key: self._parameter(value, depth) for key, value in eqn.params.items()}
            same = all(_same(new, eqn.params[key]) for key, new in params.items())
            return eqn if same else eqn.replace(params=params)
        known = name in self._known and not self._is_expanded(name)
        if known or depth == _DEPTH or any(eqn.effects):
            return eqn
        body = self._body(eqn, depth)
        return eqn if body is None else eqn.replace(primitive=closed_call_p, params={"call_jaxpr": body})

    def _branch(self, eqn: Any) -> int | None:
        """The branch that the platform takes where these are written for platforms each; None: they are not."""
        platforms = eqn.params.get("branches_platforms") if eqn.primitive.name == "cond" else None
        taken = (i for i, names in enumerate(platforms or ()) if names is None or self._platform in names)
        return next(taken, None)

    def _is_expanded(self, name: str) -> bool:
        own_kernel = self._platform == "cuda" and getattr(jax.config, _OWN_KERNEL, False)
        return self._platform in _EXPANDED.get(name, ()) and not own_kernel

    def _parameter(self, value: Any, depth: int) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.jaxpr(value, depth)
        if type(value) is tuple and any(isinstance(x, (Jaxpr, ClosedJaxpr)) for x in value):  # branches
            return tuple(self._parameter(x, depth) for x in value)
        return value

    def _body(self, eqn: Any, depth: int) -> Any:
        """The jaxpr that an equation stands for, or None."""
        key = (eqn.primitive, tuple(eqn.params.items()), tuple(str(v.aval) for v in eqn.invars))
        try:
            if key not in self._bodies:
                self._bodies[key] = self._found(eqn)
            body = self._bodies[key]
        except TypeError:  # parameters that can't be hashed
            body = self._found(eqn)
        return body if body is None else self.jaxpr(body, depth + 1)

    def _found(self, eqn: Any) -> Any:
        primitive, params = eqn.primitive, eqn.params
        expanded = self._is_expanded(primitive.name)
        function = lowered_function(primitive, "cpu" if expanded else self._platform) or primitive.impl
        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars
        ]
        wanted = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

        def leaves(results: Any) -> list[Any]:
            return list(results) if primitive.multiple_results else [results]

        try:
            with equation_context(eqn, ""):
                body = jax.make_jaxpr(lambda *operands: leaves(function(*operands, **params)))(*shapes)
                if [(aval.shape, aval.dtype) for aval in body.out_avals] != wanted:
                    return None
                jaxpr, consts = as_closed(body)
                if any(inner.primitive is primitive and inner.params == params for inner in _all(jaxpr)):
                    return None  # running it means binding it: nothing is seen
                if expanded:
                    return body
                bound = self._text(lambda *xs: leaves(primitive.bind(*xs, **primitive.get_bind_params(params))), shapes)
                seen = self._text(lambda *xs: jax.core.eval_jaxpr(jaxpr, consts, *xs), shapes)
        except Exception:  # another library's function may fail in any way under a trace; then nothing is seen
            return None
        return body if bound == seen else None

    def _text(self, function: Callable[..., Any], shapes: Sequence[Any]) -> str:
        def run(*operands: Any) -> Any:
            return function(*operands)

        traced = jax.jit(run, keep_unused=True).trace(*shapes)
        return str(traced.lower(lowering_platforms=(self._platform,)).as_text())


def _same(new: Any, old: Any) -> bool:
    if type(new) is tuple:
        return new is old or all(a is b for a, b in zip(new, old, strict=True))
    return new is old


def _all(jaxpr: Any) -> Iterator[Any]:
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from _all(as_closed(inner)[0])


def seen_into(jaxpr: Any, known: Collection[str], platform: str) -> Any:
    """`jaxpr` (open) with calls in place of the primitives that could be seen through.

    Args:
      known: names of primitives to leave alone: those with a sharding rule.
      platform: what the program will be lowered for, as jax names it ("tpu", "cuda", "cpu").
    """
    return _Rewriter(known, platform).jaxpr(jaxpr)
