"""In which type XLA for TPU holds and sends what a step makes: in bf16 what only products read.

At jax's default precision a TPU's matrix unit multiplies bf16, f32 operands rounded on the way in.  XLA therefore keeps
an f32 tensor in bf16 where every reader would round it (its pass `BFloat16Propagation`,
xla/hlo/transforms/bfloat16_propagation.h): readers are products at default precision, and what changes no number but
moves or chooses among them (`FloatSupport::EffectiveOperandPrecisionIsOutputPrecision`, xla/service/float_support.cc),
loops, branches and all collectives but sums, if all that they make is held in bf16 in turn.  It does so before anything
is gathered, stacked or kept.  What programs compiled for v5e showed (jax 0.10.2, libtpu 0.0.42.1):

- Weights in f32 that lie in pieces and only products read are converted, then gathered: bf16[512, 2048]; by
  permutation around a ring, behind an `optimization_barrier` and from a loop's stack alike.  With
  `precision="highest"` or "high" they are gathered in f32, and so is what a sum, or the caller, reads as well.
- A loop converts what it reads so, its stacks of weights and what it doesn't change, once, before it begins:
  bf16[4, 512, 1024] beside the f32 argument.
- Whatever makes a tensor may make it in bf16: products, elementwise work, sums along a dimension, sorting, scattering,
  random numbers (sixteen operations, each between a product and a constraint that gathers).  An activation's function
  is stored in bf16 for both products that read it, its argument, which the derivative reads, in f32.
- A loop's stack of residuals is in bf16 where its readers are products, though the loop itself reads what it stacks in
  f32: of the five that a GELU keeps one is bf16[4, 2048, 1024], the normalised input of the layer another.
- Sums over devices are taken in f32 (`Value.narrowed`), and what they leave is held in bf16.
- A product with a vector (one query's attention to a cache, `x @ w` of one row or one column) is no work for the matrix
  unit: it is multiplied and summed in f32, or a convolution of f32, but for one of six shapes, and what it reads stays
  f32: a cache that beam search carries, f32[12, 32, 256, 16, 64], whose two products have one query a row.
- A tensor that others read too stays in f32 in memory: products round it on the way in.  The sum of an activation's
  gradient for a bias does not count: the product's kernel that makes the gradient sums it in f32, along either
  dimension or both, and writes bf16[65536, 2048] (v5e).  That kernel has what its device makes: a copy that is gathered
  for such a sum as well as for products is sent, and held, in f32 (a graph network's scores, f32[2449029, 48]).
- The pass comes after fusion: what is stored, and what is computed again where it is read, is decided for the program's
  own types (`fusion.traffic`).  The gradient of grouped attention's scores, f32[2, 2, 8, 2048, 2048], is computed in
  both products that read it, of six bytes an element, though it would take two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import Graph
from ..sharding import Rule
from .masks import DEAR
from .precision import rounds_operands

_MOVES = frozenset(
    {"abs", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p", "expand_dims", "max", "min",
     "pad", "reduce_window_max", "reshape", "rev", "roll", "sharding_constraint", "shift", "slice",
     "split", "squeeze", "transpose"}
)  # fmt: skip
"""Operations whose results are as precise as all their operands."""

_MOVES_SOME = {"cond_join": slice(1, None), "dynamic_slice": slice(1), "dynamic_update_slice": slice(2),
               "gather": slice(1), "scan_slice": slice(1), "scan_stack": slice(1), "carry_init": slice(1),
               "select_n": slice(1, None)}  # fmt: skip
"""The same of some of their operands only."""


def narrowed(graph: Graph, rules: Sequence[Rule], platform: str) -> Graph:
    """`graph` with the types in which XLA for `platform` holds its values and reads them; same indices throughout.

    Values that only products read are bf16 and `narrowed`; `narrow_reads` has all reads that round f32 to bf16, of what
    is resharded for them: a sum in the kernel of what it reads is none.
    """
    if platform == "gpu":
        return _widened(graph, rules)
    if platform != "tpu":
        return graph
    ops, uses, producers = graph.ops, graph.uses(), graph.producers()
    fixed = {*graph.inputs, *graph.outputs, *graph.constants}
    narrow = {
        v.index for v in graph.values
        if v.dtype == "float32" and v.shape and uses[v.index] and v.index not in fixed and producers[v.index] >= 0
        and ops[producers[v.index]].primitive != "device_put"  # it arrives from the host as it lies there
        and any(ops[reader].primitive != "reduce_sum" for reader, _ in uses[v.index])
    }  # fmt: skip
    rounding = {op.index for op in ops if rules[op.index].matmul and rounds_operands(op, graph)}
    tied: dict[int, list[int]] = {}  # a loop's carry and what its iterations write into it
    for op in ops:
        if op.primitive == "carry_next":
            for one, other in (op.operands, op.operands[::-1]):
                tied.setdefault(one, []).append(other)

    of_products = set[int]()  # what is elementwise made of a product: its kernel sums it, too
    for op in ops:
        if rules[op.index].matmul or (rules[op.index].follows and not of_products.isdisjoint(op.operands)):
            of_products.update(op.results)

    def rounded(index: int, position: int) -> bool:
        op = ops[index]
        if index in rounding or op.primitive == "carry_next":
            return index in rounding or op.operands[1] in narrow
        if op.primitive == "convert_element_type":
            return graph.values[op.results[0]].dtype == "bfloat16" or op.results[0] in narrow
        if op.primitive == "optimization_barrier":
            return op.results[position] in narrow
        if op.primitive == "reduce_sum":
            return op.operands[0] in of_products
        some = _MOVES_SOME.get(op.primitive, slice(None) if op.primitive in _MOVES else slice(0))
        return position in range(*some.indices(len(op.operands))) and narrow.issuperset(op.results)

    # the largest set that supports itself: loops are taken to be narrow until something in them isn't
    todo = sorted(narrow)
    while todo:
        value = todo.pop()
        maker = ops[producers[value]]
        fed = maker.primitive != "carry_init" or narrow.issuperset(tied.get(value, ()))
        if value in narrow and not (fed and all(rounded(*use) for use in uses[value])):
            narrow.remove(value)
            todo += [v for v in (*maker.operands, *tied.get(value, ())) if v in narrow]
    values = tuple(v.narrow() if v.index in narrow else v for v in graph.values)
    reads = frozenset(
        use for v in graph.values if v.dtype == "float32" and v.shape for use in uses[v.index]
        if rounded(*use) and ops[use[0]].primitive != "reduce_sum"
    )  # fmt: skip
    return replace(graph, values=values, narrow_reads=reads)


def _widened(graph: Graph, rules: Sequence[Rule]) -> Graph:
    """`graph` with functions in bf16 that take long in f32, where elementwise work alone reads them and converts them.

    XLA for GPU computes them in f32, and drops the conversions there and back (a tanh before a layer normalisation,
    f32[2048, 2048] for bf16; H100, jax 0.10.2).
    """
    ops, uses, wide = graph.ops, graph.uses(), set[int]()
    for op in ops:
        if op.primitive in DEAR and graph.values[op.results[0]].dtype == "bfloat16":
            readers = [ops[index] for index, _ in uses[op.results[0]]]
            made = [r.results[0] for r in readers if r.primitive == "convert_element_type"]
            if all(rules[r.index].follows for r in readers) and any(graph.values[v].dtype == "float32" for v in made):
                wide.add(op.results[0])
    if not wide:
        return graph
    values = (replace(v, dtype="float32", item_bytes=4.0) if v.index in wide else v for v in graph.values)
    return replace(graph, values=tuple(values))
