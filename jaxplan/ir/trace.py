"""A step and its arguments -> jaxpr -> Graph: the front door of the planner."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .._jax import as_closed, without_dead_code
from ..errors import TraceError
from .common_subexpressions import computed_once
from .fingerprint import fingerprint
from .flatten import Flattener, Stated
from .foreign_mesh import Axes, auto_mesh_of, restated
from .graph import Graph
from .halos import without_halos
from .live_ops import live_ops
from .loop_products import made_before_loops
from .memory_space import on_host, put_one_by_one, returned_to_host, shape_as
from .products import exchanged
from .random_masks import behind_barriers, random_masks
from .rewriting import rewritten
from .rolls import rolled
from .shifts import shifted
from .slices import in_turn
from .third_party import seen_into
from .unit_sums import without_unit_sums
from .whole_fields import of_whole_fields


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of the step's arguments or results: tree path, shape, dtype; whether it is in the host's memory."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    host: bool = False


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced step.

    Attributes:
      name: the function's name.
      jaxpr, consts: the whole step; invars are the leaves of `(args, kwargs)` less the static ones.
      in_tree: treedef of `(dynamic args, dynamic kwargs)`; out_tree: of the result.
      inputs, outputs: the leaves in order.
      graph: the planner's flat view.
      stated_inputs, stated_outputs: by position, the shardings that a `jax.jit` in the step, or around it, states.
    """

    name: str
    jaxpr: Any
    consts: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    graph: Graph
    stated_inputs: Mapping[int, Stated]
    stated_outputs: Mapping[int, Stated]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of program, constants and trees; equal for equal programs in any process of the same jax version.

        Half a second for a program of sixty thousand operations: worked out when it is first asked for.
        """
        return fingerprint(self.jaxpr, self.consts, self.inputs, self.outputs)


_TAKES_HOST = ("device_put", "scan_slice", "carry_init")
"""What reads state in the host's memory where a step means it to be there."""


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    donate_argnums: Sequence[int] = (),
    while_trips: float = 16.0,
    axes: Axes | None = None,
    keep_constraints: bool = True,
    ruled: Collection[str] = (),
    platform: str | None = None,
    masks_apart: bool = False,
) -> Traced:
    """Trace `fn(*args, **kwargs)`; arrays and ShapeDtypeStructs alike, nothing is allocated.

    Args:
      axes: (name, size) of the mesh that `with_sharding_constraint` inside the step is said again on, whatever mesh it
        names, and that a bare PartitionSpec there means; None: as it stands.
      keep_constraints: False leaves all of them out.
      ruled: primitives with a sharding rule; the others are seen through where they are written in jax, if `platform`,
        what the step is lowered for, is given (see `third_party`).
      masks_apart: random masks of what is normalised are made by themselves, see `random_masks`.

    Raises:
      TraceError: state comes back with another shape or dtype, an axis of `pmap`/`shard_map` is unbound, or the step
        computes with what is in the host's memory.
      Any error of the step's own, raised by jax, as it is.
    """
    settings: dict[str, Any] = {
        "static_argnums": static_argnums, "static_argnames": static_argnames, "donate_argnums": donate_argnums,
        "while_trips": while_trips, "axes": axes, "keep_constraints": keep_constraints, "ruled": ruled,
        "platform": platform, "masks_apart": masks_apart,
    }  # fmt: skip
    try:
        found = _trace(fn, args, kwargs, **settings)
    except ValueError as error:
        if "memory_space" not in str(error):
            raise
        names = argument_names(fn, len(args))
        given = _named_leaves([*args, *kwargs.values()], [*names, *kwargs])
        leaves = zip(given, jax.tree.leaves((*args, *kwargs.values())), strict=True)
        there = [path for path, leaf in leaves if on_host(leaf)]
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TraceError(
            f"`{name}` can't be traced: {error}\nNo device computes with what is in the host's memory, and these "
            f"arguments are: {', '.join(there[:8]) or 'none'}"
            f"{f' and {len(there) - 8} more' if len(there) > 8 else ''}. Bring what is computed with over first, by "
            "jax.device_put(x, jax.memory.Space.Device) in the step."
        ) from error
    left = frozenset(i for i, o in found.graph.aliases if found.outputs[o].host and not found.inputs[i].host)
    if not left:
        return found
    # State that the step leaves in the host's memory is there when the next step begins.
    position, static = itertools.count(), positions_of(static_argnums, len(args))

    def moved(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: shape_as(leaf, host=True) if next(position) in left else leaf, tree)

    there = [a if i in static else moved(a) for i, a in enumerate(args)]
    named = {k: v if k in static_argnames else moved(v) for k, v in sorted(kwargs.items())}
    try:
        kept = _trace(fn, there, named, **settings)
    except ValueError as error:
        if "memory_space" not in str(error):
            raise
    else:
        values = {kept.graph.inputs[i] for i in left}
        if all(op.primitive in _TAKES_HOST for op in kept.graph.ops if values.intersection(op.operands)):
            return kept
    return _trace(fn, args, kwargs, **settings, apart=left)  # it is read as it is: no state that stays


def _trace(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, static_argnums: Sequence[int],
    static_argnames: Sequence[str], donate_argnums: Sequence[int], while_trips: float, axes: Axes | None,
    keep_constraints: bool, ruled: Collection[str], platform: str | None, masks_apart: bool,
    apart: Collection[int] = (),
) -> Traced:  # fmt: skip
    """`trace` once; arguments `apart` are no state."""
    name = getattr(fn, "__name__", type(fn).__name__)
    # a wrapper of its own, so that jax's trace cache never hands back what another mesh context left there
    jitted = jax.jit(fn, static_argnums=tuple(static_argnums), static_argnames=tuple(static_argnames))
    try:
        stage = _staged(jitted, args, kwargs, axes)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"`{name}` can't be traced: {error}\nA collective such as lax.pmean(x, 'batch') names an axis of pmap or "
            "shard_map. Remove it: write the step for one device with the global batch, and the planner inserts "
            "the collectives that its plan needs."
        ) from error
    lowered = stage.lojax
    jaxpr, consts = as_closed(lowered.jaxpr)
    # What nothing needs is not lowered by jax either, and some of it can't be (a custom_vjp's tangent).
    jaxpr = without_dead_code(jaxpr)
    jaxpr = jaxpr if platform is None else seen_into(jaxpr, ruled, platform)
    changes = put_one_by_one, exchanged, without_unit_sums, without_halos, rolled, shifted, of_whole_fields, in_turn
    jaxpr = rewritten(jaxpr, (made_before_loops, computed_once, *changes))
    static = positions_of(static_argnums, len(args))
    dynamic_args = tuple(a for i, a in enumerate(args) if i not in static)
    dynamic_kwargs = {k: v for k, v in sorted(kwargs.items()) if k not in static_argnames}
    names = argument_names(fn, len(args))
    dynamic_names = [n for i, n in enumerate(names) if i not in static]
    in_leaves = _named_leaves(dynamic_args, dynamic_names) + _named_leaves(
        tuple(dynamic_kwargs.values()), list(dynamic_kwargs)
    )
    in_tree = jax.tree.structure((dynamic_args, dynamic_kwargs))
    inputs = tuple(_leaf(path, var.aval) for path, var in zip(in_leaves, jaxpr.invars, strict=True))
    out_info = stage.out_info
    out_paths = [_path("result", key) for key, _ in jax.tree_util.tree_leaves_with_path(out_info)]
    outputs = tuple(_leaf(path, atom.aval) for path, atom in zip(out_paths, jaxpr.outvars, strict=True))
    donated = _donated(dynamic_args, [i for i in range(len(args)) if i not in static], donate_argnums, len(args))
    aliases = _aliases(name, dynamic_args, dynamic_names, out_info, inputs, outputs, donated)
    aliases = tuple(pair for pair in aliases if pair[0] not in apart)
    returned = {i: o for i, o in aliases if inputs[i].host and not outputs[o].host}
    jaxpr = returned_to_host(jaxpr, set(returned.values()))
    outputs = tuple(replace(leaf, host=on_host(v.aval)) for leaf, v in zip(outputs, jaxpr.outvars, strict=True))
    restate = None if axes is None else _restating(axes, keep_constraints)
    flattener = Flattener(while_trips, restate)
    graph = _flatten(name, jaxpr, consts, inputs, outputs, aliases, donated, flattener)
    if masks_apart and (masks := random_masks(graph)):
        jaxpr, flattener = behind_barriers(jaxpr, masks), Flattener(while_trips, restate)
        graph = _flatten(name, jaxpr, consts, inputs, outputs, aliases, donated, flattener)
    return Traced(
        name=name,
        jaxpr=jaxpr,
        consts=tuple(consts),
        in_tree=in_tree,
        out_tree=jax.tree.structure(out_info),
        inputs=inputs,
        outputs=outputs,
        graph=_told(graph, flattener.stated),
        stated_inputs={i: flattener.stated[v] for i, v in enumerate(graph.inputs) if v in flattener.stated},
        stated_outputs={o: flattener.stated[v] for o, v in enumerate(graph.outputs) if v in flattener.stated},
    )


def positions_of(argnums: Sequence[int], count: int) -> set[int]:
    """The arguments by position, of `count`, that numbers as `jax.jit` takes them mean; the others come by keyword."""
    return {n % count for n in argnums if -count <= n < count}


def _staged(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Axes | None) -> Any:
    """The traced step; a step that says PartitionSpecs without a mesh, as under `jax.set_mesh`, means the plan's."""
    try:
        return jitted.trace(*args, **kwargs)
    except RuntimeError as error:
        if axes is None or "non-empty mesh" not in str(error):
            raise
    with jax.sharding.use_abstract_mesh(auto_mesh_of(axes)):
        return jitted.trace(*args, **kwargs)


def _restating(axes: Axes, keep: bool) -> Callable[[str, Mapping[str, Any], str], Mapping[str, Any]]:
    return lambda name, params, source: restated(name, params, axes, keep, source)


def _flatten(
    name: str, jaxpr: Any, consts: Sequence[Any], inputs: tuple[Leaf, ...], outputs: tuple[Leaf, ...],
    aliases: tuple[tuple[int, int], ...], donated: frozenset[int], flattener: Flattener,
) -> Graph:  # fmt: skip
    arguments = [flattener.value(var.aval, leaf.path) for var, leaf in zip(jaxpr.invars, inputs, strict=True)]
    results = flattener.walk(jaxpr, consts, arguments, (), 1.0)
    graph = live_ops(
        Graph(
            name=name,
            values=tuple(flattener.values),
            ops=tuple(flattener.ops),
            inputs=tuple(arguments),
            input_paths=tuple(leaf.path for leaf in inputs),
            outputs=tuple(results),
            output_paths=tuple(leaf.path for leaf in outputs),
            aliases=aliases,
            constants=tuple(flattener.constants),
            donated=donated,
            loops=tuple(flattener.loops),
            invariants=tuple(flattener.invariants),
            barriers=frozenset(flattener.barriers),
            assumptions=tuple(flattener.assumptions),
        )
    )
    graph.verify()
    return graph


def graph_of_body(body: Any, name: str) -> Graph:
    """The flat view of an equation's jaxpr, open or closed, by itself: what one device runs of a `shard_map`."""
    jaxpr, consts = as_closed(body)
    flattener = Flattener(16.0)

    def leaves(side: str, atoms: Sequence[Any]) -> tuple[Leaf, ...]:
        return tuple(_leaf(f"{side}/{i}", atom.aval) for i, atom in enumerate(atoms))

    inputs, outputs = leaves("operand", jaxpr.invars), leaves("result", jaxpr.outvars)
    return _flatten(name, jaxpr, consts, inputs, outputs, (), frozenset(), flattener)


def _told(graph: Graph, stated: Mapping[int, Stated]) -> Graph:
    """The graph, with a word on shardings stated within it, by a `jax.jit` of a part."""
    ends = {*graph.inputs, *graph.outputs}
    parts = dict.fromkeys(one.jitted for value, one in stated.items() if value not in ends)
    left = (
        f"the shardings that `{part}`'s own jax.jit states within the step are decided anew: say them as "
        "with_sharding_constraint"
        for part in parts
    )
    return replace(graph, assumptions=(*graph.assumptions, *left)) if parts else graph


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional arguments, those of `fn`'s signature where it has one."""
    names: list[str] = []
    try:
        for parameter in inspect.signature(fn).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                names.extend(f"{parameter.name}{i}" for i in range(count - len(names)))
    except (TypeError, ValueError):  # a builtin or C callable has no signature
        names = []
    return (names + [f"arg{i}" for i in range(len(names), count)])[:count]


def _path(root: str, key: Any) -> str:
    inner = jax.tree_util.keystr(key, simple=True, separator="/")
    return f"{root}/{inner}" if inner else root


def _named_leaves(arguments: Sequence[Any], names: Sequence[str]) -> list[str]:
    return [
        _path(name, key)
        for name, argument in zip(names, arguments, strict=True)
        for key, _ in jax.tree_util.tree_leaves_with_path(argument)
    ]


def _leaf(path: str, aval: Any) -> Leaf:
    return Leaf(path=path, shape=tuple(aval.shape), dtype=str(aval.dtype), host=on_host(aval))


def _donated(
    dynamic_args: Sequence[Any], positions: list[int], donate: Sequence[int], count: int
) -> frozenset[int]:
    chosen = positions_of(donate, count)
    donated: set[int] = set()
    offset = 0
    for position, argument in zip(positions, dynamic_args, strict=True):
        leaves = len(jax.tree.leaves(argument))
        if position in chosen:
            donated.update(range(offset, offset + leaves))
        offset += leaves
    return frozenset(donated)


def _aliases(
    name: str, arguments: Sequence[Any], names: Sequence[str], out_info: Any,
    inputs: tuple[Leaf, ...], outputs: tuple[Leaf, ...], donated: frozenset[int],
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Pairs of an argument leaf and the result leaf that is its next value: state in, state out.

    An argument comes back when the result, or one element of a tuple, list or dict of results, has the same
    tree structure.  A lone array says too little by its structure: it counts only when it is donated, or has a name in
    a tree of its own, and shape and dtype agree too (`x @ w` is not the next `x`).  So does a list of arrays, unless
    donated: where some of their shapes or dtypes differ it only happens to be as long as the list of results.
    """
    parts = [out_info]
    offsets = [0]
    if isinstance(out_info, (tuple, list, dict)):
        children = [out_info[k] for k in sorted(out_info)] if isinstance(out_info, dict) else list(out_info)
        offset = 0
        for child in children:
            parts.append(child)
            offsets.append(offset)
            offset += len(jax.tree.leaves(child))
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    first = 0
    for argument, argument_name in zip(arguments, names, strict=True):
        structure: Any = jax.tree.structure(argument)
        size = structure.num_leaves
        for part, offset in zip(parts, offsets, strict=True):
            if (
                size == 0
                or jax.tree.structure(part) != structure
                or taken & set(range(offset, offset + size))
            ):
                continue
            mine, theirs = inputs[first : first + size], outputs[offset : offset + size]
            drift = [
                (a, b) for a, b in zip(mine, theirs, strict=True) if (a.shape, a.dtype) != (b.shape, b.dtype)
            ]
            named = first in donated or _has_names(argument)
            if (size == 1 and not named) or (drift and (not named or 2 * len(drift) > size)):
                continue  # not this argument's next value: it only happens to have the same structure
            if drift:
                lines = "\n".join(
                    f"  {a.path}: goes in as {a.dtype}{list(a.shape)}, comes out as {b.dtype}{list(b.shape)}"
                    for a, b in drift
                )
                raise TraceError(
                    f"state `{argument_name}` of `{name}` comes back changed, so it can be neither donated nor kept "
                    f"on one sharding, and the second step would compile again:\n{lines}\nCast or reshape "
                    "these leaves in the step so that they come out as they went in."
                )
            pairs += [(first + i, offset + i) for i in range(size)]
            taken |= set(range(offset, offset + size))
            break
        first += size
    return tuple(pairs)


def _has_names(argument: Any) -> bool:
    """Whether some leaf is found by a key or an attribute, rather than by its number in a list."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(argument))
    return any(not isinstance(key, jax.tree_util.SequenceKey) for path in paths for key in path)
