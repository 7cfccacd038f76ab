"""What XLA computes again wherever it is read, and what it does not.

XLA for TPU never stores comparisons for themselves, nor the bits that keys are hashed to.
It fuses a comparison into whatever reads it, however much that reads: of a relu the argument is kept, not the mask.  A
dropout's mask is hashed anew from its key for the backward pass.  (Where a dimension outside of the tiles has 32
elements or fewer, masks are packed into bits, an eighth of a byte each, and beside them lies what relu returned: less
than the f32 argument, which is what is counted.)  Seen in networks of relus and dropouts over matrices, sequences and
images of 14 to 112 pixels a side, compiled for v5e, jax 0.10.2, libtpu 0.0.42.1.

What is padded, concatenated with something or moved around a dimension is in memory before: XLA for TPU fuses nothing
with its reader through a pad, which all of these are compiled to (steps of one elementwise kernel before and one after,
sums, products or nothing, along any dimension; slices that are padded are written, too; padding by nothing, or by less,
is fused).  It rounds before it pads, where the program rounds next, and where products of f32 are all that reads it:
what is put together is written in bf16 (a radiance field's layer that reads its positions again).  So of a language
model's loss over `logits[:, :-1]` the logits' gradient is in memory, of one over all logits it is not.  And a product's
kernel goes on until what it makes is read several times or sliced: f32 capped logits that are sliced are written in the
place of bf16 logits, which are kept where nothing but a conversion is between (sixteen functions; v5e, jax 0.10.2,
2026-11-23).  What is read several times on the way, as by a gelu, a silu or a relu's mask, is written beside (gated
layers that split what their function makes; v5e, jax 0.10.2, 2026-11-29).

XLA for GPU stores a tanh in bf16 that the backward pass reads again, though its argument is in memory too: of a gelu
the argument, the tanh and the result (MLPs of six layers, GPTs of four unrolled ones, a BERT and a ConvNeXt, compiled
for H100, jax 0.10.2). In f32, twice the bytes, it computes it again (an MLP-Mixer and a perceiver), as it does an error
function in either type, but those of what is normalised just before (MLPs with layer normalisations in front of their
gelus, a wav2vec 2) and those that three kernels or more read (capped logits and capped scores of attention, and what a
normalisation follows: the largest of each row, the sum of exponentials and the gradient); a logistic function always,
but what caps logits, scaled, is stored for those three.
An erfc it stores in both (MLPs of four layers with exact gelus, erfs and erfcs; H100).
What is compared it computes again for the one kernel that reads that, whatever it takes, a relu's mask of two
convolutions and a shortcut; for two, as a dropout's mask forward and backward, only where that reads little more than
the mask itself (a DETR of frozen normalisations, H100, 2026-11-30).  Where a normalisation's sums are made of what is
selected, which its gradient waits for, the sums' kernel writes the mask for that (grouped convolutions, H100); it is
counted as kept since the forward pass, as others of the kind are by programs in f32, not by all in bf16.
One in bf16 that is converted to f32 next is stored in f32 (`narrowing`). What is made of one of these functions of
what is normalised, and of another array as large, is in memory if a later kernel reads it, and so is what a sum reads:
an activation's gradient, in f32, on its way to the sums of a normalisation's (MLPs with layer and batch normalisations
before gelus and silus), or what an EfficientNet pools of silus. A relu's is computed again. An erfc in bf16
(not in f32) is expanded into polynomials before kernels are made, which read its argument dozens of times: where the
derivative reads the argument, too, it is written beside the erfc (the exact gelus of a RoBERTa, H100).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..ir import VIEWS, Graph, Op, Value
from ..sharding import Rule
from .heads import turned_by_halves, widened_by_heads
from .indices import adds_gathered, gathered_for_sums, unviewed
from .precision import rounds_operands
from .residency import made_of, unmoved
from .selections import gathered_from, is_selection
from .sorting import selected_from, selects

DEAR = frozenset({"tanh", "erf", "erfc"})
CURVES = DEAR | {"logistic"}
"""Functions that take longer than reading what was made."""
_DEAR_BYTES = 2
COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
_SLICES = frozenset({"dynamic_slice", "slice", "split"})
_WIDENED = frozenset({"concatenate", "pad", "roll", "shift"})


def is_mask(tensor: Value) -> bool:
    """Whether a value is of truth values."""
    return tensor.dtype == "bool"


def is_hash(graph: Graph, op: Op) -> bool:
    """Whether an operation hashes bits from a key by arithmetic alone (threefry)."""
    return op.primitive == "random_bits" and graph.values[op.operands[0]].dtype == "key<fry>"


def fused_on(platform: str, graph: Graph, op: Op) -> bool:
    """Whether XLA for a platform fuses an operation that is neither elementwise nor movement.

    On TPU what hashes keys, what adds to one element of each row, and some gathers (`indices`); on GPU gathers (a graph
    attention network's messages are gathered, weighed and added in one kernel, H100, jax 0.10.2).
    """
    if op.primitive == "gather":
        return platform == "gpu" or (platform == "tpu" and gathered_for_sums(graph, op))
    return platform == "tpu" and (is_hash(graph, op) or is_selection(graph, op))


_POOLINGS = frozenset({"reduce_window_max", "reduce_window_sum", "select_and_scatter_add"})


def read_whole(
    platform: str, graph: Graph, kinds: Sequence[str], producers: Sequence[int], source: Sequence[bool], op: Op
) -> Sequence[int]:
    """What an operation that is no product and that nothing joins reads from memory.

    XLA for GPU computes what a scatter adds in the scatter's kernel: rows gathered for two million edges of a graph
    network and added up at others are in no buffer; and so what is pooled, here and for the gradient, of what that is
    elementwise made of (VGG-16's relus; H100, jax 0.10.2).  For a TPU's `top_k` see `sorting`, for its
    indices `indices`.
    """
    if platform == "gpu" and op.primitive in _POOLINGS:
        return ()
    if selects(graph, op, platform):
        return [selected_from(graph, kinds, producers, source, op.operands[0])]
    if platform == "tpu" and (op.primitive == "gather" or op.primitive.startswith("scatter")):
        table, indices, *others = op.operands
        if op.primitive == "gather":
            table = gathered_from(graph, producers, table)
        elif op.primitive == "scatter-add" and adds_gathered(graph, producers, kinds, op):
            others = []
        return [table, unviewed(graph, producers, indices), *others]
    if op.primitive == "convert_element_type":  # beside a reshape, see `unaligned`
        return [unviewed(graph, producers, op.operands[0])]
    return op.operands[:1] if platform == "gpu" and op.primitive == "scatter-add" else op.operands


def moved_on_tpu(
    graph: Graph, rules: Sequence[Rule], producers: Sequence[int], source: Sequence[bool]
) -> set[int]:
    """What XLA for TPU writes because it is padded, put beside something else, moved around or sliced; see above."""
    moved = _widened(graph, producers) | _sliced(graph, rules, producers, source)
    return moved | widened_by_heads(graph, producers) | turned_by_halves(graph, producers)


def _widened(graph: Graph, producers: Sequence[int]) -> set[int]:
    """What is padded or put beside something else on TPU, or what is made of that where it is rounded next."""
    found, uses = set[int](), graph.uses()
    for op in graph.ops:
        if op.primitive in _WIDENED and (op.primitive != "pad" or any(max(s) > 0 for s in op.params["padding_config"])):
            readers = [graph.ops[reader] for reader, _ in uses[op.results[0]]]
            rounded = [r.results[0] for r in readers if _rounds(graph, r)]
            if op.primitive == "concatenate" and readers and all(_multiplies_rounded(graph, r) for r in readers):
                found.update(op.results)
                continue
            read = op.operands[:1] if op.primitive == "pad" else op.operands
            found.update(
                rounded if len(rounded) == len(readers) else (unmoved(graph, producers, value) for value in read)
            )
    return found


def _sliced(graph: Graph, rules: Sequence[Rule], producers: Sequence[int], source: Sequence[bool]) -> set[int]:
    """What products' kernels write on TPU, for it is sliced next: products of which several parts are read, or in their
    place what is computed of each alone."""
    found, uses = set[int](), graph.uses()
    for value in [op.operands[0] for op in graph.ops if op.primitive in _SLICES]:
        chain = [value]
        while (maker := producers[chain[-1]]) >= 0 and rules[maker].follows:
            made = [v for v in graph.ops[maker].operands if not _at_hand(graph, producers, source, v, chain[-1])]
            if len(made) != 1:
                break
            chain.append(made[0])
        if maker >= 0 and rules[maker].matmul:
            while len(chain) > 1 and len(uses[chain[-1]]) == 1:
                chain.pop()
            # what reads the product, too, as a relu's mask does, has it beside
            kept = value if producers[chain[-1]] == maker else chain[-1]
            last, readers = producers[kept], [graph.ops[reader] for reader, _ in uses[value]]
            parts = sum(len(reader.results) for reader in readers if reader.primitive in _SLICES)
            if (last != maker or parts > 1) and graph.ops[last].primitive != "convert_element_type":
                found.add(kept)
        elif _of_one_product(graph, rules, producers, source, value):
            found.add(value)
    return found


def _of_one_product(
    graph: Graph, rules: Sequence[Rule], producers: Sequence[int], source: Sequence[bool], value: int
) -> bool:
    """Whether a value is elementwise made of one product that it reads several times, as a gelu or a silu does."""

    def at_hand(made: int) -> bool:
        return _at_hand(graph, producers, source, made, value)

    elementwise = made_of(graph, producers, value, lambda op: rules[op.index].follows and not at_hand(op.results[0]))
    match [v for v in elementwise if not at_hand(v)]:
        case [made]:
            return made != value and producers[made] >= 0 and rules[producers[made]].matmul
    return False


def _at_hand(graph: Graph, producers: Sequence[int], source: Sequence[bool], value: int, beside: int) -> bool:
    """Whether a value takes nothing to have beside another: it is made of nothing, or of fewer elements, as a bias that
    is added to every row, broadcast or not."""
    fewer = math.prod(graph.values[value].shape) < math.prod(graph.values[beside].shape)
    return source[value] or fewer or _is_broadcast(graph, producers[value])


def _is_broadcast(graph: Graph, maker: int) -> bool:
    return maker >= 0 and graph.ops[maker].primitive == "broadcast_in_dim"


def _rounds(graph: Graph, op: Op) -> bool:
    """Whether an operation converts to a type of fewer bytes."""
    if op.primitive != "convert_element_type":
        return False
    return graph.values[op.results[0]].item_bytes < graph.values[op.operands[0]].item_bytes


def _multiplies_rounded(graph: Graph, op: Op) -> bool:
    """Whether an operation is a product that rounds its f32 operands."""
    read = graph.values[op.operands[0]]
    return op.primitive == "dot_general" and (read.narrowed or read.item_bytes == 4) and rounds_operands(op, graph)


def is_dear(graph: Graph, op: Op, normalised: bool = False) -> bool:
    """Whether XLA for GPU would rather store what an operation makes than compute it again.

    Args:
      normalised: it would have to be computed from sums, too.
    """
    if op.primitive == "erfc" or (normalised and op.primitive in DEAR):
        return True
    return op.primitive == "tanh" and graph.values[op.results[0]].item_bytes <= _DEAR_BYTES


MANY_READERS = 3
"""Kernels that read a function before it is stored in f32, too."""


def read_at(
    graph: Graph, kinds: Sequence[str], levels: Sequence[int], value: int, *, alone: bool = False
) -> set[int]:
    """The levels at which a value, or what is made of it by elementwise operations, is read.

    A sum's kernel makes what it sums, and is of the level of that.

    Args:
      alone: what is made of another array as large, too, is not asked.
    """
    found, todo, seen, uses = set[int](), [value], {value}, graph.uses()
    size, producers = math.prod(graph.values[value].shape), graph.producers()

    def as_large(operand: int) -> bool:
        maker = producers[operand]
        spread = maker >= 0 and graph.ops[maker].primitive == "broadcast_in_dim"
        return operand not in seen and not spread and math.prod(graph.values[operand].shape) == size

    while todo:
        for index, _ in uses[todo.pop()]:
            op = graph.ops[index]
            if kinds[index] in ("fused", "reduction"):
                found.add(levels[index])
            if kinds[index] == "fused" and not (alone and any(map(as_large, op.operands))):
                more = [v for v in op.results if v not in seen and math.prod(graph.values[v].shape) == size]
                seen.update(more)
                todo += more
    return found


def selected_once(graph: Graph, kinds: Sequence[str], levels: Sequence[int], value: int) -> bool:
    """Whether one kernel alone reads what is compared, be it as another type or in another shape, and no sum is made of
    what that selects that a later kernel of elementwise work waits for: that would select again."""
    found, todo, uses, selected = set[int](), [value], graph.uses(), list[int]()
    while todo:
        for index, _ in uses[todo.pop()]:
            op = graph.ops[index]
            if op.primitive in VIEWS or op.primitive in ("broadcast_in_dim", "convert_element_type", "not"):
                todo += op.results
            else:
                found.add(levels[index])
                selected += op.results
    return len(found) == 1 and not _summed_before(graph, kinds, levels, selected, min(found))


def _summed_before(graph: Graph, kinds: Sequence[str], levels: Sequence[int], made: Sequence[int], level: int) -> bool:
    """Whether sums are made of `made` at a level, and something elementwise later."""
    todo, seen, uses, summed, later = [*made], {*made}, graph.uses(), False, False
    while todo:
        for index, _ in uses[todo.pop()]:
            op = graph.ops[index]
            summed |= kinds[index] == "reduction" and levels[index] == level
            if kinds[index] != "fused":
                continue
            later |= levels[index] > level
            if levels[index] == level:
                todo += [v for v in op.results if v not in seen]
                seen.update(op.results)
    return summed and later


def scales_logistic(graph: Graph, producers: Sequence[int], op: Op) -> bool:
    """Whether an operation scales what a logistic function makes by a number, as capped logits."""
    wide = [v for v in op.operands if math.prod(graph.values[v].shape) > 1]
    made = producers[wide[0]] if op.primitive in ("mul", "div") and len(wide) == 1 else -1
    return made >= 0 and graph.ops[made].primitive == "logistic"


def halves(graph: Graph, producers: Sequence[int]) -> Iterator[int]:
    """What a scan by halves (`jax.lax.associative_scan`) puts together of every second place each, and what its
    gradient cuts off before it takes every second place of that: XLA for GPU writes both, level by level."""

    def spread(value: int) -> bool:
        if producers[value] < 0 or (maker := graph.ops[producers[value]]).primitive != "pad":
            return False
        return any(inner for *_, inner in maker.params["padding_config"])

    for op in graph.ops:
        if op.primitive in ("add", "or") and all(map(spread, op.operands)):
            yield op.results[0]
        elif op.primitive == "slice" and 2 in (op.params["strides"] or ()):
            made = producers[op.operands[0]]
            if made >= 0 and graph.ops[made].primitive == "pad":
                yield op.operands[0]


def read_by_expansions(graph: Graph) -> set[int]:
    """What XLA for GPU writes because a function that it expands into dozens of operations reads it, and others do."""
    uses = graph.uses()
    expanded = {op.operands[0] for op in graph.ops if op.primitive == "erfc"}
    return {v for v in expanded if len(uses[v]) > 1 and graph.values[v].item_bytes <= _DEAR_BYTES}
