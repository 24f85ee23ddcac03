"""Backward of target attention by single warps, for samples of up to 8 query rows.

A program is one warp: it computes the gradients of one chunk of a sample's history, of its biases
and of all its query rows. History rows are read once and their gradients written once, which is the
floor: 2·N·D·e bytes.

Gradients of outputs and queries lie one above the other in shared memory, as one operand of 16
rows; weights and gradients of scores lie side by side. So one product of the tensor cores' full
depth makes the gradients of history rows. The last program of a sample combines its chunks: see
``warp_combine.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.kernels.common.gluon import launch_dependents
from torchrec_jagged_attn.kernels.target.schedule import SHARED
from torchrec_jagged_attn.kernels.target.warp_combine import combine_queries, is_last_chunk
from torchrec_jagged_attn.kernels.target.warp_parts import (
    BLOCK_R,
    LEFT,
    MMA,
    RIGHT,
    allocate_parts,
    columns_at_once,
    copy_next,
    exp,
    find_listed_chunk,
    load_bias,
    load_columns,
    load_parts,
    load_rows,
    open_ring,
    product,
    program_of_sample,
    row_buckets,
    row_layout,
    split,
    store_parts,
    store_rows,
)

__all__ = ["backward_kernel"]


@gluon.jit
def _side_by_side(a, b):
    """``[a | b]``, as left operand; no lane needs what another has."""
    joined = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(joined, [a.shape[0], 2 * a.shape[1]]), LEFT)


@gluon.jit
def _add_to_table(
    table, weights, buckets, visible, ds, p, FIRST: gl.constexpr, PARTS: gl.constexpr
):
    """Add gradients of scores ``ds`` (in PARTS, as right operands) to their ``buckets``.

    ``table`` is ``[blocks, 16, 8]`` in shared memory; its buckets begin at block FIRST. Of the rows
    of a tile, near in time, few blocks have any. ``weights``, if there is such a table, gets ``p``.
    """
    block_of_row = buckets // 16
    lowest = gl.min(gl.where(visible, block_of_row, 2**30), 0)
    highest = gl.max(gl.where(visible, block_of_row, -1), 0)
    b = gl.arange(0, 16, gl.SliceLayout(1, LEFT))
    zeros = gl.zeros([16, BLOCK_R], gl.float32, MMA)
    for at in range(lowest, highest + 1):
        in_bucket = (b[:, None] + at * 16 == buckets[None, :]) & visible[None, :]
        choice = in_bucket.to(gl.int16).to(gl.bfloat16)
        sums = zeros
        for part in gl.static_range(PARTS):
            sums = mma_v2(choice, ds[PARTS - 1 - part], sums)
        block = table.index(FIRST + at)
        block.store(block.load(MMA) + sums)
        if weights is not None:
            block = weights.index(FIRST + at)
            block.store(block.load(MMA) + mma_v2(choice, p, zeros))


@gluon.jit
def _sum_of_blocks(table, BLOCKS: gl.constexpr):
    """``[8]``: over all buckets of the first ``BLOCKS`` blocks."""
    sums = gl.zeros([16, BLOCK_R], gl.float32, MMA)
    for at in gl.static_range(BLOCKS):
        sums += table.index(at).load(MMA)
    return gl.sum(sums, 0)


@gluon.jit
def _bucket_ptrs(ptr, at: gl.constexpr, count, C: gl.constexpr):
    """Where the block ``at`` of a table lies in ``[P + A, count]``, and which of it does."""
    BLOCKS_P: gl.constexpr = (C.P + 15) // 16
    OF_P: gl.constexpr = at < BLOCKS_P
    b = gl.arange(0, 16, gl.SliceLayout(1, MMA)) + (at if OF_P else at - BLOCKS_P) * 16
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
    mask = (b < (C.P if OF_P else C.A))[:, None] & (r < count)[None, :]
    return ptr + ((b if OF_P else C.P + b)[:, None] * count + r[None, :]), mask


@gluon.jit
def _store_table(table, ptr, count, C: gl.constexpr):
    """``[P + A, count]``."""
    for at in gl.static_range((C.P + 15) // 16 + (C.A + 15) // 16):
        ptrs, mask = _bucket_ptrs(ptr, at, count, C)
        gl.store(ptrs, table.index(at).load(MMA), mask=mask)


@gluon.jit
def _store_correction(sums, ptr, count, chunk, C: gl.constexpr):
    """``-Σ ds · Σ p`` by bucket, over all chunks of a sample, as a table of its own."""
    size = (1 + C.P + C.A) * count
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
    ds_total = gl.zeros([BLOCK_R], gl.float32, gl.SliceLayout(0, MMA))
    for at in range(chunk.chunks):
        of_chunk = sums.weights + (chunk.first_slot + at).to(gl.int64) * size
        ds_total += gl.load(of_chunk + r, mask=r < count, other=0.0)
    for block in gl.static_range((C.P + 15) // 16 + (C.A + 15) // 16):
        weights = gl.zeros([16, BLOCK_R], gl.float32, MMA)
        ptrs, mask = _bucket_ptrs(sums.weights + count, block, count, C)
        for at in range(chunk.chunks):
            of_chunk = ptrs + (chunk.first_slot + at).to(gl.int64) * size
            weights += gl.load(of_chunk, mask=mask, other=0.0)
        ptrs, mask = _bucket_ptrs(ptr, block, count, C)
        gl.store(ptrs, -ds_total[None, :] * weights, mask=mask)


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def backward_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows STRIDE apart
    biases,  # arguments.Biases
    outputs,  # arguments.TargetOutputs; ``residual`` is None in fp32
    grads,  # Gradients
    sums,  # Sums
    samples,  # Samples
    num_samples,
    num_targets,
    num_rows,
    num_slots,
    scale,
    C: gl.constexpr,  # Constants
):
    """Gradients of one chunk of a sample's history, of its biases and of all its query rows."""
    if C.OVERLAP:
        launch_dependents()
    chunk = find_listed_chunk(samples, num_samples, num_slots, C)
    begin, end, slot = chunk.begin, chunk.end, chunk.slot
    count = num_targets * C.H
    BLOCKS_P: gl.constexpr = (C.P + 15) // 16
    BLOCKS: gl.constexpr = BLOCKS_P + (C.A + 15) // 16
    weights = None
    if C.P + C.A > 0:
        shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        table = gl.allocate_shared_memory(gl.float32, [BLOCKS, 16, BLOCK_R], shared)
        if sums.weights is not None:
            weights = gl.allocate_shared_memory(gl.float32, [BLOCKS, 16, BLOCK_R], shared)
        for block in gl.static_range(BLOCKS):
            table.index(block).store(gl.zeros([16, BLOCK_R], gl.float32, MMA))
            if sums.weights is not None:
                weights.index(block).store(gl.zeros([16, BLOCK_R], gl.float32, MMA))
    if chunk.busy:
        dtype: gl.constexpr = history_ptr.dtype.element_ty
        history_ptr += chunk.first * C.STRIDE
        grad_history_ptr = grads.history + chunk.first * C.D
        if grads.bias is not None:
            grad_bias_ptr = grads.bias + chunk.first * (1 if C.PRIOR else C.H)
        ring = open_ring(history_ptr, begin, end, C)
        row = chunk.sample.to(gl.int64) * count
        query_row = row * 0 if C.LAYOUT == SHARED else row
        grad_out = load_columns(grad_out_ptr, row, count, C)
        q = split(load_columns(query_ptr, query_row, count, C), C.PARTS)
        by_query: gl.constexpr = gl.SliceLayout(0, MMA)
        if C.PARTS == 1:
            out = load_columns(outputs.out, row, count, C).to(gl.float32)
            out += load_columns(outputs.residual, row, count, C).to(gl.float32)
            delta = gl.sum(grad_out.to(gl.float32) * out, 0)
            delta = gl.convert_layout(delta, by_query)[None, :]
        grad_out = split(grad_out, C.PARTS)
        both = allocate_parts(q[0].dtype, C.PARTS, 2 * BLOCK_R, C.BLOCK_D)
        store_parts(both, 0, grad_out, True)
        store_parts(both, BLOCK_R, q, True)
        COLUMNS: gl.constexpr = columns_at_once(C.BLOCK_D, C.BLOCK_N, C.PARTS)
        if C.PARTS > 1:  # by the very products that it is taken off
            products = gl.zeros([16, BLOCK_R], gl.float32, MMA)
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                out = split(
                    load_rows(outputs.out, row, count, column, [16, COLUMNS], LEFT, C.D), C.PARTS
                )
                of_grad = load_parts(both, (0, BLOCK_R), (column, COLUMNS), RIGHT, True)
                products = product(out, of_grad, products, C.PARTS, APART=True)
            row_of_out = gl.arange(0, 16, gl.SliceLayout(1, MMA))[:, None]
            row_of_grad = gl.arange(0, BLOCK_R, by_query)[None, :]
            delta = gl.sum(gl.where(row_of_out == row_of_grad, products, 0.0), 0)[None, :]
        r = gl.arange(0, BLOCK_R, by_query)
        maximum = gl.load(outputs.stats + row + r, mask=r < count, other=0.0)[None, :]
        inverse = gl.load(outputs.stats + num_rows + row + r, mask=r < count, other=0.0)[None, :]
        alone = (end - begin == 1) & (slot < 0)

        STORED: gl.constexpr = min(C.BLOCK_D, 64)
        columns: gl.constexpr = row_layout(STORED, dtype)
        d = gl.arange(0, STORED, gl.SliceLayout(0, columns))
        i = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, columns))
        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, MMA))
        accs = ()
        for _ in gl.static_range(0, C.BLOCK_D, COLUMNS):
            accs += (gl.zeros([COLUMNS, BLOCK_R], gl.float32, MMA),)
        zeros = gl.zeros([C.BLOCK_N, BLOCK_R], gl.float32, MMA)
        stage = 0
        for start in range(begin, end, C.BLOCK_N):
            async_copy.wait_group(C.NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = zeros
            dp = zeros
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).load(LEFT), C.PARTS)
                if C.PARTS > 1:  # they do not fit in registers
                    of_grad = load_parts(both, (0, BLOCK_R), (column, COLUMNS), RIGHT, True)
                    of_q = load_parts(both, (BLOCK_R, BLOCK_R), (column, COLUMNS), RIGHT, True)
                else:
                    of_grad = grad_out
                    of_q = q
                dots = product(x, of_q, dots, C.PARTS, APART=True)
                dp = product(x, of_grad, dp, C.PARTS, APART=True)
            n = start + index
            visible = (n < end)[:, None]
            of_position, of_age = row_buckets(n, biases, chunk, C)
            bias = load_bias(
                biases, chunk.first, of_position[:, None], of_age[:, None],
                n[:, None], r[None, :], visible, count, C,
            )  # fmt: skip
            p = exp(dots * scale + bias - maximum, C.PARTS) * inverse  # rounded as forward
            p = gl.where(visible, p, 0.0)
            ds = gl.where(alone, 0.0, p * (dp - delta))
            of_rows = split(_side_by_side(p.to(dtype), (ds * scale).to(dtype)), C.PARTS)
            for column in gl.static_range(0, C.BLOCK_D, STORED):
                operand = load_parts(both, (0, 2 * BLOCK_R), (column, STORED), RIGHT, False)
                grad_x = gl.zeros([C.BLOCK_N, STORED], gl.float32, MMA)
                grad_x = product(of_rows, operand, grad_x, C.PARTS)
                grad_x = gl.convert_layout(grad_x.to(dtype), columns)
                mask = (i < end - start)[:, None]
                if C.D < C.BLOCK_D:
                    mask = mask & (column + d < C.D)[None, :]
                ptrs = grad_history_ptr + start.to(gl.int64) * C.D + column
                gl.store(ptrs + (i[:, None] * C.D + d[None, :]), grad_x, mask=mask)
            of_queries = split(gl.convert_layout(ds.to(dtype), RIGHT), C.PARTS)
            new_accs = ()
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).permute((1, 0)).load(LEFT), C.PARTS)
                new_accs += (product(x, of_queries, accs[column // COLUMNS], C.PARTS),)
            accs = new_accs
            if (grads.bias is not None) and C.PRIOR:
                gl.store(grad_bias_ptr + n, gl.sum(ds, 1), mask=n < end)
            elif grads.bias is not None:
                mask = visible & (r < C.H)[None, :]
                gl.store(grad_bias_ptr + (n[:, None] * C.H + r[None, :]), ds, mask=mask)
            if C.P + C.A > 0:
                TABLE_PARTS: gl.constexpr = max(2, C.PARTS)
                of_buckets = split(gl.convert_layout(ds, RIGHT), TABLE_PARTS)
                of_weights = None
                if sums.weights is not None:
                    of_weights = gl.convert_layout(p.to(gl.bfloat16), RIGHT)
                of_row: gl.constexpr = gl.SliceLayout(0, LEFT)
                shown = start + gl.arange(0, C.BLOCK_N, of_row) < end
                if C.P > 0:
                    _add_to_table(
                        table, weights, gl.convert_layout(of_position, of_row), shown, of_buckets,
                        of_weights, 0, TABLE_PARTS,
                    )  # fmt: skip
                if C.A > 0:
                    _add_to_table(
                        table, weights, gl.convert_layout(of_age, of_row), shown, of_buckets,
                        of_weights, BLOCKS_P, TABLE_PARTS,
                    )  # fmt: skip
            stage = copy_next(ring, stage, history_ptr, start, end, C)

        if sums.weights is not None:
            ds_total = _sum_of_blocks(table, BLOCKS_P if C.P > 0 else BLOCKS)
            if slot < 0:
                for block in gl.static_range(BLOCKS):
                    taken = ds_total[None, :] * weights.index(block).load(MMA)
                    table.index(block).store(table.index(block).load(MMA) - taken)
            else:
                ptr = sums.weights + slot.to(gl.int64) * (1 + C.P + C.A) * count
                gl.store(ptr + r, ds_total, mask=r < count)
                _store_table(weights, ptr + count, count, C)
        for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
            grad_query = gl.permute(accs[column // COLUMNS], (1, 0))
            if slot >= 0:
                store_rows(sums.acc, grad_query, slot.to(gl.int64) * count, count, column, C.D)
            else:
                store_rows(grads.query, grad_query * scale, row, count, column, C.D)
        if slot >= 0:
            if is_last_chunk(samples, num_slots, chunk):
                combine_queries(sums, grads, row, count, chunk, scale, C)
                if sums.weights is not None:
                    program = program_of_sample(chunk.sample, num_samples, num_slots)
                    ptr = grads.tables + program.to(gl.int64) * (C.P + C.A) * count
                    _store_correction(sums, ptr, count, chunk, C)
    if C.P + C.A > 0:
        of_last_chunk = (chunk.length > 2 * C.CHUNK) & (slot < 0) & (sums.weights is not None)
        if not of_last_chunk:
            ptr = grads.tables + gl.program_id(0).to(gl.int64) * (C.P + C.A) * count
            _store_table(table, ptr, count, C)
