"""Brings a lowered module into the form in which XLA propagates shardings.

XLA imports a module into Shardy from HLO, where it is no longer what jax lowered: calls are inlined, what a
loop carries unchanged has become a free variable of the loop, and each free variable that has a sharding is
read through a constraint that leaves it open, so that a weight may be gathered once before the loop.  Special
functions of the client's dialect (CHLO) are elementwise operations by then, and some products none (`dots`).
Without these steps propagation finds other shardings than the compiler does. The rest of the import
(tuples, constants) has no part in propagation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .._jax import NameLocation, ir, run_passes
from .choices import CASE, choose_of_two
from .dots import DOT, simplify
from .equal import merge_equal
from .ragged import RAGGED_DOT, state_rule

_NAMED = re.compile(r'loc\((?:fused(?:<[^>]*>)?\[)?"((?:[^"\\]|\\.)*)"(?!:\d)')
_LEGALISED = frozenset(
    f"chlo.{name}"
    for name in (
        "square", "erfc", "erf_inv", "lgamma", "digamma", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh",
        "atanh", "bessel_i1e", "next_after", "zeta", "polygamma",
    )
)  # fmt: skip
"""What XLA writes in elementwise StableHLO before it propagates (compiled for eight CPU devices, jax 0.10.2: each keeps
its operand's sharding, and nothing is gathered); `chlo.erf` and `chlo.top_k` stay as they are."""

_MESH = re.compile(r"<(@[\w$.-]+), ")


def as_xla_imports(module: Any, platform: str = "cpu") -> None:
    """Rewrite `module` in place as XLA for "tpu", "cuda" or "cpu" does; afterwards `@main` stands alone."""
    functions = {
        op.operation.attributes["sym_name"].value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    with module.context:
        inlined: set[str] = set()
        for op in nested(functions["main"]):
            # the name alone, without the traceback: it is read several times, and written out in full each time
            op.location = ir.Location.name(scope_of(op.location))
        _inline_calls("main", functions, inlined)
        # tens of thousands of operations: looked through once for all that is rewritten
        rewritten = _LEGALISED | {"stablehlo.broadcast_in_dim", "stablehlo.while", RAGGED_DOT, DOT, CASE}
        found = [(op.name, op) for op in nested(functions["main"]) if op.name in rewritten]
        for name, op in found:
            if name in _LEGALISED:
                _stand_in(op)
            elif name == RAGGED_DOT:
                state_rule(op)
            elif name == DOT:
                simplify(op, platform)
            elif name == CASE:
                choose_of_two(op, platform)
            elif name == "stablehlo.broadcast_in_dim":
                _reshape_instead(op)
        block = functions["main"].regions[0].blocks[0]
        shardings = _argument_shardings(functions["main"])
        for loop in [op for name, op in found if name == "stablehlo.while"]:
            lifted = _lift_invariants(loop)
            _open(loop, {value: _sharding(value, block, shardings) for value in lifted})
        if platform == "tpu":
            merge_equal(block)
    run_passes(module, ["symbol-dce"])


def scope_of(location: Any) -> str:
    """The name stack in an MLIR location (`"jit(f)/jp7/dot_general"`), `""` when it names only a file."""
    if isinstance(location, NameLocation):
        return str(location.name_str)
    named = _NAMED.match(str(location))
    return named.group(1) if named else ""


def joined(outer: str, inner: str) -> str:
    """The name stack of something named `inner` in a function called at `outer`."""
    if not inner or inner.startswith(outer):
        return inner or outer
    return f"{outer}/{inner}" if outer else inner


def nested(op: Any) -> Iterator[Any]:
    """Every operation inside `op`, in program order."""
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                inner = view.operation
                yield inner
                if len(inner.regions):  # few have any: no generator for each of the others
                    yield from nested(inner)


def _inline_calls(name: str, functions: Mapping[str, Any], inlined: set[str]) -> None:
    """Inline every call in function `name`, callees first."""
    if name in inlined:
        return
    inlined.add(name)
    for call in [op for op in nested(functions[name]) if op.name == "func.call"]:
        callee = call.attributes["callee"].value
        _inline_calls(callee, functions, inlined)
        _inline_call(call, functions[callee].regions[0].blocks[0])


def _inline_call(call: Any, body: Any) -> None:
    scope = scope_of(call.location)
    values = dict(zip(body.arguments, call.operands, strict=True))
    *operations, terminator = body.operations
    for view in operations:
        copy = view.operation.clone(ir.InsertionPoint(call))
        values.update(zip(view.operation.results, copy.results, strict=True))
        for op in (copy, *nested(copy)):
            for i, operand in enumerate(op.operands):
                if operand in values:
                    op.operands[i] = values[operand]
            op.location = ir.Location.name(joined(scope, scope_of(op.location)))
    for result, returned in zip(call.results, terminator.operation.operands, strict=True):
        result.replace_all_uses_with(values.get(returned, returned))
    call.erase()


def _reshape_instead(broadcast: Any) -> None:
    """A broadcast that only adds dimensions of extent 1 is a reshape, which propagates earlier."""
    operand = broadcast.operands[0]
    shape = operand.type.shape
    if not shape:  # a number, as of most
        return
    result = broadcast.results[0]
    if math.prod(shape) != math.prod(result.type.shape):
        return
    reshape = ir.Operation.create(
        "stablehlo.reshape",
        results=[result.type],
        operands=[operand],
        loc=broadcast.location,
        ip=ir.InsertionPoint(broadcast),
    )
    result.replace_all_uses_with(reshape.results[0])
    broadcast.erase()


def _stand_in(op: Any) -> None:
    """One elementwise operation of the same shapes: the passes know no rule for `op` itself and would leave it whole.

    XLA imports it as the elementwise operations that it is made of, a square as a product.  Values don't matter here.
    """
    operands = list(op.operands)
    product = ir.Operation.create(
        "stablehlo.multiply",
        results=[op.results[0].type],
        operands=operands if len(operands) == 2 else operands * 2,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    op.results[0].replace_all_uses_with(product.results[0])
    op.erase()


def _lift_invariants(loop: Any) -> list[Any]:
    """Make the loop read what it carries unchanged from outside; those outside values."""
    condition, body = (region.blocks[0] for region in loop.regions)
    returned = body.operations[len(body.operations) - 1].operation
    lifted = []
    for i, operand in enumerate(list(loop.operands)):
        if returned.operands[i] == body.arguments[i]:
            condition.arguments[i].replace_all_uses_with(operand)
            body.arguments[i].replace_all_uses_with(operand)
            loop.results[i].replace_all_uses_with(operand)
            lifted.append(operand)
    return lifted


def _argument_shardings(function: Any) -> list[str]:
    attributes = function.attributes
    if "arg_attrs" not in attributes:
        return []
    return [str(a["sdy.sharding"]) if "sdy.sharding" in a else "" for a in attributes["arg_attrs"]]


def _sharding(value: Any, entry: Any, shardings: list[str]) -> str:
    """The sharding that `value` has before propagation: an argument's, or a constraint's."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return shardings[ir.BlockArgument(value).arg_number] if owner == entry and shardings else ""
    for name in ("sdy.sharding", "sharding"):
        if name in owner.attributes:
            return str(owner.attributes[name])
    return ""


def _open(loop: Any, shardings: Mapping[Any, str]) -> None:
    """Let the loop read each value that has a sharding through a constraint that any sharding satisfies."""
    opened = {}
    for value, sharding in shardings.items():
        mesh = _MESH.search(sharding)
        if mesh is None:
            continue
        dims = ", ".join("{?}" for _ in value.type.shape)
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[value.type],
            operands=[value],
            attributes={"sharding": ir.Attribute.parse(f"#sdy.sharding<{mesh.group(1)}, [{dims}]>")},
            loc=loop.location,
            ip=ir.InsertionPoint(loop),
        )
        opened[value] = constraint.results[0]
    for op in nested(loop) if opened else ():
        for i, operand in enumerate(op.operands):
            if operand in opened:
                op.operands[i] = opened[operand]
