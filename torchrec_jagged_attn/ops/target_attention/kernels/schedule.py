"""Work decomposition of target attention: query rows into blocks, long histories into chunks.

If a history has several chunks, each of them has a partial result for each block of query rows.
The index of a partial result follows from offsets, without a prefix sum: there is one for every
ROWS_PER_PARTIAL rows of the batch, and the partial results of sample ``b`` begin at
``offsets[b] // ROWS_PER_PARTIAL``. For four samples with one block of query rows each, and
CHUNK = ROWS_PER_PARTIAL = 64:

    offsets    0      40                               240   270                       420
    samples    |  0   |               1                |  2  |            3            |
    chunks     |  40  |  80 rows   |  80 rows   |  40  |  30 |   80 rows   |  70 rows  |
    partials                0            1         2                4            5

Samples 0 and 2 have a single chunk and no partial result. Partial result 3 is not used: buffers
have room for ``N // 64 = 6``, so that their size does not depend on the lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from torchrec_jagged_attn.ops.device.jagged import (
    clear_rows,
    count_chunks,
    find_sample,
    find_tile,
)
from torchrec_jagged_attn.ops.device.softmax import store_stats

# Layout of queries: one block of rows per sample, the same block for all samples, or jagged.
DENSE, SHARED, JAGGED = (tl.constexpr(layout) for layout in range(3))
SAMPLES_PER_PROGRAM = 128  # of ``split_schedule_kernel``


class Work(NamedTuple):
    """The work of a program of the general kernels: a chunk of a history and a block of queries."""

    busy: Any  # whether there is such a chunk and block
    sample: Any
    block: Any  # index of the block of the sample's query rows
    begin: Any  # first history row of the chunk
    end: Any  # end of the chunk's history rows
    partial: Any  # index of the partial result; -1 if the chunk is the whole sample
    row: Any  # first query row of the sample
    count: Any  # number of query rows of the sample


@triton.jit
def query_rows(samples, sample, num_targets, C: tl.constexpr):
    """First output row of ``sample``, and the number of its query rows."""
    if C.LAYOUT == JAGGED:
        first = tl.load(samples.query_offsets + sample).to(tl.int64) * C.H
        count = tl.load(samples.query_offsets + sample + 1).to(tl.int64) * C.H - first
    else:
        count = num_targets.to(tl.int64) * C.H
        first = sample * count
    return first, count


@triton.jit
def rows_of_chunk(length, chunks):
    """Rows of each chunk, a multiple of 16; the last chunks may have fewer rows, or none."""
    rows = (length.to(tl.int32) + chunks.to(tl.int32) - 1) // chunks.to(tl.int32)
    return (rows + 15) // 16 * 16


@triton.jit
def find_work(
    samples, num_samples, num_targets, num_partials, C: tl.constexpr, ALL_BLOCKS: tl.constexpr
):
    """The :class:`Work` of this program.

    The first ``num_partials`` programs compute one partial result each, except for partial results
    of first chunks, which the other programs compute: one for each sample and block. If ALL_BLOCKS,
    a program computes all blocks of its sample, as if they were one.
    """
    program = tl.program_id(0).to(tl.int64)
    later = program < num_partials
    first = tl.maximum(program - num_partials, 0)
    block = program * 0
    if later:
        sample = find_sample(samples.offsets, num_samples, program, 1, C.ROWS_PER_PARTIAL, 0)
    elif ALL_BLOCKS:
        sample = first
    elif C.LAYOUT == JAGGED:
        sample, _, _, start = find_tile(samples.query_offsets, num_samples, first, C.H, C.BLOCK_R)
        block = start // C.BLOCK_R
    else:
        blocks = tl.cdiv(num_targets * C.H, C.BLOCK_R)
        sample = (first.to(tl.int32) // blocks).to(tl.int64)
        block = first - sample * blocks
    row, count = query_rows(samples, sample, num_targets, C)
    num_blocks = 1 if ALL_BLOCKS else tl.cdiv(count, C.BLOCK_R)
    begin = tl.load(samples.offsets + sample).to(tl.int64)
    length = tl.load(samples.offsets + sample + 1).to(tl.int64) - begin
    chunks = count_chunks(length, num_blocks, C.CHUNK, C.ROWS_PER_PARTIAL)
    chunk = program * 0
    if later:
        local = (program - begin // C.ROWS_PER_PARTIAL).to(tl.int32)
        chunk = (local // tl.maximum(num_blocks, 1).to(tl.int32)).to(tl.int64)
        block = local - chunk * num_blocks
    busy = (block < num_blocks) & (chunk < chunks) & ((chunk > 0) | (not later))
    partial = tl.where(chunks > 1, begin // C.ROWS_PER_PARTIAL + chunk * num_blocks + block, -1)
    rows = rows_of_chunk(length, chunks).to(tl.int64)
    end = tl.minimum((chunk + 1) * rows, length)
    return Work(busy, sample, block, begin + chunk * rows, begin + end, partial, row, count)


@triton.jit
def gather_indices(samples, n, visible):
    """Indices of the history rows at the positions ``n`` (int64): ``n`` itself without indices."""
    rows = n
    if samples.indices is not None:
        rows = tl.load(samples.indices + n, mask=visible, other=0).to(tl.int64)
    return rows


@triton.jit
def partial_rows(num_targets, C: tl.constexpr):
    """Query rows of a partial result."""
    rows = C.BLOCK_R if C.LAYOUT == JAGGED else num_targets * C.H
    return tl.minimum(rows, C.BLOCK_R).to(tl.int64)


@triton.jit
def load_queries(ptr, first, r, count, d, D: tl.constexpr):
    """``[BLOCK_R, BLOCK_D]``: rows ``r`` of ``count``, from row ``first`` on."""
    mask = (r < count)[:, None] & (d < D)[None, :]
    return tl.load(ptr + (first + r)[:, None] * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_outputs(outputs, acc, maximum, total, num_rows, first, r, count, d, D: tl.constexpr):
    """Store ``acc / total``, its residual, which is None if not requested, and statistics.

    The residual is the rounding error of a half-precision output, for backward.
    """
    total_or_one = tl.where(total > 0, total, 1.0)[:, None]
    exact: tl.constexpr = outputs.out.dtype.element_ty == tl.float32
    out = tl.div_rn(acc, total_or_one) if exact else acc * (1.0 / total_or_one)
    store_queries(outputs.out, out, first, r, count, d, D)
    if outputs.residual is not None:
        rounded = out.to(outputs.out.dtype.element_ty).to(tl.float32)
        store_queries(outputs.residual, out - rounded, first, r, count, d, D)
    store_stats(outputs.stats, num_rows, first + r, r < count, maximum, total)


@triton.jit
def clear_outputs(outputs, samples, num_samples, num_rows, C: tl.constexpr):
    """Set outputs and statistics of JAGGED query rows behind the last offset to zero."""
    if C.LAYOUT == JAGGED:
        end = tl.load(samples.query_offsets + num_samples).to(tl.int64) * C.H
        clear_rows(outputs.out, end, num_rows, C.D, C.D, C.BLOCK_D)
        if outputs.residual is not None:
            clear_rows(outputs.residual, end, num_rows, C.D, C.D, C.BLOCK_D)
        clear_rows(outputs.stats, end, num_rows, 1, 1, 1)
        clear_rows(outputs.stats + num_rows, end, num_rows, 1, 1, 1)


@triton.jit
def clear_gradients(grads, samples, num_samples, num_history_rows, C: tl.constexpr):
    """Set gradients of history rows and of prior weights to zero behind the last offset.

    With gather indices, ``row_gradients.py`` sets the gradients of history rows.
    """
    end = tl.load(samples.offsets + num_samples).to(tl.int64)
    if (grads.history is not None) and (samples.indices is None):
        clear_rows(grads.history, end, num_history_rows, C.D, C.D, C.BLOCK_D)
    if grads.prior_weights is not None:
        clear_rows(grads.prior_weights, end, num_history_rows, 1, 1, 1)


@triton.jit
def store_queries(ptr, value, first, r, count, d, D: tl.constexpr):
    """Store ``value`` where :func:`load_queries` would load it."""
    mask = (r < count)[:, None] & (d < D)[None, :]
    tl.store(ptr + (first + r)[:, None] * D + d[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["num_samples", "num_partials"])
def split_schedule_kernel(
    schedule,
    num_samples,
    num_partials,
    CHUNK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the schedule of BLOCK_B samples, for ``warp_common.find_scheduled_chunk``.

    A sample of CHUNK rows or more has chunks of up to 2 · CHUNK rows. Their partial results begin
    at ``offsets[b] // CHUNK``.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    first_unused = (tl.load(schedule.offsets + num_samples) // CHUNK).to(tl.int32)
    sample = program.to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = sample < num_samples
    first = tl.load(schedule.offsets + sample, mask=mask, other=0).to(tl.int64)
    last = tl.load(schedule.offsets + sample + 1, mask=mask, other=0).to(tl.int64)
    length = (last - first).to(tl.int32)
    chunks = tl.where(length >= CHUNK, tl.cdiv(length, 2 * CHUNK), 0)
    begin, end = (first // CHUNK).to(tl.int32), (last // CHUNK).to(tl.int32)
    for step in range(0, tl.max(end - begin), 8):
        chunk = step + tl.arange(0, 8)[None, :]
        partial = begin[:, None] + chunk
        in_sample = partial < end[:, None]
        owner = tl.where(chunk < chunks[:, None], sample.to(tl.int32)[:, None], -1)
        tl.store(schedule.entries + partial, owner, mask=in_sample)
        tl.store(schedule.entries + num_partials + partial, 0, mask=in_sample)
    # Unused entries, since offsets may end before the rows
    BLOCK: tl.constexpr = 8 * BLOCK_B
    for start in range(
        first_unused + program * BLOCK, num_partials, tl.cdiv(num_samples, BLOCK_B) * BLOCK
    ):
        partial = start + tl.arange(0, BLOCK)
        tl.store(schedule.entries + partial, -1, mask=partial < num_partials)
