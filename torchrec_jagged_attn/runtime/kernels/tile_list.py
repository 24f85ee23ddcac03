"""The tile scheduler of jagged flash attention: a list of tiles, those with most work first.

A tile is a block of rows of one side, queries or keys, of one sample. The list is built on the
device, so that short samples leave no program idle; its capacity follows from shapes. Short
samples, with few rows on both sides, are not in the list: ``general_short.py`` and
``hopper_short.py`` compute them whole.

The tiles of a sample depend on its own lengths alone, so that results are batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.kernels.jagged import clear_rows
from torchrec_jagged_attn.runtime.launch import Launcher

CLASSES = 16  # octaves of lengths
CHUNK = 256  # samples whose tiles a program lists
SCAN = 2048  # samples that it counts at a time
FIELDS = tl.constexpr(5)  # of a tile: sample, row, count, base, num_other, see locate_tile


class RowsBehind(NamedTuple):
    """A tensor whose rows behind the last offset are set to zero."""

    x: Tensor  # [..., rows, H, D], contiguous but for the distance between rows
    is_own: bool  # whether it has the rows of the side whose tiles are listed


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
    """``(num_tiles, of_class, own_row, own, other_row, other)`` of the samples ``b``.

    The class is the octave of the length of the other side, which is the work of a tile. The rest
    is first row and number of rows of each side.
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


@triton.jit
def _clear_rows_behind(
    ptr,
    end,
    num_rows,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Set the rows from ``end`` on to zero, of a tensor that has TIMES times ``num_rows`` rows."""
    for i in tl.static_range(TIMES):
        first = num_rows.to(tl.int64) * (i * STRIDE)
        clear_rows(ptr + first, end, num_rows, STRIDE, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=["num_samples", "num_own", "num_other"])
def _list_tiles_kernel(
    tiles_ptr,  # [1 + capacity, FIELDS] int64
    own_offsets_ptr,  # [B + 1]
    other_offsets_ptr,  # [B + 1]
    cleared,  # tensors of rows, or None
    num_samples,
    num_own,
    num_other,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """List the tiles of one class, of CHUNK samples.

    They follow those of all longer classes, and those of the same class of earlier samples. All
    programs together set the rows of ``cleared`` behind the last offset to zero. CLEARED has, for
    each of these tensors, whether it has ``num_own`` rows or ``num_other``, the distance between
    rows and their width, and how many times it has these rows.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    if cleared is not None:
        own_end = tl.load(own_offsets_ptr + num_samples)
        other_end = tl.load(other_offsets_ptr + num_samples)
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
    if cleared is not None:
        for i in tl.static_range(len(CLEARED)):
            if CLEARED[i][0]:
                _clear_rows_behind(
                    cleared[i], own_end, num_own, CLEARED[i][1], CLEARED[i][2], CLEARED[i][3],
                    CLEARED[i][4],
                )  # fmt: skip
            else:
                _clear_rows_behind(
                    cleared[i], other_end, num_other, CLEARED[i][1], CLEARED[i][2], CLEARED[i][3],
                    CLEARED[i][4],
                )  # fmt: skip


_launch = Launcher(_list_tiles_kernel)


def list_tiles(
    own_offsets: Tensor,
    other_offsets: Tensor,
    capacity: int,
    short: int,
    block: int,
    together: int = 0,
    cleared: Sequence[RowsBehind] = (),
) -> Tensor:
    """List the tiles of ``block`` rows of one side, those of the longest other sides first.

    Samples of at most ``short`` rows on both sides are left out. ``capacity`` is at least the
    number of tiles, see :func:`most_tiles`. The tiles of a sample are consecutive, unless
    ``together``, a power of two, is given: then neighboring samples with about so many rows of the
    other side in all are interleaved, first tiles before second tiles. The rows of the tensors
    ``cleared`` behind the last offset are set to zero.

    Returns:
        ``[1 + capacity, FIELDS]`` int64: in the first row the number of tiles and a zero, which
        programs use as the counter of tiles taken; then one tile per row.
    """
    tiles = own_offsets.new_empty(1 + capacity, FIELDS.value, dtype=torch.int64)
    num_samples = own_offsets.numel() - 1
    num_rows = {rows.is_own: rows.x.shape[-3] for rows in cleared}
    sizes = num_samples, num_rows.get(True, 0), num_rows.get(False, 0)
    _launch(
        (CLASSES * triton.cdiv(num_samples, CHUNK),),
        (tiles, own_offsets, other_offsets, tuple(rows.x for rows in cleared) or None, *sizes),
        {
            "CLEARED": tuple(_constants(*rows) for rows in cleared),
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


def _constants(x: Tensor, is_own: bool) -> tuple[bool, int, int, int, int]:
    """What ``_list_tiles_kernel`` is compiled for, of a tensor that it clears."""
    width = x.shape[-2] * x.shape[-1]
    block_d = min(1024, triton.next_power_of_2(width))
    return is_own, x.stride(-3), width, block_d, 1 if x.dim() == 3 else x.shape[0]


def most_tiles(num_own: int, num_other: int, num_samples: int, short: int, block: int) -> int:
    """An upper bound of the number of tiles of ``block`` rows, without those of short samples.

    ``num_other`` is zero if both sides have the same lengths. A sample has at most one partly
    filled tile. If only samples of more than ``short`` rows have tiles, which hold twice that, a
    sample has at most one tile for each ``short`` rows.
    """
    at_most = num_own // block + num_samples
    if 0 < 2 * short <= block:
        at_most = min(at_most, (num_own + num_other) // short)
    return at_most


@triton.jit
def locate_tile(tiles_ptr, index, CAUSAL: tl.constexpr, OF_KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of the tile ``index`` of the list, and the rows of the other side that they see.

    Returns:
        ``(listed, sample, row, count, base, num_other, low, high, diagonal)``. ``listed``: whether
        there is such a tile. ``row``: its first row, from which on its ``sample`` has ``count``
        rows. ``base`` and ``num_other``: first row and number of rows of the other side, from which
        the rest is counted. Each row of the tile sees ``low`` to ``high - 1``, scalars or
        ``[BLOCK]`` int32. ``diagonal``: the row on the causal diagonal of the tile's first row, as
        far from the end of its side.
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
