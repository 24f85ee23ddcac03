"""Rows plus or times one dense row per sample, and sums of each sample's rows.

The kernels are memory-bound. With E elements of e bytes each, elementwise kernels move 2·E·e bytes.
Sums, which are also the gradient of the dense row, read E·e bytes of x, or 2·E·e of x and y.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.ops.device.jagged import add_chunks, find_chunk, find_tile
from torchrec_jagged_attn.ops.launch import Launcher

TILE = 2048  # elements of a tile of elementwise kernels
SUM_TILE = 512  # elements of a tile of sums: small, for a short final reduction
CHUNK = 256  # fewest rows of a chunk of a sum


@triton.jit(do_not_specialize=["num_samples"])
def _elementwise_kernel(
    x_ptr,  # [N, D]
    y_ptr,  # [B, D]
    out_ptr,  # [N, D]
    offsets_ptr,  # [B + 1]
    num_samples,
    D: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute one tile of a sample's rows of x, plus or times the sample's row of y."""
    tile = tl.program_id(0).to(tl.int64)
    sample, begin, end, start = find_tile(offsets_ptr, num_samples, tile, 1, BLOCK_N)
    n = begin + start + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = n[:, None] * D + d[None, :]
    mask = (n < end)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + sample * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    out = x * y if MULTIPLY else x + y
    tl.store(out_ptr + at, out, mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def _sum_rows_kernel(
    x_ptr,  # [N, D]
    y_ptr,  # [N, D], to sum x · y, or None, to sum x
    out_ptr,  # [B, D]
    sums_ptr,  # [partials, D] fp32
    offsets_ptr,  # [B + 1]
    num_samples,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum the rows of x, or of x · y, over one chunk of a sample."""
    work = tl.program_id(0).to(tl.int64)
    busy, sample, begin, end, partial = find_chunk(offsets_ptr, num_samples, work, CHUNK)
    if not busy:
        return
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        at = n[:, None] * D + d[None, :]
        mask = (n < end)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if y_ptr is not None:
            x *= tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        acc += x
    total = tl.sum(acc, 0)
    if partial >= 0:
        tl.store(sums_ptr + partial * D + d, total, mask=d < D)
    else:
        tl.store(out_ptr + sample * D + d, total, mask=d < D)


_elementwise = Launcher(_elementwise_kernel)
_sum_rows = Launcher(_sum_rows_kernel)


def elementwise(x: Tensor, y: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    """Each row of ``x`` ``[N, D]`` plus or times its sample's row of ``y`` ``[B, D]``."""
    out = x.new_empty(*x.shape)
    if out.numel():
        (num_rows, width), num_samples = x.shape, offsets.numel() - 1
        constants = _row_constants(width, TILE, MULTIPLY=multiply)
        num_tiles = num_rows // constants["BLOCK_N"] + num_samples
        _elementwise(
            (num_tiles, -(-width // constants["BLOCK_D"])),
            (x.contiguous(), y.contiguous(), out, offsets.contiguous(), num_samples),
            constants,
        )
    return out


def sum_rows(x: Tensor, y: Tensor | None, offsets: Tensor) -> Tensor:
    """The sum ``[B, D]`` of each sample's rows of ``x`` ``[N, D]``, or of ``x · y``."""
    num_samples, (num_rows, width) = offsets.numel() - 1, x.shape
    out = x.new_empty(num_samples, width)
    if out.numel():
        constants = _row_constants(width, SUM_TILE, CHUNK=CHUNK)
        num_partials = num_rows // CHUNK
        sums = out.new_empty(num_partials, width, dtype=torch.float32)
        offsets = offsets.contiguous()
        y = None if y is None else y.contiguous()
        _sum_rows(
            (num_partials + num_samples, -(-width // constants["BLOCK_D"])),
            (x.contiguous(), y, out, sums, offsets, num_samples),
            constants,
        )
        add_chunks(sums, out, offsets, width, CHUNK)
    return out


@functools.cache
def _row_constants(width: int, size: int, **others: int) -> dict:
    """Compile-time arguments: ``others``, and tiles of about ``size`` elements, 16 rows or more."""
    block_d = min(128, triton.next_power_of_2(width))
    block_n = max(16, min(128, size // block_d))
    return {"D": width, **others, "BLOCK_N": block_n, "BLOCK_D": block_d}
