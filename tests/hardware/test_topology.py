"""Mesh axes on links: which link an axis lands on, and at what rate, counted by hand on small machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.errors import MeshError
from jaxplan.hardware import Link, Profile, available_profiles, axis_links, load_profile, sums_are_whole


def rate(profile: Profile, link: str) -> float:
    (found,) = (entry for entry in profile.links if entry.name == link)
    return found.bytes_per_s * found.efficiency


def link_of(profile: Profile, name: str) -> Link:
    return next(entry for entry in profile.links if entry.name == name)


def test_minor_axes_stay_in_the_node_and_major_ones_leave_it() -> None:
    h100 = load_profile("h100")
    links = axis_links(h100, (("data", 4), ("model", 8)))
    assert (links["model"].link, links["data"].link) == ("nvlink", "infiniband")
    assert links["model"].bytes_per_s == rate(h100, "nvlink")
    # Each GPU of a node is in another "data" group, with its own adapter.
    assert links["data"].bytes_per_s == rate(h100, "infiniband")


def test_an_axis_partly_in_the_node_drives_its_own_adapters_side_by_side() -> None:
    h100 = load_profile("h100")
    # data=4 over 16 GPUs, stride 4: two of a group's devices in each node, so two adapters a node.
    data = axis_links(h100, (("data", 4), ("model", 4)))["data"]
    assert data.link == "infiniband"
    assert data.bytes_per_s == pytest.approx(2 * rate(h100, "infiniband"))
    assert data.direct_bytes_per_s == rate(h100, "infiniband")
    # A flat ring of 4 over 2 nodes: two steps inside nodes, one between them.
    nvlink_s, infiniband_s = link_of(h100, "nvlink").latency_s, link_of(h100, "infiniband").latency_s
    assert data.steps == 3
    assert data.latency_s * data.steps == pytest.approx(2 * nvlink_s + infiniband_s)


def test_all_adapters_of_a_node_together_are_still_bounded_by_its_switch() -> None:
    h100 = load_profile("h100")
    wide = axis_links(h100, (("data", 64),))["data"]
    assert wide.bytes_per_s == min(rate(h100, "nvlink"), 8 * rate(h100, "infiniband"))


def test_an_axis_that_straddles_nodes_unevenly_runs_at_the_slower_link() -> None:
    h100 = load_profile("h100")
    odd = axis_links(h100, (("data", 4), ("model", 6)))["model"]
    assert (odd.link, odd.bytes_per_s) == ("infiniband", rate(h100, "infiniband"))


@pytest.mark.parametrize(
    ("name", "axes", "closed"),
    [
        ("tpu-v5e", (("data", 16), ("model", 16)), {"data", "model"}),
        ("tpu-v5e", (("data", 2), ("model", 16)), {"model"}),
        ("tpu-v5e", (("data", 4), ("model", 2)), set()),
        ("tpu-v5e", (("data", 8), ("model", 8)), set()),
        ("tpu-v5p", (("a", 4), ("b", 4), ("c", 4)), {"a", "b", "c"}),
        ("tpu-v5p", (("a", 2), ("b", 2), ("c", 4)), set()),
        ("tpu-v4", (("a", 8), ("b", 8), ("c", 6)), {"a", "b"}),
    ],
)
def test_a_torus_dimension_closes_by_its_machines_rule(
    name: str, axes: tuple[tuple[str, int], ...], closed: set[str]
) -> None:
    profile = load_profile(name)
    links = axis_links(profile, axes)
    assert {axis for axis, link in links.items() if link.wraparound} == closed
    for axis, link in links.items():
        assert link.bytes_per_s == rate(profile, "ici") * (2 if axis in closed else 1)
        assert link.steps == (link.size // 2 if axis in closed else link.size - 1)


def test_an_axis_longer_than_a_ring_takes_both_dimensions() -> None:
    v5e = load_profile("tpu-v5e")
    whole = axis_links(v5e, (("data", 256),))["data"]
    assert whole.bytes_per_s == 2 * 2 * rate(v5e, "ici")
    assert whole.steps == 8 + 8


def test_a_third_axis_on_two_dimensions_shares_links_with_the_axis_below_it() -> None:
    v5e = load_profile("tpu-v5e")
    links = axis_links(v5e, (("a", 2), ("b", 2), ("c", 2)))
    assert links["b"].bytes_per_s == links["c"].bytes_per_s == rate(v5e, "ici")
    assert links["a"].bytes_per_s == rate(v5e, "ici") / 2


def test_beyond_the_slice_is_the_data_centre_network() -> None:
    v5e = load_profile("tpu-v5e")
    links = axis_links(v5e, (("slice", 2), ("data", 16), ("model", 16)))
    assert links["slice"].link == "dcn"
    assert links["slice"].bytes_per_s == rate(v5e, "dcn")
    assert links["data"].wraparound


def test_the_two_devices_of_a_tpu7x_chip_share_its_links() -> None:
    v7x = load_profile("tpu-v7x")
    pair = axis_links(v7x, (("data", 4), ("model", 2)))
    assert pair["model"].link == "die-to-die"
    assert pair["data"].bytes_per_s == rate(v7x, "ici")
    assert axis_links(v7x, (("data", 8),))["data"].bytes_per_s == 2 * rate(v7x, "ici")


def test_an_axis_of_one_device_takes_no_steps() -> None:
    for name in available_profiles():
        assert axis_links(load_profile(name), (("data", 1), ("model", 2)))["data"].steps == 0


def test_a_faulty_mesh_is_named() -> None:
    with pytest.raises(MeshError, match=r"mesh data=2, data=0: axis 'data' is named twice; axis 'data' has"):
        axis_links(load_profile("h100"), (("data", 2), ("data", 0)))


@given(
    name=st.sampled_from(available_profiles()),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=4),
)
def test_no_axis_is_faster_than_the_links_or_slower_than_the_slowest_shared(
    name: str, sizes: list[int]
) -> None:
    profile = load_profile(name)
    axes = tuple((f"x{i}", size) for i, size in enumerate(sizes))
    links = axis_links(profile, axes)
    assert list(links) == [axis for axis, _ in axes]
    fastest = max(
        entry.bytes_per_s * entry.efficiency * (2 * (entry.axes_count or 1) if entry.kind == "torus" else 1)
        for entry in profile.links
    )
    for axis, size in axes:
        assert links[axis].size == size
        assert 0 < links[axis].bytes_per_s <= fastest * 2
        assert links[axis].steps <= max(0, size - 1)
        assert links[axis].latency_s > 0


@pytest.mark.parametrize(
    ("name", "scattered", "whole"),
    [("tpu-v5e", (4, 8, 32, 128), (16, 64, 256)), ("tpu-v6e", (4, 8, 32), (16, 64)), ("tpu-v5p", (4,), (8, 16, 64))],
)
def test_sums_over_a_whole_square_or_a_whole_solid_are_not_scattered(
    name: str, scattered: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    """As compiled for slices of those sizes by libtpu 0.0.42.1."""
    profile = load_profile(name)
    assert not any(sums_are_whole(profile, devices) for devices in scattered)
    assert all(sums_are_whole(profile, devices) for devices in whole)


def test_a_switch_scatters_every_sum() -> None:
    assert not any(sums_are_whole(load_profile("h100"), devices) for devices in (4, 8, 16, 64))
