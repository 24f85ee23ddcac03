"""Jagged rows on the device: the sample of a row, tiles of rows, and chunks that are summed up."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.launch import Launcher

__all__ = ["add_chunks", "count_chunks", "find_chunk", "find_sample", "find_samples", "find_tile"]


@triton.jit
def find_sample(
    offsets_ptr, num_samples, slot, SCALE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """The last sample ``b`` with ``offsets[b] · SCALE // BLOCK + STEP · b`` at most ``slot``.

    In each step, all lanes of a warp look, each at the beginning of a 32nd of what is left.
    """
    low = slot * 0
    high = low + num_samples
    while low + 1 < high:
        step = tl.cdiv(high - low, 32)
        at = low + step * tl.arange(0, 32)
        offset = tl.load(offsets_ptr + at, mask=at < high, other=0).to(tl.int64)
        begun = (at < high) & (offset * SCALE // BLOCK + STEP * at <= slot)
        low += step * (tl.sum(begun.to(tl.int32)) - 1)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def find_samples(offsets_ptr, n, num_samples, num_steps):
    """The sample of each of the rows ``n``, in so many halvings: bits of ``num_samples``."""
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
    """The sample that owns ``tile``, that sample's rows, and the tile's first row in it.

    No tile of BLOCK rows has rows of two samples. Sample ``b`` owns the tiles from
    ``offsets[b] // BLOCK + b`` on: a number known without a prefix sum. All samples together have
    ``N // BLOCK + B`` tiles, of which at most ``B`` are idle. A row that ``offsets`` (``[B + 1]``)
    count stands for SCALE rows.

    Returns ``(sample, begin, end, start)``; the tile is idle where ``begin + start >= end``.
    """
    sample = find_sample(offsets_ptr, num_samples, tile, SCALE, BLOCK, 1)
    begin = tl.load(offsets_ptr + sample).to(tl.int64) * SCALE
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64) * SCALE
    return sample, begin, end, (tile - begin // BLOCK - sample) * BLOCK


@triton.jit
def find_chunk(offsets_ptr, num_samples, work, CHUNK: tl.constexpr):
    """The chunk of a sample's rows that is the ``work`` of a program.

    The first ``num_samples`` take the first chunk of every sample, the others (``N // CHUNK``) the
    later chunks, each its slot's. See ``count_chunks`` for slots.

    Returns whether there is anything to do, the sample, begin and end of the chunk, and its slot,
    -1 where the chunk is the whole sample.
    """
    sample = work
    of_slot = work - num_samples
    if of_slot >= 0:
        sample = find_sample(offsets_ptr, num_samples, of_slot, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin
    chunks = count_chunks(length, 1, CHUNK, CHUNK)
    first_slot = begin // CHUNK
    chunk = tl.where(of_slot >= 0, of_slot - first_slot, 0)
    busy = (chunk < chunks) & ((chunk > 0) | (of_slot < 0))
    slot = tl.where(chunks > 1, first_slot + chunk, -1)
    end = begin + length * (chunk + 1) // chunks
    return busy, sample, begin + length * chunk // chunks, end, slot


@triton.jit(do_not_specialize=["num_samples"])
def _add_chunks_kernel(
    sums_ptr,  # [slots, W] fp32
    out_ptr,  # [B, W]
    offsets_ptr,  # [B + 1]
    num_samples,
    W: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK sums of the sample, if there is one, whose first chunk has this program's slot.

    Where launches OVERLAP, all programs wait for the kernel that made the sums, also those without
    work: so the next kernel finds everything done.
    """
    slot = tl.program_id(0).to(tl.int64)
    sample = find_sample(offsets_ptr, num_samples, slot, 1, CHUNK, 0)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    chunks = count_chunks(tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin, 1, CHUNK, CHUNK)
    if OVERLAP:
        cuda.gdc_wait()
    if (chunks == 1) | (slot != begin // CHUNK):
        return
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for chunk in tl.range(slot, slot + chunks, num_stages=4):
        acc += tl.load(sums_ptr + chunk * W + w, mask=w < W, other=0.0)
    tl.store(out_ptr + sample * W + w, acc, mask=w < W)


_add_chunks = Launcher(_add_chunks_kernel)


def add_chunks(sums: Tensor, out: Tensor, offsets: Tensor, width: int, chunk: int) -> None:
    """Add ``[slots, …]`` sums of chunks into ``[B, …]``, of ``width`` elements each, for the
    samples that have several.
    """
    num_slots = sums.shape[0]
    if num_slots:
        _add_chunks(
            (num_slots, -(-width // 2048)),
            (sums, out, offsets, offsets.numel() - 1),
            _add_constants(width, chunk, devices.launches_overlap(out.device)),
        )


@functools.cache
def _add_constants(width: int, chunk: int, overlap: bool) -> dict:
    """Compile-time arguments of ``_add_chunks_kernel``."""
    block = min(2048, max(16, triton.next_power_of_2(width)))
    options = {"launch_pdl": True} if overlap else {}
    return {"W": width, "CHUNK": chunk, "BLOCK": block, "OVERLAP": overlap, **options}


@triton.jit
def count_chunks(length, num_blocks, CHUNK: tl.constexpr, SLOT: tl.constexpr):
    """Into how many chunks a history is cut for its blocks of query rows.

    There is one for each ``CHUNK`` rows, or ``SLOT · num_blocks`` where that is more: so all
    samples together have no more than ``N // SLOT`` pairs of chunk and block, where they are cut at
    all. Those numbered from ``offsets[b] // SLOT`` on, chunk by chunk, are sample ``b``'s slots.
    """
    rows = tl.maximum(SLOT * num_blocks, CHUNK)
    return tl.maximum(length.to(tl.int32) // rows.to(tl.int32), 1).to(tl.int64)
