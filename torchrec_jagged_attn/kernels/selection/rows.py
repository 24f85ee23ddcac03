"""Which rows of each sample have its highest scores, and where they lie when the others are gone.

Of a sample's k-th highest score, one program finds the bits by bisection, between the lowest score
and the highest: it counts how many rows have the score in the middle or a higher one. It ends when
k rows have: after about ten counts of 200 scores that are far from alike, 32 at most. A program
holds the first BLOCK scores in registers, and loads others again for each count. Few warps take a
sample, one where samples are short, since every count is a sum over all of them. Rows stay in the
order that they have, so the place of one is the number of those kept before it, which another
kernel counts.

These kernels are bound by launches and latency. With N rows, S segments, scores of e bytes and room
for C rows, they must read N·e bytes, and write 8·(N + C) bytes of places and rows and 20 bytes for
each sample and segment. Scores come from memory once: what is loaded again lies in a cache.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.arguments import ScoredRows
from torchrec_jagged_attn.kernels.common.launch import Launcher

__all__ = ["find_cuts", "place_rows"]

MIN_BLOCK, MAX_BLOCK = 128, 4096  # rows that a program takes at a time
ROWS_OF_WARP = 512  # of these


@triton.jit
def _load_scores(scores_ptr, segments_ptr, n, length, segment):
    """Scores of a sample's rows ``n`` in fp32; NaN of those of another segment, and of none."""
    mask = n < length
    if segments_ptr is not None:
        mask = mask & (tl.load(segments_ptr + n, mask=mask, other=-1) == segment)
    if scores_ptr is None:
        return tl.where(mask, 0.0, float("nan"))
    else:
        return tl.load(scores_ptr + n, mask=mask, other=float("nan")).to(tl.float32)


@triton.jit
def _ordered(bits):
    """The bits of an fp32 as an int32 that is ordered as the numbers are; and the way back.

    Those of -0.0 and 0.0 differ, which are equal as numbers, in all that is counted.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _find_lowest(scores_ptr, segments_ptr, length, segment, threshold, budget, BLOCK: tl.constexpr):
    """The lowest score that is kept, how many rows are kept, and how many of those that have this
    score must go.

    The search ends where the rows that have the score or a higher one are as many as the budget.
    None of them may have this score itself, then.
    """
    i = tl.arange(0, BLOCK)
    scores = _load_scores(scores_ptr, segments_ptr, i, length, segment)  # the first ones
    is_high = scores >= threshold
    counts = is_high.to(tl.int32)
    lows, highs = tl.where(is_high, scores, float("inf")), tl.where(is_high, scores, float("-inf"))
    for start in range(BLOCK, length, BLOCK):
        more = _load_scores(scores_ptr, segments_ptr, start + i, length, segment)
        is_high = more >= threshold
        counts += is_high.to(tl.int32)
        lows = tl.minimum(lows, tl.where(is_high, more, float("inf")))
        highs = tl.maximum(highs, tl.where(is_high, more, float("-inf")))
    at_least = tl.sum(counts, 0)  # rows whose score is low or higher
    lowest = threshold + 0.0
    if (budget > 0) & (at_least > budget):
        low = _ordered(tl.min(lows, 0).to(tl.int32, bitcast=True))
        high = _ordered(tl.max(highs, 0).to(tl.int32, bitcast=True))
        while (at_least > budget) & (low < high):
            half = (high - low).to(tl.uint32, bitcast=True) >> 1  # of what may pass int32
            middle = high - half.to(tl.int32, bitcast=True)
            limit = _ordered(middle).to(tl.float32, bitcast=True)
            counts = (scores >= limit).to(tl.int32)
            for start in range(BLOCK, length, BLOCK):
                more = _load_scores(scores_ptr, segments_ptr, start + i, length, segment)
                counts += (more >= limit).to(tl.int32)
            count = tl.sum(counts, 0)
            is_low = count >= budget
            low, high = tl.where(is_low, middle, low), tl.where(is_low, high, middle - 1)
            at_least = tl.where(is_low, count, at_least)
        lowest = _ordered(low).to(tl.float32, bitcast=True)
    count = tl.minimum(at_least, budget)
    return lowest, count, at_least - count


@triton.jit(do_not_specialize=["num_segments", "keep_stride", "limit", "threshold"])
def _find_cuts_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None: all are alike
    segments_ptr,  # [N], or None: all rows are of one
    keep_ptr,  # [B or 1, S] int64, or None: the limit
    lowest_ptr,  # [B, S] fp32
    first_ptr,  # [B, S] int64
    counts_ptr,  # [B + 1, S] int64, of which the first are zeros
    num_segments,
    keep_stride,
    limit,
    threshold,
    BLOCK: tl.constexpr,
):
    """Of one segment of one sample: the lowest score that is kept, the first row that is kept of
    those that have it, and how many rows are kept.
    """
    program = tl.program_id(0).to(tl.int64)
    sample = program // num_segments
    segment = program % num_segments
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    length = (end - begin).to(tl.int32)
    budget = limit + begin * 0
    if keep_ptr is not None:
        budget = tl.load(keep_ptr + sample * keep_stride + segment)
    budget = tl.minimum(tl.maximum(budget, 0), length).to(tl.int32)

    count = budget
    first = end - count
    lowest = tl.full([], 0.0, tl.float32)
    if scores_ptr is not None or segments_ptr is not None:
        if scores_ptr is not None:
            scores_ptr += begin
        if segments_ptr is not None:
            segments_ptr += begin
        lowest, count, too_many = _find_lowest(
            scores_ptr, segments_ptr, length, segment, threshold, budget, BLOCK
        )
        first = begin
        if count == 0:
            first = end
            lowest = tl.full([], float("inf"), tl.float32)
        elif too_many > 0:  # the older ones of the rows with this score go
            before = count * 0
            for start in range(0, length, BLOCK):
                n = start + tl.arange(0, BLOCK)
                scores = _load_scores(scores_ptr, segments_ptr, n, length, segment)
                has_it = (scores == lowest).to(tl.int32)
                rank = before + tl.cumsum(has_it, 0) - has_it
                is_first = (has_it > 0) & (rank == too_many)
                first += tl.sum(tl.where(is_first, n, 0), 0)
                before += tl.sum(has_it, 0)
    tl.store(lowest_ptr + program, lowest)
    tl.store(first_ptr + program, first)
    tl.store(counts_ptr + num_segments + program, count)
    if sample == 0:
        tl.store(counts_ptr + segment, 0)


@triton.jit(do_not_specialize=["num_samples", "num_segments", "num_rows", "capacity"])
def _place_rows_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None
    segments_ptr,  # [N], or None
    new_offsets_ptr,  # [B + 1]
    lowest_ptr,  # [B, S] fp32
    first_ptr,  # [B, S] int64
    rows_ptr,  # [C] int64
    places_ptr,  # [N] int64
    num_samples,
    num_segments,
    num_rows,
    capacity,
    BLOCK: tl.constexpr,
):
    """Place the rows of one sample that are kept, as far as there is room.

    Programs after those of samples have BLOCK places and rows each: they mark places without a row,
    and rows of no sample.
    """
    sample = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if sample >= num_samples:
        at = (sample - num_samples) * BLOCK + i
        nothing = at * 0 - 1
        kept = tl.load(new_offsets_ptr + num_samples)
        tl.store(rows_ptr + at, nothing, mask=(at >= kept) & (at < capacity))
        end = tl.load(offsets_ptr + num_samples)
        tl.store(places_ptr + at, nothing, mask=(at >= end) & (at < num_rows))
        return
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1) - begin).to(tl.int32)
    place = tl.load(new_offsets_ptr + sample).to(tl.int64)
    cuts = sample * num_segments
    if segments_ptr is None:
        lowest = tl.load(lowest_ptr + cuts)
        first = (tl.load(first_ptr + cuts) - begin).to(tl.int32)
    for start in range(0, length, BLOCK):
        n = start + i  # in the sample
        mask = n < length
        is_kept = mask
        scores = tl.zeros([BLOCK], tl.float32)
        if scores_ptr is not None:
            scores = tl.load(scores_ptr + begin + n, mask=mask, other=0.0).to(tl.float32)
        if segments_ptr is not None:
            segment = tl.load(segments_ptr + begin + n, mask=mask, other=-1)
            is_kept = mask & (segment >= 0) & (segment < num_segments)
            lowest = tl.load(lowest_ptr + cuts + segment, mask=is_kept, other=0.0)
            first = tl.load(first_ptr + cuts + segment, mask=is_kept, other=0) - begin
        is_kept = is_kept & ((scores > lowest) | ((scores == lowest) & (n >= first)))
        count = is_kept.to(tl.int32)
        new = place + (tl.cumsum(count, 0) - count)
        is_kept = is_kept & (new < capacity)
        tl.store(rows_ptr + new, begin + n, mask=is_kept)
        tl.store(places_ptr + begin + n, tl.where(is_kept, new, -1), mask=mask)
        place += tl.sum(count, 0)


_find_cuts = Launcher(_find_cuts_kernel)
_place_rows = Launcher(_place_rows_kernel)


def find_cuts(
    rows: ScoredRows, keep: Tensor | None, num_segments: int, limit: int, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sample's segments: ``[B, S]`` lowest score and first row with it, and ``[B + 1, S]``
    how many rows are kept, after a row of zeros.

    ``keep`` is ``[B, S]`` or ``[1, S]`` int64; without it, each keeps ``limit`` rows at most.
    """
    offsets = rows.offsets
    num_samples = offsets.numel() - 1
    shape = (num_samples, num_segments)
    lowest = offsets.new_empty(shape, dtype=torch.float32)
    first = offsets.new_empty(shape, dtype=torch.int64)
    counts = offsets.new_empty((num_samples + 1, num_segments), dtype=torch.int64)
    if num_samples == 0:
        counts.zero_()
    else:
        stride = 0 if keep is None or keep.shape[0] == 1 else num_segments
        keep = None if keep is None else keep.contiguous()
        _find_cuts(
            (num_samples * num_segments,),
            (
                *_contiguous(rows),
                keep,
                lowest,
                first,
                counts,
                num_segments,
                stride,
                limit,
                threshold,
            ),
            _constants(rows.num_rows // num_samples),
        )
    return lowest, first, counts


def place_rows(
    rows: ScoredRows, new_offsets: Tensor, lowest: Tensor, first: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """The row at each new place, ``[C]``, and the new place of each row, ``[N]``; -1 for none."""
    offsets, num_rows = rows.offsets, rows.num_rows
    num_samples = offsets.numel() - 1
    numbers = offsets.new_empty(capacity, dtype=torch.int64)
    places = offsets.new_empty(num_rows, dtype=torch.int64)
    constants = _constants(num_rows // max(num_samples, 1))
    num_programs = num_samples + -(-max(capacity, num_rows) // constants["BLOCK"])
    if num_programs:
        sizes = (num_samples, first.shape[1], num_rows, capacity)
        _place_rows(
            (num_programs,),
            (*_contiguous(rows), new_offsets.contiguous(), lowest, first, numbers, places, *sizes),
            constants,
        )
    return numbers, places


def _contiguous(rows: ScoredRows) -> list[Tensor | None]:
    """Its tensors, without gaps."""
    tensors = rows.offsets, rows.scores, rows.segments
    return [None if x is None else x.contiguous() for x in tensors]


@functools.cache
def _constants(mean_length: int) -> dict:
    """Compile-time arguments, and warps, for samples of such a mean length.

    Most take their sample at once.
    """
    block = min(max(triton.next_power_of_2(3 * mean_length // 2), MIN_BLOCK), MAX_BLOCK)
    return {"BLOCK": block, "num_warps": max(block // ROWS_OF_WARP, 1)}
