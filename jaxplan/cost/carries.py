"""When a loop's carry takes what is added to it: as soon as that is there.

Gradients that a loop adds up, over micro-batches or over what is unrolled, stand at the end of its body, one sum after
the other.  XLA adds each to its carry in place right after the product that makes it, and what that product reads is
let go (networks of convolutions and of products, images in groups or not, v5e and H100, jax 0.10.2: taken to wait for
the end of the iteration, they were at twice the memory on v5e).

What a loop stacks, weights' gradients among it, is written as it is made on v5e: two scanned towers of SigLIP were at
+14 % and are at +3, ViT-H at +9 and -1, Whisper at +10 and +1.  On v5p and v6e XLA runs some of those products at the
end of the iteration, where collectives go on beside them (`late_stacks`; of ViT-H on sixteen v6e those of its MLPs),
and all of them are taken to: at once, ViT-H on v6e would be at -9 %, T5 and Whisper on v5p at -7 and -6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..ir import Op
from .residency import Flow


def added_in_place(flow: Flow, stored: Sequence[bool]) -> Mapping[int, int]:
    """For the ends of iterations that put what is computed of a carry in the place of it, when no other operation of
    the loop's body reads that, and for what is computed: the last operation that is waited for."""
    uses = flow.graph.uses()

    def alone(end: Op) -> bool:
        value, carry = end.operands
        readers = {reader for reader, _ in uses[carry] if flow.loop_of[reader] == flow.loop_of[end.index]}
        return readers == {end.index, flow.producers[value]}

    return _at_once(flow, stored, (op for op in flow.graph.ops if op.primitive == "carry_next" and alone(op)))


def stacked_at_once(flow: Flow, stored: Sequence[bool]) -> Mapping[int, int]:
    """The same for what a loop stacks, and what that is computed of, where it is in no buffer before."""
    return _at_once(flow, stored, (op for op in flow.graph.ops if op.primitive == "scan_stack"))


def _at_once(flow: Flow, stored: Sequence[bool], ends: Iterable[Op]) -> Mapping[int, int]:
    """For each of `ends` whose operand is in no buffer, and for what is computed with it, what is waited for."""
    found = dict[int, int]()
    for end in ends:
        if not stored[end.operands[0]]:
            inside, last = _computed(flow, stored, end)
            if last >= 0:
                found.update(dict.fromkeys(inside, last))
    return found


def _computed(flow: Flow, stored: Sequence[bool], end: Op) -> tuple[set[int], int]:
    """`end` and what is computed with it, and the last operation of the loop's body that makes what those read."""
    last, left, inside = -1, [end.operands[0]], {end.index}
    while left:
        maker = flow.producers[left.pop()]
        if maker >= 0 and maker not in inside and flow.loop_of[maker] == flow.loop_of[end.index]:
            made = flow.graph.ops[maker]
            if flow.kinds[maker] == "fused" and not any(stored[v] for v in made.results):
                inside.add(maker)
                left += made.operands
            elif flow.kinds[maker] != "edge":
                last = max(last, maker)
    return inside, last
