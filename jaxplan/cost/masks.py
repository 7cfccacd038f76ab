"""What XLA computes again wherever it is read, and what it does not.

XLA for TPU never stores comparisons for themselves, nor the bits that keys are hashed to.
It fuses a comparison into whatever reads it, however much that reads: of a relu the argument is kept, not the mask.  A
dropout's mask is hashed anew from its key for the backward pass.  (Where a dimension outside of the tiles has 32
elements or fewer, masks are packed into bits, an eighth of a byte each, and beside them lies what relu returned: less
than the f32 argument, which is what is counted.)  Seen in networks of relus and dropouts over matrices, sequences and
images of 14 to 112 pixels a side, compiled for v5e, jax 0.10.2, libtpu 0.0.42.1.

It pads in the kernel of a product, and computes what is padded in one before it: of a language model's loss over
`logits[:, :-1]` the logits' gradient is in memory, of one over all logits it is not.

XLA for GPU stores a tanh or an error function in bf16 that the backward pass reads again, though its argument is in
memory too: of a gelu the argument, the tanh and the result (MLPs of six layers, GPTs of four unrolled ones, a BERT
and a ConvNeXt, compiled for H100, jax 0.10.2).  In f32, twice the bytes, it computes them again (an MLP-Mixer and a
perceiver), a logistic function always.  An erfc in bf16 is expanded into polynomials before kernels are made, which
read its argument dozens of times: where the derivative reads the argument, too, it is written beside the erfc (the
exact gelus of a RoBERTa, H100).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Graph, Op, Value
from .residency import unmoved
from .selections import is_selection

_DEAR = frozenset({"tanh", "erf", "erfc"})
_DEAR_BYTES = 2


def is_mask(tensor: Value) -> bool:
    """Whether a value is of truth values."""
    return tensor.dtype == "bool"


def is_hash(graph: Graph, op: Op) -> bool:
    """Whether an operation hashes bits from a key by arithmetic alone (threefry)."""
    return op.primitive == "random_bits" and graph.values[op.operands[0]].dtype == "key<fry>"


def fused_on(platform: str, graph: Graph, op: Op) -> bool:
    """Whether XLA for a platform fuses an operation that is neither elementwise nor movement.

    On TPU what hashes keys, and what adds to one element of each row; on GPU gathers (a graph attention network's
    messages are gathered, weighed and added in one kernel, H100, jax 0.10.2).
    """
    if platform == "gpu":
        return op.primitive == "gather"
    return platform == "tpu" and (is_hash(graph, op) or is_selection(graph, op))


def read_whole(platform: str, op: Op) -> tuple[int, ...]:
    """What an operation that is no product and that nothing joins reads from memory.

    XLA for GPU computes what a scatter adds in the scatter's kernel: rows gathered for two million edges of a graph
    network and added up at others are in no buffer (H100, jax 0.10.2).
    """
    return op.operands[:1] if platform == "gpu" and op.primitive == "scatter-add" else op.operands


def padded_for_products(graph: Graph, producers: Sequence[int]) -> set[int]:
    """What is padded for a product on TPU."""
    read = {unmoved(graph, producers, v) for op in graph.ops if op.primitive == "dot_general" for v in op.operands}
    makers = [graph.ops[producers[v]] for v in sorted(read) if producers[v] >= 0]
    return {op.operands[0] for op in makers if op.primitive == "pad"}


def is_dear(graph: Graph, op: Op) -> bool:
    """Whether XLA for GPU would rather store what an operation makes than compute it again."""
    return op.primitive in _DEAR and graph.values[op.results[0]].item_bytes <= _DEAR_BYTES


def read_by_expansions(graph: Graph) -> set[int]:
    """What XLA for GPU writes because a function that it expands into dozens of operations reads it, and others do."""
    uses = graph.uses()
    expanded = {op.operands[0] for op in graph.ops if op.primitive == "erfc" and is_dear(graph, op)}
    return {value for value in expanded if len(uses[value]) > 1}
