"""Each op in plain PyTorch, on jagged tensors and without padding: what runs on CPU.

Sums and softmax statistics are taken in fp32 (fp64 for fp64 inputs), as in the kernels. The
gradients are PyTorch's own, of these same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout

__all__ = [
    "flash_attention",
    "flash_attention_backward",
    "target_attention",
    "target_attention_backward",
]

LOG2E = math.log2(math.e)


def target_attention(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[B, T, H, D]``, ``[1, T, H, D]`` or ``[ΣT, H, D]`` queries over ``[N, D]`` rows.

    Returns the output, shaped as one query row per sample and target, and the softmax
    statistics of those rows, ``[2, …]``.

    Takes ``Σ T_b · L_b · H · D`` elements of memory: every pair of a query and a history row is
    made, none is padded.
    """
    history_layout = JaggedLayout(offsets, history.shape[0])
    num_samples = history_layout.batch_size
    if query_offsets is None:
        num_targets, num_heads, width = query.shape[1:]
        query = query.expand(num_samples, -1, -1, -1).reshape(-1, num_heads, width)
        steps = torch.arange(num_samples + 1, device=offsets.device)
        query_layout = JaggedLayout(steps * num_targets, query.shape[0])
        out_shape = (num_samples, num_targets, num_heads, width)
    else:
        query_layout = JaggedLayout(query_offsets, query.shape[0])
        out_shape = tuple(query.shape)

    # One pair for each history row that each query row sees, ordered by query row.
    pairs_per_query = history_layout.lengths[query_layout.sample_ids()]
    pairs = JaggedLayout.from_lengths(pairs_per_query)
    of_query = pairs.sample_ids()
    within = torch.arange(pairs.num_rows, device=offsets.device) - pairs.offsets[of_query]
    of_row = offsets[query_layout.sample_ids()][of_query] + within

    compute = torch.promote_types(query.dtype, torch.float32)
    rows = history.to(compute).index_select(0, of_row).unsqueeze(1)  # [P, 1, D]
    scores = (query.to(compute).index_select(0, of_query) * rows).sum(-1) * scale  # [P, H]
    if bias is not None:
        scores = scores + bias.to(compute).index_select(0, of_row)

    def reduce(values: Tensor, how: str, empty: float) -> Tensor:
        return torch.segment_reduce(
            values, how, offsets=pairs.offsets.long(), axis=0, unsafe=True, initial=empty
        )

    largest = reduce(scores.detach(), "max", -torch.inf)  # [ΣT, H]
    weights = torch.exp(scores - _finite(largest)[of_query])
    total = reduce(weights, "sum", 0.0)
    out = reduce(weights.unsqueeze(-1) * rows, "sum", 0.0)
    out = out / torch.where(total > 0, total, 1).unsqueeze(-1)
    return out.to(query.dtype).view(out_shape), _stats(largest, total).view(2, *out_shape[:-1])


def target_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``query``, ``history`` and ``bias``."""

    def out(query: Tensor, history: Tensor, bias: Tensor | None = None) -> Tensor:
        return target_attention(query, history, offsets, query_offsets, bias, scale)[0]

    if bias is None:
        return *_vjp(out, grad_out, query, history), None
    return _vjp(out, grad_out, query, history, bias)


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

    Returns the output ``[ΣLq, H, Dv]`` and the softmax statistics ``[2, ΣLq, H]``.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    outs = [q.new_zeros(0, q.shape[1], v.shape[2])]
    stats = [q.new_zeros(2, 0, q.shape[1], dtype=torch.float32)]
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
        weights = torch.exp(scores - _finite(lse).unsqueeze(-1))
        outs.append((weights @ v_HLD).transpose(0, 1).to(q.dtype))
        stats.append(_stats(lse, (lse > -torch.inf).to(compute)).transpose(1, 2))
    return torch.cat(outs), torch.cat(stats, 1)


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

    return _vjp(out, grad_out, q, k, v)


def _vjp(function: Callable[..., Tensor], grad_out: Tensor, *inputs: Tensor) -> tuple:
    """Gradients of all ``inputs``; unlike ``torch.autograd.grad``, it works inside a custom op."""
    return torch.func.vjp(function, *inputs)[1](grad_out)


def _finite(largest: Tensor) -> Tensor:
    """``largest`` of each row, and 0 for a row that sees nothing."""
    return torch.where(largest > -torch.inf, largest, 0)


def _stats(largest: Tensor, total: Tensor) -> Tensor:
    """What the kernels keep of each row: weights are ``exp2(score - stats[0]) · stats[1]``."""
    inverse = torch.where(total > 0, 1 / torch.where(total > 0, total, 1), 0)
    return torch.stack([_finite(largest) * LOG2E, inverse]).float()
