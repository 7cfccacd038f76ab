"""Measure the devices at hand and write what they achieve as a hardware profile."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..api import plan
from ..errors import ArgumentError
from ..hardware import Profile, dump_profile, load_profile, profile_for_device_kind
from .fit import arithmetic_rate, fitted_link, hidden_share, product_rates, smallest_s, stream_rate
from .measurements import Measurements
from .steps import steps

PROGRAMS = "times what whole training steps keep up of the rates (calibration/steps.py)"


def calibrate(
    out: str | os.PathLike[str],
    *,
    devices: Sequence[Any] | None = None,
    like: str | Path | Profile | None = None,
    name: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure these devices, and write their profile to `out`, a .toml file that `hardware=` takes.

    Every measurement is kept beside it (`out` with the ending .measured.json) as soon as it is there: a second call
    goes on where the first one stopped, and an interrupted one writes the profile of what it has.  What can't be
    measured (memory, the links between nodes, the tile of the matrix unit) is taken from a shipped profile.

    Args:
      devices: of one kind; all of `jax.devices()` by default.  One device: rates alone, its links are not measured.
      like: the profile that fills in; by default the shipped one of this device kind.
      name: of the profile; by default the file's.
      say: is told of each measurement.

    Raises:
      ArgumentError: devices of several kinds.  HardwareError: no shipped profile for this kind and no `like`.
      KeyboardInterrupt: passed on, when the profile of what was measured so far is written.
    """
    found = list(jax.devices() if devices is None else devices)
    kinds = sorted({device.device_kind for device in found})
    if len(kinds) != 1:
        raise ArgumentError(f"devices of several kinds can't have one profile: {', '.join(kinds)}")
    base = profile_for_device_kind(kinds[0], found[0].platform) if like is None else load_profile(like)
    path = Path(out)
    measurements = Measurements(found, path.with_suffix(".measured.json"))
    try:
        measurements.take(say)
    finally:
        profile = measured_profile(base, measurements, name or path.stem)
        path.write_text(dump_profile(profile), encoding="utf-8")
    hidden = hidden_share(measurements.rows)
    if hidden is not None:
        say(
            f"{hidden:.0%} of an all_reduce or a product, whichever is shorter, was hidden behind the other where "
            f"neither waits for the other: options.overlap={hidden:.2f} plans on that"
        )
    return profile


def measured_profile(base: Profile, measurements: Measurements, name: str) -> Profile:
    """`base` with every number that the measurements give."""
    rows, count = measurements.rows, len(measurements.devices)
    kind = measurements.devices[0].device_kind
    source = f"measured by jaxplan calibrate on {count} x {kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    sources, hows = dict(base.sources), dict[str, str]()
    changes: dict[str, Any] = {}

    def set_number(path: str, value: float, how: str) -> float:
        hows[path] = how
        sources[path] = f"{source}: {how}"
        return float(f"{value:.3g}")

    rates = product_rates(rows)
    if rates:
        peaks = dict(base.peak_flops_per_s)
        for dtype, rate in rates.items():
            cls = base.flops_class(dtype)
            if cls is not None:
                peaks[cls] = set_number(f"peak_flops_per_s.{cls}", rate, f"the fastest {dtype} product")
        changes["peak_flops_per_s"] = peaks
        changes["matmul_efficiency"] = set_number(
            "matmul_efficiency", 1.0, "the peaks above are achieved ones"
        )
    stream = stream_rate(rows)
    if stream is not None:
        changes["hbm_bytes_per_s"] = set_number("hbm_bytes_per_s", stream, "streaming in and out")
        changes["hbm_efficiency"] = set_number("hbm_efficiency", 1.0, "the rate above is an achieved one")
        if base.kind == "cpu":
            changes["host_bytes_per_s"] = set_number("host_bytes_per_s", stream, "as hbm_bytes_per_s")
    arithmetic = arithmetic_rate(rows)
    if arithmetic is not None:
        changes["vector_flops_per_s"] = set_number(
            "vector_flops_per_s", arithmetic, "a chain of multiply-adds"
        )
    smallest = smallest_s(rows)
    if smallest is not None:
        changes["op_overhead_s"] = set_number("op_overhead_s", smallest, "products of 8 x 8, one after the other")
    links = list(base.links)
    fit = fitted_link(rows, links[0])
    if fit is not None:
        link, error = fit
        how = f"alpha-beta fit over five kinds of collective and all sizes, median error {error:.0%}"
        numbers: dict[str, Any] = {
            key: set_number(f"links.{link.name}.{key}", getattr(link, key), how)
            for key in ("bytes_per_s", "latency_s", "launch_s", "efficiency")
        }
        links[0] = replace(link, **numbers)
    found = replace(base, name=name, links=tuple(links), sources=sources, **changes)
    share = share_of_rates(found, measurements)
    if share is None:
        return found
    kept_up: dict[str, Any] = {
        key: set_number(key, share * getattr(found, key), f"{hows[key]}, {PROGRAMS}")
        for key in ("matmul_efficiency", "hbm_efficiency", "vector_flops_per_s")
        if key in hows
    }
    return replace(found, sources=sources, **kept_up)


def share_of_rates(profile: Profile, measurements: Measurements) -> float | None:
    """What whole steps keep up of a profile's rates: the geometric mean of predicted over measured seconds, at most 1;
    None if no step was measured."""
    measured = {row["step"]: row["seconds"] for row in measurements.rows if row["what"] == "step"}
    one = Mesh(np.array(measurements.devices[:1]), ("device",))
    logarithms = []
    for name, step in steps(host=measurements.host).items():
        if name in measured:
            planned = plan(step.run, one, step.state, step.batch, donate_argnums=0, hardware=profile)
            logarithms.append(math.log(planned.cost.compute_s / measured[name]))
    return min(math.exp(sum(logarithms) / len(logarithms)), 1.0) if logarithms else None
