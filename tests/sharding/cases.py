"""One row or more for every primitive that has a rule: JAX code whose jaxpr holds it, and its arguments.

The tests take the first equation of that primitive out of the traced code, with the values that reach it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from jaxplan.ir.rolls import roll_p
from jaxplan.ir.shifts import shift_p

_RANDOM = np.random.default_rng(0)


def real(*shape: int) -> np.ndarray:
    """Away from 0 and 1, so that every elementary function is defined and smooth."""
    return _RANDOM.uniform(0.1, 0.9, shape).astype(np.float32)


def whole(*shape: int, below: int = 8) -> np.ndarray:
    return _RANDOM.integers(0, below, shape).astype(np.int32)


def boolean(*shape: int) -> np.ndarray:
    return _RANDOM.integers(0, 2, shape).astype(bool)


@dataclass(frozen=True, kw_only=True, eq=False)  # a row is itself: arrays have no one equality
class Case:
    """One row.

    Attributes:
      stands_in: `fn` itself is what the partitioner sees of the primitive (one of the graph's own operations,
        or one whose parameters name a mesh), rather than code whose jaxpr holds it.
      params: with `stands_in`, the parameters that the rule reads.
    """

    primitive: str
    label: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    stands_in: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.primitive}:{self.label}"


CASES: list[Case] = []


def case(primitive: str, label: str, fn: Callable[..., Any], *args: Any, **remarks: Any) -> None:
    CASES.append(Case(primitive=primitive, label=label, fn=fn, args=args, **remarks))


V, W = real(16), real(16)
X, Y, Z = real(8, 16), real(8, 16), real(8, 16)
N, M = whole(8, 16), whole(8, 16)

# -- elementwise --------------------------------------------------------------------------------------------

_UNARY = (
    "abs", "acos", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos",
    "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma",
    "log", "log1p", "logistic", "neg", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "tan",
    "tanh", "stop_gradient",
)  # fmt: skip
for _name in _UNARY:
    case(_name, "float", getattr(lax, _name), V)
# Primitives of jax 0.12, in the words of every jax: tanh's derivative and log2.
case("polynomial", "cubic", lambda x: ((x * 0.5 + 2) * x + 1) * x + 3, V, stands_in=True)
case("one_minus_square", "float", lambda x: 1 - x * x, V, stands_in=True)
case("log2", "float", jnp.log2, V, stands_in=True)
_BINARY = (
    "add", "atan2", "div", "max", "min", "mul", "nextafter", "pow", "rem", "sub", "eq", "ne", "ge", "gt",
    "le", "lt", "igamma", "igammac", "zeta",
)  # fmt: skip
for _name in _BINARY:
    case(_name, "floats", getattr(lax, _name), V, W)
for _name, _fn in {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic, "shift_right_logical": lax.shift_right_logical,
    "rem": lax.rem,
}.items():  # fmt: skip
    case(_name, "ints", _fn, N, M + 1)
for _name, _fn in {"not": lax.bitwise_not, "clz": lax.clz, "population_count": lax.population_count}.items():
    case(_name, "int", _fn, N)
case("acosh", "float", lax.acosh, X + 1)
case("add", "scalar", lambda x: x + 2.0, X)
case("mul", "extent of one", lambda x, y: lax.mul_p.bind(x, y), X, real(8, 1))
case("add_any", "two uses", lambda x: jax.vjp(lambda y: jnp.sin(y) * y, x)[1](x), X)
case("mulhi", "ints", lambda x, y: x * y, N, M, stands_in=True)  # itself compiled by no CPU backend before jax 0.11
for _name in ("eq_to", "le_to", "lt_to"):  # comparisons of searches, in which NaN has its place
    case(_name, "floats", getattr(lax, _name[:2]), X, Y, stands_in=True)
case("complex", "floats", lax.complex, X, Y)
for _name in ("conj", "real", "imag"):
    case(_name, "complex", getattr(lax, _name), X + 1j * Y)
case("convert_element_type", "bf16", lambda x: x.astype(jnp.bfloat16), X)
case("clamp", "scalars", lambda x: lax.clamp(0.2, x, 0.6), X)
case("clamp", "tensors", lax.clamp, X, Y, Z)
case("copy", "float", lambda x: jnp.array(x, copy=True), X)
case("igamma_grad_a", "floats", lax.igamma_grad_a, X, Y)
case("integer_pow", "cube", lambda x: x**3, X)
case("polygamma", "floats", lambda n, x: lax.polygamma(n, x), np.ones((8, 16), np.float32), X)
case("reduce_precision", "bf16", lambda x: lax.reduce_precision(x, 8, 7), X)
case("regularized_incomplete_beta", "floats", lax.betainc, X, Y, Z)
case("select_n", "scalar predicate", lax.select_n, np.array(True), X, Y)
case("select_n", "tensor predicate", lax.select_n, boolean(8, 16), X, Y)

# -- contraction --------------------------------------------------------------------------------------------

_bqhd, _bkhd = real(4, 8, 4, 8), real(4, 8, 4, 8)
case("dot_general", "matrices", lambda a, b: a @ b, real(8, 16), real(16, 24))
case("dot_general", "batched", lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b), _bqhd, _bkhd)
case("dot_general", "two contracted", lambda a, b: jnp.einsum("bqhd,hdm->bqm", a, b), _bqhd, real(4, 8, 16))
case("dot_general", "vectors", lambda a, b: a @ b, real(16), real(16))
case("dot_general", "outer", lambda a, b: jnp.tensordot(a, b, 0), real(8), real(16))

_SIZES = np.array([3, 1, 4, 8], np.int32)


def _ragged(a: Any, b: Any) -> Any:
    return lax.ragged_dot(a, b, _SIZES)


case("ragged_dot_general", "rows", _ragged, real(16, 8), real(4, 8, 24))
case("ragged_dot_general", "weights' gradient",
     lambda a, b, g: lax.ragged_dot_general(
         a, g, _SIZES, lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())),
     real(16, 8), real(4, 8, 24), real(16, 24))  # fmt: skip


def convolution(
    x: Any, w: Any, *, strides: Any = (1, 1), padding: Any = "SAME", groups: int = 1, batch_groups: int = 1
) -> Any:
    return lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups, batch_group_count=batch_groups,
    )  # fmt: skip


def _gradient(position: int, **options: Any) -> Callable[..., Any]:
    """The convolution that is the gradient for one operand, alone."""

    def fn(x: Any, w: Any, g: Any) -> Any:
        def of(moving: Any) -> Any:
            return convolution(*((moving, w) if position == 0 else (x, moving)), **options)

        return jax.linear_transpose(of, x if position == 0 else w)(g)

    return fn


_image, _kernel = real(8, 6, 6, 8), real(3, 3, 8, 16)
case("conv_general_dilated", "same", convolution, _image, _kernel)
case("conv_general_dilated", "stride 2", functools.partial(convolution, strides=(2, 2)), _image, _kernel)
case("conv_general_dilated", "1x1", convolution, real(8, 8, 6, 8), real(1, 1, 8, 16))
case("conv_general_dilated", "depthwise", functools.partial(convolution, groups=8), _image, real(3, 3, 1, 8))
case(
    "conv_general_dilated", "two of each", functools.partial(convolution, groups=8), _image, real(3, 3, 1, 16)
)
case("conv_general_dilated", "grouped", functools.partial(convolution, groups=4), _image, real(3, 3, 2, 16))
case("conv_general_dilated", "grouped 1x1", functools.partial(convolution, groups=4), real(8, 8, 6, 8),
     real(1, 1, 2, 16))  # fmt: skip
case(
    "conv_general_dilated",
    "input's gradient",
    _gradient(0, strides=(2, 2)),
    _image,
    _kernel,
    real(8, 3, 3, 16),
)
case(
    "conv_general_dilated",
    "kernel's gradient",
    _gradient(1, strides=(2, 2)),
    _image,
    _kernel,
    real(8, 3, 3, 16),
)
case("conv_general_dilated", "depthwise kernel's gradient", _gradient(1, groups=8), _image, real(3, 3, 1, 16),
     real(8, 6, 6, 16))  # fmt: skip
case("conv_general_dilated", "batch groups", functools.partial(convolution, batch_groups=4),
     real(16, 4, 4, 8), real(3, 3, 8, 16))  # fmt: skip

_few = real(2, 16, 6, 8)  # too few for the mesh: what is left of it cuts the rows, and their edges are exchanged
_one = _few[:1]
for _name, _window, _options, _images in (
    ("halo", (3, 3), {}, _few),
    ("halo, one image", (3, 3), {}, _one),
    ("halo, stride 2", (3, 3), {"strides": (2, 2)}, _few),
    ("halo, stride 2, 7 wide", (7, 7), {"strides": (2, 2), "padding": ((3, 3), (3, 3))}, _one),
    ("halo longer than a piece", (11, 3), {}, _few),
    ("halo of one side", (3, 1), {"padding": ((2, 0), (0, 0))}, _few),
    ("every other row", (1, 1), {"strides": (2, 2)}, _few),
    ("pieces that don't line up", (3, 3), {"padding": "VALID"}, _few),
):
    _conv, _k = functools.partial(convolution, **_options), real(*_window, 8, 16)
    case("conv_general_dilated", _name, _conv, _images, _k)
    _made = real(*jax.eval_shape(_conv, _images, _k).shape)
    case("conv_general_dilated", f"input's gradient, {_name}", _gradient(0, **_options), _images, _k, _made)
    case("conv_general_dilated", f"kernel's gradient, {_name}", _gradient(1, **_options), _images, _k, _made)
case("conv_general_dilated", "halo, depthwise", functools.partial(convolution, groups=8), _few, real(3, 3, 1, 8))

# -- reduction ----------------------------------------------------------------------------------------------

_cube = real(4, 8, 16)
for _name in ("sum", "max", "min", "prod"):
    case(f"reduce_{_name}", "last", functools.partial(getattr(jnp, _name), axis=-1), _cube)
    case(f"reduce_{_name}", "two of three", functools.partial(getattr(jnp, _name), axis=(0, 2)), _cube)
case("reduce_sum", "all", jnp.sum, _cube)
case("reduce_sum", "int", lambda x: jnp.sum(x, 0), N)
case("reduce_and", "bool", lambda x: jnp.all(x, 1), boolean(8, 16))
case("reduce_or", "bool", lambda x: jnp.any(x, 1), boolean(8, 16))
case("reduce_xor", "int", lambda x: lax.reduce_xor(x, (1,)), N)
case("argmax", "last", lambda x: jnp.argmax(x, -1), _cube)
case("argmin", "first", lambda x: jnp.argmin(x, 0), _cube)
case("reduce", "own function", lambda x: lax.reduce(x, np.float32(0), lambda a, b: a * b + a + b, (1,)), X)
case("reduce", "two operands",
     lambda x, y: lax.reduce((x, y), (np.float32(0), np.float32(0)),
                             lambda a, b: (lax.max(a[0], b[0]), lax.add(a[1], b[1])), (0,)),
     X, Y)  # fmt: skip
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    case(_name, "rows", functools.partial(getattr(lax, _name), axis=1), X)
case("cumsum", "reverse columns", lambda x: lax.cumsum(x, 0, reverse=True), X)
case("sort", "one", lambda x: lax.sort(x, dimension=1), X)
case("sort", "keys and values", lambda x, y: lax.sort((x, y), dimension=0), X, Y)
case("cummax", "ints, reverse", lambda x: lax.cummax(x, 0, reverse=True), N)
case("top_k", "last", lambda x: lax.top_k(x, 3), _cube)
case("top_k", "of equals the first", lambda x: lax.top_k(x // 4, 5), N)
case("approx_top_k", "last", lambda x: lax.approx_max_k(x, 3), X)

_WINDOW = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"}


def _pool(combine: Any, start: float) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(x, np.float32(start), combine, **_WINDOW)


_max_pool = _pool(lax.max, -np.inf)
case("reduce_window_sum", "pool", _pool(lax.add, 0), _image)
case("reduce_window_max", "pool", _max_pool, _image)
case("reduce_window_max", "halo", lambda x: lax.reduce_window(
    x, np.float32(-np.inf), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), _few)  # fmt: skip
case("reduce_window_sum", "halo", lambda x: lax.reduce_window(
    x, np.float32(0), lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"), _few)  # fmt: skip
case("reduce_window_min", "pool", _pool(lax.min, np.inf), _image)
case("reduce_window", "own function", _pool(lambda a, b: a + b + a * b, 0), _image)
case(
    "select_and_scatter_add",
    "pool's gradient",
    lambda x, g: jax.vjp(_max_pool, x)[1](g),
    _image,
    real(8, 3, 3, 8),
)
case("select_and_gather_add", "pool's tangent", lambda x, t: jax.jvp(_max_pool, (x,), (t,))[1], _image,
     real(8, 6, 6, 8))  # fmt: skip

# -- shape --------------------------------------------------------------------------------------------------

case("broadcast_in_dim", "scalar", lambda: jnp.full((8, 16), 2.0))
case("broadcast_in_dim", "leading", lambda x: lax.broadcast_in_dim(x, (8, 16), (1,)), real(16))
case("broadcast_in_dim", "extent of one", lambda x: lax.broadcast_in_dim(x, (8, 16), (0, 1)), real(8, 1))
for _name in ("empty", "empty2"):
    case(_name, "rows", lambda: jnp.zeros((8, 16)), stands_in=True)
case("iota", "rows", lambda: lax.broadcasted_iota(jnp.int32, (8, 16), 1))
for _before, _after in [
    ((32,), (8, 4)), ((8, 4), (32,)), ((8, 4, 16), (32, 16)), ((32, 4), (8, 16)), ((8, 16), (8, 1, 16)),
    ((6, 4), (4, 6)), ((6, 4, 8), (4, 6, 8)), ((4, 8, 4, 2), (32, 8)),
]:  # fmt: skip
    case("reshape", f"{_before}->{_after}", functools.partial(jnp.reshape, shape=_after), real(*_before))
case("reshape", "dimensions in another order", lambda x: lax.reshape(x, (6, 32), dimensions=(1, 0, 2)), real(8, 6, 4))
case("transpose", "three", lambda x: jnp.transpose(x, (2, 0, 1)), _cube)
case("squeeze", "middle", lambda x: lax.squeeze(x, (1,)), real(8, 1, 16))
case("bitcast_convert_type", "same width", lambda x: lax.bitcast_convert_type(x, jnp.int32), X)
case("bitcast_convert_type", "narrower", lambda x: lax.bitcast_convert_type(x, jnp.uint8), X)
case(
    "bitcast_convert_type",
    "wider",
    lambda x: lax.bitcast_convert_type(x, jnp.uint32),
    np.ones((8, 16, 4), np.uint8),
)
case("slice", "columns", lambda x: x[:, 4:12], X)
case("slice", "strided", lambda x: lax.slice(x, (0, 0), (8, 16), (1, 2)), X)
case("dynamic_slice", "columns", lambda x, i: lax.dynamic_slice(x, (0, i), (8, 4)), X, np.int32(5))
case(
    "dynamic_update_slice",
    "columns",
    lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
    X,
    real(8, 4),
    np.int32(5),
)
case("pad", "columns", lambda x: jnp.pad(x, ((0, 0), (3, 5))), X)
case("pad", "interior", lambda x: lax.pad(x, np.float32(1), ((0, 0, 0), (-1, 2, 1))), X)
case("rev", "columns", lambda x: lax.rev(x, (1,)), X)
case("roll", "rows", lambda x: roll_p.bind(x, shift=1, axis=0), X)
case("shift", "rows", lambda x: shift_p.bind(x, by=1, axis=0, fill=0), X)
case("shift", "columns back", lambda x: shift_p.bind(x, by=-3, axis=1, fill=-1.5), X)
case("roll", "columns back", lambda x: roll_p.bind(x, shift=13, axis=1), X)
case("concatenate", "columns", lambda x, y: jnp.concatenate([x, y, x], 1), X, Y)
case("split", "columns", lambda x: jnp.split(x, 2, 1), X)
case("tile", "columns", lambda x: jnp.tile(x, (1, 3)), X)
case("stack", "middle", lambda x, y: lax.stack([x, y], 1), X, Y)
case("unstack", "middle", lambda x: lax.unstack(x, 1), real(8, 2, 16))

# -- indexing -----------------------------------------------------------------------------------------------

_table, _ids = real(16, 24), whole(4, 8, below=16)
for _mode in ("fill", "clip", "promise_in_bounds"):
    case("gather", f"embedding, {_mode}", lambda e, i, m=_mode: e.at[i].get(mode=m), _table, _ids)
case("gather", "along an axis", lambda x, i: jnp.take_along_axis(x, i, -1), _cube, whole(4, 8, 2, below=16))
case("gather", "two looked up", lambda x, i, j: x[i, j], real(8, 16, 8), whole(8), whole(8, below=16))
case("gather", "columns", lambda x, i: x[:, i], X, whole(8, below=16))
case("gather", "part of a dimension",
     lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, 0), (4, 16)))(i),
     X, whole(8, below=4))  # fmt: skip
for _name, _method in {"scatter": "set", "scatter-add": "add", "scatter-mul": "mul", "scatter-min": "min",
                       "scatter-max": "max", "scatter-sub": "subtract"}.items():  # fmt: skip
    case(_name, "embedding", lambda e, i, u, m=_method: getattr(e.at[i], m)(u), _table, _ids, real(4, 8, 24))
    case(_name, "two scattered into", lambda x, i, j, u, m=_method: getattr(x.at[i, j], m)(u), real(8, 16, 8),
         whole(8), whole(8, below=16), real(8, 8))  # fmt: skip
case("scatter-add", "embedding's gradient",
     lambda i, g: jax.vjp(lambda e: e[i], jnp.zeros((16, 24)))[1](g), _ids, real(4, 8, 24))  # fmt: skip
case("scatter-add", "along an axis",
     lambda i, g: jax.vjp(lambda x: jnp.take_along_axis(x, i, -1), jnp.zeros((4, 8, 16)))[1](g),
     whole(4, 8, 2, below=16), real(4, 8, 2))  # fmt: skip
case("scatter-add", "columns", lambda x, i, u: x.at[:, i].add(u), X, whole(8, below=16), real(8, 8))
for _mode, _row in (("fill", 9), ("fill", 3), ("clip", 99), ("promise_in_bounds", 5)):
    case("gather", f"an element, {_mode} {_row}",
         lambda x, i, m=_mode: lax.gather(
             x, i, lax.GatherDimensionNumbers((), (0, 1), (0, 1)), (1, 1), mode=m), X, np.array([_row, 9], np.int32))
for _method in ("set", "add"):
    case("scatter" if _method == "set" else "scatter-add", "an element",
         lambda x, u, i, m=_method: getattr(x.at[i[0], i[1]], m)(u), X, np.float32(2), np.array([9, 3], np.int32))
    case("scatter" if _method == "set" else "scatter-add", "an element clipped",
         lambda x, u, i, m=_method: getattr(x.at[i[0], i[1]], m)(u, mode="clip"), X, np.float32(2),
         np.array([99, 3], np.int32))
case("scatter", "part of a dimension", lambda x, u, i: x.at[:, i].set(u), X, real(8), np.int32(3))

# -- random -------------------------------------------------------------------------------------------------

_key = jax.random.key(0)
_keys = jax.random.split(_key, 8)
case("random_bits", "one key", lambda k: jax.random.bits(k, (8, 16)), _key)
case("random_bits", "many keys", jax.vmap(lambda k: jax.random.bits(k, (16,))), _keys)
case("random_split", "one key", lambda k: jax.random.split(k, 8), _key)
case("random_split", "many keys", jax.vmap(lambda k: jax.random.split(k, 8)), _keys)
case("random_seed", "many", jax.vmap(jax.random.key), whole(8))
case("random_clone", "many", jax.random.clone, _keys)
case("random_fold_in", "many", jax.vmap(jax.random.fold_in), _keys, whole(8))
case("random_fold_in", "one key", lambda k: jax.random.fold_in(k, 3), _key)
case("random_gamma", "one key", lambda k, a: jax.random.gamma(k, a), _key, real(8, 16))
case("random_gamma", "many keys", jax.vmap(jax.random.gamma), _keys, real(8, 16))
case(
    "threefry2x32",
    "words",
    jax.extend.random.threefry2x32_p.bind,
    *(whole(8, 16).astype(np.uint32) for _ in range(4)),
)
case("random_wrap", "many", jax.random.wrap_key_data, np.arange(16, dtype=np.uint32).reshape(8, 2))
case("random_unwrap", "many", jax.random.key_data, _keys)
case("rng_bit_generator", "bits", lambda k: lax.rng_bit_generator(k, (8, 16)), np.arange(4, dtype=np.uint32))
case("rng_uniform", "floats", lambda a, b: lax.rng_uniform(a, b, (8, 16)), np.float32(0), np.float32(1))

# -- linear algebra -----------------------------------------------------------------------------------------

_square = real(8, 4, 4)
_positive = np.einsum("bij,bkj->bik", _square, _square) + np.eye(4, dtype=np.float32)
_L = lax.linalg
case("cholesky", "batch", _L.cholesky, _positive)
case("cholesky_update", "one", _L.cholesky_update, np.linalg.cholesky(_positive[0]).T.copy(), real(4))
case("eig", "batch", _L.eig, _square)
case("geqp3", "batch", lambda x: (x, jnp.zeros((8, 4), jnp.int32), jnp.zeros((8, 4))), _square, stands_in=True)
case("geqrf", "batch", lambda x: (x, jnp.zeros((8, 4))), _square, stands_in=True)
case("eigh", "batch", _L.eigh, _positive)
case("hessenberg", "batch", _L.hessenberg, _square)
case("householder_product", "batch", _L.householder_product, _square, real(8, 4))
case("lu", "batch", _L.lu, _positive)
case("lu_pivots_to_permutation", "batch", lambda p: _L.lu_pivots_to_permutation(p, 4), whole(8, 4, below=4))
case("ormqr", "batch", _L.ormqr, _square, real(8, 4), real(8, 4, 4))
case("qr", "batch", _L.qr, _square)
case("schur", "batch", _L.schur, _square)
case("svd", "batch", lambda x: _L.svd(x, full_matrices=False), real(8, 6, 4))
case("symmetric_product", "batch", _L.symmetric_product, real(8, 4, 6), _positive)
case(
    "triangular_solve",
    "batch",
    lambda a, b: _L.triangular_solve(a, b, left_side=True),
    _positive,
    real(8, 4, 8),
)
case("tridiagonal", "batch", _L.tridiagonal, _positive)
case(
    "tridiagonal_solve", "batch", _L.tridiagonal_solve, real(8, 4), real(8, 4) + 4, real(8, 4), real(8, 4, 2)
)
case("fft", "rows", jnp.fft.fft, X + 1j * Y)
case("fft", "real rows", jnp.fft.rfft, X)

# -- the rest -----------------------------------------------------------------------------------------------

case("sharding_constraint", "left open", lambda x: x, _cube, stands_in=True, params={"sharding": None})
case("name", "residual", lambda x: checkpoint_name(x, "kept"), X)
case("platform_index", "two", lambda: lax.platform_dependent(cpu=lambda: 1, default=lambda: 2))
for _name in ("layout_constraint", "carry_init", "shard_alike", "xla_metadata_value"):
    case(_name, "identity", lambda x: x, _cube, stands_in=True)
case("carry_next", "no result", lambda new, carry: (), _cube, _cube, stands_in=True)
case("while_any", "batch", lambda again: again.any(), np.arange(16) % 3 == 0, stands_in=True)
case("while_test", "predicate", lambda again: (), np.array(True), stands_in=True)
case("cond_join", "two branches", lambda p, x, y: lax.cond(p, lambda: x, lambda: y), np.array(True), X, Y,
     stands_in=True)  # fmt: skip
case("scan_slice", "third", lambda xs: lax.dynamic_index_in_dim(xs, np.int32(3), 0, keepdims=False), _cube,
     stands_in=True)  # fmt: skip
case("scan_stack", "third",
     lambda x: lax.dynamic_update_index_in_dim(jnp.zeros((4, 8, 16)), x, np.int32(3), 0), X,
     stands_in=True)  # fmt: skip
case("optimization_barrier", "two", lambda x, y: lax.optimization_barrier((x, y)), X, real(8))
case("device_put", "two", lambda x: jax.device_put(x), X)
case("pure_callback", "sin", lambda x: jax.pure_callback(np.sin, x, x), X)
case("io_callback", "sin", lambda x: jax.experimental.io_callback(np.sin, x, x), X)
case("debug_callback", "nothing", lambda x: jax.debug.callback(lambda _: None, x), X)
case("debug_print", "array", lambda x: jax.debug.print("{}", x), X)
case(
    "ffi_call",
    "unknown target",
    lambda x: jax.ffi.ffi_call("unknown", jax.ShapeDtypeStruct(x.shape, x.dtype))(x),
    X,
)


@functools.partial(custom_partitioning, static_argnums=(2,))
def _scaled_product(x: Any, y: Any, scale: float) -> Any:
    return jnp.einsum("...ik,kj->...ij", x, y) * scale


_scaled_product.def_partition(
    partition=lambda scale, mesh, shapes, result: (
        mesh, lambda x, y: jnp.einsum("...ik,kj->...ij", x, y) * scale,
        result.sharding, tuple(shape.sharding for shape in shapes)),
    sharding_rule="... i k, k j -> ... i j",
    reduction_factors=("k",),
)  # fmt: skip
case("custom_partitioning", "its author's rule", lambda x, y: _scaled_product(x, y, 0.5), _cube, real(16, 4))


case(
    "pallas_call",
    "copy",
    lambda x: pl.pallas_call(lambda a, b: b.__setitem__(..., a[...]), out_shape=x, interpret=True)(x),
    X,
)


case("tpu_custom_call", "identity", lambda x: x, X, stands_in=True)


def _mapped(x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("one",))
    spec = jax.sharding.PartitionSpec("one")
    return jax.shard_map(lambda y: y + 1, mesh=mesh, in_specs=spec, out_specs=spec)(x)


case("shard_map", "plus one", _mapped, X)
