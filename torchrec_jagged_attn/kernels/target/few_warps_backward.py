"""Backward of target attention by one to four warps, for samples of 9 to 64 query rows.

Each warp has 16 query rows for scores, and 16 history rows for their gradients. History rows are
read once and their gradients written once: 2·N·D·e bytes, 10·N·R·D FLOPs.

Weights and gradients of scores lie one above the other in shared memory, and so do gradients of
outputs and queries: one product makes the gradients of history rows. ``general_combine.py`` sums up
the chunks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.kernels.common.gluon import launch_dependents, products_by_warp
from torchrec_jagged_attn.kernels.target.warp_parts import (
    columns_at_once,
    exp,
    find_chunk,
    load_bias,
    load_parts,
    load_rows,
    open_ring,
    product,
    ring_layout,
    row_buckets,
    row_layout,
    split,
    store_parts,
    store_rows,
    turn_ring,
)

__all__ = ["backward_kernel"]


@gluon.jit
def _add_to_table(table, buckets, visible, rows, FIRST: gl.constexpr, PARTS: gl.constexpr):
    """Add gradients of scores (in PARTS, as left operands) to their ``buckets``.

    ``table`` is ``[blocks, BLOCK_R, 16]`` in shared memory; its buckets begin at block FIRST. Of
    the rows of a tile, near in time, few blocks have any.
    """
    mma: gl.constexpr = rows[0].type.layout.parent
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    BLOCK_R: gl.constexpr = table.shape[1]
    block_of_row = buckets // 16
    lowest = gl.min(gl.where(visible, block_of_row, 2**30), 0)
    highest = gl.max(gl.where(visible, block_of_row, -1), 0)
    b = gl.arange(0, 16, gl.SliceLayout(0, right))
    for at in range(lowest, highest + 1):
        in_bucket = (buckets[:, None] == b[None, :] + at * 16) & visible[:, None]
        choice = in_bucket.to(gl.int16).to(gl.bfloat16)
        sums = gl.zeros([BLOCK_R, 16], gl.float32, mma)
        for part in gl.static_range(PARTS):
            sums = mma_v2(rows[PARTS - 1 - part], choice, sums)
        block = table.index(FIRST + at)
        block.store(block.load(mma) + sums)


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
    biases,  # pointers in an ``arguments.Biases``
    out_ptr,  # [rows, D]
    residual_ptr,  # [rows, D]: fp32 output minus its rounded value; None in fp32
    stats_ptr,  # [2, rows] fp32
    grad_query_ptr,  # [rows, D]; fp32 where queries are SHARED: a row for each sample
    grad_history_ptr,  # [N, D]
    grad_bias_ptr,  # [N, H], where a sample has one target; of logarithms of PRIOR weights [N]
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
    PRIOR: gl.constexpr,
    STRIDE: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Gradients of one chunk of a sample's history, of its biases and of all its query rows."""
    mma: gl.constexpr = products_by_warp(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if OVERLAP:
        launch_dependents()
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
        if grad_bias_ptr is not None:
            grad_bias_ptr += first * (1 if PRIOR else H)
        ring = open_ring(history_ptr, begin, end, D, STRIDE, NUM_STAGES, BLOCK_N, BLOCK_D)
        row = sample.to(gl.int64) * count
        q_row = row * 0 if SHARED else row
        rows: gl.constexpr = [BLOCK_R, BLOCK_D]
        grad_out = load_rows(grad_out_ptr, row, count, 0, rows, left, D)
        q = split(load_rows(query_ptr, q_row, count, 0, rows, left, D), PARTS)
        by_query: gl.constexpr = gl.SliceLayout(1, mma)
        r = gl.arange(0, BLOCK_R, by_query)
        if PARTS == 1:
            out = load_rows(out_ptr, row, count, 0, rows, left, D).to(gl.float32)
            out += load_rows(residual_ptr, row, count, 0, rows, left, D).to(gl.float32)
            delta = gl.sum(grad_out.to(gl.float32) * out, 1)
            delta = gl.convert_layout(delta, by_query)[:, None]
        grad_out = split(grad_out, PARTS)
        part_type: gl.constexpr = q[0].dtype
        by_row: gl.constexpr = ring_layout(BLOCK_D, part_type)
        both = gl.allocate_shared_memory(part_type, [PARTS, 2 * BLOCK_R, BLOCK_D], by_row)
        store_parts(both, 0, grad_out, False)
        store_parts(both, BLOCK_R, q, False)
        COLUMNS: gl.constexpr = columns_at_once(BLOCK_D, BLOCK_N, PARTS)
        if PARTS > 1:  # by the very products that it is taken off
            products = gl.zeros([BLOCK_R, BLOCK_R], gl.float32, mma)
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                out = gl.allocate_shared_memory(
                    dtype, [BLOCK_R, COLUMNS], ring_layout(COLUMNS, dtype)
                )
                out.store(load_rows(out_ptr, row, count, column, [BLOCK_R, COLUMNS], left, D))
                of_out = split(out.permute((1, 0)).load(right), PARTS)
                of_grad = load_parts(both, (0, BLOCK_R), (column, COLUMNS), left, False)
                products = product(of_grad, of_out, products, PARTS)
            row_of_out = gl.arange(0, BLOCK_R, gl.SliceLayout(0, mma))[None, :]
            delta = gl.sum(gl.where(r[:, None] == row_of_out, products, 0.0), 1)[:, None]
        of_tile: gl.constexpr = [PARTS, 2 * BLOCK_R, BLOCK_N]
        of_rows = gl.allocate_shared_memory(part_type, of_tile, ring_layout(BLOCK_N, part_type))
        maximum = gl.load(stats_ptr + row + r, mask=r < count, other=0.0)[:, None]
        inverse = gl.load(stats_ptr + num_rows + row + r, mask=r < count, other=0.0)[:, None]
        alone = (end - begin == 1) & (slot < 0)

        STORED: gl.constexpr = min(BLOCK_D, 64 if PARTS == 1 else 32)
        AT_ONCE: gl.constexpr = 2 * BLOCK_R if PARTS == 1 else BLOCK_R
        in_memory: gl.constexpr = row_layout(STORED, dtype, gl.num_warps())
        d = gl.arange(0, STORED, gl.SliceLayout(0, in_memory))
        i = gl.arange(0, BLOCK_N, gl.SliceLayout(1, in_memory))
        index = gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        accs = ()
        for _ in gl.static_range(0, BLOCK_D, COLUMNS):
            accs += (gl.zeros([BLOCK_R, COLUMNS], gl.float32, mma),)
        zeros = gl.zeros([BLOCK_R, BLOCK_N], gl.float32, mma)
        stage = 0
        for start in range(begin, end, BLOCK_N):
            async_copy.wait_group(NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = zeros
            dp = zeros
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).permute((1, 0)).load(right), PARTS)
                of_q = load_parts(both, (BLOCK_R, BLOCK_R), (column, COLUMNS), left, False)
                dots = product(of_q, x, dots, PARTS)
                of_grad = load_parts(both, (0, BLOCK_R), (column, COLUMNS), left, False)
                dp = product(of_grad, x, dp, PARTS)
            n = start + index
            visible = (n < end)[None, :]
            of_position, of_age = row_buckets(n, biases, first, length, P, A)
            bias = load_bias(
                biases, first, of_position[None, :], of_age[None, :],
                n[None, :], r[:, None], visible, count, H, P, A, PRIOR,
            )  # fmt: skip
            p = exp(dots * scale + bias - maximum, PARTS) * inverse  # rounded as forward
            p = gl.where(visible, p, 0.0)
            ds = gl.where(alone, 0.0, p * (dp - delta))
            store_parts(of_rows, 0, split(p.to(dtype), PARTS), False)
            store_parts(of_rows, BLOCK_R, split((ds * scale).to(dtype), PARTS), False)
            of_queries = split(gl.convert_layout(ds.to(dtype), left), PARTS)
            sums = ()
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).load(right), PARTS)
                sums += (product(of_queries, x, accs[column // COLUMNS], PARTS),)
            accs = sums
            for column in gl.static_range(0, BLOCK_D, STORED):
                grad_x = gl.zeros([BLOCK_N, STORED], gl.float32, mma)
                for k in gl.static_range(0, 2 * BLOCK_R, AT_ONCE):
                    weights = load_parts(of_rows, (k, AT_ONCE), (0, BLOCK_N), left, True)
                    operand = load_parts(both, (k, AT_ONCE), (column, STORED), right, False)
                    grad_x = product(weights, operand, grad_x, PARTS)
                grad_x = gl.convert_layout(grad_x.to(dtype), in_memory)
                mask = (i < end - start)[:, None]
                if D < BLOCK_D:
                    mask = mask & (column + d < D)[None, :]
                ptrs = grad_history_ptr + start.to(gl.int64) * D + column
                gl.store(ptrs + (i[:, None] * D + d[None, :]), grad_x, mask=mask)
            if (grad_bias_ptr is not None) and PRIOR:
                gl.store(grad_bias_ptr + n, gl.sum(ds, 0), mask=n < end)
            elif grad_bias_ptr is not None:
                mask = visible & (r < H)[:, None]
                gl.store(grad_bias_ptr + (n[None, :] * H + r[:, None]), ds, mask=mask)
            if P + A > 0:
                TABLE_PARTS: gl.constexpr = max(2, PARTS)
                of_buckets = split(gl.convert_layout(ds, left), TABLE_PARTS)
                of_row: gl.constexpr = gl.SliceLayout(1, right)
                shown = start + gl.arange(0, BLOCK_N, of_row) < end
                if P > 0:
                    buckets = gl.convert_layout(of_position, of_row)
                    _add_to_table(table, buckets, shown, of_buckets, 0, TABLE_PARTS)
                if A > 0:
                    buckets = gl.convert_layout(of_age, of_row)
                    _add_to_table(table, buckets, shown, of_buckets, BLOCKS_P, TABLE_PARTS)
            stage = turn_ring(ring, stage, history_ptr, start, end, D, STRIDE)

        for column in gl.static_range(0, BLOCK_D, COLUMNS):
            acc = accs[column // COLUMNS]
            if slot >= 0:
                store_rows(sums_ptr, acc, slot.to(gl.int64) * count, count, column, D)
            else:
                store_rows(grad_query_ptr, acc * scale, row, count, column, D)
    if P + A > 0:
        ptr = grad_tables_ptr + gl.program_id(0).to(gl.int64) * ((P + A) * H)
        _store_table(table, ptr, P, H, 0, BLOCKS_P)
        _store_table(table, ptr + P * H, A, H, BLOCKS_P, BLOCKS_A)
