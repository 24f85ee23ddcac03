"""Gradients of history rows with gather indices, in Triton, for any call.

    ∂x_u = Σ_n Σ_r p_rn · ∂out_r + scale · ds_rn · q_r          over positions n with indices[n] = u

Rows whose index occurs once get their gradients in the kernels of query gradients. The others are
computed here, without atomics: weights p and the gradients ds of scores are recomputed. A program
holds x_u in registers and reads queries and output gradients of the sample of each position, which
are few enough to stay in cache: 2·N·R·D·e bytes from cache, U·D·e bytes each way from and to
memory; 8·N·R·D FLOPs, not on tensor cores.

As in FBGEMM's backward, indices are sorted, stably, so that the positions of a row are consecutive:
a run. A program computes the runs that begin among INDICES sorted indices. Long runs are split into
chunks, depending on their length alone, whose partial results ``combine_rows_kernel`` sums. So the
order of every sum is fixed, and independent of other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.biases import load_bias, load_row_numbers
from torchrec_jagged_attn.ops.device.dropout import drop_weights, query_draws
from torchrec_jagged_attn.ops.device.jagged import find_samples
from torchrec_jagged_attn.ops.device.scores import weights_and_slopes
from torchrec_jagged_attn.ops.device.softmax import LOG2E, load_stats
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED, query_rows

INDICES = tl.constexpr(16)  # sorted indices of a program
ZERO_ROWS = tl.constexpr(32)  # rows of a program that stores zeros
MOST_CHUNKS = tl.constexpr(512)  # of a run
CHUNKS_AT_ONCE = tl.constexpr(16)  # partial results loaded at a time


class SortedIndices(NamedTuple):
    """Gather indices in sorted order: runs of equal indices."""

    targets: Any  # [N]: the index, if it occurs once, else -1
    # [2, N] int32: positions sorted by their index, -1 behind the last offset; and their samples
    positions: Any
    # int32 bit masks of INDICES sorted indices each: whether a run of two or more begins there
    starts: Any
    bounds: Any  # [2, U] int32: begin and end of each row's run; zeros if its index does not occur


class QueryRows(NamedTuple):
    """Query rows, and their outputs, statistics and gradients."""

    grad_out: Any  # [rows, D]
    query: Any  # [rows, D]
    stats: Any  # [2, rows] fp32, see ``arguments.TargetOutputs``
    delta: Any  # [rows] fp32, the mean of the gradients of weights minus ``grad_lse``
    grad_lse: Any  # [rows] fp32, see ``Outputs``


@triton.jit(do_not_specialize=["num_indices", "num_rows", "num_samples", "num_steps"])
def find_runs_kernel(
    order_ptr,  # [N] int64: positions, sorted by their index
    indices_ptr,  # [N]
    offsets_ptr,  # [B + 1]
    sorted_indices,  # SortedIndices, written; bounds are zeros
    num_indices,
    num_rows,
    num_samples,
    num_steps,
    BLOCK: tl.constexpr,
):
    """Find samples and runs of BLOCK sorted indices.

    Positions behind the last offset are in no run. Among equal indices, they come last.
    """
    index = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + index
    num_positions = tl.load(offsets_ptr + num_samples)
    n = tl.load(order_ptr + at, mask=at < num_indices, other=num_indices)
    mask = n < num_positions
    row = tl.load(indices_ptr + n, mask=mask, other=0).to(tl.int64)
    before = tl.load(order_ptr + at - 1, mask=mask & (at > 0), other=0)
    last_row = tl.load(indices_ptr + before, mask=mask, other=0).to(tl.int64)
    after = tl.load(order_ptr + at + 1, mask=mask & (at + 1 < num_indices), other=num_indices)
    has_next = after < num_positions
    next_row = tl.load(indices_ptr + after, mask=has_next, other=0).to(tl.int64)
    begins = mask & ((at == 0) | (row != last_row))
    ends = mask & ((has_next == 0) | (row != next_row))
    is_unique = begins & ends
    tl.store(sorted_indices.targets + n, tl.where(is_unique, row, -1), mask=mask)
    bits = (begins & (is_unique == 0)).to(tl.int32) << index % INDICES
    bits = tl.sum(tl.reshape(bits, [BLOCK // INDICES, INDICES]), 1)
    block = tl.program_id(0) * (BLOCK // INDICES) + tl.arange(0, BLOCK // INDICES)
    tl.store(sorted_indices.starts + block, bits, mask=block < tl.cdiv(num_indices, INDICES))
    tl.store(sorted_indices.bounds + row, at, mask=begins)
    tl.store(sorted_indices.bounds + num_rows + row, at + 1, mask=ends)
    tl.store(sorted_indices.positions + at, tl.where(mask, n, -1), mask=at < num_indices)
    sample = find_samples(offsets_ptr, n, num_samples, num_steps)
    tl.store(sorted_indices.positions + num_indices + at, sample, mask=mask)


@triton.jit
def _chunks_of(sorted_indices, row, num_rows, CHUNK: tl.constexpr):
    """``(begin, length, chunks)`` of a row's run: its first sorted index, length and chunks.

    If there are several chunks, their partial results begin at ``begin // CHUNK``. All rows
    together have at most ``N // CHUNK``.
    """
    begin = tl.load(sorted_indices.bounds + row)
    length = tl.load(sorted_indices.bounds + num_rows + row) - begin
    chunks = tl.minimum(tl.maximum(length // CHUNK, 1), MOST_CHUNKS)
    return begin, length, chunks


@triton.jit
def _row_at(sorted_indices, indices_ptr, at):
    """The row of the sorted index ``at``; row 0 for positions behind the last offset.

    If a partial result ``partial`` belongs to a chunk after the first of its row, the sorted index
    ``partial · CHUNK`` is within the run of that row.
    """
    position = tl.load(sorted_indices.positions + at)
    return tl.load(indices_ptr + position, mask=position >= 0, other=0).to(tl.int64)


@triton.jit
def _add_pairs(
    acc, queries, x, biases, samples, n, sample, visible, first, r, count, num_query_rows, scale,
    C: tl.constexpr,
):  # fmt: skip
    """``acc`` ``[pairs, BLOCK_D]`` plus the gradient of the row ``x`` from each visible pair of
    query row ``r`` and position ``n``.
    """
    d = tl.arange(0, C.BLOCK_D)
    visible = visible & (r < count)
    mask = visible[:, None] & (d < C.D)[None, :]
    output_row = first + r
    query_row = r.to(tl.int64) if C.LAYOUT == SHARED else output_row
    ptrs = queries.grad_out + output_row[:, None] * C.D + d[None, :]
    grad_out = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    ptrs = queries.query + query_row[:, None] * C.D + d[None, :]
    q = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    bias = load_bias(biases, samples.offsets, sample, n, visible, r, count, C)
    draws = query_draws(biases.dropout, output_row)
    scores = tl.sum(q * x[None, :], 1) * scale + bias
    numbers = load_row_numbers(biases, n, visible)
    dp = drop_weights(tl.sum(grad_out * x[None, :], 1), biases.dropout, draws, numbers)
    if C.SCORE == "softmax":
        maximum, inverse = load_stats(queries.stats, num_query_rows, output_row, visible)
        delta = tl.load(queries.delta + output_row, mask=visible, other=0.0)
        length = tl.load(samples.offsets + sample + 1) - tl.load(samples.offsets + sample)
        p = tl.exp2((scores - maximum) * LOG2E) * inverse
        single_row_grad = 0.0
        if queries.grad_lse is not None:
            single_row_grad = p * tl.load(
                queries.grad_lse + output_row, mask=inverse != 0, other=0.0
            )
        ds = tl.where(length == 1, single_row_grad, p * (dp - delta))
    else:
        exact: tl.constexpr = queries.query.dtype.element_ty == tl.float32
        p, slope = weights_and_slopes(scores, C.SCORE, exact)
        ds = slope * dp
    p = drop_weights(tl.where(visible, p, 0.0), biases.dropout, draws, numbers)
    ds = tl.where(visible, ds * scale, 0.0)
    return acc + p[:, None] * grad_out + ds[:, None] * q


@triton.jit
def _gradient_of_chunk(
    queries, x, biases, sorted_indices, samples, begin, end, num_indices, num_targets,
    num_query_rows, scale, C: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_D]``: the gradient of the row ``x`` from the sorted indices ``begin`` to ``end``.

    BLOCK_N positions at a time, with BLOCK_R query rows of each; several blocks of query rows are
    summed by position first, to limit rounding errors.
    """
    pair = tl.arange(0, C.BLOCK_N * C.BLOCK_R)
    local = pair % C.BLOCK_R
    zeros = tl.zeros([C.BLOCK_N * C.BLOCK_R, C.BLOCK_D], tl.float32)
    acc = zeros
    for start in range(begin, end, C.BLOCK_N):
        at = start + pair // C.BLOCK_R
        position_ptr = sorted_indices.positions + tl.minimum(at, end - 1)
        n = tl.load(position_ptr).to(tl.int64)
        sample = tl.load(position_ptr + num_indices).to(tl.int64)
        first, count = query_rows(samples, sample, num_targets, C)
        if ONE_BLOCK:
            acc = _add_pairs(
                acc, queries, x, biases, samples, n, sample, at < end, first, local, count,
                num_query_rows, scale, C,
            )  # fmt: skip
        else:
            tile_acc = zeros
            for r_start in range(0, tl.max(count + pair * 0, 0), C.BLOCK_R):
                tile_acc = _add_pairs(
                    tile_acc, queries, x, biases, samples, n, sample, at < end, first,
                    r_start + local, count, num_query_rows, scale, C,
                )  # fmt: skip
            acc += tile_acc
    return tl.sum(acc, 0)


@triton.jit
def _store_zeros(grad_ptr, sorted_indices, first, num_rows, C: tl.constexpr):
    """Among ZERO_ROWS rows, set the gradients of rows to zero whose index does not occur."""
    row = first + tl.arange(0, ZERO_ROWS)
    in_table = row < num_rows
    occurs = tl.load(sorted_indices.bounds + num_rows + row, mask=in_table, other=1) > 0
    d = tl.arange(0, C.BLOCK_D)
    ptrs = grad_ptr + row[:, None] * C.D + d[None, :]
    mask = (in_table & (occurs == 0))[:, None] & (d < C.D)[None, :]
    tl.store(ptrs, tl.zeros([ZERO_ROWS, C.BLOCK_D], tl.float32), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_indices", "num_targets", "num_query_rows", "num_partials"]
)
def rows_kernel(
    queries,  # QueryRows
    history_ptr,  # [U, D], rows STRIDE apart
    biases,  # arguments.Biases
    grad_ptr,  # [U, D]
    partials_ptr,  # [partials, D] fp32
    sorted_indices,  # SortedIndices
    samples,  # Samples
    num_rows,
    num_indices,
    num_targets,
    num_query_rows,
    num_partials,
    scale,
    C: tl.constexpr,  # Constants
    ONE_BLOCK: tl.constexpr,
):
    """Gradients of rows whose index occurs several times.

    The first ``num_partials`` programs compute one partial result each, except for partial results
    of first chunks. The next programs compute the first chunks of the runs that begin among INDICES
    sorted indices each. The last programs store zeros, for ZERO_ROWS rows each. If ONE_BLOCK,
    samples have at most BLOCK_R query rows.
    """
    program = tl.program_id(0).to(tl.int64)
    later = program < num_partials
    first = (program - num_partials) * INDICES
    if first >= num_indices:
        block = program - num_partials - (num_indices + INDICES - 1) // INDICES
        _store_zeros(grad_ptr, sorted_indices, block * ZERO_ROWS, num_rows, C)
        return
    if later:
        first = program * C.CHUNK
        starts = 1
    else:
        starts = tl.load(sorted_indices.starts + program - num_partials)
    d = tl.arange(0, C.BLOCK_D)
    for i in range(INDICES):
        if (starts >> i) & 1 != 0:
            row = _row_at(sorted_indices, samples.indices, first + i)
            begin, length, chunks = _chunks_of(sorted_indices, row, num_rows, C.CHUNK)
            first_partial = begin // C.CHUNK
            chunk = tl.where(later, program.to(tl.int32) - first_partial, 0)
            if (chunk < chunks) & ((chunk > 0) | (not later)):
                chunk_length = tl.cdiv(length, chunks)
                x_ptrs = history_ptr + row * C.STRIDE + d
                x = tl.load(x_ptrs, mask=d < C.D, other=0.0).to(tl.float32)
                grad = _gradient_of_chunk(
                    queries, x, biases, sorted_indices, samples, begin + chunk_length * chunk,
                    begin + tl.minimum(chunk_length * (chunk + 1), length), num_indices,
                    num_targets, num_query_rows, scale, C, ONE_BLOCK,
                )  # fmt: skip
                if chunks > 1:
                    partial = (first_partial + chunk).to(tl.int64)
                    tl.store(partials_ptr + partial * C.D + d, grad, mask=d < C.D)
                else:
                    tl.store(grad_ptr + row * C.D + d, grad, mask=d < C.D)


@triton.jit(do_not_specialize=["num_rows"])
def combine_rows_kernel(
    partials_ptr,  # [partials, D] fp32
    grad_ptr,  # [U, D]
    sorted_indices,  # SortedIndices
    indices_ptr,  # [N]
    num_rows,
    C: tl.constexpr,  # Constants
):
    """Sum the partial results of each row of several chunks, in the program whose index is the
    row's second partial result.
    """
    partial = tl.program_id(0).to(tl.int64)
    row = _row_at(sorted_indices, indices_ptr, partial * C.CHUNK)
    begin, _, chunks = _chunks_of(sorted_indices, row, num_rows, C.CHUNK)
    first = (begin // C.CHUNK).to(tl.int64)
    if (chunks == 1) | (partial != first + 1):
        return
    d = tl.arange(0, C.BLOCK_D)
    i = tl.arange(0, CHUNKS_AT_ONCE)
    acc = tl.zeros([CHUNKS_AT_ONCE, C.BLOCK_D], tl.float32)
    for start in range(0, chunks, CHUNKS_AT_ONCE):
        mask = (start + i < chunks)[:, None] & (d < C.D)[None, :]
        ptrs = partials_ptr + (first + start + i)[:, None] * C.D + d[None, :]
        acc += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(grad_ptr + row * C.D + d, tl.sum(acc, 0), mask=d < C.D)
