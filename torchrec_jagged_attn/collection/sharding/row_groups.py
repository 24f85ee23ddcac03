"""Divides the rows of lookups into groups of features, and puts received rows in batch order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_jagged_attn.base.row_gradients import split_rows
from torchrec_jagged_attn.collection.sharding.id_exchange import Feature


def divide_rows(
    features: Sequence[Feature],
    counts_per_source: Sequence[dict[str, int]],
    groups: Sequence[Sequence[Feature]],
    rows: dict[int, Tensor],
) -> list[Tensor]:
    """Return the rows of each group of features, ordered by source rank and feature.

    Rows of a group are copied if several of its features have rows on this rank.

    Args:
        features: features with rows on this rank, in the order of the lookups. Each is in one
            group.
        counts_per_source: numbers of their rows, by source rank and feature.
        groups: groups of features of one lookup each.
        rows: rows by lookup, ordered by feature and source rank.
    """
    counts = {x.name: [n[x.name] for n in counts_per_source] for x in features}
    rows_by_feature: dict[str, Tensor] = {}
    empty: dict[int, Tensor] = {}  # for groups without rows on this rank
    for lookup, x in rows.items():
        names = [feature.name for feature in features if feature.lookup == lookup]
        *parts, empty[lookup] = split_rows(x, [*(sum(counts[name]) for name in names), 0])
        rows_by_feature |= zip(names, parts, strict=True)
    divided = []
    for group in groups:
        names = [feature.name for feature in group if feature.name in rows_by_feature]
        if len(names) > 1:
            blocks = [rows_by_feature[name].split(counts[name]) for name in names]
            divided.append(torch.cat([*itertools.chain(*zip(*blocks, strict=True))]))
        else:
            divided.append(rows_by_feature[names[0]] if names else empty[group[0].lookup])
    return divided


def permute_rows(rows: Tensor, order: Tensor, is_permutation: bool) -> Tensor:
    """Return ``rows[order]``, whose backward writes gradients instead of accumulating them.

    ``order`` contains each row at most once, except padding, whose gradient is zero. With
    ``is_permutation``, it contains each row exactly once.
    """
    return _Permute.apply(rows, order, is_permutation)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, is_permutation):
        ctx.save_for_backward(order)
        ctx.shape = None if is_permutation else x.shape
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        out = torch.empty_like(grad) if ctx.shape is None else grad.new_zeros(ctx.shape)
        return out.index_copy_(0, order, grad), None, None
