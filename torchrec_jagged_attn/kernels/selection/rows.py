"""Which rows of each sample have its highest scores, and where they lie when the others are gone.

Of a sample's k-th highest score, one program finds the bits, eight at a time, from the highest on:
it counts how many of the rows that are still in question have each value of these bits, and from
the top down the value with which k is reached. Rows stay in the order that they have, so the place
of one is the number of those kept before it, which another kernel counts.

These kernels are bound by launches and latency. With N rows, S segments, scores of e bytes and room
for C rows, they must read N·e bytes, and write 8·(N + C) bytes of places and rows and 20 bytes for
each sample and segment. Scores are read up to 6 + S times, but from memory once: a sample's lie in
the cache of its program. A sample that keeps all of its rows is read twice.
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

MIN_BLOCK, MAX_BLOCK = 128, 2048  # rows that a program takes at a time


@triton.jit
def _load_scores(scores_ptr, segments_ptr, n, end, segment, threshold):
    """Scores of the rows ``n`` in fp32, -0.0 as 0.0, and whether each may be kept: it is of the
    ``segment``, and its score no NaN and not below the threshold.
    """
    mask = n < end
    scores = tl.zeros([n.shape[0]], tl.float32)
    if scores_ptr is not None:
        scores = tl.load(scores_ptr + n, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(scores == 0, 0.0, scores)
    mask = mask & (scores >= threshold)
    if segments_ptr is not None:
        mask = mask & (tl.load(segments_ptr + n, mask=mask, other=-1) == segment)
    return scores, mask


@triton.jit
def _ordered(bits):
    """The bits of an fp32 as an int32 that is ordered as the numbers are; and the way back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _find_score(
    scores_ptr, segments_ptr, begin, end, segment, threshold, budget, BLOCK: tl.constexpr
):
    """The ``budget``-th highest score as an ordered int32, how many rows have it, and how many of
    these are to be kept.
    """
    value = tl.arange(0, 256)
    found = (begin * 0).to(tl.int32)
    needed = budget.to(tl.int32)
    equal = found
    for step in range(4):
        shift = 24 - 8 * step
        known = tl.minimum(shift + 8, 31)  # bits from here on, but in the first step
        of_sign = tl.where(step == 0, 128, 0)
        counts = tl.zeros([256], tl.int32)
        for start in range(begin, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            scores, mask = _load_scores(scores_ptr, segments_ptr, n, end, segment, threshold)
            key = _ordered(scores.to(tl.int32, bitcast=True))
            mask = mask & ((step == 0) | ((key >> known) == (found >> known)))
            counts += tl.histogram(((key >> shift) & 255) ^ of_sign, 256, mask=mask)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(at_least >= needed, value, 0), 0)
        needed -= tl.sum(tl.where(value > digit, counts, 0), 0)
        equal = tl.sum(tl.where(value == digit, counts, 0), 0)
        found = found | ((digit ^ of_sign) << shift)
    return found, equal, needed


@triton.jit(do_not_specialize=["num_segments", "keep_stride", "limit", "threshold"])
def _find_cuts_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None: all are alike
    segments_ptr,  # [N], or None: all rows are of one
    keep_ptr,  # [B or 1, S] int64, or None: the limit
    lowest_ptr,  # [B, S] fp32
    first_ptr,  # [B, S] int64
    counts_ptr,  # [B, S] int64
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
    budget = limit + begin * 0
    if keep_ptr is not None:
        budget = tl.load(keep_ptr + sample * keep_stride + segment)

    lowest = threshold + 0.0
    first = begin
    if scores_ptr is None and segments_ptr is None:
        budget = tl.minimum(tl.maximum(budget, 0), end - begin)
        first = end - budget
        lowest = tl.full([], 0.0, tl.float32)
    else:
        seen = tl.zeros([BLOCK], tl.int32)
        for start in range(begin, end, BLOCK):
            n = start + tl.arange(0, BLOCK)
            _, mask = _load_scores(scores_ptr, segments_ptr, n, end, segment, threshold)
            seen += mask.to(tl.int32)
        equal = tl.sum(seen, 0)
        budget = tl.minimum(tl.maximum(budget, 0), equal)
        if budget == 0:
            first = end
            lowest = tl.full([], float("inf"), tl.float32)
        elif budget < equal:
            key, needed = equal * 0, budget.to(tl.int32)
            if scores_ptr is not None:
                key, equal, needed = _find_score(
                    scores_ptr, segments_ptr, begin, end, segment, threshold, budget, BLOCK
                )
            lowest = _ordered(key).to(tl.float32, bitcast=True)
            # The older ones of the rows that have it go.
            before = equal * 0
            for start in range(begin, end, BLOCK):
                n = start + tl.arange(0, BLOCK)
                scores, mask = _load_scores(scores_ptr, segments_ptr, n, end, segment, threshold)
                has_it = (mask & (scores == lowest)).to(tl.int32)
                rank = before + tl.cumsum(has_it, 0) - has_it
                is_first = (has_it > 0) & (rank == equal - needed)
                first += tl.sum(tl.where(is_first, n - begin, 0), 0)
                before += tl.sum(has_it, 0)
    tl.store(lowest_ptr + program, lowest)
    tl.store(first_ptr + program, first)
    tl.store(counts_ptr + program, budget)


@triton.jit(do_not_specialize=["num_segments", "capacity"])
def _place_rows_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N], or None
    segments_ptr,  # [N], or None
    new_offsets_ptr,  # [B + 1]
    lowest_ptr,  # [B, S] fp32
    first_ptr,  # [B, S] int64
    rows_ptr,  # [C] int64
    places_ptr,  # [N] int64
    num_segments,
    capacity,
    BLOCK: tl.constexpr,
):
    """Place the rows of one sample that are kept, as far as there is room."""
    sample = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    place = tl.load(new_offsets_ptr + sample).to(tl.int64)
    for start in range(begin, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = n < end
        scores = tl.zeros([BLOCK], tl.float32)
        if scores_ptr is not None:
            scores = tl.load(scores_ptr + n, mask=mask, other=0.0).to(tl.float32)
        at = sample * num_segments + n * 0
        is_kept = mask
        if segments_ptr is not None:
            segment = tl.load(segments_ptr + n, mask=mask, other=-1).to(tl.int64)
            is_kept = mask & (segment >= 0) & (segment < num_segments)
            at += segment
        lowest = tl.load(lowest_ptr + at, mask=is_kept, other=0.0)
        first = tl.load(first_ptr + at, mask=is_kept, other=0)
        is_kept = is_kept & ((scores > lowest) | ((scores == lowest) & (n >= first)))
        count = is_kept.to(tl.int64)
        new = place + tl.cumsum(count, 0) - count
        is_kept = is_kept & (new < capacity)
        tl.store(rows_ptr + new, n, mask=is_kept)
        tl.store(places_ptr + n, tl.where(is_kept, new, -1), mask=mask)
        place += tl.sum(count, 0)


_find_cuts = Launcher(_find_cuts_kernel)
_place_rows = Launcher(_place_rows_kernel)


def find_cuts(
    rows: ScoredRows, keep: Tensor | None, num_segments: int, limit: int, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sample's segments, ``[B, S]``: lowest score, first row with it, rows that are kept.

    ``keep`` is ``[B, S]`` or ``[1, S]`` int64; without it, each keeps ``limit`` rows at most.
    """
    offsets = rows.offsets
    num_samples = offsets.numel() - 1
    shape = (num_samples, num_segments)
    lowest = offsets.new_empty(shape, dtype=torch.float32)
    first, counts = (offsets.new_empty(shape, dtype=torch.int64) for _ in range(2))
    if counts.numel():
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
    numbers = offsets.new_full((capacity,), -1, dtype=torch.int64)
    places = offsets.new_empty(num_rows, dtype=torch.int64)
    if num_rows and num_samples:
        cuts = (lowest, first, numbers, places, first.shape[1], capacity)
        _place_rows(
            (num_samples,),
            (*_contiguous(rows), new_offsets.contiguous(), *cuts),
            _constants(num_rows // num_samples),
        )
    return numbers, places


def _contiguous(rows: ScoredRows) -> list[Tensor | None]:
    """Its tensors, without gaps."""
    tensors = rows.offsets, rows.scores, rows.segments
    return [None if x is None else x.contiguous() for x in tensors]


@functools.cache
def _constants(mean_length: int) -> dict:
    """Compile-time arguments, and warps of 256 rows each, for samples of such a mean length.

    Most take their sample at once: the longest ones decide when the last program ends.
    """
    block = min(max(triton.next_power_of_2(4 * mean_length), MIN_BLOCK), MAX_BLOCK)
    return {"BLOCK": block, "num_warps": max(block // 256, 1)}
