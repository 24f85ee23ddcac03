"""Divides the rows of lookups into groups of features, and puts received rows in batch order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_jagged_attn.collection.sharding.id_exchange import Feature


class RowLayout:
    """Ranges of rows in the outputs of lookups, ordered by feature and source rank.

    Args:
        features: features with rows on this rank, in the order of the lookups.
        counts_per_source: numbers of their rows, by source rank and feature.
        lookups: indices of the lookups.
    """

    def __init__(
        self, features: list[Feature], counts_per_source: list[dict[str, int]], lookups: list[int]
    ) -> None:
        self._lookups = lookups
        self._counts = {x.name: [n[x.name] for n in counts_per_source] for x in features}
        self._ranges: dict[str, tuple[int, int, int]] = {}  # index of the lookup, begin, length
        ends = dict.fromkeys(lookups, 0)
        for feature in features:
            count = sum(self._counts[feature.name])
            self._ranges[feature.name] = lookups.index(feature.lookup), ends[feature.lookup], count
            ends[feature.lookup] += count

    def select(self, group: list[Feature], rows: Sequence[Tensor]) -> Tensor:
        """Return the rows of ``group``, ordered by source rank and feature. This copies them if
        several features of the group have rows on this rank.
        """
        names = [feature.name for feature in group if feature.name in self._ranges]
        if len(names) > 1:
            blocks = [self._rows(name, rows).split(self._counts[name]) for name in names]
            return torch.cat([*itertools.chain(*zip(*blocks, strict=True))])
        if names:
            return self._rows(names[0], rows)
        return rows[self._lookups.index(group[0].lookup)][:0]

    def write_grad(
        self, group: list[Feature], grad: Tensor, factor: float, out: Sequence[Tensor]
    ) -> None:
        """Write ``factor`` times the gradient of :meth:`select` into gradients of lookups."""
        names = [feature.name for feature in group if feature.name in self._ranges]
        if len(names) == 1:
            torch.mul(grad, factor, out=self._rows(names[0], out))
            return
        if not names:
            return
        counts = itertools.chain(*zip(*(self._counts[name] for name in names), strict=True))
        blocks = grad.mul(factor).split([*counts])
        blocks = [x for i in range(len(names)) for x in blocks[i :: len(names)]]
        targets = [x for name in names for x in self._rows(name, out).split(self._counts[name])]
        torch._foreach_copy_(targets, blocks)  # pyright: ignore

    def _rows(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        lookup, begin, count = self._ranges[name]
        return rows[lookup].narrow(0, begin, count)


def divide_rows(
    layout: RowLayout, groups: list[list[Feature]], factor: float, rows: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the rows of each group of features, as :meth:`RowLayout.select`.

    Each row of the lookups ``rows`` is in one group. Gradients are multiplied by ``factor``.
    """
    return _Divide.apply(layout, groups, factor, *rows)


def permute_rows(rows: Tensor, order: Tensor, is_permutation: bool) -> Tensor:
    """Return ``rows[order]``, whose backward writes gradients instead of accumulating them.

    ``order`` contains each row at most once, except padding, whose gradient is zero. With
    ``is_permutation``, it contains each row exactly once.
    """
    return _Permute.apply(rows, order, is_permutation)


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layout, groups, factor, *rows):
        ctx.layout, ctx.groups, ctx.factor = layout, groups, factor
        ctx.shapes = [x.shape for x in rows]
        return tuple(layout.select(group, rows) for group in groups)

    @staticmethod
    def backward(ctx, *grads):
        row_grads = [grads[0].new_empty(shape) for shape in ctx.shapes]
        for group, grad in zip(ctx.groups, grads, strict=True):
            ctx.layout.write_grad(group, grad, ctx.factor, row_grads)
        return None, None, None, *row_grads


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
