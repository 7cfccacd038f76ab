"""The meshes that devices can be: every ordered factorisation is one of them, or has the same links as one."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from jaxplan.hardware import axis_links, load_profile, mesh_shapes


def ordered(number: int, most: int) -> set[tuple[int, ...]]:
    """Ordered products of `number`, by trying all tuples of its divisors."""
    divisors = [d for d in range(2, number + 1) if number % d == 0]
    return {
        sizes
        for count in range(1, most + 1)
        for sizes in itertools.product(divisors, repeat=count)
        if math.prod(sizes) == number
    }


def links(hardware: str, sizes: tuple[int, ...]) -> Counter[object]:
    axes = tuple((f"axis{i}", size) for i, size in enumerate(sizes))
    return Counter(axis_links(load_profile(hardware), axes).values())


@pytest.mark.parametrize("hardware", ["v100", "tpu-v5e", "tpu-v5p", "h100", "cpu-host"])
@pytest.mark.parametrize(
    ("devices", "most_axes"), [(2, 2), (7, 3), (12, 2), (16, 2), (16, 3), (32, 2), (24, 3)]
)
def test_every_assignment_of_axes_to_links_is_there_once(hardware: str, devices: int, most_axes: int) -> None:
    shapes = [
        tuple(size for _, size in axes) for axes in mesh_shapes(load_profile(hardware), devices, most_axes)
    ]
    assert set(shapes) <= ordered(devices, most_axes)
    kinds = [links(hardware, sizes) for sizes in shapes]
    for sizes in ordered(devices, most_axes):
        assert kinds.count(links(hardware, sizes)) == 1


def test_nodes_and_their_gpus_are_not_one_network() -> None:
    # sixteen GPUs in two nodes: which axis joins the nodes matters; eight in one node: no order of axes does
    assert {axes for axes in mesh_shapes(load_profile("v100"), 16, 2)} == {
        (("data", 16),),
        (("data", 8), ("model", 2)),
        (("data", 4), ("model", 4)),
        (("data", 2), ("model", 8)),
    }
    assert len(mesh_shapes(load_profile("v100"), 8, 2)) == 2


def test_one_device_is_a_mesh_too() -> None:
    assert mesh_shapes(load_profile("tpu-v5e"), 1, 3) == ((("data", 1),),)
