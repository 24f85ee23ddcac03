"""Backward of target attention by one to four warps, for samples of 9 to 64 query rows.

Each warp has 16 query rows of scores, and 16 history rows of gradients. History rows are read once
and their gradients written once: 2·N·D·e bytes, 10·N·R·D FLOPs.

The gradient of history rows is one product of p stacked on ds with grad_out stacked on q, both in
shared memory. ``general_combine.py`` combines chunks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.ops.device.gluon import launch_dependents, products_by_warp
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED
from torchrec_jagged_attn.ops.target_attention.kernels.warp_combine import (
    QueryStats,
    load_grad_lse,
    load_stats,
    store_delta,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    allocate_components,
    blocks_of,
    clear_gradients,
    columns_at_once,
    copy_next,
    decompose,
    find_chunk,
    indices_to_store,
    load_components,
    load_rows,
    load_targets,
    next_indices,
    open_ring,
    product,
    query_draws,
    ring_layout,
    row_components,
    rows_of_sample,
    store_components,
    store_grad_of_bias,
    store_grad_of_history,
    store_rows,
    weights_and_gradients,
    zeros_by_column,
)


@gluon.jit
def _add_to_table(table, buckets, visible, ds, FIRST: gl.constexpr, COMPONENTS: gl.constexpr):
    """Add gradients of scores ``ds`` (in COMPONENTS, as left operands) to their ``buckets``.

    ``table`` is ``[blocks, BLOCK_R, 16]`` in shared memory; its buckets begin at block FIRST. The
    rows of a tile, which are near in time, fall into few blocks.
    """
    mma: gl.constexpr = ds[0].type.layout.parent
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    BLOCK_R: gl.constexpr = table.shape[1]
    block_of_row = buckets // 16
    lowest = gl.min(gl.where(visible, block_of_row, 2**30), 0)
    highest = gl.max(gl.where(visible, block_of_row, -1), 0)
    b = gl.arange(0, 16, gl.SliceLayout(0, right))
    for at in range(lowest, highest + 1):
        in_bucket = (buckets[:, None] == b[None, :] + at * 16) & visible[:, None]
        one_hot = in_bucket.to(gl.int16).to(gl.bfloat16)
        sums = gl.zeros([BLOCK_R, 16], gl.float32, mma)
        for i in gl.static_range(COMPONENTS):
            sums = mma_v2(ds[COMPONENTS - 1 - i], one_hot, sums)
        block = table.index(FIRST + at)
        block.store(block.load(mma) + sums)


@gluon.constexpr_function
def _column_layout(rows, warps):
    """A block of a table, all rows of a bucket in one lane, the same in all warps."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, warps], [0, 1])


@gluon.jit
def _store_table(
    table, ptr, buckets: gl.constexpr, H: gl.constexpr, FIRST: gl.constexpr, BLOCKS: gl.constexpr
):
    """Store ``[buckets, H]``: ``BLOCKS`` blocks from FIRST on, summed over the rows of each head.

    The head of each row in a lane is known at compile time, so that sums need neither exchanges
    between lanes nor masked additions.
    """
    layout: gl.constexpr = _column_layout(table.shape[1], gl.num_warps())
    r = gl.arange(0, table.shape[1], gl.SliceLayout(1, layout))
    b = gl.arange(0, 16, gl.SliceLayout(0, layout))
    for at in range(BLOCKS):
        rows = table.index(FIRST + at).load(layout)
        bucket = at * 16 + b
        for head in gl.static_range(H):
            head_sums = gl.sum(gl.where((r % H == head)[:, None], rows, 0.0), 0)
            gl.store(ptr + bucket * H + head, head_sums, mask=bucket < buckets)


@gluon.jit(
    do_not_specialize=[
        "num_samples", "num_targets", "num_rows", "num_partials", "num_history_rows",
    ]
)  # fmt: skip
def backward_kernel(
    grad_out_ptr,  # [rows, D]
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], or packed codes; rows STRIDE apart
    biases,  # arguments.Biases
    outputs,  # Outputs; ``residual`` is None in fp32
    grads,  # Gradients
    partials,  # Partials
    samples,  # Samples
    num_samples,
    num_targets,
    num_rows,
    num_partials,
    num_history_rows,  # ``N``
    scale,
    C: gl.constexpr,  # Constants
):
    """Gradients of one chunk of a sample's history, of its biases and of all its query rows."""
    mma: gl.constexpr = products_by_warp(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if C.OVERLAP:
        launch_dependents()
    chunk = find_chunk(samples, num_samples, num_partials, C)
    begin, end, partial = chunk.begin, chunk.end, chunk.partial
    count = num_targets * C.H
    BLOCKS_P: gl.constexpr = blocks_of(C.P)
    BLOCKS_A: gl.constexpr = blocks_of(C.A)
    if C.P + C.A > 0:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        table = gl.allocate_shared_memory(gl.float32, [BLOCKS_P + BLOCKS_A, C.BLOCK_R, 16], plain)
        for block in gl.static_range(BLOCKS_P + BLOCKS_A):
            table.index(block).store(gl.zeros([C.BLOCK_R, 16], gl.float32, mma))
    if chunk.busy:
        dtype: gl.constexpr = query_ptr.dtype.element_ty
        history_ptr = rows_of_sample(history_ptr, samples, chunk, C)
        ring = open_ring(history_ptr, samples, chunk, dtype, C)
        row = chunk.sample.to(gl.int64) * count
        q_row = row * 0 if C.LAYOUT == SHARED else row
        shape: gl.constexpr = [C.BLOCK_R, C.BLOCK_D]
        grad_out = load_rows(grad_out_ptr, row, count, 0, shape, left, C.D)
        q = decompose(load_rows(query_ptr, q_row, count, 0, shape, left, C.D), C.COMPONENTS)
        by_query: gl.constexpr = gl.SliceLayout(1, mma)
        r = gl.arange(0, C.BLOCK_R, by_query)
        if C.COMPONENTS == 1:
            out = load_rows(outputs.out, row, count, 0, shape, left, C.D).to(gl.float32)
            out += load_rows(outputs.residual, row, count, 0, shape, left, C.D).to(gl.float32)
            delta = gl.sum(grad_out.to(gl.float32) * out, 1)
            delta = gl.convert_layout(delta, by_query)
        grad_out = decompose(grad_out, C.COMPONENTS)
        stacked_queries = allocate_components(q[0].dtype, C.COMPONENTS, 2 * C.BLOCK_R, C.BLOCK_D)
        store_components(stacked_queries, 0, grad_out, False)
        store_components(stacked_queries, C.BLOCK_R, q, False)
        COLUMNS: gl.constexpr = columns_at_once(C)
        if C.COMPONENTS > 1:  # delta, rounded like the products from which it is subtracted
            products = gl.zeros([C.BLOCK_R, C.BLOCK_R], gl.float32, mma)
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                out = gl.allocate_shared_memory(
                    dtype, [C.BLOCK_R, COLUMNS], ring_layout(COLUMNS, dtype)
                )
                out.store(
                    load_rows(outputs.out, row, count, column, [C.BLOCK_R, COLUMNS], left, C.D)
                )
                out_components = decompose(out.permute((1, 0)).load(right), C.COMPONENTS)
                grad_out_components = load_components(
                    stacked_queries, (0, C.BLOCK_R), (column, COLUMNS), left, False
                )
                products = product(grad_out_components, out_components, products, C.COMPONENTS)
            row_of_out = gl.arange(0, C.BLOCK_R, gl.SliceLayout(0, mma))[None, :]
            delta = gl.sum(gl.where(r[:, None] == row_of_out, products, 0.0), 1)
        stacked_weights = allocate_components(q[0].dtype, C.COMPONENTS, 2 * C.BLOCK_R, C.BLOCK_N)
        maximum, inverse = load_stats(outputs, num_rows, row, r, count)
        grad_lse = load_grad_lse(outputs, row, r, inverse)
        delta = store_delta(grads, delta, grad_lse, row, r, count, chunk)
        stats = QueryStats(maximum, inverse, grad_lse, delta)
        draws = query_draws(biases.dropout, row + r)[:, None]
        alone = (end - begin == 1) & (partial < 0)

        STORED: gl.constexpr = min(C.BLOCK_D, 64 if C.COMPONENTS == 1 else 32)
        AT_ONCE: gl.constexpr = 2 * C.BLOCK_R if C.COMPONENTS == 1 else C.BLOCK_R
        stored = indices_to_store(C.BLOCK_N, STORED, dtype)
        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, mma))
        ROWS: gl.constexpr = row_components(C)
        accs = zeros_by_column([C.BLOCK_R, COLUMNS], mma, C)
        zeros = gl.zeros([C.BLOCK_R, C.BLOCK_N], gl.float32, mma)
        stage = 0
        for start in range(begin, end, C.BLOCK_N):
            indices = next_indices(history_ptr, samples, chunk, ring, start, C)
            targets = load_targets(grads, stored, chunk.first, start, end)
            async_copy.wait_group(C.NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = zeros
            dp = zeros
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = decompose(tile.slice(column, COLUMNS, 1).permute((1, 0)).load(right), ROWS)
                q_components = load_components(
                    stacked_queries, (C.BLOCK_R, C.BLOCK_R), (column, COLUMNS), left, False
                )
                dots = product(q_components, x, dots, C.COMPONENTS)
                grad_out_components = load_components(
                    stacked_queries, (0, C.BLOCK_R), (column, COLUMNS), left, False
                )
                dp = product(grad_out_components, x, dp, C.COMPONENTS)
            n = start + index
            _, p, ds, buckets = weights_and_gradients(
                dots, dp, stats, draws, alone, biases, chunk, n, r, count, scale, C, ROWS=1
            )
            if grads.history is not None:
                store_components(stacked_weights, 0, decompose(p.to(dtype), C.COMPONENTS), False)
                store_components(
                    stacked_weights,
                    C.BLOCK_R,
                    decompose((ds * scale).to(dtype), C.COMPONENTS),
                    False,
                )
            ds_operand = decompose(gl.convert_layout(ds.to(dtype), left), C.COMPONENTS)
            new_accs = ()
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = decompose(tile.slice(column, COLUMNS, 1).load(right), ROWS)
                new_accs += (product(ds_operand, x, accs[column // COLUMNS], C.COMPONENTS),)
            accs = new_accs
            if grads.history is not None:
                for column in gl.static_range(0, C.BLOCK_D, STORED):
                    grad_x = gl.zeros([C.BLOCK_N, STORED], gl.float32, mma)
                    for k in gl.static_range(0, 2 * C.BLOCK_R, AT_ONCE):
                        weights = load_components(
                            stacked_weights, (k, AT_ONCE), (0, C.BLOCK_N), left, True
                        )
                        operand = load_components(
                            stacked_queries, (k, AT_ONCE), (column, STORED), right, False
                        )
                        grad_x = product(weights, operand, grad_x, C.COMPONENTS)
                    store_grad_of_history(
                        grads, grad_x, stored, targets, chunk.first, start, end, column, C
                    )
            store_grad_of_bias(grads, ds, chunk.first, n, r, end, C, ROWS=1)
            if C.P + C.A > 0:
                TABLE_COMPONENTS: gl.constexpr = max(2, C.COMPONENTS)
                ds_components = decompose(gl.convert_layout(ds, left), TABLE_COMPONENTS)
                bucket_layout: gl.constexpr = gl.SliceLayout(1, right)
                visible = start + gl.arange(0, C.BLOCK_N, bucket_layout) < end
                if C.P > 0:
                    position_buckets = gl.convert_layout(buckets[0], bucket_layout)
                    _add_to_table(
                        table, position_buckets, visible, ds_components, 0, TABLE_COMPONENTS
                    )
                if C.A > 0:
                    age_buckets = gl.convert_layout(buckets[1], bucket_layout)
                    _add_to_table(
                        table, age_buckets, visible, ds_components, BLOCKS_P, TABLE_COMPONENTS
                    )
            stage = copy_next(ring, stage, history_ptr, samples, indices, start, end, C)

        for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
            acc = accs[column // COLUMNS]
            if partial >= 0:
                store_rows(partials.acc, acc, partial.to(gl.int64) * count, count, column, C.D)
            else:
                store_rows(grads.query, acc * scale, row, count, column, C.D)
    if C.P + C.A > 0:
        ptr = grads.tables + gl.program_id(0).to(gl.int64) * ((C.P + C.A) * C.H)
        _store_table(table, ptr, C.P, C.H, 0, BLOCKS_P)
        _store_table(table, ptr + C.P * C.H, C.A, C.H, BLOCKS_P, BLOCKS_A)
    clear_gradients(grads, samples, num_samples, num_history_rows, C)
