"""Sharding rules: how the dimensions of an operation's operands and results hang together.

A rule gives every dimension one or more *factors* (Shardy's notation, `([i,k],[k,j])->([i,j]) reduction={k}`):
dimensions that share a factor are cut together.  Strategies, FLOPs and bytes all follow from it.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import RuleError
from .halo import Halo
from .merge import Merge

Factors = tuple[tuple[int, ...], ...]
"""For each dimension of one tensor its factors, major first; `()` for a dimension that no axis can cut."""


FixedDims = tuple[tuple[str, ...] | None, ...]
"""For each dimension of one tensor the mesh axes that must cut it, by name; None leaves the dimension open."""

FixedSides = tuple[tuple[FixedDims, ...], tuple[FixedDims, ...]]
"""The demands on every operand, and on every result."""


@dataclass(frozen=True, kw_only=True)
class OpShapes:
    """What a rule may look at: the primitive, its parameters, and the shapes and dtypes around it.

    `equation` is the jaxpr's own, where there is one: what has no rule is lowered from it.
    """

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    operand_dtypes: tuple[str, ...] = ()
    result_dtypes: tuple[str, ...] = ()
    equation: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The factor rule of one operation at given shapes.

    Attributes:
      operands, results: the factors of every dimension of every tensor.
      sizes: the extent of each factor.
      reduction: factors summed away: cutting one leaves the results *unreduced* over the axis.
      need_replication: factors that no axis may cut.
      reducer: what combines the pieces of a reduction factor: "sum" can stay pending through linear
        operations and become a reduce_scatter; "max", "min", "prod", "and", "or" are combined at once.
      follows: elementwise-like: cheap, fused into its neighbours, and laid out like them; no reshard is
        proposed between two operations that follow.
      flops: arithmetic of the whole operation (unpartitioned), divided among the cut factors.
      empty_flops: those of them that a convolution makes on padding and in gaps of a dilation: XLA counts none there.
      source: costs nothing and can be made in any layout (iota, a broadcast scalar).
      linear: a pending sum may pass through all operands at once (add) or the only tensor operand.
      fixed: the mesh axes that the user's own code demands on every dimension of every operand, then result (a
        shard_map, a sharding constraint), None for a dimension that it leaves open: the operation's only strategies on
        a mesh that has these axes.
      halos: what devices exchange where a factor that a window moves along is cut, for each operand of it.
      merges: what devices gather where a factor that an operation goes along is cut.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    sizes: tuple[int, ...]
    reduction: frozenset[int] = frozenset()
    need_replication: frozenset[int] = frozenset()
    reducer: str = "sum"
    follows: bool = False
    flops: float = 0.0
    empty_flops: float = 0.0
    matmul: bool = False
    source: bool = False
    linear: bool = False
    note: str = ""
    fixed: FixedSides | None = None
    halos: tuple[Halo, ...] = ()
    merges: tuple[Merge, ...] = ()

    def verify(self, op: OpShapes) -> None:
        """Check the rule against the operation's shapes.

        Raises:
          RuleError: ranks or extents disagree, or a reduction factor is on a result.
        """
        for side, factors, shapes in (
            ("operand", self.operands, op.operands),
            ("result", self.results, op.results),
        ):
            if len(factors) != len(shapes):
                raise RuleError(
                    f"rule of `{op.primitive}`: {len(factors)} {side}s in the rule, {len(shapes)} in the operation"
                )
            for position, (dims, shape) in enumerate(zip(factors, shapes, strict=True)):
                if len(dims) != len(shape):
                    raise RuleError(
                        f"rule of `{op.primitive}`: {side} {position} has rank {len(shape)} (shape {shape}), "
                        f"the rule gives {len(dims)} dimensions: {self}"
                    )
                for d, (names, extent) in enumerate(zip(dims, shape, strict=True)):
                    product = math.prod(self.sizes[f] for f in names)
                    if names and product > extent:
                        raise RuleError(
                            f"rule of `{op.primitive}`: dimension {d} of {side} {position} is {extent} long, "
                            f"its factors multiply to {product}: {self}"
                        )
                    if side == "result" and self.reduction & set(names):
                        raise RuleError(
                            f"rule of `{op.primitive}`: reduction factor on dimension {d} of result {position}: {self}"
                        )

    def __str__(self) -> str:
        def name(f: int) -> str:
            letters = string.ascii_lowercase[8:] + string.ascii_lowercase[:8]
            return letters[f] if f < len(letters) else f"z_{f - len(letters)}"

        def tensor(dims: Factors) -> str:
            return "[" + ",".join("".join(map(name, d)) if d else "1" for d in dims) + "]"

        text = f"({','.join(map(tensor, self.operands))})->({','.join(map(tensor, self.results))})"
        for label, group in (("reduction", self.reduction), ("need_replication", self.need_replication)):
            if group:
                text += f" {label}={{{','.join(name(f) for f in sorted(group))}}}"
        return text


@dataclass
class RuleBuilder:
    """Makes factors one by one; what a rule function works with.

    >>> b = RuleBuilder(); i, k, j = b.factor(8), b.factor(4), b.factor(2)
    >>> str(b.rule(operands=[[i, k], [k, j]], results=[[i, j]], reduction=[k]))
    '([i,j],[j,k])->([i,k]) reduction={j}'
    """

    sizes: list[int] = field(default_factory=list)

    def factor(self, extent: int) -> int:
        """A new factor of that extent."""
        self.sizes.append(int(extent))
        return len(self.sizes) - 1

    def factors(self, shape: tuple[int, ...]) -> list[int]:
        """One new factor for each dimension of `shape`."""
        return [self.factor(extent) for extent in shape]

    def rule(self, *, operands: list[Any], results: list[Any], **attributes: Any) -> Rule:
        """The finished rule.  A dimension is a factor, a tuple of factors (major first), or None (uncuttable)."""

        def dims(tensor: Any) -> Factors:
            return tuple(() if d is None else (d,) if isinstance(d, int) else tuple(d) for d in tensor)

        for key in ("reduction", "need_replication"):
            if key in attributes:
                attributes[key] = frozenset(attributes[key])
        return Rule(
            operands=tuple(map(dims, operands)),
            results=tuple(map(dims, results)),
            sizes=tuple(self.sizes),
            **attributes,
        )


_TENSOR = re.compile(r"\[([^\]]*)\]")


def parse_rule(text: str, op: OpShapes) -> Rule:
    """A rule from Shardy's notation, with the factors' extents taken from the operation's shapes.

    Single letters are factors; `1` is a dimension that no axis may cut; two letters together (`ij`) are a
    merged dimension, allowed when one side tells each factor's extent.

    Raises:
      RuleError: the text can't be read, or it disagrees with the shapes.
    """
    head, _, tail = text.partition("->")
    results_text, _, attributes = tail.partition(")")
    tensors = [_TENSOR.findall(head), _TENSOR.findall(results_text)]
    shapes = [op.operands, op.results]
    if [len(t) for t in tensors] != [len(s) for s in shapes]:
        raise RuleError(
            f"rule {text!r} of `{op.primitive}` has {len(tensors[0])} operands and {len(tensors[1])} results; "
            f"the operation has {len(shapes[0])} and {len(shapes[1])}"
        )
    extent: dict[str, int] = {}
    split: list[list[list[list[str]]]] = []
    for side, side_shapes in zip(tensors, shapes, strict=True):
        split.append([])
        for tensor, shape in zip(side, side_shapes, strict=True):
            dims = [re.findall(r"[a-z]", d) for d in tensor.split(",")] if tensor.strip() else []
            if len(dims) != len(shape):
                raise RuleError(
                    f"rule {text!r} of `{op.primitive}`: [{tensor}] has not the rank of shape {shape}"
                )
            split[-1].append(dims)
            for names, size in zip(dims, shape, strict=True):
                if len(names) == 1 and extent.setdefault(names[0], size) != size:
                    raise RuleError(
                        f"rule {text!r} of `{op.primitive}`: factor {names[0]} is {extent[names[0]]} long in one "
                        f"place and {size} in another"
                    )
    order: dict[str, int] = {}
    for names in (n for side in split for dims in side for n in dims):
        for letter in names:
            if letter not in extent:
                raise RuleError(
                    f"rule {text!r} of `{op.primitive}`: nothing tells how long factor {letter} is"
                )
            order.setdefault(letter, len(order))

    def group(label: str) -> frozenset[int]:
        match = re.search(label + r"=\{([^}]*)\}", attributes)
        letters = re.findall(r"[a-z]", match.group(1)) if match else []
        unknown = [x for x in letters if x not in order]
        if unknown:
            raise RuleError(f"rule {text!r} of `{op.primitive}`: {label} names unknown factors {unknown}")
        return frozenset(order[x] for x in letters)

    sides = [tuple(tuple(tuple(order[x] for x in d) for d in dims) for dims in side) for side in split]
    rule = Rule(
        operands=sides[0],
        results=sides[1],
        sizes=tuple(extent[x] for x in order),
        reduction=group("reduction"),
        need_replication=group("need_replication") | group("permutation"),
        flops=float(math.prod(extent[x] for x in order)),
    )
    rule.verify(op)
    return rule
