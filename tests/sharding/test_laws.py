"""What rules promise besides their strategies: linearity, FLOPs, contiguous pieces, no more than Shardy's."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxplan.errors import RuleError
from jaxplan.sharding import cut_locally
from jaxplan.sharding.partitioner import shardy_rules
from jaxplan.sharding.rule import Factors, OpShapes, Rule, RuleBuilder
from jaxplan.sharding.rules import named_unknown, register_rule, registered, registry, rule_for
from jaxplan.sharding.spec import Layout, MeshAxes, layout_of_places
from jaxplan.sharding.strategy import strategies

from .cases import CASES, Case, convolution, real
from .equations import equation

RULES = [(case, rule_for(equation(case).shapes)) for case in CASES]


# -- reshape ------------------------------------------------------------------------------------------------


def block(array: np.ndarray, places: np.ndarray, axes: MeshAxes, device: tuple[int, ...]) -> np.ndarray:
    """The piece of `array` on the device with those mesh coordinates, when it lies as `places` say."""
    size, coordinate = dict(axes), {name: c for (name, _), c in zip(axes, device, strict=True)}
    cuts = []
    for extent, names in zip(array.shape, layout_of_places(places, array.ndim, axes).dims, strict=True):
        index, pieces = 0, 1
        for name in names:  # major first
            index, pieces = index * size[name] + coordinate[name], pieces * size[name]
        cuts.append(slice(index * extent // pieces, (index + 1) * extent // pieces))
    return array[tuple(cuts)]


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with equally many elements: small factors, grouped in two ways, with dimensions of one."""

    def shape(factors: list[int]) -> tuple[int, ...]:
        ends = sorted(draw(st.sets(st.integers(1, len(factors))))) + [len(factors)]
        starts = [0, *ends[:-1]]
        dims = [math.prod(factors[a:b]) for a, b in zip(starts, ends, strict=True)]
        return tuple(dims)

    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))
    return shape(factors), shape(draw(st.permutations(factors)))


@given(regrouped(), st.sampled_from([(("a", 2), ("b", 2)), (("a", 2), ("b", 3)), (("a", 4),)]))
def test_a_reshapes_strategies_keep_every_element_on_its_device(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], axes: MeshAxes
) -> None:
    before, after = shapes
    rule = rule_for(OpShapes(primitive="reshape", params={}, operands=(before,), results=(after,)))
    elements = np.arange(math.prod(before))
    found = strategies(rule, axes)
    for s in range(len(found)):
        for device in itertools.product(*(range(size) for _, size in axes)):
            mine = block(elements.reshape(before), found.operands[0][s], axes, device)
            made = block(elements.reshape(after), found.results[0][s], axes, device)
            assert mine.ravel().tolist() == made.ravel().tolist(), (rule, found.factors[s], device)


@given(st.lists(st.integers(2, 5), min_size=2, max_size=4))
def test_a_reshape_that_only_merges_can_be_cut_at_every_factor(shape: list[int]) -> None:
    merged = (math.prod(shape),)
    rule = rule_for(OpShapes(primitive="reshape", params={}, operands=(tuple(shape),), results=(merged,)))
    assert [rule.sizes[f] for f in rule.results[0][0]] == shape


# -- what the planner builds on -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c, rule in RULES if rule.linear and equation(c).operands], ids=str)
def test_a_linear_rule_is_of_a_linear_operation(case: Case) -> None:
    """A pending sum may pass: the operation on the parts, added, is the operation on the whole."""
    eq = equation(case)
    random = np.random.default_rng(1)
    first = [random.normal(size=x.shape).astype(x.dtype) for x in eq.operands]
    second = [np.asarray(x) - part for x, part in zip(eq.operands, first, strict=True)]
    together, one, two = (eq.fn(*parts) for parts in (eq.operands, first, second))
    for whole, a, b in zip(together, one, two, strict=True):
        np.testing.assert_allclose(np.asarray(a) + np.asarray(b), whole, rtol=1e-4, atol=1e-4)


def test_adding_a_number_is_not_linear() -> None:
    shapes = OpShapes(primitive="add", params={}, operands=((8,), ()), results=((8,),))
    assert not rule_for(shapes).linear


def test_a_source_reads_no_tensor() -> None:
    sources = [(case, rule) for case, rule in RULES if rule.source]
    assert {case.primitive for case, _ in sources} == {"broadcast_in_dim", "iota", "empty", "empty2"}
    assert all(dims == () for _, rule in sources for dims in rule.operands)


MATRIX = [c for c in CASES if c.primitive == "dot_general"]
UNPADDED = [
    Case(
        primitive="conv_general_dilated",
        label=f"unpadded {options}",
        fn=functools.partial(convolution, padding="VALID", **options),
        args=(real(8, 6, 6, 8), real(3, 3, 8 // options.get("groups", 1), 16)),
    )
    for options in ({}, {"groups": 4}, {"strides": (3, 3)})
]


@pytest.mark.parametrize("case", MATRIX + UNPADDED, ids=str)
def test_the_flops_of_products_are_those_that_xla_counts(case: Case) -> None:
    eq = equation(case)
    counted = jax.jit(eq.fn).lower(*eq.operands).cost_analysis()["flops"]
    assert rule_for(eq.shapes).flops == counted


PADDED = [
    Case(
        primitive="conv_general_dilated",
        label=f"padded {options}",
        fn=lambda x, w, options=options: jax.lax.conv_general_dilated(  # type: ignore[misc]
            x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        ),
        args=(real(8, 6, 5, 8), real(3, 4, 8 // options.get("feature_group_count", 1), 16)),
    )
    for options in (
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 2), "padding": "SAME", "feature_group_count": 4},
        {"window_strides": (1, 1), "padding": [(2, 3), (1, 2)], "lhs_dilation": (2, 3)},
        {"window_strides": (1, 2), "padding": [(-1, 3), (0, 2)], "lhs_dilation": (3, 1), "rhs_dilation": (2, 1)},
    )
]


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_of_padding_and_gaps_xla_counts_nothing(case: Case) -> None:
    eq = equation(case)
    counted = jax.jit(eq.fn).lower(*eq.operands).cost_analysis()["flops"]
    rule = rule_for(eq.shapes)
    assert rule.flops - rule.empty_flops == counted < rule.flops


def test_points_of_a_kernel_that_meet_no_image_are_no_work() -> None:
    """The gradient, for the kernel, of a convolution's gradient slides images over the kernel."""
    long = Case(
        primitive="conv_general_dilated", label="longer than the image", args=(real(8, 3, 3, 8), real(32, 32, 8, 16)),
        fn=lambda x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), [(32, 32)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    )  # fmt: skip
    eq = equation(long)
    counted = jax.jit(eq.fn).lower(*eq.operands).cost_analysis()["flops"]
    rule = rule_for(eq.shapes)
    assert rule.flops - rule.empty_flops == counted <= rule.flops <= 1.3 * counted


def test_a_carry_has_one_layout() -> None:
    (case,) = (c for c in CASES if c.primitive == "carry_next")
    found = strategies(rule_for(equation(case).shapes), (("a", 2), ("b", 2)))
    assert len(found) > 1
    assert (found.operands[0] == found.operands[1]).all()


def test_what_the_user_pinned_is_the_only_strategy() -> None:
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    axes = tuple(mesh.shape.items())
    layout = Layout(dims=(("model",), ("data",)))
    pinned = jax.sharding.NamedSharding(mesh, layout.spec())
    x = real(8, 16)
    for primitive, fn in {
        "sharding_constraint": lambda x: jax.lax.with_sharding_constraint(x, pinned),
        "shard_map": jax.shard_map(
            lambda x: x + 1, mesh=mesh, in_specs=layout.spec(), out_specs=layout.spec()
        ),
    }.items():
        eqn = next(e for e in jax.jit(fn).trace(x).jaxpr.eqns if e.primitive.name == primitive)
        shapes = OpShapes(primitive=primitive, params=eqn.params, operands=(x.shape,), results=(x.shape,))
        found = strategies(rule_for(shapes), axes)
        assert [layout_of_places(p, 2, axes) for p in (*found.operands[0], *found.results[0])] == [
            layout,
            layout,
        ]


# -- Shardy's own rules -------------------------------------------------------------------------------------

_TENSOR = re.compile(r"\[([^\]]*)\]")
_FACTOR = re.compile(r"z_\d+|[a-z]")


def occurrences(tensors: Iterable[Factors], sizes: tuple[int, ...]) -> dict[int, set[tuple[int, int, int]]]:
    """Of every factor the places (tensor, dimension, size of the factors before it there) where it stands."""
    found = defaultdict(set)
    for t, dims in enumerate(tensors):
        for d, factors in enumerate(dims):
            for position, factor in enumerate(factors):
                found[factor].add((t, d, math.prod(sizes[f] for f in factors[:position])))
    return found


def parsed(text: str) -> Rule:
    """A rule as Shardy prints it, sizes included."""
    size = {name: int(n) for name, n in re.findall(r"(z_\d+|[a-z])=(\d+)", text)}
    index = {name: i for i, name in enumerate(size)}
    sides = [
        tuple(tuple(tuple(index[f] for f in _FACTOR.findall(dim)) for dim in tensor.split(",") if dim.strip())
              for tensor in _TENSOR.findall(side))
        for side in text.partition("{")[0].split("->")
    ]  # fmt: skip

    def group(label: str) -> frozenset[int]:
        match = re.search(label + r"=\{([^}]*)\}", text)
        return frozenset(index[f] for f in _FACTOR.findall(match[1])) if match else frozenset()

    return Rule(
        operands=sides[0], results=sides[1], sizes=tuple(size.values()),
        reduction=group("reduction"), need_replication=group("need_replication"),
    )  # fmt: skip


def shardys(case: Case) -> Rule | None:
    """The rule of the one operation that the case becomes; None where it becomes several or none."""
    eq = equation(case)
    rules = shardy_rules(jax.jit(eq.fn).lower(*eq.operands).as_text())
    theirs = parsed(rules[0][1]) if len(rules) == 1 and "custom" not in rules[0][1] else None
    # a reduction's start value is an operand there and none here
    fits = theirs is not None and (
        len(theirs.operands) in (len(eq.shapes.operands), len(eq.shapes.operands) + 1)
        and list(map(len, theirs.results)) == list(map(len, eq.shapes.results))
    )
    return theirs if fits else None


def test_no_rule_is_bolder_than_shardys() -> None:
    """Dimensions that we cut together Shardy cuts together, and what we sum it sums; what runs in a `shard_map` it is
    not asked."""
    compared = set()
    for case, ours in RULES:
        if case.stands_in or case.primitive == "shard_map" or (theirs := shardys(case)) is None:
            continue
        compared.add(case.primitive)
        shift = len(theirs.operands) - len(ours.operands)  # results count after the operands
        mine = occurrences([*ours.operands, *[()] * shift, *ours.results], ours.sizes)
        other = occurrences([*theirs.operands, *theirs.results], theirs.sizes)
        along = cut_locally(equation(case).eqn)
        unasked = ours.need_replication.union(*(ours.operands[0][dim] for dim in along))
        for factor, places in mine.items():
            if factor in unasked or ours.sizes[factor] == 1:
                continue
            covering = [
                f for f, there in other.items() if places <= there and theirs.sizes[f] == ours.sizes[factor]
            ]
            assert covering, f"{case}: factor {factor} of ours {ours} is not one of Shardy's {theirs}"
            assert not theirs.need_replication & set(covering), (
                f"{case}: {ours} cuts what {theirs} keeps whole"
            )
            assert (factor in ours.reduction) == (covering[0] in theirs.reduction), (
                f"{case}: {ours}, {theirs}"
            )
    assert {
        "dot_general",
        "conv_general_dilated",
        "gather",
        "scatter-add",
        "reduce_sum",
        "reshape",
    } <= compared
    assert len(compared) > 80


# -- the table ----------------------------------------------------------------------------------------------


@pytest.fixture
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


OWN = OpShapes(primitive="my_kernel", params={}, operands=((8, 4), (4, 2)), results=((8, 2),))


def test_what_has_no_rule_is_replicated_and_named() -> None:
    rule = rule_for(OWN)
    assert named_unknown(OWN) and rule.note == "no rule: replicated"
    assert len(strategies(rule, (("a", 2), ("b", 2)))) == 1
    assert rule.flops > 0


@pytest.mark.usefixtures("own_table")
def test_a_users_rule_is_used() -> None:
    register_rule("my_kernel", lambda op: "([i,k],[k,j])->([i,j]) reduction={k}")
    assert "my_kernel" in registered() and not named_unknown(OWN)
    assert str(rule_for(OWN)) == "([i,j],[j,k])->([i,k]) reduction={j}"


@pytest.mark.usefixtures("own_table")
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            lambda op: "([i,k],[k,j])->([i,k])",
            r"`my_kernel`: factor k is 4 long in one place and 2 in another",
        ),
        (lambda op: 3, r"rule function of `my_kernel` returned 3; return a Rule or a text"),
        (
            lambda op: RuleBuilder().rule(operands=[[]], results=[]),
            r"`my_kernel`: 1 operands in the rule, 2 in the",
        ),
    ],
    ids=["sizes clash", "not a rule", "too few operands"],
)
def test_a_users_wrong_rule_is_refused_by_name(rule: object, message: str) -> None:
    register_rule("my_kernel", rule)
    with pytest.raises(RuleError, match=message):
        rule_for(OWN)


@pytest.mark.usefixtures("own_table")
def test_what_is_no_rule_function_is_refused() -> None:
    with pytest.raises(RuleError, match=r"the rule of `my_kernel` is '\(\)->\(\)'; give a function"):
        register_rule("my_kernel", "()->()")
    with pytest.raises(RuleError, match=r"3 is no primitive's name"):
        register_rule(3, lambda op: "()->()")


@pytest.mark.usefixtures("own_table")
def test_a_primitive_has_one_rule_in_the_package() -> None:
    with pytest.raises(RuleError, match=r"`dot_general` has two rules: dot_general and test_a_primitive"):
        registry.register("dot_general")(lambda op: "()->()")
