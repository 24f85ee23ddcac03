"""Gradients of history rows that are read by indices, in Triton, for any call.

    ∂x_u = Σ_n Σ_r p_rn · ∂out_r + scale · ds_rn · q_r          over the places n that name row u

A row that one place names has its gradient from the kernels that compute those of queries. Others
have it from here: weights p and the gradients ds of scores are computed again. A program has x_u in
registers, and reads the queries and gradients of outputs of each place's sample. These are few
enough for the cache to have them: of N places, 2·N·R·D·e bytes come from there, and U·D·e bytes
each way from and to memory; 8·N·R·D FLOPs, not on tensor cores.

Places are sorted by the row that they name, and are in their own order among those of one row. A
program takes the rows that begin in a piece of this list, so that all have about as much to do. A
row that many places name is cut into chunks by their number alone. No sum depends on which program
ends first, and none on other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.attention.kernels.biases import load_bias, row_numbers
from torchrec_jagged_attn.attention.kernels.dropout import drop_weights, query_draws
from torchrec_jagged_attn.attention.kernels.scores import weights_and_slopes
from torchrec_jagged_attn.runtime.kernels.jagged import find_samples
from torchrec_jagged_attn.runtime.kernels.softmax import LOG2E, load_stats
from torchrec_jagged_attn.target_attention.kernels.schedule import SHARED, query_rows

__all__ = [
    "PLACES_OF_PROGRAM",
    "ZEROS_OF_PROGRAM",
    "Places",
    "QueryRows",
    "combine_rows_kernel",
    "find_places_kernel",
    "rows_kernel",
]

PLACES_OF_PROGRAM = 16
ZEROS_OF_PROGRAM = 32  # rows
MOST_CHUNKS = tl.constexpr(512)  # of a row
CHUNKS_AT_ONCE = tl.constexpr(16)


class Places(NamedTuple):
    """Which places name a row.

    Attributes:
        targets: ``[N]``: the row that a place names, if no other place names it, else -1.
        places: ``[2, N]`` int32: those that name a row follow each other; and the sample of each.
        starts: int32 words, each with the bits of PLACES_OF_PROGRAM in ``places``: whether those of
            a row that several name begin there.
        bounds: ``[2, U]`` int32, where those of each row begin and end in ``places``; zeros of a
            row that none names.
    """

    targets: Any
    places: Any
    starts: Any
    bounds: Any


class QueryRows(NamedTuple):
    """What is read of each query row.

    Attributes:
        grad_out: ``[rows, D]``.
        query: ``[rows, D]``.
        stats: ``[2, rows]`` fp32, see ``arguments.TargetOutputs``.
        delta: ``[rows]`` fp32, the mean of the gradients of weights minus ``grad_lse``.
        grad_lse: ``[rows]`` fp32, see ``Outputs``.
    """

    grad_out: Any
    query: Any
    stats: Any
    delta: Any
    grad_lse: Any


@triton.jit(do_not_specialize=["num_places", "num_rows", "num_samples", "num_steps"])
def find_places_kernel(
    order_ptr,  # [N] int64: all places, sorted by the row that they name
    indices_ptr,  # [N]
    offsets_ptr,  # [B + 1]
    found,  # Places, whose bounds are zeros
    num_places,
    num_rows,
    num_samples,
    num_steps,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
):
    """BLOCK of the sorted places: their samples, and where a row's begin and end."""
    index = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + index
    there = at < num_places
    n = tl.load(order_ptr + at, mask=there, other=0)
    row = tl.load(indices_ptr + n, mask=there, other=0).to(tl.int64)
    before = tl.load(order_ptr + at - 1, mask=there & (at > 0), other=0)
    last_row = tl.load(indices_ptr + before, mask=there, other=0).to(tl.int64)
    after = tl.load(order_ptr + at + 1, mask=at + 1 < num_places, other=0)
    next_row = tl.load(indices_ptr + after, mask=there, other=0).to(tl.int64)
    begins = there & ((at == 0) | (row != last_row))
    is_alone = begins & ((at == num_places - 1) | (row != next_row))
    tl.store(found.targets + n, tl.where(is_alone, row, -1), mask=there)
    bits = (begins & (is_alone == 0)).to(tl.int32) << index % PLACES
    bits = tl.sum(tl.reshape(bits, [BLOCK // PLACES, PLACES]), 1)
    word = tl.program_id(0) * (BLOCK // PLACES) + tl.arange(0, BLOCK // PLACES)
    tl.store(found.starts + word, bits, mask=word < tl.cdiv(num_places, PLACES))
    tl.store(found.bounds + row, at, mask=begins)
    tl.store(found.bounds + num_rows + last_row, at, mask=begins & (at > 0))
    tl.store(found.bounds + num_rows + row, at + 1, mask=at == num_places - 1)
    tl.store(found.places + at, n, mask=there)
    sample = find_samples(offsets_ptr, n, num_samples, num_steps)
    tl.store(found.places + num_places + at, sample, mask=there)


@triton.jit
def _chunks_of(found, row, num_rows, CHUNK: tl.constexpr):
    """Where a row's places begin, how many they are, and into how many chunks they are cut.

    The slots of these chunks are those from ``begin // CHUNK`` on: all rows together have no more
    than ``N // CHUNK``, where they are cut at all.
    """
    begin = tl.load(found.bounds + row)
    length = tl.load(found.bounds + num_rows + row) - begin
    chunks = tl.minimum(tl.maximum(length // CHUNK, 1), MOST_CHUNKS)
    return begin, length, chunks


@triton.jit
def _row_at(found, indices_ptr, at):
    """The row that the sorted place of number ``at`` names.

    If that is a slot's number times CHUNK, it is the row that has the slot for another chunk than
    its first, if any has: the place is in the middle of its own.
    """
    return tl.load(indices_ptr + tl.load(found.places + at)).to(tl.int64)


@triton.jit
def _add_pairs(
    acc, queries, x, biases, samples, n, sample, visible, first, r, count, num_query_rows, scale,
    C: tl.constexpr,
):  # fmt: skip
    """``acc`` ``[pairs, BLOCK_D]`` plus what a query row ``r`` and a place ``n`` give to the row
    ``x``, of each pair that is visible.
    """
    d = tl.arange(0, C.BLOCK_D)
    visible = visible & (r < count)
    mask = visible[:, None] & (d < C.D)[None, :]
    own_row = first + r
    query_row = r.to(tl.int64) if C.LAYOUT == SHARED else own_row
    ptrs = queries.grad_out + own_row[:, None] * C.D + d[None, :]
    grad_out = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    ptrs = queries.query + query_row[:, None] * C.D + d[None, :]
    q = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    bias = load_bias(biases, samples.offsets, sample, n, visible, r, count, C)
    draws = query_draws(biases.dropout, own_row)
    scores = tl.sum(q * x[None, :], 1) * scale + bias
    numbers = row_numbers(biases, n, visible)
    dp = drop_weights(tl.sum(grad_out * x[None, :], 1), biases.dropout, draws, numbers)
    if C.SCORE == "softmax":
        maximum, inverse = load_stats(queries.stats, num_query_rows, own_row, visible)
        delta = tl.load(queries.delta + own_row, mask=visible, other=0.0)
        length = tl.load(samples.offsets + sample + 1) - tl.load(samples.offsets + sample)
        p = tl.exp2((scores - maximum) * LOG2E) * inverse
        of_alone = 0.0
        if queries.grad_lse is not None:
            of_alone = p * tl.load(queries.grad_lse + own_row, mask=inverse != 0, other=0.0)
        ds = tl.where(length == 1, of_alone, p * (dp - delta))
    else:
        exact: tl.constexpr = queries.query.dtype.element_ty == tl.float32
        p, slope = weights_and_slopes(scores, C.SCORE, exact)
        ds = slope * dp
    p = drop_weights(tl.where(visible, p, 0.0), biases.dropout, draws, numbers)
    ds = tl.where(visible, ds * scale, 0.0)
    return acc + p[:, None] * grad_out + ds[:, None] * q


@triton.jit
def _gradient_of_chunk(
    queries, x, biases, found, samples, begin, end, num_places, num_targets, num_query_rows, scale,
    C: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_D]``: what the sorted places from ``begin`` to ``end`` give to the row ``x``.

    BLOCK_N places at a time, with BLOCK_R query rows of each; those of more blocks are summed up
    for each place first, so that no sum has many terms.
    """
    pair = tl.arange(0, C.BLOCK_N * C.BLOCK_R)
    local = pair % C.BLOCK_R
    zeros = tl.zeros([C.BLOCK_N * C.BLOCK_R, C.BLOCK_D], tl.float32)
    acc = zeros
    for start in range(begin, end, C.BLOCK_N):
        at = start + pair // C.BLOCK_R
        place_ptr = found.places + tl.minimum(at, end - 1)
        n = tl.load(place_ptr).to(tl.int64)
        sample = tl.load(place_ptr + num_places).to(tl.int64)
        first, count = query_rows(samples, sample, num_targets, C)
        if ONE_BLOCK:
            acc = _add_pairs(
                acc, queries, x, biases, samples, n, sample, at < end, first, local, count,
                num_query_rows, scale, C,
            )  # fmt: skip
        else:
            of_places = zeros
            for r_start in range(0, tl.max(count + pair * 0, 0), C.BLOCK_R):
                of_places = _add_pairs(
                    of_places, queries, x, biases, samples, n, sample, at < end, first,
                    r_start + local, count, num_query_rows, scale, C,
                )  # fmt: skip
            acc += of_places
    return tl.sum(acc, 0)


@triton.jit
def _store_zeros(grad_ptr, found, first, num_rows, C: tl.constexpr, ROWS: tl.constexpr):
    """Zeros for those of ROWS rows that no place names."""
    row = first + tl.arange(0, ROWS)
    there = row < num_rows
    is_named = tl.load(found.bounds + num_rows + row, mask=there, other=1) > 0
    d = tl.arange(0, C.BLOCK_D)
    ptrs = grad_ptr + row[:, None] * C.D + d[None, :]
    mask = (there & (is_named == 0))[:, None] & (d < C.D)[None, :]
    tl.store(ptrs, tl.zeros([ROWS, C.BLOCK_D], tl.float32), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_places", "num_targets", "num_query_rows", "num_slots"]
)
def rows_kernel(
    queries,  # QueryRows
    history_ptr,  # [U, D], rows history_stride apart
    biases,  # arguments.Biases
    grad_ptr,  # [U, D]
    sums_ptr,  # [slots, D] fp32
    found,  # Places
    samples,  # Samples
    num_rows,
    num_places,
    num_targets,
    num_query_rows,
    num_slots,
    history_stride,
    scale,
    C: tl.constexpr,  # Constants
    ONE_BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Gradients of rows that several places name, and begin among PLACES sorted ones; each from the
    first chunk of its places.

    The first ``num_slots`` programs take later chunks, each the one that its slot is for, if any.
    The last ones store the zeros of rows that no place names, each of ZEROS. ONE_BLOCK, if a
    sample has BLOCK_R query rows or fewer.
    """
    program = tl.program_id(0).to(tl.int64)
    later = program < num_slots
    first = (program - num_slots) * PLACES
    if first >= num_places:
        block = program - num_slots - (num_places + PLACES - 1) // PLACES
        _store_zeros(grad_ptr, found, block * ZEROS, num_rows, C, ZEROS)
        return
    if later:
        first = program * C.CHUNK
        starts = 1
    else:
        starts = tl.load(found.starts + program - num_slots)
    d = tl.arange(0, C.BLOCK_D)
    for i in range(PLACES):
        if (starts >> i) & 1 != 0:
            row = _row_at(found, samples.indices, first + i)
            begin, length, chunks = _chunks_of(found, row, num_rows, C.CHUNK)
            first_slot = begin // C.CHUNK
            chunk = tl.where(later, program.to(tl.int32) - first_slot, 0)
            if (chunk < chunks) & ((chunk > 0) | (not later)):
                of_chunk = tl.cdiv(length, chunks)
                x_ptrs = history_ptr + row * history_stride + d
                x = tl.load(x_ptrs, mask=d < C.D, other=0.0).to(tl.float32)
                grad = _gradient_of_chunk(
                    queries, x, biases, found, samples, begin + of_chunk * chunk,
                    begin + tl.minimum(of_chunk * (chunk + 1), length), num_places, num_targets,
                    num_query_rows, scale, C, ONE_BLOCK,
                )  # fmt: skip
                if chunks > 1:
                    slot = (first_slot + chunk).to(tl.int64)
                    tl.store(sums_ptr + slot * C.D + d, grad, mask=d < C.D)
                else:
                    tl.store(grad_ptr + row * C.D + d, grad, mask=d < C.D)


@triton.jit(do_not_specialize=["num_rows"])
def combine_rows_kernel(
    sums_ptr,  # [slots, D] fp32
    grad_ptr,  # [U, D]
    found,  # Places
    indices_ptr,  # [N]
    num_rows,
    C: tl.constexpr,  # Constants
):
    """The gradient of the row, if there is one, whose second chunk has this program's slot."""
    slot = tl.program_id(0).to(tl.int64)
    row = _row_at(found, indices_ptr, slot * C.CHUNK)
    begin, _, chunks = _chunks_of(found, row, num_rows, C.CHUNK)
    first = (begin // C.CHUNK).to(tl.int64)
    if (chunks == 1) | (slot != first + 1):
        return
    d = tl.arange(0, C.BLOCK_D)
    i = tl.arange(0, CHUNKS_AT_ONCE)
    acc = tl.zeros([CHUNKS_AT_ONCE, C.BLOCK_D], tl.float32)
    for start in range(0, chunks, CHUNKS_AT_ONCE):
        mask = (start + i < chunks)[:, None] & (d < C.D)[None, :]
        ptrs = sums_ptr + (first + start + i)[:, None] * C.D + d[None, :]
        acc += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(grad_ptr + row * C.D + d, tl.sum(acc, 0), mask=d < C.D)
