"""Profiles as text: nothing left out, each number in the unit of its name."""

from __future__ import annotations

import dataclasses

import pytest

from jaxplan.cli.hardware_table import profile_page, profiles_table
from jaxplan.hardware import available_profiles, load_profile


@pytest.mark.parametrize("name", available_profiles())
def test_a_page_has_every_number_with_its_source(name: str) -> None:
    profile = load_profile(name)
    lines = profile_page(profile).splitlines()[1:]
    assert len(lines) == len(profile.sources)
    for line, (path, source) in zip(lines, profile.sources.items(), strict=True):
        assert line.startswith(f"{path} ") and line.endswith(source)


def test_numbers_are_shown_in_the_unit_of_their_name() -> None:
    link = dataclasses.replace(load_profile("tpu-v5e").links[0], bytes_per_s=12.5e9, latency_s=3e-6)
    profile = dataclasses.replace(
        load_profile("tpu-v5e"),
        hbm_bytes=3 * 2**30,
        hbm_bytes_per_s=1.5e12,
        peak_flops_per_s={"bf16": 2e14},
        links=(link,),
        sources=dict.fromkeys(
            (
                "hbm_bytes",
                "hbm_bytes_per_s",
                "peak_flops_per_s.bf16",
                f"links.{link.name}.bytes_per_s",
                f"links.{link.name}.latency_s",
            ),
            "here",
        ),
    )
    values = [line.split("  ", 1)[1].strip() for line in profile_page(profile).splitlines()[1:]]
    shown = [" ".join(value.split()[:-1]) for value in values]
    assert shown == ["3.00 GiB", "1500 GB/s", "200 TFLOP/s", "12.5 GB/s", "3 us"]


def test_the_table_has_one_line_a_profile_and_straight_columns() -> None:
    profiles = [load_profile(name) for name in available_profiles()]
    header, *lines = profiles_table(profiles).splitlines()
    assert [line.split()[0] for line in lines] == [profile.name for profile in profiles]
    column = header.index("links")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines)
