"""Combine partial results in separate kernels, for variants that do not combine them themselves.

Outputs and gradients of queries are combined over the chunks of a sample, gradients of tables over
programs. If launches overlap (OVERLAP), every program waits for the previous kernel, even without
work, so that the next kernel can rely on its results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from torchrec_jagged_attn.ops.device.jagged import count_chunks, find_sample
from torchrec_jagged_attn.ops.device.softmax import LOG2E, load_stats
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import (
    load_queries,
    partial_rows,
    query_rows,
    store_outputs,
    store_queries,
)

TABLES_AT_ONCE = tl.constexpr(128)


@triton.jit
def _find_chunks(samples, num_samples, num_targets, C: tl.constexpr):
    """The block of query rows that this program combines, and the range of its partial results.

    The program with the index of a block's first partial result combines it. Returns
    ``(busy, first, count, block, begin, end, step)``: whether there is such a block, the first
    output row and the number of query rows of its sample, the block, and the range.
    """
    partial = tl.program_id(0).to(tl.int64)
    sample = find_sample(samples.offsets, num_samples, partial, 1, C.ROWS_PER_PARTIAL, 0)
    begin = tl.load(samples.offsets + sample).to(tl.int64)
    length = tl.load(samples.offsets + sample + 1).to(tl.int64) - begin
    first, count = query_rows(samples, sample, num_targets, C)
    num_blocks = tl.cdiv(count, C.BLOCK_R)
    chunks = count_chunks(length, num_blocks, C.CHUNK, C.ROWS_PER_PARTIAL)
    block = partial - begin // C.ROWS_PER_PARTIAL
    if C.OVERLAP:
        cuda.gdc_wait()
    busy = (block < num_blocks) & (chunks > 1)
    return busy, first, count, block, partial, partial + chunks * num_blocks, num_blocks


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows"])
def combine_outputs_kernel(
    partials,  # Partials
    outputs,  # Outputs; ``residual`` is None if not requested
    samples,  # Samples
    num_samples,
    num_targets,
    num_rows,
    C: tl.constexpr,  # Constants
):
    """Outputs and statistics of one block of query rows, BLOCK_D columns per program."""
    busy, first, count, block, begin, end, step = _find_chunks(samples, num_samples, num_targets, C)
    if not busy:
        return
    capacity = partial_rows(num_targets, C)
    local = tl.arange(0, C.BLOCK_R)
    d = tl.program_id(1) * C.BLOCK_D + tl.arange(0, C.BLOCK_D)
    acc = tl.zeros([C.BLOCK_R, C.BLOCK_D], tl.float32)
    maximum = tl.full([C.BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([C.BLOCK_R], tl.float32)
    for partial in tl.range(begin, end, step, num_stages=4):
        chunk_acc = load_queries(partials.acc, partial * capacity, local, capacity, d, C.D)
        ptrs = partials.totals + partial * 2 * capacity + local
        chunk_maximum = tl.load(ptrs, mask=local < capacity, other=-float("inf"))
        chunk_total = tl.load(ptrs + capacity, mask=local < capacity, other=0.0)
        new_maximum = tl.maximum(maximum, chunk_maximum)
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        rescale = tl.exp2((maximum - shift) * LOG2E)
        chunk_rescale = tl.exp2((chunk_maximum - shift) * LOG2E)
        acc = acc * rescale[:, None] + chunk_acc * chunk_rescale[:, None]
        total = total * rescale + chunk_total * chunk_rescale
        maximum = new_maximum
    r = block * C.BLOCK_R + local
    store_outputs(outputs, acc, maximum, total, num_rows, first, r, count, d, C.D)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows"])
def combine_gradients_kernel(
    partials,  # Partials; ``totals`` is None if a single pass computes all samples
    outputs,  # Outputs
    grads,  # Gradients; ``delta`` is updated, or None like ``totals``
    samples,  # Samples
    num_samples,
    num_targets,
    num_rows,
    scale,
    C: tl.constexpr,  # Constants
):
    """Gradient of one block of query rows, BLOCK_D columns per program."""
    busy, first, count, block, begin, end, step = _find_chunks(samples, num_samples, num_targets, C)
    if not busy:
        return
    capacity = partial_rows(num_targets, C)
    local = tl.arange(0, C.BLOCK_R)
    d = tl.program_id(1) * C.BLOCK_D + tl.arange(0, C.BLOCK_D)
    r = block * C.BLOCK_R + local
    acc = tl.zeros([C.BLOCK_R, C.BLOCK_D], tl.float32)
    for partial in tl.range(begin, end, step, num_stages=4):
        acc += load_queries(partials.acc, partial * capacity, local, capacity, d, C.D)
    if partials.totals is not None:
        if count > C.BLOCK_R or not C.SINGLE_PASS:
            ds_total = tl.zeros([C.BLOCK_R], tl.float32)
            for partial in range(begin, end, step):
                ptrs = partials.totals + partial * capacity + local
                ds_total += tl.load(ptrs, mask=local < capacity, other=0.0)
            if outputs.grad_lse is not None:
                _, inverse = load_stats(outputs.stats, num_rows, first + r, r < count)
                ds_total -= tl.load(outputs.grad_lse + first + r, mask=inverse != 0, other=0.0)
            out = load_queries(outputs.out, first, r, count, d, C.D)
            acc -= ds_total[:, None] * out.to(tl.float32)
            if tl.program_id(1) == 0:
                delta = tl.load(grads.delta + first + r, mask=r < count, other=0.0)
                tl.store(grads.delta + first + r, delta + ds_total, mask=r < count)
    store_queries(grads.query, acc * scale, first, r, count, d, C.D)


@triton.jit(do_not_specialize=["num_tables", "num_targets", "num_first", "num_partials"])
def sum_tables_kernel(
    tables_ptr,  # [tables, buckets, targets, H] fp32
    out_ptr,  # [partial sums, buckets, H] fp32
    num_tables,
    num_targets,
    num_first,
    num_partials,
    size,  # buckets · H
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum COLUMNS elements over targets and every ``num_programs(1)``-th block of tables.

    The tables of the first ``num_first`` samples come before ``num_partials`` tables of partial
    results. These are summed last, so that sums do not depend on the number of unused ones.
    """
    if OVERLAP:
        cuda.gdc_wait()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    num_samples = num_tables - num_partials
    total = tl.zeros([TABLES_AT_ONCE, COLUMNS], tl.float32)
    for target in range(num_targets):
        at = (column // H * num_targets + target) * H + column % H
        step = TABLES_AT_ONCE * tl.num_programs(1)
        for first in range(group * TABLES_AT_ONCE, num_tables, step):
            i = first + tl.arange(0, TABLES_AT_ONCE)
            table = tl.where(i < num_first, i, i + num_partials)
            table = tl.where(i < num_samples, table, i - num_samples + num_first).to(tl.int64)
            mask = (i < num_tables)[:, None] & (column < size)[None, :]
            ptrs = tables_ptr + table[:, None] * (size * num_targets) + at[None, :]
            total += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(out_ptr + group * size + column, tl.sum(total, 0), mask=column < size)
