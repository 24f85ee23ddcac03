"""Backward of target attention in Triton, for any call.

With p the weights of the softmax, ``dp_rn = ∂out_r · x_n`` and ``delta_r = ∂out_r · out_r``:

    ds_rn = p_rn · (dp_rn - delta_r)        ∂q_r = scale · Σ_n ds_rn · x_n
    ∂bias_n = Σ_r ds_rn, by head            ∂x_n = Σ_r p_rn · ∂out_r + scale · ds_rn · q_r

``grad_history_kernel`` computes all of it for samples whose query rows one block holds, in half
precision: it reads x once and writes ∂x once, 2·N·D·e bytes and 10·N·R·D FLOPs. Otherwise
``grad_query_kernel`` computes ∂q and an exact delta first, and reads x once more: 14·N·R·D FLOPs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.biases import (
    add_heads,
    add_to_table,
    load_bias,
    row_buckets,
)
from torchrec_jagged_attn.kernels.common.softmax import LOG2E, load_stats, softmax_weights
from torchrec_jagged_attn.kernels.target.schedule import (
    SHARED,
    find_work,
    load_queries,
    query_rows,
    rows_of_slot,
    store_queries,
)

__all__ = ["grad_history_kernel", "grad_query_kernel"]


@triton.jit
def _score_gradients(
    q,
    grad_out,
    delta,
    maximum,
    inverse,
    x,
    bias,
    visible,
    alone,
    scale,
    PRECISION: tl.constexpr,
):
    """Weights of the softmax ``[rows, queries]``, and the gradients of its scores.

    A row that is ``alone`` in its sample has a weight of one, whatever its score.
    """
    dots = tl.dot(x, tl.trans(q), input_precision=PRECISION)
    p = softmax_weights(dots, scale, bias, visible, maximum, inverse, 0, LOG2E)
    dp = tl.dot(x, tl.trans(grad_out), input_precision=PRECISION)
    return p, tl.where(alone, 0.0, p * (dp - delta[None, :]))


@triton.jit
def _mean_gradient(grad_out, residual_ptr, out, first, r, count, d, D: tl.constexpr):
    """``delta``, ``[BLOCK_R]``: the mean of the gradients of weights."""
    exact = out.to(tl.float32)
    if residual_ptr is not None:
        exact += load_queries(residual_ptr, first, r, count, d, D).to(tl.float32)
    return tl.sum(grad_out.to(tl.float32) * exact, 1)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def grad_query_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H], or of PRIOR weights [N]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    residual_ptr,  # [rows, D]: fp32 output minus its rounded value; None in fp32
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    delta_ptr,  # [rows] fp32, out
    sums_ptr,  # [slots, rows_of_slot, D] fp32
    ds_totals_ptr,  # [slots, rows_of_slot] fp32
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
    SINGLE_PASS: tl.constexpr,
):
    """Gradient of one block of a sample's query rows, over one chunk of its history.

    Where SINGLE_PASS, the other kernel computes samples of one block.
    """
    busy, sample, block, begin, end, slot = find_work(
        offsets_ptr, query_offsets_ptr, num_samples, num_targets, num_slots,
        LAYOUT, H, BLOCK_R, CHUNK, SLOT, False,
    )  # fmt: skip
    first, count = query_rows(query_offsets_ptr, sample, num_targets, LAYOUT, H)
    if not busy or (SINGLE_PASS and count <= BLOCK_R):
        return
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    q = load_queries(query_ptr, 0 if LAYOUT == SHARED else first, r, count, d, D)
    grad_out = load_queries(grad_out_ptr, first, r, count, d, D)
    out = load_queries(out_ptr, first, r, count, d, D)
    delta = _mean_gradient(grad_out, residual_ptr, out, first, r, count, d, D)
    maximum, inverse = load_stats(stats_ptr, num_rows, first + r, r < count)
    alone = (end - begin == 1) & (slot < 0)

    index = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    ds_total = tl.zeros([BLOCK_R], tl.float32)  # zero, but for the rounding of out
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        n = (start + index)[:, None]
        visible = (index < (end - start).to(tl.int32))[:, None]
        x_ptrs = history_ptr + n * history_stride + d[None, :]
        x = tl.load(x_ptrs, mask=visible & (d < D)[None, :], other=0.0)
        bias = load_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
            n, visible, r[None, :], count, H, P, A, PRIOR,
        )  # fmt: skip
        _, ds = _score_gradients(
            q, grad_out, delta, maximum, inverse, x, bias, visible, alone, scale, PRECISION
        )
        acc = tl.dot(tl.trans(x), ds.to(x.dtype), acc, input_precision=PRECISION)
        ds_total += tl.sum(ds, 0)
    acc = tl.trans(acc)
    if slot >= 0:
        room = rows_of_slot(num_targets, LAYOUT, H, BLOCK_R)
        local = tl.arange(0, BLOCK_R)
        store_queries(sums_ptr, acc, slot * room, local, room, d, D)
        tl.store(ds_totals_ptr + slot * room + local, ds_total, mask=local < room)
    else:
        # A delta larger by ds_total would have made that zero, and acc less by ds_total · out.
        delta += ds_total
        acc -= ds_total[:, None] * out.to(tl.float32)
        store_queries(grad_query_ptr, acc * scale, first, r, count, d, D)
    if tl.program_id(0) >= num_slots:  # the first chunk
        tl.store(delta_ptr + first + r, delta, mask=r < count)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def grad_history_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H], or of PRIOR weights [N]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    residual_ptr,  # [rows, D]: fp32 output minus its rounded value; None in fp32
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    delta_ptr,  # [rows] fp32, unless ONE_BLOCK
    grad_history_ptr,  # [N, D]
    grad_bias_ptr,  # [N, H], or of logarithms of PRIOR weights [N]
    grad_tables_ptr,  # [programs, P + A, H] fp32
    sums_ptr,  # [slots, rows_of_slot, D] fp32
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
    SINGLE_PASS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ONE_TARGET: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Gradients of one chunk of a sample's history and of its biases, over all its query rows.

    Where ONE_BLOCK, it serves samples whose query rows one block holds, and computes their
    gradients, too; else it serves the other samples.
    """
    busy, sample, _, begin, end, slot = find_work(
        offsets_ptr, query_offsets_ptr, num_samples, num_targets, num_slots,
        LAYOUT, H, BLOCK_R, CHUNK, SLOT, True,
    )  # fmt: skip
    first, count = query_rows(query_offsets_ptr, sample, num_targets, LAYOUT, H)
    if not busy or (SINGLE_PASS and count <= BLOCK_R) != ONE_BLOCK:
        return
    query_first = 0 if LAYOUT == SHARED else first
    alone = (end - begin == 1) & (slot < 0)
    d = tl.arange(0, BLOCK_D)
    h = tl.arange(0, BLOCK_H)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    if ONE_BLOCK:
        q = load_queries(query_ptr, query_first, r, count, d, D)
        grad_out = load_queries(grad_out_ptr, first, r, count, d, D)
        out = load_queries(out_ptr, first, r, count, d, D)
        delta = _mean_gradient(grad_out, residual_ptr, out, first, r, count, d, D)
        maximum, inverse = load_stats(stats_ptr, num_rows, first + r, r < count)
        acc_query = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)

    index = tl.arange(0, BLOCK_N)
    if P > 0:
        grad_position_bias = tl.zeros([BLOCK_P, BLOCK_H], tl.float32)
    if A > 0:
        grad_age_bias = tl.zeros([BLOCK_A, BLOCK_H], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        n = (start + index)[:, None]
        visible = (index < (end - start).to(tl.int32))[:, None]
        x_mask = visible & (d < D)[None, :]
        x = tl.load(history_ptr + n * history_stride + d[None, :], mask=x_mask, other=0.0)
        grad_x = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        heads = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
        if ONE_BLOCK:
            bias = load_bias(
                bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
                n, visible, r[None, :], count, H, P, A, PRIOR,
            )  # fmt: skip
            p, ds = _score_gradients(
                q, grad_out, delta, maximum, inverse, x, bias, visible, alone, scale, PRECISION
            )
            acc_query = tl.dot(tl.trans(x), ds.to(x.dtype), acc_query, input_precision=PRECISION)
            grad_x = tl.dot(p.to(x.dtype), grad_out, grad_x, input_precision=PRECISION)
            grad_x = tl.dot((ds * scale).to(x.dtype), q, grad_x, input_precision=PRECISION)
            heads = add_heads(heads, ds, r, h, x.dtype, H, ONE_TARGET)
        else:
            for r_start in range(0, count, BLOCK_R):
                rows = r_start + r
                q = load_queries(query_ptr, query_first, rows, count, d, D)
                grad_out = load_queries(grad_out_ptr, first, rows, count, d, D)
                delta = tl.load(delta_ptr + first + rows, mask=rows < count, other=0.0)
                maximum, inverse = load_stats(stats_ptr, num_rows, first + rows, rows < count)
                bias = load_bias(
                    bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
                    n, visible, rows[None, :], count, H, P, A, PRIOR,
                )  # fmt: skip
                p, ds = _score_gradients(
                    q, grad_out, delta, maximum, inverse, x, bias, visible, alone, scale, PRECISION
                )
                grad_x = tl.dot(p.to(x.dtype), grad_out, grad_x, input_precision=PRECISION)
                grad_x = tl.dot((ds * scale).to(x.dtype), q, grad_x, input_precision=PRECISION)
                heads = add_heads(heads, ds, rows, h, x.dtype, H, ONE_TARGET)
        tl.store(grad_history_ptr + n * D + d[None, :], grad_x, mask=x_mask)
        if (grad_bias_ptr is not None) and PRIOR:
            tl.store(grad_bias_ptr + n, tl.sum(heads, 1)[:, None], mask=visible)
        elif grad_bias_ptr is not None:
            mask = visible & (h < H)[None, :]
            tl.store(grad_bias_ptr + n * H + h[None, :], heads, mask=mask)
        if P > 0 or A > 0:
            flat = start + tl.arange(0, BLOCK_N)
            of_position, of_age = row_buckets(
                flat, flat < end, offsets_ptr, timestamps_ptr, sample, P, A
            )
            if P > 0:
                grad_position_bias = add_to_table(
                    grad_position_bias, of_position, heads, x.dtype, BLOCK_P
                )
            if A > 0:
                grad_age_bias = add_to_table(grad_age_bias, of_age, heads, x.dtype, BLOCK_A)

    if ONE_BLOCK:
        grad_query = tl.trans(acc_query)
        if slot >= 0:
            room = rows_of_slot(num_targets, LAYOUT, H, BLOCK_R)
            store_queries(sums_ptr, grad_query, slot * room, r, room, d, D)
        else:
            store_queries(grad_query_ptr, grad_query * scale, first, r, count, d, D)
    table = tl.program_id(0).to(tl.int64) * (P + A)
    if P > 0:
        b = tl.arange(0, BLOCK_P)
        store_queries(grad_tables_ptr, grad_position_bias, table, b, P, h, H)
    if A > 0:
        b = tl.arange(0, BLOCK_A)
        store_queries(grad_tables_ptr, grad_age_bias, table + P, b, A, h, H)
