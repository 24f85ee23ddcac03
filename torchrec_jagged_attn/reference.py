"""Each op in plain PyTorch, on jagged tensors and without padding: what runs on CPU.

Sums and the softmax are taken in fp32 (fp64 for fp64 inputs), as in the kernels. In names, ``B``
are samples, ``N`` their history rows (``L`` those of one sample), and ``R`` the query rows of a
sample: its targets' heads, one target after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout

__all__ = [
    "flash_attention",
    "flash_attention_backward",
    "target_attention",
    "target_attention_backward",
]

# History rows to work on at a time: what is made of them should stay in the caches.
SLAB_ROWS = 1 << 14

# Fractional bits of the least fp32 numbers at or above 2^(1/4), 2^(2/4) and 2^(3/4).
QUARTER_OCTAVES = (0x1837F1, 0x3504F4, 0x5744FD)


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
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B, T, H, D]``, ``[1, T, H, D]`` or ``[ΣT, H, D]`` queries over ``[N, D]`` rows.

    Returns the output, shaped as one query row per sample and target, and zeros for what the
    kernels keep of rounding and for their statistics: the gradient needs neither here.
    """
    if query_offsets is None:
        query = query.expand(offsets.numel() - 1, -1, -1, -1)
    out = query.new_zeros(query.shape)
    for slab in _slabs(query, offsets, query_offsets):
        x_ND = slab.history_rows(history)
        q_BRD = slab.query_rows(query) * scale
        buckets = slab.buckets(position_bias, age_bias, timestamps)
        bias_NH = slab.bias(bias, position_bias, age_bias, buckets, x_ND.dtype)
        p_NR, total_BR = slab.exp(slab.mm(x_ND, q_BRD.mT), bias_NH)
        slab.put_query_rows(out, slab.mm(p_NR.T, x_ND) / total_BR.unsqueeze(-1))
    rest = out.new_zeros(out.shape if for_backward and out.element_size() == 2 else [0])
    return out, rest, query.new_zeros(2, *query.shape[:-1], dtype=torch.float32)


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
    shared = query_offsets is None and query.shape[0] == 1 != grad_out.shape[0]
    queries = query.expand(grad_out.shape)
    grad_query_dtype = _compute_dtype(query) if shared else query.dtype
    grad_query = grad_out.new_zeros(grad_out.shape, dtype=grad_query_dtype)
    grad_history = history.new_zeros(history.shape)
    grad_bias = None if bias is None else bias.new_zeros(bias.shape)
    grad_tables = [
        None if table is None else table.new_zeros(table.shape, dtype=torch.float64)
        for table in (position_bias, age_bias)
    ]
    for slab in _slabs(queries, offsets, query_offsets):
        x_ND = slab.history_rows(history)
        # Scores and dp come from one product with these, and ds and p go into another.
        pair_BRD = torch.cat([slab.query_rows(queries) * scale, slab.query_rows(grad_out)], 1)
        buckets = slab.buckets(position_bias, age_bias, timestamps)
        bias_NH = slab.bias(bias, position_bias, age_bias, buckets, x_ND.dtype)

        halves = slab.mm(x_ND, pair_BRD.mT).chunk(2, 1)
        scores_NR, dp_NR = (half.contiguous() for half in halves)
        p_NR, total_BR = slab.exp(scores_NR, bias_NH)
        p_NR.div_(slab.per_row(total_BR))
        mean_BR = slab.sum(p_NR * dp_NR)
        ds_NR = dp_NR.sub_(slab.per_row(mean_BR)).mul_(p_NR)

        slab.put_query_rows(grad_query, slab.mm(ds_NR.T, x_ND) * scale)
        grad_x_ND = slab.mm(torch.cat([ds_NR, p_NR], 1), pair_BRD)
        grad_history[slab.rows] = grad_x_ND.to(history.dtype)
        if bias_NH is None:
            continue
        grad_bias_NH = ds_NR[:, : slab.num_rows].unflatten(1, (-1, query.shape[-2])).sum(1)
        if grad_bias is not None:
            grad_bias[slab.rows] = grad_bias_NH.to(grad_bias.dtype)
        for grad, bucket in zip(grad_tables, buckets, strict=True):
            if grad is not None and bucket is not None:
                grad.index_add_(0, bucket, grad_bias_NH.double())
    if shared:
        grad_query = grad_query.sum(0, keepdim=True).to(query.dtype)
    grad_position, grad_age = (
        None if table is None or grad is None else grad.to(table.dtype)
        for table, grad in zip((position_bias, age_bias), grad_tables, strict=True)
    )
    return grad_query, grad_history, grad_bias, grad_position, grad_age


@dataclass(frozen=True)
class _Slab:
    """Some samples of the batch, with equally many query rows each.

    Args:
        queries: where they are in the first dimension of the queries.
        num_rows: how many query rows each has.
        rows: which rows of the history they own.
        offsets: ``[B + 1]`` int32 offsets of their history rows, among themselves.
        sample_ids: ``[N]`` sample of each history row, among themselves.
    """

    queries: slice | Tensor
    num_rows: int
    rows: slice | Tensor
    offsets: Tensor
    sample_ids: Tensor

    def query_rows(self, query: Tensor) -> Tensor:
        """``[B, R, D]``, where ``R`` is a multiple of four: zeros are added at the end."""
        rows = query[self.queries].to(_compute_dtype(query))
        rows = rows.reshape(-1, self.num_rows, query.shape[-1])
        return F.pad(rows, (0, 0, 0, -self.num_rows % 4))

    def put_query_rows(self, query: Tensor, rows_BRD: Tensor) -> None:
        """Write what :meth:`query_rows` would read."""
        rows = rows_BRD[:, : self.num_rows].reshape(-1, *query.shape[1:])
        query[self.queries] = rows.to(query.dtype)

    def history_rows(self, history: Tensor) -> Tensor:
        """``[N, D]``."""
        return history[self.rows].to(_compute_dtype(history)).contiguous()

    def per_row(self, x_BR: Tensor) -> Tensor:
        """``[N, R]``: to each history row what its sample has."""
        return x_BR.index_select(0, self.sample_ids)

    def sum(self, x_NR: Tensor) -> Tensor:
        """``[B, R]`` over each sample's rows; in fp64, since one is added after the other."""
        total = torch.segment_reduce(x_NR.double(), "sum", offsets=self.offsets, unsafe=True)
        return total.to(x_NR.dtype)

    def exp(self, scores_NR: Tensor, bias_NH: Tensor | None) -> tuple[Tensor, Tensor]:
        """Softmax of biased scores before it is divided, in their place, and its ``[B, R]`` sums.

        Where no row is visible, the softmax is zero and its sum one.
        """
        if bias_NH is not None:
            scores_NTH = scores_NR[:, : self.num_rows].unflatten(1, (-1, bias_NH.shape[1]))
            scores_NTH.add_(bias_NH.unsqueeze(1))
        largest_BR = torch.segment_reduce(scores_NR, "max", offsets=self.offsets, unsafe=True)
        largest_BR.clamp_(min=torch.finfo(scores_NR.dtype).min)
        p_NR = scores_NR.sub_(self.per_row(largest_BR)).exp_()
        return p_NR, self.sum(p_NR).clamp_(min=1)

    def mm(self, a: Tensor, b: Tensor) -> Tensor:
        """``[N, K] × [B, K, M] → [N, M]`` or ``[K, N] × [N, M] → [B, K, M]``, sample by sample.

        The bits of a batched product would depend on how many samples there are.
        """
        if _fits_grouped_mm(a) and _fits_grouped_mm(b):
            return F.grouped_mm(a, b, offs=self.offsets[1:])
        lengths = self.offsets.diff().tolist()
        if b.dim() == 3:
            return torch.cat([x @ y for x, y in zip(a.split(lengths), b, strict=True)])
        pairs = zip(a.split(lengths, 1), b.split(lengths), strict=True)
        return torch.stack([x @ y for x, y in pairs])

    def buckets(
        self, position_bias: Tensor | None, age_bias: Tensor | None, timestamps: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """``[N]`` buckets of the rows' positions and ages, for the tables that there are."""
        newest = self.per_row(self.offsets[1:]) - 1
        positions = ages = None
        if position_bias is not None:
            rows = torch.arange(len(newest))
            positions = recency_buckets(newest - rows, len(position_bias))
        if age_bias is not None and timestamps is not None:
            times = timestamps[self.rows]
            times = times.long() if times.dtype == torch.int32 else times
            ages = recency_buckets((times[newest] - times).clamp(min=0), len(age_bias))
        return positions, ages

    def bias(
        self,
        bias: Tensor | None,
        position_bias: Tensor | None,
        age_bias: Tensor | None,
        buckets: tuple[Tensor | None, Tensor | None],
        dtype: torch.dtype,
    ) -> Tensor | None:
        """``[N, H]`` sum of all biases."""
        parts = [] if bias is None else [bias[self.rows].to(dtype)]
        for table, bucket in zip((position_bias, age_bias), buckets, strict=True):
            if table is not None and bucket is not None:
                parts.append(table.to(dtype).index_select(0, bucket))
        return sum(parts[1:], parts[0]) if parts else None


def _slabs(query: Tensor, offsets: Tensor, query_offsets: Tensor | None) -> Iterator[_Slab]:
    """Cut the batch into slabs of about ``SLAB_ROWS`` rows, leaving out what has nothing to do."""
    lengths = offsets.diff()
    if query_offsets is None:
        groups = [(query.shape[1], torch.arange(len(lengths)))]
    else:
        targets = query_offsets.diff()
        groups = [(n, torch.nonzero(targets == n)[:, 0]) for n in targets.unique().tolist()]
    for num_targets, group in groups:
        slab_ids = (lengths[group].cumsum(0) - 1) // SLAB_ROWS
        sizes = torch.unique_consecutive(slab_ids, return_counts=True)[1]
        for samples in group.split(sizes.tolist()):
            layout = JaggedLayout.from_lengths(lengths[samples])
            if layout.num_rows == 0 or num_targets * query.shape[-2] == 0:
                continue
            sample_ids = layout.sample_ids()
            if query_offsets is None:
                first, last = int(samples[0]), int(samples[-1]) + 1
                queries, rows = slice(first, last), slice(int(offsets[first]), int(offsets[last]))
            else:
                queries = (query_offsets[samples, None] + torch.arange(num_targets)).flatten()
                shift = offsets[samples] - layout.offsets[:-1]
                rows = shift[sample_ids] + torch.arange(layout.num_rows)
            num_rows = num_targets * query.shape[-2]
            yield _Slab(queries, num_rows, rows, layout.offsets.int(), sample_ids)


def _fits_grouped_mm(x: Tensor) -> bool:
    """``grouped_mm`` takes fp32, in rows or columns that begin at multiples of 16 bytes."""
    if x.dtype != torch.float32 or x.data_ptr() % 16:
        return False
    return all(stride % 4 == 0 for stride in sorted(x.stride())[1:])


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def recency_buckets(distance: Tensor, num_buckets: int) -> Tensor:
    """``⌊4 log2(1 + distance)⌋``, of ``1 + distance`` rounded to fp32, at most the last bucket.

    Read from the bits of the number, so that it is the same on every device.
    """
    bits = (distance + 1).float().view(torch.int32)
    fraction = bits & 0x7FFFFF
    quarters = sum((fraction >= start).int() for start in QUARTER_OCTAVES)
    return (((bits >> 23) - 127) * 4 + quarters).clamp(0, num_buckets - 1).long()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    relative_bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[ΣLq, H, D]`` over ``[ΣLk, Hk, D]`` and ``[ΣLk, Hk, Dv]``, one sample after the other.

    Returns the output ``[ΣLq, H, Dv]``, and the statistics ``[2, ΣLq, H]`` that the kernels keep:
    the largest score, times log2(e), and one by the sum of weights; zeros where no key is seen.
    """
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    stats = q.new_zeros(2, *q.shape[:2], dtype=torch.float32)
    all_keys = _all_keys(k, kv_offsets)
    buckets = all_keys.buckets(position_bias, age_bias, timestamps)
    bias_NH = all_keys.bias(bias, position_bias, age_bias, buckets, _compute_dtype(q))
    for rows, keys in _flash_samples(q_offsets, kv_offsets):
        q_HLD, k_HLD, v_HLD = _heads(q[rows], q), _heads(k[keys], q), _heads(v[keys], q)
        bias_KH = None if bias_NH is None else bias_NH[keys]
        p_HLK, stats_2HL = _flash_weights(q_HLD, k_HLD, bias_KH, relative_bias, causal, scale)
        out[rows] = (p_HLK @ v_HLD).transpose(0, 1)
        stats[:, rows] = stats_2HL.transpose(1, 2).float()
    return out, stats


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    relative_bias: Tensor | None,
    grad_k: Tensor,
    grad_v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``q``, ``bias``, ``position_bias``, ``age_bias`` and ``relative_bias``.

    Those of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``.
    """
    grad_q = q.new_zeros(q.shape)
    all_keys = _all_keys(k, kv_offsets)
    buckets = all_keys.buckets(position_bias, age_bias, timestamps)
    bias_NH = all_keys.bias(bias, position_bias, age_bias, buckets, _compute_dtype(q))
    grad_bias_NH = None if bias_NH is None else torch.zeros_like(bias_NH)
    grad_relative = None
    if relative_bias is not None:
        grad_relative = torch.zeros_like(relative_bias, dtype=torch.float64)
    for rows, keys in _flash_samples(q_offsets, kv_offsets):
        q_HLD, k_HLD, v_HLD = _heads(q[rows], q), _heads(k[keys], q), _heads(v[keys], q)
        grad_out_HLD = _heads(grad_out[rows], q)
        bias_KH = None if bias_NH is None else bias_NH[keys]
        p_HLK, _ = _flash_weights(q_HLD, k_HLD, bias_KH, relative_bias, causal, scale)
        dp_HLK = grad_out_HLD @ v_HLD.mT
        ds_HLK = p_HLK * (dp_HLK - (p_HLK * dp_HLK).sum(-1, keepdim=True))
        if grad_bias_NH is not None:
            grad_bias_NH[keys] = ds_HLK.sum(1).T
        if grad_relative is not None:
            bucket = _relative_buckets(*ds_HLK.shape[1:], len(grad_relative))
            grad_relative.index_add_(0, bucket.flatten(), ds_HLK.flatten(1).T.double())
        ds_HLK *= scale
        grad_q[rows] = (ds_HLK @ k_HLD).transpose(0, 1)
        for grad, grad_HKD in (
            (grad_k, ds_HLK.mT @ q_HLD),
            (grad_v, p_HLK.mT @ grad_out_HLD),
        ):
            grad[keys] = grad_HKD.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    grad_bias, grad_position, grad_age = (
        _bias_gradient(grad_bias_NH, bucket, x)
        for bucket, x in zip((None, *buckets), (bias, position_bias, age_bias), strict=True)
    )
    if relative_bias is not None and grad_relative is not None:
        grad_relative = grad_relative.to(relative_bias.dtype)
    return grad_q, grad_bias, grad_position, grad_age, grad_relative


def _all_keys(k: Tensor, kv_offsets: Tensor) -> _Slab:
    """All key rows of the batch, for their biases."""
    layout = JaggedLayout(kv_offsets, k.shape[0])
    return _Slab(slice(0), 0, slice(None), kv_offsets, layout.sample_ids())


def _bias_gradient(
    grad_NH: Tensor | None, bucket: Tensor | None, x: Tensor | None
) -> Tensor | None:
    """Gradient of the bias ``x``: of the rows, or of a table that has a row for each bucket."""
    if grad_NH is None or x is None:
        return None
    if bucket is not None:
        grad_NH = grad_NH.new_zeros(x.shape, dtype=torch.float64).index_add_(
            0, bucket, grad_NH.double()
        )
    return grad_NH.to(x.dtype)


def _flash_samples(q_offsets: Tensor, kv_offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of the queries, and of the keys, of each sample that has keys."""
    q_bounds, kv_bounds = q_offsets.tolist(), kv_offsets.tolist()
    for rows, keys in zip(itertools.pairwise(q_bounds), itertools.pairwise(kv_bounds), strict=True):
        if keys[0] < keys[1]:
            yield slice(*rows), slice(*keys)


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """``[L, Hk, D] → [H, L, D]``: each head of ``x`` for as many of ``q`` as read it."""
    x = x.to(_compute_dtype(q)).transpose(0, 1)
    return x.repeat_interleave(q.shape[1] // len(x), 0)


def _relative_buckets(num_rows: int, num_keys: int, num_buckets: int) -> Tensor:
    """``[Lq, Lk]`` buckets of the distance between queries and keys that end together."""
    rows, keys = torch.arange(num_keys - num_rows, num_keys), torch.arange(num_keys)
    return recency_buckets((rows.unsqueeze(1) - keys).abs(), num_buckets)


def _flash_weights(
    q_HLD: Tensor,
    k_HKD: Tensor,
    bias_KH: Tensor | None,
    relative_bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``[H, Lq, Lk]`` softmax over the keys, zero where none is visible; ``[2, H, Lq]`` stats."""
    scores_HLK = q_HLD @ k_HKD.mT * scale
    num_rows, num_keys = scores_HLK.shape[1:]
    if bias_KH is not None:
        scores_HLK += bias_KH.T.unsqueeze(1)
    if relative_bias is not None:
        bucket = _relative_buckets(num_rows, num_keys, len(relative_bias))
        scores_HLK += relative_bias.T.to(scores_HLK.dtype)[:, bucket]
    if causal:
        hidden = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 1)
        scores_HLK.masked_fill_(hidden, -torch.inf)
    largest_HL = scores_HLK.amax(-1, keepdim=True)
    seen_HL = largest_HL > -torch.inf
    largest_HL.masked_fill_(~seen_HL, 0)
    p_HLK = scores_HLK.sub_(largest_HL).exp_()
    total_HL = p_HLK.sum(-1, keepdim=True).clamp_(min=1)
    stats = torch.stack([largest_HL / math.log(2), seen_HL / total_HL])
    return p_HLK.div_(total_HL), stats.squeeze(-1)
