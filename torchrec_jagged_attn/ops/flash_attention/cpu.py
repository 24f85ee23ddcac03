"""Target and flash attention on a CPU.

``H`` heads of queries attend to ``K`` heads of keys and values. Target attention has one head of
keys, the raw history rows, which are the values, too. Sums and the softmax are computed in fp32
(fp64 for fp64 inputs), as in the kernels. This file prepares the operands; ``attention.cpp``
computes attention and its gradients, on all cores.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.base.layout import JaggedLayout, sample_ids
from torchrec_jagged_attn.ops.attention.arguments import SCORES, Biases
from torchrec_jagged_attn.ops.flash_attention import extension
from torchrec_jagged_attn.ops.flash_attention.arguments import (
    FlashArguments,
    FlashGradients,
    FlashOutputs,
)

# Mantissas of the smallest fp32 numbers at or above 2^(1/4), 2^(2/4) and 2^(3/4).
QUARTER_OCTAVES = (0x1837F1, 0x3504F4, 0x5744FD)


class TargetOptions(NamedTuple):
    """Options of target attention that flash attention does not have."""

    score: str = "softmax"  # one of ``SCORES``
    # [N] gather indices: keys and values are the rows of ``k`` at these indices
    indices: Tensor | None = None
    # [N] and [B], see :class:`TargetArguments`
    row_numbers: Tensor | None = None
    row_number_ends: Tensor | None = None
    # [M, H], the gradient of the log-sum-exps of queries; zero for queries without a visible key
    grad_lse: Tensor | None = None


DEFAULTS = TargetOptions()


class _Operands(NamedTuple):
    """Arguments that both functions of ``attention.cpp`` take, in their order."""

    q: Tensor  # scaled, in the dtype of sums
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    indices: Tensor | None
    bias: Tensor | None  # [H, N], the sum of all biases of keys
    distance_bias: Tensor | None  # [distances, H]
    causal: bool
    window: int
    score: int  # index into SCORES
    dropout: Tensor | None
    row_numbers: Tensor | None  # [N] int64, for dropout


def forward(args: FlashArguments) -> FlashOutputs:
    """Return outputs and statistics, of scores in base 2 as in the kernels of flash attention.

    Statistics are zeros without ``needs_stats``, and for queries without a visible key.
    """
    out, stats = attend(args)
    stats[0].div_(math.log(2))
    return FlashOutputs(out, stats.float())


def attend(args: FlashArguments, options: TargetOptions = DEFAULTS) -> FlashOutputs:
    """As :func:`forward`, with statistics in the dtype of sums, of scores in base e."""
    x, _ = _operands(args, options)
    stats = x.q.new_zeros([2, *x.q.shape[:2]])
    maximum_MH, inverse_MH = stats
    out = extension.library().forward(*x, stats if args.needs_stats else stats[:0])
    if args.needs_stats:
        maximum_MH.masked_fill_(inverse_MH == 0, 0)
    return FlashOutputs(out.to(args.q.dtype), stats)


def backward(
    grad_out: Tensor,
    args: FlashArguments,
    outputs: FlashOutputs | None,
    grad_k: Tensor,
    grad_v: Tensor | None,
    needs_bias: bool = True,
    options: TargetOptions = DEFAULTS,
) -> FlashGradients:
    """Return all gradients, computed from the arguments alone: ``outputs`` and ``needs_bias`` are
    not read.

    The gradients of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``. Without ``grad_v``,
    ``k`` must be ``v``, and the sum of both gradients is written into ``grad_k``. With ``indices``,
    it is added to ``grad_k``, in the dtype of sums. Gradients of rows behind the last offset are
    zeros. ``bias``, in the dtype of sums, is also the gradient of the logarithms of prior weights,
    by head.
    """
    x, (position_bucket, age_bucket) = _operands(args, options)
    biases, relative_bias = args.biases, args.relative_bias
    grad_bias_HN = None if x.bias is None else x.bias.new_zeros(x.bias.shape)
    grad_distance_bias = distance_bucket = None
    if relative_bias is not None:
        layout = JaggedLayout.from_lengths(torch.maximum(x.q_offsets.diff(), x.kv_offsets.diff()))
        rows = torch.arange(layout.num_rows, device=layout.offsets.device)
        distances = rows - layout.offsets[:-1][layout.sample_ids()]
        distance_bucket = _recency_buckets(distances, len(relative_bias))
        grad_distance_bias = x.q.new_zeros(len(distances), x.q.shape[1], dtype=torch.float64)
    grad_out, grad_lse = grad_out.to(x.q.dtype).contiguous(), options.grad_lse
    if grad_lse is not None:
        grad_lse = grad_lse.to(x.q.dtype).contiguous()
    written_k, written_v = grad_k, grad_v
    if x.indices is None:
        written_k = _without_rows_behind(grad_k, x.k.shape[0])
        written_v = None if grad_v is None else _without_rows_behind(grad_v, x.k.shape[0])
    grad_q = extension.library().backward(
        grad_out, grad_lse, *x, written_k, written_v, grad_bias_HN, grad_distance_bias
    )
    grad_bias_NH = grad_bias = None
    if grad_bias_HN is not None:
        grad_bias_NH = grad_bias_HN.T.contiguous()
        num_rows = (args.k if options.indices is None else options.indices).shape[0]
        grad_bias = F.pad(grad_bias_NH, (0, 0, 0, num_rows - len(grad_bias_NH)))
    return FlashGradients(
        q=grad_q.mul_(args.scale).to(args.q.dtype),
        k=grad_k,
        v=grad_v,
        bias=grad_bias,
        prior_weights=None,
        position_bias=_table_gradient(grad_bias_NH, position_bucket, biases.position_bias),
        age_bias=_table_gradient(grad_bias_NH, age_bucket, biases.age_bias),
        relative_bias=_table_gradient(grad_distance_bias, distance_bucket, relative_bias),
    )


def _operands(
    args: FlashArguments, options: TargetOptions
) -> tuple[_Operands, tuple[Tensor | None, Tensor | None]]:
    """Return the arguments of ``attention.cpp``, without rows behind the last offset, and ``[N]``
    buckets of the positions and ages of keys.
    """
    q, k, v, q_offsets, kv_offsets = args[:5]
    dtype = compute_dtype(q)
    num_keys, ends = int(kv_offsets[-1]), options.row_number_ends
    indices, numbers, bias, prior_weights, timestamps = (
        None if x is None else x[:num_keys]
        for x in (
            options.indices, options.row_numbers, args.bias, args.biases.prior_weights,
            args.biases.timestamps,
        )
    )  # fmt: skip
    if indices is None:
        first_k = k[:num_keys]
        k, v = first_k, first_k if v is k else v[:num_keys]
    biases = args.biases._replace(prior_weights=prior_weights, timestamps=timestamps)
    bias_HN, buckets = bias_of_keys(
        dtype, q.shape[1], kv_offsets, num_keys, biases, bias, numbers, ends
    )
    distance_bias = _distance_bias(args.relative_bias, q_offsets, kv_offsets, dtype)
    return _Operands(
        (q.to(dtype) * args.scale).contiguous(), k, v, q_offsets, kv_offsets, indices, bias_HN,
        distance_bias, args.causal, args.window, SCORES.index(options.score),
        args.biases.dropout, None if numbers is None else numbers.long().contiguous(),
    ), buckets  # fmt: skip


def _distance_bias(
    relative_bias: Tensor | None, q_offsets: Tensor, kv_offsets: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return ``[distances, H]``: the bias at each distance in the longest sample."""
    if relative_bias is None:
        return None
    lengths = torch.maximum(q_offsets.diff(), kv_offsets.diff())
    longest = int(lengths.max()) if len(lengths) else 0
    distances = torch.arange(longest, device=lengths.device)
    buckets = _recency_buckets(distances, len(relative_bias))
    return relative_bias.to(dtype)[buckets].contiguous()


def bias_of_keys(
    dtype: torch.dtype,
    num_heads: int,
    kv_offsets: Tensor,
    num_keys: int,
    biases: Biases,
    bias: Tensor | None = None,
    row_numbers: Tensor | None = None,
    row_number_ends: Tensor | None = None,
) -> tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """Return the ``[H, N]`` sum of all biases of keys, and ``[N]`` buckets of positions and ages.

    Supports any device, and does not synchronize with it.
    """
    prior_weights, position_bias, age_bias, timestamps, request_time, _ = biases
    positions = ages = None
    terms = [] if bias is None else [bias.to(dtype)]
    if prior_weights is not None:
        logs = prior_weights.to(compute_dtype(prior_weights)).clamp(min=0).log().to(dtype)
        terms.append(logs.unsqueeze(1).expand(-1, num_heads))
    if position_bias is not None or age_bias is not None:
        samples = sample_ids(kv_offsets, num_keys)
        if position_bias is not None:
            ends, numbers = row_number_ends, row_numbers
            if ends is None or numbers is None:
                ends, numbers = kv_offsets[1:], torch.arange(num_keys, device=kv_offsets.device)
            distances = (ends - 1).index_select(0, samples) - numbers
            positions = _recency_buckets(distances, len(position_bias))
            terms.append(position_bias.to(dtype).index_select(0, positions))
        if age_bias is not None and timestamps is not None:
            if request_time is None:
                newest = kv_offsets[1:] - 1
                reference = timestamps.index_select(0, newest.index_select(0, samples))
            else:
                reference = request_time.index_select(0, samples)
            ages = _age_buckets(reference, timestamps, len(age_bias))
            terms.append(age_bias.to(dtype).index_select(0, ages))
    total = sum(terms[1:], terms[0]).T.contiguous() if terms else None
    return total, (positions, ages)


def _age_buckets(reference: Tensor, times: Tensor, num_buckets: int) -> Tensor:
    """Return buckets of the ages ``reference - times``: the first for negative ages, the last for
    ages that overflow int64.
    """
    if times.is_floating_point():
        return _recency_buckets((reference - times).clamp(min=0), num_buckets)
    reference, times = reference.long(), times.long()
    ages = (reference - times).masked_fill_(reference <= times, 0)
    return _recency_buckets(ages, num_buckets).masked_fill_(ages < 0, num_buckets - 1)


def _table_gradient(
    grad_NH: Tensor | None, bucket: Tensor | None, table: Tensor | None
) -> Tensor | None:
    """Return the gradient of a bias table, from the gradients of rows and their buckets."""
    if grad_NH is None or bucket is None or table is None:
        return None
    sums = grad_NH.new_zeros(table.shape, dtype=torch.float64)
    return sums.index_add_(0, bucket, grad_NH.double()).to(table.dtype)


def _without_rows_behind(grad: Tensor, num_rows: int) -> Tensor:
    """Set all rows of ``grad`` behind the first ``num_rows`` to zero, and return the first."""
    grad[num_rows:].zero_()
    return grad[:num_rows]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products and sums of ``x``."""
    return torch.promote_types(x.dtype, torch.float32)


def _recency_buckets(distance: Tensor, num_buckets: int) -> Tensor:
    """``min(⌊4 log2(1 + distance)⌋, 96 + ⌊log2(1 + distance)⌋)``, of ``1 + distance`` rounded to
    fp32, at most the last bucket: four buckets per octave below 2^32, and one per octave above.

    Read from the bits of the rounded number, so that all devices agree. NaN and infinity fall into
    the last bucket.
    """
    # Remove the sign, which NaN may have, and which 2^63 has in int64.
    bits = (distance + 1).float().view(torch.int32) & 0x7FFFFFFF
    fraction = bits & 0x7FFFFF
    quarters = sum((fraction >= start).int() for start in QUARTER_OCTAVES)
    octave = (bits >> 23) - 127
    buckets = torch.minimum(octave * 4 + quarters, octave + 96).clamp(0, num_buckets - 1).long()
    return buckets.masked_fill_(octave == 128, num_buckets - 1)
