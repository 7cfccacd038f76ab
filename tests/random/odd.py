"""Steps of jax's less common corners, as users write them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 32)).astype(np.float32)
W = (RANDOM.normal(size=(32, 32)) * 0.1).astype(np.float32)
SQUARES = RANDOM.normal(size=(8, 6, 6)).astype(np.float32)
IMAGES = RANDOM.normal(size=(8, 12, 12, 4)).astype(np.float32)
WHOLE = RANDOM.integers(0, 16, (16, 8)).astype(np.int32)
STACK = (RANDOM.normal(size=(4, 32, 32)) * 0.1).astype(np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "extra"], meta_fields=["name"])
class Box:
    def __init__(self, weight: Any, extra: Any, name: str) -> None:
        self.weight, self.extra, self.name = weight, extra, name


class Boxed(NamedTuple):
    box: Box
    nothing: None
    count: Any


def containers(state: Boxed, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state.box.weight)
    return state._replace(
        box=Box(state.box.weight - grads, state.box.extra, "n"), count=state.count + 1
    ), value


def quantised(state: Any, x: Any) -> Any:
    weight = state["int4"].astype(jnp.float32) * state["scale"]
    made = jnp.tanh(x @ weight) @ state["fp8"].astype(jnp.float32)
    scale = jnp.abs(weight).max() / 7
    return {
        "int4": jnp.round(weight / scale).astype(jnp.int4),
        "scale": scale,
        "fp8": (state["fp8"].astype(jnp.float32) * 0.5).astype(jnp.float8_e4m3fn),
    }, made.mean()


def converged(w: Any, x: Any) -> Any:
    def body(carry: Any) -> Any:
        vector, _, count = carry
        following = w @ (w.T @ vector)
        following /= jnp.linalg.norm(following)
        return following, jnp.linalg.norm(following - vector), count + 1

    start = (x[0], jnp.array(1.0), 0)
    return lax.while_loop(lambda c: (c[1] > 1e-3) & (c[2] < 40), body, start)


def policies(w: Any, x: Any) -> Any:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def inner(h: Any, w: Any) -> Any:
        return jnp.sin(checkpoint_name(jnp.tanh(h @ w), "hidden") @ w)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("hidden"))
    def outer(h: Any, w: Any) -> Any:
        return inner(inner(h, w), w.T)

    return jax.grad(lambda w: lax.scan(lambda h, s: (outer(h, s), None), x, w)[0].sum())(w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def clipped(fn: Callable[[Any], Any], x: Any, limit: float) -> Any:
    return fn(x)


clipped.defvjp(
    lambda fn, x, limit: (fn(x), x),
    lambda fn, limit, x, g: (jnp.clip(jax.vjp(fn, x)[1](g)[0], -limit, limit),),
)


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.maximum(x, 0)


softened.defjvps(lambda tangent, _, x: tangent * jax.nn.sigmoid(x))


def decoded(cache: Any, w: Any, tokens: Any) -> Any:
    def body(carry: Any, position: Any) -> Any:
        cache, token = carry
        cache = lax.dynamic_update_slice(cache, w[token][:, None], (0, position, 0))
        visible = jnp.arange(cache.shape[1]) <= position
        scores = jnp.where(visible, jnp.einsum("bd,btd->bt", w[token], cache), -1e9)
        hidden = jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache)
        return (cache, jnp.argmax(hidden @ w.T, -1).astype(token.dtype)), token

    return lax.scan(body, (cache, tokens), jnp.arange(6))


def crops(images: Any, key: Any) -> Any:
    def one(image: Any, key: Any) -> Any:
        y, x = jax.random.randint(key, (2,), 0, 4)
        return lax.dynamic_slice(image, (y, x, 0), (8, 8, 4))[:, ::-1]

    made = jax.vmap(one)(images, jax.random.split(key, len(images)))
    return jax.image.resize(made, (8, 12, 12, 4), "bilinear"), made.astype(jnp.uint8)


def factorised(a: Any) -> Any:
    positive = a @ a.mT + 0.5 * jnp.eye(6)
    q, r = jnp.linalg.qr(a)
    low = jnp.linalg.cholesky(positive)
    return (
        jnp.abs(q @ r - a).max() < 1e-3, jax.scipy.linalg.solve_triangular(low, a, lower=True),
        jnp.linalg.eigvalsh(positive), jnp.linalg.svd(a, compute_uv=False), jnp.linalg.slogdet(positive),
        jnp.linalg.inv(positive), jax.scipy.linalg.expm(0.1 * a),
        jax.grad(lambda p: jnp.linalg.slogdet(p)[1].sum() + jnp.linalg.eigvalsh(p).max(-1).sum())(positive),
    )  # fmt: skip


def randoms(key: Any, x: Any) -> Any:
    keys = jax.random.split(key, 8)
    return (
        jax.random.bits(keys[0], (16, 8)), jax.random.categorical(keys[1], x),
        jax.random.permutation(keys[2], x), jax.random.choice(keys[3], x, (5,), replace=False),
        jax.random.gamma(keys[4], jnp.abs(x) + 1), jax.random.truncated_normal(keys[5], -1.0, 1.0, x.shape),
        jax.vmap(jax.random.normal)(keys), jax.random.key_data(keys),
    )  # fmt: skip


def segments(x: Any, ids: Any) -> Any:
    def loss(x: Any) -> Any:
        made = [f(x, ids, 8) for f in (jax.ops.segment_sum, jax.ops.segment_max, jax.ops.segment_min)]
        return sum(jnp.where(jnp.isfinite(m), jnp.tanh(m), 0).sum() for m in made)

    return jax.value_and_grad(loss)(x)


def chosen(x: Any, ids: Any) -> Any:
    return (
        lax.top_k(x, 4), lax.approx_max_k(x, 4), jnp.unique(ids, size=20, fill_value=-1, return_counts=True),
        jnp.nonzero(x > 1, size=24, fill_value=-1), jnp.bincount(ids.ravel(), length=16),
        jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 1]), jnp.lexsort((ids[:, 0], ids[:, 1])),
        jnp.median(x, axis=0), jnp.quantile(x, jnp.array([0.1, 0.9]), axis=1),
        x.at[ids[:, 0]].max(1.0, mode="drop"), jnp.histogram(x, 8, (-2, 2)),
        lax.sort((ids, jnp.cos(x[:, :8])), num_keys=1),
    )  # fmt: skip


def cumulated(x: Any) -> Any:
    def together(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    def loss(x: Any) -> Any:
        made = lax.associative_scan(together, (jnp.tanh(x), x), axis=1, reverse=True)[1]
        products, largest = jnp.cumprod(jnp.cos(x), 0), lax.cummax(x, 0, reverse=True)
        return lax.cumlogsumexp(x, axis=1).sum() + (products + largest + made).sum()

    return jax.value_and_grad(loss)(x)


def second_order(w: Any, x: Any) -> Any:
    small, rows = w[:6, :6], x[:, :6]

    def loss(v: Any) -> Any:
        return jnp.sum(jnp.tanh(v @ small) ** 2)

    def along(v: Any) -> Any:
        return jax.jvp(jax.grad(loss), (v,), (jnp.ones_like(v),))[1]

    return jax.vmap(jax.hessian(loss))(rows), jax.vmap(jax.jacfwd(along))(rows), jax.vmap(along)(rows)


def solved(w: Any, x: Any) -> Any:
    matrix = w @ w.T + jnp.eye(32)

    def loss(v: Any) -> Any:
        return (jax.scipy.sparse.linalg.cg(lambda y: y @ matrix, v, maxiter=20)[0] ** 2).sum()

    return jax.value_and_grad(loss)(x), jnp.linalg.lstsq(w, x.T)[0], jnp.linalg.pinv(w[:8])


def convolutions(kernel: Any, x: Any) -> Any:
    conv = functools.partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(kernel: Any, x: Any) -> Any:
        wide = conv(x, kernel, (1, 2), "SAME", rhs_dilation=(2, 1))
        deep = conv(x, kernel[:, :, :1], (1, 1), ((2, 0), (0, 2)), feature_group_count=4)
        back = lax.conv_transpose(wide, kernel, (2, 2), "SAME", transpose_kernel=True)
        pooled = lax.reduce_window(deep, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 2, 1), "SAME")
        line = jax.vmap(lambda a: jnp.convolve(a, kernel[0, :, 0, 0], "same"))(x[:, 0, :, 0])
        return (wide**2).mean() + jnp.tanh(pooled).mean() + (back**2).mean() + (line**2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))(kernel, x)


def spectra(x: Any) -> Any:
    def loss(x: Any) -> Any:
        filtered = jnp.fft.irfft2(jnp.fft.rfft2(x) * 0.5)
        return jnp.abs(jnp.fft.fft(x * 1j, axis=0)).sum() + (filtered**2).sum()

    return jax.value_and_grad(loss)(x)


def complex_weights(z: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda z: jnp.sum(jnp.abs(x @ z) ** 2).real)(z)
    return z - 0.01 * grads.conj(), value


def shapes(x: Any) -> Any:
    return (
        jnp.kron(x[:4, :4], x[:2, :2]), jnp.einsum("ij,kj,lj->ikl", x[:4], x[:3], x[:2]), jnp.trace(x[:, :16]),
        jnp.diag(x[0]), jnp.tril(x[:, :16]), jnp.roll(x, (3, -1), (0, 1)), jnp.rot90(x),
        jnp.repeat(x[:8], WHOLE[0] % 3, axis=0, total_repeat_length=12), jnp.repeat(x, 2, axis=1),
        jnp.tile(x, (1, 2, 1)), jnp.block([[x, x], [x, 2 * x]]), jnp.pad(x, 2, "reflect"),
        jnp.split(x, [5, 11], axis=1), x[:, ::-2], x[..., None, 3:9:2], jnp.stack([x, x], 1),
        jnp.meshgrid(x[0, :4], x[:3, 0]), jnp.moveaxis(x.reshape(2, 8, 4, 8), 1, 3).reshape(-1, 16), x[:0],
        jnp.delete(x, 3, axis=0), jnp.apply_along_axis(jnp.cumsum, 1, x),
    )  # fmt: skip


def bits(x: Any) -> Any:
    return (
        lax.population_count(x), lax.clz(x), (x << 2) ^ (x >> 1), jnp.packbits(x > 3, axis=1),
        lax.bitcast_convert_type(x, jnp.uint8), jnp.unpackbits(x.astype(jnp.uint8), axis=0), jnp.gcd(x, 6),
        jnp.floor_divide(x, 3), x.astype(jnp.bool_).all(0), lax.rem(x, x + 1),
    )  # fmt: skip


def loops(w: Any, x: Any, n: Any) -> Any:
    def inner(i: Any, carry: Any) -> Any:
        def step(c: Any) -> Any:
            return lax.cond(c[0] > 0, lambda h: (jnp.tanh(h @ w), c[1] + 1), lambda h: (h * 2, c[1]), c[2])

        h, count = lax.switch(
            i % 3, [step, lambda c: (c[2] + 1, c[1]), lambda c: (c[2][:, ::-1], c[1] * 2)], carry
        )
        return h.sum(), count, h

    _, count, h = lax.fori_loop(0, n, inner, (x.sum(), 0, x))
    return count, h, lax.map(lambda row: row @ w, x, batch_size=4)


def mapped_scans(w: Any, x: Any) -> Any:
    def rnn(w: Any, xs: Any) -> Any:
        return lax.scan(
            lambda h, v: (jnp.tanh(h * w + v), h.sum()), jnp.zeros_like(w), xs, reverse=True, unroll=2
        )

    def loss(w: Any) -> Any:
        last, sums = jax.vmap(rnn, in_axes=(None, 0))(w, x.reshape(4, 4, 32))
        return (last**2).sum() + sums.sum()

    return jax.value_and_grad(loss)(w)


def ragged(x: Any, experts: Any, sizes: Any) -> Any:
    return jax.value_and_grad(lambda e: (lax.ragged_dot(x, e, sizes) ** 2).sum())(experts)


def sparse_product(x: Any, places: Any) -> Any:
    indices = jnp.stack([places[:, 0], places[:, 1]], 1)

    def loss(values: Any) -> Any:
        matrix = sparse.BCOO((values, indices), shape=(16, 16))
        return ((matrix @ x) ** 2).sum()

    return jax.value_and_grad(loss)(x[:, 0])


def partial_argument(fn: Any, x: Any) -> Any:
    return fn(x), jax.tree.map(lambda w: w * 2, fn)


def called_back(x: Any) -> Any:
    jax.debug.callback(lambda y: None, x.mean())
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(
        lambda y: np.sin(y), shape, x, vmap_method="expand_dims"
    ) + lax.optimization_barrier(x)


def attended(x: Any, w: Any) -> Any:
    heads = (x @ w).reshape(2, 8, 4, 8)
    made = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)
    normed = jax.nn.standardize(made, axis=-1)
    return (
        normed,
        jax.nn.softmax(made, where=made > 0, axis=-1),
        jax.nn.logsumexp(made, b=2.0),
        jax.nn.one_hot(WHOLE[:, 0], 12),
    )


def interpolated(x: Any) -> Any:
    coordinates = jnp.stack(jnp.meshgrid(jnp.linspace(0, 15, 8), jnp.linspace(0, 31, 16), indexing="ij"))
    made = jax.scipy.ndimage.map_coordinates(x, coordinates, order=1)
    return (
        made,
        jnp.interp(x, jnp.linspace(-1, 1, 8), jnp.arange(8.0)),
        jax.scipy.signal.convolve(x, x[:3, :3], mode="same"),
    )


def custom_rules(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return softened(clipped(jnp.sin, x @ w, 0.01)).sum()

    return jax.grad(loss)(w)


def reduced(x: Any) -> Any:
    pair = lax.reduce((x, jnp.broadcast_to(jnp.arange(32), x.shape)), (-jnp.inf, 0),
                      lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])), (1,))  # fmt: skip
    return (
        pair,
        jnp.ptp(x, 0),
        jnp.var(x, 1, ddof=1),
        jnp.nanmean(jnp.where(x > 1, jnp.nan, x), 0),
        lax.reduce_precision(x, 5, 4),
        jnp.linalg.norm(x, 1),
    )


def jitted_inside(w: Any, x: Any) -> Any:
    @functools.partial(jax.jit, static_argnames="power", inline=True)
    def powered(y: Any, *, power: int) -> Any:
        return y**power

    vectorised = jnp.vectorize(lambda a, b: jnp.dot(a, b), signature="(n),(n)->()")
    with jax.named_scope("mine"):
        return powered(x @ w, power=3), vectorised(x, w[0]), jax.linearize(lambda y: jnp.sin(y @ w), x)[1](x)


def adversarial(w: Any, opt_state: Any, x: Any) -> Any:
    """Inner steps of ascent on the input, then an outer step of descent: gradients through `optax` in a loop."""
    ascent = optax.sgd(0.1)

    def inner(carry: Any, _: Any) -> Any:
        delta, state = carry
        grads = jax.grad(lambda d: -((x + d) @ w).var())(delta)
        updates, state = ascent.update(grads, state)
        return (optax.projections.projection_box(optax.apply_updates(delta, updates), -0.1, 0.1), state), None

    zeros = jnp.zeros_like(x)
    (delta, _), _ = lax.scan(inner, (zeros, ascent.init(zeros)), None, length=3)
    grads = jax.grad(lambda w: ((x + lax.stop_gradient(delta)) @ w).var())(w)
    updates, opt_state = optax.adam(1e-2).update(grads, opt_state)
    return optax.apply_updates(w, updates), opt_state


KEY = jax.random.key(3)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "containers": (containers, (Boxed(Box(W, {"a": X[0], "none": None}, "n"), None, 3), X)),
    "int4 and fp8": (quantised, ({"int4": WHOLE[:, :1].repeat(32, 1).astype(jnp.int4), "scale": np.float32(0.1),
                                  "fp8": W.astype(jnp.float8_e4m3fn)}, X[:, :16])),
    "convergence": (converged, (W, X)),
    "remat policies": (policies, (STACK, X)),
    "custom rules": (custom_rules, (W, X)),
    "cache": (decoded, (np.zeros((8, 16, 32), np.float32), W, WHOLE[0] % 8)),
    "crops": (crops, (IMAGES, KEY)),
    "factorisations": (factorised, (SQUARES,)),
    "random": (randoms, (KEY, X)),
    "segments": (segments, (X, WHOLE[:, 0] % 8)),
    "choices": (chosen, (X, WHOLE)),
    "cumulative": (cumulated, (X,)),
    "second order": (second_order, (W, X)),
    "solves": (solved, (W, X)),
    "convolutions": (convolutions, (IMAGES[0, :3, :3, :, None].repeat(4, 3), IMAGES)),
    "spectra": (spectra, (X,)),
    "complex": (complex_weights, (W + 1j * W.T, X)),
    "shapes": (shapes, (X,)),
    "bits": (bits, (WHOLE,)),
    "loops": (loops, (W, X, np.int32(5))),
    "mapped scans": (mapped_scans, (W[0], X)),
    "ragged": (ragged, (X, STACK, np.array([5, 0, 7, 4], np.int32))),
    "sparse": (sparse_product, (X, WHOLE)),
    "function as argument": (partial_argument, (jax.tree_util.Partial(jnp.matmul, X.T), X)),
    "callbacks": (called_back, (X,)),
    "attention": (attended, (X, W)),
    "interpolation": (interpolated, (X,)),
    "reductions": (reduced, (X,)),
    "jit inside": (jitted_inside, (W, X)),
    "adversarial": (adversarial, (W, optax.adam(1e-2).init(W), X)),
}  # fmt: skip
