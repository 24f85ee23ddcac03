"""Records of what the ops take."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from torchrec_jagged_attn.checks import (
    check_prior_weights_values,
)

__all__ = ["are_prior_weights", "bias_gradient", "bias_or_prior_weights"]


def bias_or_prior_weights(bias: Tensor | None, prior_weights: Tensor | None) -> Tensor | None:
    """What the ops take for ``bias``: ``[N]`` prior weights, too; both as one bias ``[N, H]``."""
    if bias is None or prior_weights is None:
        return prior_weights if bias is None else bias
    check_prior_weights_values(prior_weights)
    dtype = torch.promote_types(bias.dtype, torch.promote_types(prior_weights.dtype, torch.float32))
    removed = prior_weights == 0
    logs = prior_weights.to(dtype).masked_fill(removed, 1).log().masked_fill(removed, -torch.inf)
    return bias.to(dtype) + logs.unsqueeze(1)


def are_prior_weights(bias: Tensor | None) -> TypeGuard[Tensor]:
    return bias is not None and bias.dim() == 1


def bias_gradient(grad: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """That of the ``bias``; of prior weights made of that of their logarithms, by head or not."""
    if grad is None or not are_prior_weights(bias):
        return grad
    if grad.dim() == 2:
        grad = grad.sum(1)
    return (grad / bias).masked_fill(bias == 0, 0).to(bias.dtype)
