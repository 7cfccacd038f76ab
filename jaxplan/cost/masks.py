"""What XLA computes again wherever it is read, and what it does not.

XLA for TPU never stores comparisons for themselves, nor the bits that keys are hashed to.
It fuses a comparison into whatever reads it, however much that reads: of a relu the argument is kept, not the mask.  A
dropout's mask is hashed anew from its key for the backward pass.  (Where a dimension outside of the tiles has 32
elements or fewer, masks are packed into bits, an eighth of a byte each, and beside them lies what relu returned: less
than the f32 argument, which is what is counted.)  Seen in networks of relus and dropouts over matrices, sequences and
images of 14 to 112 pixels a side, compiled for v5e, jax 0.10.2, libtpu 0.0.42.1.

XLA for GPU stores a tanh or an error function that the backward pass reads again, though its argument is in memory
too: of a gelu the argument, the tanh and the result (MLPs of six layers, and GPTs of four unrolled ones, compiled for
H100, jax 0.10.2).  A logistic function it computes again.
"""

from __future__ import annotations

from ..ir import Graph, Op, Value

#: Primitives that are too dear to be computed again on GPU.
DEAR = frozenset({"tanh", "erf", "erfc"})


def is_mask(tensor: Value) -> bool:
    """Whether a value is of truth values."""
    return tensor.dtype == "bool"


def is_hash(graph: Graph, op: Op) -> bool:
    """Whether an operation hashes bits from a key by arithmetic alone (threefry)."""
    return op.primitive == "random_bits" and graph.values[op.operands[0]].dtype == "key<fry>"
