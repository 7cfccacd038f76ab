"""Laws of the roofline: it is the largest of its three terms, entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.cost.compute import BOUNDS, bound_by, padding_factor, roofline_seconds
from jaxplan.hardware import available_profiles, load_profile

PROFILES = st.sampled_from(available_profiles())
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64", "int8", "int32", "bool"])
AMOUNTS = st.floats(min_value=0, max_value=1e18)


@given(name=PROFILES, dtype=DTYPES, matmul=st.booleans(), flops=AMOUNTS, size=AMOUNTS)
def test_seconds_are_the_largest_term_and_bound_by_names_it(
    name: str, dtype: str, matmul: bool, flops: float, size: float
) -> None:
    profile = load_profile(name)
    seconds = float(roofline_seconds(flops, size, dtype, profile, matmul=matmul))
    without_flops = float(roofline_seconds(0, size, dtype, profile, matmul=matmul))
    without_bytes = float(roofline_seconds(flops, 0, dtype, profile, matmul=matmul))
    assert seconds == max(without_flops, without_bytes) >= profile.op_overhead_s
    bound = str(bound_by(flops, size, dtype, profile, matmul=matmul))
    assert bound in BOUNDS
    if bound == "flops":
        assert seconds == without_bytes
    elif bound == "hbm":
        assert seconds == without_flops
        assert size > 0
    else:
        assert seconds == profile.op_overhead_s


@given(name=PROFILES, matmul=st.booleans(), amounts=st.tuples(AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS))
def test_more_work_never_takes_less_time(
    name: str, matmul: bool, amounts: tuple[float, float, float, float]
) -> None:
    profile = load_profile(name)
    flops, sizes = sorted(amounts[:2]), sorted(amounts[2:])
    small = roofline_seconds(flops[0], sizes[0], "bfloat16", profile, matmul=matmul)
    assert small <= roofline_seconds(flops[1], sizes[1], "bfloat16", profile, matmul=matmul)


def test_no_product_runs_above_the_datasheet() -> None:
    for name in available_profiles():
        profile = load_profile(name)
        flops, size = 2.0 * 8192**3, 3 * 2.0 * 8192**2
        seconds = float(roofline_seconds(flops, size, "bfloat16", profile, matmul=True))
        assert flops / seconds <= profile.peak_for("bfloat16")
        assert str(bound_by(flops, size, "bfloat16", profile, matmul=True)) == "flops"
        stream_s = float(roofline_seconds(1.0, 1e9, "float32", profile, matmul=False))
        assert 1e9 / stream_s <= profile.hbm_bytes_per_s


def test_arrays_are_priced_entry_by_entry() -> None:
    profile = load_profile("tpu-v5e")
    flops, size = np.array([1e3, 1e12, 1e6]), np.array([1e3, 1e6, 1e9])
    dims = (np.array([64, 512, 16]), np.array([512, 512, 8]), 128)
    seconds = roofline_seconds(flops, size, "bfloat16", profile, matmul=True, dims=dims)
    bounds = bound_by(flops, size, "bfloat16", profile, matmul=True, dims=dims)
    assert list(bounds) == ["overhead", "flops", "hbm"]
    for i in range(3):
        local = (dims[0][i], dims[1][i], 128)
        assert seconds[i] == roofline_seconds(flops[i], size[i], "bfloat16", profile, matmul=True, dims=local)


@given(
    tile=st.sampled_from([8, 32, 64, 128, 256]),
    dims=st.tuples(*[st.integers(min_value=1, max_value=4096)] * 3),
)
def test_padding_is_the_volume_of_the_padded_product(tile: int, dims: tuple[int, int, int]) -> None:
    padded = 1.0
    for dim in dims:
        padded *= tile if dim < tile else dim
    assert float(padding_factor(dims, tile)) * np.prod(dims, dtype=float) == pytest.approx(padded)


def test_cutting_below_the_tile_saves_no_time() -> None:
    """A product that is already one tile wide costs the same with half the columns."""
    profile = load_profile("tpu-v5e")
    tile = profile.matmul_tile
    whole = roofline_seconds(
        2.0 * 8192 * 8192 * tile, 0.0, "bfloat16", profile, matmul=True, dims=(8192, tile, 8192)
    )
    half = roofline_seconds(
        1.0 * 8192 * 8192 * tile, 0.0, "bfloat16", profile, matmul=True, dims=(8192, tile // 2, 8192)
    )
    assert float(half) == pytest.approx(float(whole))
