"""Kernels of target attention, forward: see ``target_attention.py`` for what they share."""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common import (
    LOG2E,
    online_softmax_update,
    store_stats,
)
from torchrec_jagged_attn.kernels.query_tiles import (
    WIDE,
    add_over_rows,
    merge_slices,
    products,
    query_index,
    row_columns,
    row_index,
    spread,
    tile_index,
    zeros_by_query,
    zeros_over_rows,
)
from torchrec_jagged_attn.kernels.score_bias import load_bias
from torchrec_jagged_attn.kernels.target_schedule import (
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
    bias_ptr,  # [N, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    rest_ptr,  # [rows, D]: what out was rounded by; None where it is fp32
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
    """One block of query rows over one chunk of its sample's history."""
    busy, sample, block, begin, end, slot = find_work(
        offsets_ptr, query_offsets_ptr, num_samples, num_targets, num_slots,
        LAYOUT, H, BLOCK_R, CHUNK, False,
    )  # fmt: skip
    if not busy:
        return
    first, count = query_rows(query_offsets_ptr, sample, num_targets, LAYOUT, H)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    q = load_queries(query_ptr, 0 if LAYOUT == SHARED else first, r, count, d, D)
    q = spread(q, COLUMNS, FORM)

    AXIS: tl.constexpr = 0 if FORM == WIDE else 2
    index = tile_index(FORM, SLICES, BLOCK_N)
    columns = row_columns(BLOCK_D, COLUMNS, FORM)
    queries = query_index(r, FORM)
    acc = zeros_over_rows(BLOCK_R, BLOCK_D, SLICES, COLUMNS, FORM)
    total = zeros_by_query(BLOCK_R, SLICES, FORM)
    maximum = total - float("inf")
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        n = start + index
        visible = index < (end - start).to(tl.int32)
        x_ptrs = history_ptr + row_index(n, FORM) * history_stride + columns
        x = tl.load(x_ptrs, mask=row_index(visible, FORM) & (columns < D), other=0.0)
        bias = load_bias(
            bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, offsets_ptr, sample,
            n, visible, queries, count, H, P, A,
        )  # fmt: skip
        p, rescale, maximum, total = online_softmax_update(
            products(q, x, FORM, PRECISION), scale, bias, visible, maximum, total, AXIS, LOG2E
        )
        acc = add_over_rows(acc * tl.expand_dims(rescale, AXIS), p, x, FORM, PRECISION)

    acc, maximum, total = merge_slices(acc, maximum, total, FORM)
    if slot >= 0:
        room = rows_of_slot(num_targets, LAYOUT, H, BLOCK_R)
        local = tl.arange(0, BLOCK_R)
        store_queries(sums_ptr, acc, slot * room, local, room, d, D)
        tl.store(sums_stats_ptr + slot * 2 * room + local, maximum, mask=local < room)
        tl.store(sums_stats_ptr + (slot * 2 + 1) * room + local, total, mask=local < room)
    else:
        total_or_one = tl.where(total > 0, total, 1.0)[:, None]
        if rest_ptr is None:
            out = tl.div_rn(acc, total_or_one)
        else:
            out = acc * (1.0 / total_or_one)
        store_outputs(out_ptr, rest_ptr, out, first, r, count, d, D)
        store_stats(stats_ptr, num_rows, first + r, r < count, maximum, total)
