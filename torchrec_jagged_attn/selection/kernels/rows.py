"""The rows of each sample with its highest scores, and their indices once the others are removed.

1. ``_find_cuts``: one program per sample and segment finds its k-th highest score by bisection over
   the bits of the scores. Each step counts the rows whose score is at least the middle; the search
   ends once that is k rows, after at most 32 steps (about ten for 200 distinct scores). The first
   BLOCK scores stay in registers, others are loaded again at each step. Programs have few warps,
   since each step is a sum over all of them. Without scores and segments, lengths suffice, and this
   kernel is not launched.
2. ``_new_offsets``: prefix sum of the rows kept per sample. Each program sums all counts before its
   samples itself, which is faster than waiting for another program.
3. ``_index_rows``: the new index of a row is the number of rows kept before it.

The kernels are bound by launches and latency. With N rows, scores of e bytes and capacity C, they
must read N·e bytes and write 8·(N + C) bytes of indices, 12 per sample and segment, and the new
offsets. Kernel 3 reads the scores again, from cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.runtime.launch import Launcher

MIN_BLOCK, MAX_BLOCK = 128, 4096  # rows of _find_cuts' block
# Rows of a block per warp: short samples fit in one warp of _find_cuts, so no warp waits for
# another; prefix sums in _index_rows are the slower, the more rows a warp has.
CUT_ROWS_PER_WARP, INDEX_ROWS_PER_WARP = 512, 128
# Samples per program of _new_offsets, and the block in which it sums the counts before them.
SUMS = {"SAMPLES": 512, "BLOCK": 4096, "num_warps": 8}


@triton.jit
def _load_scores(scores_ptr, segments_ptr, n, length, segment):
    """Scores of a sample's rows ``n`` in fp32; NaN beyond its end and in other segments."""
    mask = n < length
    if segments_ptr is not None:
        mask = mask & (tl.load(segments_ptr + n, mask=mask, other=-1) == segment)
    if scores_ptr is None:
        return tl.where(mask, 0.0, float("nan"))
    else:
        return tl.load(scores_ptr + n, mask=mask, other=float("nan")).to(tl.float32)


@triton.jit
def _ordered(bits):
    """Map the bits of an fp32 to an int32 of the same order, or back.

    -0.0 and 0.0 map to different integers; callers compare them as fp32, where they are equal.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _find_lowest(scores_ptr, segments_ptr, length, segment, threshold, budget, BLOCK: tl.constexpr):
    """The lowest score that is kept, how many rows are kept, and how many rows with this score are
    removed.

    The search ends once ``budget`` rows have at least the score, which may lie between two scores.
    """
    i = tl.arange(0, BLOCK)
    scores = _load_scores(scores_ptr, segments_ptr, i, length, segment)  # of the first BLOCK rows
    is_high = scores >= threshold
    counts = is_high.to(tl.int32)
    lows, highs = tl.where(is_high, scores, float("inf")), tl.where(is_high, scores, float("-inf"))
    for start in range(BLOCK, length, BLOCK):
        more = _load_scores(scores_ptr, segments_ptr, start + i, length, segment)
        is_high = more >= threshold
        counts += is_high.to(tl.int32)
        lows = tl.minimum(lows, tl.where(is_high, more, float("inf")))
        highs = tl.maximum(highs, tl.where(is_high, more, float("-inf")))
    at_least = tl.sum(counts, 0)  # rows whose score is at least low
    lowest = threshold + 0.0
    if (budget > 0) & (at_least > budget):
        low = _ordered(tl.min(lows, 0).to(tl.int32, bitcast=True))
        high = _ordered(tl.max(highs, 0).to(tl.int32, bitcast=True))
        while (at_least > budget) & (low < high):
            half = (high - low).to(tl.uint32, bitcast=True) >> 1  # the difference may wrap int32
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
    scores_ptr,  # [N], or None: all are equal
    segments_ptr,  # [N], or None: each sample is one segment
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
    """For one segment of one sample: the lowest score that is kept, the first row kept with this
    score, and the number of rows that are kept.
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
    lowest, count, num_removed = _find_lowest(
        scores_ptr, segments_ptr, length, segment, threshold, budget, BLOCK
    )
    first = count * 0
    if count == 0:
        lowest = tl.full([], float("inf"), tl.float32)
        first = length
    elif num_removed > 0:  # the oldest of the rows with this score
        before = count * 0
        for start in range(0, length, BLOCK):
            n = start + tl.arange(0, BLOCK)
            scores = _load_scores(scores_ptr, segments_ptr, n, length, segment)
            has_it = (scores == lowest).to(tl.int32)
            rank = before + tl.cumsum(has_it, 0) - has_it
            is_first = (has_it > 0) & (rank == num_removed)
            first += tl.sum(tl.where(is_first, n, 0), 0)
            before += tl.sum(has_it, 0)
    tl.store(lowest_ptr + program, lowest)
    tl.store(first_ptr + program, first)
    tl.store(counts_ptr + program, count)


@triton.jit
def _load_counts(offsets_ptr, counts_ptr, keep_ptr, limit, at, mask):
    """How many rows are kept of the segments ``at``; without counts, of the samples ``at``."""
    if counts_ptr is None:
        begin = tl.load(offsets_ptr + at, mask=mask, other=0)
        length = tl.load(offsets_ptr + at + 1, mask=mask, other=0) - begin
        return _budget(keep_ptr, at, mask, limit, length)
    else:
        return tl.load(counts_ptr + at, mask=mask, other=0)


@triton.jit(do_not_specialize=["num_samples", "num_segments", "limit", "capacity"])
def _new_offsets_kernel(
    offsets_ptr,  # [B + 1]
    counts_ptr,  # [B, S] int32, or None: the newest rows of each sample are kept
    keep_ptr,  # [B, 1] int64, or None: limit; read without counts
    new_offsets_ptr,  # [B + 1]
    num_samples,
    num_segments,
    limit,
    capacity,
    SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """New offsets of SAMPLES samples, up to ``capacity``."""
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
def _index_rows_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None
    segments_ptr,  # [N], or None
    new_offsets_ptr,  # [B + 1]
    keep_ptr,  # [B, 1] int64, or None: limit; read without first_ptr
    lowest_ptr,  # [B, S] fp32, or None: the newest rows are kept
    first_ptr,  # [B, S] int32, likewise
    rows_ptr,  # [C] int64
    inverse_ptr,  # [N] int64
    num_samples,
    num_segments,
    num_rows,
    limit,
    capacity,
    BLOCK: tl.constexpr,
):
    """Indices and inverse indices of the rows kept of one sample, up to ``capacity``.

    Programs after the first ``num_samples`` write -1 to BLOCK elements each of the rest: indices
    beyond the rows kept, and inverse indices of rows beyond the last offset.
    """
    sample = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if sample >= num_samples:
        at = (sample - num_samples) * BLOCK + i
        no_index = at * 0 - 1
        kept = tl.load(new_offsets_ptr + num_samples)
        tl.store(rows_ptr + at, no_index, mask=(at >= kept) & (at < capacity))
        end = tl.load(offsets_ptr + num_samples)
        tl.store(inverse_ptr + at, no_index, mask=(at >= end) & (at < num_rows))
        return
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1) - begin).to(tl.int32)
    new_begin = tl.load(new_offsets_ptr + sample).to(tl.int64)
    max_kept = tl.minimum(capacity - new_begin, length).to(tl.int32)
    rows_ptr += new_begin
    inverse_ptr += begin
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
        is_kept = is_kept & (rank < max_kept)
        tl.store(rows_ptr + rank, begin + n, mask=is_kept)
        tl.store(inverse_ptr + n, tl.where(is_kept, new_begin + rank, -1), mask=mask)
        before += tl.sum(count, 0)


_find_cuts = Launcher(_find_cuts_kernel)
_new_offsets = Launcher(_new_offsets_kernel)
_index_rows = Launcher(_index_rows_kernel)


def select_rows(
    offsets: Tensor,
    scores: Tensor | None,
    segments: Tensor | None,
    keep: Tensor | None,
    num_rows: int,
    capacity: int,
    num_segments: int,
    limit: int,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The row at each new index, ``[C]``, and the new index of each row, ``[N]``, -1 for none; and
    the new offsets, ``[B + 1]``, up to ``capacity``.

    ``keep`` is ``[B, S]`` or ``[1, S]`` int64; without it, each segment keeps up to ``limit`` rows.
    """
    offsets, num_samples = offsets.contiguous(), offsets.numel() - 1
    scores, segments, keep = (
        None if x is None else x.contiguous() for x in (scores, segments, keep)
    )
    if num_samples == 0:
        indices, inverse = (
            offsets.new_full((size,), -1, dtype=torch.int64) for size in (capacity, num_rows)
        )
        return indices, inverse, offsets.new_zeros(1)

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
            (num_samples * num_segments,), (*given, *sizes), _constants(block, CUT_ROWS_PER_WARP)
        )

    new_offsets = offsets.new_empty(num_samples + 1)
    sizes = num_samples, num_segments, limit, capacity
    grid = (-(-num_samples // SUMS["SAMPLES"]),)
    _new_offsets(grid, (offsets, counts, keep, new_offsets, *sizes), SUMS)

    constants = _constants(block // 2, INDEX_ROWS_PER_WARP)
    indices = offsets.new_empty(capacity, dtype=torch.int64)
    inverse = offsets.new_empty(num_rows, dtype=torch.int64)
    grid = (num_samples + -(-max(capacity, num_rows) // constants["BLOCK"]),)
    given = offsets, scores, segments, new_offsets, keep, lowest, first, indices, inverse
    sizes = num_samples, num_segments, num_rows, limit, capacity
    _index_rows(grid, (*given, *sizes), constants)
    return indices, inverse, new_offsets


def _block(mean_length: int) -> int:
    """A power of two that most samples of this mean length are not longer than."""
    most = min(max(3 * mean_length // 2, MIN_BLOCK // 2), MAX_BLOCK // 2)
    return 1 << most.bit_length()


def _constants(block: int, rows_per_warp: int) -> dict[str, int]:
    """Compile-time arguments and number of warps."""
    return {"BLOCK": block, "num_warps": max(block // rows_per_warp, 1)}
