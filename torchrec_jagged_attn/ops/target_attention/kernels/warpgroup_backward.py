"""Backward of target attention by a warpgroup, on Hopper: 9 to 64 query rows in half precision.

Weights and gradients of scores are ``[rows, queries]``, with history rows on the M side, as in
``warpgroup_forward.py``. In registers, they are operands of the gradients of history rows; in
shared memory, of the gradients of queries, ``[width, queries]``, and of tables, ``[buckets,
queries]``. History rows are read once and their gradients written once: 2·N·D·e bytes, 10·N·R·D
FLOPs.

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

from torchrec_jagged_attn.ops.device.gluon import products_by_warpgroup
from torchrec_jagged_attn.ops.device.tma import as_rows, copy_out
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED
from torchrec_jagged_attn.ops.target_attention.kernels.warp_combine import (
    combine_queries,
    is_last_chunk,
    load_grad_lse,
    load_stats,
    store_delta,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    LN2,
    LOG2E,
    clear_gradients,
    decompose,
    drop_weights,
    find_scheduled_chunk,
    load_row_numbers,
    load_rows,
    query_draws,
    row_buckets,
    row_layout,
    score_gradients,
    weights_and_slopes,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warpgroup_common import (
    PROGRAMS,
    add_biases,
    copy_next,
    copy_queries,
    open_ring,
    store_transposed,
    wait_for_tile,
    warpgroup_layout,
)

BUCKETS = gl.constexpr(64)  # of a block of a table
COLUMNS = gl.constexpr(64)  # columns of the gradient of history rows computed at a time
COMPONENTS = gl.constexpr(2)  # of gradients of scores, for gradients of tables


@gluon.jit
def _new_table(COUNT: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """A table of COUNT buckets, as a tuple of blocks of zeros ``[BUCKETS, queries]``."""
    table = ()
    for _ in gl.static_range(0, COUNT, BUCKETS):
        table += (gl.zeros(shape, gl.float32, layout),)
    return table


@gluon.jit
def _add_to_table(table, buckets, components, mma: gl.constexpr):
    """Add gradients of scores, ``components`` ``[COMPONENTS, rows, queries]``, to their buckets."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b = gl.arange(0, BUCKETS, gl.SliceLayout(1, left))[:, None]
    buckets = gl.convert_layout(buckets, gl.SliceLayout(0, left))[None, :]
    new_table = ()
    for at in gl.static_range(len(table)):
        block = table[at]
        one_hot = (buckets == b + at * BUCKETS).to(gl.int16).to(gl.bfloat16)
        for i in gl.static_range(COMPONENTS):
            component = components.index(COMPONENTS - 1 - i)
            block = warpgroup_mma(one_hot, component, block, is_async=True)
        block, one_hot = warpgroup_mma_wait(0, deps=(block, one_hot))
        new_table += (block,)
    return new_table


@gluon.jit
def _store_table(table, ptr, COUNT: gl.constexpr, H: gl.constexpr, layout: gl.constexpr):
    """Store ``[COUNT, H]``: sums over the query rows of each head."""
    b = gl.arange(0, BUCKETS, gl.SliceLayout(1, layout))
    for at in gl.static_range(len(table)):
        bucket = at * BUCKETS + b
        r = gl.arange(0, table[at].shape[1], gl.SliceLayout(0, layout))[None, :]
        for head in gl.static_range(H):
            head_sums = gl.sum(gl.where(r % H == head, table[at], 0.0), 1)
            gl.store(ptr + (bucket * H + head), head_sums, mask=bucket < COUNT)


@gluon.jit(
    do_not_specialize=[
        "num_samples", "num_targets", "num_rows", "num_partials", "num_history_rows",
    ]
)  # fmt: skip
def backward_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_desc,  # of [N, 1, D], see ``tma.jagged_rows``
    biases,  # arguments.Biases
    outputs,  # Outputs
    grads,  # Gradients
    partials,  # Partials
    samples,  # Samples
    num_samples,
    num_targets,
    num_rows,
    num_partials,
    num_history_rows,  # ``N``
    scale,
    grad_history_desc,  # of [N, 1, D]
    C: gl.constexpr,  # Constants
):
    """Gradients of one chunk of a sample's history, of all its query rows and of tables."""
    mma: gl.constexpr = products_by_warpgroup(C.BLOCK_R, gl.num_warps())
    columns_mma: gl.constexpr = products_by_warpgroup(COLUMNS, gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, columns_mma, 2)
    by_query: gl.constexpr = gl.SliceLayout(0, mma)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    chunk = find_scheduled_chunk(samples, num_samples, num_partials, C, PROGRAMS)
    begin, end, partial = chunk.begin, chunk.end, chunk.partial
    if chunk.busy:
        if grads.prior_weights is not None:
            grad_weights_ptr = grads.prior_weights + chunk.first
        count = num_targets * C.H
        row = chunk.sample.to(gl.int64) * count
        queries = copy_queries(query_ptr if C.LAYOUT == SHARED else query_ptr + row * C.D, count, C)
        grad_outs = copy_queries(grad_out_ptr + row * C.D, count, C)
        async_copy.commit_group()
        last = (chunk.first + end).to(gl.int32)
        ring = open_ring(history_desc, last, end - begin, C.NUM_STAGES)
        grad_tile = gl.allocate_shared_memory(
            dtype, grad_history_desc.block_type.shape, grad_history_desc.layout
        )
        if C.P + C.A > 0:
            components = gl.allocate_shared_memory(
                gl.bfloat16, [COMPONENTS, C.BLOCK_N, C.BLOCK_R], warpgroup_layout(C.BLOCK_R)
            )
        ds_tile = gl.allocate_shared_memory(
            dtype, [C.BLOCK_N, C.BLOCK_R], warpgroup_layout(C.BLOCK_R)
        )

        query_shape: gl.constexpr = [C.BLOCK_R, C.BLOCK_D]
        in_memory: gl.constexpr = row_layout(C.BLOCK_D, dtype, gl.num_warps())
        grad_out = load_rows(grad_out_ptr, row, count, 0, query_shape, in_memory, C.D).to(
            gl.float32
        )
        out = load_rows(outputs.out, row, count, 0, query_shape, in_memory, C.D).to(gl.float32)
        out += load_rows(outputs.residual, row, count, 0, query_shape, in_memory, C.D).to(
            gl.float32
        )
        delta = gl.convert_layout(gl.sum(grad_out * out, 1), by_query)
        r = gl.arange(0, C.BLOCK_R, by_query)
        maximum, inverse = load_stats(outputs, num_rows, row, r, count)
        grad_lse = load_grad_lse(outputs, row, r, inverse)
        delta = store_delta(grads, delta, grad_lse, row, r, count, chunk)
        shift = (maximum * LOG2E - gl.log2(inverse))[None, :]  # weights beyond count are zero
        draws = query_draws(biases.dropout, row + r)[None, :]
        alone = (end - begin == 1) & (partial < 0)

        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, mma))
        zeros = gl.zeros([C.BLOCK_N, C.BLOCK_R], gl.float32, mma)
        zero_columns = gl.zeros([C.BLOCK_N, COLUMNS], gl.float32, columns_mma)
        acc = gl.zeros([C.BLOCK_D, C.BLOCK_R], gl.float32, mma)
        position_table = _new_table(C.P, [BUCKETS, C.BLOCK_R], mma)
        age_table = _new_table(C.A, [BUCKETS, C.BLOCK_R], mma)
        async_copy.wait_group(0)
        fence_async_shared()
        for tile in range(gl.cdiv(end - begin, C.BLOCK_N)):
            start = begin + tile * C.BLOCK_N
            x = wait_for_tile(ring, tile, history_desc, end - start)
            dots = warpgroup_mma(x, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(x, grad_outs.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dots, dp = warpgroup_mma_wait(0, deps=(dots, dp))
            tma.store_wait(0)
            copy_next(ring, tile, history_desc, last, end - start)
            n = start + index
            visible = (n < end)[:, None]
            scores = add_biases(dots * (scale * LOG2E), biases, start, chunk, count, C)
            numbers = load_row_numbers(biases, chunk.first + n, n < end)[:, None]
            dp = drop_weights(dp, biases.dropout, draws, numbers)
            if C.SCORE == "softmax":
                p = gl.where(visible, gl.exp2(scores - shift), 0.0)
                ds = score_gradients(p, dp, delta, grad_lse, alone)
            else:
                p, slope = weights_and_slopes(scores * LN2, C.SCORE, False)
                p = gl.where(visible, p, 0.0)
                ds = gl.where(visible, slope * dp, 0.0)
            ds_tile.store(ds.to(dtype))
            if grads.prior_weights is not None:
                gl.store(grad_weights_ptr + n, gl.sum(ds, 1), mask=n < end)
            if C.P + C.A > 0:
                ds_components = decompose(ds, COMPONENTS)
                for i in gl.static_range(COMPONENTS):
                    components.index(i).store(ds_components[i])
            fence_async_shared()
            acc = warpgroup_mma(x.permute((1, 0)), ds_tile, acc, is_async=True)
            if C.P + C.A > 0:
                position_buckets, age_buckets = row_buckets(n, biases, chunk, C)
                position_table = _add_to_table(position_table, position_buckets, components, mma)
                age_table = _add_to_table(age_table, age_buckets, components, mma)
            p = drop_weights(p, biases.dropout, draws, numbers)
            weights = gl.convert_layout(p.to(dtype), left)
            ds_operand = gl.convert_layout((ds * scale).to(dtype), left)
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                grad_x = warpgroup_mma(
                    weights, grad_outs.slice(column, COLUMNS, 1), zero_columns, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                grad_x = warpgroup_mma(
                    ds_operand, queries.slice(column, COLUMNS, 1), grad_x, is_async=True
                )
                grad_x, weights, ds_operand, acc = warpgroup_mma_wait(
                    0, deps=(grad_x, weights, ds_operand, acc)
                )
                as_rows(grad_tile).slice(column, COLUMNS, 1).store(grad_x.to(dtype))
            fence_async_shared()
            copy_out(grad_history_desc, last, end - start, 0, grad_tile)
        tma.store_wait(0)

        if partial >= 0:
            column = gl.arange(0, C.BLOCK_D, gl.SliceLayout(1, mma))[:, None]
            ptrs = partials.acc + partial.to(gl.int64) * count * C.D + (r[None, :] * C.D + column)
            gl.store(ptrs, acc, mask=(r < count)[None, :] & (column < C.D))
            if is_last_chunk(samples, num_partials, chunk):
                combine_queries(partials, grads, row, count, chunk, scale, C)
        elif C.LAYOUT == SHARED:
            column = gl.arange(0, C.BLOCK_D, gl.SliceLayout(1, mma))[:, None]
            ptrs = grads.query + row * C.D + (r[None, :] * C.D + column)
            gl.store(ptrs, acc * scale, mask=(r < count)[None, :] & (column < C.D))
        else:
            store_transposed(grads.query + row * C.D, (acc * scale).to(dtype), queries, count, C.D)
        if C.P + C.A > 0:
            ptr = grads.tables + gl.program_id(0).to(gl.int64) * ((C.P + C.A) * C.H)
            _store_table(position_table, ptr, C.P, C.H, mma)
            _store_table(age_table, ptr + C.P * C.H, C.A, C.H, mma)
    clear_gradients(grads, samples, num_samples, num_history_rows, C)
