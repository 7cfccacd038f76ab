"""Logical axis rules, as Flax and MaxText write them: which mesh axes a logical axis name of a tensor means.

The rules are pairs in order of precedence.  A rule gives its mesh axes to the dimension of its name, unless the
dimension has some already or one of the axes is taken by another dimension of that tensor; a name may have several
rules (`flax.linen.logical_to_mesh_axes`).

A plan decides tensor by tensor, so there may be no rules that say the same: what they can't say is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from .plan import Plan
from .trees import matches

AxisRule = tuple[str, Any]
"""(logical axis name, a mesh axis, a tuple of them, or None for uncut)."""

Names = tuple[str | None, ...]
"""The logical name of each dimension of a tensor; None: it has none."""

_Dims = tuple[tuple[str, ...], ...]
_SHOWN = 3
"""Paths that the text of a conflict lists."""


@dataclass(frozen=True, kw_only=True)
class RuleConflict:
    """A logical name that no rules bring to lie as the plan has it everywhere.

    Attributes:
      name: the logical name; ruled: the mesh axes that the rules give it in these tensors.
      planned: the mesh axes that the plan cuts the dimension over, and the paths of the tensors.
    """

    name: str
    ruled: tuple[str, ...]
    planned: tuple[str, ...]
    paths: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.paths) - _SHOWN} more" if len(self.paths) > _SHOWN else ""
        return (
            f"{self.name!r} would need {_axes_text(self.planned)} for {', '.join(self.paths[:_SHOWN])}{more}; "
            f"the rules give {_axes_text(self.ruled)}"
        )


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """Rules that say what the plan says, and where they don't.

    Attributes:
      rules: for `flax.linen.logical_axis_rules(...)` and `options.axis_rules`.
      conflicts: names of parameters and batch; state_conflicts: of optimizer state, which usually bears its parameters'
        names and may well lie otherwise (ZeRO).
    """

    rules: tuple[AxisRule, ...]
    conflicts: tuple[RuleConflict, ...]
    state_conflicts: tuple[RuleConflict, ...]

    def __str__(self) -> str:
        """YAML as in MaxText's configuration, conflicts as comments."""
        lines = [f"# {conflict}" for conflict in (*self.conflicts, *self.state_conflicts)]
        lines += ["logical_axis_rules: ["]
        for name, axes in self.rules:
            value = "null" if axes is None else f"'{axes}'" if isinstance(axes, str) else str(list(axes))
            lines.append(f"  ['{name}', {value}],")
        return "\n".join([*lines, "]", ""])


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """Tensors of the same names that lie alike."""

    names: Names
    dims: _Dims
    paths: tuple[str, ...]
    bytes: int
    state: bool


def axes_of_rule(rule: AxisRule) -> tuple[str, ...]:
    """The mesh axes of a rule, `()` for None."""
    axes = rule[1]
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def dims_by_rules(names: Sequence[str | None], rules: Sequence[AxisRule]) -> _Dims:
    """The mesh axes of each dimension by the rules, `()` where no rule gives any."""
    dims: dict[int, tuple[str, ...]] = {}
    for rule in rules:
        axes = axes_of_rule(rule)
        if rule[0] in names:
            position = list(names).index(rule[0])
            taken = {axis for dim in dims.values() for axis in dim}
            if position not in dims and taken.isdisjoint(axes):
                dims[position] = axes
    return tuple(dims.get(position, ()) for position in range(len(names)))


def axis_rules(plan: Plan, names: Mapping[str, Sequence[str | None]] | None) -> AxisRules:
    """See `Plan.to_logical_axis_rules`.

    Rules are put in one by one, the one that brings most bytes to lie as planned first, each at the place in the order
    where it brings most, while that gains anything.

    Raises:
      ArgumentError: no names, or names that don't fit their tensor.
    """
    patterns = _patterns(plan, names)
    learnt = [p for p in patterns if not p.state] or patterns
    candidates = sorted(
        {(name, dim) for p in learnt for name, dim in zip(p.names, p.dims, strict=True) if name and dim}
    )
    rules: list[AxisRule] = []
    best = _agreement(learnt, rules)
    while True:
        trials = [
            [*rules[:place], (name, dim[0] if len(dim) == 1 else dim), *rules[place:]]
            for name, dim in candidates
            for place in range(len(rules) + 1)
        ]
        scores = [_agreement(learnt, trial) for trial in trials]
        if not scores or max(scores) <= best:
            break
        best = max(scores)
        rules = trials[scores.index(best)]
    ruled = {rule[0] for rule in rules}
    whole = sorted({name for p in patterns for name in p.names if name and name not in ruled})
    rules += [(name, None) for name in whole]
    return AxisRules(
        rules=tuple(rules),
        conflicts=_conflicts([p for p in patterns if not p.state], rules),
        state_conflicts=_conflicts([p for p in patterns if p.state], rules),
    )


def _patterns(plan: Plan, names: Mapping[str, Sequence[str | None]] | None) -> list[_Pattern]:
    if names is None:
        known = {path: tuple(name or None for name in one) for path, one in plan.logical_axes.items()}
    else:
        known = {
            tensor.path: tuple(one)
            for pattern, one in names.items()
            for tensor in plan.inputs
            if matches(pattern, tensor.path)
        }
    tensors = [tensor for tensor in plan.inputs if tensor.path in known]
    if not tensors:
        raise ArgumentError(
            f"no argument of `{plan.name}` has logical axis names: annotate them (nn.with_logical_partitioning, "
            'nnx.with_partitioning), or give names: plan.to_logical_axis_rules({"params/**/kernel": ("embed", "mlp")})'
        )
    found: dict[tuple[Names, _Dims, bool], list[Any]] = {}
    for tensor in tensors:
        named = known[tensor.path]
        if len(named) != len(tensor.shape) or len(set(named) - {None}) != len([n for n in named if n]):
            raise ArgumentError(
                f"{tensor.path}: the names {named} don't fit {tensor.dtype}{list(tensor.shape)}: one for each "
                "dimension is needed, None for one without, none of them twice"
            )
        found.setdefault((named, tensor.layout.dims, tensor.kind == "optimizer"), []).append(tensor)
    return [
        _Pattern(
            names=named,
            dims=dims,
            state=state,
            bytes=sum(t.bytes for t in alike),
            paths=tuple(t.path for t in alike),
        )
        for (named, dims, state), alike in found.items()
    ]


def _agreement(patterns: Sequence[_Pattern], rules: Sequence[AxisRule]) -> int:
    """Bytes that lie as planned, a tensor's as often as it has dimensions that do."""
    return sum(
        p.bytes * sum(a == b for a, b in zip(dims_by_rules(p.names, rules), p.dims, strict=True))
        for p in patterns
    )


def _conflicts(patterns: Sequence[_Pattern], rules: Sequence[AxisRule]) -> tuple[RuleConflict, ...]:
    found: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for pattern in patterns:
        ruled = dims_by_rules(pattern.names, rules)
        for name, planned, given in zip(pattern.names, pattern.dims, ruled, strict=True):
            if planned != given:
                found.setdefault((name or "a dimension without a name", given, planned), []).extend(
                    pattern.paths
                )
    return tuple(
        RuleConflict(name=name, ruled=ruled, planned=planned, paths=tuple(paths))
        for (name, ruled, planned), paths in found.items()
    )


def _axes_text(axes: Sequence[str]) -> str:
    return "+".join(axes) if axes else "none"
