"""The rows with the highest scores of each sample and segment.

One program per sample and segment maps each row to a 64-bit key, which orders rows by score and
then by row number, and finds the lowest key to keep by bisection: each step counts the keys that
are at least the middle, until that number is the budget, after at most 64 steps (about 20 for 200
rows). The first BLOCK keys stay in registers, others are computed again at each step. Programs have
few warps, because each step is a sum over all of them.

With N scores of e bytes, the kernel must read N·e bytes and write N. It is bound by latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.ops.launch import Launcher

MIN_BLOCK, MAX_BLOCK = 128, 4096
ROWS_PER_WARP = 512
# Below and above the keys of all rows that may be kept.
LOWEST, HIGHEST = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)


@triton.jit
def _load_keys(scores_ptr, segments_ptr, n, length, segment, threshold):
    """Keys of a sample's rows ``n``; LOWEST for rows that may not be kept."""
    mask = n < length
    if segments_ptr is not None:
        mask = mask & (tl.load(segments_ptr + n, mask=mask, other=-1) == segment)
    scores = tl.load(scores_ptr + n, mask=mask, other=float("nan")).to(tl.float32)
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 in the order of the scores
    return tl.where(scores >= threshold, (ordered.to(tl.int64) << 32) + n, LOWEST)


@triton.jit(do_not_specialize=["num_segments", "threshold"])
def _highest_rows_kernel(
    offsets_ptr,  # [B + 1]
    scores_ptr,  # [N]
    segments_ptr,  # [N], or None: each sample is one segment
    keep_ptr,  # [B, S] int64
    is_kept_ptr,  # [N] bool, initially False
    num_segments,
    threshold,
    BLOCK: tl.constexpr,
):
    """Set ``is_kept`` of the rows of one segment of one sample."""
    program = tl.program_id(0).to(tl.int64)
    sample = program // num_segments
    segment = program % num_segments
    budget = tl.load(keep_ptr + program)
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1) - begin).to(tl.int32)
    scores_ptr += begin
    is_kept_ptr += begin
    if segments_ptr is not None:
        segments_ptr += begin
    i = tl.arange(0, BLOCK)
    first = _load_keys(scores_ptr, segments_ptr, i, length, segment, threshold)
    # At most ``budget`` keys are at least ``high``, and more than that at least ``low``.
    low = tl.full([], LOWEST, tl.int64)
    high = tl.full([], HIGHEST, tl.int64)
    middle = low + 1  # the lowest key
    while middle > low:
        counts = (first >= middle).to(tl.int32)
        for start in range(BLOCK, length, BLOCK):
            keys = _load_keys(scores_ptr, segments_ptr, start + i, length, segment, threshold)
            counts += (keys >= middle).to(tl.int32)
        count = tl.sum(counts, 0)
        low = tl.where(count >= budget, middle, low)
        high = tl.where(count <= budget, middle, high)  # equals low if the count is the budget
        middle = (low & high) + ((low ^ high) >> 1)  # (low + high) >> 1 without overflow
    for start in range(0, length, BLOCK):
        keys = _load_keys(scores_ptr, segments_ptr, start + i, length, segment, threshold)
        is_kept = keys >= high
        tl.store(is_kept_ptr + start + i, is_kept, mask=is_kept)


_highest_rows = Launcher(_highest_rows_kernel)


def highest_rows(
    offsets: Tensor, scores: Tensor, segments: Tensor | None, keep: Tensor, threshold: float
) -> Tensor:
    """``[N]`` bool: whether each row is kept, given budgets ``keep [B, S]`` int64."""
    is_kept = scores.new_zeros(scores.shape, dtype=torch.bool)
    num_samples, num_segments = keep.shape
    if num_samples:
        # Most samples fit in a block of twice the mean length.
        block = triton.next_power_of_2(2 * scores.shape[0] // num_samples)
        block = min(max(block, MIN_BLOCK), MAX_BLOCK)
        constants = {"BLOCK": block, "num_warps": max(block // ROWS_PER_WARP, 1)}
        segments = None if segments is None else segments.contiguous()
        given = offsets.contiguous(), scores.contiguous(), segments, keep.contiguous()
        arguments = (*given, is_kept, num_segments, threshold)
        _highest_rows((num_samples * num_segments,), arguments, constants)
    return is_kept
