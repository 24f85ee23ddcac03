"""Backward of target attention by single warps: see ``warp_tiles.py``.

Gradients of outputs and queries lie one above the other as one operand of 16 rows: with the weights
and the gradients of scores side by side, one product of the tensor cores' full depth makes the
gradient of a history row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.kernels.common import LOG2E
from torchrec_jagged_attn.kernels.warp_tiles import (
    BLOCK_R,
    LEFT,
    MMA,
    RIGHT,
    copy_tile,
    find_chunk,
    load_bias,
    load_columns,
    ring_layout,
    row_buckets,
    row_layout,
    store_rows,
)

__all__ = ["backward_kernel"]


@gluon.jit
def _side_by_side(a, b):
    """``[a | b]``, as left operand; no lane needs what another has."""
    joined = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(joined, [a.shape[0], 2 * a.shape[1]]), LEFT)


@gluon.jit
def _add_to_table(table, buckets, visible, rounded, left, FIRST: gl.constexpr):
    """Add rows (as right operands: rounded, and what that left) to their ``buckets`` of a table.

    ``table`` is ``[blocks, 16, 8]`` in shared memory; its buckets begin at block FIRST. Of the rows
    of a tile, near in time, few blocks have any.
    """
    block = buckets // 16
    lowest = gl.min(gl.where(visible, block, 2**30), 0)
    highest = gl.max(gl.where(visible, block, -1), 0)
    b = gl.arange(0, 16, gl.SliceLayout(1, LEFT))
    for at in range(lowest, highest + 1):
        in_bucket = (b[:, None] + at * 16 == buckets[None, :]) & visible[None, :]
        choice = in_bucket.to(gl.int16).to(rounded.dtype)
        rows = table.index(FIRST + at)
        sums = mma_v2(choice, left, rows.load(MMA))
        rows.store(mma_v2(choice, rounded, sums))


@gluon.jit
def _store_table(
    table, ptr, count, buckets: gl.constexpr, FIRST: gl.constexpr, BLOCKS: gl.constexpr
):
    """``[buckets, count]`` of the ``BLOCKS`` blocks from FIRST on."""
    b = gl.arange(0, 16, gl.SliceLayout(1, MMA))
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
    for at in gl.static_range(BLOCKS):
        bucket = at * 16 + b
        mask = (bucket < buckets)[:, None] & (r < count)[None, :]
        ptrs = ptr + bucket[:, None] * count + r[None, :]
        gl.store(ptrs, table.index(FIRST + at).load(MMA), mask=mask)


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def backward_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows STRIDE apart
    bias_ptr,  # [N, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    rest_ptr,  # [rows, D]: what out was rounded by
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    grad_history_ptr,  # [N, D]
    grad_bias_ptr,  # [N, H], where a sample has one target
    grad_tables_ptr,  # [programs, P + A, count] fp32
    sums_ptr,  # [slots, count, D] fp32
    offsets_ptr,  # [B + 1]
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
    STRIDE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Gradients of one chunk of a sample's history, of its biases and of all its query rows."""
    busy, sample, first, length, begin, end, slot = find_chunk(
        offsets_ptr, num_samples, num_slots, CHUNK
    )
    count = num_targets * H
    BLOCKS_P: gl.constexpr = (P + 15) // 16
    BLOCKS_A: gl.constexpr = (A + 15) // 16
    if P + A > 0:
        shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        table = gl.allocate_shared_memory(gl.float32, [BLOCKS_P + BLOCKS_A, 16, BLOCK_R], shared)
        for block in gl.static_range(BLOCKS_P + BLOCKS_A):
            table.index(block).store(gl.zeros([16, BLOCK_R], gl.float32, MMA))
    if busy:
        dtype: gl.constexpr = history_ptr.dtype.element_ty
        history_ptr += first * STRIDE
        grad_history_ptr += first * D
        if bias_ptr is not None:
            bias_ptr += first * H
            grad_bias_ptr += first * H
        shape: gl.constexpr = [NUM_STAGES, BLOCK_N, BLOCK_D]
        ring = gl.allocate_shared_memory(dtype, shape, ring_layout(BLOCK_D))
        for stage in gl.static_range(NUM_STAGES - 1):
            copy_tile(ring.index(stage), history_ptr, begin + stage * BLOCK_N, end, D, STRIDE)
        row = sample.to(gl.int64) * count
        query_row = row * 0 if SHARED else row
        grad_out = load_columns(grad_out_ptr, row, count, D, BLOCK_D)
        q = load_columns(query_ptr, query_row, count, D, BLOCK_D)
        both = gl.allocate_shared_memory(dtype, [2 * BLOCK_R, BLOCK_D], ring_layout(BLOCK_D))
        both.slice(0, BLOCK_R).permute((1, 0)).store(grad_out)
        both.slice(BLOCK_R, BLOCK_R).permute((1, 0)).store(q)
        out = load_columns(out_ptr, row, count, D, BLOCK_D).to(gl.float32)
        out += load_columns(rest_ptr, row, count, D, BLOCK_D).to(gl.float32)
        delta = gl.sum(grad_out.to(gl.float32) * out, 0)
        by_query: gl.constexpr = gl.SliceLayout(0, MMA)
        delta = gl.convert_layout(delta, by_query)[None, :]
        r = gl.arange(0, BLOCK_R, by_query)
        maximum = gl.load(stats_ptr + row + r, mask=r < count, other=0.0)[None, :]
        inverse = gl.load(stats_ptr + num_rows + row + r, mask=r < count, other=0.0)[None, :]
        alone = (end - begin == 1) & (slot < 0)

        COLUMNS: gl.constexpr = min(BLOCK_D, 64)
        columns: gl.constexpr = row_layout(COLUMNS)
        d = gl.arange(0, COLUMNS, gl.SliceLayout(0, columns))
        i = gl.arange(0, BLOCK_N, gl.SliceLayout(1, columns))
        index = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
        acc = gl.zeros([BLOCK_D, BLOCK_R], gl.float32, MMA)
        zeros = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, MMA)
        stage = 0
        for start in range(begin, end, BLOCK_N):
            async_copy.wait_group(NUM_STAGES - 2)
            tile = ring.index(stage)
            x = tile.load(LEFT)
            dots = mma_v2(x, q, zeros)
            dp = mma_v2(x, grad_out, zeros)
            n = start + index
            visible = (n < end)[:, None]
            of_position, of_age = row_buckets(n, first, length, timestamps_ptr, P, A)
            bias = load_bias(
                bias_ptr, position_bias_ptr, age_bias_ptr, of_position[:, None], of_age[:, None],
                n[:, None], r[None, :], visible, count, H, P, A,
            )  # fmt: skip
            p = gl.exp2((dots * scale + (bias - maximum)) * LOG2E) * inverse
            p = gl.where(visible, p, 0.0)
            ds = gl.where(alone, 0.0, p * (dp - delta))
            of_rows = _side_by_side(p.to(dtype), (ds * scale).to(dtype))
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                operand = both.slice(column, COLUMNS, 1).load(RIGHT)
                grad_x = mma_v2(of_rows, operand, gl.zeros([BLOCK_N, COLUMNS], gl.float32, MMA))
                grad_x = gl.convert_layout(grad_x.to(dtype), columns)
                mask = (i < end - start)[:, None]
                if D < BLOCK_D:
                    mask = mask & (column + d < D)[None, :]
                ptrs = grad_history_ptr + start.to(gl.int64) * D + column
                gl.store(ptrs + (i[:, None] * D + d[None, :]), grad_x, mask=mask)
            rounded = ds.to(dtype)
            weights = gl.convert_layout(rounded, RIGHT)
            acc = mma_v2(tile.permute((1, 0)).load(LEFT), weights, acc)
            if grad_bias_ptr is not None:
                mask = visible & (r < H)[None, :]
                gl.store(grad_bias_ptr + (n[:, None] * H + r[None, :]), ds, mask=mask)
            if P + A > 0:
                left = gl.convert_layout((ds - rounded.to(gl.float32)).to(dtype), RIGHT)
                of_row: gl.constexpr = gl.SliceLayout(0, LEFT)
                shown = start + gl.arange(0, BLOCK_N, of_row) < end
                if P > 0:
                    buckets = gl.convert_layout(of_position, of_row)
                    _add_to_table(table, buckets, shown, weights, left, 0)
                if A > 0:
                    buckets = gl.convert_layout(of_age, of_row)
                    _add_to_table(table, buckets, shown, weights, left, BLOCKS_P)
            ahead: gl.constexpr = NUM_STAGES - 1
            to = gl.where(stage == 0, ahead, stage - 1)
            copy_tile(ring.index(to), history_ptr, start + ahead * BLOCK_N, end, D, STRIDE)
            stage = gl.where(stage == ahead, 0, stage + 1)

        grad_query = gl.permute(acc, (1, 0))
        if slot >= 0:
            store_rows(sums_ptr, grad_query, slot.to(gl.int64) * count, count, D)
        else:
            store_rows(grad_query_ptr, grad_query * scale, row, count, D)
    if P + A > 0:
        ptr = grad_tables_ptr + gl.program_id(0).to(gl.int64) * (P + A) * count
        _store_table(table, ptr, count, P, 0, BLOCKS_P)
        _store_table(table, ptr + P * count, count, A, BLOCKS_P, BLOCKS_A)
