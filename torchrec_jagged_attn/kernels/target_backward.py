"""Kernels of target attention, backward: see ``target_attention.py`` for what they share."""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common import LOG2E, load_stats, softmax_weights
from torchrec_jagged_attn.kernels.query_tiles import (
    SCALAR,
    WIDE,
    add_over_queries,
    add_over_rows,
    per_query,
    products,
    query_index,
    row_columns,
    row_index,
    spread,
    sum_slices,
    tile_index,
    zeros_by_query,
    zeros_of_scores,
    zeros_over_queries,
    zeros_over_rows,
)
from torchrec_jagged_attn.kernels.score_bias import (
    add_heads,
    add_to_table,
    load_bias,
    row_buckets,
)
from torchrec_jagged_attn.kernels.target_schedule import (
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
    out,
    delta,
    maximum,
    inverse,
    x,
    bias,
    visible,
    alone,
    scale,
    FORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights of the softmax, and the gradients ``p (grad_out · (x - out))`` of its scores.

    SCALAR products take the difference first: where one row has nearly all the weight, it is near
    out, and no error of the size of out remains. Others take ``grad_out · out``, in delta, off
    theirs. A row that is ``alone`` in its sample has a weight of one, whatever its score.
    """
    AXIS: tl.constexpr = 0 if FORM == WIDE else 2
    maximum, inverse = per_query(maximum, FORM), per_query(inverse, FORM)
    dots = products(q, x, FORM, PRECISION)
    p = softmax_weights(dots, scale, bias, visible, maximum, inverse, AXIS, LOG2E)
    dp = products(grad_out, x - out if FORM == SCALAR else x, FORM, PRECISION)
    ds = p * (dp - query_index(delta, FORM))
    return p, tl.where(alone, 0.0, ds)


@triton.jit
def _mean_gradient(
    grad_out, out, rest_ptr, first, r, count, d, D: tl.constexpr, FORM: tl.constexpr
):
    """``[R]``: what is to be taken off the gradients of weights."""
    exact = out.to(tl.float32)
    if rest_ptr is not None:
        exact += load_queries(rest_ptr, first, r, count, d, D).to(tl.float32)
    delta = tl.sum(grad_out.to(tl.float32) * exact, 1)
    return tl.zeros_like(delta) if FORM == SCALAR else delta


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def grad_query_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    rest_ptr,  # [rows, D]: what out was rounded by; None where it is fp32
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    delta_ptr,  # [rows] fp32, out
    sums_ptr,  # [slots, rows_of_slot, D] fp32
    residuals_ptr,  # [slots, rows_of_slot] fp32
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
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Gradient of one of several blocks of a sample's query rows, over one chunk of its history."""
    busy, sample, block, begin, end, slot = find_work(
        offsets_ptr, query_offsets_ptr, num_samples, num_targets, num_slots,
        LAYOUT, H, BLOCK_R, CHUNK, False,
    )  # fmt: skip
    first, count = query_rows(query_offsets_ptr, sample, num_targets, LAYOUT, H)
    if not busy or count <= BLOCK_R:
        return
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    q = load_queries(query_ptr, 0 if LAYOUT == SHARED else first, r, count, d, D)
    grad_out = load_queries(grad_out_ptr, first, r, count, d, D)
    out = load_queries(out_ptr, first, r, count, d, D)
    delta = _mean_gradient(grad_out, out, rest_ptr, first, r, count, d, D, FORM)
    q, grad_out = spread(q, COLUMNS, FORM), spread(grad_out, COLUMNS, FORM)
    out_columns = spread(out, COLUMNS, FORM)
    maximum, inverse = load_stats(stats_ptr, num_rows, first + r, r < count)
    alone = (end - begin == 1) & (slot < 0)

    AXIS: tl.constexpr = 0 if FORM == WIDE else 2
    index = tile_index(FORM, SLICES, BLOCK_N)
    columns = row_columns(BLOCK_D, COLUMNS, FORM)
    queries = query_index(r, FORM)
    acc = zeros_over_rows(BLOCK_R, BLOCK_D, SLICES, COLUMNS, FORM)
    residual = zeros_by_query(BLOCK_R, SLICES, FORM)  # Σ ds: zero, but for the rounding of out
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        n = start + index
        visible = index < (end - start).to(tl.int32)
        x_ptrs = history_ptr + row_index(n, FORM) * history_stride + columns
        x = tl.load(x_ptrs, mask=row_index(visible, FORM) & (columns < D), other=0.0)
        bias = load_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
            n, visible, queries, count, H, P, A,
        )  # fmt: skip
        _, ds = _score_gradients(
            q, grad_out, out_columns, delta, maximum, inverse, x, bias, visible, alone, scale,
            FORM, PRECISION,
        )  # fmt: skip
        acc = add_over_rows(acc, ds, x, FORM, PRECISION)
        residual += tl.sum(ds, AXIS)
    acc = sum_slices(acc, FORM)
    if FORM != WIDE:
        residual = tl.sum(residual, 0)
    if slot >= 0:
        room = rows_of_slot(num_targets, LAYOUT, H, BLOCK_R)
        local = tl.arange(0, BLOCK_R)
        store_queries(sums_ptr, acc, slot * room, local, room, d, D)
        tl.store(residuals_ptr + slot * room + local, residual)
    else:
        # A delta larger by the residual would have made it zero, and acc less by its share of out.
        delta += residual
        acc -= residual[:, None] * out.to(tl.float32)
        store_queries(grad_query_ptr, acc * scale, first, r, count, d, D)
    if tl.program_id(0) >= num_slots:  # the first chunk
        tl.store(delta_ptr + first + r, delta, mask=r < count)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def grad_history_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    bias_ptr,  # [N, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    rest_ptr,  # [rows, D]: what out was rounded by; None where it is fp32
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    delta_ptr,  # [rows] fp32, unless ONE_BLOCK
    grad_history_ptr,  # [N, D]
    grad_bias_ptr,  # [N, H]
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
    PRECISION: tl.constexpr,
    FORM: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ONE_TARGET: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Gradients of one chunk of a sample's history and of its biases, over all its query rows.

    Where ONE_BLOCK holds all query rows of a sample, their gradient, too; samples with more of them
    are left alone then, and else those with fewer.
    """
    busy, sample, _, begin, end, slot = find_work(
        offsets_ptr, query_offsets_ptr, num_samples, num_targets, num_slots,
        LAYOUT, H, BLOCK_R, CHUNK, True,
    )  # fmt: skip
    first, count = query_rows(query_offsets_ptr, sample, num_targets, LAYOUT, H)
    if not busy or (count <= BLOCK_R) != ONE_BLOCK:
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
        delta = _mean_gradient(grad_out, out, rest_ptr, first, r, count, d, D, FORM)
        q, grad_out = spread(q, COLUMNS, FORM), spread(grad_out, COLUMNS, FORM)
        out = spread(out, COLUMNS, FORM)
        maximum, inverse = load_stats(stats_ptr, num_rows, first + r, r < count)
        acc_query = zeros_over_rows(BLOCK_R, BLOCK_D, SLICES, COLUMNS, FORM)

    index = tile_index(FORM, SLICES, BLOCK_N)
    columns = row_columns(BLOCK_D, COLUMNS, FORM)
    heads_index = query_index(h, FORM)
    if P > 0:
        grad_position_bias = tl.zeros([BLOCK_P, BLOCK_H], tl.float32)
    if A > 0:
        grad_age_bias = tl.zeros([BLOCK_A, BLOCK_H], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        n = start + index
        visible = index < (end - start).to(tl.int32)
        x_rows = row_index(n, FORM)
        x_mask = row_index(visible, FORM) & (columns < D)
        x = tl.load(history_ptr + x_rows * history_stride + columns, mask=x_mask, other=0.0)
        grad_x = zeros_over_queries(BLOCK_N, BLOCK_D, SLICES, COLUMNS, FORM)
        heads = zeros_of_scores(BLOCK_N, BLOCK_H, SLICES, FORM)
        if ONE_BLOCK:
            bias = load_bias(
                bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
                n, visible, query_index(r, FORM), count, H, P, A,
            )  # fmt: skip
            p, ds = _score_gradients(
                q, grad_out, out, delta, maximum, inverse, x, bias, visible, alone, scale,
                FORM, PRECISION,
            )  # fmt: skip
            acc_query = add_over_rows(acc_query, ds, x, FORM, PRECISION)
            grad_x = add_over_queries(grad_x, p, grad_out, FORM, PRECISION)
            grad_x = add_over_queries(grad_x, ds * scale, q, FORM, PRECISION)
            heads = add_heads(heads, ds, r, h, x.dtype, H, FORM, ONE_TARGET)
        else:
            for r_start in range(0, count, BLOCK_R):
                rows = r_start + r
                q = load_queries(query_ptr, query_first, rows, count, d, D)
                grad_out = load_queries(grad_out_ptr, first, rows, count, d, D)
                out = load_queries(out_ptr, first, rows, count, d, D)
                q, grad_out = spread(q, COLUMNS, FORM), spread(grad_out, COLUMNS, FORM)
                out = spread(out, COLUMNS, FORM)
                delta = tl.load(delta_ptr + first + rows, mask=rows < count, other=0.0)
                maximum, inverse = load_stats(stats_ptr, num_rows, first + rows, rows < count)
                bias = load_bias(
                    bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
                    n, visible, query_index(rows, FORM), count, H, P, A,
                )  # fmt: skip
                p, ds = _score_gradients(
                    q, grad_out, out, delta, maximum, inverse, x, bias, visible, alone, scale,
                    FORM, PRECISION,
                )  # fmt: skip
                grad_x = add_over_queries(grad_x, p, grad_out, FORM, PRECISION)
                grad_x = add_over_queries(grad_x, ds * scale, q, FORM, PRECISION)
                heads = add_heads(heads, ds, rows, h, x.dtype, H, FORM, ONE_TARGET)
        tl.store(grad_history_ptr + x_rows * D + columns, grad_x, mask=x_mask)
        if grad_bias_ptr is not None:
            mask = visible & (heads_index < H)
            tl.store(grad_bias_ptr + n * H + heads_index, heads, mask=mask)
        if P > 0 or A > 0:
            flat = start + tl.arange(0, BLOCK_N)
            of_position, of_age = row_buckets(
                flat, flat < end, offsets_ptr, timestamps_ptr, sample, P, A
            )
            if P > 0:
                grad_position_bias = add_to_table(
                    grad_position_bias, of_position, heads, x.dtype, FORM, BLOCK_P
                )
            if A > 0:
                grad_age_bias = add_to_table(grad_age_bias, of_age, heads, x.dtype, FORM, BLOCK_A)

    if ONE_BLOCK:
        grad_query = sum_slices(acc_query, FORM)
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
