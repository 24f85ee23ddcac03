"""Rows of each sample with the highest scores, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout
from torchrec_jagged_attn.selection.arguments import ScoredRows


def select_rows(
    rows: ScoredRows,
    keep: Tensor | None,
    num_segments: int,
    limit: int,
    threshold: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The row at each new index, ``[C]``, and the new index of each row, ``[N]``, -1 for none; and
    the new offsets, ``[B + 1]``, up to ``capacity``.
    """
    lowest, first, counts = _find_cuts(rows, keep, num_segments, limit, threshold)
    new_offsets = F.pad(counts.sum(1).cumsum(0), (1, 0)).clamp(max=capacity)
    return *_index_rows(rows, lowest, first, capacity), new_offsets.to(rows.offsets.dtype)


def copy_rows(x: Tensor, index: Tensor) -> Tensor:
    """``[R, D]``: the rows of ``x [M, D]`` by ``index [R]``, zeros where that is -1."""
    copied = (index >= 0).nonzero().squeeze(1)
    if copied.numel() == index.numel():
        return x.index_select(0, index)
    out = x.new_zeros(index.shape[0], x.shape[1])
    return out.index_copy_(0, copied, x.index_select(0, index[copied]))


def _find_cuts(
    rows: ScoredRows, keep: Tensor | None, num_segments: int, limit: int, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, S]`` for each segment of each sample: the lowest score that is kept, the first row kept
    with this score, and the number of rows that are kept.

    Rows are sorted by their cell of ``[B, S]``, then by score, the newest first among equals.
    """
    offsets, scores, segments, num_rows = rows
    shape = (offsets.numel() - 1, num_segments)
    if scores is None and segments is None:
        counts = _limited(offsets.diff().long().unsqueeze(1), keep, limit)
        first = offsets[1:].unsqueeze(1) - counts
        return torch.zeros(shape, device=offsets.device), first, counts
    num_cells = shape[0] * shape[1]
    cell = JaggedLayout(offsets, num_rows).sample_ids() * num_segments
    scores = _upcast(scores, cell)
    eligible = scores >= threshold
    if segments is not None:
        eligible &= (segments >= 0) & (segments < num_segments)
        cell = cell + segments
    cell = cell.masked_fill(~eligible, num_cells)  # sorted after all others
    order = num_rows - 1 - _sort(cell.flip(0), scores.flip(0))
    num_eligible = cell.bincount(minlength=num_cells + 1)[:num_cells].view(shape)
    counts = _limited(num_eligible, keep, limit)
    begins = (num_eligible.flatten().cumsum(0) - num_eligible.flatten()).view(shape)
    kept = counts > 0
    last = order[(begins + counts - 1)[kept]]
    lowest = scores.new_full(shape, torch.inf)
    lowest[kept] = scores[last]
    first = torch.full_like(counts, num_rows)
    first[kept] = last
    return lowest, first, counts


def _index_rows(
    rows: ScoredRows, lowest: Tensor, first: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """The row at each new index, ``[C]``, and the new index of each row, ``[N]``; -1 for none."""
    offsets, scores, segments, num_rows = rows
    numbers = torch.arange(num_rows, device=offsets.device)
    at = JaggedLayout(offsets, num_rows).sample_ids() * first.shape[1]
    scores = _upcast(scores, numbers)
    if segments is None:
        is_kept = torch.ones_like(numbers, dtype=torch.bool)
    else:
        is_kept = (segments >= 0) & (segments < first.shape[1])
        at = at + segments * is_kept
    lowest, first = lowest.flatten()[at], first.flatten()[at]
    is_kept &= (scores > lowest) | ((scores == lowest) & (numbers >= first))
    new = is_kept.cumsum(0) - 1
    is_kept &= new < capacity
    inverse = new.masked_fill(~is_kept, -1)
    kept = numbers[is_kept]
    return torch.cat([kept, kept.new_full((capacity - kept.numel(),), -1)]), inverse


def _limited(counts: Tensor, keep: Tensor | None, limit: int) -> Tensor:
    """``counts [B, S]``, no more than the budgets."""
    return counts.clamp(max=limit) if keep is None else torch.minimum(counts, keep.clamp(min=0))


def _sort(cell: Tensor, scores: Tensor) -> Tensor:
    """Stable argsort by cell, then by score, the highest first."""
    if scores.dtype == torch.float64:
        by_score = scores.argsort(descending=True, stable=True)
        return by_score[cell[by_score].argsort(stable=True)]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 in the order of the scores
    return ((cell << 32) - bits).argsort(stable=True)


def _upcast(scores: Tensor | None, like: Tensor) -> Tensor:
    """``scores`` in fp32 or fp64; zeros if they are None."""
    if scores is None:
        return torch.zeros_like(like, dtype=torch.float32)
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
