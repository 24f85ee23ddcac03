"""Jagged flash attention of short samples in Triton, of half precision without biases.

A program computes one head of a whole sample, all pairs of rows at once. Scores and weights stay in
registers, so the kernels are memory-bound: forward reads q, k, v and writes out; backward reads
q, k, v, grad_out and writes three gradients. Backward needs nothing that forward kept.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from torchrec_jagged_attn.kernels.common.softmax import mean_grad
from torchrec_jagged_attn.kernels.flash.tiles import (
    load_rows,
    online_softmax,
    store_rows,
    store_softmax_stats,
)

__all__ = ["MOST_ROWS", "backward_short_kernel", "forward_short_kernel"]

MOST_ROWS = 32  # on both sides, of the samples that are taken


@triton.jit
def _locate_sample(
    sample, q_offsets_ptr, kv_offsets_ptr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """``(q_row, num_rows, kv_row, num_keys, visible)`` of a sample.

    First row and length of its queries and of its keys, and the mask ``[BLOCK, BLOCK]`` of visible
    pairs, queries by keys.
    """
    q_row = tl.load(q_offsets_ptr + sample).to(tl.int64)
    kv_row = tl.load(kv_offsets_ptr + sample).to(tl.int64)
    num_rows = (tl.load(q_offsets_ptr + sample + 1).to(tl.int64) - q_row).to(tl.int32)
    num_keys = (tl.load(kv_offsets_ptr + sample + 1).to(tl.int64) - kv_row).to(tl.int32)
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    visible = (i < num_rows) & (j < num_keys)
    if CAUSAL:
        visible = visible & (j <= i + num_keys - num_rows)
    return q_row, num_rows, kv_row, num_keys, visible


@triton.jit(do_not_specialize=["num_stats"])
def forward_short_kernel(
    q_ptr,  # [ΣLq, H, D], rows Q_STRIDE apart
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    out_ptr,  # [ΣLq, H, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    num_stats,
    factor,  # |scale| · log2(e), rounded once
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one sample, if that has at most ``BLOCK`` rows on both sides."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    sample, head = tl.program_id(0) // H, tl.program_id(0) % H
    kv_head = head // (H // HK)
    q_row, num_rows, kv_row, num_keys, visible = _locate_sample(
        sample, q_offsets_ptr, kv_offsets_ptr, CAUSAL, BLOCK
    )
    if (num_rows <= BLOCK) & (num_keys <= BLOCK) & (num_rows > 0):
        q = load_rows(q_ptr, q_row, num_rows, Q_STRIDE, head * D, D, BLOCK, BLOCK_D, True)
        k = load_rows(k_ptr, kv_row, num_keys, K_STRIDE, kv_head * D, D, BLOCK, BLOCK_D, True)
        v = load_rows(v_ptr, kv_row, num_keys, V_STRIDE, kv_head * DV, DV, BLOCK, BLOCK_DV, True)
        products = tl.dot(-q if NEGATIVE else q, tl.trans(k))  # [BLOCK, BLOCK]
        nothing = tl.full([BLOCK], -float("inf"), tl.float32)
        p, _, maximum, total = online_softmax(
            products, factor, 0.0, visible, nothing, tl.zeros([BLOCK], tl.float32), False, True
        )
        out = tl.dot(p.to(v.dtype), v) / tl.where(total > 0, total, 1.0)[:, None]
        store_rows(out_ptr, out, q_row, num_rows, H * DV, head * DV, DV, BLOCK, BLOCK_DV)
        i = tl.arange(0, BLOCK)
        stat = (q_row + i) * H + head
        store_softmax_stats(stats_ptr, num_stats, stat, i < num_rows, maximum, total, False)
    if OVERLAP:
        cuda.gdc_wait()


@triton.jit
def backward_short_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D], rows Q_STRIDE apart
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    grad_q_ptr,  # [ΣLq, H, D]
    grad_k_ptr,  # [ΣLk, Hk, D], rows GRAD_K_STRIDE apart
    grad_v_ptr,  # [ΣLk, Hk, Dv], rows GRAD_V_STRIDE apart
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    factor,  # |scale| · log2(e), rounded once
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    GRAD_K_STRIDE: tl.constexpr,
    GRAD_V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One key head of one sample, if that has at most ``BLOCK`` rows on both sides."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    sample, kv_head = tl.program_id(0) // HK, tl.program_id(0) % HK
    q_row, num_rows, kv_row, num_keys, visible = _locate_sample(
        sample, q_offsets_ptr, kv_offsets_ptr, CAUSAL, BLOCK
    )
    if (num_rows <= BLOCK) & (num_keys <= BLOCK) & (num_rows + num_keys > 0):
        # None of a side without the other: what is infinite there has a gradient of zero, too.
        rows, keys = tl.where(num_keys > 0, num_rows, 0), tl.where(num_rows > 0, num_keys, 0)
        k = load_rows(k_ptr, kv_row, keys, K_STRIDE, kv_head * D, D, BLOCK, BLOCK_D, True)
        v = load_rows(v_ptr, kv_row, keys, V_STRIDE, kv_head * DV, DV, BLOCK, BLOCK_DV, True)
        acc_k = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        acc_v = tl.zeros([BLOCK, BLOCK_DV], tl.float32)
        for member in range(H // HK):
            head = kv_head * (H // HK) + member
            q = load_rows(q_ptr, q_row, rows, Q_STRIDE, head * D, D, BLOCK, BLOCK_D, True)
            grad_out = load_rows(
                grad_out_ptr, q_row, rows, H * DV, head * DV, DV, BLOCK, BLOCK_DV, True
            )
            products = tl.dot(-q if NEGATIVE else q, tl.trans(k))  # [BLOCK, BLOCK]
            nothing = tl.full([BLOCK], -float("inf"), tl.float32)
            p, _, _, total = online_softmax(
                products, factor, 0.0, visible, nothing, tl.zeros([BLOCK], tl.float32), False, True
            )
            p /= tl.where(total != 0, total, 1.0)[:, None]
            acc_v = tl.dot(tl.trans(p.to(grad_out.dtype)), grad_out, acc_v)
            dp = tl.dot(grad_out, tl.trans(v))
            delta = mean_grad(p, dp, visible, tl.zeros([BLOCK], tl.float32), True, 1)
            ds = (p * (dp - delta[:, None])).to(k.dtype)
            acc_k = tl.dot(tl.trans(ds), q, acc_k)
            grad_q = tl.dot(ds, k) * scale
            store_rows(grad_q_ptr, grad_q, q_row, num_rows, H * D, head * D, D, BLOCK, BLOCK_D)
        store_rows(
            grad_k_ptr,
            acc_k * scale,
            kv_row,
            num_keys,
            GRAD_K_STRIDE,
            kv_head * D,
            D,
            BLOCK,
            BLOCK_D,
        )
        store_rows(
            grad_v_ptr, acc_v, kv_row, num_keys, GRAD_V_STRIDE, kv_head * DV, DV, BLOCK, BLOCK_DV
        )
    if OVERLAP:
        cuda.gdc_wait()
