"""Which tiles of rows the kernels of jagged flash attention work on, and in which order.

A tile is a block of rows of one side, queries or keys, of one sample. A list of them is made on the
device, so that no program is idle for a short sample and the longest begin first; how many there
may be follows from shapes. Short samples, at most so many rows on both sides, are not in the list:
kernels of their own take a whole sample at a time (``general_short.py``, ``hopper_short.py``).

What a sample gets depends on its own lengths alone, so that no result depends on other samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.launch import Launcher

__all__ = ["list_tiles", "locate_tile", "most_tiles"]

CLASSES = 16  # octaves of lengths
CHUNK = 256  # samples of a program that lists tiles
SCAN = 2048  # samples that it counts at a time


FIELDS = tl.constexpr(5)  # of a tile: sample, row, count, base, num_other, see locate_tile


@triton.jit
def _count_tiles(
    own_offsets_ptr,
    other_offsets_ptr,
    b,
    num_samples,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
):
    """How many tiles each of the samples ``b`` has, its class, and its rows.

    A class is an octave of the length of the other side, which is the work of a tile. All are
    shaped as ``b``; rows are first one and number, of either side.
    """
    mask = b < num_samples
    own_row = tl.load(own_offsets_ptr + b, mask=mask, other=0).to(tl.int64)
    own = tl.load(own_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int64) - own_row
    other_row = tl.load(other_offsets_ptr + b, mask=mask, other=0).to(tl.int64)
    other = tl.load(other_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int64) - other_row
    num_tiles = tl.where(tl.maximum(own, other) > SHORT, tl.cdiv(own, BLOCK), 0).to(tl.int32)
    octave = (other.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    of_class = tl.minimum(tl.maximum(octave, 0), NUM_CLASSES - 1)
    return num_tiles, of_class, own_row, own, other_row, other


@triton.jit(do_not_specialize=["num_samples"])
def _list_tiles_kernel(
    tiles_ptr,  # [1 + capacity, FIELDS] int64
    own_offsets_ptr,  # [B + 1]
    other_offsets_ptr,  # [B + 1]
    num_samples,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the tiles of a chunk's samples of one class.

    They come after those of all longer classes, and of the same class in earlier chunks.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    own_class = NUM_CLASSES - 1 - tl.program_id(0) % NUM_CLASSES
    own_first = tl.program_id(0) // NUM_CLASSES * CHUNK
    listed = own_first * 0
    for first in range(0, num_samples, SCAN):
        b = first + tl.arange(0, SCAN)
        num_tiles, of_class, _, _, _, _ = _count_tiles(
            own_offsets_ptr, other_offsets_ptr, b, num_samples, SHORT, BLOCK, NUM_CLASSES
        )
        before = (of_class > own_class) | ((of_class == own_class) & (b < own_first))
        listed += tl.sum(tl.where(before, num_tiles, 0))

    b = own_first + tl.arange(0, CHUNK)
    num_tiles, of_class, own_row, own, other_row, other = _count_tiles(
        own_offsets_ptr, other_offsets_ptr, b, num_samples, SHORT, BLOCK, NUM_CLASSES
    )
    num_tiles = tl.where(of_class == own_class, num_tiles, 0)
    position = listed + tl.cumsum(num_tiles, 0) - num_tiles
    lane = tl.arange(0, CHUNK)
    first_lane = lane
    if TOGETHER > 0:
        size = tl.minimum(tl.maximum(TOGETHER >> (own_class + 1), 1), CHUNK)  # a power of two
        first_lane = lane & -size
        position = tl.gather(position, first_lane, 0)
    for tile in range(tl.max(num_tiles)):
        mask, start = tile < num_tiles, tile * BLOCK
        at = position
        if TOGETHER > 0:
            upto = tl.cumsum(mask.to(tl.int32), 0)
            before = tl.gather(upto - mask.to(tl.int32), first_lane, 0)
            at += upto - 1 - before
            position += tl.gather(upto, first_lane | (size - 1), 0) - before
        else:
            position += 1
        ptrs = tiles_ptr + (1 + at) * FIELDS
        tl.store(ptrs, b, mask=mask)
        tl.store(ptrs + 1, own_row + start, mask=mask)
        tl.store(ptrs + 2, own - start, mask=mask)
        tl.store(ptrs + 3, other_row, mask=mask)
        tl.store(ptrs + 4, other, mask=mask)
    if (own_class == 0) & (own_first + CHUNK >= num_samples):
        tl.store(tiles_ptr, listed + tl.sum(num_tiles))
        tl.store(tiles_ptr + 1, 0)


_launch = Launcher(_list_tiles_kernel)


def list_tiles(
    own_offsets: Tensor,
    other_offsets: Tensor,
    capacity: int,
    short: int,
    block: int,
    together: int = 0,
) -> Tensor:
    """List the tiles of ``block`` rows of one side, those that meet most of the other side first.

    Samples of at most ``short`` rows on both sides are left out. There may be no more tiles than
    ``capacity``, see :func:`most_tiles`. The tiles of a sample lie one after the other, unless
    ``together``, a power of two, is given. Then neighboring samples, which together have about
    so many rows of the other side, are interleaved: the first tile of each, then the second ones.

    Returns:
        ``[1 + capacity, FIELDS]`` int64: how many tiles there are, a zero for programs to count
        what they have taken, and, from the second row on, where each tile lies.
    """
    tiles = own_offsets.new_empty(1 + capacity, FIELDS.value, dtype=torch.int64)
    num_samples = own_offsets.numel() - 1
    _launch(
        (CLASSES * triton.cdiv(num_samples, CHUNK),),
        (tiles, own_offsets, other_offsets, num_samples),
        {
            "SHORT": short,
            "BLOCK": block,
            "TOGETHER": together,
            "NUM_CLASSES": CLASSES,
            "CHUNK": CHUNK,
            "SCAN": SCAN,
            "OVERLAP": devices.launches_overlap(tiles.device),
            "num_warps": CHUNK // 32,
        },
    )
    return tiles


def most_tiles(num_own: int, num_other: int, num_samples: int, short: int, block: int) -> int:
    """How many tiles of ``block`` rows any samples of so many rows have, short ones left out.

    ``num_other`` is zero where the other side's rows are as many in every sample. A sample has at
    most one tile more than it fills; and, where it takes more than ``short`` rows to have any and a
    tile holds twice that, at most one for each ``short`` rows.
    """
    at_most = num_own // block + num_samples
    if 0 < 2 * short <= block:
        at_most = min(at_most, (num_own + num_other) // short)
    return at_most


@triton.jit
def locate_tile(tiles_ptr, index, CAUSAL: tl.constexpr, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tile ``index`` of the list lies, and what its rows see of the other side.

    Returns:
        ``(listed, sample, row, count, base, num_other, low, high, diagonal)``. ``listed`` says
        whether there is such a tile. Its first row is ``row``, from where on its ``sample`` has
        ``count`` rows. The sample's other side has ``num_other`` rows, the first of them ``base``.
        The last three are counted from that one. Each row of the tile sees ``low`` to ``high - 1``,
        ``[BLOCK]`` int32, or a scalar where it is one for all. ``diagonal`` is as far from its
        side's end as the tile's first row is from its own.
    """
    listed = index < tl.load(tiles_ptr)
    tile_ptr = tiles_ptr + (1 + index) * FIELDS
    sample, row = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2).to(tl.int32)
    base, num_other = tl.load(tile_ptr + 3), tl.load(tile_ptr + 4).to(tl.int32)
    low, high = num_other * 0, num_other
    diagonal = num_other - count
    if CAUSAL and OF_KEYS:
        low = tl.maximum(low, diagonal + tl.arange(0, BLOCK))
    elif CAUSAL:
        high = tl.minimum(high, diagonal + tl.arange(0, BLOCK) + 1)
    return listed, sample, row, count, base, num_other, low, high, diagonal
