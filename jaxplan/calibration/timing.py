"""Seconds of a piece of a program: inside a loop, so that no dispatch is timed, on every device at once."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REPEATS = 5
"""Runs of which the fastest counts: other programs only ever add time."""

CALLS = 12
"""The same for single calls, which share the machine with more."""

_LONG_ENOUGH_S = 0.02
"""A loop that takes this long is timed well by any clock."""

_LEAST_TRIPS, _MOST_TRIPS = 8, 4096
"""Of so few iterations the difference of two runs is not yet noise."""

Clock = Callable[[], float]


def host_seconds() -> float:
    """Processor seconds of this process spread over all cores: what forced host devices get when all are at work."""
    return time.process_time() / len(os.sched_getaffinity(0))


def seconds_an_iteration(
    body: Callable[[Any], Any], per_device: Any, mesh: Mesh, clock: Clock = time.perf_counter
) -> float:
    """Seconds of one run of `body` on every device of `mesh` at once.

    Args:
      body: maps arrays of the shapes of `per_device` to others of them; collectives may name the mesh's axes.
      per_device: NumPy arrays, a tree of them, none without dimensions: what each device starts from.
      clock: seconds that count, `host_seconds` for work that other programs would disturb.
    """
    axes = PartitionSpec(mesh.axis_names)

    def loop(x: Any, trips: Any) -> Any:
        return jax.lax.fori_loop(0, trips, lambda _, y: jax.lax.optimization_barrier(body(y)), x)

    def of_length(x: Any, trips: int) -> Any:
        once = partial(loop, trips=trips)
        return jax.shard_map(once, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)(x)

    if _told_in_program(mesh):
        run = jax.jit(of_length, static_argnums=1)
    else:  # an argument, so that XLA can't unroll the loop and fuse its iterations
        run = jax.jit(
            jax.shard_map(loop, mesh=mesh, in_specs=(axes, PartitionSpec()), out_specs=axes, check_vma=False)
        )
    x = _on_each(mesh, per_device)
    trips = _LEAST_TRIPS
    while trips < _MOST_TRIPS and (taken := _fastest(run, x, trips, 1, clock)) < _LONG_ENOUGH_S:
        trips = min(trips * max(4, math.ceil(_LONG_ENOUGH_S / max(taken, 1e-9))), _MOST_TRIPS)
    once, many = _fastest(run, x, 1, REPEATS, clock), _fastest(run, x, trips, REPEATS, clock)
    # the first iteration bears what starting costs; where that drowns in noise, all bear it alike
    return (many - once) / (trips - 1) if many > once else many / trips


def _told_in_program(mesh: Mesh) -> bool:
    """Whether loops are timed whose length is in the program: a GPU asks the host after every iteration of others."""
    return str(mesh.devices.flat[0].platform) != "cpu"


def seconds_a_call(
    body: Callable[[Any], Any], per_device: Any, mesh: Mesh, clock: Clock = time.perf_counter
) -> float:
    """Seconds of one run of `body` on every device of `mesh` at once, called as a training loop calls its step: with
    what the last call returned, donated.  Buffers are allocated for each call, as they aren't in a loop.

    Args: see `seconds_an_iteration`.
    """
    axes = PartitionSpec(mesh.axis_names)
    run = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False), donate_argnums=0
    )
    x = jax.block_until_ready(run(_on_each(mesh, per_device)))
    times = []
    for _ in range(CALLS):
        started = clock()
        x = jax.block_until_ready(run(x))
        times.append(clock() - started)
    return min(times)


def _on_each(mesh: Mesh, per_device: Any) -> Any:
    """`per_device` on each device, joined along the first dimension."""

    def join(local: np.ndarray) -> jax.Array:
        shape = (local.shape[0] * mesh.size, *local.shape[1:])
        along = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return jax.make_array_from_callback(shape, along, lambda _: local)

    return jax.tree.map(join, per_device)


def _fastest(run: Callable[..., Any], x: Any, trips: int, repeats: int, clock: Clock) -> float:
    jax.block_until_ready(run(x, np.int32(trips)))  # compiled before anything is timed
    times = []
    for _ in range(repeats):
        started = clock()
        jax.block_until_ready(run(x, np.int32(trips)))
        times.append(clock() - started)
    return min(times)
