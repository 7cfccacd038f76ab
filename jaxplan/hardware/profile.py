"""One machine as a value: peaks and what of them is achieved, memory, links.  Files are read in `library.py`.

A device is what `jax.devices()` lists: a whole TPU v4 or v5p chip (two cores as one), but half a TPU7x
chip and half a K80 board.  Rates are SI and one way; peaks are dense.  Datasheet and achieved are
different fields: a datasheet rate times its `*_efficiency` is what the cost model uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Which class of a profile's `peak_flops_per_s` runs a dot of a dtype, first one listed wins.  Why, by
# platform:
# - TPU: an f32 or f16 dot at JAX's default precision is ONE pass of the bf16 MXU (docs.jax.dev,
#   jax.lax.Precision).
# - GPU: an f32 dot at default precision is TF32 where the GPU has it (Ampere and later), f32 cores before.
# - A class that a machine lacks runs in the next wider one that it has: XLA upcasts (bf16 on V100 runs as
#   f32).
_DOT_CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    "tpu": {
        "float64": (),
        "float32": ("bf16",),
        "bfloat16": ("bf16",),
        "float16": ("bf16",),
        "float8": ("fp8", "bf16"),
        "int8": ("int8", "bf16"),
    },
    "gpu": {
        "float64": ("f64",),
        "float32": ("tf32", "f32"),
        "bfloat16": ("bf16", "f32"),
        "float16": ("f16", "f32"),
        "float8": ("fp8", "bf16", "f16", "f32"),
        "int8": ("int8", "f32"),
    },
    "cpu": {
        "float64": ("f64",),
        "float32": ("f32",),
        "bfloat16": ("bf16", "f32"),
        "float16": ("f16", "f32"),
        "float8": ("f32",),
        "int8": ("int8", "f32"),
    },
}
FLOPS_CLASSES = ("f64", "f32", "tf32", "bf16", "f16", "fp8", "int8")


def _dtype_family(dtype_name: str) -> str:
    if dtype_name.startswith("float8"):
        return "float8"
    if dtype_name in ("int8", "uint8", "int4", "uint4", "int2", "uint2"):
        return "int8"
    if dtype_name in ("float64", "complex128"):
        return "float64"
    if dtype_name == "complex64":
        return "float32"
    return dtype_name


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the interconnect, seen from one device.

    Attributes:
      name: such as "nvlink", "ici", "dcn".
      kind: "switch": a device reaches every other of the domain at `bytes_per_s`.  "torus": every device
        has two links, one each way round, on each of `axes_count` dimensions.
      bytes_per_s: datasheet, one direction, one device; for a torus one link.
      efficiency: achieved share of it for large messages.
      latency_s: one step of a ring or one hop of a torus.
      launch_s: fixed cost of starting a collective.
      domain_size: devices that this link joins; None for the outermost link, which joins everything.
      axes_count, ring_max, wrap_multiple, wrap_min_devices: torus only.  Dimensions of the torus; the
        longest ring of one dimension; a dimension closes into a ring if its length is a multiple of
        `wrap_multiple` and the slice has at least `wrap_min_devices` devices.
    """

    name: str
    kind: Literal["switch", "torus"]
    bytes_per_s: float
    efficiency: float
    latency_s: float
    launch_s: float
    domain_size: int | None = None
    axes_count: int | None = None
    ring_max: int | None = None
    wrap_multiple: int | None = None
    wrap_min_devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A kind of device, its memory and its links (innermost first).

    Attributes:
      name, kind: "tpu-v5e" and "tpu", "gpu" or "cpu".
      device_kinds: the exact strings that `jax.Device.device_kind` gives for it.
      peak_flops_per_s: dense datasheet peaks of matrix products, by class (f64, f32, tf32, bf16, f16, fp8,
        int8).
      matmul_efficiency: achieved share of that peak by a large matrix product.
      matmul_tile: a product's dims are padded up to it by the matrix unit; matmul_rows: TPU: the smaller one of those
        that are not summed is padded up to this instead.
      vector_flops_per_s: peak of everything that is not a matrix product.
      hbm_bytes, reserve_bytes: memory, and what the runtime keeps of it for itself.
      hbm_bytes_per_s, hbm_efficiency: datasheet rate of memory, and the achieved share.
      host_bytes_per_s: between a device's memory and its host's, one way.
      op_overhead_s: no kernel takes less.
      clock_hz: turns the cycles that XLA's TPU compiler estimates into seconds; TPU only.
      tile_s: the least that an elementwise kernel takes for a tile of up to 8 x 128 elements; TPU only.
      on_chip_bytes: what a loop keeps in vector memory from one iteration to the next; TPU only.
      vector_memory_bytes: of vector memory for buffers, see `cost.vector_memory`; TPU only.
      split_vector_memory: 1 where a device is two cores with vector memory each: only fused loops write there; else 0;
        TPU only.
      result_tables: tables of results of several arrays for each value that is stored, where vector memory is not
        looked at, see `cost.ledger`; TPU only.
      copied_slices, slice_bytes: a buffer of so many bytes is copied to vector memory in as many slices, 0 for as many
        as there are such pieces in it; TPU only.
      assigned_efficiency, assigned_flops_share: the shares of memory's datasheet rate and of the peak that XLA reckons
        with where it decides what lies in vector memory; TPU only.
      window_bytes, window_efficiency: what windows of a large product's result and sum fill of vector memory, and the
        share of memory's rate at which windows are read and written; TPU only.
      scoped_bytes: of vector memory for the windows of one operation; TPU only.
      sparse_core_copies: 1 where SparseCores bring lists of rows into another layout while the rest computes, else 0;
        TPU only.
      masks_apart: 1 where random masks of what is normalised are made by themselves (`ir.random_masks`); TPU only.
      masked_tokens: from how many keys on what masks scores is written out, see `cost.scores_twice`, else 0; TPU only.
      turns_first_layers: 1 where updates are made the other way round, see `cost.first_layers`, else 0; TPU only.
      late_stacks: 1 where products that loops stack may run at the end of an iteration, see `cost.carries`, else 0; TPU
        only.
      gathers_in_products: 1 where results are gathered beside products, see `cost.beside_gathers`, else 0; TPU only.
      keeps_erfcs: 1 where exact gelus in f32 are kept beside their arguments, see `cost.kept_erfcs`, else 0; TPU only.
      keeps_drops: 1 where what is dropped out of those is written for products, see there, else 0; TPU only.
      keeps_scores: 1 where scores in f32 are kept beside their softmax's argument, see `cost.kept_scores`, else 0; TPU
        only.
      shared_operand_ratio, batched_operand_ratio, rounded_operand_ratio, turned_operand_ratio: from how many times the
        elements of a product's other operand and result on XLA writes what several products would compute of larger
        arrays, see `cost.shared_operands`; the others of products of several batch dimensions, the third where what is
        computed in wider numbers is rounded, the fourth where scores in f32 are transposed; TPU only.
      core_count, compute_capability: streaming multiprocessors, and NVIDIA's number of the generation; GPU only.
      unaligned_flops_share, unaligned_hbm_share: what a product reaches of others' rates of arithmetic and of memory
        when its rows are no multiples of 16 bytes; GPU only.
      unaligned_efficiency, depthwise_efficiency: of convolutions whose images' channels have to be padded, the achieved
        share of the peak, and of those of one channel a group, of the memory's rate; GPU only.
      atomic_s: an element that is added to memory where others may add, too; GPU only.
      links: innermost first.
      sources: where each number comes from, by its path: "hbm_bytes", "links.ici.bytes_per_s".
    """

    name: str
    kind: Literal["tpu", "gpu", "cpu"]
    device_kinds: tuple[str, ...]
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    matmul_tile: int
    vector_flops_per_s: float
    hbm_bytes: int
    reserve_bytes: int
    hbm_bytes_per_s: float
    hbm_efficiency: float
    host_bytes_per_s: float
    op_overhead_s: float
    links: tuple[Link, ...]
    sources: Mapping[str, str] = field(hash=False, repr=False)
    clock_hz: float | None = None
    tile_s: float | None = None
    on_chip_bytes: int | None = None
    vector_memory_bytes: int | None = None
    split_vector_memory: int | None = None
    result_tables: float | None = None
    copied_slices: int | None = None
    slice_bytes: int | None = None
    assigned_efficiency: float | None = None
    assigned_flops_share: float | None = None
    matmul_rows: int | None = None
    window_bytes: int | None = None
    window_efficiency: float | None = None
    scoped_bytes: int | None = None
    sparse_core_copies: int | None = None
    masks_apart: int | None = None
    masked_tokens: int | None = None
    turns_first_layers: int | None = None
    late_stacks: int | None = None
    gathers_in_products: int | None = None
    keeps_erfcs: int | None = None
    keeps_drops: int | None = None
    keeps_scores: int | None = None
    shared_operand_ratio: float | None = None
    batched_operand_ratio: float | None = None
    rounded_operand_ratio: float | None = None
    turned_operand_ratio: float | None = None
    core_count: int | None = None
    compute_capability: float | None = None
    unaligned_flops_share: float | None = None
    unaligned_hbm_share: float | None = None
    unaligned_efficiency: float | None = None
    depthwise_efficiency: float | None = None
    atomic_s: float | None = None

    @property
    def usable_bytes(self) -> int:
        """Memory of one device that a program may fill: `hbm_bytes - reserve_bytes`."""
        return self.hbm_bytes - self.reserve_bytes

    @property
    def assigned_bytes_per_s(self) -> float:
        """What XLA for TPU takes memory's rate to be where it decides what lies in vector memory."""
        return self.hbm_bytes_per_s * (self.assigned_efficiency or self.hbm_efficiency)

    def peak_for(self, dtype_name: str) -> float:
        """Datasheet FLOP/s of a matrix product whose operands have this NumPy dtype name, default precision.

        See `_DOT_CLASSES` for which unit runs what.  A dtype that no matrix unit runs (int32, bool,
        float64 on TPU) is priced at the vector rate; it is an upper bound where the hardware emulates
        (float64 on TPU).
        """
        name = self.flops_class(dtype_name)
        return self.vector_flops_per_s if name is None else self.peak_flops_per_s[name]

    def flops_class(self, dtype_name: str) -> str | None:
        """The class of `peak_flops_per_s` that runs a matrix product of this dtype; None: no matrix unit does."""
        classes = _DOT_CLASSES[self.kind].get(_dtype_family(dtype_name), ())
        return next((name for name in classes if name in self.peak_flops_per_s), None)
