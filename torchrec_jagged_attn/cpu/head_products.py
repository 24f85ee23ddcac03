"""The products on the targets' side of target attention, in PyTorch: see the kernels of this name.

For a CPU, and for a dtype that kernels do not compute in. All take and return what those do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "absorb_queries",
    "gradient_of_pooled",
    "gradient_of_targets",
    "parameter_gradients",
    "project",
]


def absorb_queries(
    target: Tensor,
    w_q: Tensor,
    b_q: Tensor | None,
    w_k: Tensor,
    dtype: torch.dtype,
    history_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Queries, and what history rows are compared with."""
    q = F.linear(target.to(dtype), w_q.to(dtype), None if b_q is None else b_q.to(dtype))
    q = q.view(-1, *w_k.shape[:2])
    return q, _multiply(q, w_k.to(dtype)).to(history_dtype)


def project(
    pooled: Tensor,
    stats: Tensor,
    w_v: Tensor,
    b_v: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the pooled rows, and the output."""
    values = _multiply(pooled.to(dtype), w_v.to(dtype).mT).flatten(1)
    filled = values.new_empty(0)
    if b_v is not None:
        filled = (stats.view(2, *pooled.shape[:2])[1] != 0).any(1).to(dtype)
        values.addcmul_(filled.unsqueeze(1), b_v.to(dtype))
    out = F.linear(values, w_out.to(dtype), None if b_out is None else b_out.to(dtype))
    return values, filled, out


def gradient_of_pooled(
    grad_out: Tensor, w_out: Tensor, w_v: Tensor, dtype: torch.dtype, history_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of values and of pooled rows."""
    grad_values = grad_out @ w_out.to(dtype)
    by_head = grad_values.view(-1, *w_v.shape[:2])
    return grad_values, _multiply(by_head, w_v.to(dtype)).to(history_dtype)


def gradient_of_targets(
    grad_u: Tensor, w_k: Tensor, w_q: Tensor, dtype: torch.dtype, target_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of queries and, if it is asked for, of targets."""
    grad_q = _multiply(grad_u.to(dtype), w_k.to(dtype).mT).flatten(1)
    if target_dtype is None:
        return grad_q, None
    return grad_q, (grad_q @ w_q.to(dtype)).to(target_dtype)


def parameter_gradients(
    grad_q: Tensor,
    target: Tensor,
    grad_out: Tensor,
    values: Tensor,
    grad_values: Tensor,
    filled: Tensor | None,
    absorbed: tuple[Tensor, Tensor, Tensor] | None,
    grad_w_q: Tensor,
    grad_w_out: Tensor,
    grad_w_k: Tensor,
    grad_w_v: Tensor,
    grad_b_in: Tensor | None,
    grad_b_out: Tensor | None,
) -> None:
    """Write gradients of weights and biases."""
    dtype = grad_q.dtype
    grad_w_q.copy_(grad_q.T @ target.to(dtype))
    grad_w_out.copy_(grad_out.T @ values)
    if absorbed is not None:
        q, grad_u, pooled = absorbed
        grad_values_by_head = grad_values.view_as(q)
        grad_w_k.copy_(q.permute(1, 2, 0) @ grad_u.to(dtype).transpose(0, 1))
        grad_w_v.copy_(grad_values_by_head.permute(1, 2, 0) @ pooled.to(dtype).transpose(0, 1))
    # Sums, not products with ones: those add one row after the other on a CPU, and round as often.
    if grad_b_in is not None:
        grad_b_q, grad_b_k, grad_b_v = grad_b_in.chunk(3)
        grad_b_q.copy_(grad_q.sum(0))
        grad_b_k.zero_()
        of_filled = grad_values if filled is None else grad_values * filled.unsqueeze(1)
        grad_b_v.copy_(of_filled.sum(0))
    if grad_b_out is not None:
        grad_b_out.copy_(grad_out.sum(0))


def _multiply(x: Tensor, matrices: Tensor) -> Tensor:
    """``[R, H, V]``: each head of ``x`` ``[R, H, W]`` times its own of ``[H, W, V]`` matrices."""
    rows, heads, _ = x.shape
    out = x.new_empty(rows, heads, matrices.shape[2])
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out
