"""Forward of target attention, a warp for all query rows: for samples of up to 8 query rows.

A program is one warp: it computes all query rows of a sample over one chunk of its history. History
rows are read once, N·D·e bytes, which is the roofline. Tiles of history rows are on the M side of
products: ``[rows, queries]`` for scores and ``[width, queries]`` for outputs, which read the same
tile in shared memory. With so many small programs per multiprocessor, enough loads are in flight.
The last program of a sample combines its chunks: see ``warp_combine.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED
from torchrec_jagged_attn.ops.target_attention.kernels.warp_combine import (
    combine_outputs,
    elementwise_stats,
    is_last_chunk,
    store_chunk_stats,
    store_outputs,
    store_stats,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    BLOCK_R,
    LEFT,
    MMA,
    RIGHT,
    allocate_components,
    columns_at_once,
    copy_next,
    decompose,
    drop_weights,
    exp,
    find_scheduled_chunk,
    load_bias,
    load_columns,
    load_components,
    load_row_numbers,
    next_indices,
    open_ring,
    product,
    query_draws,
    row_buckets,
    row_components,
    rows_of_sample,
    store_components,
    store_rows,
    weights_and_slopes,
    zeros_by_column,
)


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_partials"])
def forward_kernel(
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], or packed codes; rows STRIDE apart
    biases,  # arguments.Biases
    outputs,  # Outputs; ``residual`` is None if not requested
    partials,  # Partials
    samples,  # Samples
    num_samples,
    num_targets,
    num_rows,
    num_partials,
    scale,
    C: gl.constexpr,  # Constants
):
    """All query rows of a sample over one chunk of its history."""
    chunk = find_scheduled_chunk(samples, num_samples, num_partials, C)
    begin, end, partial = chunk.begin, chunk.end, chunk.partial
    if chunk.busy:
        history_ptr = rows_of_sample(history_ptr, samples, chunk, C)
        dtype: gl.constexpr = query_ptr.dtype.element_ty
        ring = open_ring(history_ptr, samples, chunk, dtype, C)
        count = num_targets * C.H
        row = chunk.sample.to(gl.int64) * count
        q = load_columns(query_ptr, row * 0 if C.LAYOUT == SHARED else row, count, C)
        q = decompose(q, C.COMPONENTS)
        if C.COMPONENTS > 1:  # too many for registers
            queries = allocate_components(gl.bfloat16, C.COMPONENTS, BLOCK_R, C.BLOCK_D)
            store_components(queries, 0, q)

        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, MMA))
        r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
        draws = query_draws(biases.dropout, row + r)[None, :]
        zeros = gl.zeros([C.BLOCK_N, BLOCK_R], gl.float32, MMA)
        COLUMNS: gl.constexpr = columns_at_once(C)
        ROWS: gl.constexpr = row_components(C)
        accs = zeros_by_column(C)
        total = zeros  # by row, summed after the loop
        maximum = gl.full([BLOCK_R], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
        stage = 0
        for start in range(begin, end, C.BLOCK_N):
            indices = next_indices(history_ptr, samples, chunk, ring, start, C)
            async_copy.wait_group(C.NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = zeros
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = decompose(tile.slice(column, COLUMNS, 1).load(LEFT), ROWS)
                if C.COMPONENTS > 1:
                    q_components = load_components(
                        queries, (0, BLOCK_R), (column, COLUMNS), RIGHT, True
                    )
                else:
                    q_components = q
                dots = product(x, q_components, dots, C.COMPONENTS, SEPARATE=True)
            n = start + index
            visible = (n < end)[:, None]
            buckets = row_buckets(n, biases, chunk, C)
            bias = load_bias(biases, buckets, n, r, chunk, count, C)
            scores = gl.where(visible, dots * scale + bias, -float("inf"))
            if C.SCORE == "softmax":
                new_maximum = gl.maximum(maximum, gl.max(scores, 0))
                shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
                p = exp(scores - shift[None, :], C.COMPONENTS)
                rescale = exp(maximum - shift, C.COMPONENTS)[None, :]
                maximum = new_maximum
                total = total * rescale + p
            else:
                p = weights_and_slopes(scores, C.SCORE, C.COMPONENTS > 1)[0]
            numbers = load_row_numbers(biases, chunk.first + n, n < end)[:, None]
            p = drop_weights(p, biases.dropout, draws, numbers)
            weights = decompose(gl.convert_layout(p.to(dtype), RIGHT), C.COMPONENTS)
            new_accs = ()
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                columns = tile.slice(column, COLUMNS, 1).permute((1, 0)).load(LEFT)
                acc = accs[column // COLUMNS]
                if C.SCORE == "softmax":
                    acc *= rescale
                new_accs += (product(decompose(columns, ROWS), weights, acc, C.COMPONENTS),)
            accs = new_accs
            stage = copy_next(ring, stage, history_ptr, samples, indices, start, end, C)

        total = gl.sum(total, 0)
        if C.SCORE != "softmax":
            maximum, total = elementwise_stats(total, chunk)
        if partial < 0:
            inverse = store_stats(outputs, num_rows, row, count, maximum, total)
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                out = gl.permute(accs[column // COLUMNS] * inverse[None, :], (1, 0))
                store_outputs(outputs, out, row, count, column, C.D)
        else:
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                acc = gl.permute(accs[column // COLUMNS], (1, 0))
                store_rows(partials.acc, acc, partial.to(gl.int64) * count, count, column, C.D)
            store_chunk_stats(partials, partial, count, maximum, total)
            if is_last_chunk(samples, num_partials, chunk):
                combine_outputs(partials, outputs, num_rows, row, count, chunk, C)
