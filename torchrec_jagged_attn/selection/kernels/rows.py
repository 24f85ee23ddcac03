"""Which rows of each sample have its highest scores, and where they lie when the others are gone.

Of a sample's k-th highest score, one program finds the bits by bisection, between the lowest score
and the highest: it counts how many rows have the score in the middle or a higher one. It ends when
k rows have: after about ten counts of 200 scores that are far from alike, 32 at most. A program
holds the first BLOCK scores in registers, and loads others again for each count. Few warps take a
sample, one where samples are short, since every count is a sum over all of them. Rows stay in the
order that they have, so the place of one is the number of those kept before it. Of the samples
before its own, one kernel adds up how many rows are kept: each program, for a few samples, adds all
numbers before these, which is quicker than to wait for another's sum. In its sample, the last
kernel counts. Without scores and segments, these numbers follow from lengths, and nothing is
searched.

These kernels are bound by launches and latency. With N rows, scores of e bytes and room for C rows,
they must read N·e bytes. They must write 8·(N + C) bytes of places and rows, 12 for each sample and
segment, and the new offsets. Scores are read again where rows are placed, from a cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.runtime.launch import Launcher
from torchrec_jagged_attn.selection.arguments import ScoredRows

__all__ = ["select_rows"]

MIN_BLOCK, MAX_BLOCK = 128, 4096  # rows that a program ranks at a time
# Of a block, by a warp. Of short samples, no warp that ranks waits for another; prefix sums in a
# warp take the longer, the more rows it has.
RANKED_BY_WARP, PLACED_BY_WARP = 512, 128
# Samples whose new offsets a program makes, and what it adds up at a time for those before them.
SUMS = {"SAMPLES": 512, "BLOCK": 4096, "num_warps": 8}


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
            bound = _ordered(middle).to(tl.float32, bitcast=True)
            counts = (scores >= bound).to(tl.int32)
            for start in range(BLOCK, length, BLOCK):
                more = _load_scores(scores_ptr, segments_ptr, start + i, length, segment)
                counts += (more >= bound).to(tl.int32)
            count = tl.sum(counts, 0)
            is_low = count >= budget
            low, high = tl.where(is_low, middle, low), tl.where(is_low, high, middle - 1)
            at_least = tl.where(is_low, count, at_least)
        lowest = _ordered(low).to(tl.float32, bitcast=True)
    count = tl.minimum(at_least, budget)
    return lowest, count, at_least - count


@triton.jit
def _budget(keep_ptr, at, mask, limit, length):
    """How many of ``length`` rows may be kept."""
    budget = limit if keep_ptr is None else tl.load(keep_ptr + at, mask=mask, other=0)
    return tl.minimum(tl.maximum(budget, 0), length.to(tl.int64)).to(tl.int32)


@triton.jit(do_not_specialize=["num_segments", "keep_stride", "limit", "threshold"])
def _find_cuts_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None: all are alike
    segments_ptr,  # [N], or None: all rows are of one
    keep_ptr,  # [B or 1, S] int64, or None: the limit
    lowest_ptr,  # [B, S] fp32
    first_ptr,  # [B, S] int32
    counts_ptr,  # [B, S] int32
    num_segments,
    keep_stride,
    limit,
    threshold,
    BLOCK: tl.constexpr,
):
    """Of one segment of one sample: the lowest score that is kept, the first of the sample's rows
    that is kept of those that have it, and how many rows are kept.
    """
    program = tl.program_id(0).to(tl.int64)
    sample = program // num_segments
    segment = program % num_segments
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1) - begin).to(tl.int32)
    budget = _budget(keep_ptr, sample * keep_stride + segment, True, limit, length)
    if scores_ptr is not None:
        scores_ptr += begin
    if segments_ptr is not None:
        segments_ptr += begin
    lowest, count, too_many = _find_lowest(
        scores_ptr, segments_ptr, length, segment, threshold, budget, BLOCK
    )
    first = count * 0
    if count == 0:
        lowest = tl.full([], float("inf"), tl.float32)
        first = length
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
    tl.store(counts_ptr + program, count)


@triton.jit
def _load_counts(offsets_ptr, counts_ptr, keep_ptr, limit, at, mask):
    """How many rows are kept of segments ``at`` of all, or where there are none, of samples."""
    if counts_ptr is None:
        begin = tl.load(offsets_ptr + at, mask=mask, other=0)
        length = tl.load(offsets_ptr + at + 1, mask=mask, other=0) - begin
        return _budget(keep_ptr, at, mask, limit, length)
    else:
        return tl.load(counts_ptr + at, mask=mask, other=0)


@triton.jit(do_not_specialize=["num_samples", "num_segments", "limit", "capacity"])
def _new_offsets_kernel(
    offsets_ptr,  # [B + 1]
    counts_ptr,  # [B, S] int32, or None: of a sample, the newest rows are kept
    keep_ptr,  # [B, 1] int64, or None: the limit, where those are
    new_offsets_ptr,  # [B + 1]
    num_samples,
    num_segments,
    limit,
    capacity,
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many rows are kept up to each of some samples, as far as there is room."""
    first = tl.program_id(0).to(tl.int64) * SAMPLES
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, first * num_segments, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < first * num_segments
        sums += _load_counts(offsets_ptr, counts_ptr, keep_ptr, limit, at, mask)
    before = tl.sum(sums, 0)
    sample = first + tl.arange(0, SAMPLES)
    mask = sample < num_samples
    count = tl.zeros([SAMPLES], tl.int64)
    for segment in range(num_segments):
        at = sample * num_segments + segment
        count += _load_counts(offsets_ptr, counts_ptr, keep_ptr, limit, at, mask)
    new = tl.minimum(before + tl.cumsum(count, 0), capacity)
    tl.store(new_offsets_ptr + 1 + sample, new, mask=mask)
    if first == 0:
        tl.store(new_offsets_ptr, 0)


@triton.jit(do_not_specialize=["num_samples", "num_segments", "num_rows", "limit", "capacity"])
def _place_rows_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None
    segments_ptr,  # [N], or None
    new_offsets_ptr,  # [B + 1]
    keep_ptr,  # [B, 1] int64, or None: the limit, where the newest rows are kept
    lowest_ptr,  # [B, S] fp32, or None there
    first_ptr,  # [B, S] int32, likewise
    rows_ptr,  # [C] int64
    places_ptr,  # [N] int64
    num_samples,
    num_segments,
    num_rows,
    limit,
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
    room = tl.minimum(capacity - place, length).to(tl.int32)
    rows_ptr += place
    places_ptr += begin
    cuts = sample * num_segments
    if scores_ptr is not None:
        scores_ptr += begin
    if first_ptr is None:
        first = length - _budget(keep_ptr, sample, True, limit, length)
    elif segments_ptr is None:
        first = tl.load(first_ptr + cuts)
        lowest = tl.load(lowest_ptr + cuts)
    else:
        segments_ptr += begin
    before = length * 0
    for start in range(0, length, BLOCK):
        n = start + i
        mask = n < length
        is_kept = mask
        if segments_ptr is not None:
            segment = tl.load(segments_ptr + n, mask=mask, other=-1)
            is_kept = mask & (segment >= 0) & (segment < num_segments)
            first = tl.load(first_ptr + cuts + segment, mask=is_kept, other=0)
            if scores_ptr is not None:
                lowest = tl.load(lowest_ptr + cuts + segment, mask=is_kept, other=0.0)
        if scores_ptr is None:
            is_kept = is_kept & (n >= first)
        else:
            scores = tl.load(scores_ptr + n, mask=mask, other=0.0).to(tl.float32)
            is_kept = is_kept & ((scores > lowest) | ((scores == lowest) & (n >= first)))
        count = is_kept.to(tl.int32)
        rank = before + tl.cumsum(count, 0) - count
        is_kept = is_kept & (rank < room)
        tl.store(rows_ptr + rank, begin + n, mask=is_kept)
        tl.store(places_ptr + n, tl.where(is_kept, place + rank, -1), mask=mask)
        before += tl.sum(count, 0)


_find_cuts = Launcher(_find_cuts_kernel)
_new_offsets = Launcher(_new_offsets_kernel)
_place_rows = Launcher(_place_rows_kernel)


def select_rows(
    rows: ScoredRows,
    keep: Tensor | None,
    num_segments: int,
    limit: int,
    threshold: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The row at each new place, ``[C]``, and the new place of each row, ``[N]``, -1 for none; and
    the new offsets, ``[B + 1]``, up to ``capacity``.

    ``keep`` is ``[B, S]`` or ``[1, S]`` int64; without it, each segment keeps ``limit`` rows at
    most.
    """
    offsets, scores, segments = (None if x is None else x.contiguous() for x in rows[:3])
    assert offsets is not None
    keep = None if keep is None else keep.contiguous()
    num_rows, num_samples = rows.num_rows, offsets.numel() - 1
    if num_samples == 0:
        numbers, places = (
            offsets.new_full((size,), -1, dtype=torch.int64) for size in (capacity, num_rows)
        )
        return numbers, places, offsets.new_zeros(1)

    block = _block(num_rows // num_samples)
    lowest = first = counts = None
    if scores is not None or segments is not None:
        shape = (num_samples, num_segments)
        lowest = offsets.new_empty(shape, dtype=torch.float32)
        first = offsets.new_empty(shape, dtype=torch.int32)
        counts = offsets.new_empty(shape, dtype=torch.int32)
        stride = 0 if keep is None or keep.shape[0] == 1 else num_segments
        given = offsets, scores, segments, keep, lowest, first, counts
        sizes = num_segments, stride, limit, threshold
        _find_cuts(
            (num_samples * num_segments,), (*given, *sizes), _constants(block, RANKED_BY_WARP)
        )

    new_offsets = offsets.new_empty(num_samples + 1)
    sizes = num_samples, num_segments, limit, capacity
    grid = (-(-num_samples // SUMS["SAMPLES"]),)
    _new_offsets(grid, (offsets, counts, keep, new_offsets, *sizes), SUMS)

    constants = _constants(block // 2, PLACED_BY_WARP)
    numbers = offsets.new_empty(capacity, dtype=torch.int64)
    places = offsets.new_empty(num_rows, dtype=torch.int64)
    grid = (num_samples + -(-max(capacity, num_rows) // constants["BLOCK"]),)
    given = offsets, scores, segments, new_offsets, keep, lowest, first, numbers, places
    sizes = num_samples, num_segments, num_rows, limit, capacity
    _place_rows(grid, (*given, *sizes), constants)
    return numbers, places, new_offsets


def _block(mean_length: int) -> int:
    """A number of rows that most samples of such a mean length do not have more of."""
    most = min(max(3 * mean_length // 2, MIN_BLOCK // 2), MAX_BLOCK // 2)
    return 1 << most.bit_length()


def _constants(block: int, rows_of_warp: int) -> dict[str, int]:
    """Compile-time arguments, and warps."""
    return {"BLOCK": block, "num_warps": max(block // rows_of_warp, 1)}
