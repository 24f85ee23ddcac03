"""``jagged_target_attention_weights``: what each query row of target attention gives each row."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchrec_jagged_attn.arguments import Biases, TargetArguments
from torchrec_jagged_attn.cpu import target_attention as cpu
from torchrec_jagged_attn.devices import implementation_of
from torchrec_jagged_attn.kernels.target import attention as kernels
from torchrec_jagged_attn.ops.prior_weights import bias_or_prior_weights
from torchrec_jagged_attn.ops.registration import register_op_without_grad
from torchrec_jagged_attn.ops.target_attention import check_arguments, check_values

__all__ = ["jagged_target_attention_weights", "target_attention_weights"]


@torch.no_grad()
def jagged_target_attention_weights(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    age_bias: Tensor | None = None,
    timestamps: Tensor | None = None,
    prior_weights: Tensor | None = None,
    scale: float | None = None,
    score: Literal["softmax", "silu", "sigmoid"] = "softmax",
) -> Tensor:
    r"""Weights by which :func:`jagged_target_attention` sums up the rows of a history.

    For query row :math:`q` of head :math:`h`, over the rows :math:`x_n` of its sample,

    .. math:: p = \mathrm{softmax}_n(scale \cdot q \cdot x_n + bias_{nh} + P_{\beta(position_n), h}
              + A_{\beta(age_n), h} + \log w_n)

    They are for looking at, and have no gradient. Nothing is dropped. The history is read twice for
    each block of query rows.

    Args:
        query: ``[B, H, D]``; ``[B, T, H, D]`` for ``T`` targets per sample; or ``[1, T, H, D]`` for
            queries shared by all samples. fp32, bf16 or fp16 (on CPU also fp64), ``D`` in 1…512.
        history: ``[N, D]`` rows of all samples, one sample after the other; dtype of ``query``.
        offsets: ``[B + 1]`` int32 or int64: sample ``b`` owns history rows ``offsets[b]`` to
            ``offsets[b + 1] - 1``.
        bias: see :func:`jagged_target_attention`, as for all that follow.
        position_bias: see there.
        age_bias: see there.
        timestamps: see there.
        prior_weights: see there.
        scale: see there.
        score: see there.

    Returns:
        ``[N, H]`` for ``query`` ``[B, H, D]``, else ``[N, T, H]``, in the dtype of ``query``: what
        the query rows of a row's own sample give it.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the
            values of offsets or prior weights do not fit.
        NotImplementedError: ``D`` is over 512, or the device is neither CPU nor CUDA.

    Example:
        >>> query = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # B=2, H=1, D=2
        >>> history = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 6.0]])
        >>> jagged_target_attention_weights(query, history, torch.tensor([0, 2, 3]), scale=0.0)
        tensor([[0.5000],
                [0.5000],
                [1.0000]])
    """
    biases = Biases(bias, position_bias, age_bias, timestamps)
    per_sample = check_arguments(query, history, offsets, biases, prior_weights, score)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    weights = target_attention_weights(
        query.unsqueeze(1) if per_sample else query, history, offsets,
        bias_or_prior_weights(bias, prior_weights), position_bias, age_bias, timestamps, scale,
        score,
    )  # fmt: skip
    return weights.squeeze(1) if per_sample else weights


def _forward(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    scale: float,
    score: str,
) -> Tensor:
    """Weights ``[N, T, H]``; see :class:`TargetArguments`."""
    args = TargetArguments(
        query, history, offsets, query_offsets=None, indices=None,
        bias=bias, position_bias=position_bias, age_bias=age_bias, timestamps=timestamps,
        request_time=None, row_dropout=None, dropout=None, scale=scale, score=score, num_levels=0,
        for_backward=False,
    )  # fmt: skip
    check_values(args)
    return implementation_of(query, cpu, kernels).weights(args)


def _fake(query: Tensor, history: Tensor, *_: object) -> Tensor:
    return query.new_empty(history.shape[0], *query.shape[1:3])


target_attention_weights = register_op_without_grad(
    "target_attention_weights", forward=_forward, fake=_fake
)
