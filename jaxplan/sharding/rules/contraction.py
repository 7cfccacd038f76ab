"""Matrix products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..halo import Halo, Window
from ..rule import OpShapes, Rule, RuleBuilder
from .registry import LocalFunction, register, register_cut, register_sum


@register("dot_general")
def dot_general(op: OpShapes) -> Rule:
    """`([b,i,k],[b,k,j])->([b,i,j]) reduction={k}`; FLOPs are twice the product of the factors.

    No matrix product where nothing is summed, or nothing but `b` and `k` is there: XLA multiplies element by element
    then, and sums (AlgebraicSimplifierVisitor::HandleDot; compiled for TPU v5e and H100, jax 0.10.2).
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = op.params["dimension_numbers"]
    lhs_shape, rhs_shape = op.operands
    b = RuleBuilder()
    lhs: list[int | None] = [None] * len(lhs_shape)
    rhs: list[int | None] = [None] * len(rhs_shape)
    result: list[int | None] = []
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        lhs[left] = rhs[right] = b.factor(lhs_shape[left])
        result.append(lhs[left])
    for side, shape, taken in ((lhs, lhs_shape, lhs_contract), (rhs, rhs_shape, rhs_contract)):
        for d, extent in enumerate(shape):
            if side[d] is None and d not in taken:
                side[d] = b.factor(extent)
                result.append(side[d])
    reduction = []
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        lhs[left] = rhs[right] = b.factor(lhs_shape[left])
        reduction.append(len(b.sizes) - 1)
    summed = math.prod(b.sizes[f] for f in reduction)
    apart = math.prod(b.sizes) // max(summed * math.prod(lhs_shape[d] for d in lhs_batch), 1)
    return b.rule(
        operands=[lhs, rhs],
        results=[result],
        reduction=reduction,
        matmul=summed > 1 and apart > 1,
        flops=2.0 * math.prod(b.sizes),
    )


@register("ragged_dot_general")
def ragged_dot_general(op: OpShapes) -> Rule:
    """`([m,k],[g,k,n],[g])->([m,n]) reduction={k}`: rows in groups, each with its own matrix.

    The ragged dimension and the groups stay whole: which rows a device would need is known only at run time.
    FLOPs are those of the useful product, every row with one group's matrix.
    """
    numbers = op.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    ragged, groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    lhs_shape, rhs_shape, _ = op.operands
    b = RuleBuilder()
    lhs: list[int | None] = [None] * len(lhs_shape)
    rhs: list[int | None] = [None] * len(rhs_shape)
    result: list[int | None] = []
    whole: list[int] = []
    reduction: list[int] = []
    # Where the ragged dimension is contracted, the groups lead the result: [g, m, n].
    contracted_ragged = bool(set(ragged) & set(lhs_contract))
    if contracted_ragged:
        whole.append(b.factor(op.results[0][0]))
        result.append(whole[-1])
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        lhs[left] = rhs[right] = b.factor(lhs_shape[left])
        result.append(lhs[left])
        if left in ragged:
            whole.append(len(b.sizes) - 1)
    for d, extent in enumerate(lhs_shape):
        if lhs[d] is None and d not in lhs_contract:
            lhs[d] = b.factor(extent)
            result.append(lhs[d])
            if d in ragged:
                whole.append(len(b.sizes) - 1)
    for d, extent in enumerate(rhs_shape):
        if rhs[d] is None and d not in rhs_contract and d not in groups:
            rhs[d] = b.factor(extent)
            result.append(rhs[d])
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        lhs[left] = rhs[right] = b.factor(lhs_shape[left])
        (whole if left in ragged else reduction).append(len(b.sizes) - 1)
    flops = 2.0 * math.prod(b.sizes[f] for f in range(len(b.sizes)) if not (contracted_ragged and f == 0))
    for d in groups:
        whole.append(b.factor(rhs_shape[d]))
        rhs[d] = whole[-1]
    return b.rule(
        operands=[lhs, rhs, [None] * len(op.operands[2])],
        results=[result],
        reduction=reduction,
        need_replication=whole,
        matmul=True,
        flops=flops,
    )


@register("conv_general_dilated")
def conv_general_dilated(op: OpShapes) -> Rule:
    """`([n,k,h,1],[o,k,1,1])->([n,o,h,1]) reduction={k}`, in any dimension order.

    Batch and output channels pass through, input channels are summed.  The longest spatial dimension is cut with a halo
    where pieces line up (see `halo`): along the results, or, in a kernel's gradient, where the window is as long as the
    image, along the sum.  Others stay whole unless the kernel is one point there and moves by one.  With groups, the
    groups are the major factor of the channels that they divide, and nothing inside a group is cut.  FLOPs are two for
    each result element, input channel of its group and point of the kernel, of a kernel longer than the image (a
    gradient's gradient) only those that can meet it: XLA for TPU takes for 32 x 32 points over an image of 3 x 3 two
    and a half times what it takes for 16 x 16, of which it makes four times the results (v5e, jax 0.10.2).
    """
    numbers = op.params["dimension_numbers"]
    (lhs_n, lhs_c, *lhs_space) = numbers.lhs_spec
    (rhs_o, rhs_i, *rhs_space) = numbers.rhs_spec
    (out_n, out_c, *out_space) = numbers.out_spec
    lhs_shape, rhs_shape = op.operands
    (out_shape,) = op.results
    b = RuleBuilder()
    lhs: list[Any] = [None] * len(lhs_shape)
    rhs: list[Any] = [None] * len(rhs_shape)
    out: list[Any] = [None] * len(out_shape)
    feature_groups = int(op.params["feature_group_count"])
    batch_groups = int(op.params["batch_group_count"])
    reduction: list[int] = []
    whole: list[int] = []
    if feature_groups > 1:
        groups, inside, made = (
            b.factor(n) for n in (feature_groups, rhs_shape[rhs_i], rhs_shape[rhs_o] // feature_groups)
        )
        lhs[lhs_n] = out[out_n] = b.factor(lhs_shape[lhs_n])
        lhs[lhs_c], rhs[rhs_i], rhs[rhs_o] = (groups, inside), inside, (groups, made)
        out[out_c] = (groups, made)
        whole += [inside, made]
    elif batch_groups > 1:
        groups, batch, made = (
            b.factor(n) for n in (batch_groups, out_shape[out_n], rhs_shape[rhs_o] // batch_groups)
        )
        lhs[lhs_n], out[out_n] = (groups, batch), batch
        rhs[rhs_o] = out[out_c] = (groups, made)
        lhs[lhs_c] = rhs[rhs_i] = b.factor(lhs_shape[lhs_c])
        whole += [batch, made]
        reduction.append(lhs[lhs_c])
    else:
        lhs[lhs_n] = out[out_n] = b.factor(lhs_shape[lhs_n])
        rhs[rhs_o] = out[out_c] = b.factor(rhs_shape[rhs_o])
        lhs[lhs_c] = rhs[rhs_i] = b.factor(lhs_shape[lhs_c])
        reduction.append(lhs[lhs_c])
    halos: list[Halo] = []
    spatial = list(zip(_windows(op.params, rhs_shape, rhs_space), lhs_space, rhs_space, out_space, strict=True))
    longest = max((lhs_shape[d] for d in lhs_space), default=0)
    for window, d_lhs, d_rhs, d_out in spatial:
        extent, results = lhs_shape[d_lhs], out_shape[d_out]
        if window.is_point:
            lhs[d_lhs] = out[d_out] = b.factor(extent)
        elif extent == longest and not halos and batch_groups == 1:
            along, summed = window.moved_along(extent, results), window.summed_over(extent, results)
            if along is not None and window.size <= results:
                read, lhs[d_lhs] = along, b.factor(math.gcd(extent, results))
                out[d_out] = lhs[d_lhs]
            elif summed is not None and window.size > results and feature_groups == 1:
                read, lhs[d_lhs] = summed, b.factor(math.gcd(extent, window.size))
                rhs[d_rhs] = lhs[d_lhs]
                reduction.append(lhs[d_lhs])
            else:
                continue
            # In a kernel's gradient the batch is what is summed, like this dimension.  There the partitioner of jax
            # 0.10.2 sums over every axis, whatever it cuts: results are a multiple of what they should be.  Beside a
            # cut of the channels too it was seen to be wrong (tests/sharding looks again).
            sums = out[d_out] is None
            batch = lhs[lhs_c] if sums else lhs[lhs_n]
            before, after = read
            halos.append(
                Halo(factor=lhs[d_lhs], operand=0, dim=d_lhs, extent=extent, before=before, after=after,
                     rather=batch, alone=True, fills=sums)
            )  # fmt: skip
    points = math.prod(
        min(window.size, (lhs_shape[d] - 1) * window.base + 1) for window, d, *_ in spatial
    )
    flops = 2.0 * math.prod(out_shape) * rhs_shape[rhs_i] * points
    needed = 2.0 * out_shape[out_n] * out_shape[out_c] * rhs_shape[rhs_i]
    for window, d, _, d_out in spatial:
        needed *= window.pairs(lhs_shape[d], out_shape[d_out])
    return b.rule(
        operands=[lhs, rhs],
        results=[out],
        reduction=reduction,
        need_replication=whole,
        matmul=True,
        flops=flops,
        empty_flops=flops - needed,
        halos=tuple(halos),
    )


@register_cut("conv_general_dilated", alone=True)
def groups_of_channels(eqn: Any) -> tuple[int, ...]:
    """The batch and the channels of a convolution in groups of several, as of ResNeXts or as `vmap` over kernels makes,
    and what its kernel is one point of; others have halos, which are the partitioner's.

    XLA's partitioner cuts neither well: where such groups are cut both operands are gathered on CPU, and on TPU the
    result where several channels are made of each one; where the batch is, on GPU and CPU all images, and each device
    computes all of them, forward and for their gradient (a RegNet on eight H100, jitted by hand or planned: twice the
    memory; depthwise ones it cuts; jax 0.10.2).
    """
    rhs, groups = eqn.invars[1].aval.shape, eqn.params["feature_group_count"]
    numbers = eqn.params["dimension_numbers"]
    made, read, *space = numbers.rhs_spec
    if groups == 1 or (rhs[read] == 1 and rhs[made] == groups):
        return ()
    windows = zip(_windows(eqn.params, rhs, space), numbers.lhs_spec[2:], strict=True)
    return (*numbers.lhs_spec[:2], *(d for window, d in windows if window.is_point))


@register_sum("conv_general_dilated", lambda params: params["batch_group_count"] > 1)
def groups_on_one_device(eqn: Any) -> LocalFunction:
    """A convolution of one device's groups, or a grouped kernel's gradient there, of its part of the batch too.

    Of the latter, on a mesh with an axis to spare, XLA's partitioner sums over that axis too, and the result is too
    large by its size (seen with jax 0.10.2 on CPU and TPU; tests/sharding looks again).
    """
    whole = eqn.invars[0].aval.shape
    counts = zip(("batch_group_count", "feature_group_count"), eqn.params["dimension_numbers"].lhs_spec, strict=False)
    grouped = [(name, dim) for name, dim in counts if eqn.params[name] > 1]

    def local(lhs: Any, rhs: Any) -> Any:
        here = {name: eqn.params[name] * lhs.shape[dim] // whole[dim] for name, dim in grouped}
        return eqn.primitive.bind(lhs, rhs, **{**eqn.params, **here})

    return local


def _windows(p: Mapping[str, Any], kernel: Sequence[int], space: Sequence[int]) -> list[Window]:
    """The kernel's window along every spatial dimension, of a convolution's parameters."""
    moves = zip(space, p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"], strict=True)
    return [
        Window(size=kernel[d], stride=stride, low=low, high=high, base=base, dilation=dilation)
        for d, stride, (low, high), base, dilation in moves
    ]
