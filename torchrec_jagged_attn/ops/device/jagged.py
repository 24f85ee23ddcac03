"""Jagged rows in kernels: the sample of a row, tiles of rows, and sums over chunks.

The rows of a long sample are split into chunks of equal length, each of which has a partial result.
With at most one partial result per ``ROWS_PER_PARTIAL`` rows, the partial results of sample ``b``
start at index ``offsets[b] // ROWS_PER_PARTIAL``, so no prefix sum is needed.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options


@triton.jit
def find_sample(
    offsets_ptr, num_samples, index, SCALE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Return the last sample ``b`` with ``offsets[b] · SCALE // BLOCK + STEP · b <= index``.

    A 32-ary search: each lane of a warp tests one sample per step.
    """
    low = index * 0
    high = low + num_samples
    while low + 1 < high:
        step = tl.cdiv(high - low, 32)
        at = low + step * tl.arange(0, 32)
        offset = tl.load(offsets_ptr + at, mask=at < high, other=0).to(tl.int64)
        begun = (at < high) & (offset * SCALE // BLOCK + STEP * at <= index)
        low += step * (tl.sum(begun.to(tl.int32)) - 1)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def find_samples(offsets_ptr, n, num_samples, num_steps):
    """Return the sample of each row ``n``, by binary search.

    ``num_steps`` must be the bit length of ``num_samples``.
    """
    low = n * 0
    high = low + num_samples
    for _ in range(num_steps):
        middle = (low + high) >> 1
        begun = tl.load(offsets_ptr + middle).to(tl.int64) <= n
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@triton.jit
def find_tile(offsets_ptr, num_samples, tile, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sample and rows of ``tile``, of BLOCK rows of one sample.

    The tiles of sample ``b`` start at ``offsets[b] // BLOCK + b``, so no prefix sum is needed.
    There are ``N // BLOCK + B`` tiles; at most ``B`` are empty. Offsets are multiplied by SCALE.

    Returns:
        ``(sample, begin, end, start)``: the sample, its first and end row, and the index of the
        tile's first row in the sample. The tile is empty if ``begin + start >= end``.
    """
    sample = find_sample(offsets_ptr, num_samples, tile, SCALE, BLOCK, 1)
    begin = tl.load(offsets_ptr + sample).to(tl.int64) * SCALE
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64) * SCALE
    return sample, begin, end, (tile - begin // BLOCK - sample) * BLOCK


@triton.jit
def clear_rows(ptr, begin, end, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Set rows ``begin`` to ``end - 1`` to zero: WIDTH columns of each, STRIDE elements apart.

    All programs of the kernel share the rows, in blocks of 2048 elements.
    """
    BLOCK: tl.constexpr = max(1, 2048 // BLOCK_D)
    d = tl.arange(0, BLOCK_D)[None, :]
    first = begin.to(tl.int64) + tl.program_id(0) * BLOCK
    for start in range(first, end, tl.num_programs(0) * BLOCK):
        row = start + tl.arange(0, BLOCK)[:, None]
        for column in tl.static_range(0, WIDTH, BLOCK_D):
            mask = (row < end) & (column + d < WIDTH)
            zeros = tl.zeros([BLOCK, BLOCK_D], ptr.dtype.element_ty)
            tl.store(ptr + row * STRIDE + (column + d), zeros, mask=mask)


@triton.jit
def find_chunk(offsets_ptr, num_samples, work, CHUNK: tl.constexpr):
    """Return the chunk of index ``work``, usually the program's.

    The first ``num_samples`` indices are the first chunks of all samples. The other
    ``N // CHUNK`` are one index per partial result, for later chunks.

    Returns:
        ``(busy, sample, begin, end, partial)``: whether the chunk exists, its sample, its first and
        end row, and the index of its partial result, or -1 if the chunk is the whole sample.
    """
    sample = work
    later_partial = work - num_samples
    if later_partial >= 0:
        sample = find_sample(offsets_ptr, num_samples, later_partial, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin
    chunks = count_chunks(length, 1, CHUNK, CHUNK)
    first_partial = begin // CHUNK
    chunk = tl.where(later_partial >= 0, later_partial - first_partial, 0)
    busy = (chunk < chunks) & ((chunk > 0) | (later_partial < 0))
    partial = tl.where(chunks > 1, first_partial + chunk, -1)
    end = begin + length * (chunk + 1) // chunks
    return busy, sample, begin + length * chunk // chunks, end, partial


@triton.jit(do_not_specialize=["num_samples"])
def _add_chunks_kernel(
    sums_ptr,  # [partials, W] fp32
    out_ptr,  # [B, W]
    offsets_ptr,  # [B + 1]
    num_samples,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add BLOCK elements of the partial sums of a sample, in the program of its first partial sum.

    The programs of its other partial sums do nothing. With OVERLAP, they still wait for the
    previous kernel, so that its results are complete when the next kernel starts.
    """
    partial = tl.program_id(0).to(tl.int64)
    sample = find_sample(offsets_ptr, num_samples, partial, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    chunks = count_chunks(tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin, 1, CHUNK, CHUNK)
    if OVERLAP:
        cuda.gdc_wait()
    if (chunks == 1) | (partial != begin // CHUNK):
        return
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.range(partial, partial + chunks, num_stages=4):
        acc += tl.load(sums_ptr + chunk * W + w, mask=w < W, other=0.0)
    tl.store(out_ptr + sample * W + w, acc, mask=w < W)


_add_chunks = Launcher(_add_chunks_kernel)


def add_chunks(sums: Tensor, out: Tensor, offsets: Tensor, width: int, chunk: int) -> None:
    """Add the partial sums ``[partials, …]`` of samples with several chunks to ``out`` ``[B, …]``.

    Rows of both have ``width`` elements.
    """
    num_partials = sums.shape[0]
    if num_partials:
        _add_chunks(
            (num_partials, -(-width // 2048)),
            (sums, out, offsets, offsets.numel() - 1),
            _add_constants(width, chunk, devices.launches_overlap(out.device)),
        )


@functools.cache
def _add_constants(width: int, chunk: int, overlap: bool) -> dict:
    """Return the compile-time constants of ``_add_chunks_kernel``."""
    block = min(2048, max(16, triton.next_power_of_2(width)))
    return {"W": width, "CHUNK": chunk, "BLOCK": block, **overlap_options(overlap)}


@triton.jit
def count_chunks(length, num_blocks, CHUNK: tl.constexpr, ROWS_PER_PARTIAL: tl.constexpr):
    """Return the number of chunks of a history of ``length`` rows.

    A chunk has at least ``CHUNK`` and at least ``ROWS_PER_PARTIAL · num_blocks`` rows, where
    ``num_blocks`` is the number of blocks of query rows. So samples with several chunks have at
    most ``length // ROWS_PER_PARTIAL`` pairs of chunk and block. Each pair has a partial result;
    sample ``b`` starts at index ``offsets[b] // ROWS_PER_PARTIAL``. They are ordered by chunk.
    """
    rows = tl.maximum(ROWS_PER_PARTIAL * num_blocks, CHUNK)
    return tl.maximum(length.to(tl.int32) // rows.to(tl.int32), 1).to(tl.int64)
