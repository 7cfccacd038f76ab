"""Every strategy of every rule, run on fake devices against the unsharded operation; its collectives read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxplan.sharding.rule import Rule
from jaxplan.sharding.rules import registered, rule_for
from jaxplan.sharding.strategy import Strategies, strategies

from .cases import CASES, Case
from .equations import Equation, compile_strategies, equation, plain, run_strategies

# One primitive of each way a factor can stand in a rule, for meshes other than the main one.
REPRESENTATIVE = (
    "add",
    "conv_general_dilated",
    "dot_general",
    "gather",
    "reduce_max",
    "reshape",
    "scatter-add",
)


def host_mesh(*sizes: int) -> Mesh:
    names = ("data", "model", "third")[: len(sizes)]
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def promised(
    case: Case, rule: Rule, found: Strategies, mesh: Mesh, chosen: Sequence[int]
) -> Counter[tuple[str, int]]:
    """The collectives that a rule admits: one all_reduce for each cut reduction factor, over its axes, one
    collective_permute for each side of a halo, and one all_gather of each result that is merged.
    """
    sizes = list(mesh.shape.values())
    counts: Counter[tuple[str, int]] = Counter()
    for s in chosen:
        for factor in rule.reduction & set(found.factors[s].tolist()):
            group = np.prod([size for size, f in zip(sizes, found.factors[s], strict=True) if f == factor])
            counts["all-reduce", int(group)] += len(found.results)
        for halo in rule.halos:
            if halo.factor in found.factors[s]:
                counts["collective-permute", mesh.size] += len(halo.widths)
        for merge in rule.merges:
            group = np.prod([size for size, f in zip(sizes, found.factors[s], strict=True) if f == merge.factor])
            counts["all-gather", int(group)] += len(merge.results) if group > 1 else 0
    return counts


def assert_same(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], what: str) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        if np.issubdtype(mine.dtype, np.integer) or mine.dtype == bool:
            np.testing.assert_array_equal(mine, theirs, err_msg=what)
        else:
            mine, theirs = mine.astype(np.complex128), theirs.astype(np.complex128)
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5, err_msg=what)


def check(case: Case, mesh: Mesh) -> None:
    eq: Equation = equation(case)
    rule = rule_for(eq.shapes)
    found = strategies(rule, tuple(mesh.shape.items()))
    if len(found) == 1:
        assert (found.factors == -1).all(), f"{case}: the one strategy of {rule} is not the replicated one"
        return
    unsharded = tuple(plain(x) for x in jax.jit(eq.fn)(*eq.operands))
    everyone = list(range(len(found)))
    try:
        _compare(case, eq, rule, found, mesh, everyone, unsharded)
    except AssertionError:
        for s in everyone:  # one at a time, to name the one that fails
            _compare(case, eq, rule, found, mesh, [s], unsharded)
        raise


def _compare(
    case: Case, eq: Equation, rule: Rule, found: Strategies, mesh: Mesh, chosen: list[int],
    unsharded: tuple[np.ndarray, ...],
) -> None:  # fmt: skip
    program = run_strategies(eq, found, mesh, chosen)
    what = f"{case}, rule {rule}, factors on {tuple(mesh.shape.items())}: {found.factors[chosen].tolist()}"
    for row in program.results:
        assert_same(row, unsharded, what)
    unpriced = program.collectives - promised(case, rule, found, mesh, chosen)
    assert not unpriced, f"{what}: the rule admits no {dict(unpriced)}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_strategy_gives_the_unsharded_result_with_the_collectives_of_its_rule(case: Case) -> None:
    check(case, host_mesh(4, 2))


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.primitive in REPRESENTATIVE], ids=str)
def test_other_meshes(case: Case, sizes: tuple[int, ...]) -> None:
    check(case, host_mesh(*sizes))


def test_every_registered_primitive_has_a_row() -> None:
    assert registered() == {case.primitive for case in CASES}


@pytest.mark.aot_tpu
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.label in ("depthwise", "grouped", "two of each", "embedding's gradient")],
    ids=str,
)
def test_the_tpu_compiler_needs_only_the_collectives_of_the_rule(case: Case, tpu_topology) -> None:
    mesh = Mesh(np.array(tpu_topology("v5e:2x4").devices).reshape(4, 2), ("data", "model"))
    eq = equation(case)
    rule = rule_for(eq.shapes)
    found = strategies(rule, tuple(mesh.shape.items()))
    for s in range(1, len(found)):
        # by kind alone: this compiler joins two all_reduces over two axes into one over both
        made, admitted = compile_strategies(eq, found, mesh, [s]), promised(case, rule, found, mesh, [s])
        unpriced = Counter(kind for kind, _ in made.elements()) - Counter(
            kind for kind, _ in admitted.elements()
        )
        assert not unpriced, f"{case}, rule {rule}, factors {found.factors[s].tolist()}: {dict(unpriced)}"


def test_a_grouped_kernels_gradient_is_still_summed_over_a_spare_axis() -> None:
    """The reason why plans sum a convolution in batch groups in a shard_map.

    When this fails the partitioner has been mended: let it do so (`sum_of_batch_groups`).
    """
    (case,) = (c for c in CASES if c.label == "depthwise kernel's gradient")
    eq = equation(case)
    mesh = host_mesh(4, 2)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    (cut,) = jax.jit(eq.fn, in_shardings=split, out_shardings=whole)(
        *(jax.device_put(x, split) for x in eq.operands)
    )
    (right,) = jax.jit(eq.fn)(*eq.operands)
    np.testing.assert_allclose(np.asarray(cut), 2 * np.asarray(right), rtol=1e-5)
