"""Backward of target attention by a warpgroup, on Hopper: 9 to 64 query rows in half precision.

Weights and gradients of scores are ``[rows, queries]``, with history rows on the M side, as in
``warpgroup_forward.py``. From registers they make the gradients of history rows. By way of shared
memory they make those of queries, ``[width, queries]``, and of tables, ``[buckets, queries]``.
History rows are read once and their gradients written once: 2·N·D·e bytes, 10·N·R·D FLOPs.

The last program of a sample combines its chunks: see ``warp_combine.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchrec_jagged_attn.kernels.common.gluon import as_rows, products_by_group
from torchrec_jagged_attn.kernels.target.warp_combine import combine_queries, is_last_chunk
from torchrec_jagged_attn.kernels.target.warp_parts import (
    LOG2E,
    find_listed_chunk,
    load_rows,
    row_buckets,
    row_layout,
    split,
)
from torchrec_jagged_attn.kernels.target.warpgroup_parts import (
    PROGRAMS,
    add_biases,
    copy_queries,
    open_ring,
    place_of,
    store_transposed,
    turn_ring,
    wait_for_tile,
    warpgroup_layout,
)

__all__ = ["BUCKETS", "backward_kernel"]

BUCKETS = gl.constexpr(64)  # of a table, at most
PARTS = gl.constexpr(2)  # of bf16: gradients of scores that are added to a table


@gluon.jit
def _add_to_table(table, buckets, parts):
    """Add gradients of scores, in ``parts`` ``[PARTS, rows, queries]``, to their buckets."""
    mma: gl.constexpr = table.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b = gl.arange(0, BUCKETS, gl.SliceLayout(1, left))[:, None]
    buckets = gl.convert_layout(buckets, gl.SliceLayout(0, left))[None, :]
    choice = (buckets == b).to(gl.int16).to(gl.bfloat16)
    for part in gl.static_range(PARTS):
        table = warpgroup_mma(choice, parts.index(PARTS - 1 - part), table, is_async=True)
    table, choice = warpgroup_mma_wait(0, deps=(table, choice))
    return table


@gluon.jit
def _store_table(table, ptr, COUNT: gl.constexpr, H: gl.constexpr):
    """Store ``[COUNT, H]``: sums over the query rows of each head."""
    layout: gl.constexpr = table.type.layout
    b = gl.arange(0, BUCKETS, gl.SliceLayout(1, layout))
    r = gl.arange(0, table.shape[1], gl.SliceLayout(0, layout))[None, :]
    for head in gl.static_range(H):
        of_head = gl.sum(gl.where(r % H == head, table, 0.0), 1)
        gl.store(ptr + (b * H + head), of_head, mask=b < COUNT)


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def backward_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    biases,  # pointers in an ``arguments.Biases``
    out_ptr,  # [rows, D]
    residual_ptr,  # [rows, D]: fp32 output minus its rounded value
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    grad_prior_ptr,  # [N] fp32, of logarithms of PRIOR weights
    grad_tables_ptr,  # [programs, P + A, H] fp32, zeros
    sums_ptr,  # [slots, count, D] fp32
    slots_ptr,  # [2, slots] of list_slots_kernel
    offsets_ptr,  # [B + 1]
    history_desc,  # of [N, D]: see ``warpgroup_parts.place_of``
    grad_history_desc,  # of [N, D]
    num_samples,
    num_targets,
    num_rows,
    num_slots,
    scale,
    SHARED: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    A: gl.constexpr,
    PRIOR: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Gradients of one chunk of a sample's history, of all its query rows and of tables."""
    mma: gl.constexpr = products_by_group(BLOCK_R, gl.num_warps())
    of_columns: gl.constexpr = products_by_group(COLUMNS, gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, of_columns, 2)
    by_query: gl.constexpr = gl.SliceLayout(0, mma)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    busy, sample, first, length, begin, end, slot, chunks = find_listed_chunk(
        slots_ptr, offsets_ptr, num_samples, num_slots, CHUNK, OVERLAP, PROGRAMS
    )
    if busy:
        if grad_prior_ptr is not None:
            grad_prior_ptr += first
        count = num_targets * H
        row = sample.to(gl.int64) * count
        of_queries: gl.constexpr = [BLOCK_R, BLOCK_D]
        queries = gl.allocate_shared_memory(dtype, of_queries, warpgroup_layout(BLOCK_D))
        grads = gl.allocate_shared_memory(dtype, of_queries, warpgroup_layout(BLOCK_D))
        copy_queries(queries, query_ptr if SHARED else query_ptr + row * D, count, D)
        copy_queries(grads, grad_out_ptr + row * D, count, D)
        async_copy.commit_group()
        last = (first + end).to(gl.int32)
        ring = open_ring(history_desc, last, end - begin, NUM_STAGES)
        of_tile = gl.allocate_shared_memory(
            dtype, grad_history_desc.block_type.shape, grad_history_desc.layout
        )
        if P + A > 0:
            parts = gl.allocate_shared_memory(
                gl.bfloat16, [PARTS, BLOCK_N, BLOCK_R], warpgroup_layout(BLOCK_R)
            )
        of_scores = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_R], warpgroup_layout(BLOCK_R))

        in_memory: gl.constexpr = row_layout(BLOCK_D, dtype, gl.num_warps())
        grad_out = load_rows(grad_out_ptr, row, count, 0, of_queries, in_memory, D).to(gl.float32)
        out = load_rows(out_ptr, row, count, 0, of_queries, in_memory, D).to(gl.float32)
        out += load_rows(residual_ptr, row, count, 0, of_queries, in_memory, D).to(gl.float32)
        delta = gl.convert_layout(gl.sum(grad_out * out, 1), by_query)[None, :]
        r = gl.arange(0, BLOCK_R, by_query)
        maximum = gl.load(stats_ptr + row + r, mask=r < count, other=0.0)
        inverse = gl.load(stats_ptr + num_rows + row + r, mask=r < count, other=0.0)
        shift = (maximum * LOG2E - gl.log2(inverse))[None, :]  # weights beyond count are zero
        alone = (end - begin == 1) & (slot < 0)

        index = gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
        zeros = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, mma)
        no_columns = gl.zeros([BLOCK_N, COLUMNS], gl.float32, of_columns)
        acc = gl.zeros([BLOCK_D, BLOCK_R], gl.float32, mma)
        position_table = gl.zeros([BUCKETS, BLOCK_R], gl.float32, mma)
        age_table = position_table
        async_copy.wait_group(0)
        fence_async_shared()
        for tile in range(gl.cdiv(end - begin, BLOCK_N)):
            start = begin + tile * BLOCK_N
            x = wait_for_tile(ring, tile, history_desc, end - start)
            dots = warpgroup_mma(x, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(x, grads.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dots, dp = warpgroup_mma_wait(0, deps=(dots, dp))
            tma.store_wait(0)
            turn_ring(ring, tile, history_desc, last, end - start)
            n = start + index
            visible = (n < end)[:, None]
            scores = dots * (scale * LOG2E)
            if (biases.bias is not None) or P + A > 0:
                scores = add_biases(
                    scores, biases, start, end, first, length, count, H, P, A, PRIOR,
                )  # fmt: skip
            p = gl.where(visible, gl.exp2(scores - shift), 0.0)
            ds = gl.where(alone, 0.0, p * (dp - delta))
            of_scores.store(ds.to(dtype))
            if grad_prior_ptr is not None:
                gl.store(grad_prior_ptr + n, gl.sum(ds, 1), mask=n < end)
            if P + A > 0:
                of_parts = split(ds, PARTS)
                for part in gl.static_range(PARTS):
                    parts.index(part).store(of_parts[part])
            fence_async_shared()
            acc = warpgroup_mma(x.permute((1, 0)), of_scores, acc, is_async=True)
            if P + A > 0:
                of_position, of_age = row_buckets(n, biases, first, length, P, A)
                if P > 0:
                    position_table = _add_to_table(position_table, of_position, parts)
                if A > 0:
                    age_table = _add_to_table(age_table, of_age, parts)
            weights = gl.convert_layout(p.to(dtype), left)
            of_dots = gl.convert_layout((ds * scale).to(dtype), left)
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                grad_x = warpgroup_mma(
                    weights, grads.slice(column, COLUMNS, 1), no_columns, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                grad_x = warpgroup_mma(
                    of_dots, queries.slice(column, COLUMNS, 1), grad_x, is_async=True
                )
                grad_x, weights, of_dots, acc = warpgroup_mma_wait(
                    0, deps=(grad_x, weights, of_dots, acc)
                )
                as_rows(of_tile).slice(column, COLUMNS, 1).store(grad_x.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(grad_history_desc, place_of(last, end - start), of_tile)
        tma.store_wait(0)

        if slot >= 0:
            column = gl.arange(0, BLOCK_D, gl.SliceLayout(1, mma))[:, None]
            ptrs = sums_ptr + slot.to(gl.int64) * count * D + (r[None, :] * D + column)
            gl.store(ptrs, acc, mask=(r < count)[None, :] & (column < D))
            first_slot = (first // CHUNK).to(gl.int32)
            if is_last_chunk(slots_ptr, num_slots, first_slot, chunks):
                combine_queries(
                    sums_ptr, grad_query_ptr, row, count, first_slot, chunks, scale, D, BLOCK_D,
                    BLOCK_R,
                )  # fmt: skip
        elif SHARED:
            column = gl.arange(0, BLOCK_D, gl.SliceLayout(1, mma))[:, None]
            ptrs = grad_query_ptr + row * D + (r[None, :] * D + column)
            gl.store(ptrs, acc * scale, mask=(r < count)[None, :] & (column < D))
        else:
            store_transposed(grad_query_ptr + row * D, (acc * scale).to(dtype), queries, count, D)
        if P + A > 0:
            ptr = grad_tables_ptr + gl.program_id(0).to(gl.int64) * ((P + A) * H)
            _store_table(position_table, ptr, P, H)
            _store_table(age_table, ptr + P * H, A, H)
