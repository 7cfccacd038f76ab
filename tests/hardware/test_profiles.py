"""Profiles: what ships is complete and sourced, and a faulty file is refused by name."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from jaxplan.errors import HardwareError
from jaxplan.hardware import available_profiles, load_profile, profile_for_device_kind

NAMES = available_profiles()
REQUIRED = {
    *("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x", "a100-40", "a100-80", "h100", "h200", "b200"),
    *("v100", "p100", "k80", "rtx-titan", "cpu-host"),
}


def shipped_text(name: str) -> str:
    return (resources.files("jaxplan.hardware") / "profiles" / f"{name}.toml").read_text(encoding="utf-8")


def leaves(table: object, path: str = "") -> dict[str, object]:
    """Every number of a TOML document by its path: an oracle that knows nothing of the loader."""
    found: dict[str, object] = {}
    if isinstance(table, dict):
        if "value" in table:
            return {path: table}
        for key, value in table.items():
            found |= leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(table, list):
        for value in table:
            if isinstance(value, dict):
                found |= leaves(value, f"{path}.{value['name']}")
    return found


def edited(tmp_path: Path, name: str, old: str, new: str) -> Path:
    text = shipped_text(name)
    assert old in text
    path = tmp_path / "machine.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def test_every_promised_machine_ships() -> None:
    assert set(NAMES) >= REQUIRED


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_reaches_the_profile(name: str) -> None:
    profile = load_profile(name)
    numbers = leaves(tomllib.loads(shipped_text(name)))
    assert profile.name == name
    assert set(profile.sources) == set(numbers)
    assert all(len(source) > 6 for source in profile.sources.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_wider_dtype_is_never_faster_and_memory_is_left(name: str) -> None:
    profile = load_profile(name)
    speeds = [profile.peak_for(dtype) for dtype in ("float64", "float32", "bfloat16", "int8")]
    if profile.kind == "gpu" and "bf16" not in profile.peak_flops_per_s:
        assert profile.peak_for("bfloat16") == profile.peak_for("float32")
    assert speeds[0] <= speeds[1] <= speeds[2]
    assert speeds[1] <= speeds[3]
    assert 0 < profile.usable_bytes <= profile.hbm_bytes


def test_a_dtype_runs_on_the_unit_that_jax_uses_by_default() -> None:
    tpu, ampere, volta = load_profile("tpu-v5e"), load_profile("a100-80"), load_profile("v100")
    assert tpu.peak_for("float32") == tpu.peak_flops_per_s["bf16"]
    assert ampere.peak_for("float32") == ampere.peak_flops_per_s["tf32"]
    assert volta.peak_for("float32") == volta.peak_flops_per_s["f32"]
    assert tpu.peak_for("int32") == tpu.vector_flops_per_s
    assert load_profile("h100").peak_for("float8_e4m3fn") == load_profile("h100").peak_flops_per_s["fp8"]


def test_device_kinds_name_one_profile_each() -> None:
    kinds = [kind for name in NAMES for kind in load_profile(name).device_kinds]
    assert len(kinds) == len(set(kinds))
    for name in NAMES:
        for kind in load_profile(name).device_kinds:
            assert profile_for_device_kind(kind, load_profile(name).kind).name == name


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    ("topology", "name"),
    [("v4:2x2x1", "tpu-v4"), ("v5e:2x4", "tpu-v5e"), ("v5p:2x2x2", "tpu-v5p"), ("v6e:4x4", "tpu-v6e")],
)
def test_the_profile_is_found_from_what_libtpu_calls_the_device(topology: str, name: str) -> None:
    pytest.importorskip("libtpu", reason="needs libtpu (extra tpu-aot)")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    assert profile_for_device_kind(devices[0].device_kind, "tpu").name == name


def test_forced_host_devices_are_cpu_host() -> None:
    import jax

    device = jax.devices("cpu")[0]
    assert profile_for_device_kind(device.device_kind, device.platform).name == "cpu-host"


def test_a_slower_machine_of_a_similar_name_is_not_taken_for_the_known_one() -> None:
    with pytest.raises(HardwareError, match=r"'NVIDIA H100 PCIe'.*'NVIDIA H100 80GB HBM3' is h100"):
        profile_for_device_kind("NVIDIA H100 PCIe", "gpu")


def test_an_unknown_name_lists_near_misses_and_all_names() -> None:
    with pytest.raises(HardwareError) as caught:
        load_profile("tpu-v5")
    message = str(caught.value)
    assert "unknown hardware 'tpu-v5'. Did you mean" in message
    assert "tpu-v5e" in message.split("Shipped")[0]
    assert all(name in message for name in NAMES)


def test_a_profile_or_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = edited(tmp_path, "h100", 'name = "h100"', 'name = "mine"')
    mine = load_profile(path)
    assert (mine.name, mine.links) == ("mine", load_profile("h100").links)
    assert load_profile(str(path)) == mine
    assert load_profile(mine) is mine
    with pytest.raises(HardwareError, match=r"absent\.toml can't be read"):
        load_profile(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("hbm_bytes =", "hbm_byte =", r"hbm_bytes: missing"),
        ("hbm_bytes =", "hbm_byte =", r"hbm_byte: unknown key, did you mean hbm_bytes\?"),
        (
            "[peak_flops_per_s]",
            "[peak_flops_per_s]\nfp6 = { value = 1.0 }",
            r"peak_flops_per_s\.fp6: unknown",
        ),
        ('kind = "gpu"', 'kind = "npu"', r"kind: 'npu' is not one of tpu, gpu, cpu"),
        ('kind = "switch"', 'kind = "mesh"', r"links\.nvlink\.kind: 'mesh' is not one of switch, torus"),
        ('kind = "switch"', 'kind = "torus"', r"links\.nvlink\.axes_count: missing"),
        ("matmul_efficiency = { value = 0.7", "matmul_efficiency = { value = 1.7", r"above 0 and at most 1"),
        (
            "matmul_efficiency = { value = 0.7,",
            "matmul_efficiency = { value = true,",
            r"True is not a number",
        ),
        ("matmul_tile = { value = 64", "matmul_tile = { value = 64.5", r"64\.5 is not a whole number"),
        ("op_overhead_s = {", "op_overhead_s = 3e-6 #", r"op_overhead_s: must be \{ value"),
        ('source = "matrix-instruction', 'note = "matrix-instruction', r"matmul_tile: has no source"),
        ("domain_size = {", "domain = {", r"links\.nvlink\.domain_size: missing"),
        ("[[links]]", "[[link]]", r"links: missing, must be \[\[links\]\] tables"),
        ("name =", "name", r"is not TOML"),
    ],
)
def test_a_faulty_file_is_refused_by_file_and_key(tmp_path: Path, old: str, new: str, fault: str) -> None:
    with pytest.raises(HardwareError, match=r"machine\.toml") as caught:
        load_profile(edited(tmp_path, "h100", old, new))
    assert caught.match(fault)


def test_all_faults_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = edited(tmp_path, "h100", "hbm_bytes =", "hbm_byte =")
    path.write_text(path.read_text().replace("op_overhead_s", "op_overhed_s"), encoding="utf-8")
    with pytest.raises(HardwareError) as caught:
        load_profile(path)
    for fault in (
        "hbm_bytes: missing",
        "hbm_byte: unknown",
        "op_overhead_s: missing",
        "op_overhed_s: unknown",
    ):
        assert fault in str(caught.value)


def test_tpu_profiles_say_what_the_calibration_measured() -> None:
    root = Path(__file__).parents[2] / "experiments" / "tpu_calibration"
    targets = json.loads((root / "results.json").read_text(encoding="utf-8"))["targets"]
    assert set(targets) == {name for name in NAMES if load_profile(name).kind == "tpu"}
    for name, measured in targets.items():
        profile = load_profile(name)
        for key in (
            "matmul_efficiency", "hbm_efficiency", "vector_flops_per_s", "op_overhead_s", "tile_s", "on_chip_bytes",
            "matmul_rows", "window_bytes", "window_efficiency",
        ):  # fmt: skip
            assert getattr(profile, key) == pytest.approx(measured[key]), (name, key)
        # a loop keeps what there is room for, less the windows of its products
        assert 0 <= (profile.vector_memory_bytes or 0) - (profile.on_chip_bytes or 0) <= 2**25, name
        assert profile.usable_bytes / 2**30 == pytest.approx(measured["available_hbm_gib"], abs=0.005)
        assert measured["device_kind"] in profile.device_kinds
