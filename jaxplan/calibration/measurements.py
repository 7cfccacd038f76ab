"""What is measured, one entry at a time, kept in a file as soon as it is there."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..errors import ArgumentError
from .steps import Step, steps
from .timing import host_seconds, seconds_a_call, seconds_an_iteration

PRODUCTS = ((512, 512, 512), (2048, 2048, 2048), (8192, 8192, 8192), (8192, 1024, 8192), (16384, 4096, 4096))
"""(m, k, n) of the matrix products on an accelerator; a host's are those of at most `_HOST_SIDE` a side."""

_HOST_SIDE = 1024
_HOST_PRODUCTS = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 512, 256))
DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "collective_permute")
BYTES = tuple(2**power for power in (10, 14, 17, 20, 22, 24, 26))
_HOST_BYTES = tuple(2**power for power in (8, 12, 16, 18, 20, 22, 24))
_STREAM_BYTES = 2**28
_HOST_STREAM_BYTES = 2**26

_CHAIN = 64
"""Multiply-adds on each element: 128 operations for 8 bytes of traffic, more than any memory keeps up with."""

Row = dict[str, Any]


class Measurements:
    """The rows measured so far of one set of devices, and the file that they are in.

    Raises:
      ArgumentError: the file holds rows of another device kind or number of devices.
    """

    def __init__(self, devices: Sequence[Any], path: Path | None) -> None:
        self.devices, self.path = list(devices), path
        self.host = devices[0].platform == "cpu"
        self.header: Row = {
            "device_kind": devices[0].device_kind,
            "devices": len(devices),
            "jax": jax.__version__,
        }
        self.rows: list[Row] = []
        if path is not None and path.exists():
            saved = json.loads(path.read_text(encoding="utf-8"))
            if any(saved.get(key) != self.header[key] for key in ("device_kind", "devices")):
                raise ArgumentError(
                    f"{path} holds measurements of {saved.get('devices')} x {saved.get('device_kind')!r}, here are "
                    f"{len(devices)} x {devices[0].device_kind!r}: give another file, or delete that one"
                )
            self.rows = saved["rows"]

    def take(self, say: Callable[[str], None]) -> None:
        """Measure what is missing; each row is in the file before the next is begun."""
        done = {row["name"] for row in self.rows}
        for name, facts, measure in self._plan():
            if name in done:
                continue
            try:
                seconds = measure()
            except jax.errors.JaxRuntimeError as refused:  # a dtype or a size that this backend does not run
                say(f"{name}: left out, {str(refused).splitlines()[0]}")
                continue
            self.rows.append({"name": name, **facts, "seconds": seconds, "date": time.strftime("%Y-%m-%d")})
            say(f"{name}: {seconds * 1e6:.1f} us")
            if self.path is not None:
                self.path.write_text(json.dumps({**self.header, "rows": self.rows}, indent=1) + "\n", "utf-8")

    def _plan(self) -> Iterator[tuple[str, Row, Callable[[], float]]]:
        mesh = Mesh(np.array(self.devices), ("d",))
        clock = host_seconds if self.host else time.perf_counter
        for dtype in DTYPES[:1] if self.host else DTYPES:
            for m, k, n in _HOST_PRODUCTS if self.host else PRODUCTS:
                yield (
                    f"product {m}x{k}x{n} {dtype}",
                    {"what": "product", "dims": (m, n, k), "dtype": dtype},
                    partial(_product, m, k, n, dtype, mesh, clock),
                )
        size = _HOST_STREAM_BYTES if self.host else _STREAM_BYTES
        yield (
            "stream",
            {"what": "stream", "bytes": 2 * size},
            lambda: seconds_an_iteration(lambda x: x + 1.0, np.ones(size // 4, np.float32), mesh, clock),
        )
        count = 2**14 if self.host else 2**22
        yield (
            "arithmetic",
            {"what": "arithmetic", "flops": 2 * _CHAIN * count},
            lambda: seconds_an_iteration(_arithmetic, np.full(count, 0.25, np.float32), mesh, clock),
        )
        length = 1 if self.host else _CHAIN  # a GPU's loop costs as much as some operations
        yield (
            "smallest",
            {"what": "smallest"},
            lambda: (
                seconds_an_iteration(partial(_smallest, length), np.ones((8, 8), np.float32), mesh, clock) / length
            ),
        )
        for name, step in steps(host=self.host).items():
            yield (
                f"step {name}",
                {"what": "step", "step": name},
                partial(_step, step, mesh, clock),
            )
        yield from self._collectives()

    def _collectives(self) -> Iterator[tuple[str, Row, Callable[[], float]]]:
        total = len(self.devices)
        for n in (n for n in range(2, total + 1) if total % n == 0 and n & (n - 1) == 0):
            mesh = Mesh(np.array(self.devices).reshape(total // n, n), ("other", "d"))
            for kind in KINDS:
                for size in _HOST_BYTES if self.host else BYTES:
                    yield (
                        f"{kind} over {n} of {size} bytes",
                        {"what": "collective", "kind": kind, "devices": n, "bytes": size},
                        partial(_collective, kind, n, size, mesh),
                    )
        if total > 1 and not self.host:  # on a host everything shares the cores: nothing is hidden
            mesh = Mesh(np.array(self.devices), ("d",))
            side = 4096
            for what in ("product", "collective", "both"):
                yield (
                    f"overlap {what}",
                    {"what": "overlap", "how": what},
                    partial(_overlap, what, side, total, mesh),
                )


def _product(m: int, k: int, n: int, dtype: str, mesh: Mesh, clock: Callable[[], float]) -> float:
    """Of (m, k) @ (k, n): half of it and of (m, n) @ (n, k), so that the loop ends with what it began with.

    Random numbers, which switch more transistors than constants do: a GPU under its power limit is the slower for it.
    They are neither constants of the program, which XLA would look at, nor grow: the spectral radius of the two
    matrices' product is one.
    """
    random = np.random.default_rng(0)
    operands = [
        (random.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[0]))).astype(jnp.dtype(dtype))
        for shape in ((m, k), (k, n), (n, k))
    ]

    def body(operands: list[jax.Array]) -> list[jax.Array]:
        x, there, back = operands
        return [(x @ there) @ back, there, back]

    return seconds_an_iteration(body, operands, mesh, clock) / 2


def _smallest(length: int, x: jax.Array) -> jax.Array:
    """Small products one after the other: products, since elementwise operations would become one kernel."""
    small = jnp.full((8, 8), 0.125, jnp.float32)
    for _ in range(length):
        x = jax.lax.optimization_barrier(x @ small)
    return x


def _step(step: Step, mesh: Mesh, clock: Callable[[], float]) -> float:
    return seconds_a_call(lambda state: step.run(state, step.batch), step.state, mesh, clock)


def _arithmetic(x: jax.Array) -> jax.Array:
    y = x
    for _ in range(_CHAIN):
        y = y * x + 0.5
    return y


def _collective(kind: str, n: int, size: int, mesh: Mesh) -> float:
    """`size`: of the larger local buffer, as in `jaxplan.cost.collectives`."""
    items = max(size // 4 // (n if kind == "all_gather" else 1), n)
    return seconds_an_iteration(_body(kind, n), np.ones(items, np.float32), mesh)


def _body(kind: str, n: int) -> Callable[[jax.Array], jax.Array]:
    """From a local operand to one of its shape, with one collective over axis `d` on the way."""
    if kind == "all_reduce":
        return lambda x: jax.lax.psum(x, "d") * (1.0 / n)
    if kind == "all_to_all":
        return lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True)
    if kind == "collective_permute":
        return lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % n) for i in range(n)])
    if kind == "all_gather":  # its larger buffer is the result
        return lambda x: jax.lax.dynamic_slice_in_dim(jax.lax.all_gather(x, "d", tiled=True), 0, x.shape[0])
    return lambda x: jnp.tile(jax.lax.psum_scatter(x, "d", tiled=True) * (1.0 / n), n)


def _overlap(what: str, side: int, n: int, mesh: Mesh) -> float:
    """A product, an all_reduce, or both, neither of which waits for the other."""
    weights = jnp.full((side, side), 1.0 / side, jnp.float32)

    def body(x: jax.Array) -> jax.Array:
        product = x @ weights if what != "collective" else x
        summed = jax.lax.psum(x, "d") * (1.0 / n) if what != "product" else x
        return (summed + product) * 0.5

    return seconds_an_iteration(body, np.ones((side, side), np.float32), mesh)
