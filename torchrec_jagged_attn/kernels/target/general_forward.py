"""Forward of target attention in Triton, for any call.

    out_r = Σ_n p_rn · x_n          p_rn = softmax_n(scale · q_r · x_n + bias_rn)

A program computes one block of query rows over one chunk of their sample's history, by an online
softmax. The history is read once for each block of query rows: N·D·e bytes, 4·N·R·D FLOPs. Its rows
are on the M side of the products, which they fill; few query rows would not.

Samples of one chunk are done then. For others, ``general_combine.py`` sums up the chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.biases import load_bias
from torchrec_jagged_attn.kernels.common.softmax import LOG2E, online_softmax_update, store_stats
from torchrec_jagged_attn.kernels.target.schedule import (
    SHARED,
    find_work,
    load_queries,
    query_rows,
    rows_of_slot,
    store_outputs,
    store_queries,
)

__all__ = ["forward_kernel"]


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def forward_kernel(
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H], or of PRIOR weights [N]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    residual_ptr,  # [rows, D]: fp32 output minus its rounded value; None where nobody asks
    stats_ptr,  # [2, rows] fp32
    sums_ptr,  # [slots, rows_of_slot, D] fp32
    sums_stats_ptr,  # [slots, 2, rows_of_slot] fp32: maximum and total
    offsets_ptr,  # [B + 1]
    query_offsets_ptr,  # [B + 1], where queries are JAGGED
    num_samples,
    num_targets,
    num_rows,
    num_slots,
    history_stride,
    scale,
    LAYOUT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    PRIOR: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One block of query rows over one chunk of its sample's history."""
    busy, sample, block, begin, end, slot = find_work(
        offsets_ptr, query_offsets_ptr, num_samples, num_targets, num_slots,
        LAYOUT, H, BLOCK_R, CHUNK, SLOT, False,
    )  # fmt: skip
    if not busy:
        return
    first, count = query_rows(query_offsets_ptr, sample, num_targets, LAYOUT, H)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    q = load_queries(query_ptr, 0 if LAYOUT == SHARED else first, r, count, d, D)

    index = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)  # so that history fills the M side of products
    total = tl.zeros([BLOCK_R], tl.float32)
    maximum = total - float("inf")
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        n = (start + index)[:, None]
        visible = (index < (end - start).to(tl.int32))[:, None]
        x_ptrs = history_ptr + n * history_stride + d[None, :]
        x = tl.load(x_ptrs, mask=visible & (d < D)[None, :], other=0.0)
        bias = load_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
            n, visible, r[None, :], count, H, P, A, PRIOR,
        )  # fmt: skip
        p, rescale, maximum, total = online_softmax_update(
            tl.dot(x, tl.trans(q), input_precision=PRECISION),
            scale, bias, visible, maximum, total, 0, LOG2E,
        )  # fmt: skip
        acc *= rescale[None, :]
        acc = tl.dot(tl.trans(x), p.to(x.dtype), acc, input_precision=PRECISION)

    acc = tl.trans(acc)
    if slot >= 0:
        room = rows_of_slot(num_targets, LAYOUT, H, BLOCK_R)
        local = tl.arange(0, BLOCK_R)
        store_queries(sums_ptr, acc, slot * room, local, room, d, D)
        tl.store(sums_stats_ptr + slot * 2 * room + local, maximum, mask=local < room)
        tl.store(sums_stats_ptr + (slot * 2 + 1) * room + local, total, mask=local < room)
    else:
        total_or_one = tl.where(total > 0, total, 1.0)[:, None]
        exact: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
        out = tl.div_rn(acc, total_or_one) if exact else acc * (1.0 / total_or_one)
        store_outputs(out_ptr, residual_ptr, out, first, r, count, d, D)
        store_stats(stats_ptr, num_rows, first + r, r < count, maximum, total)
