"""Backward of target attention by a few warps, each with 16 query rows: see ``warp_tiles.py``.

Weights and gradients of scores are put one above the other in shared memory, and so are gradients
of outputs and queries: one product makes the gradients of history rows, 16 of them to a warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.kernels.common import LOG2E
from torchrec_jagged_attn.kernels.warp_tiles import (
    copy_tile,
    find_chunk,
    load_bias,
    load_rows,
    products_by_warp,
    ring_layout,
    row_buckets,
    row_layout,
    store_rows,
)

__all__ = ["backward_kernel"]


@gluon.jit
def _add_to_table(table, buckets, visible, rounded, left, FIRST: gl.constexpr):
    """Add gradients of scores (as left operands: rounded, and what that left) to their ``buckets``.

    ``table`` is ``[blocks, BLOCK_R, 16]`` in shared memory; its buckets begin at block FIRST. Of
    the rows of a tile, near in time, few blocks have any.
    """
    right: gl.constexpr = gl.DotOperandLayout(1, rounded.type.layout.parent, 2)
    block = buckets // 16
    lowest = gl.min(gl.where(visible, block, 2**30), 0)
    highest = gl.max(gl.where(visible, block, -1), 0)
    b = gl.arange(0, 16, gl.SliceLayout(0, right))
    for at in range(lowest, highest + 1):
        in_bucket = (buckets[:, None] == b[None, :] + at * 16) & visible[:, None]
        choice = in_bucket.to(gl.int16).to(rounded.dtype)
        rows = table.index(FIRST + at)
        sums = mma_v2(left, choice, rows.load(right.parent))
        rows.store(mma_v2(rounded, choice, sums))


@gluon.constexpr_function
def _column_layout(rows, warps):
    """A block of a table with each bucket's rows in one lane, the same in all warps."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, warps], [0, 1])


@gluon.jit
def _store_table(
    table,
    ptr,
    buckets: gl.constexpr,
    H: gl.constexpr,
    FIRST: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """``[buckets, H]`` of the ``BLOCKS`` blocks from FIRST on, summed over each head's rows.

    A lane knows which of its rows are a head's when it is compiled: sums take no more additions
    than there are rows, and nothing of other lanes.
    """
    layout: gl.constexpr = _column_layout(table.shape[1], gl.num_warps())
    r = gl.arange(0, table.shape[1], gl.SliceLayout(1, layout))
    b = gl.arange(0, 16, gl.SliceLayout(0, layout))
    for at in range(BLOCKS):
        rows = table.index(FIRST + at).load(layout)
        bucket = at * 16 + b
        for head in gl.static_range(H):
            of_head = gl.sum(gl.where((r % H == head)[:, None], rows, 0.0), 0)
            gl.store(ptr + bucket * H + head, of_head, mask=bucket < buckets)


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
    grad_tables_ptr,  # [programs, P + A, H] fp32
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
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """Gradients of one chunk of a sample's history, of its biases and of all its query rows."""
    mma: gl.constexpr = products_by_warp(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    busy, sample, first, length, begin, end, slot = find_chunk(
        offsets_ptr, num_samples, num_slots, CHUNK
    )
    count = num_targets * H
    BLOCKS_P: gl.constexpr = (P + 15) // 16
    BLOCKS_A: gl.constexpr = (A + 15) // 16
    if P + A > 0:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        table = gl.allocate_shared_memory(gl.float32, [BLOCKS_P + BLOCKS_A, BLOCK_R, 16], plain)
        for block in gl.static_range(BLOCKS_P + BLOCKS_A):
            table.index(block).store(gl.zeros([BLOCK_R, 16], gl.float32, mma))
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
        q_row = row * 0 if SHARED else row
        grad_out = load_rows(grad_out_ptr, row, count, [BLOCK_R, BLOCK_D], left, D)
        both = gl.allocate_shared_memory(dtype, [2 * BLOCK_R, BLOCK_D], ring_layout(BLOCK_D))
        both.slice(0, BLOCK_R).store(grad_out)
        both.slice(BLOCK_R, BLOCK_R).store(
            load_rows(query_ptr, q_row, count, [BLOCK_R, BLOCK_D], left, D)
        )
        of_rows = gl.allocate_shared_memory(dtype, [2 * BLOCK_R, BLOCK_N], ring_layout(BLOCK_N))
        out = load_rows(out_ptr, row, count, [BLOCK_R, BLOCK_D], left, D).to(gl.float32)
        out += load_rows(rest_ptr, row, count, [BLOCK_R, BLOCK_D], left, D).to(gl.float32)
        delta = gl.sum(grad_out.to(gl.float32) * out, 1)
        by_query: gl.constexpr = gl.SliceLayout(1, mma)
        delta = gl.convert_layout(delta, by_query)[:, None]
        r = gl.arange(0, BLOCK_R, by_query)
        maximum = gl.load(stats_ptr + row + r, mask=r < count, other=0.0)[:, None]
        inverse = gl.load(stats_ptr + num_rows + row + r, mask=r < count, other=0.0)[:, None]
        alone = (end - begin == 1) & (slot < 0)

        COLUMNS: gl.constexpr = min(BLOCK_D, 64)
        columns: gl.constexpr = row_layout(COLUMNS, gl.num_warps())
        d = gl.arange(0, COLUMNS, gl.SliceLayout(0, columns))
        i = gl.arange(0, BLOCK_N, gl.SliceLayout(1, columns))
        index = gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        acc = gl.zeros([BLOCK_R, BLOCK_D], gl.float32, mma)
        zeros = gl.zeros([BLOCK_R, BLOCK_N], gl.float32, mma)
        stage = 0
        for start in range(begin, end, BLOCK_N):
            async_copy.wait_group(NUM_STAGES - 2)
            tile = ring.index(stage)
            x = tile.permute((1, 0)).load(right)
            dots = mma_v2(both.slice(BLOCK_R, BLOCK_R).load(left), x, zeros)
            dp = mma_v2(both.slice(0, BLOCK_R).load(left), x, zeros)
            n = start + index
            visible = (n < end)[None, :]
            of_position, of_age = row_buckets(n, first, length, timestamps_ptr, P, A)
            bias = load_bias(
                bias_ptr, position_bias_ptr, age_bias_ptr, of_position[None, :], of_age[None, :],
                n[None, :], r[:, None], visible, count, H, P, A,
            )  # fmt: skip
            p = gl.exp2((dots * scale + (bias - maximum)) * LOG2E) * inverse
            p = gl.where(visible, p, 0.0)
            ds = gl.where(alone, 0.0, p * (dp - delta))
            of_rows.slice(0, BLOCK_R).store(p.to(dtype))
            of_rows.slice(BLOCK_R, BLOCK_R).store((ds * scale).to(dtype))
            rounded = gl.convert_layout(ds.to(dtype), left)
            acc = mma_v2(rounded, tile.load(right), acc)
            weights = of_rows.permute((1, 0)).load(left)
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                operand = both.slice(column, COLUMNS, 1).load(right)
                grad_x = mma_v2(weights, operand, gl.zeros([BLOCK_N, COLUMNS], gl.float32, mma))
                grad_x = gl.convert_layout(grad_x.to(dtype), columns)
                mask = (i < end - start)[:, None]
                if D < BLOCK_D:
                    mask = mask & (column + d < D)[None, :]
                ptrs = grad_history_ptr + start.to(gl.int64) * D + column
                gl.store(ptrs + (i[:, None] * D + d[None, :]), grad_x, mask=mask)
            if grad_bias_ptr is not None:
                mask = visible & (r < H)[:, None]
                gl.store(grad_bias_ptr + (n[None, :] * H + r[:, None]), ds, mask=mask)
            if P + A > 0:
                rest = ds - ds.to(dtype).to(gl.float32)
                rest = gl.convert_layout(rest.to(dtype), left)
                of_row: gl.constexpr = gl.SliceLayout(1, right)
                shown = start + gl.arange(0, BLOCK_N, of_row) < end
                if P > 0:
                    buckets = gl.convert_layout(of_position, of_row)
                    _add_to_table(table, buckets, shown, rounded, rest, 0)
                if A > 0:
                    buckets = gl.convert_layout(of_age, of_row)
                    _add_to_table(table, buckets, shown, rounded, rest, BLOCKS_P)
            ahead: gl.constexpr = NUM_STAGES - 1
            to = gl.where(stage == 0, ahead, stage - 1)
            copy_tile(ring.index(to), history_ptr, start + ahead * BLOCK_N, end, D, STRIDE)
            stage = gl.where(stage == ahead, 0, stage + 1)

        if slot >= 0:
            store_rows(sums_ptr, acc, slot.to(gl.int64) * count, count, D)
        else:
            store_rows(grad_query_ptr, acc * scale, row, count, D)
    if P + A > 0:
        ptr = grad_tables_ptr + gl.program_id(0).to(gl.int64) * ((P + A) * H)
        _store_table(table, ptr, P, H, 0, BLOCKS_P)
        _store_table(table, ptr + P * H, A, H, BLOCKS_P, BLOCKS_A)
