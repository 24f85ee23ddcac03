"""Weights of rows in target attention, composed of other ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrec_jagged_attn.attention.arguments import Biases
from torchrec_jagged_attn.flash_attention.cpu import bias_of_keys
from torchrec_jagged_attn.interaction.api import jagged_dense_bmm, jagged_softmax


def attention_weights(
    query: Tensor, history: Tensor, offsets: Tensor, biases: Biases, scale: float, score: str
) -> Tensor:
    """Return the weights ``[N, T, H]`` that queries ``[B, T, H, D]`` give the rows ``[N, D]``.

    All are computed in the dtype of ``query`` and ``history``, which is fp32 or fp64.
    """
    num_rows, shape = history.shape[0], query.shape[1:3]
    scores = jagged_dense_bmm(history, query.flatten(1, 2).mT, offsets) * scale
    scores = scores.view(num_rows, *shape)
    bias_HN, _ = bias_of_keys(query.dtype, shape[1], offsets, num_rows, biases)
    if bias_HN is not None:
        scores = scores + bias_HN.T.unsqueeze(1)
    if score == "softmax":
        return jagged_softmax(scores.flatten(1), offsets).view(scores.shape)
    return F.silu(scores) if score == "silu" else torch.sigmoid(scores)
