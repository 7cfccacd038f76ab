"""Hardware profiles on disk: one TOML file a machine, read strictly.

Every number stands as `key = { value = 197e12, source = "where it comes from" }`.  A missing key, an
unknown key, a number without a source or out of its range is a `HardwareError` that names the file and the
key, and all offences of a file are reported at once.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import HardwareError
from .profile import FLOPS_CLASSES, Link, Profile

_SHIPPED = resources.files(__package__) / "profiles"

# Numbers of a profile and of a link with the range (low, high] that each must lie in; efficiencies are
# shares.
_INF = float("inf")
_PROFILE_NUMBERS: dict[str, tuple[type, float, float]] = {
    "matmul_efficiency": (float, 0.0, 1.0),
    "matmul_tile": (int, 0, _INF),
    "vector_flops_per_s": (float, 0.0, _INF),
    "hbm_bytes": (int, 0, _INF),
    "reserve_bytes": (int, -1, _INF),
    "hbm_bytes_per_s": (float, 0.0, _INF),
    "hbm_efficiency": (float, 0.0, 1.0),
    "host_bytes_per_s": (float, 0.0, _INF),
    "op_overhead_s": (float, 0.0, 1.0),
}
_KIND_NUMBERS: dict[str, dict[str, tuple[type, float, float]]] = {
    "tpu": {
        "clock_hz": (float, 0.0, _INF),
        "tile_s": (float, 0.0, 1.0),
        "on_chip_bytes": (int, -1, _INF),
        "vector_memory_bytes": (int, -1, _INF),
        "split_vector_memory": (int, -1, 1),
        "result_tables": (float, 0.0, _INF),
        "copied_slices": (int, -1, _INF),
        "slice_bytes": (int, 0, _INF),
        "assigned_efficiency": (float, 0.0, 1.0),
        "assigned_flops_share": (float, 0.0, 1.0),
        "matmul_rows": (int, 0, _INF),
        "window_bytes": (int, 0, _INF),
        "window_efficiency": (float, 0.0, 1.0),
        "scoped_bytes": (int, 2**20, _INF),
        "sparse_core_copies": (int, -1, 1),
        "masks_apart": (int, -1, 1),
        "masked_tokens": (int, -1, _INF),
        "turns_first_layers": (int, -1, 1),
        "late_stacks": (int, -1, 1),
        "gathers_in_products": (int, -1, 1),
        "keeps_erfcs": (int, -1, 1),
        "keeps_drops": (int, -1, 1),
        "keeps_scores": (int, -1, 1),
        "shared_operand_ratio": (float, 0.0, _INF),
        "batched_operand_ratio": (float, 0.0, _INF),
        "rounded_operand_ratio": (float, 0.0, _INF),
        "turned_operand_ratio": (float, 0.0, _INF),
    },
    "gpu": {
        "core_count": (int, 0, _INF),
        "compute_capability": (float, 0.0, _INF),
        "unaligned_flops_share": (float, 0.0, 1.0),
        "unaligned_hbm_share": (float, 0.0, 1.0),
        "unaligned_efficiency": (float, 0.0, 1.0),
        "depthwise_efficiency": (float, 0.0, 1.0),
        "atomic_s": (float, 0.0, 1.0),
    },
}
_LINK_NUMBERS: dict[str, tuple[type, float, float]] = {
    "bytes_per_s": (float, 0.0, _INF),
    "efficiency": (float, 0.0, 1.0),
    "latency_s": (float, 0.0, 1.0),
    "launch_s": (float, 0.0, 1.0),
}
_TORUS_NUMBERS: dict[str, tuple[type, float, float]] = {
    "axes_count": (int, 0, _INF),
    "ring_max": (int, 0, _INF),
    "wrap_multiple": (int, 0, _INF),
    "wrap_min_devices": (int, 0, _INF),
}
_DOMAIN_NUMBER: dict[str, tuple[type, float, float]] = {"domain_size": (int, 1, _INF)}


class _Reader:
    """Takes keys out of a TOML table and remembers everything that is wrong with it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.faults: list[str] = []
        self.sources: dict[str, str] = {}

    def text(self, table: dict[str, Any], where: str, key: str, allowed: tuple[str, ...] = ()) -> str:
        value = table.pop(key, None)
        if not isinstance(value, str) or not value:
            self.faults.append(f"{where}{key}: missing, must be a text")
            return ""
        if allowed and value not in allowed:
            self.faults.append(f"{where}{key}: {value!r} is not one of {', '.join(allowed)}")
        return value

    def number(self, table: dict[str, Any], where: str, key: str, rule: tuple[type, float, float]) -> Any:
        kind, low, high = rule
        entry = table.pop(key, None)
        path = where + key
        if entry is None:
            self.faults.append(f'{path}: missing, must be {{ value = ..., source = "..." }}')
            return kind(1)
        if not isinstance(entry, dict) or "value" not in entry:
            self.faults.append(f'{path}: must be {{ value = ..., source = "..." }}, not {entry!r}')
            return kind(1)
        for extra in sorted(set(entry) - {"value", "source"}):
            self.faults.append(f"{path}.{extra}: unknown key")
        source = entry.get("source")
        if not isinstance(source, str) or not source.strip():
            self.faults.append(f"{path}: has no source; every number says where it comes from")
        else:
            self.sources[path] = source
        value = entry["value"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
            self.faults.append(f"{path}: {value!r} is not {'a whole number' if kind is int else 'a number'}")
            return kind(1)
        if not low < value <= high:
            self.faults.append(f"{path}: {value!r} must be above {low:g} and at most {high:g}")
        return kind(value)

    def left_over(self, table: dict[str, Any], where: str, known: tuple[str, ...]) -> None:
        for key in sorted(table):
            near = difflib.get_close_matches(key, known, n=1)
            self.faults.append(f"{where}{key}: unknown key" + (f", did you mean {near[0]}?" if near else ""))


def _read_link(reader: _Reader, table: dict[str, Any], position: int, outermost: bool) -> Link:
    name = reader.text(table, f"links[{position}].", "name")
    where = f"links.{name or position}."
    kind = reader.text(table, where, "kind", ("switch", "torus"))
    rules = dict(_LINK_NUMBERS)
    if kind == "torus":
        rules |= _TORUS_NUMBERS
    if not outermost:
        rules |= _DOMAIN_NUMBER
    numbers = {key: reader.number(table, where, key, rule) for key, rule in rules.items()}
    if outermost and "domain_size" in table:
        del table["domain_size"]
        reader.faults.append(f"{where}domain_size: the last link joins all devices, so it has no domain_size")
    reader.left_over(table, where, tuple(rules))
    return Link(name=name, kind="torus" if kind == "torus" else "switch", **numbers)


def _parse(text: str, path: str) -> Profile:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"hardware profile {path} is not TOML: {error}") from None
    reader = _Reader(path)
    name = reader.text(table, "", "name")
    kind = reader.text(table, "", "kind", ("tpu", "gpu", "cpu"))
    kinds = table.pop("device_kinds", None)
    if not isinstance(kinds, list) or not all(isinstance(entry, str) and entry for entry in kinds):
        reader.faults.append("device_kinds: must be a list of the strings that jax.Device.device_kind gives")
        kinds = []
    peaks_table = table.pop("peak_flops_per_s", None)
    peaks: dict[str, float] = {}
    if not isinstance(peaks_table, dict) or not peaks_table:
        reader.faults.append(f"peak_flops_per_s: missing, must be a table of {', '.join(FLOPS_CLASSES)}")
    else:
        for key in sorted(set(peaks_table) & set(FLOPS_CLASSES)):
            peaks[key] = reader.number(peaks_table, "peak_flops_per_s.", key, (float, 0.0, _INF))
        reader.left_over(peaks_table, "peak_flops_per_s.", FLOPS_CLASSES)
    rules = _PROFILE_NUMBERS | _KIND_NUMBERS.get(kind, {})
    numbers = {key: reader.number(table, "", key, rule) for key, rule in rules.items()}
    link_tables = table.pop("links", None)
    links: tuple[Link, ...] = ()
    if not isinstance(link_tables, list) or not link_tables:
        reader.faults.append("links: missing, must be [[links]] tables, innermost first")
    else:
        links = tuple(
            _read_link(reader, link, i, outermost=i == len(link_tables) - 1)
            for i, link in enumerate(link_tables)
        )
    domains = [link.domain_size for link in links[:-1] if link.domain_size is not None]
    if any(outer % inner or outer == inner for inner, outer in pairwise(domains)):
        reader.faults.append(
            f"links: domain sizes {domains} must grow outwards, each a multiple of the one before"
        )
    if numbers["reserve_bytes"] >= numbers["hbm_bytes"]:
        reader.faults.append("reserve_bytes: must be less than hbm_bytes")
    reader.left_over(
        table, "", ("name", "kind", "device_kinds", "peak_flops_per_s", "links", *rules)
    )
    if reader.faults:
        raise HardwareError(f"hardware profile {path} is malformed:\n  " + "\n  ".join(reader.faults))
    return Profile(
        name=name,
        kind="tpu" if kind == "tpu" else "gpu" if kind == "gpu" else "cpu",
        device_kinds=tuple(kinds),
        peak_flops_per_s=peaks,
        links=links,
        sources=reader.sources,
        **numbers,
    )


def dump_profile(profile: Profile) -> str:
    """The TOML text that `load_profile` reads back as `profile`."""

    def number(path: str, value: float) -> str:
        return f"{{ value = {value!r}, source = {json.dumps(profile.sources[path])} }}"

    lines = [f"name = {json.dumps(profile.name)}", f'kind = "{profile.kind}"']
    lines.append(f"device_kinds = {json.dumps(list(profile.device_kinds))}")
    rules = _PROFILE_NUMBERS | _KIND_NUMBERS.get(profile.kind, {})
    lines += [f"{key} = {number(key, getattr(profile, key))}" for key in rules]
    lines += ["", "[peak_flops_per_s]"]
    peaks = profile.peak_flops_per_s
    lines += [f"{key} = {number(f'peak_flops_per_s.{key}', peaks[key])}" for key in FLOPS_CLASSES if key in peaks]
    for link in profile.links:
        lines += ["", "[[links]]", f"name = {json.dumps(link.name)}", f'kind = "{link.kind}"']
        for key in (*_LINK_NUMBERS, *_DOMAIN_NUMBER, *_TORUS_NUMBERS):
            value = getattr(link, key)
            if value is not None:
                lines.append(f"{key} = {number(f'links.{link.name}.{key}', value)}")
    return "\n".join(lines) + "\n"


def available_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    names = (entry.name for entry in _SHIPPED.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_profile(name_or_profile: str | Path | Profile) -> Profile:
    """A profile by its shipped name, from a path to a .toml file, or the profile itself.

    Raises:
      HardwareError: no such name (near misses and all names are listed), no such file, or a malformed file.
    """
    if isinstance(name_or_profile, Profile):
        return name_or_profile
    if isinstance(name_or_profile, Path) or str(name_or_profile).endswith(".toml"):
        path = Path(name_or_profile)
        try:
            return _parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise HardwareError(f"hardware profile {path} can't be read: {error}") from None
    names = available_profiles()
    if name_or_profile not in names:
        near = difflib.get_close_matches(str(name_or_profile).lower(), names, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise HardwareError(
            f"unknown hardware {name_or_profile!r}.{hint} Shipped profiles: {', '.join(names)}. "
            "For another machine, pass the path of a .toml profile of your own."
        )
    return _parse(
        (_SHIPPED / f"{name_or_profile}.toml").read_text(encoding="utf-8"), f"{name_or_profile}.toml"
    )


def profile_for_device_kind(device_kind: str, platform: str) -> Profile:
    """The shipped profile of a device, by `jax.Device.device_kind` and `.platform`.

    Kinds are matched exactly: "NVIDIA H100 PCIe" is a slower machine than "NVIDIA H100 80GB HBM3".  Every
    device of platform "cpu" is `cpu-host`.

    Raises:
      HardwareError: no shipped profile lists this kind; names near misses.
    """
    if platform == "cpu":
        return load_profile("cpu-host")
    by_kind = {kind: name for name in available_profiles() for kind in load_profile(name).device_kinds}
    if device_kind in by_kind:
        return load_profile(by_kind[device_kind])
    near = difflib.get_close_matches(device_kind, by_kind, n=3, cutoff=0.5)
    hint = "".join(f" {kind!r} is {by_kind[kind]}." for kind in near)
    raise HardwareError(
        f"no hardware profile for device kind {device_kind!r} (platform {platform!r}).{hint} Pass "
        f"`hardware=` one of {', '.join(available_profiles())}, or the path of a .toml profile of your own."
    )
