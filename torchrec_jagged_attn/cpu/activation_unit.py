"""The activation unit on a CPU, in plain PyTorch, sample by sample.

Products and sums are taken in fp32 (fp64 for fp64 inputs), as in the kernels.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.arguments import (
    ActivationUnitArguments,
    ActivationUnitGradients,
    ActivationUnitOutputs,
)
from torchrec_jagged_attn.cpu.attention import age_buckets, compute_dtype, recency_buckets
from torchrec_jagged_attn.cpu.dropout import dropped_rows
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["backward", "forward"]


class _Layers(NamedTuple):
    """Weights and biases, where the first weight is in blocks of ``[H1, D]``, by what it meets."""

    of_query: Tensor
    of_row: Tensor
    of_difference: Tensor
    of_product: Tensor
    b_1: Tensor
    w_2: Tensor
    b_2: Tensor
    w_3: Tensor
    b_3: Tensor

    def folded(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What the rows of the sample of ``q`` are multiplied by, and what is added."""
        weight = self.of_row - self.of_difference + self.of_product * q
        return weight, (self.of_query + self.of_difference) @ q + self.b_1


def forward(args: ActivationUnitArguments) -> ActivationUnitOutputs:
    """Pool each sample's rows by their weights."""
    dtype = compute_dtype(args.history)
    layers = _layers(args, dtype)
    factors, *_ = _factors(args, dtype)
    out = args.query.new_empty(args.query.shape)
    for b, rows in enumerate(_samples(args.offsets)):
        u = args.history[rows].to(dtype)
        weight, constant = layers.folded(args.query[b].to(dtype))
        h_1, _ = _activate(u @ weight.T + constant, args.activation)
        h_2, _ = _activate(h_1 @ layers.w_2.T + layers.b_2, args.activation)
        out[b] = ((h_2 @ layers.w_3 + layers.b_3) * factors[rows]) @ u
    return ActivationUnitOutputs(out)


def backward(grad_out: Tensor, args: ActivationUnitArguments) -> ActivationUnitGradients:
    """Gradients; hidden layers are computed again."""
    dtype = compute_dtype(args.history)
    layers = _layers(args, dtype)
    factors, of_tables, buckets = _factors(args, dtype)
    grad_query, grad_history = torch.empty_like(args.query), torch.empty_like(args.history)
    grads = _Layers(*(torch.zeros_like(x) for x in layers))
    grad_factors = factors.new_empty(factors.shape)
    for b, rows in enumerate(_samples(args.offsets)):
        u, q, g = (x.to(dtype) for x in (args.history[rows], args.query[b], grad_out[b]))
        weight, constant = layers.folded(q)
        h_1, slope_1 = _activate(u @ weight.T + constant, args.activation)
        h_2, slope_2 = _activate(h_1 @ layers.w_2.T + layers.b_2, args.activation)
        weights, of_weights = h_2 @ layers.w_3 + layers.b_3, u @ g
        grad_factors[rows] = weights * of_weights
        of_weights = of_weights * factors[rows]
        grads.w_3.add_(of_weights @ h_2)
        grads.b_3.add_(of_weights.sum())
        da_2 = torch.outer(of_weights, layers.w_3) * slope_2
        grads.w_2.add_(da_2.T @ h_1)
        grads.b_2.add_(da_2.sum(0))
        da_1 = da_2 @ layers.w_2 * slope_1
        of_weight, of_constant = da_1.T @ u, da_1.sum(0)
        grads.of_row.add_(of_weight)
        grads.of_product.add_(of_weight * q)
        grads.of_query.add_(torch.outer(of_constant, q))
        grads.b_1.add_(of_constant)
        grad_query[b] = (of_weight * layers.of_product).sum(0) + of_constant @ (
            layers.of_query + layers.of_difference
        )
        grad_history[rows] = da_1 @ weight + torch.outer(weights * factors[rows], g)
    grads.of_difference.copy_(grads.of_query - grads.of_row)
    of_layers = torch.cat(grads[:4], 1), *grads[4:7], grads.w_3.unsqueeze(0), grads.b_3
    prior = args.prior_weights
    of_logs = grad_factors * factors
    position_bucket, age_bucket = buckets
    return ActivationUnitGradients(
        grad_query,
        grad_history,
        *(grad.to(x.dtype) for grad, x in zip(of_layers, args.layers, strict=True)),
        position_bias=_of_table(of_logs, position_bucket, args.position_bias),
        age_bias=_of_table(of_logs, age_bucket, args.age_bias),
        prior_weights=None if prior is None else (grad_factors * of_tables).to(prior.dtype),
    )


def _layers(args: ActivationUnitArguments, dtype: torch.dtype) -> _Layers:
    w_1, b_1, w_2, b_2, w_3, b_3 = (x.to(dtype) for x in args.layers)
    return _Layers._make((*w_1.chunk(4, 1), b_1, w_2, b_2, w_3.squeeze(0), b_3))


def _activate(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation of ``x``, and its derivative."""
    if activation == "relu":
        return x.relu(), (x > 0).to(x.dtype)
    of_x = x.sigmoid()
    if activation == "silu":
        return x * of_x, of_x * (1 + x * (1 - of_x))
    return of_x, of_x * (1 - of_x)


def _factors(
    args: ActivationUnitArguments, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """``[N]``: what each row's weight is multiplied by; the same but for prior weights; and the
    buckets of its position and age.
    """
    num_rows = args.history.shape[0]
    logs = args.history.new_zeros(num_rows, dtype=dtype)
    positions = ages = None
    if args.position_bias is not None or args.age_bias is not None:
        last = (args.offsets[1:] - 1)[JaggedLayout(args.offsets, num_rows).sample_ids()]
        if args.position_bias is not None:
            positions = recency_buckets(last - torch.arange(num_rows), len(args.position_bias))
            logs += args.position_bias[:, 0].to(dtype)[positions]
        if args.age_bias is not None and args.timestamps is not None:
            times = args.timestamps
            ages = age_buckets(times[last], times, len(args.age_bias))
            logs += args.age_bias[:, 0].to(dtype)[ages]
    of_tables = logs.exp()
    if args.row_dropout is not None:
        of_tables = of_tables.masked_fill(dropped_rows(args.row_dropout, num_rows), 0)
    prior = args.prior_weights
    factors = of_tables if prior is None else of_tables * prior.to(dtype)
    return factors, of_tables, (positions, ages)


def _of_table(grads: Tensor, buckets: Tensor | None, table: Tensor | None) -> Tensor | None:
    """The gradient of ``table`` of those of the rows in its ``buckets``."""
    if buckets is None or table is None:
        return None
    sums = grads.new_zeros(table.shape, dtype=torch.float64)
    return sums.index_add_(0, buckets, grads.double().unsqueeze(1)).to(table.dtype)


def _samples(offsets: Tensor) -> list[slice]:
    """The rows of each sample."""
    return [slice(*bounds) for bounds in itertools.pairwise(offsets.tolist())]
