"""Laws of the collectives' prices, and the ring formulas recomputed step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxplan.cost import CostModel
from jaxplan.cost.collectives import (
    KINDS,
    collective_seconds,
    collective_wire_bytes,
    combined_share,
    most_combined_bytes,
)
from jaxplan.errors import ArgumentError
from jaxplan.hardware import AxisLink, available_profiles, axis_links, load_profile
from jaxplan.lowering import compiled_collectives

MESHES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3)
SIZES = st.integers(min_value=0, max_value=10**12)


def links_of(name: str, sizes: list[int]) -> tuple[AxisLink, ...]:
    axes = tuple((f"x{i}", size) for i, size in enumerate(sizes))
    return tuple(axis_links(load_profile(name), axes).values())


@given(name=st.sampled_from(available_profiles()), sizes=MESHES, buffer=SIZES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    name: str, sizes: list[int], buffer: int
) -> None:
    links = links_of(name, sizes)
    seconds = {kind: float(collective_seconds(kind, buffer, links)) for kind in KINDS}
    wire = {kind: float(collective_wire_bytes(kind, buffer, sizes)) for kind in KINDS}
    for price in (seconds, wire):
        assert price["all_gather"] == price["reduce_scatter"]
        assert price["all_reduce"] == price["reduce_scatter"] + price["all_gather"]
        assert price["all_slice"] == 0


@given(
    name=st.sampled_from(available_profiles()),
    sizes=MESHES,
    kind=st.sampled_from(KINDS),
    small=SIZES,
    large=SIZES,
)
def test_more_bytes_never_cost_less(name: str, sizes: list[int], kind: str, small: int, large: int) -> None:
    links = links_of(name, sizes)
    small, large = sorted((small, large))
    assert collective_seconds(kind, small, links) <= collective_seconds(kind, large, links)
    assert collective_wire_bytes(kind, small, sizes) <= collective_wire_bytes(kind, large, sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_is_priced_entry_by_entry(kind: str) -> None:
    links = links_of("h100", [2, 8])
    buffers = np.array([[0.0, 1e3], [1e6, 1e9]])
    seconds = collective_seconds(kind, buffers, links)
    wire = collective_wire_bytes(kind, buffers, [2, 8])
    assert seconds.shape == wire.shape == buffers.shape
    for index in np.ndindex(buffers.shape):
        assert seconds[index] == collective_seconds(kind, buffers[index], links)
        assert wire[index] == collective_wire_bytes(kind, buffers[index], [2, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_axes_of_one_device_are_free(kind: str) -> None:
    h100 = load_profile("h100")
    alone = tuple(axis_links(h100, (("a", 1), ("b", 1))).values())
    assert collective_seconds(kind, 1e9, alone) == 0
    assert collective_wire_bytes(kind, 1e9, [1, 1]) == 0
    pair = axis_links(h100, (("a", 1), ("b", 8)))
    assert collective_seconds(kind, 1e9, tuple(pair.values())) == collective_seconds(kind, 1e9, (pair["b"],))


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_wire_bytes_of_a_simulated_ring(n: int) -> None:
    """Pass blocks round a ring until everyone has all of them, and count what one device sent."""
    block = 1000.0
    owned = [{rank} for rank in range(n)]
    sent_blocks = 0
    for step in range(n - 1):
        moving = [(rank - step) % n for rank in range(n)]
        assert all(moving[rank] in owned[rank] for rank in range(n))
        for rank in range(n):
            owned[(rank + 1) % n].add(moving[rank])
        sent_blocks += 1
    assert all(len(blocks) == n for blocks in owned)
    assert collective_wire_bytes("all_gather", n * block, [n]) == pytest.approx(sent_blocks * block)


@pytest.mark.parametrize("name", ["tpu-v5e", "tpu-v5p"])
@pytest.mark.parametrize("n", [2, 4, 5, 16])
def test_all_to_all_on_a_torus_is_bounded_by_its_busiest_link(name: str, n: int) -> None:
    """Route every pair of devices the short way, count the load of every link."""
    (link,) = links_of(name, [n])
    load = np.zeros((n, 2))
    for source in range(n):
        for target in range(n):
            forward, backward = (target - source) % n, (source - target) % n
            if link.wraparound:
                routes = [(1, forward)] if forward < backward else [(-1, backward)]
                if forward == backward:
                    routes = [(1, forward), (-1, backward)]
            else:
                routes = [(1, target - source)] if target > source else [(-1, source - target)]
            for direction, hops in routes:
                for hop in range(hops):
                    at = (source + direction * hop) % n
                    load[at, 0 if direction > 0 else 1] += 1 / n / len(routes)
    buffer = 1e9
    bandwidth_s = collective_seconds("all_to_all", buffer, [link]) - collective_seconds(
        "all_to_all", 0, [link]
    )
    assert bandwidth_s == pytest.approx(buffer * load.max() / link.direct_bytes_per_s)


def test_the_book_of_scaling_agrees_on_closed_rings() -> None:
    """All-gather V / W, all-to-all a quarter of it, for long rings (scaling-book, Sharded Matrices)."""
    (ring, _) = links_of("tpu-v5e", [16, 16])
    assert ring.wraparound
    whole = 1e10
    gather_s = float(collective_seconds("all_gather", whole, (ring,)))
    assert gather_s == pytest.approx(whole / ring.bytes_per_s, rel=0.1)
    exchange_s = float(collective_seconds("all_to_all", whole / 16, (ring,)))
    assert exchange_s == pytest.approx(gather_s / 4, rel=0.1)


def test_two_axes_of_a_torus_gather_twice_as_fast_as_one() -> None:
    links = links_of("tpu-v5e", [16, 16])
    one = collective_seconds("all_gather", 1e10, links[:1])
    both = collective_seconds("all_gather", 1e10, links)
    assert one / both == pytest.approx(2.0, rel=0.1)


def test_over_nodes_only_the_scattered_share_leaves_the_node() -> None:
    h100 = load_profile("h100")
    links = axis_links(h100, (("data", 2), ("model", 8)))
    both = float(collective_seconds("all_reduce", 1e10, tuple(links.values())))
    inside = float(collective_seconds("all_reduce", 1e10, (links["model"],)))
    outside = float(collective_seconds("all_reduce", 1e10 / 8, (links["data"],)))
    assert both == pytest.approx(inside + outside)
    assert both < float(collective_seconds("all_reduce", 1e10, (links["data"],)))


def test_a_permute_sends_the_buffer_once_at_the_slowest_link() -> None:
    h100 = load_profile("h100")
    links = axis_links(h100, (("data", 2), ("model", 8)))
    seconds = collective_seconds("collective_permute", 1e10, tuple(links.values()))
    assert seconds == collective_seconds("collective_permute", 1e10, (links["data"],))
    assert seconds == pytest.approx(1e10 / links["data"].direct_bytes_per_s, rel=1e-3)
    assert collective_wire_bytes("collective_permute", 1e10, [2, 8]) == 1e10


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"unknown collective 'broadcast': must be one of all_gather"):
        collective_seconds("broadcast", 1.0, links_of("h100", [8]))
    with pytest.raises(ArgumentError, match="unknown collective"):
        collective_wire_bytes("broadcast", 1.0, [8])


def test_sums_over_a_whole_solid_cost_what_an_all_reduce_costs() -> None:
    axes = (("data", 4), ("model", 2))
    profile = load_profile("tpu-v5p")
    links = axis_links(profile, axes)
    model = CostModel(profile=profile, axes=axes, links=tuple(links[name] for name, _ in axes))
    every = ("data", "model")
    assert model.compiled_kind("reduce_scatter", every) == "all_reduce"
    assert model.collective_over("reduce_scatter", 1e8, every) == model.collective_over("all_reduce", 1e8, every)
    for axis in every:
        scattered = model.collective_over("reduce_scatter", 1e8, (axis,))
        assert 2 * scattered == pytest.approx(model.collective_over("all_reduce", 1e8, (axis,)))


@pytest.mark.parametrize(("name", "packed"), [("h100", True), ("tpu-v5e", False)])
def test_the_search_pays_for_the_kernels_that_pack_a_collective(name: str, packed: bool) -> None:
    profile, axes = load_profile(name), (("data", 4), ("model", 1))
    links = axis_links(profile, axes)
    model = CostModel(profile=profile, axes=axes, links=tuple(links[name] for name, _ in axes))

    def packing(kind: str, start_share: float = 1.0) -> float:
        sent_s = model.collective_over(kind, 2.0**16, ("data",), start_share=start_share)
        axes = (0,)
        return float(model.collective(kind, np.array(2.0**16), axes, start_share=start_share)) - sent_s

    kernel_s = profile.op_overhead_s if packed else 0.0
    assert packing("all_to_all") >= profile.op_overhead_s
    assert packing("all_gather") == pytest.approx(model.packing_seconds("all_gather", 2.0**20, ("data",)))
    # a sum by itself is sent as it lies; five that are put into one are taken out of it by one kernel each
    assert packing("all_reduce") == 0
    assert 5 * packing("all_reduce", 1 / 5) == pytest.approx((5 + 1) * kernel_s)
    # what is exchanged is read and written once more, on TPU too
    moved_s = 2 * 2.0**27 / profile.hbm_bytes_per_s / profile.hbm_efficiency
    exchange_s = float(model.packing_seconds("all_to_all", 2.0**27, ("data",)))
    assert moved_s <= exchange_s <= 1.2 * moved_s
    # nothing is sent, nothing is packed
    assert float(model.packing_seconds("all_to_all", 2.0**27, ("model",))) == 0
    assert float(model.collective("all_slice", np.array(2.0**20), (0,))) == 0
    assert float(model.collective("all_gather", np.array(2.0**20), (1,))) == 0


def test_what_is_combined_has_its_size_of_a_start() -> None:
    sizes = np.array([1.0, 5.0, 40.0]) * 2**20
    assert combined_share("reduce_scatter", sizes, "tpu").tolist() == [0.1, 0.5, 1.0]
    assert combined_share("reduce_scatter", sizes, "gpu").tolist() == [1 / 30, 5 / 30, 1.0]
    assert combined_share("collective_permute", sizes, "gpu").tolist() == [1 / 30, 5 / 30, 1.0]
    for kind, platform in (("all_gather", "tpu"), ("collective_permute", "tpu"), ("all_to_all", "gpu")):
        assert combined_share(kind, sizes, platform).tolist() == [1.0, 1.0, 1.0]
        assert most_combined_bytes(kind, platform) == 0


@pytest.mark.aot_tpu
def test_gradients_are_scattered_together_up_to_ten_mebibytes(tpu_topology: Callable[[str], Any]) -> None:
    devices = np.array(tpu_topology("v5e:2x4").devices).reshape(8)
    mesh = Mesh(devices, ("data",))
    cut = NamedSharding(mesh, P("data"))

    def scattered(count: int) -> list[int]:
        """Bytes of each collective, of so many gradients of 4 MiB."""
        weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * count
        rows = jax.ShapeDtypeStruct((4096, 1024), jnp.float32)

        def gradients(weights: Any, xs: Any, y: jax.Array) -> Any:
            return [jax.grad(lambda w, x=x: jnp.vdot(x @ w, y))(w) for w, x in zip(weights, xs, strict=True)]

        whole = NamedSharding(mesh, P())
        step = jax.jit(
            gradients, in_shardings=([whole] * count, [cut] * count, cut), out_shardings=[cut] * count
        )
        text = step.lower(weights, [rows] * count, rows).compile().as_text()
        found = compiled_collectives(text, (("data", 8),))
        return [round(c.bytes) for c in found if c.kind == "reduce_scatter"]

    most = most_combined_bytes("reduce_scatter", "tpu")
    assert scattered(2) == [2 * 2**22] and most >= 2 * 2**22
    assert sorted(scattered(3)) == [2**22, 2 * 2**22] and most < 3 * 2**22
