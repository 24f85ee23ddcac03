"""Each op in plain PyTorch, on jagged tensors and without padding: what runs on CPU.

One sample after the other. Sums and the softmax are taken in fp32 (fp64 for fp64 inputs), as in the
kernels. In names, ``L`` are a sample's history rows and ``R`` its query rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout

__all__ = [
    "flash_attention",
    "flash_attention_backward",
    "target_attention",
    "target_attention_backward",
]

# Fractional bits of the least fp32 numbers at or above 2^(1/4), 2^(2/4) and 2^(3/4).
QUARTER_OCTAVES = (0x1837F1, 0x3504F4, 0x5744FD)


@torch.autocast("cpu", enabled=False)
def target_attention(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[B, T, H, D]``, ``[1, T, H, D]`` or ``[ΣT, H, D]`` queries over ``[N, D]`` rows.

    Returns the output, shaped as one query row per sample and target, and zeros for the statistics
    that the kernels keep: the gradient needs none here.
    """
    num_samples = offsets.numel() - 1
    shape = query.shape if query_offsets is not None else (num_samples, *query.shape[1:])
    out = query.new_zeros(shape)
    outs = _query_rows(out, query_offsets, num_samples)
    bias = _add_biases(offsets, history, bias, position_bias, age_bias, timestamps)
    for (q_RD, x_LD, bias_LR, _), out_RD in zip(
        _samples(query, history, offsets, query_offsets, bias), outs, strict=True
    ):
        out_RD.copy_(_weights(q_RD, x_LD, bias_LR, scale).T @ x_LD)
    return out, query.new_zeros(2, *shape[:-1], dtype=torch.float32)


@torch.autocast("cpu", enabled=False)
def target_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``query``, ``history``, ``bias``, ``position_bias`` and ``age_bias``."""
    num_samples, num_heads = offsets.numel() - 1, query.shape[-2]
    shared = query_offsets is None and query.shape[0] == 1 != num_samples
    compute = torch.promote_types(query.dtype, torch.float32)
    grad_query = torch.zeros(grad_out.shape, dtype=compute if shared else query.dtype)
    grad_history = history.new_zeros(history.shape)
    scores_bias = _add_biases(offsets, history, bias, position_bias, age_bias, timestamps)
    grad_bias = None if scores_bias is None else torch.zeros_like(scores_bias)
    for (q_RD, x_LD, bias_LR, rows), grad_out_RD, grad_q_RD in zip(
        _samples(query, history, offsets, query_offsets, scores_bias),
        _query_rows(grad_out.to(compute), query_offsets, num_samples),
        _query_rows(grad_query, query_offsets, num_samples),
        strict=True,
    ):
        p_LR = _weights(q_RD, x_LD, bias_LR, scale)
        dp_LR = x_LD @ grad_out_RD.T
        ds_LR = p_LR * (dp_LR - (p_LR * dp_LR).sum(0))
        grad_q_RD.copy_(ds_LR.T @ x_LD * scale)
        grad_history[rows] = torch.addmm(p_LR @ grad_out_RD, ds_LR, q_RD, alpha=scale)
        if grad_bias is not None:
            grad_bias[rows] = ds_LR.unflatten(1, (-1, num_heads)).sum(1)
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(query.dtype)
    grad_tables = []
    for table, distance in (
        (position_bias, _positions(offsets, history)),
        (age_bias, _ages(offsets, timestamps)),
    ):
        grad = None
        if table is not None:
            grad = grad_bias.new_zeros(table.shape)
            grad = grad.index_add_(0, recency_buckets(distance, len(table)), grad_bias).to(
                table.dtype
            )
        grad_tables.append(grad)
    return (
        grad_query,
        grad_history,
        None if bias is None else grad_bias.to(bias.dtype),
        *grad_tables,
    )


def recency_buckets(distance: Tensor, num_buckets: int) -> Tensor:
    """``⌊4 log2(1 + distance)⌋``, of ``1 + distance`` rounded to fp32, at most the last bucket.

    Read from the bits of the number, so that it is the same on every device.
    """
    bits = (distance + 1).float().view(torch.int32)
    fraction = bits & 0x7FFFFF
    quarters = sum((fraction >= start).int() for start in QUARTER_OCTAVES)
    return (((bits >> 23) - 127) * 4 + quarters).clamp(0, num_buckets - 1).long()


def _positions(offsets: Tensor, history: Tensor) -> Tensor:
    return JaggedLayout(offsets, history.shape[0]).positions_from_end()


def _ages(offsets: Tensor, timestamps: Tensor | None) -> Tensor | None:
    if timestamps is None:
        return None
    rows = torch.arange(len(timestamps))
    newest = rows + _positions(offsets, timestamps)
    timestamps = timestamps.long() if timestamps.dtype == torch.int32 else timestamps
    return (timestamps[newest] - timestamps).clamp(min=0)


def _add_biases(
    offsets: Tensor,
    history: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
) -> Tensor | None:
    """``[N, H]`` sum of all biases, in fp32 or fp64."""
    compute = torch.promote_types(history.dtype, torch.float32)
    parts = [] if bias is None else [bias.to(compute)]
    for table, distance in (
        (position_bias, _positions(offsets, history)),
        (age_bias, _ages(offsets, timestamps)),
    ):
        if table is not None:
            parts.append(table.to(compute)[recency_buckets(distance, len(table))])
    return sum(parts) if parts else None


def _samples(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, slice]]:
    """Query rows, history rows, bias of each pair of them, and the slice of rows, by sample.

    A sample's query rows are its targets' heads, one target after the other: ``R = T · H``.
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    bounds = offsets.tolist()
    history = history.to(compute)
    queries = _query_rows(query.to(compute), query_offsets, len(bounds) - 1)
    for q_RD, begin, end in zip(queries, bounds[:-1], bounds[1:], strict=True):
        bias_LR = None
        if bias is not None:
            bias_LR = bias[begin:end].to(compute).repeat(1, q_RD.shape[0] // query.shape[-2])
        yield q_RD, history[begin:end], bias_LR, slice(begin, end)


def _query_rows(x: Tensor, query_offsets: Tensor | None, num_samples: int) -> tuple[Tensor, ...]:
    """``[R, D]`` of each sample, views of ``x`` shaped as queries."""
    if query_offsets is not None:
        return tuple(part.flatten(0, 1) for part in x.split(query_offsets.diff().tolist()))
    return x.flatten(1, 2).expand(num_samples, -1, -1).unbind()


def _weights(q_RD: Tensor, x_LD: Tensor, bias_LR: Tensor | None, scale: float) -> Tensor:
    """``[L, R]`` softmax over a sample's history rows; zero where no row is visible."""
    if bias_LR is None:
        return torch.softmax(x_LD @ q_RD.T * scale, 0)
    scores_LR = torch.addmm(bias_LR, x_LD, q_RD.T, alpha=scale)
    hidden = (scores_LR == -torch.inf).all(0)
    return torch.softmax(scores_LR, 0).masked_fill(hidden, 0)


@torch.autocast("cpu", enabled=False)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[ΣLq, H, D]`` over ``[ΣLk, Hk, D]`` and ``[ΣLk, Hk, Dv]``, one sample after the other.

    Returns the output ``[ΣLq, H, Dv]``, and zeros for the statistics that the kernels keep.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    outs = [q.new_zeros(0, q.shape[1], v.shape[2])]
    q_bounds, kv_bounds = q_offsets.tolist(), kv_offsets.tolist()
    for b in range(len(q_bounds) - 1):
        rows, keys = slice(*q_bounds[b : b + 2]), slice(*kv_bounds[b : b + 2])
        q_HLD = q[rows].to(compute).transpose(0, 1)
        k_HLD = k[keys].to(compute).repeat_interleave(group, 1).transpose(0, 1)
        v_HLD = v[keys].to(compute).repeat_interleave(group, 1).transpose(0, 1)
        scores = q_HLD @ k_HLD.mT * scale  # [H, Lq, Lk]
        if causal:
            num_rows, num_keys = scores.shape[1:]
            visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(~visible.tril(num_keys - num_rows), -torch.inf)
        lse = torch.logsumexp(scores, -1)  # [H, Lq]
        weights = torch.exp(scores - torch.where(lse > -torch.inf, lse, 0).unsqueeze(-1))
        outs.append((weights @ v_HLD).transpose(0, 1).to(q.dtype))
    return torch.cat(outs), q.new_zeros(2, *q.shape[:2], dtype=torch.float32)


@torch.autocast("cpu", enabled=False)
def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``."""

    def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, q_offsets, kv_offsets, causal, scale)[0]

    # Unlike torch.autograd.grad, this works inside a custom op.
    return torch.func.vjp(out, q, k, v)[1](grad_out)
