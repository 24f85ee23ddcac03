"""Which tiles of rows the kernels of jagged flash attention work on, and in which order.

A tile is a block of rows of one side, queries or keys, of one sample. A list of them is made on the
device, so that no program is idle for a short sample and the longest begin first; how many there
may be follows from shapes. Short samples, at most so many rows on both sides, are not in the list:
kernels of their own take a whole sample at a time (``flash_short.py``).

What a sample gets depends on its own lengths alone, so that no result depends on other samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.kernels.launch import Launcher

__all__ = ["list_tiles", "locate_tile"]

CLASSES = 16  # octaves of lengths


@triton.jit
def _count_tiles(
    own_offsets_ptr,
    other_offsets_ptr,
    first,
    num_samples,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``[CHUNK]``: how many tiles the samples from ``first`` on have, and the class of each.

    A class is an octave of the length of the other side, which is the work of a tile.
    """
    b = first + tl.arange(0, CHUNK)
    mask = b < num_samples
    own = tl.load(own_offsets_ptr + b + 1, mask=mask, other=0)
    own = (own - tl.load(own_offsets_ptr + b, mask=mask, other=0)).to(tl.int32)
    other = tl.load(other_offsets_ptr + b + 1, mask=mask, other=0)
    other = (other - tl.load(other_offsets_ptr + b, mask=mask, other=0)).to(tl.int32)
    count = tl.where(tl.maximum(own, other) > SHORT, tl.cdiv(own, BLOCK), 0)
    octave = (other.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return count, tl.minimum(tl.maximum(octave, 0), NUM_CLASSES - 1)


@triton.jit(do_not_specialize=["num_samples"])
def _list_tiles_kernel(
    tiles_ptr,  # [1 + capacity, 2] int32
    own_offsets_ptr,  # [B + 1]
    other_offsets_ptr,  # [B + 1]
    num_samples,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the tiles of the samples of one class, after those of all classes of longer ones."""
    own_class = NUM_CLASSES - 1 - tl.program_id(0)
    listed = tl.program_id(0) * 0
    for first in range(0, num_samples, CHUNK):
        count, of_class = _count_tiles(
            own_offsets_ptr, other_offsets_ptr, first, num_samples, SHORT, BLOCK, NUM_CLASSES, CHUNK
        )
        listed += tl.sum(tl.where(of_class > own_class, count, 0))
    for first in range(0, num_samples, CHUNK):
        count, of_class = _count_tiles(
            own_offsets_ptr, other_offsets_ptr, first, num_samples, SHORT, BLOCK, NUM_CLASSES, CHUNK
        )
        count = tl.where(of_class == own_class, count, 0)
        at = tiles_ptr + 2 * (1 + listed + tl.cumsum(count, 0) - count)
        for tile in range(tl.max(count)):
            tl.store(at + 2 * tile, first + tl.arange(0, CHUNK), mask=tile < count)
            tl.store(at + 2 * tile + 1, tile, mask=tile < count)
        listed += tl.sum(count)
    if own_class == 0:
        tl.store(tiles_ptr, listed)


_launch = Launcher(_list_tiles_kernel)


def list_tiles(
    own: Tensor, other: Tensor, own_offsets: Tensor, other_offsets: Tensor, short: int, block: int
) -> Tensor:
    """List the tiles of ``block`` rows of ``own``, those that meet most rows of ``other`` first.

    Samples of at most ``short`` rows on both sides are left out.

    Returns:
        ``[1 + capacity, 2]`` int32: how many tiles there are; then the sample of each, and its
        number among that sample's.
    """
    num_samples = own_offsets.numel() - 1
    num_long = min(num_samples, (own.shape[0] + other.shape[0]) // (short + 1))
    tiles = own_offsets.new_empty(1 + own.shape[0] // block + num_long, 2, dtype=torch.int32)
    _launch(
        (CLASSES,),
        (tiles, own_offsets, other_offsets, num_samples),
        {"SHORT": short, "BLOCK": block, "NUM_CLASSES": CLASSES, "CHUNK": 2048, "num_warps": 8},
    )
    return tiles


@triton.jit
def locate_tile(
    tiles_ptr,
    own_offsets_ptr,
    other_offsets_ptr,
    index,
    CAUSAL: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the tile ``index`` of the list lies, and what its rows see of the other side.

    Returns:
        ``(sample, row, count, base, num_other, low, high, diagonal)``: its sample; its first row,
        and how many its sample has from there on; the first of the ``num_other`` rows of the
        sample's other side; and, counted from that one, which each row of the tile sees (``low`` to
        ``high - 1``) and which is as far from its side's end as the row is (``[BLOCK]`` int32).
        ``low`` or ``high`` is a scalar where it is one for all.
    """
    sample = tl.load(tiles_ptr + 2 + 2 * index)
    start = tl.load(tiles_ptr + 3 + 2 * index) * BLOCK
    row = tl.load(own_offsets_ptr + sample).to(tl.int64) + start
    count = (tl.load(own_offsets_ptr + sample + 1).to(tl.int64) - row).to(tl.int32)
    base = tl.load(other_offsets_ptr + sample).to(tl.int64)
    num_other = (tl.load(other_offsets_ptr + sample + 1).to(tl.int64) - base).to(tl.int32)
    low, high = num_other * 0, num_other
    diagonal = tl.arange(0, BLOCK) + (num_other - count)
    if CAUSAL and OF_KEYS:
        low = tl.maximum(low, diagonal)
    elif CAUSAL:
        high = tl.minimum(high, diagonal + 1)
    return sample, row, count, base, num_other, low, high, diagonal
