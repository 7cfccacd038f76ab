"""What XLA for GPU takes products and collectives to last."""

from __future__ import annotations

import pytest

from jaxplan.hardware import load_profile, xla_times
from jaxplan.hardware.xla_times import XlaTimes


def hopper() -> XlaTimes:
    times = xla_times(load_profile("h100"))
    assert times is not None
    return times


@pytest.mark.parametrize("name", ["a100-80", "v100", "k80", "tpu-v5e", "cpu-host"])
def test_there_are_none_for_others(name: str) -> None:
    """XLA schedules for memory alone there: what waits for collectives on an H100 doesn't on an A100."""
    assert xla_times(load_profile(name)) is None


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_those_of_hopper_and_blackwell(name: str) -> None:
    times = xla_times(load_profile(name))
    assert times is not None
    assert {len(rates) for rates in times.products.values()} == {375}
    assert all(len(rates) == 22 for rows in times.collectives.values() for rates in rows.values())
    assert all(sorted(rows) == [2, 4, 8] for rows in times.collectives.values())


def test_a_product_of_the_table_lasts_as_it_says() -> None:
    assert hopper().product_s(1, 256, 256, 256, "bfloat16", 2) == pytest.approx(2 * 256**3 / 6.722e12, rel=1e-3)
    assert hopper().product_s(1, 4096, 4096, 4096, "bfloat16", 2) == pytest.approx(2 * 4096**3 / 780.2e12, rel=1e-3)


def test_between_them_the_nearer_ones_count_more() -> None:
    """XLA takes the gradient of 1600 x 6400 to last longer than that of 6400 x 1600, and puts that off first."""
    wide = hopper().product_s(1, 1600, 6400, 8192, "bfloat16", 2)
    tall = hopper().product_s(1, 6400, 1600, 8192, "bfloat16", 2)
    assert tall < wide < 1.01 * tall


def test_results_of_another_type_are_taken_for_their_bytes() -> None:
    """XLA's own slip: scores in f32 of operands in bf16 last sixty times as long to it."""
    own = hopper().product_s(1, 4096, 4096, 4096, "bfloat16", 2)
    assert hopper().product_s(1, 4096, 4096, 4096, "bfloat16", 4) == pytest.approx(64 * own, rel=1e-2)


def test_collectives_take_the_nearest_rate() -> None:
    times = hopper()
    assert times.collective_s("all_gather", 4, 2**25) == pytest.approx(113e-6, rel=0.01)
    rate = 2**25 / times.collective_s("all_gather", 4, 2**25)
    assert times.collective_s("all_gather", 4, 2**25 * 1.2) == pytest.approx(2**25 * 1.2 / rate)
    assert times.collective_s("all_gather", 64, 2**25) == times.collective_s("all_gather", 8, 2**25)
    assert times.collective_s("all_reduce", 4, 0) == 0
