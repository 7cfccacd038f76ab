"""What XLA for TPU stores of a softmax over scores: its argument, as it is exponentiated.

Scores that a product of narrow numbers makes (bf16) and a softmax converts (to f32) are not stored: the product is
computed into the maximum, and once more into the argument less that, which is kept for the sum, the quotient and the
backward pass, if they are scaled or masked in between.  Read as they are converted, the scores are kept themselves,
half as large, and so are scores that are transposed before the softmax, as of queries in groups that share their keys
(`btkgd,bskd->bkgts` of 2 and 4 keys' heads: 134 MB a layer where 268 were counted).  Attention with heads of 64 to 512
columns, not scanned, compiled for v5e, v5p and v6e by jax 0.10.2, libtpu 0.0.42.1.  The logits of classifiers, products
without batch dimensions, are computed once more on the way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..ir import VIEWS, Graph, Op
from ..sharding import ELEMENTWISE


def is_batched(op: Op) -> bool:
    """Whether `op` is a product with batch dimensions."""
    return op.primitive == "dot_general" and bool(op.params["dimension_numbers"][1][0])


def makes_f32(graph: Graph, product: int) -> bool:
    """Whether a product's operands and result are f32 in the program, whatever it rounds the former to."""
    op = graph.ops[product]
    operands = (graph.values[v] for v in op.operands)
    return graph.values[op.results[0]].dtype == "float32" and all(
        tensor.narrowed or tensor.dtype == "float32" for tensor in operands
    )


def makes_scores(graph: Graph, producers: Sequence[int], op: Op) -> bool:
    """Whether `op` is a product with batch dimensions, or the sum of two that one kernel makes, read as it is made."""
    if is_turned(graph, op.index):
        return False
    made = [producers[v] for v in op.operands] if op.primitive == "add" else [op.index]
    return all(maker >= 0 and is_batched(graph.ops[maker]) for maker in made)


def is_turned(graph: Graph, made: int) -> bool:
    """Whether what a product with batch dimensions makes is transposed, and not read otherwise."""
    readers = [graph.ops[reader].primitive for reader, _ in graph.uses()[graph.ops[made].results[0]]]
    return is_batched(graph.ops[made]) and bool(readers) and all(name == "transpose" for name in readers)


def turned_scores(graph: Graph, kinds: Sequence[str], producers: Sequence[int]) -> set[int]:
    """Scores that are transposed, then scaled or masked in other numbers before they are exponentiated."""
    uses, exponents = graph.uses(), exponentiated(graph, kinds, producers)

    def made_of(values: Iterable[int], primitive: str | None = None) -> Iterator[Op]:
        for reader in (graph.ops[index] for value in values for index, _ in uses[value]):
            if primitive in (None, reader.primitive):
                yield reader

    found = set[int]()
    for op in filter(is_batched, graph.ops):
        turned = [r.results[0] for r in made_of(op.results, "transpose")]
        converted = [r.results[0] for r in made_of(turned, "convert_element_type")]
        if any(r.results[0] in exponents and r.primitive != "sub" for r in made_of(converted)):
            found.update(op.results)
    return found


def is_converted(graph: Graph, producers: Sequence[int], value: int) -> bool:
    """Whether a value is another one in other numbers."""
    return producers[value] >= 0 and graph.ops[producers[value]].primitive == "convert_element_type"


def made_at_once(graph: Graph, producers: Sequence[int], scores: int) -> tuple[int, ...]:
    """Scores and, of a sum, the products' results that it is of."""
    op = graph.ops[producers[scores]]
    return (scores, *op.operands) if op.primitive == "add" else (scores,)


def exponentiated(graph: Graph, kinds: Sequence[str], producers: Sequence[int]) -> dict[int, set[int]]:
    """For what exponentials' arguments are elementwise made of, in the same shape and type: those arguments.

    What is another value converted is left out.

    Args:
      kinds: of every operation, see `kind_of`.
    """
    values, found = graph.values, dict[int, set[int]]()
    for op in reversed(graph.ops):
        if op.primitive == "exp":
            found.setdefault(op.operands[0], set()).add(op.operands[0])
        elif kinds[op.index] == "fused" and (after := found.get(op.results[0])):
            made = values[op.results[0]]
            for value in op.operands:
                if (values[value].shape, values[value].dtype) == (made.shape, made.dtype):
                    found.setdefault(value, set()).update(after)
    return {value: arguments for value, arguments in found.items() if not is_converted(graph, producers, value)}


_LONG_MASK = 3
"""Operations of a mask that is more than causal."""
_HANDED_ON = VIEWS | {"broadcast_in_dim", "convert_element_type"}
_SCALED = VIEWS | {"convert_element_type", "div", "mul", "tanh"}


def masks_capped(graph: Graph, producers: Sequence[int], op: Op) -> bool:
    """Whether XLA for GPU keeps what a mask leaves of capped scores beside the tanh, which the backward pass wants.

    It does where the mask is more than causal and keys don't come last as the product makes the scores, as
    `btkgh,bskh->bkgts` does: a softmax along what lies last is one Triton kernel, and a short mask is computed wherever
    the scores are read.  Masks of five operations or more, as of a window over packed sequences, were kept in
    each of nine sizes of 256 to 2048 tokens, those of three or four in half of them, the longer sequences and smaller
    batches (four layers compiled for eight H100, jax 0.10.2); they are counted in all.
    """
    if op.primitive != "select_n" or not any(_is_capped(graph, producers, v) for v in op.operands[1:]):
        return False
    seen, todo, count = set[int](), [producers[op.operands[0]]], 0
    while todo:
        index = todo.pop()
        if index < 0 or index in seen:
            continue
        seen.add(index)
        maker = graph.ops[index]
        if maker.primitive in ELEMENTWISE or maker.primitive in _HANDED_ON:
            count += maker.primitive not in _HANDED_ON
            todo += [producers[v] for v in maker.operands]
    return count >= _LONG_MASK


def _is_capped(graph: Graph, producers: Sequence[int], value: int) -> bool:
    """Whether a value is a tanh of a product whose last dimension is another one."""
    capped = turned = False
    while producers[value] >= 0 and (maker := graph.ops[producers[value]]).primitive in _SCALED:
        alike = [v for v in maker.operands if len(graph.values[v].shape) == len(graph.values[value].shape)]
        if len(alike) != 1:
            return False
        capped |= maker.primitive == "tanh"
        value = alike[0]
        if maker.primitive == "transpose":
            turned |= maker.params["permutation"][-1] != len(graph.values[value].shape) - 1
    return capped and turned and producers[value] >= 0 and is_batched(graph.ops[producers[value]])
