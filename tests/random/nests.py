"""Lines that hold programs: loops, branches and jax's transformations, nested in each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

from .lines import LEAVES, Add
from .moves import with_dim
from .values import Program, Scope, Type, fitted, is_int, is_key, is_real


def fill(s: Scope, lines: int) -> None:
    """Add that many lines to a scope, as far as anything fits."""
    for _ in range(lines):
        for _ in range(4):  # what was drawn may not fit the values that there are
            nest = s.depth > 0 and s.integer(0, 3) == 0
            if s.choose(NESTS if nest else LEAVES)(s):
                break


def body(s: Scope, inputs: Sequence[Type], *, smooth: bool | None = None, most: int = 3) -> Scope:
    """A scope inside `s`, filled."""
    inner = Scope(s.draw, tuple(inputs), s.smooth if smooth is None else smooth, s.depth - 1)
    fill(inner, s.integer(1, most))
    return inner


def some(s: Scope, wanted: Callable[[Type], bool], least: int, most: int) -> list[int]:
    """Values of such types, each at most once."""
    fitting = [i for i, t in enumerate(s.types) if wanted(t)]
    if len(fitting) < max(least, 1):
        return []
    return s.draw(st.lists(st.sampled_from(fitting), min_size=least, max_size=most, unique=True))


def plain(t: Type) -> bool:
    return not is_key(t)


def carried(inner: Scope, carry: Sequence[Type]) -> Program:
    """The program whose results are a next carry and, after it, the scope's latest values."""
    return inner.program([*(inner.choose(inner.latest(2)) for _ in carry), *inner.latest(2)])


def nexts(made: Sequence[Any], carry: Sequence[Type]) -> list[Any]:
    return [fitted(value, t) for value, t in zip(made, carry, strict=False)]


def scan(s: Scope) -> bool:
    found = with_dim(s, 1)
    carry = some(s, plain, 1, 2)
    if found is None or not carry:
        return False
    length = s.types[found[0]].shape[0] if s.flip() else s.integer(1, 4)
    stacked = [i for i in some(s, lambda t: plain(t) and t.ndim > 0 and t.shape[0] == length, 0, 2)]
    captured = some(s, lambda t: True, 0, 2)
    types = [s.types[i] for i in carry]
    slices = [Type(s.types[i].shape[1:], s.types[i].dtype) for i in stacked]
    inner = body(s, [*types, *slices, *(s.types[i] for i in captured)])
    program = carried(inner, types)
    reverse, unroll = s.flip(), s.choose([1, 1, 2])
    n, m = len(carry), len(carry) + len(stacked)

    def fn(*values: Any) -> Any:
        def one(state: Any, x: Any) -> Any:
            made = program(*state, *x, *values[m:])
            return nexts(made, types), [v for v in made[n:] if not is_key(v)]

        return lax.scan(
            one, list(values[:n]), list(values[n:m]), length=length, reverse=reverse, unroll=unroll
        )

    return s.add(f"scan length {length} reverse={reverse} unroll={unroll} carry {n} xs {m - n} {program}", fn,
                 *carry, *stacked, *captured)  # fmt: skip


def loop(s: Scope) -> bool:
    carry, captured = some(s, plain, 1, 2), some(s, lambda t: True, 0, 2)
    if not carry:
        return False
    types = [s.types[i] for i in carry]
    program = carried(body(s, [*types, *(s.types[i] for i in captured)]), types)
    n, trips = len(carry), s.integer(0, 4)
    known = s.flip() or s.smooth  # jax differentiates only loops of known length

    def fn(*values: Any) -> Any:
        def step(state: Any) -> list[Any]:
            return nexts(program(*state, *values[n:]), types)

        if known:
            return lax.fori_loop(0, trips, lambda i, state: step(state), list(values[:n]))
        counted = [i for i, t in enumerate(types) if is_int(t)]
        first = list(values[:n])

        def goes_on(state: Any) -> Any:
            early = (state[1][counted[0]].sum() % 5 != 3) if counted else True
            return (state[0] < trips) & early

        return lax.while_loop(goes_on, lambda state: (state[0] + 1, step(state[1])), (jnp.int32(0), first))[1]

    return s.add(f"{'fori' if known else 'while'} {trips} carry {n} {program}", fn, *carry, *captured)


def cond(s: Scope) -> bool:
    chooser, operands = s.value(is_int), some(s, lambda t: True, 1, 3)
    if chooser is None or not operands:
        return False
    types = [s.types[i] for i in operands]
    shaped = [t for t in types if plain(t)][:2]
    if not shaped:
        return False
    programs = [carried(body(s, types, most=2), shaped) for _ in range(s.integer(2, 3))]

    def fn(y: Any, *values: Any) -> Any:
        def branch(program: Program) -> Callable[..., Any]:
            return lambda *xs: nexts(program(*xs), shaped)

        return lax.switch(y.sum() % len(programs), [branch(p) for p in programs], *values)

    return s.add(f"switch {programs}", fn, chooser, *operands)


def vmap(s: Scope) -> bool:
    found = with_dim(s)
    if found is None:
        return False
    first, _, extent = found
    mapped = {first, *some(s, lambda t: plain(t) and extent in t.shape, 0, 1)}
    whole = [i for i in some(s, lambda t: True, 0, 2) if i not in mapped]
    axes: list[int | None] = []
    inputs = []
    for i in mapped:
        shape = s.types[i].shape
        d = s.choose([d for d, n in enumerate(shape) if n == extent])
        axes.append(d)
        inputs.append(Type(shape[:d] + shape[d + 1 :], s.types[i].dtype))
    program = carried(body(s, [*inputs, *(s.types[i] for i in whole)]), [])
    axes += [None] * len(whole)
    return s.add(f"vmap{axes} {program}", jax.vmap(program, in_axes=tuple(axes)), *mapped, *whole)


def _differentiable(s: Scope) -> tuple[list[int], Program] | None:
    reals = some(s, is_real, 1, 2)
    if not reals:
        return None
    others = some(s, lambda t: not is_real(t), 0, 1)
    inner = body(s, [s.types[i] for i in (*reals, *others)], smooth=True, most=4)
    program = inner.program(inner.latest(2))
    return ([*reals, *others], program)


def energy(values: Sequence[Any]) -> Any:
    return sum((jnp.sin(v).sum() for v in values if is_real(v)), start=0.0 * jnp.zeros((), float))


def grad(s: Scope) -> bool:
    found = _differentiable(s)
    if found is None:
        return False
    operands, program = found
    count = sum(is_real(s.types[i]) for i in operands)

    def fn(*values: Any) -> Any:
        return jax.value_and_grad(lambda *xs: energy(program(*xs)), argnums=tuple(range(count)))(*values)

    return s.add(f"value_and_grad {program}", lambda *values: jax.tree.map(jnp.tanh, fn(*values)), *operands)


def jvp(s: Scope) -> bool:
    found = _differentiable(s)
    if found is None:
        return False
    operands, program = found

    def fn(x: Any, *rest: Any) -> Any:
        out, tangent = jax.jvp(lambda x: energy(program(x, *rest)), (x,), (jnp.ones_like(x),))
        return jnp.tanh(out), jnp.tanh(tangent)

    return s.add(f"jvp {program}", fn, *operands)


_POLICIES = {
    "nothing": None,
    "dots": jax.checkpoint_policies.checkpoint_dots,
    "all": jax.checkpoint_policies.everything_saveable,
    "no batch dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def remat(s: Scope) -> bool:
    """The gradient of a checkpointed program."""
    found = _differentiable(s)
    if found is None:
        return False
    operands, program = found
    policy = s.choose(sorted(_POLICIES))

    def fn(x: Any, *rest: Any) -> Any:
        kept = jax.checkpoint(lambda x: program(jnp.sin(x), *rest), policy=_POLICIES[policy])
        return jnp.tanh(jax.grad(lambda x: energy(kept(x)))(x))

    return s.add(f"grad of checkpoint saving {policy} {program}", fn, *operands)


def custom(s: Scope) -> bool:
    """Derivatives of the program's own: custom_jvp; custom_vjp, plain, with optimize_remat, with a static argument."""
    found = _differentiable(s)
    if found is None:
        return False
    operands, program = found
    kind = s.choose(["jvp", "vjp", "vjp, optimised", "vjp, static argument"])

    def plainly(x: Any, *rest: Any) -> Any:
        return energy(program(x, *rest))

    slope = jax.grad(plainly)

    def fn(x: Any, *rest: Any) -> Any:
        nothing = (None,) * len(rest)
        if kind == "jvp":
            own = jax.custom_jvp(plainly)

            def doubled(primals: Any, tangents: Any) -> Any:
                along = jax.jvp(lambda x: plainly(x, *primals[1:]), primals[:1], tangents[:1])[1]
                return plainly(*primals), 2 * along

            own.defjvp(doubled)
            return jnp.tanh(jax.grad(own)(x, *rest))
        if kind == "vjp, static argument":
            static = jax.custom_vjp(lambda factor, *xs: factor * plainly(*xs), nondiff_argnums=(0,))
            static.defvjp(
                lambda factor, *xs: (factor * plainly(*xs), xs),
                lambda factor, xs, g: (factor * g * slope(*xs), *nothing),
            )
            return jnp.tanh(jax.grad(lambda x: static(3, x, *rest))(x))
        kept = jax.custom_vjp(plainly)
        kept.defvjp(
            lambda *xs: (plainly(*xs), xs),
            lambda xs, g: (2 * g * slope(*xs), *nothing),
            optimize_remat="optimised" in kind,
        )
        return kept(x, *rest) + jnp.tanh(jax.grad(kept)(x, *rest))

    return s.add(f"custom {kind} {program}", fn, *operands)


def call(s: Scope) -> bool:
    operands = some(s, lambda t: True, 1, 3)
    if not operands:
        return False
    inner = body(s, [s.types[i] for i in operands])
    program = inner.program(inner.latest(2))
    return s.add(f"jit {program}", jax.jit(program), *operands)


def accumulated(s: Scope) -> bool:
    """Gradients added up in a loop's carry, microbatch by microbatch, perhaps layer by layer."""
    found = with_dim(s)
    weights = some(s, lambda t: is_real(t) and t.ndim > 0, 1, 2)
    if found is None or not is_real(s.types[found[0]]) or s.types[found[0]].ndim < 2 or s.smooth:
        return False
    batch, types = found[0], [s.types[i] for i in weights]
    slices = Type(s.types[batch].shape[1:], s.types[batch].dtype)
    inner = body(s, [slices, *types], smooth=True, most=2)
    program = inner.program(inner.latest(2))
    start, layers, kept = s.choose([0.0, 0.0, 1.0]), s.choose([0, 0, 2]), s.flip()

    def slope(x: Any, ws: Any) -> Any:
        def loss(ws: Any) -> Any:
            flat = x.reshape(-1, x.shape[-1])
            products = [jnp.tanh(flat @ jnp.resize(w, (x.shape[-1], 4))) for w in ws]

            def layer(h: Any, _: Any) -> Any:
                return jnp.tanh(h @ jnp.resize(ws[0], (4, 4))), None

            if layers:
                repeated = jax.checkpoint(layer) if kept else layer
                products.append(lax.scan(repeated, products[0], None, length=layers)[0])
            return energy([*program(x, *ws), *products])

        return jax.grad(loss)(ws)

    def fn(xs: Any, *ws: Any) -> Any:
        def micro(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, slope(x, ws)), None

        first = tuple(jnp.full_like(w, start) for w in ws)
        return jax.tree.map(jnp.tanh, lax.scan(micro, first, xs)[0])

    return s.add(f"accumulated from {start}, {layers} layers, remat={kept} {program}", fn, batch, *weights)


def associative(s: Scope) -> bool:
    found = with_dim(s)
    if found is None or not (is_real(s.types[found[0]]) or s.types[found[0]].dtype == jnp.int32):
        return False
    i, d, _ = found
    if is_real(s.types[i]) or s.smooth:

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        return s.add(f"recurrence {d}", lambda x: lax.associative_scan(combine, (jnp.tanh(x), x), axis=d), i)
    return s.add(f"running max {d}", lambda x: lax.associative_scan(jnp.maximum, x, reverse=True, axis=d), i)


def each(s: Scope) -> bool:
    i = s.value(lambda t: t.ndim > 0)
    if i is None:
        return False
    t = s.types[i]
    program = carried(body(s, [Type(t.shape[1:], t.dtype)]), [])
    return s.add(f"map {program}", lambda x: lax.map(lambda row: program(row), x), i)


NESTS: tuple[Add, ...] = (
    scan, scan, loop, cond, vmap, grad, grad, jvp, remat, custom, call, associative, each, accumulated,
)  # fmt: skip
