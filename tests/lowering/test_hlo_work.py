"""FLOPs read from compiled programs are those of the mathematics, whatever the backend makes of a product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxplan
from jaxplan.lowering.hlo_work import _needed_pairs, compiled_work


def flops_of(compiled: Any) -> float:
    work = compiled_work(compiled.as_text())
    assert work is not None
    return sum(w.flops * w.trips for w in work)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("mk,kn->mn", [(64, 32), (32, 48)]),
        ("bmk,bkn->bmn", [(4, 64, 32), (4, 32, 48)]),
        ("btkgh,bskh->bkgts", [(2, 16, 4, 3, 8), (2, 24, 4, 8)]),
        ("mkl,lkn->nm", [(64, 8, 16), (16, 8, 48)]),
    ],
)
def test_a_product_takes_two_flops_for_each_combination_of_its_indices(
    equation: str, shapes: list[tuple[int, ...]]
) -> None:
    extents = dict(
        zip("".join(equation.split("->")[0].split(",")), [d for s in shapes for d in s], strict=True)
    )
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(lambda a, b: jnp.einsum(equation, a, b)).lower(*arguments).compile()
    assert flops_of(compiled) == 2 * math.prod(extents.values())


def test_a_product_in_a_loop_counts_once_an_iteration() -> None:
    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, h: jnp.tanh(h @ w), x)

    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    (work,) = compiled_work(jax.jit(loop).lower(shape, shape).compile().as_text()) or ()
    assert (work.flops, work.trips) == (2 * 128**3, 5.0)
    assert any("(test_a_product_in_a_loop" in line for line in work.sources)


@given(
    length=st.integers(1, 12), kernel=st.integers(1, 5), stride=st.integers(1, 3), low=st.integers(0, 4),
    lhs_dilate=st.integers(1, 3), rhs_dilate=st.integers(1, 2),
)  # fmt: skip
def test_a_window_counts_only_where_there_is_something_to_multiply(
    length: int, kernel: int, stride: int, low: int, lhs_dilate: int, rhs_dilate: int
) -> None:
    """Against a convolution of ones with ones: each result is the number of products that it is made of."""
    ones = jnp.ones((1, 1, length)), jnp.ones((1, 1, kernel))
    made = jax.lax.conv_general_dilated(
        *ones, (stride,), [(low, low)], lhs_dilation=(lhs_dilate,), rhs_dilation=(rhs_dilate,)
    )
    window = {
        "size": str(kernel), "stride": str(stride), "pad": f"{low}_{low}", "lhs_dilate": str(lhs_dilate),
        "rhs_dilate": str(rhs_dilate),
    }  # fmt: skip
    assert _needed_pairs(length, kernel, made.shape[2], window, 0) == int(made.sum())


def test_products_hidden_in_library_calls_are_not_guessed() -> None:
    text = 'HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} parameter(0)\n  ROOT %c = f32[8]{0} '
    assert compiled_work(text + 'custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"\n}\n') is None
    assert compiled_work(text + "negate(%x)\n}\n") == ()


IMAGES, KERNEL, RESULT = "bf16[8,56,56,64]{3,2,1,0}", "bf16[128,3,3,64]{3,2,1,0}", "bf16[8,28,28,128]{3,2,1,0}"


@pytest.mark.parametrize(
    ("target", "operands", "made"),
    [
        ("convForward", (IMAGES, KERNEL), RESULT),
        ("convBackwardInput", (RESULT, KERNEL), IMAGES),
        ("convBackwardFilter", (IMAGES, RESULT), KERNEL),
    ],
)
def test_cudnn_convolutions_count_what_is_needed(target: str, operands: tuple[str, str], made: str) -> None:
    """As compiled for H100 (jax 0.10.2): the backward calls have the forward's window and labels.  A gradient needs
    the products that the forward convolution needs."""
    text = (
        f"HloModule m\n\nENTRY %main (a: {operands[0]}, b: {operands[1]}) -> {made} {{\n"
        f"  %a = {operands[0]} parameter(0)\n  %b = {operands[1]} parameter(1)\n"
        f"  ROOT %c = ({made}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3 stride=2x2 pad=0_1x0_1}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn${target}"\n}}\n'
    )
    x, w = jnp.ones((1, 56, 56, 1)), jnp.ones((3, 3, 1, 1))
    pairs = float(jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum())
    (work,) = compiled_work(text) or ()
    assert work.flops == 2 * 8 * 64 * 128 * pairs


@pytest.mark.aot_tpu
def test_products_that_a_tpu_writes_as_convolutions_count_the_same(
    tpu_topology: Callable[[str], Any],
) -> None:
    mesh = jaxplan.target("tpu-v5e:2x2").mesh(data=4)
    rows = jax.NamedSharding(mesh, jax.P("data"))

    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.einsum("btkgh,bskh->bkgts", q, k))

    shapes = [
        jax.ShapeDtypeStruct((8, 128, 4, 3, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16),
    ]
    compiled = jax.jit(attend, in_shardings=(rows, rows), out_shardings=rows).lower(*shapes).compile()
    assert "convolution" in compiled.as_text()
    assert flops_of(compiled) == 2 * 8 * 128 * 4 * 3 * 64 * 256 / 4
