"""Jagged flash attention: multi-head attention within each sample, tiled, with an online softmax.

With P = Σ Lq·Lk pairs (about half of them when causal), H heads and widths D and Dv:

    forward    2·H·P·(D + Dv) FLOPs
    backward   H·P·(10·D + 4·Dv) FLOPs: scores once for dq and once for dk, dv

and q, k, v, out and their gradients are moved once per tile of the other side. Tiles of rows come
from :func:`find_tile`, so that work follows the lengths and the grid follows from shapes alone.
Backward runs two kernels, one over tiles of queries and one over tiles of keys, and no atomics.

Biases belong to a key row and a head, so that a tile of scores takes one vector of them. Gradients
of the tables by position and age are summed by tile of keys, then over the tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.kernels.common import (
    LOG2E,
    dot_precision,
    find_tile,
    load_stats,
    mean_grad,
    online_softmax_update,
    padded_width,
    softmax_weights,
    store_stats,
    tile_rows,
)
from torchrec_jagged_attn.kernels.score_bias import load_bias, row_buckets
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["backward", "forward"]


@triton.jit
def _load_rows(ptr, first, rows, end, STRIDE: tl.constexpr, head, D: tl.constexpr, d):
    """``[BLOCK, BLOCK_D]``: ``rows`` of a head, counted from row ``first`` of ``[·, heads, D]``."""
    ptrs = ptr + (first + rows)[:, None] * STRIDE + head * D + d[None, :]
    return tl.load(ptrs, mask=(rows < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, value, first, rows, end, STRIDE: tl.constexpr, head, D: tl.constexpr, d):
    """Store ``value`` where :func:`_load_rows` would load it."""
    ptrs = ptr + (first + rows)[:, None] * STRIDE + head * D + d[None, :]
    tl.store(ptrs, value, mask=(rows < end)[:, None] & (d < D)[None, :])


@triton.jit
def _key_bias(
    bias_ptr,
    position_bias_ptr,
    age_bias_ptr,
    timestamps_ptr,
    kv_offsets_ptr,
    sample,
    kv_begin,
    j,
    num_keys,
    head,
    H: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    BIASED: tl.constexpr,
):
    """All biases of the keys ``j`` for a head, times log2(e) as the scores are, and which are seen.

    A bias of ``-inf`` hides its key.
    """
    seen = j < num_keys
    bias = load_bias(
        bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, kv_offsets_ptr, sample,
        kv_begin + j, seen, head, H, H, P, A,
    )  # fmt: skip
    if BIASED:
        bias *= LOG2E
        seen = seen & (bias > -float("inf"))
    return bias, seen


@triton.jit
def _visible(i, j, seen, shift, CAUSAL: tl.constexpr):
    """Which of the ``seen`` keys ``j`` the rows ``i`` see: where causal, those up to ``i + shift``.

    All are shaped to go with scores.
    """
    visible = seen
    if CAUSAL:
        visible = visible & (j <= i + shift)
    return visible


@triton.jit
def _store_bucket_sums(ptr, values, buckets, head, H: tl.constexpr, NUM_BUCKETS: tl.constexpr):
    """Store the sum of each bucket's ``values`` in a head's column of ``[NUM_BUCKETS, H]``."""
    for first in range(0, NUM_BUCKETS, 16):
        b = first + tl.arange(0, 16)
        of_bucket = tl.where(b[:, None] == buckets[None, :], values[None, :], 0.0)
        tl.store(ptr + b * H + head, tl.sum(of_bucket, 1), mask=b < NUM_BUCKETS)


@triton.jit(do_not_specialize=["num_samples", "num_stats"])
def _forward_kernel(
    q_ptr,  # [ΣLq, H, D]
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    bias_ptr,  # [ΣLk, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [ΣLk]
    out_ptr,  # [ΣLq, H, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    num_samples,
    num_stats,
    factor,  # scale · log2(e), rounded once
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    BIASED: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One tile of query rows of one head, over all keys of its sample."""
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    sample, q_begin, q_end, start = find_tile(q_offsets_ptr, num_samples, program // H, 1, BLOCK_M)
    num_rows = q_end - q_begin
    if start >= num_rows:
        return
    kv_begin = tl.load(kv_offsets_ptr + sample).to(tl.int64)
    num_keys = tl.load(kv_offsets_ptr + sample + 1).to(tl.int64) - kv_begin
    kv_head = head // (H // HK)

    i = start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q = _load_rows(q_ptr, q_begin, i, num_rows, H * D, head, D, d)  # [BLOCK_M, BLOCK_D]

    shift = num_keys - num_rows
    last = num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, start + BLOCK_M + shift)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for j_start in range(0, last, BLOCK_N):
        j = j_start + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, kv_begin, j, num_keys, K_STRIDE, kv_head, D, d)
        v = _load_rows(v_ptr, kv_begin, j, num_keys, V_STRIDE, kv_head, DV, dv)
        bias, seen = _key_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, kv_offsets_ptr, sample,
            kv_begin, j, num_keys, head, H, P, A, BIASED,
        )  # fmt: skip
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = _visible(i[:, None], j[None, :], seen[None, :], shift, CAUSAL)
        p, rescale, maximum, total = online_softmax_update(
            products, factor, bias[None, :], visible, maximum, total, 1, 1.0
        )
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    out = tl.div_rn(acc, tl.where(total > 0, total, 1.0)[:, None])
    _store_rows(out_ptr, out, q_begin, i, num_rows, H * DV, head, DV, dv)
    store_stats(stats_ptr, num_stats, (q_begin + i) * H + head, i < num_rows, maximum, total)


@triton.jit(do_not_specialize=["num_samples", "num_stats"])
def _grad_q_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D]
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    bias_ptr,  # [ΣLk, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [ΣLk]
    out_ptr,  # [ΣLq, H, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    grad_q_ptr,  # [ΣLq, H, D]
    delta_ptr,  # [ΣLq, H] fp32, out: Σ_d grad_out · out
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    num_samples,
    num_stats,
    factor,  # scale · log2(e), rounded once
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    BIASED: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Gradient of one tile of query rows of one head, over all keys of its sample."""
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    sample, q_begin, q_end, start = find_tile(q_offsets_ptr, num_samples, program // H, 1, BLOCK_M)
    num_rows = q_end - q_begin
    if start >= num_rows:
        return
    kv_begin = tl.load(kv_offsets_ptr + sample).to(tl.int64)
    num_keys = tl.load(kv_offsets_ptr + sample + 1).to(tl.int64) - kv_begin
    kv_head = head // (H // HK)

    i = start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    stat = (q_begin + i) * H + head
    q = _load_rows(q_ptr, q_begin, i, num_rows, H * D, head, D, d)
    grad_out = _load_rows(grad_out_ptr, q_begin, i, num_rows, H * DV, head, DV, dv)
    out = _load_rows(out_ptr, q_begin, i, num_rows, H * DV, head, DV, dv)
    maximum, inverse = load_stats(stats_ptr, num_stats, stat, i < num_rows)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)

    shift = num_keys - num_rows
    last = num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, start + BLOCK_M + shift)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    residual = tl.zeros([BLOCK_M], tl.float32)  # Σ ds: zero, but for the rounding of out
    for j_start in range(0, last, BLOCK_N):
        j = j_start + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, kv_begin, j, num_keys, K_STRIDE, kv_head, D, d)
        v = _load_rows(v_ptr, kv_begin, j, num_keys, V_STRIDE, kv_head, DV, dv)
        bias, seen = _key_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, kv_offsets_ptr, sample,
            kv_begin, j, num_keys, head, H, P, A, BIASED,
        )  # fmt: skip
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = _visible(i[:, None], j[None, :], seen[None, :], shift, CAUSAL)
        p = softmax_weights(products, factor, bias[None, :], visible, maximum, inverse, 1, 1.0)
        dp = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        delta = mean_grad(p, dp, visible, delta, num_keys <= BLOCK_N, 1)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
        if BIASED:
            residual += tl.sum(ds, 1)
    # A delta larger by the residual would have made it zero; gradients of biases add up many rows.
    tl.store(delta_ptr + stat, delta + residual, mask=i < num_rows)
    _store_rows(grad_q_ptr, acc * scale, q_begin, i, num_rows, H * D, head, D, d)


@triton.jit(do_not_specialize=["num_samples", "num_stats"])
def _grad_kv_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D]
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    bias_ptr,  # [ΣLk, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [ΣLk]
    stats_ptr,  # [2, ΣLq, H] fp32
    delta_ptr,  # [ΣLq, H] fp32
    grad_k_ptr,  # [ΣLk, Hk, D], rows GRAD_K_STRIDE apart
    grad_v_ptr,  # [ΣLk, Hk, Dv], rows GRAD_V_STRIDE apart
    grad_bias_ptr,  # [ΣLk, H]
    grad_tables_ptr,  # [tiles, P + A, H] fp32
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    num_samples,
    num_stats,
    factor,  # scale · log2(e), rounded once
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    BIASED: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    GRAD_K_STRIDE: tl.constexpr,
    GRAD_V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Gradients of one tile of key rows of one head, over all query rows that see them."""
    program = tl.program_id(0).to(tl.int64)
    kv_head = program % HK
    sample, kv_begin, kv_end, start = find_tile(
        kv_offsets_ptr, num_samples, program // HK, 1, BLOCK_N
    )
    num_keys = kv_end - kv_begin
    if start >= num_keys:
        return
    q_begin = tl.load(q_offsets_ptr + sample).to(tl.int64)
    num_rows = tl.load(q_offsets_ptr + sample + 1).to(tl.int64) - q_begin

    j = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    k = _load_rows(k_ptr, kv_begin, j, num_keys, K_STRIDE, kv_head, D, d)
    v = _load_rows(v_ptr, kv_begin, j, num_keys, V_STRIDE, kv_head, DV, dv)

    shift = num_keys - num_rows
    first = start * 0
    if CAUSAL:
        first = tl.maximum(first, (start - shift) // BLOCK_M * BLOCK_M)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(H // HK):
        head = kv_head * (H // HK) + member
        bias, seen = _key_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, kv_offsets_ptr, sample,
            kv_begin, j, num_keys, head, H, P, A, BIASED,
        )  # fmt: skip
        grad_bias = tl.zeros([BLOCK_N], tl.float32)
        for i_start in range(first, num_rows, BLOCK_M):
            i = i_start + tl.arange(0, BLOCK_M)
            stat = (q_begin + i) * H + head
            q = _load_rows(q_ptr, q_begin, i, num_rows, H * D, head, D, d)
            grad_out = _load_rows(grad_out_ptr, q_begin, i, num_rows, H * DV, head, DV, dv)
            maximum, inverse = load_stats(stats_ptr, num_stats, stat, i < num_rows)
            if BIASED:  # which could overflow where a row is none of the sample's
                maximum = tl.where(i < num_rows, maximum, float("inf"))
            delta = tl.load(delta_ptr + stat, mask=i < num_rows, other=0.0)
            products = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            visible = _visible(i[None, :], j[:, None], seen[:, None], shift, CAUSAL)
            p = softmax_weights(products, factor, bias[:, None], visible, maximum, inverse, 0, 1.0)
            acc_v = tl.dot(p.to(grad_out.dtype), grad_out, acc_v, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            acc_k = tl.dot(ds.to(q.dtype), q, acc_k, input_precision=PRECISION)
            grad_bias += tl.sum(ds, 1)
        if grad_bias_ptr is not None:
            tl.store(grad_bias_ptr + (kv_begin + j) * H + head, grad_bias, mask=j < num_keys)
        if P > 0 or A > 0:
            of_position, of_age = row_buckets(
                kv_begin + j, j < num_keys, kv_offsets_ptr, timestamps_ptr, sample, P, A
            )
            table_ptr = grad_tables_ptr + program // HK * ((P + A) * H)
            if P > 0:
                _store_bucket_sums(table_ptr, grad_bias, of_position, head, H, P)
            if A > 0:
                _store_bucket_sums(table_ptr + P * H, grad_bias, of_age, head, H, A)
    _store_rows(grad_k_ptr, acc_k * scale, kv_begin, j, num_keys, GRAD_K_STRIDE, kv_head, D, d)
    _store_rows(grad_v_ptr, acc_v, kv_begin, j, num_keys, GRAD_V_STRIDE, kv_head, DV, dv)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    timestamps: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output ``[ΣLq, H, Dv]`` and softmax statistics ``[2, ΣLq, H]``."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    stats = q.new_empty([2, *q.shape[:2]], dtype=torch.float32)
    if out.numel():
        q, k, v = q.contiguous(), _rows(k), _rows(v)
        biases = [_contiguous(x) for x in (bias, position_bias, age_bias, timestamps)]
        constants = _constants(q, k, v, bias, position_bias, age_bias, causal)
        _forward_kernel[_grid(q, q_offsets, constants["BLOCK_M"])](
            q, k, v, *biases, out, stats, q_offsets.contiguous(), kv_offsets.contiguous(),
            q_offsets.numel() - 1, stats[0].numel(), scale * LOG2E.value, **constants,
        )  # fmt: skip
    return out, stats


def backward(
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
    out: Tensor,
    stats: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``q``, ``bias``, ``position_bias`` and ``age_bias``.

    Those of ``k`` and ``v`` are written into ``grad_k`` and ``grad_v``, whose rows may be apart.
    """
    grad_out, q, k, v = grad_out.contiguous(), q.contiguous(), _rows(k), _rows(v)
    biases = [_contiguous(x) for x in (bias, position_bias, age_bias, timestamps)]
    grad_q, delta = torch.empty_like(q), torch.empty_like(stats[0])
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    constants = _constants(q, k, v, bias, position_bias, age_bias, causal)
    num_buckets = constants["P"], constants["A"]
    (grid,) = _grid(k, kv_offsets, constants["BLOCK_N"])
    grad_tables = None
    if any(num_buckets):
        num_tiles = grid // k.shape[1]
        grad_tables = delta.new_zeros(num_tiles, sum(num_buckets), q.shape[1])
    tail = (
        q_offsets.contiguous(), kv_offsets.contiguous(), q_offsets.numel() - 1, delta.numel(),
        scale * LOG2E.value, scale,
    )  # fmt: skip
    if grad_q.numel():
        _grad_q_kernel[_grid(q, q_offsets, constants["BLOCK_M"])](
            grad_out, q, k, v, *biases, out, stats, grad_q, delta, *tail, **constants
        )
    if k.shape[0]:
        _grad_kv_kernel[(grid,)](
            grad_out, q, k, v, *biases, stats, delta,
            grad_k, grad_v, grad_bias, grad_tables, *tail, **constants,
            GRAD_K_STRIDE=grad_k.stride(0), GRAD_V_STRIDE=grad_v.stride(0),
        )  # fmt: skip
    grad_position_bias = grad_age_bias = None
    if grad_tables is not None:
        of_position, of_age = grad_tables.sum(0).split(num_buckets)
        if position_bias is not None:
            grad_position_bias = of_position.to(position_bias.dtype)
        if age_bias is not None:
            grad_age_bias = of_age.to(age_bias.dtype)
    return grad_q, grad_bias, grad_position_bias, grad_age_bias


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _rows(x: Tensor) -> Tensor:
    """``[L, Hk, D]`` as it is, if the elements of a row are next to each other, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _grid(x: Tensor, offsets: Tensor, block: int) -> tuple[int]:
    """One program for each tile of ``x``'s rows and each of its heads."""
    return (JaggedLayout(offsets, x.shape[0]).num_tiles(block) * x.shape[1],)


def _constants(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    position_bias: Tensor | None,
    age_bias: Tensor | None,
    causal: bool,
) -> dict:
    """Compile-time arguments of all three kernels."""
    block_d, block_dv = padded_width(q.shape[2]), padded_width(v.shape[2])
    row_bytes = max(block_d, block_dv) * q.element_size()
    precision = dot_precision(q.dtype)
    block = tile_rows(row_bytes, precision, registers=8192)
    if precision == "ieee":
        block = min(block, 32)  # scores of larger ones spill
    return {
        "H": q.shape[1],
        "HK": k.shape[1],
        "D": q.shape[2],
        "DV": v.shape[2],
        "P": 0 if position_bias is None else position_bias.shape[0],
        "A": 0 if age_bias is None else age_bias.shape[0],
        "BIASED": any(x is not None for x in (bias, position_bias, age_bias)),
        "K_STRIDE": k.stride(0),
        "V_STRIDE": v.stride(0),
        "CAUSAL": causal,
        "PRECISION": precision,
        "BLOCK_M": block,
        "BLOCK_N": block,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "num_warps": 4 if row_bytes < 512 else 8,
        "num_stages": 2,
    }
