"""Jagged flash attention: multi-head attention within each sample, tiled, with an online softmax.

With P = Σ Lq·Lk pairs (about half of them when causal), H heads and widths D and Dv:

    forward    2·H·P·(D + Dv) FLOPs
    backward   H·P·(10·D + 4·Dv) FLOPs: scores once for dq and once for dk, dv

and q, k, v, out and their gradients are moved once per tile of the other side. Tiles of rows come
from :func:`find_tile`, so that work follows the lengths and the grid follows from shapes alone.
Backward runs two kernels, one over tiles of queries and one over tiles of keys, and no atomics.
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
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["backward", "forward"]


@triton.jit
def _load_rows(ptr, first, rows, end, head, HEADS: tl.constexpr, D: tl.constexpr, d):
    """``[BLOCK, BLOCK_D]``: ``rows`` of a head, counted from row ``first`` of ``[·, HEADS, D]``."""
    ptrs = ptr + ((first + rows)[:, None] * HEADS + head) * D + d[None, :]
    return tl.load(ptrs, mask=(rows < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_rows(ptr, value, first, rows, end, head, HEADS: tl.constexpr, D: tl.constexpr, d):
    """Store ``value`` where :func:`_load_rows` would load it."""
    ptrs = ptr + ((first + rows)[:, None] * HEADS + head) * D + d[None, :]
    tl.store(ptrs, value, mask=(rows < end)[:, None] & (d < D)[None, :])


@triton.jit
def _visible(i, j, num_keys, shift, CAUSAL: tl.constexpr):
    """Which of the keys ``j`` the rows ``i`` see: where causal, those up to ``i + shift``."""
    visible = (j < num_keys)[None, :]
    if CAUSAL:
        visible = visible & (j[None, :] <= i[:, None] + shift)
    return visible


@triton.jit(do_not_specialize=["num_samples", "num_stats"])
def _forward_kernel(
    q_ptr,  # [ΣLq, H, D]
    k_ptr,  # [ΣLk, Hk, D]
    v_ptr,  # [ΣLk, Hk, Dv]
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
    q = _load_rows(q_ptr, q_begin, i, num_rows, head, H, D, d)  # [BLOCK_M, BLOCK_D]

    shift = num_keys - num_rows
    last = num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, start + BLOCK_M + shift)
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for j_start in range(0, last, BLOCK_N):
        j = j_start + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, kv_begin, j, num_keys, kv_head, HK, D, d)
        v = _load_rows(v_ptr, kv_begin, j, num_keys, kv_head, HK, DV, dv)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = _visible(i, j, num_keys, shift, CAUSAL)
        p, rescale, maximum, total = online_softmax_update(
            products, factor, 0.0, visible, maximum, total, 1, 1.0
        )
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    out = tl.div_rn(acc, tl.where(total > 0, total, 1.0)[:, None])
    _store_rows(out_ptr, out, q_begin, i, num_rows, head, H, DV, dv)
    store_stats(stats_ptr, num_stats, (q_begin + i) * H + head, i < num_rows, maximum, total)


@triton.jit(do_not_specialize=["num_samples", "num_stats"])
def _grad_q_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D]
    k_ptr,  # [ΣLk, Hk, D]
    v_ptr,  # [ΣLk, Hk, Dv]
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
    q = _load_rows(q_ptr, q_begin, i, num_rows, head, H, D, d)
    grad_out = _load_rows(grad_out_ptr, q_begin, i, num_rows, head, H, DV, dv)
    out = _load_rows(out_ptr, q_begin, i, num_rows, head, H, DV, dv)
    maximum, inverse = load_stats(stats_ptr, num_stats, stat, i < num_rows)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)

    shift = num_keys - num_rows
    last = num_keys
    if CAUSAL:
        last = tl.minimum(num_keys, start + BLOCK_M + shift)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for j_start in range(0, last, BLOCK_N):
        j = j_start + tl.arange(0, BLOCK_N)
        k = _load_rows(k_ptr, kv_begin, j, num_keys, kv_head, HK, D, d)
        v = _load_rows(v_ptr, kv_begin, j, num_keys, kv_head, HK, DV, dv)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = _visible(i, j, num_keys, shift, CAUSAL)
        p = softmax_weights(products, factor, 0.0, visible, maximum, inverse, 1, 1.0)
        dp = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        delta = mean_grad(p, dp, visible, delta, num_keys <= BLOCK_N, 1)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision=PRECISION)
    tl.store(delta_ptr + stat, delta, mask=i < num_rows)
    _store_rows(grad_q_ptr, acc * scale, q_begin, i, num_rows, head, H, D, d)


@triton.jit(do_not_specialize=["num_samples", "num_stats"])
def _grad_kv_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D]
    k_ptr,  # [ΣLk, Hk, D]
    v_ptr,  # [ΣLk, Hk, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    delta_ptr,  # [ΣLq, H] fp32
    grad_k_ptr,  # [ΣLk, Hk, D]
    grad_v_ptr,  # [ΣLk, Hk, Dv]
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
    k = _load_rows(k_ptr, kv_begin, j, num_keys, kv_head, HK, D, d)
    v = _load_rows(v_ptr, kv_begin, j, num_keys, kv_head, HK, DV, dv)

    shift = num_keys - num_rows
    first = start * 0
    if CAUSAL:
        first = tl.maximum(first, (start - shift) // BLOCK_M * BLOCK_M)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for head in range(kv_head * (H // HK), (kv_head + 1) * (H // HK)):
        for i_start in range(first, num_rows, BLOCK_M):
            i = i_start + tl.arange(0, BLOCK_M)
            stat = (q_begin + i) * H + head
            q = _load_rows(q_ptr, q_begin, i, num_rows, head, H, D, d)
            grad_out = _load_rows(grad_out_ptr, q_begin, i, num_rows, head, H, DV, dv)
            maximum, inverse = load_stats(stats_ptr, num_stats, stat, i < num_rows)
            delta = tl.load(delta_ptr + stat, mask=i < num_rows, other=0.0)
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            visible = _visible(i, j, num_keys, shift, CAUSAL)
            p = softmax_weights(products, factor, 0.0, visible, maximum, inverse, 1, 1.0)
            acc_v = tl.dot(
                tl.trans(p.to(grad_out.dtype)), grad_out, acc_v, input_precision=PRECISION
            )
            dp = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            acc_k = tl.dot(tl.trans(ds.to(q.dtype)), q, acc_k, input_precision=PRECISION)
    _store_rows(grad_k_ptr, acc_k * scale, kv_begin, j, num_keys, kv_head, HK, D, d)
    _store_rows(grad_v_ptr, acc_v, kv_begin, j, num_keys, kv_head, HK, DV, dv)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output ``[ΣLq, H, Dv]`` and softmax statistics ``[2, ΣLq, H]``."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    q_offsets, kv_offsets = q_offsets.contiguous(), kv_offsets.contiguous()
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    stats = q.new_empty([2, *q.shape[:2]], dtype=torch.float32)
    if out.numel():
        constants = _constants(q, k, v, causal)
        grid = _grid(q, q_offsets, constants["BLOCK_M"])
        _forward_kernel[grid](
            q, k, v, out, stats, q_offsets, kv_offsets,
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
    out: Tensor,
    stats: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v``."""
    grad_out, q, k, v = (x.contiguous() for x in (grad_out, q, k, v))
    q_offsets, kv_offsets = q_offsets.contiguous(), kv_offsets.contiguous()
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(stats[0])
    constants = _constants(q, k, v, causal)
    tail = (
        q_offsets, kv_offsets, q_offsets.numel() - 1, delta.numel(), scale * LOG2E.value, scale
    )  # fmt: skip
    if grad_q.numel():
        _grad_q_kernel[_grid(q, q_offsets, constants["BLOCK_M"])](
            grad_out, q, k, v, out, stats, grad_q, delta, *tail, **constants
        )
    if grad_k.numel():
        _grad_kv_kernel[_grid(k, kv_offsets, constants["BLOCK_N"])](
            grad_out, q, k, v, stats, delta, grad_k, grad_v, *tail, **constants
        )
    return grad_q, grad_k, grad_v


def _grid(x: Tensor, offsets: Tensor, block: int) -> tuple[int]:
    """One program for each tile of ``x``'s rows and each of its heads."""
    return (JaggedLayout(offsets, x.shape[0]).num_tiles(block) * x.shape[1],)


def _constants(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict:
    """Compile-time arguments of all three kernels."""
    block_d, block_dv = padded_width(q.shape[2]), padded_width(v.shape[2])
    row_bytes = max(block_d, block_dv) * q.element_size()
    precision = dot_precision(q.dtype)
    block = tile_rows(row_bytes, precision, registers=8192)
    return {
        "H": q.shape[1],
        "HK": k.shape[1],
        "D": q.shape[2],
        "DV": v.shape[2],
        "CAUSAL": causal,
        "PRECISION": precision,
        "BLOCK_M": block,
        "BLOCK_N": block,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "num_warps": 4 if row_bytes < 512 else 8,
        "num_stages": 2,
    }
