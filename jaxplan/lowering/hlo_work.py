"""The arithmetic of a compiled program: its matrix products and convolutions, read from HLO text.

FLOPs as XLA's own HloCostAnalysis counts them (xla/service/hlo_cost_analysis.cc, HandleDot and HandleConvolution): two
for each product that is really needed; where a convolution's window lies on padding or in the gaps of a dilation,
nothing is counted.  The TPU compiler writes every matrix product as such a convolution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import Channels
from .hlo_text import Run, Sources, arrays_of, runs

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# cuBLAS calls keep the dimension numbers of the product that they were made from
_CALL_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_FEATURE_GROUPS = re.compile(r"feature_group_count=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GEMMS = ("__cublas$", "__cublas$lt$", "__onednn$matmul")
_CUDNN = re.compile(r"__cudnn\$conv(BackwardInput|BackwardFilter|)")
"""cuDNN's convolutions (xla/service/gpu/cublas_cudnn.h): backward ones have the windows and labels of the forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledWork:
    """One matrix product or convolution.

    Attributes:
      flops: of one run on one device; trips: how often it runs in a step.
      op_name: the name stack of its operation; sources: its lines, innermost first.
    """

    flops: float
    trips: float
    op_name: str
    sources: tuple[str, ...]


def compiled_work(hlo_text: str, *, while_trips: float = 16.0) -> tuple[CompiledWork, ...] | None:
    """The products in `compiled.as_text()`, in program order; None where some are hidden in library calls.

    Args:
      while_trips: iterations of loops whose trip count is unknown.
    """
    sources = Sources(hlo_text)
    found = []
    for run in runs(hlo_text, while_trips):
        flops = product_flops(run)
        if not flops and _target(run).startswith("__cudnn$"):
            return None
        if flops:
            found.append(
                CompiledWork(
                    flops=flops, trips=run.trips, op_name=run.op_name, sources=sources.lines(run.frame)
                )
            )
    return tuple(found)


def _target(run: Run) -> str:
    """The library function that an instruction calls, "" for none."""
    target = _TARGET.search(run.instruction.rest)
    return target.group(1) if target else ""


def product_flops(run: Run) -> float:
    """FLOPs of one run of a matrix product or convolution; 0 for everything else, cuDNN's attention too."""
    instruction, target = run.instruction, _target(run)
    if instruction.opcode == "convolution":
        return _convolution(run, "")
    if (call := _CUDNN.match(target)) and _LABELS.search(instruction.rest):
        return _convolution(run, call.group(1))
    if instruction.opcode == "dot":
        contracted = _CONTRACTED.search(instruction.rest)
    elif target.startswith(_GEMMS):
        contracted = _CALL_CONTRACTED.search(instruction.rest)
    else:
        return 0.0
    ((_, lhs), *_) = arrays_of(run.siblings[instruction.operands[0]].type)
    ((_, result), *_) = arrays_of(instruction.type)
    numbers = contracted.group(1).replace('"', "") if contracted else ""
    return 2.0 * math.prod(result) * math.prod(lhs[int(d)] for d in numbers.split(",") if d)


def library_channels(run: Run) -> Channels | None:
    """Of a convolution that cuDNN is called for; None for everything else."""
    call, groups = _CUDNN.match(_target(run)), _FEATURE_GROUPS.search(run.instruction.rest)
    labels = _LABELS.search(run.instruction.rest)
    if call is None or labels is None:
        return None
    images, kernel, _ = _forward_types(run, call.group(1))
    count = int(groups.group(1)) if groups else 1
    of_images = arrays_of(images)[0][1][labels.group(1).index("f")]
    return Channels(of_images // count, arrays_of(kernel)[0][1][labels.group(2).index("o")] // count, count)


def _forward_types(run: Run, backward: str) -> list[str]:
    """HLO types of images, kernel and result; `backward`: which of cuDNN's gradients computes one of the first two."""
    types = [*(run.siblings[name].type for name in run.instruction.operands[:2]), run.instruction.type]
    if backward == "BackwardInput":  # of the result's gradient and the kernel
        return [types[2], types[1], types[0]]
    return [types[0], types[2], types[1]] if backward else types  # of the images and the result's gradient


def _convolution(run: Run, backward: str) -> float:
    types = _forward_types(run, backward)
    labels = _LABELS.search(run.instruction.rest)
    assert labels is not None
    written = _WINDOW.search(run.instruction.rest)
    window = dict(entry.split("=") for entry in written.group(1).split()) if written else {}
    spatial = sorted(label for label in labels.group(3) if label.isdigit())
    lhs, rhs, result = (
        dict(zip(names, arrays_of(text)[0][1], strict=True))
        for names, text in zip(labels.groups(), types, strict=True)
    )
    groups = _GROUPS.search(run.instruction.rest)
    pairs = 1.0
    for position, label in enumerate(spatial):
        pairs *= _needed_pairs(lhs[label], rhs[label], result[label], window, position)
    batch = lhs["b"] / (int(groups.group(1)) if groups else 1)
    return 2.0 * rhs["i"] * result["f"] * batch * pairs


def _needed_pairs(length: int, kernel: int, results: int, window: Mapping[str, str], position: int) -> int:
    """Pairs of a result and a place of the kernel where, along one dimension, there is something to multiply."""

    def number(key: str, otherwise: str) -> int:
        return int(window.get(key, "x".join([otherwise] * (position + 1))).split("x")[position])

    padding: Sequence[str] = window["pad"].split("x") if "pad" in window else ()
    before = int(padding[position].split("_")[0]) if padding else 0
    step, dilation = number("stride", "1"), number("lhs_dilate", "1")
    places = np.arange(results)[:, None] * step - before + np.arange(kernel)[None, :] * number("rhs_dilate", "1")
    inside = (places >= 0) & (places <= (length - 1) * dilation) & (places % dilation == 0)
    return int(inside.sum())
