"""Splits the rows of a lookup without copies of gradients, and scales gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split_rows(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return ``rows.split(counts)``.

    The backward of ``Tensor.split`` copies the gradients of all parts into one tensor. This one
    does not copy gradients that were written into :func:`new_gradient`.
    """
    return _Split.apply(rows, list(counts))


def new_gradient(x: Tensor) -> Tensor:
    """Return an uninitialized tensor for the gradient of ``x``, in the shape and dtype of ``x``.

    If ``x`` is an output of :func:`split_rows`, it is a part of the gradient of all rows. Each part
    is returned once: further calls return other tensors, since gradients may be added.
    """
    node: Any = x.grad_fn
    if not isinstance(node, _Split._backward_cls):
        return x.new_empty(x.shape)
    if node.gradient is None:
        node.gradient, node.returned = x.new_empty(node.shape), set()
    if x.output_nr in node.returned:
        return x.new_empty(x.shape)
    node.returned.add(x.output_nr)
    return node.gradient.split(node.counts)[x.output_nr]


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``, whose gradient is multiplied by ``factor``."""
    return x if factor == 1 else _Scale.apply(x, factor)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, counts):
        ctx.shape, ctx.counts, ctx.gradient = rows.shape, counts, None
        ctx.set_materialize_grads(False)
        return rows.split(counts)

    @staticmethod
    def backward(ctx, *grads):
        gradient = ctx.gradient
        if gradient is None:
            gradient = next(x for x in grads if x is not None).new_empty(ctx.shape)
        for part, grad in zip(gradient.split(ctx.counts), grads, strict=True):
            if grad is None:
                part.zero_()
            elif grad.data_ptr() != part.data_ptr():
                part.copy_(grad)
        ctx.gradient = None
        return gradient, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None
