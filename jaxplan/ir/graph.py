"""The frozen Graph: a traced step as the planner sees it, flat, with loop bodies written once.

Calls, remat and custom derivatives are seen through: their equations stand in line.  A loop's body stands once
between its `Loop.start` and `Loop.stop`, and its operations carry how often they run (`Op.trips`).  What a loop
does to its operands is said by operations of our own:

- `scan_slice`  (stacked [t, ...]) -> [...]      one iteration's slice of an xs operand
- `scan_stack`  ([...]) -> [t, ...]              an iteration's result written into the stacked ys
- `carry_init`  (init) -> carry                  the carry, one value with one layout for the whole loop
- `carry_next`  (next, carry) -> ()              the body's new carry, brought to the carry's layout
- `while_any`   ([...]) -> predicate             of a batched loop, which goes on while any of its elements does
- `while_test`  (predicate) -> ()               whether the loop goes on, known to every device
- `cond_join`   (predicate, branch results...) -> result
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..errors import TraceError


class Site(NamedTuple):
    """A place in the nested jaxpr where a layout can be pinned.

    Attributes:
      frame: the equations (and branches) entered to get there, outermost first; `()` is the step itself.
      kind: "result" or "operand" of equation `equation`; "enter" or "leave" for the frame's own arguments
        and results (equation is then -1).
      equation: index of the equation in its frame.
      position: which result, operand, argument.
    """

    frame: tuple[int, ...]
    kind: str
    equation: int
    position: int


VIEWS = frozenset({"reshape", "squeeze", "transpose"})
"""Operations that say a tensor's elements in another order or shape: a contraction's operand or result needs no memory
for that."""

LOOP_EDGES = frozenset({"scan_slice", "scan_stack", "carry_init", "carry_next", "while_any", "while_test", "cond_join"})
"""Our own operations at the edges of loops and branches: none computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """One tensor. `shape` is global; `item_bytes` the size of an element; `site` where it is made (None: input).

    `number` is what a literal is; `narrowed`: it is f32 to the program and held in fewer bytes, its sums apart; `host`:
    it lies in the host's memory; `sides`: of a product's result where the dimensions of its first operand alone begin,
    and where those of its second; `image`: of a convolution's result its dimensions, batch, channels, space; `ordered`:
    a kernel that the compiler has for the operation writes it with its dimensions in order, the last one in lanes.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    item_bytes: float
    name: str
    site: Site | None = None
    constant: bool = False
    number: float | None = None
    narrowed: bool = False
    host: bool = False
    sides: tuple[int, int] | None = None
    image: tuple[int, ...] | None = None
    ordered: bool = False

    def narrow(self) -> Value:
        """The same held in bf16, see `cost.narrowed`."""
        return self if self.narrowed else replace(self, dtype="bfloat16", item_bytes=2.0, narrowed=True)

    def widen(self) -> Value:
        """What is `narrowed` as the program has it."""
        return replace(self, dtype="float32", item_bytes=4.0, narrowed=False) if self.narrowed else self

    def as_sent(self, kind: str) -> float:
        """How many times its bytes a collective of this kind takes: sums of what is `narrowed` are of f32."""
        return 2.0 if self.narrowed and kind in ("all_reduce", "reduce_scatter") else 1.0

    @property
    def bytes(self) -> float:
        """Bytes of the whole tensor."""
        return math.prod(self.shape, start=self.item_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation.

    Attributes:
      operands, results: indices into `Graph.values`.
      trips: how often it runs in one step.
      source: where the user wrote it ("model.py:12 (forward)").
      sites: for each operand the place where its layout can be pinned for this operation alone.
      equation: the jaxpr's own equation; None for operations of our own.
    """

    index: int
    primitive: str
    params: Mapping[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    trips: float
    source: str
    sites: tuple[Site, ...]
    equation: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A loop's body: operations `start` to `stop` (half open), `trips` runs for each run of what is around it."""

    start: int
    stop: int
    trips: float
    kind: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced step.

    Attributes:
      name: the step's function name.
      values, ops: in program order.
      inputs: value of every argument leaf; `input_paths` their tree paths ("state/params/w").
      outputs: value of every result leaf; `output_paths` likewise.
      aliases: (input position, output position) pairs of state that comes back: one layout for both.
      constants: values captured by the step (their bytes count in memory), indices.
      donated: input positions whose buffer XLA may reuse.
      loops: all loops, outer before inner.
      invariants: (value, where it enters a body): values that loops read and don't change, and what a remat body reads
        behind its barrier.
      narrow_reads: (operation, operand position) pairs that read f32 rounded to bf16, see `cost.narrowed`.
      barriers: frames of bodies that are computed again (`jax.checkpoint`) and read what they read through a barrier.
      assumptions: what had to be assumed (a `while`'s trip count), in words.
    """

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    outputs: tuple[int, ...]
    output_paths: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...] = ()
    constants: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    loops: tuple[Loop, ...] = ()
    invariants: tuple[tuple[int, Site], ...] = ()
    barriers: frozenset[tuple[int, ...]] = frozenset()
    narrow_reads: frozenset[tuple[int, int]] = frozenset()
    assumptions: tuple[str, ...] = field(default=())

    def verify(self) -> None:
        """Every value is made before it is used, once; paths match leaves.

        Raises:
          TraceError: naming the first operation that breaks a rule.
        """
        made = set(self.inputs) | set(self.constants) | {v.index for v in self.values if v.constant}
        for op in self.ops:
            for operand in op.operands:
                if operand not in made:
                    raise TraceError(
                        f"operation {op.index} `{op.primitive}` ({op.source}) uses value {operand} before it is made"
                    )
            for result in op.results:
                if result in made:
                    raise TraceError(
                        f"operation {op.index} `{op.primitive}` ({op.source}) makes value {result} again"
                    )
                made.add(result)
        for output, path in zip(self.outputs, self.output_paths, strict=True):
            if output not in made:
                raise TraceError(f"result {path!r} (value {output}) is never made")
        if len(self.inputs) != len(self.input_paths):
            raise TraceError(f"{len(self.inputs)} inputs but {len(self.input_paths)} paths")

    def taken(self, value: int, reads: Iterable[tuple[int, int]]) -> Value:
        """A value as these (operation, operand position) pairs take it together, if it is resharded for them: rounded
        where all of them round, and else as the program has it."""
        tensor, narrow = self.values[value], self.narrow_reads.issuperset(reads)
        if tensor.narrowed == narrow:
            return tensor
        if value not in self._as_taken:
            self._as_taken[value] = tensor.narrow() if narrow else tensor.widen()
        return self._as_taken[value]

    def uses(self) -> Sequence[Sequence[tuple[int, int]]]:
        """For every value the (operation, operand position) pairs that read it, in program order."""
        return self._uses

    def producers(self) -> Sequence[int]:
        """For every value the operation that makes it, or -1."""
        return self._producers

    def lookups(self) -> Sequence[Op]:
        """The operations that gather or scatter."""
        return self._lookups

    def loops_around(self) -> Sequence[tuple[tuple[int, int], ...]]:
        """For every operation the (start, stop) of the loops around it, outer first."""
        return self._loops_around

    def loop_after(self, op: int) -> tuple[int, int] | None:
        """The (start, stop) of the first loop that begins after an operation, such as a `carry_init`, the outermost of
        several that begin there; None where none does."""
        return min(
            ((x.start, x.stop) for x in self.loops if x.start > op), key=lambda loop: (loop[0], -loop[1]), default=None
        )

    def behind(self) -> Sequence[tuple[int, ...]]:
        """For every operation the innermost of `barriers` that it stands behind, () for none."""
        return self._behind

    # dozens ask, each a pass over the program
    @functools.cached_property
    def _loops_around(self) -> list[tuple[tuple[int, int], ...]]:
        around: list[tuple[tuple[int, int], ...]] = [()] * len(self.ops)
        for loop in self.loops:
            for t in range(loop.start, loop.stop):
                around[t] = (*around[t], (loop.start, loop.stop))
        return around

    @functools.cached_property
    def _behind(self) -> list[tuple[int, ...]]:
        found: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}

        def innermost(frame: tuple[int, ...]) -> tuple[int, ...]:
            if frame not in found:
                found[frame] = frame if frame in self.barriers else innermost(frame[:-1])
            return found[frame]

        return [innermost(op.sites[0].frame if op.sites else ()) for op in self.ops]

    @functools.cached_property
    def _as_taken(self) -> dict[int, Value]:
        return {}

    @functools.cached_property
    def _uses(self) -> list[list[tuple[int, int]]]:
        uses: list[list[tuple[int, int]]] = [[] for _ in self.values]
        for op in self.ops:
            for position, operand in enumerate(op.operands):
                uses[operand].append((op.index, position))
        return uses

    @functools.cached_property
    def _lookups(self) -> list[Op]:
        return [op for op in self.ops if op.primitive == "gather" or op.primitive.startswith("scatter")]

    @functools.cached_property
    def _producers(self) -> list[int]:
        producers = [-1] * len(self.values)
        for op in self.ops:
            for result in op.results:
                producers[result] = op.index
        return producers
