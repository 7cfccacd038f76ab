"""Random programs, planned under random prices, pins and options on many meshes, equal their unsharded run.

Prices are random because plans for tiny tensors are otherwise all alike: what is small is replicated.  Under random
prices every strategy of every operation is chosen some time, beside every other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import jaxplan
from jaxplan.api import meshes

from .nests import fill
from .prices import RandomPrices
from .values import Program, Scope, Type, fitted, is_key, is_real

SHAPES = [
    (16,),
    (8, 4),
    (6, 8),
    (4, 3, 8),
    (8, 2, 4),
    (12, 5),
    (2, 8, 2, 4),
    (4, 4),
    (8,),
    (1, 8),
    (7, 4),
    (),
]
MESHES = [{"data": 4, "model": 2}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 3, "model": 2}, {"data": 2, "model": 4},
          {"all": 8}, {"one": 1, "data": 2, "model": 2}]  # fmt: skip


@st.composite
def steps(draw: Callable[..., Any], lines: int, depth: int) -> tuple[Program, int]:
    """A program of (state, batch, key) -> (next state, results), and how many inputs are state."""
    reals = [Type(draw(st.sampled_from(SHAPES)), jnp.float64) for _ in range(draw(st.integers(1, 2)))]
    wholes = [Type(draw(st.sampled_from(SHAPES)), jnp.int32) for _ in range(draw(st.integers(1, 2)))]
    inputs = draw(st.permutations([*reals, *wholes]))
    key = jax.eval_shape(lambda: jax.random.key(0))
    scope = Scope(draw, (*inputs, Type(key.shape, key.dtype)), False, depth)
    with jax.enable_x64(True):
        fill(scope, lines)
    state = draw(st.integers(0, 2))
    program = scope.program([*(scope.choose(scope.latest(3)) for _ in range(state)), *scope.latest(3)])
    return program, state


def function(program: Program, state: int) -> Callable[..., Any]:
    def step(state_leaves: Any, batch: Any) -> Any:
        made = program(*state_leaves, *batch)
        following = [fitted(m, t) for m, t in zip(made[:state], program.inputs[:state], strict=True)]
        return following, list(made[state:])

    return step


def arguments(program: Program, seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    found: list[Any] = []
    for t in program.inputs:
        if is_key(t):
            found.append(jax.random.key(seed))
        elif is_real(t):
            found.append(random.uniform(-1, 1, t.shape))
        else:
            found.append(random.integers(-9, 9, t.shape).astype(t.dtype))
    return found


def random_pins(program: Program, state: int, mesh: Mesh, seed: int) -> dict[str, PartitionSpec]:
    """A layout for some of the arguments."""
    random = np.random.default_rng(seed)
    pins = {}
    for i, t in enumerate(program.inputs):
        if is_key(t) or not t.ndim or random.integers(3):
            continue
        axes = [a for a in mesh.axis_names if random.integers(2)]
        dims: list[tuple[str, ...]] = [()] * t.ndim
        for axis in axes:
            d = int(random.integers(t.ndim))
            size = np.prod([mesh.shape[a] for a in (*dims[d], axis)])
            if t.shape[d] % size == 0:
                dims[d] += (axis,)
        path = f"state_leaves/{i}" if i < state else f"batch/{i - state}"
        pins[path] = PartitionSpec(*(names or None for names in dims))
    return pins


def host_mesh(sizes: dict[str, int]) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))


def compare(expected: Any, found: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for i, (a, b) in enumerate(zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if is_real(a):
            a, b = np.asarray(a), np.asarray(b)
            scale = max(1.0, np.abs(a, where=np.isfinite(a), out=np.zeros_like(a)).max(initial=0))
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-8 * scale, err_msg=f"leaf {i}")
        else:
            np.testing.assert_array_equal(np.asarray(b), np.asarray(a), err_msg=f"leaf {i}")


def check(
    program: Program, state: int, mesh: Mesh, seed: int, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 16 == 0:
        jax.clear_caches()  # the executables of hundreds of programs would fill the memory
    with jax.enable_x64(True), monkeypatch.context() as patch:
        if seed % 4:
            patch.setattr(RandomPrices, "seed", seed)
            patch.setattr(meshes, "CostModel", RandomPrices)
        step = function(program, state)
        leaves = arguments(program, seed)
        args = (leaves[:state], leaves[state:])
        expected = jax.jit(step)(*args)
        options = jaxplan.Options(
            compare_templates=False, search=search, seed=seed, relative_gap=0.1, time_limit_s=20
        )
        sharded = jaxplan.auto_shard(
            step, mesh, options=options, donate_argnums=0, hardware=("tpu-v5e", "h100", "cpu-host")[seed % 3],
            constraints=random_pins(program, state, mesh, seed),
        )  # fmt: skip
        compare(expected, sharded(*args))


def drawn(lines: int, depth: int) -> dict[str, st.SearchStrategy[Any]]:
    return {
        "step": steps(lines=lines, depth=depth),
        "sizes": st.sampled_from(MESHES),
        "seed": st.integers(0, 2**16),
        "search": st.sampled_from(["ilp"] * 8 + ["data", "zero1", "fsdp"]),
    }


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
NOT_SHRUNK = [Phase.explicit, Phase.reuse, Phase.generate]  # every step of it compiles twice
LARGE = drawn(lines=5, depth=2)
PIECES = 20
"""Of the marked suite's 2,000 programs: one is minutes, and an interrupted run goes on at the next (`-k "[7]"`)."""


@settings(max_examples=100, suppress_health_check=QUIET, phases=NOT_SHRUNK)
@given(**drawn(lines=2, depth=1))
def test_a_small_random_program_equals_its_unsharded_run(
    step: tuple[Program, int], sizes: dict[str, int], seed: int, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*step, host_mesh(sizes), seed, search, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(PIECES))
def test_random_programs_equal_their_unsharded_runs(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @seeded(start)
    @settings(
        max_examples=2000 // PIECES, suppress_health_check=QUIET, phases=NOT_SHRUNK, derandomize=False, database=None
    )
    @given(**LARGE)
    def run(step: tuple[Program, int], sizes: dict[str, int], seed: int, search: str) -> None:
        check(*step, host_mesh(sizes), seed, search, monkeypatch)

    run()
