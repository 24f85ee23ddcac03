"""Target attention on a CPU: attention whose keys and values are the raw history rows."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.codes.api import rows_of_codes
from torchrec_jagged_attn.ops.flash_attention import cpu as attention
from torchrec_jagged_attn.ops.flash_attention.arguments import FlashArguments
from torchrec_jagged_attn.ops.target_attention.arguments import (
    TargetArguments,
    TargetGradients,
    TargetOutputs,
)


def forward(args: TargetArguments) -> TargetOutputs:
    """Attend. The residual is zero: backward does not read it on a CPU."""
    query = args.query
    if args.query_offsets is None:
        query = query.expand(args.offsets.numel() - 1, -1, -1, -1)
    rows = _rows_of(args)
    out, stats = attention.attend(_over_rows(args, query, rows), _options(args))
    out = out.view(query.shape)
    is_rounded = args.for_backward and out.element_size() == 2
    residual = out.new_zeros(out.shape if is_rounded else [0])
    return TargetOutputs(out, residual, stats.view(2, *out.shape[:-1]))


def backward(
    grad_out: Tensor,
    args: TargetArguments,
    outputs: TargetOutputs,
    needs_prior_weights: bool,
    needs_history: bool,
    grad_lse: Tensor | None = None,
) -> TargetGradients:
    """Return the gradients, of prior weights the gradients of their logarithms, ``[N, H]``.

    All of them are computed, but the gradient of packed codes.
    """
    if grad_lse is not None:
        grad_lse = grad_lse.masked_fill(outputs.stats[1] == 0, 0).flatten(0, -2)
    # In the dtype of computation, so that the gradient of a shared query is summed in it.
    query = args.query.to(attention.compute_dtype(args.query))
    if args.query_offsets is None:
        query = query.expand(args.offsets.numel() - 1, -1, -1, -1)
    rows, indices = _rows_of(args), args.indices
    grad_rows = rows.new_empty(rows.shape)
    if indices is not None:
        grad_rows = rows.new_zeros(rows.shape, dtype=attention.compute_dtype(rows))
    grads = attention.backward(
        grad_out.flatten(0, -3), _over_rows(args, query, rows), None, grad_rows.unsqueeze(1), None,
        options=_options(args)._replace(grad_lse=grad_lse),
    )  # fmt: skip
    grad_query = grads.q.view(query.shape)
    if query.shape != args.query.shape:  # shared by all samples
        grad_query = grad_query.sum(0, keepdim=True)
    return TargetGradients(
        query=grad_query.to(args.query.dtype),
        history=grad_rows.to(rows.dtype) if rows is args.history else None,
        prior_weights=grads.bias,
        position_bias=grads.position_bias,
        age_bias=grads.age_bias,
    )


def _options(args: TargetArguments) -> attention.TargetOptions:
    return attention.TargetOptions(args.score, args.indices, args.row_numbers, args.row_number_ends)


def _rows_of(args: TargetArguments) -> Tensor:
    """Return the rows of the history, unpacked if they are packed codes."""
    if not args.num_levels:
        return args.history
    return rows_of_codes(args.history, args.query.shape[-1], args.num_levels, args.query.dtype)


def _over_rows(args: TargetArguments, query: Tensor, rows: Tensor) -> FlashArguments:
    """Return the arguments of attention from ``query``, expanded over samples, to ``rows``."""
    q_offsets = args.query_offsets
    if q_offsets is None:
        q_offsets = torch.arange(args.offsets.numel(), device="cpu") * query.shape[1]
    rows = rows.unsqueeze(1)
    return FlashArguments(
        query.flatten(0, -3), rows, rows, q_offsets, args.offsets, args.biases,
        bias=None, relative_bias=None, causal=False, window=0, scale=args.scale, needs_stats=True,
    )  # fmt: skip
