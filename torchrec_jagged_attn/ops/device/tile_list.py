"""Tile scheduler of jagged flash attention: a list of tiles, in descending order of work.

Attention has two sides, queries and keys. The rows of one side of a sample are divided into tiles
(the tiled side); each tile is processed with all rows of the other side. The list is built on the
device, so that no program is idle because of short samples; its capacity depends on shapes only.
Short samples, with few rows on both sides, are not listed: ``general_short.py`` and
``hopper_short.py`` compute them.

The tiles of a sample depend only on its own lengths, so results are batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.jagged import clear_rows
from torchrec_jagged_attn.ops.launch import Launcher

CLASSES = 16  # classes of samples, by the octave of the length of the other side
CHUNK = 256  # samples whose tiles a program lists
SCAN = 2048  # samples whose tiles a program counts at a time
FIELDS = tl.constexpr(5)  # fields of a tile: sample, row, count, base, num_other: locate_tile


class RowsBehind(NamedTuple):
    """A tensor whose rows behind the last offset are set to zero."""

    x: Tensor  # [..., rows, H, D], contiguous except for the stride between rows
    is_tiled_side: bool  # whether the rows are rows of the tiled side


@triton.jit
def _count_tiles(
    tiled_offsets_ptr,
    other_offsets_ptr,
    b,
    num_samples,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
):
    """Return ``(num_tiles, tile_class, tiled_row, num_tiled, other_row, num_other)`` of samples.

    The class is the octave of the number of rows of the other side: the work of a tile. ``*_row``
    and ``num_*`` are the first row and the number of rows of each side.
    """
    mask = b < num_samples
    tiled_row = tl.load(tiled_offsets_ptr + b, mask=mask, other=0).to(tl.int64)
    num_tiled = tl.load(tiled_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int64) - tiled_row
    other_row = tl.load(other_offsets_ptr + b, mask=mask, other=0).to(tl.int64)
    num_other = tl.load(other_offsets_ptr + b + 1, mask=mask, other=0).to(tl.int64) - other_row
    is_long = tl.maximum(num_tiled, num_other) > SHORT
    num_tiles = tl.where(is_long, tl.cdiv(num_tiled, BLOCK), 0).to(tl.int32)
    octave = (num_other.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    tile_class = tl.minimum(tl.maximum(octave, 0), NUM_CLASSES - 1)
    return num_tiles, tile_class, tiled_row, num_tiled, other_row, num_other


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
    """Set rows ``end`` to ``num_rows - 1`` to zero, in each of TIMES consecutive matrices."""
    for i in tl.static_range(TIMES):
        first = num_rows.to(tl.int64) * (i * STRIDE)
        clear_rows(ptr + first, end, num_rows, STRIDE, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=["num_samples", "num_tiled", "num_other"])
def _list_tiles_kernel(
    tiles_ptr,  # [1 + capacity, FIELDS] int64
    tiled_offsets_ptr,  # [B + 1]
    other_offsets_ptr,  # [B + 1]
    cleared,  # tuple of tensors, see RowsBehind, or None
    num_samples,
    num_tiled,
    num_other,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_GROUP: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
    CHUNK: tl.constexpr,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """List the tiles of one class and CHUNK samples.

    They follow the tiles of higher classes, and of earlier samples of the same class. All programs
    share the rows of ``cleared`` behind the last offset, and set them to zero. CLEARED has the
    :func:`_clear_constants` of each of these tensors.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    if cleared is not None:
        tiled_end = tl.load(tiled_offsets_ptr + num_samples)
        other_end = tl.load(other_offsets_ptr + num_samples)
    program_class = NUM_CLASSES - 1 - tl.program_id(0) % NUM_CLASSES
    first_sample = tl.program_id(0) // NUM_CLASSES * CHUNK
    listed = first_sample * 0
    for first in range(0, num_samples, SCAN):
        b = first + tl.arange(0, SCAN)
        num_tiles, tile_class, _, _, _, _ = _count_tiles(
            tiled_offsets_ptr, other_offsets_ptr, b, num_samples, SHORT, BLOCK, NUM_CLASSES
        )
        before = (tile_class > program_class) | ((tile_class == program_class) & (b < first_sample))
        listed += tl.sum(tl.where(before, num_tiles, 0))

    b = first_sample + tl.arange(0, CHUNK)
    num_tiles, tile_class, tiled_row, length, other_row, other_length = _count_tiles(
        tiled_offsets_ptr, other_offsets_ptr, b, num_samples, SHORT, BLOCK, NUM_CLASSES
    )
    num_tiles = tl.where(tile_class == program_class, num_tiles, 0)
    position = listed + tl.cumsum(num_tiles, 0) - num_tiles
    lane = tl.arange(0, CHUNK)
    first_lane = lane  # lane of the first sample of a group
    if ROWS_PER_GROUP > 0:
        # Samples per group, a power of two
        size = tl.minimum(tl.maximum(ROWS_PER_GROUP >> (program_class + 1), 1), CHUNK)
        first_lane = lane & -size
        position = tl.gather(position, first_lane, 0)
    for tile in range(tl.max(num_tiles)):
        mask, start = tile < num_tiles, tile * BLOCK
        index = position
        if ROWS_PER_GROUP > 0:
            counts = tl.cumsum(mask.to(tl.int32), 0)
            before = tl.gather(counts - mask.to(tl.int32), first_lane, 0)
            index += counts - 1 - before
            position += tl.gather(counts, first_lane | (size - 1), 0) - before
        else:
            position += 1
        ptrs = tiles_ptr + (1 + index) * FIELDS
        tl.store(ptrs, b, mask=mask)
        tl.store(ptrs + 1, tiled_row + start, mask=mask)
        tl.store(ptrs + 2, length - start, mask=mask)
        tl.store(ptrs + 3, other_row, mask=mask)
        tl.store(ptrs + 4, other_length, mask=mask)
    if (program_class == 0) & (first_sample + CHUNK >= num_samples):
        tl.store(tiles_ptr, listed + tl.sum(num_tiles))
        tl.store(tiles_ptr + 1, 0)
    if cleared is not None:
        for i in tl.static_range(len(CLEARED)):
            if CLEARED[i][0]:
                _clear_rows_behind(
                    cleared[i], tiled_end, num_tiled, CLEARED[i][1], CLEARED[i][2], CLEARED[i][3],
                    CLEARED[i][4],
                )  # fmt: skip
            else:
                _clear_rows_behind(
                    cleared[i], other_end, num_other, CLEARED[i][1], CLEARED[i][2], CLEARED[i][3],
                    CLEARED[i][4],
                )  # fmt: skip


_launch = Launcher(_list_tiles_kernel)


def list_tiles(
    tiled_offsets: Tensor,
    other_offsets: Tensor,
    capacity: int,
    short: int,
    block: int,
    rows_per_group: int = 0,
    cleared: Sequence[RowsBehind] = (),
) -> Tensor:
    """List tiles of one side, in descending order of the length of the other side.

    Args:
        tiled_offsets: ``[B + 1]`` offsets of the rows that are divided into tiles.
        other_offsets: ``[B + 1]`` offsets of the other side.
        capacity: at least the number of tiles, see :func:`max_tiles`.
        short: samples of at most this many rows on both sides are not listed.
        block: rows of a tile.
        rows_per_group: a power of two: the tiles of neighboring samples, with about this many rows
            of the other side together, are interleaved: their first tiles, then their second
            tiles, and so on. By default, the tiles of a sample are consecutive.
        cleared: tensors whose rows behind the last offset are set to zero.

    Returns:
        ``[1 + capacity, FIELDS]`` int64. The first row is the number of tiles and a zero, which
        kernels use as a counter of started tiles. Each other row is a tile.
    """
    tiles = tiled_offsets.new_empty(1 + capacity, FIELDS.value, dtype=torch.int64)
    num_samples = tiled_offsets.numel() - 1
    num_rows = {rows.is_tiled_side: rows.x.shape[-3] for rows in cleared}
    sizes = num_samples, num_rows.get(True, 0), num_rows.get(False, 0)
    _launch(
        (CLASSES * triton.cdiv(num_samples, CHUNK),),
        (tiles, tiled_offsets, other_offsets, tuple(rows.x for rows in cleared) or None, *sizes),
        {
            "CLEARED": tuple(_clear_constants(*rows) for rows in cleared),
            "SHORT": short,
            "BLOCK": block,
            "ROWS_PER_GROUP": rows_per_group,
            "NUM_CLASSES": CLASSES,
            "CHUNK": CHUNK,
            "SCAN": SCAN,
            "OVERLAP": devices.launches_overlap(tiles.device),
            "num_warps": CHUNK // 32,
        },
    )
    return tiles


def _clear_constants(x: Tensor, is_tiled_side: bool) -> tuple[bool, int, int, int, int]:
    """Return ``(is_tiled_side, STRIDE, WIDTH, BLOCK_D, TIMES)`` for :func:`_clear_rows_behind`."""
    width = x.shape[-2] * x.shape[-1]
    block_d = min(1024, triton.next_power_of_2(width))
    return is_tiled_side, x.stride(-3), width, block_d, 1 if x.dim() == 3 else x.shape[0]


def max_tiles(num_tiled: int, num_other: int, num_samples: int, short: int, block: int) -> int:
    """Return an upper bound of the number of tiles that :func:`list_tiles` lists.

    ``num_tiled`` and ``num_other`` are the rows of both sides. ``num_other`` may be zero if the
    samples of both sides have the same lengths. A sample has at most one partly filled tile. If
    ``block`` is at least twice ``short``, a sample has at most one tile per ``short`` rows.
    """
    bound = num_tiled // block + num_samples
    if 0 < 2 * short <= block:
        bound = min(bound, (num_tiled + num_other) // short)
    return bound


@triton.jit
def locate_tile(
    tiles_ptr, index, CAUSAL: tl.constexpr, TILES_OF_KEYS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the tile ``index`` of the list, and the visible rows of the other side.

    Returns:
        ``(listed, sample, row, count, base, num_other, low, high, diagonal)``:

        - ``listed``: whether the tile exists
        - ``sample``: the sample of the tile
        - ``row``, ``count``: first row of the tile, and number of rows of the sample from there on
        - ``base``, ``num_other``: first row and number of rows of the other side
        - ``low``, ``high``: visible to each row of the tile are rows ``low`` to ``high - 1`` of the
          other side, relative to ``base``; scalars or ``[BLOCK]`` int32
        - ``diagonal``: the row of the other side on the causal diagonal of the tile's first row:
          both have the same distance to the end of the sample
    """
    listed = index < tl.load(tiles_ptr)
    tile_ptr = tiles_ptr + (1 + index) * FIELDS
    sample, row = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2).to(tl.int32)
    base, num_other = tl.load(tile_ptr + 3), tl.load(tile_ptr + 4).to(tl.int32)
    low, high = num_other * 0, num_other
    diagonal = num_other - count
    if CAUSAL and TILES_OF_KEYS:
        low = tl.maximum(low, diagonal + tl.arange(0, BLOCK))
    elif CAUSAL:
        high = tl.minimum(high, diagonal + tl.arange(0, BLOCK) + 1)
    return listed, sample, row, count, base, num_other, low, high, diagonal
