"""Backward of target attention, a warp for all query rows: for samples of up to 8 query rows.

A program is one warp: it computes the gradients of one chunk of a sample's history, of its biases
and of all its query rows. History rows are read once and their gradients written once, 2·N·D·e
bytes, which is the roofline.

The gradient of history rows is one product of full depth (K = 16): ``[p | ds]`` times the stacked
rows of grad_out and q, in shared memory. The last program of a sample combines its chunks: see
``warp_combine.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.ops.device.gluon import launch_dependents
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED
from torchrec_jagged_attn.ops.target_attention.kernels.warp_combine import (
    QueryStats,
    combine_queries,
    is_last_chunk,
    load_grad_lse,
    load_stats,
    store_delta,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    BLOCK_R,
    LEFT,
    MMA,
    RIGHT,
    allocate_components,
    blocks_of,
    clear_gradients,
    columns_at_once,
    copy_next,
    decompose,
    find_scheduled_chunk,
    indices_to_store,
    load_columns,
    load_components,
    load_rows,
    load_targets,
    next_indices,
    open_ring,
    product,
    program_of_sample,
    query_draws,
    row_components,
    rows_of_sample,
    store_components,
    store_grad_of_history,
    store_rows,
    weights_and_gradients,
    zeros_by_column,
)


@gluon.jit
def _side_by_side(a, b):
    """``[a | b]`` as a left operand, without exchanges between lanes."""
    joined = gl.permute(gl.join(a, b), (0, 2, 1))
    return gl.convert_layout(gl.reshape(joined, [a.shape[0], 2 * a.shape[1]]), LEFT)


@gluon.jit
def _delta_of_half(outputs, grad_out, row, count, C: gl.constexpr):
    """``[8]``: Σ_d grad_out · out, in half precision."""
    out = load_columns(outputs.out, row, count, C).to(gl.float32)
    out += load_columns(outputs.residual, row, count, C).to(gl.float32)
    delta = gl.sum(grad_out.to(gl.float32) * out, 0)
    return gl.convert_layout(delta, gl.SliceLayout(0, MMA))


@gluon.jit
def _delta_of_fp32(outputs, stacked_queries, row, count, C: gl.constexpr):
    """``[8]``: Σ_d grad_out · out, rounded like the products from which it is subtracted."""
    COLUMNS: gl.constexpr = columns_at_once(C)
    products = gl.zeros([16, BLOCK_R], gl.float32, MMA)
    for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
        out = load_rows(outputs.out, row, count, column, [16, COLUMNS], LEFT, C.D)
        grad_out_components = load_components(
            stacked_queries, (0, BLOCK_R), (column, COLUMNS), RIGHT, True
        )
        products = product(
            decompose(out, C.COMPONENTS), grad_out_components, products, C.COMPONENTS, SEPARATE=True
        )
    row_of_out = gl.arange(0, 16, gl.SliceLayout(1, MMA))[:, None]
    row_of_grad = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))[None, :]
    return gl.sum(gl.where(row_of_out == row_of_grad, products, 0.0), 0)


@gluon.jit
def _multiply_rows(tile, q, grad_out, stacked_queries, C: gl.constexpr):
    """``[BLOCK_N, 8]`` twice: products of a tile's rows with queries and gradients of outputs."""
    COLUMNS: gl.constexpr = columns_at_once(C)
    dots = gl.zeros([C.BLOCK_N, BLOCK_R], gl.float32, MMA)
    dp = dots
    for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
        x = decompose(tile.slice(column, COLUMNS, 1).load(LEFT), row_components(C))
        if C.COMPONENTS > 1:  # too many for registers
            grad_out_components = load_components(
                stacked_queries, (0, BLOCK_R), (column, COLUMNS), RIGHT, True
            )
            q_components = load_components(
                stacked_queries, (BLOCK_R, BLOCK_R), (column, COLUMNS), RIGHT, True
            )
        else:
            grad_out_components = grad_out
            q_components = q
        dots = product(x, q_components, dots, C.COMPONENTS, SEPARATE=True)
        dp = product(x, grad_out_components, dp, C.COMPONENTS, SEPARATE=True)
    return dots, dp


@gluon.jit
def _differentiate_rows(grads, row_operands, C: gl.constexpr):
    """Store the gradients of a tile's rows: ``p · grad_out + ds · q``."""
    p, ds, stacked_queries, indices, targets, first, start, end = row_operands
    dtype: gl.constexpr = grads.history.dtype.element_ty
    STORED: gl.constexpr = indices[1].shape[0]
    stacked_weights = decompose(_side_by_side(p.to(dtype), ds.to(dtype)), C.COMPONENTS)
    for column in gl.static_range(0, C.BLOCK_D, STORED):
        operand = load_components(stacked_queries, (0, 2 * BLOCK_R), (column, STORED), RIGHT, False)
        grad_x = gl.zeros([C.BLOCK_N, STORED], gl.float32, MMA)
        grad_x = product(stacked_weights, operand, grad_x, C.COMPONENTS)
        store_grad_of_history(grads, grad_x, indices, targets, first, start, end, column, C)


@gluon.jit
def _add_to_queries(accs, tile, ds, dtype: gl.constexpr, C: gl.constexpr):
    """``accs``, columns of the gradients of queries, plus the terms of the rows of a tile."""
    COLUMNS: gl.constexpr = columns_at_once(C)
    ROWS: gl.constexpr = row_components(C)
    ds_components = decompose(gl.convert_layout(ds.to(dtype), RIGHT), C.COMPONENTS)
    new_accs = ()
    for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
        x = decompose(tile.slice(column, COLUMNS, 1).permute((1, 0)).load(LEFT), ROWS)
        new_accs += (product(x, ds_components, accs[column // COLUMNS], C.COMPONENTS),)
    return new_accs


@gluon.jit
def _allocate_table(C: gl.constexpr):
    """``[blocks, 16, 8]`` in shared memory: the blocks of positions, then of ages."""
    shape: gl.constexpr = [blocks_of(C.P) + blocks_of(C.A), 16, BLOCK_R]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float32, shape, plain)


@gluon.jit
def _clear(table, weights):
    """Set a table and, if given, the table of ``weights`` to zero."""
    BLOCKS: gl.constexpr = table.shape[0]
    for block in gl.static_range(BLOCKS):
        table.index(block).store(gl.zeros([16, BLOCK_R], gl.float32, MMA))
        if weights is not None:
            weights.index(block).store(gl.zeros([16, BLOCK_R], gl.float32, MMA))


@gluon.jit
def _add_to_table(
    table, weights, buckets, visible, ds, p, FIRST: gl.constexpr, COMPONENTS: gl.constexpr
):
    """Add gradients of scores ``ds`` (in COMPONENTS, as right operands) to their ``buckets``.

    The buckets begin at block FIRST of ``table``. The rows of a tile, which are near in time, fall
    into few blocks. ``p`` is added to the table of ``weights``, if given.
    """
    block_of_row = buckets // 16
    lowest = gl.min(gl.where(visible, block_of_row, 2**30), 0)
    highest = gl.max(gl.where(visible, block_of_row, -1), 0)
    b = gl.arange(0, 16, gl.SliceLayout(1, LEFT))
    zeros = gl.zeros([16, BLOCK_R], gl.float32, MMA)
    for at in range(lowest, highest + 1):
        in_bucket = (b[:, None] + at * 16 == buckets[None, :]) & visible[None, :]
        one_hot = in_bucket.to(gl.int16).to(gl.bfloat16)
        sums = zeros
        for i in gl.static_range(COMPONENTS):
            sums = mma_v2(one_hot, ds[COMPONENTS - 1 - i], sums)
        block = table.index(FIRST + at)
        block.store(block.load(MMA) + sums)
        if weights is not None:
            block = weights.index(FIRST + at)
            block.store(block.load(MMA) + mma_v2(one_hot, p, zeros))


@gluon.jit
def _add_to_tables(table, weights, buckets, ds, p, count, C: gl.constexpr):
    """Add the first ``count`` rows of a tile to their ``buckets`` of position and age."""
    COMPONENTS: gl.constexpr = max(2, C.COMPONENTS)
    ds = decompose(gl.convert_layout(ds, RIGHT), COMPONENTS)
    if weights is not None:
        p = gl.convert_layout(p.to(gl.bfloat16), RIGHT)
    bucket_layout: gl.constexpr = gl.SliceLayout(0, LEFT)
    visible = gl.arange(0, C.BLOCK_N, bucket_layout) < count
    if C.P > 0:
        position_buckets = gl.convert_layout(buckets[0], bucket_layout)
        _add_to_table(table, weights, position_buckets, visible, ds, p, 0, COMPONENTS)
    if C.A > 0:
        age_buckets = gl.convert_layout(buckets[1], bucket_layout)
        _add_to_table(table, weights, age_buckets, visible, ds, p, blocks_of(C.P), COMPONENTS)


@gluon.jit
def _sum_of_blocks(table, BLOCKS: gl.constexpr):
    """``[8]``: the sum over the buckets of the first ``BLOCKS`` blocks."""
    sums = gl.zeros([16, BLOCK_R], gl.float32, MMA)
    for at in gl.static_range(BLOCKS):
        sums += table.index(at).load(MMA)
    return gl.sum(sums, 0)


@gluon.jit
def _bucket_ptrs(ptr, at: gl.constexpr, count, C: gl.constexpr):
    """Pointers to the block ``at`` of a table in ``[P + A, count]``, and their mask."""
    BLOCKS_P: gl.constexpr = blocks_of(C.P)
    IS_POSITION: gl.constexpr = at < BLOCKS_P
    b = gl.arange(0, 16, gl.SliceLayout(1, MMA)) + (at if IS_POSITION else at - BLOCKS_P) * 16
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
    mask = (b < (C.P if IS_POSITION else C.A))[:, None] & (r < count)[None, :]
    return ptr + ((b if IS_POSITION else C.P + b)[:, None] * count + r[None, :]), mask


@gluon.jit
def _store_table(table, ptr, count, C: gl.constexpr):
    """Store a table as ``[P + A, count]``."""
    for at in gl.static_range(blocks_of(C.P) + blocks_of(C.A)):
        ptrs, mask = _bucket_ptrs(ptr, at, count, C)
        gl.store(ptrs, table.index(at).load(MMA), mask=mask)


@gluon.jit
def _store_correction(partials, ptr, count, chunk, grad_lse, C: gl.constexpr):
    """Store ``-Σ ds · Σ p`` by bucket, over all chunks of a sample, as another table.

    ``grad_lse``, if given, is subtracted from ``Σ ds``.
    """
    size = (1 + C.P + C.A) * count
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
    ds_total = gl.zeros([BLOCK_R], gl.float32, gl.SliceLayout(0, MMA))
    for at in range(chunk.chunks):
        chunk_ptrs = partials.totals + (chunk.first_partial + at).to(gl.int64) * size
        ds_total += gl.load(chunk_ptrs + r, mask=r < count, other=0.0)
    if grad_lse is not None:
        ds_total -= grad_lse
    for block in gl.static_range(blocks_of(C.P) + blocks_of(C.A)):
        weights = gl.zeros([16, BLOCK_R], gl.float32, MMA)
        ptrs, mask = _bucket_ptrs(partials.totals + count, block, count, C)
        for at in range(chunk.chunks):
            chunk_ptrs = ptrs + (chunk.first_partial + at).to(gl.int64) * size
            weights += gl.load(chunk_ptrs, mask=mask, other=0.0)
        ptrs, mask = _bucket_ptrs(ptr, block, count, C)
        gl.store(ptrs, -ds_total[None, :] * weights, mask=mask)


@gluon.jit
def _subtract_means(table, weights, partials, partial, count, grad_lse, C: gl.constexpr):
    """Subtract ``Σ ds · Σ p`` from each bucket. If the sample has several chunks, store both sums
    in its partial result instead.

    ``grad_lse``, if given, is subtracted from ``Σ ds``.
    """
    BLOCKS: gl.constexpr = blocks_of(C.P) + blocks_of(C.A)
    ds_total = _sum_of_blocks(table, blocks_of(C.P) if C.P > 0 else BLOCKS)
    if partial < 0:
        if grad_lse is not None:
            ds_total -= grad_lse
        for block in gl.static_range(BLOCKS):
            means = ds_total[None, :] * weights.index(block).load(MMA)
            table.index(block).store(table.index(block).load(MMA) - means)
    else:
        ptr = partials.totals + partial.to(gl.int64) * (1 + C.P + C.A) * count
        r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
        gl.store(ptr + r, ds_total, mask=r < count)
        _store_table(weights, ptr + count, count, C)


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
    if C.OVERLAP:
        launch_dependents()
    chunk = find_scheduled_chunk(samples, num_samples, num_partials, C)
    begin, end, partial = chunk.begin, chunk.end, chunk.partial
    count = num_targets * C.H
    weights = None
    if C.P + C.A > 0:
        table = _allocate_table(C)
        if partials.totals is not None:
            weights = _allocate_table(C)
        _clear(table, weights)
    if chunk.busy:
        history_ptr = rows_of_sample(history_ptr, samples, chunk, C)
        dtype: gl.constexpr = query_ptr.dtype.element_ty
        ring = open_ring(history_ptr, samples, chunk, dtype, C)
        row = chunk.sample.to(gl.int64) * count
        query_row = row * 0 if C.LAYOUT == SHARED else row
        grad_out = load_columns(grad_out_ptr, row, count, C)
        q = decompose(load_columns(query_ptr, query_row, count, C), C.COMPONENTS)
        if C.COMPONENTS == 1:
            delta = _delta_of_half(outputs, grad_out, row, count, C)
        grad_out = decompose(grad_out, C.COMPONENTS)
        stacked_queries = allocate_components(q[0].dtype, C.COMPONENTS, 2 * BLOCK_R, C.BLOCK_D)
        store_components(stacked_queries, 0, grad_out)
        store_components(stacked_queries, BLOCK_R, q)
        if C.COMPONENTS > 1:
            delta = _delta_of_fp32(outputs, stacked_queries, row, count, C)
        r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
        maximum, inverse = load_stats(outputs, num_rows, row, r, count)
        grad_lse = load_grad_lse(outputs, row, r, inverse)
        delta = store_delta(grads, delta, grad_lse, row, r, count, chunk)
        stats = QueryStats(maximum, inverse, grad_lse, delta)
        draws = query_draws(biases.dropout, row + r)[None, :]
        alone = (end - begin == 1) & (partial < 0)

        stored = indices_to_store(C.BLOCK_N, min(C.BLOCK_D, 64), dtype)
        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, MMA))
        COLUMNS: gl.constexpr = columns_at_once(C)
        accs = zeros_by_column(C)
        stage = 0
        for start in range(begin, end, C.BLOCK_N):
            indices = next_indices(history_ptr, samples, chunk, ring, start, C)
            targets = load_targets(grads, stored, chunk.first, start, end)
            async_copy.wait_group(C.NUM_STAGES - 2)
            tile = ring.index(stage)
            dots, dp = _multiply_rows(tile, q, grad_out, stacked_queries, C)
            n = start + index
            p, kept, ds, buckets = weights_and_gradients(
                dots, dp, stats, draws, alone, biases, chunk, n, r, count, scale, C
            )
            if grads.history is not None:
                row_operands = (
                    kept,
                    ds * scale,
                    stacked_queries,
                    stored,
                    targets,
                    chunk.first,
                    start,
                    end,
                )
                if grads.targets is None or gl.max(targets, 0) >= 0:
                    _differentiate_rows(grads, row_operands, C)
            accs = _add_to_queries(accs, tile, ds, dtype, C)
            if grads.prior_weights is not None:
                gl.store(grads.prior_weights + chunk.first + n, gl.sum(ds, 1), mask=n < end)
            if C.P + C.A > 0:
                _add_to_tables(table, weights, buckets, ds, p, end - start, C)
            stage = copy_next(ring, stage, history_ptr, samples, indices, start, end, C)

        if partials.totals is not None:
            _subtract_means(table, weights, partials, partial, count, grad_lse, C)
        for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
            grad_query = gl.permute(accs[column // COLUMNS], (1, 0))
            if partial >= 0:
                store_rows(
                    partials.acc, grad_query, partial.to(gl.int64) * count, count, column, C.D
                )
            else:
                store_rows(grads.query, grad_query * scale, row, count, column, C.D)
        if partial >= 0:
            if is_last_chunk(samples, num_partials, chunk):
                combine_queries(partials, grads, row, count, chunk, scale, C)
                if partials.totals is not None:
                    program = program_of_sample(chunk.sample, num_samples, num_partials)
                    ptr = grads.tables + program.to(gl.int64) * (C.P + C.A) * count
                    _store_correction(partials, ptr, count, chunk, grad_lse, C)
    if C.P + C.A > 0:
        is_left_to_last_chunk = (
            (chunk.length > 2 * C.CHUNK) & (partial < 0) & (partials.totals is not None)
        )
        if not is_left_to_last_chunk:
            ptr = grads.tables + gl.program_id(0).to(gl.int64) * (C.P + C.A) * count
            _store_table(table, ptr, count, C)
    clear_gradients(grads, samples, num_samples, num_history_rows, C)
