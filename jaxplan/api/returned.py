"""What a step's modules are when it returns, which may depend on the shapes that it is called with."""

from __future__ import annotations

from typing import Any

import jax

from .arguments import shape_of


class Returned:
    """What every trace of a step left behind, by the arguments that it was traced for.

    A call of one signature runs what was traced for it, and that is not always what was traced last.
    """

    def __init__(self) -> None:
        self._traces: list[tuple[Any, tuple[Any, ...], Any]] = []

    def note(self, arguments: Any, what: Any) -> None:
        """`what` a trace for `arguments` left: tracers, and as they are the static ones among them."""
        leaves, tree = jax.tree.flatten(arguments)
        kinds = tuple(shape_of(leaf) if isinstance(leaf, jax.core.Tracer) else leaf for leaf in leaves)
        self._traces = [trace for trace in self._traces if trace[:2] != (tree, kinds)]
        self._traces.append((tree, kinds, what))

    def of(self, arguments: Any) -> Any:
        """What was noted for arguments of these structures, shapes and static values."""
        if len(self._traces) == 1:
            return self._traces[0][2]
        leaves, tree = jax.tree.flatten(arguments)
        return next(
            what
            for known, kinds, what in reversed(self._traces)
            if known == tree and all(map(_is_of, leaves, kinds))
        )


def _is_of(leaf: Any, kind: Any) -> bool:
    return bool(shape_of(leaf) == kind if isinstance(kind, jax.ShapeDtypeStruct) else leaf == kind)
