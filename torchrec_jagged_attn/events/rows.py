"""Rows of each sample with the highest scores: which they are, and copies of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.base.checks import check_has_values, should_validate
from torchrec_jagged_attn.base.devices import implementation
from torchrec_jagged_attn.base.layout import sample_ids
from torchrec_jagged_attn.events.kernels import highest_rows as kernels
from torchrec_jagged_attn.ops.registration import register_op_without_grad


def select_rows(
    offsets: Tensor,
    num_rows: int,
    scores: Tensor | None,
    segments: Tensor | None,
    keep: Tensor,
    threshold: float | None,
    capacity: int | None,
) -> tuple[Tensor, Tensor]:
    """The rows to keep, in their order, and the offsets that divide them among the samples.

    Args:
        offsets, scores, segments, threshold, capacity: see ``select_events``.
        num_rows: ``N``.
        keep: ``[B, S]`` int64, budgets of each sample's segments.

    Returns:
        ``[C]`` int64, -1 after the last row, and ``[B + 1]``.
    """
    if scores is None and segments is None:
        rows = torch.arange(num_rows, device=offsets.device)
        ends = offsets[1:].long()
        # Rows after the last offset have the sample B, which keeps none.
        first_kept = F.pad(ends - keep.squeeze(1), (0, 1), value=2**62)
        is_kept = rows >= first_kept[torch.searchsorted(ends, rows, right=True)]
    else:
        if scores is None:
            scores = torch.zeros(num_rows, device=offsets.device)
        lowest = -torch.inf if threshold is None else float(threshold)
        is_kept = highest_rows(offsets, scores, segments, keep, lowest)
    new_offsets = F.pad(is_kept.cumsum(0), (1, 0))[offsets]
    if capacity is None:
        check_has_values(offsets, "capacity")
        return is_kept.nonzero().squeeze(1), new_offsets.to(offsets.dtype)
    if should_validate(offsets) and (count := int(new_offsets[-1])) > capacity:
        raise ValueError(
            f"capacity must be at least the {count} rows that are kept, got {capacity}"
        )
    # A row more, because nonzero_static of a GPU divides by the number of rows.
    rows = torch.nonzero_static(F.pad(is_kept, (0, 1)), size=capacity, fill_value=-1).squeeze(1)
    return rows, new_offsets.clamp(max=capacity).to(offsets.dtype)


def take_rows(x: Tensor, rows: Tensor, *, is_padded: bool) -> Tensor:
    """``x[rows]``, and zeros for rows of -1, which only occur if ``is_padded``."""
    if not is_padded:
        return x[rows]
    num_rows, capacity = x.shape[0], rows.shape[0]
    if num_rows == 0:
        return torch.cat([x, x.new_zeros(capacity, *x.shape[1:])])
    # Different rows take the place of -1: backward adds up gradients of the same row serially.
    others = torch.arange(capacity, device=rows.device) % num_rows
    is_row = (rows >= 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(is_row, x[torch.where(rows >= 0, rows, others)], x.new_zeros(()))


def _highest_rows(
    offsets: Tensor, scores: Tensor, segments: Tensor | None, keep: Tensor, threshold: float
) -> Tensor:
    """``[N]`` bool: whether each row is kept, given budgets ``keep [B, S]`` int64."""
    if implementation(offsets.device)[0] != "reference":
        return kernels.highest_rows(offsets, scores, segments, keep, threshold)
    num_segments, num_groups = keep.shape[1], keep.numel()
    group = sample_ids(offsets, scores.shape[0]) * num_segments
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    is_allowed = scores >= threshold
    if segments is not None:
        is_allowed &= (segments >= 0) & (segments < num_segments)
        group += segments
    group.masked_fill_(~is_allowed, num_groups)  # one more, without a budget
    budgets = F.pad(keep.flatten(), (0, 1))
    # The newest first among rows of equal scores.
    keys = ((group << 32) - _ordered(scores)).flip(0)
    order = group.numel() - 1 - keys.argsort(stable=True)
    group = group[order]
    counts = group.bincount(minlength=num_groups + 1)
    ranks = torch.arange(group.numel()) - (counts.cumsum(0) - counts)[group]
    return torch.empty_like(is_allowed).index_copy_(0, order, ranks < budgets[group])


def _ordered(scores: Tensor) -> Tensor:
    """Integers of 32 bits in the order of fp32 or fp64 scores, equal for equal scores."""
    if scores.dtype == torch.float64:
        return torch.searchsorted(scores.sort().values, scores, out_int32=True)
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


highest_rows = register_op_without_grad(
    "highest_rows",
    forward=_highest_rows,
    fake=lambda offsets, scores, *_: scores.new_empty(scores.shape, dtype=torch.bool),
)
