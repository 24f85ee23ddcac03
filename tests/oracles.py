"""Oracles, which are called on fp64 tensors."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScoreBiases(NamedTuple):
    """Biases of the scores of ``N`` rows, keyword arguments of oracles and ops.

    Attributes:
        bias: ``[N, H]``.
        position_bias: ``[P, H]``, by the bucket of a row's position from the end of its sample.
        age_bias: ``[A, H]``, by the bucket of a row's age.
        timestamps: ``[N]``, times of the events.
        request_time: ``[B]``, which ages are counted from; by default the newest row's time.
        prior_weights: ``[N]``, whose logarithms are added.
    """

    bias: Tensor | None = None
    position_bias: Tensor | None = None
    age_bias: Tensor | None = None
    timestamps: Tensor | None = None
    request_time: Tensor | None = None
    prior_weights: Tensor | None = None


def weight_factors(dropout: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """``[R, N]`` fp64: factors of the weights of query rows ``r`` and history rows ``n``.

    Query rows are rows times heads, in this order. ``dropout`` is ``[2]`` int64, as of
    ``draw_dropout``. int64 products wrap; masks make shifts unsigned.
    """
    seed, threshold = dropout.unbind()
    x = seed + (r + 1) * -7046029254386353131  # SplitMix64
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = ((x ^ ((x >> 31) & 0x1FFFFFFFF)) >> 32) & 0xFFFFFFFF
    x = x.unsqueeze(1) ^ (n * 0x9E3779B1 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.where(x < threshold, 0.0, 2**32 / (2**32 - threshold).double())


def target_attention_oracle(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor | None = None,
    *,
    scale: float | None = None,
    score: str = "softmax",
    weight_factors: Tensor | None = None,
    return_lse: bool = False,
    **biases: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``jagged_target_attention``: flash attention with a query for each target, whose heads share
    the rows of the history; give it fp64 tensors.

    ``weight_factors``, ``[B · T, H, N]`` or ``[ΣT, H, N]``, are factors of weights.
    ``return_lse`` asks for the logarithms of the softmax's sums, too.
    """
    shape, added = query.shape, ScoreBiases(**biases)
    if query_offsets is None:
        shape = (offsets.numel() - 1, *query.shape[1:])
        num_targets = 1 if query.dim() == 3 else query.shape[1]
        query = query.expand(shape).reshape(-1, *query.shape[-2:])
        query_offsets = torch.arange(shape[0] + 1, device=query.device) * num_targets
    if score != "softmax":
        bias = recency_bias_oracle(offsets, added)
        out = _own_scores_oracle(
            query, history, offsets, query_offsets, bias, scale, score, weight_factors
        )
        return out.view(shape)
    rows = history.unsqueeze(1)
    found = flash_attention_oracle(
        query, rows, rows, query_offsets, offsets, scale=scale, weight_factors=weight_factors,
        return_lse=return_lse, **added._asdict(),
    )  # fmt: skip
    return (found[0].view(shape), found[1].view(shape[:-1])) if return_lse else found.view(shape)


def _own_scores_oracle(
    query: Tensor,
    history: Tensor,
    offsets: Tensor,
    query_offsets: Tensor,
    bias: Tensor | None,
    scale: float | None,
    score: str,
    weight_factors: Tensor | None,
) -> Tensor:
    """Target attention with silu or sigmoid in place of softmax, for each sample."""
    weigh = {"silu": F.silu, "sigmoid": torch.sigmoid}[score]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    lengths = offsets.diff().tolist()
    outs = [query.new_zeros(0, *query.shape[1:])]
    for (q_begin, q_end), (begin, end), q, x, bias_NH in zip(
        itertools.pairwise(query_offsets.tolist()),
        itertools.pairwise(offsets.tolist()),
        query.split(query_offsets.diff().tolist()),
        history.split(lengths),
        [None] * len(lengths) if bias is None else bias.split(lengths),
        strict=True,
    ):
        scores = torch.einsum("thd,nd->thn", q, x) * factor
        seen = torch.ones_like(scores, dtype=torch.bool)
        if bias_NH is not None:
            scores = scores + bias_NH.T
            seen = (bias_NH > -torch.inf).T.expand_as(scores)
        weights = torch.where(seen, weigh(scores.masked_fill(~seen, 0)), 0)
        if weight_factors is not None:
            weights = weights * weight_factors[q_begin:q_end, :, begin:end]
        outs.append(torch.einsum("thn,nd->thd", weights, x))
    return torch.cat(outs)


def recency_bias_oracle(offsets: Tensor, biases: ScoreBiases) -> Tensor | None:
    """``[N, H]``: ``bias`` and the scores by position and age, by integer arithmetic."""
    bias, position_bias, age_bias, timestamps, request_time, _ = biases
    positions, ages = [], []
    times = None if timestamps is None else timestamps.tolist()
    requests = None if request_time is None else request_time.tolist()
    bounds = offsets.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        positions += range(end - begin - 1, -1, -1)
        if times is not None and end > begin:
            reference = times[end - 1] if requests is None else requests[b]
            ages += [max(reference - time, 0) for time in times[begin:end]]
    for table, distances in ((position_bias, positions), (age_bias, ages)):
        if table is not None:
            buckets = [_recency_bucket(distance) for distance in distances]
            index = torch.tensor(buckets, dtype=torch.int64, device=table.device)
            scores = table[index.clamp(max=len(table) - 1)]
            bias = scores if bias is None else bias + scores
    return bias


@functools.lru_cache(2**16)
def _recency_bucket(distance: float) -> int:
    """``min(⌊4 log2(1 + distance)⌋, 96 + ⌊log2(1 + distance)⌋)``, of ``1 + distance`` rounded to
    fp32.
    """
    x = Fraction(distance) + 1
    ulp = Fraction(2) ** (math.floor(x).bit_length() - 24)
    x = round(x / ulp) * ulp  # half to even
    return min(math.floor(x**4).bit_length() - 1, 95 + math.floor(x).bit_length())


def flash_attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    relative_bias: Tensor | None = None,
    weight_factors: Tensor | None = None,
    return_lse: bool = False,
    **biases: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``jagged_flash_attention`` by PyTorch's SDPA on each sample; give it fp64 tensors.

    ``weight_factors``, ``[ΣLq, H, ΣLk]``, are factors of the weights of the softmax.
    """
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    bias, left = _bias_of_rows(kv_offsets, ScoreBiases(**biases), q.dtype)
    if bias is not None and left is not None:
        bias = bias.masked_fill(~left.unsqueeze(1), -torch.inf)
    q_lengths, kv_lengths = q_offsets.diff().tolist(), kv_offsets.diff().tolist()
    added = [None] * len(q_lengths) if bias is None else bias.to(q.dtype).split(kv_lengths)
    factors = [None] * len(q_lengths)
    if weight_factors is not None:
        by_sample = enumerate(weight_factors.split(q_lengths))
        factors = [x.split(kv_lengths, 2)[b] for b, x in by_sample]
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(0, q.shape[1])]
    for q_LHD, k_LHD, v_LHD, bias_LH, factors_LHS in zip(
        q.split(q_lengths), k.split(kv_lengths), v.split(kv_lengths), added, factors, strict=True
    ):
        num_rows, num_keys = q_LHD.shape[0], k_LHD.shape[0]
        if num_rows == 0 or num_keys == 0:
            outs.append(q_LHD.new_zeros(num_rows, q_LHD.shape[1], v.shape[2]))
            lses.append(torch.full_like(q_LHD[..., 0], -torch.inf))
            continue
        # Heads of the same keys are rows more: [Hkv, group · Lq, D], so that no key is copied.
        q_HRD, k_HLD, v_HLD = (
            x.transpose(0, 1).reshape(k.shape[1], -1, x.shape[2]) for x in (q_LHD, k_LHD, v_LHD)
        )
        mask = unseeing = None
        if bias_LH is not None or relative_bias is not None or causal:
            mask = q.new_zeros(q.shape[1], num_rows, num_keys)
            if relative_bias is not None:
                mask = mask + _scores_by_distance(relative_bias, num_rows, num_keys)
            if bias_LH is not None:
                mask = mask + bias_LH.T.unsqueeze(1)
            if causal:
                visible = torch.ones(num_rows, num_keys, device=q.device).tril(num_keys - num_rows)
                if window is not None:
                    visible = visible.triu(num_keys - num_rows - window + 1)
                mask = mask.masked_fill(visible == 0, -torch.inf)
            mask = mask.reshape(k.shape[1], -1, num_keys)
            unseeing = (mask == -torch.inf).all(2, keepdim=True)
            mask = mask.masked_fill(unseeing, 0)
        if factors_LHS is None:
            out = F.scaled_dot_product_attention(q_HRD, k_HLD, v_HLD, mask, scale=scale)
        else:
            factor = q.shape[2] ** -0.5 if scale is None else scale
            scores = q_HRD @ k_HLD.mT * factor
            weights = torch.softmax(scores if mask is None else scores + mask, 2)
            factors_HRS = factors_LHS.transpose(0, 1).reshape(k.shape[1], -1, num_keys)
            out = weights * factors_HRS @ v_HLD
        if unseeing is not None:
            out = out.masked_fill(unseeing, 0)
        out = out.view(q.shape[1], num_rows, -1)
        outs.append(out.transpose(0, 1))
        if return_lse:
            factor = q.shape[2] ** -0.5 if scale is None else scale
            scores = q_HRD @ k_HLD.mT * factor
            lse = _log_sum_exp(scores if mask is None else scores + mask)
            if unseeing is not None:
                lse = lse.masked_fill(unseeing.squeeze(2), -torch.inf)
            lses.append(lse.view(q.shape[1], num_rows).T)
    return (torch.cat(outs), torch.cat(lses)) if return_lse else torch.cat(outs)


def _log_sum_exp(scores: Tensor) -> Tensor:
    """Over the last dimension."""
    largest = [[max(row) for row in rows] for rows in scores.detach().tolist()]  # exact
    shift = torch.tensor(largest, dtype=scores.dtype, device=scores.device)
    return (scores - shift.unsqueeze(-1)).exp().sum(-1).log() + shift


def _scores_by_distance(table: Tensor, num_rows: int, num_keys: int) -> Tensor:
    """``[H, Lq, Lk]``; the last query is at the last key."""
    distance = torch.arange(num_keys - num_rows, num_keys)[:, None] - torch.arange(num_keys)
    buckets = [_recency_bucket(d) for d in distance.abs().flatten().tolist()]
    index = torch.tensor(buckets, device=table.device).clamp(max=len(table) - 1)
    return table[index.view(num_rows, num_keys)].permute(2, 0, 1)


def _bias_of_rows(
    offsets: Tensor, biases: ScoreBiases, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """``[N, H]`` or ``[N, 1]``: the sum of ``biases``, without the logarithms of removed rows; and
    ``[N]``, which rows are left.
    """
    bias, prior_weights = recency_bias_oracle(offsets, biases), biases.prior_weights
    if prior_weights is None:
        return bias, None
    left = prior_weights > 0
    logs = prior_weights.masked_fill(~left, 1).log().unsqueeze(1).to(dtype)
    return logs if bias is None else bias + logs, left


def _split(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    return x.split(offsets.diff().tolist())


def _pairs_of(p: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> list[Tensor]:
    """``[Lx, Ly]`` of each sample."""
    x_lengths, y_lengths = x_offsets.diff().tolist(), y_offsets.diff().tolist()
    parts = p.split([x * y for x, y in zip(x_lengths, y_lengths, strict=True)])
    return [part.view(x, y) for part, x, y in zip(parts, x_lengths, y_lengths, strict=True)]


def jagged_dense_bmm_oracle(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([x[:0] @ x.new_zeros(*y.shape[1:]), *map(torch.mm, _split(x, offsets), y)])


def jagged_jagged_bmm_oracle(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    parts = zip(_split(x, offsets), _split(y, offsets), strict=True)
    empty = x.new_zeros(0, x.shape[1], y.shape[1])
    return torch.cat([empty, *((x_LD.T @ y_LT).unsqueeze(0) for x_LD, y_LT in parts)])


def jagged_softmax_oracle(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([x[:0], *(x_LT.softmax(0) for x_LT in _split(x, offsets))])


def jagged_jagged_bmm_jagged_out_oracle(
    x: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    total: int | None = None,
) -> Tensor:
    y_offsets = x_offsets if y_offsets is None else y_offsets
    parts = zip(_split(x, x_offsets), _split(y, y_offsets), strict=True)
    return torch.cat([x[:0, 0], *((x_LD @ y_LD.T).flatten() for x_LD, y_LD in parts)])


def array_jagged_bmm_jagged_out_oracle(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    num_rows: int | None = None,
) -> Tensor:
    y_offsets = x_offsets if y_offsets is None else y_offsets
    parts = zip(_pairs_of(p, x_offsets, y_offsets), _split(y, y_offsets), strict=True)
    return torch.cat([y[:0], *(p_XY @ y_LD for p_XY, y_LD in parts)])


def jagged2_softmax_oracle(p: Tensor, x_offsets: Tensor, y_offsets: Tensor | None = None) -> Tensor:
    y_offsets = x_offsets if y_offsets is None else y_offsets
    return torch.cat(
        [p[:0], *(p_XY.softmax(1).flatten() for p_XY in _pairs_of(p, x_offsets, y_offsets))]
    )


def jagged_dense_add_oracle(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([x[:0], *map(torch.add, _split(x, offsets), y)])


def jagged_dense_mul_oracle(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([x[:0], *map(torch.mul, _split(x, offsets), y)])
