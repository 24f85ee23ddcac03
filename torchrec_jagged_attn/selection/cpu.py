"""Rows of each sample with the highest scores, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout


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
    """
    layout = JaggedLayout(offsets, num_rows)
    cell = layout.sample_ids() * num_segments  # of [B, S], the segments of each sample
    shape = (layout.batch_size, num_segments)
    limits = cell.new_tensor(limit) if keep is None else keep.clamp(min=0)
    limits = limits.expand(shape).flatten()
    if scores is None and segments is None:
        counts = layout.lengths.long()
        is_kept = layout.positions_from_end() < limits[cell]
    else:
        if scores is None:
            scores = cell.new_zeros(num_rows, dtype=torch.float32)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        is_kept = scores >= threshold
        if segments is not None:
            is_kept &= (segments >= 0) & (segments < num_segments)
            cell += segments
        cell.masked_fill_(~is_kept, limits.numel())  # sorted after all others
        counts = cell.bincount(minlength=limits.numel() + 1)[:-1]
        order = num_rows - 1 - _sort(cell.flip(0), scores.flip(0))  # the newest first among equals
        ranked = order[: is_kept.sum()]
        begins = (counts.cumsum(0) - counts)[cell[ranked]]
        ranks = torch.arange(ranked.numel(), device=cell.device) - begins
        is_kept[ranked] = ranks < limits[cell[ranked]]
    new_lengths = torch.minimum(counts, limits).view(shape).sum(1)
    new_offsets = F.pad(new_lengths.cumsum(0), (1, 0)).clamp(max=capacity).to(offsets.dtype)
    new = is_kept.cumsum(0) - 1
    is_kept &= new < capacity
    inverse = new.masked_fill(~is_kept, -1)
    rows = is_kept.nonzero().squeeze(1)
    return F.pad(rows, (0, capacity - rows.numel()), value=-1), inverse, new_offsets


def copy_rows(x: Tensor, index: Tensor) -> Tensor:
    """``[R, D]``: the rows of ``x [M, D]`` by ``index [R]``, zeros where that is -1."""
    copied = (index >= 0).nonzero().squeeze(1)
    if copied.numel() == index.numel():
        return x.index_select(0, index)
    out = x.new_zeros(index.shape[0], x.shape[1])
    return out.index_copy_(0, copied, x.index_select(0, index[copied]))


def _sort(cell: Tensor, scores: Tensor) -> Tensor:
    """Stable argsort by cell, then by score, the highest first."""
    if scores.dtype == torch.float64:
        by_score = scores.argsort(descending=True, stable=True)
        return by_score[cell[by_score].argsort(stable=True)]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 in the order of the scores
    return ((cell << 32) - bits).argsort(stable=True)
