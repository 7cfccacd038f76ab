"""Which sums XLA for TPU makes whole though each device wants a piece, beside what it was seen to."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxplan.cost.whole_sums import made_whole
from jaxplan.ir import Value
from jaxplan.sharding import NONE

AXES = (("data", 4), ("model", 2))

SEEN: dict[tuple[str, tuple[int, ...], tuple[int, int] | None, tuple[int, int]], bool] = {
    # dtype, shape, sides, which dimensions data and model cut: whether the sum scattered onto the first is made whole
    ("bfloat16", (768, 12, 64), (0, 1), (0, 0)): True,  # 96 lanes
    ("bfloat16", (768, 12, 64), (0, 1), (2, 2)): True,  # 8 rows of pairs
    ("bfloat16", (12, 64, 768), (0, 2), (1, 1)): True,
    ("bfloat16", (12, 64, 768), (0, 2), (2, 2)): True,
    ("bfloat16", (1024, 16, 64), (0, 1), (0, 0)): True,  # 128 lanes: half a packed row
    ("bfloat16", (1024, 16, 64), (0, 1), (1, 1)): False,
    ("bfloat16", (2048, 16, 64), (0, 1), (0, 0)): False,
    ("bfloat16", (768, 3, 12, 64), (0, 1), (0, 0)): True,
    ("bfloat16", (768, 3072), (0, 1), (0, 0)): False,
    ("bfloat16", (768, 3072), (0, 1), (1, 1)): True,  # 384 lanes
    ("bfloat16", (3072, 768), (0, 1), (1, 1)): False,  # lies with the 3072 in lanes
    ("bfloat16", (768, 64), (0, 1), (0, 0)): True,
    ("bfloat16", (768, 64), (0, 1), (1, 1)): False,  # 8 rows, the outermost dimension
    ("bfloat16", (32, 2048), (0, 1), (0, 0)): True,
    ("bfloat16", (192, 768), (0, 1), (0, 0)): False,
    ("bfloat16", (12, 192, 768), (0, 2), (1, 1)): True,  # 24 rows
    ("bfloat16", (384, 6, 64), (0, 1), (0, 0)): False,
    ("bfloat16", (768, 192), (0, 1), (0, 0)): False,
    ("bfloat16", (768, 12, 64), (0, 1), (0, 1)): True,  # 192 lanes over data, heads over model
    ("bfloat16", (768, 12, 64), (0, 1), (2, 1)): False,
    ("bfloat16", (16, 64, 1024), (0, 2), (1, 0)): False,
    ("float32", (768, 12, 64), (0, 1), (0, 0)): True,
    ("float32", (768, 12, 64), (0, 1), (2, 2)): False,
    ("float32", (3072, 12, 64), (0, 1), (0, 0)): False,
    ("float32", (768, 3072), (0, 1), (1, 1)): False,
    ("float32", (640, 10, 64), (0, 1), (0, 0)): True,
    ("float32", (768, 64), (0, 1), (0, 0)): True,
    ("float32", (16, 32, 2048), (0, 2), (1, 1)): True,  # 4 rows
    ("float32", (512, 8, 64), (0, 1), (0, 0)): False,
    ("float32", (1024, 3, 16, 64), (0, 1), (2, 2)): True,  # two heads of each of queries, keys and values
    ("float32", (1024, 16, 3, 64), (0, 1), (1, 1)): False,
    ("bfloat16", (1024, 16, 128), (0, 1), (1, 1)): False,  # heads are outermost, the 1024 in rows
    ("float32", (1024, 3, 16, 128), (0, 1), (2, 2)): True,
    ("float32", (256, 4, 8, 128), (0, 1), (2, 2)): False,  # pieces of one element lie outermost
    ("float32", (3, 16, 64, 1024), (0, 3), (1, 1)): True,
    ("bfloat16", (64, 3, 32, 256), (0, 1), (0, 0)): True,  # 8 rows
    ("bfloat16", (64, 3, 32, 256), (0, 3), (0, 0)): False,  # the 32 lie in rows
    ("bfloat16", (3, 512, 8, 80), (0, 2), (3, 3)): True,
    ("float32", (3, 768, 32, 64), (0, 2), (2, 2)): True,
    ("bfloat16", (192, 4, 1024), (1, 2), (0, 0)): True,  # tiles of four rows
    ("float32", (1, 1, 512, 2048), None, (2, 2)): True,  # a 1 x 1 convolution's kernel
    ("bfloat16", (1, 1, 2048, 512), None, (2, 2)): True,
    ("float32", (1, 1, 512, 2048), None, (3, 3)): False,
    ("float32", (1, 512, 2048), (0, 2), (1, 1)): True,
    ("float32", (1, 3, 512, 512), None, (2, 2)): False,
    ("bfloat16", (3, 3, 512, 512), None, (2, 2)): False,
    ("float32", (30522, 768), (0, 1), (1, 1)): True,  # 239 tiles of lanes
    ("bfloat16", (30592, 768), (0, 1), (1, 1)): True,
    ("float32", (32128, 768), (0, 1), (1, 1)): True,  # 251
    ("float32", (128256, 768), (0, 1), (1, 1)): True,  # 2 * 3 * 167
    ("float32", (20096, 512), (0, 1), (1, 1)): True,  # 157
    ("float32", (4096, 20096), (0, 1), (0, 0)): True,
    ("float32", (708608, 512), (0, 1), (1, 1)): True,  # 32 * 173
    ("float32", (19328, 512), (0, 1), (1, 1)): False,  # 151
    ("bfloat16", (19328, 768), (0, 1), (1, 1)): False,
    ("float32", (50257, 768), (0, 1), (1, 1)): False,  # 3 * 131
    ("float32", (51865, 768), (0, 1), (1, 1)): False,  # 2 * 7 * 29
    ("float32", (32000, 768), (0, 1), (1, 1)): False,
    ("float32", (40962, 256), (0, 1), (1, 1)): False,
    ("float32", (30522, 1024), (0, 1), (1, 1)): False,  # the 1024 lie in lanes
    ("float32", (512, 160768), (0, 1), (1, 1)): False,  # cut in lanes
    ("float32", (2, 1536, 1536), (1, 2), (1, 0)): True,  # one of two on each device
    ("bfloat16", (64, 51865), (0, 1), (0, 0)): True,  # 8 rows beside 2 * 203 tiles: lanes are only halved
    ("float32", (64, 51865), (0, 1), (0, 0)): True,
    ("bfloat16", (128, 51865), (0, 1), (0, 0)): True,
    ("bfloat16", (384, 51865), (0, 1), (0, 0)): False,
    ("bfloat16", (32, 51865), (0, 1), (0, -1)): False,  # over four devices
    ("bfloat16", (64, 51712), (0, 1), (0, 0)): False,  # 4 * 101
    ("bfloat16", (64, 38784), (0, 1), (0, 0)): True,  # 303
    ("bfloat16", (64, 38912), (0, 1), (0, 0)): False,  # 304
    ("bfloat16", (64, 78336), (0, 1), (0, 0)): True,  # 4 * 153
    ("bfloat16", (64, 116224), (0, 1), (0, 0)): True,  # 4 * 227
    ("bfloat16", (64, 131072), (0, 1), (0, 0)): False,
}


@pytest.mark.parametrize("case", SEEN, ids=str)
def test_a_sum_is_made_whole_where_its_piece_is_no_whole_tiles(
    case: tuple[str, tuple[int, ...], tuple[int, int] | None, tuple[int, int]],
) -> None:
    dtype, shape, sides, cut = case
    item_bytes = 2 if dtype == "bfloat16" else 4
    tensor = Value(index=0, name="sum", shape=shape, dtype=dtype, item_bytes=item_bytes, sides=sides)
    devices = math.prod(size for (_, size), dim in zip(AXES, cut, strict=True) if dim == cut[0])
    (whole,) = made_whole(tensor, np.array([cut], np.int8), AXES, devices)
    assert whole[cut[0]] == SEEN[case]


@pytest.mark.parametrize(("shape", "whole"), [((4097, 864), True), ((4097, 1024), False)])
def test_complex_numbers_are_two_of_f32(shape: tuple[int, int], whole: bool) -> None:
    """Gradients of a long convolution's spectrum onto 108 columns: all_reduced, and cut (v5e, jax 0.10.2)."""
    tensor = Value(index=0, name="sum", shape=shape, dtype="complex64", item_bytes=8)
    assert bool(made_whole(tensor, np.array([[1, 1]], np.int8), AXES, 8)[0, 1]) == whole


@pytest.mark.parametrize(("ordered", "whole"), [(True, [True, False]), (False, [False, False])])
def test_what_a_kernel_of_its_own_writes_lies_in_order(ordered: bool, whole: list[bool]) -> None:
    """A product of ragged groups onto 96 columns: elsewhere the rows would lie in lanes (v5e, jax 0.10.2)."""
    product = Value(index=0, name="sum", shape=(65536, 768), dtype="bfloat16", item_bytes=2, ordered=ordered)
    cuts = np.array([(1, 1), (0, 0)], np.int8)
    assert [bool(row[cut[0]]) for row, cut in zip(made_whole(product, cuts, AXES, 8), cuts, strict=True)] == whole


SEEN_IMAGES: dict[tuple[str, tuple[int, ...], int], bool] = {
    # dtype, images of a convolution (batch, height, width, channels), the dimension that both axes cut
    ("bfloat16", (64, 8, 8, 512), 0): True,  # 8 rows
    ("bfloat16", (128, 8, 8, 512), 0): False,
    ("bfloat16", (256, 16, 16, 256), 0): False,
    ("float32", (64, 8, 8, 512), 0): False,
    ("bfloat16", (64, 32, 32, 256), 0): True,
    ("bfloat16", (64, 7, 7, 512), 0): True,
    ("bfloat16", (128, 14, 14, 512), 0): False,
    ("bfloat16", (32, 8, 8, 512), 0): True,
    ("bfloat16", (64, 8, 8, 1024), 3): True,  # 128 lanes: half a packed row
    ("bfloat16", (64, 8, 8, 2048), 3): False,
    ("bfloat16", (64, 16, 16, 512), 1): False,
    ("bfloat16", (64, 16, 16, 512), 2): True,  # not the outermost
    ("bfloat16", (1024, 8, 8, 64), 0): True,  # the batch in lanes
    ("float32", (1024, 8, 8, 64), 0): False,
    ("bfloat16", (2048, 8, 8, 64), 0): False,
    ("bfloat16", (512, 16, 16, 32), 0): True,
    ("bfloat16", (256, 16, 16, 64), 0): False,
    ("bfloat16", (256, 16, 16, 64), 3): True,  # 8 channels in rows
    ("bfloat16", (8, 64, 64, 128), 1): False,
    ("bfloat16", (4, 64, 64, 128), 1): True,  # height in rows
    ("bfloat16", (1, 128, 128, 128), 1): False,
    ("bfloat16", (2, 128, 128, 256), 2): True,
}


@pytest.mark.parametrize("case", SEEN_IMAGES, ids=str)
def test_a_convolutions_sum_lies_as_images_do(case: tuple[str, tuple[int, ...], int]) -> None:
    dtype, shape, cut = case
    item_bytes = 2 if dtype == "bfloat16" else 4
    tensor = Value(index=0, name="sum", shape=shape, dtype=dtype, item_bytes=item_bytes, image=(0, 3, 1, 2))
    (whole,) = made_whole(tensor, np.array([[cut, cut]], np.int8), AXES, 8)
    assert whole[cut] == SEEN_IMAGES[case]


def test_sums_of_rounded_f32_are_of_f32_and_vectors_are_left() -> None:
    rounded = Value(index=0, name="sum", shape=(3072, 12, 64), dtype="float32", item_bytes=4).narrow()
    assert not made_whole(rounded, np.array([[0, 0]], np.int8), AXES, 8)[0, 0]
    vector = Value(index=0, name="sum", shape=(768,), dtype="float32", item_bytes=4)
    assert not made_whole(vector, np.array([[0, NONE]], np.int8), AXES, 4).any()
