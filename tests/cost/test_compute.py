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
    rows=st.sampled_from([None, 8, 32]),
    dims=st.tuples(*[st.integers(min_value=1, max_value=4096)] * 3),
)
def test_padding_is_the_volume_of_the_padded_product(
    tile: int, rows: int | None, dims: tuple[int, int, int]
) -> None:
    (less, more), terms = sorted(dims[:2]), dims[2]
    padded = 1.0
    for dim, least in ((less, rows or tile), (more, tile), (terms, tile)):
        padded *= least if dim < least else dim
    assert float(padding_factor(dims, tile, rows)) * np.prod(dims, dtype=float) == pytest.approx(padded)


@pytest.mark.parametrize("name", ["tpu-v5e", "h100"])
def test_cutting_below_the_tile_saves_no_time(name: str) -> None:
    """A sum that is already one tile long costs the same with half the terms."""
    profile = load_profile(name)
    tile = profile.matmul_tile

    def seconds(terms: int) -> float:
        flops = 2.0 * 8192 * 8192 * terms
        return float(
            roofline_seconds(flops, 0.0, "bfloat16", profile, matmul=True, dims=(8192, 8192, terms))
        )

    assert seconds(tile // 2) == pytest.approx(seconds(tile))


def test_few_rows_run_through_a_tpus_weights_as_they_are() -> None:
    """Expected by the compiler, v5e, f32[rows, 3072] @ bf16[3072, 1024] with both in vector memory: 1,792 cycles for 8
    and for 32 rows, 3,328 for 64, 6,400 for 128."""
    profile = load_profile("tpu-v5e")
    assert profile.clock_hz is not None

    def cycles(rows: int) -> float:
        flops = 2.0 * rows * 3072 * 1024
        seconds = roofline_seconds(flops, 0.0, "bfloat16", profile, matmul=True, dims=(rows, 1024, 3072))
        return float(seconds) * (profile.clock_hz or 0.0)

    for rows, expected in ((8, 1792), (32, 1792), (64, 3328), (128, 6400)):
        assert cycles(rows) == pytest.approx(expected, rel=0.1)


def test_a_depthwise_convolution_is_no_matrix_units_on_gpu() -> None:
    """Compiled for H100 (ConvNeXt, 7 x 7 on bf16[16, 28, 28, 256]) it moves 13 MB, which takes as long as its sums."""
    profile, flops = load_profile("h100"), 2.0 * 16 * 28 * 28 * 256 * 49
    dims = (16 * 28 * 28, 1, 49)
    seconds = float(roofline_seconds(flops, 0.0, "bfloat16", profile, matmul=True, dims=dims))
    assert seconds == pytest.approx(flops / profile.vector_flops_per_s / profile.matmul_efficiency)
    padded = flops * padding_factor(dims, profile.matmul_tile) / profile.peak_for("bfloat16")
    assert seconds < float(padded) / 3
    tpu = load_profile("tpu-v5e")
    assert float(roofline_seconds(flops, 0.0, "bfloat16", tpu, matmul=True, dims=dims)) > flops / tpu.vector_flops_per_s
