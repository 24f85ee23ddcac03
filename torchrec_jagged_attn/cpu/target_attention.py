"""Target attention on a CPU: attention whose keys and values are the raw history rows."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.arguments import (
    FlashArguments,
    TargetArguments,
    TargetGradients,
    TargetOutputs,
)
from torchrec_jagged_attn.cpu import attention
from torchrec_jagged_attn.cpu.digits import rows_of_digits

__all__ = ["backward", "forward", "weights"]


def forward(args: TargetArguments) -> TargetOutputs:
    """Attend.

    The residual is zeros: the gradient does not need it here.
    """
    args = _with_digits(args)
    query = args.query
    if args.query_offsets is None:
        query = query.expand(args.offsets.numel() - 1, -1, -1, -1)
    out, stats = attention.forward(_over_history(args, query), args.score, args.indices)
    out = out.view(query.shape)
    is_rounded = args.for_backward and out.element_size() == 2
    residual = out.new_zeros(out.shape if is_rounded else [0])
    return TargetOutputs(out, residual, stats.view(2, *out.shape[:-1]))


def backward(
    grad_out: Tensor,
    args: TargetArguments,
    outputs: TargetOutputs,
    needs_bias: bool,
    needs_history: bool,
) -> TargetGradients:
    """Gradients; that of prior weights is of their logarithms, ``[N, H]``.

    Those of the bias and of the history are made whether they are asked for or not; that of a
    history packed in digits is left out.
    """
    args = _with_digits(args)
    # In the dtype that is computed in, and its gradient, too: samples that share it add up theirs.
    query = args.query.to(attention.compute_dtype(args.query))
    if args.query_offsets is None:
        query = query.expand(args.offsets.numel() - 1, -1, -1, -1)
    history = args.history
    grad_history = history.new_empty(history.shape)
    if args.indices is not None:
        grad_history = history.new_zeros(history.shape, dtype=attention.compute_dtype(history))
    grads = attention.backward(
        grad_out.flatten(0, -3), _over_history(args, query), None, grad_history.unsqueeze(1), None,
        score=args.score, indices=args.indices,
    )  # fmt: skip
    grad_query = grads.q.view(query.shape)
    if query.shape != args.query.shape:  # one that all samples share
        grad_query = grad_query.sum(0, keepdim=True)
    return TargetGradients(
        query=grad_query.to(args.query.dtype),
        history=None if args.num_levels else grad_history.to(history.dtype),
        bias=grads.bias,
        position_bias=grads.position_bias,
        age_bias=grads.age_bias,
    )


def weights(args: TargetArguments) -> Tensor:
    """``[N, T, H]``: what the targets of each row's sample give it; queries are not jagged."""
    query = args.query.expand(args.offsets.numel() - 1, -1, -1, -1)
    return attention.weights(_over_history(args, query), query.shape[1], args.score)


def _with_digits(args: TargetArguments) -> TargetArguments:
    """With the rows that a history is packed in, if it is."""
    if not args.num_levels:
        return args
    query = args.query
    rows = rows_of_digits(args.history, query.shape[-1], args.num_levels, query.dtype)
    return args._replace(history=rows)


def _over_history(args: TargetArguments, query: Tensor) -> FlashArguments:
    """Attention of the rows of ``query``, as each sample has it, over the history."""
    q_offsets = args.query_offsets
    if q_offsets is None:
        q_offsets = torch.arange(args.offsets.numel()) * query.shape[1]
    rows = args.history.unsqueeze(1)
    return FlashArguments(
        query.flatten(0, -3), rows, rows, q_offsets, args.offsets, *args.biases,
        causal=False, window=0, scale=args.scale, needs_stats=True,
    )  # fmt: skip
