"""The attention weights of history rows, composed of other ops."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrec_jagged_attn.base.layout import is_behind
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.flash_attention.cpu import bias_of_keys
from torchrec_jagged_attn.ops.interaction.api import jagged_dense_bmm, jagged_softmax


def attention_weights(
    query: Tensor, history: Tensor, offsets: Tensor, biases: Biases, scale: float, score: str
) -> Tensor:
    """Return the weights ``[N, T, H]`` of history rows ``[N, D]`` for queries ``[B, T, H, D]``.

    They are computed in the dtype of ``query`` and ``history``, fp32 or fp64. Rows behind the last
    offset have weights of zero.
    """
    num_rows, shape = history.shape[0], query.shape[1:3]
    # Rows behind the last offset form a further sample, whose weights are set to zero.
    behind = is_behind(offsets, num_rows)
    query = F.pad(query, (0,) * 7 + (1,))
    offsets = torch.cat([offsets, offsets.new_full([1], num_rows)])
    if biases.request_time is not None:
        biases = biases._replace(request_time=F.pad(biases.request_time, (0, 1)))
    scores = jagged_dense_bmm(history, query.flatten(1, 2).mT, offsets) * scale
    scores = scores.view(num_rows, *shape)
    bias_HN, _ = bias_of_keys(query.dtype, shape[1], offsets, num_rows, biases)
    if bias_HN is not None:
        scores = scores + bias_HN.T.unsqueeze(1)
    if score == "softmax":
        weights = jagged_softmax(scores.flatten(1), offsets).view(scores.shape)
    else:
        weights = F.silu(scores) if score == "silu" else torch.sigmoid(scores)
    return weights.masked_fill(behind.view(-1, 1, 1), 0)
