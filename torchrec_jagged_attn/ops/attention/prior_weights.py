"""The gradient of prior weights of rows."""

from __future__ import annotations

from torch import Tensor


def prior_weights_gradient(grad: Tensor, prior_weights: Tensor) -> Tensor:
    """Return the gradient of ``prior_weights`` ``[N]``, from the gradient of their logarithms
    ``[N]``, or by head ``[N, H]``.
    """
    if grad.dim() == 2:
        grad = grad.sum(1)
    # Zero for prior weights of zero or less, and for all rows behind the last offset.
    return (grad / prior_weights).masked_fill(grad.eq(0), 0).to(prior_weights.dtype)
