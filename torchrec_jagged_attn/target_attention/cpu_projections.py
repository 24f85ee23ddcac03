"""The products on the targets' side of target attention, in PyTorch: see the kernels of this name.

For a CPU, and for a dtype that kernels do not compute in. All take and return what those do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.layout import is_behind
from torchrec_jagged_attn.target_attention.arguments import ProjectionGradients, ProjectionRows


def absorb_queries(
    target: Tensor,
    w_q: Tensor,
    b_q: Tensor | None,
    w_k: Tensor,
    dtype: torch.dtype,
    u: Tensor,
    listing: None,
) -> Tensor:
    """Queries, and what history rows are compared with."""
    q = F.linear(target.to(dtype), w_q.to(dtype), None if b_q is None else b_q.to(dtype))
    q = q.view(-1, *w_k.shape[:2])
    _multiply(q, w_k.to(dtype), u)
    return q


def project(
    pooled: Tensor,
    stats: Tensor,
    w_v: Tensor,
    b_v: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    dtype: torch.dtype,
    query_offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values of the pooled rows, and the output."""
    values = _multiply(pooled.to(dtype), w_v.to(dtype).mT).flatten(1)
    filled = values.new_empty(0)
    if b_v is not None:
        filled = (stats.view(2, *pooled.shape[:2])[1] != 0).any(1).to(dtype)
        values.addcmul_(filled.unsqueeze(1), b_v.to(dtype))
    out = F.linear(values, w_out.to(dtype), None if b_out is None else b_out.to(dtype))
    if query_offsets is not None:
        clear_rows_behind(out, query_offsets)
    return values, filled, out


def clear_rows_behind(x: Tensor, offsets: Tensor) -> None:
    """Set the rows of ``x`` behind the last offset to zero."""
    x.masked_fill_(is_behind(offsets, x.shape[0]).unsqueeze(1), 0)


def own_columns(pooled: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each head's pooled row, the columns of that head, side by side."""
    rows, heads, width = pooled.shape
    out = pooled.new_empty(rows, heads, width // heads, dtype=dtype)
    return out.copy_(_own_columns(pooled)).flatten(1)


def gradient_of_pooled(
    grad_out: Tensor,
    w_out: Tensor,
    w_v: Tensor,
    dtype: torch.dtype,
    grad_pooled: Tensor,
    listing: None,
) -> Tensor:
    """Gradients of values and of pooled rows."""
    grad_values = grad_out @ w_out.to(dtype)
    by_head = grad_values.view(-1, *w_v.shape[:2])
    _multiply(by_head, w_v.to(dtype), grad_pooled)
    return grad_values


def spread_columns(grad_out: Tensor, grad_pooled: Tensor, listing: None) -> None:
    """The gradient of pooled rows, of :func:`own_columns`."""
    own = _own_columns(grad_pooled.zero_())
    own.copy_(grad_out.reshape(own.shape))


def gradient_of_targets(
    grad_u: Tensor, w_k: Tensor, w_q: Tensor, dtype: torch.dtype, target_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of queries and, if needed, of targets."""
    grad_q = _multiply(grad_u.to(dtype), w_k.to(dtype).mT).flatten(1)
    if target_dtype is None:
        return grad_q, None
    return grad_q, (grad_q @ w_q.to(dtype)).to(target_dtype)


def parameter_gradients(
    rows: ProjectionRows, grads: ProjectionGradients, query_offsets: Tensor | None
) -> None:
    """Write gradients of weights and biases."""
    if query_offsets is not None:
        rows = _without_rows_behind(rows, query_offsets)
    dtype = rows.grad_q.dtype
    of_all = (grads.w_q, rows.grad_q, rows.target), (grads.w_out, rows.grad_out, rows.v)
    for grad, x, y in of_all:
        if grad is not None and x is not None and y is not None:
            grad.copy_(x.T @ y.to(dtype))
    by_head = None if rows.grad_v is None or rows.q is None else rows.grad_v.view_as(rows.q)
    of_heads = (grads.w_k, rows.q, rows.grad_u), (grads.w_v, by_head, rows.pooled)
    for grad, x, y in of_heads:
        if grad is not None and x is not None and y is not None:
            grad.copy_(x.permute(1, 2, 0) @ y.to(dtype).transpose(0, 1))
    # Sums, not products with ones: those add one row after the other on a CPU, and round as often.
    if grads.b_in is not None:
        of_queries, *others = grads.b_in.split(rows.grad_q.shape[1])
        of_queries.copy_(rows.grad_q.sum(0))
        if rows.grad_v is not None and rows.filled is not None:
            of_keys, of_values = others
            of_keys.zero_()
            of_values.copy_((rows.grad_v * rows.filled.unsqueeze(1)).sum(0))
    if grads.b_out is not None and rows.grad_out is not None:
        grads.b_out.copy_(rows.grad_out.sum(0))


def _without_rows_behind(rows: ProjectionRows, query_offsets: Tensor) -> ProjectionRows:
    """``rows`` up to the last offset; where reading it would wait, with zeros behind it."""
    if query_offsets.is_cpu:
        num_rows = int(query_offsets[-1])
        return rows._make(None if x is None else x[:num_rows] for x in rows)
    behind = is_behind(query_offsets, rows.grad_q.shape[0])
    return rows._make(
        x.masked_fill(behind.view(-1, *[1] * (x.dim() - 1)), 0) if x is not None and len(x) else x
        for x in rows
    )


def _own_columns(x: Tensor) -> Tensor:
    """``[R, H, E / H]`` of ``[R, H, E]``, a view: of each head its own columns."""
    rows, heads, width = x.shape
    return x.view(rows, heads, heads, width // heads).diagonal(dim1=1, dim2=2).mT


def _multiply(x: Tensor, matrices: Tensor, into: Tensor | None = None) -> Tensor:
    """``[R, H, V]``: each head of ``x`` ``[R, H, W]`` times its own of ``[H, W, V]`` matrices."""
    rows, heads, _ = x.shape
    out = into if into is not None and into.dtype == x.dtype else None
    if out is None:
        out = x.new_empty(rows, heads, matrices.shape[2])
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out if into is None or out is into else into.copy_(out)
