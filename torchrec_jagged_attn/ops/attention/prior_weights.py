"""Prior weights of rows, which the ops take as a bias ``[N]``."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import check_finite
from torchrec_jagged_attn.base.layout import is_behind


def bias_or_prior_weights(
    bias: Tensor | None, prior_weights: Tensor | None, offsets: Tensor
) -> Tensor | None:
    """Return the ops' argument ``bias``: ``bias`` or ``prior_weights``; if both are given, the sum
    ``[N, H]`` of ``bias`` and the logarithms of ``prior_weights``.

    ``offsets`` divide the ``N`` rows into samples.
    """
    if bias is None or prior_weights is None:
        return prior_weights if bias is None else bias
    check_finite(prior_weights, "prior_weights", offsets=offsets)
    dtype = torch.promote_types(bias.dtype, torch.promote_types(prior_weights.dtype, torch.float32))
    removed = is_behind(offsets, prior_weights.shape[0]) | (prior_weights <= 0)
    logs = prior_weights.to(dtype).masked_fill(removed, 1).log().masked_fill(removed, -torch.inf)
    return bias.to(dtype) + logs.unsqueeze(1)


def bias_gradient(grad: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return the gradient of ``bias``. For prior weights, ``grad`` is the gradient of their
    logarithms.
    """
    if grad is None or bias is None or bias.dim() == 2:
        return grad
    if grad.dim() == 2:
        grad = grad.sum(1)
    # Zero for prior weights of zero or less, and for all rows behind the last offset.
    return (grad / bias).masked_fill(grad.eq(0), 0).to(bias.dtype)
