"""Forward of target attention by one to four warps, for samples of 9 to 64 query rows.

Each warp has 16 query rows on the M side of its products, and history rows on the N side. All warps
of a program read the same tiles, so that history rows are read once: N·D·e bytes, 4·N·R·D FLOPs.
fp32 is multiplied as bf16 components. ``general_combine.py`` combines chunks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torchrec_jagged_attn.ops.device.gluon import launch_dependents, products_by_warp
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED
from torchrec_jagged_attn.ops.target_attention.kernels.warp_combine import (
    elementwise_stats,
    store_chunk_stats,
    store_outputs,
    store_stats,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    allocate_components,
    columns_at_once,
    copy_next,
    decompose,
    drop_weights,
    exp,
    find_chunk,
    load_bias,
    load_components,
    load_row_numbers,
    load_rows,
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
    mma: gl.constexpr = products_by_warp(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if C.OVERLAP:
        launch_dependents()
    chunk = find_chunk(samples, num_samples, num_partials, C)
    begin, end, partial = chunk.begin, chunk.end, chunk.partial
    if chunk.busy:
        history_ptr = rows_of_sample(history_ptr, samples, chunk, C)
        dtype: gl.constexpr = query_ptr.dtype.element_ty
        ring = open_ring(history_ptr, samples, chunk, dtype, C)
        count = num_targets * C.H
        row = chunk.sample.to(gl.int64) * count
        q_row = row * 0 if C.LAYOUT == SHARED else row
        q = decompose(
            load_rows(query_ptr, q_row, count, 0, [C.BLOCK_R, C.BLOCK_D], left, C.D), C.COMPONENTS
        )
        if C.COMPONENTS > 1:  # too many for registers
            queries = allocate_components(gl.bfloat16, C.COMPONENTS, C.BLOCK_R, C.BLOCK_D)
            store_components(queries, 0, q, False)

        by_query: gl.constexpr = gl.SliceLayout(1, mma)
        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, mma))
        r = gl.arange(0, C.BLOCK_R, by_query)
        draws = query_draws(biases.dropout, row + r)[:, None]
        COLUMNS: gl.constexpr = columns_at_once(C)
        ROWS: gl.constexpr = row_components(C)
        accs = zeros_by_column([C.BLOCK_R, COLUMNS], mma, C)
        total = gl.zeros([C.BLOCK_R], gl.float32, by_query)
        maximum = gl.full([C.BLOCK_R], -float("inf"), gl.float32, by_query)
        stage = 0
        for start in range(begin, end, C.BLOCK_N):
            indices = next_indices(history_ptr, samples, chunk, ring, start, C)
            async_copy.wait_group(C.NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = gl.zeros([C.BLOCK_R, C.BLOCK_N], gl.float32, mma)
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = decompose(tile.slice(column, COLUMNS, 1).permute((1, 0)).load(right), ROWS)
                if C.COMPONENTS > 1:
                    q_components = load_components(
                        queries, (0, C.BLOCK_R), (column, COLUMNS), left, False
                    )
                else:
                    q_components = q
                dots = product(q_components, x, dots, C.COMPONENTS)
            n = start + index
            visible = (n < end)[None, :]
            buckets = row_buckets(n, biases, chunk, C)
            bias = load_bias(biases, buckets, n, r, chunk, count, C, ROWS=1)
            scores = gl.where(visible, dots * scale + bias, -float("inf"))
            if C.SCORE == "softmax":
                new_maximum = gl.maximum(maximum, gl.max(scores, 1))
                shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
                p = exp(scores - shift[:, None], C.COMPONENTS)
                rescale = exp(maximum - shift, C.COMPONENTS)
                maximum = new_maximum
                total = total * rescale + gl.sum(p, 1)
            else:
                p = weights_and_slopes(scores, C.SCORE, C.COMPONENTS > 1)[0]
            numbers = load_row_numbers(biases, chunk.first + n, n < end)[None, :]
            p = drop_weights(p, biases.dropout, draws, numbers)
            weights = decompose(gl.convert_layout(p.to(dtype), left), C.COMPONENTS)
            new_accs = ()
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                x = decompose(tile.slice(column, COLUMNS, 1).load(right), ROWS)
                acc = accs[column // COLUMNS]
                if C.SCORE == "softmax":
                    acc *= rescale[:, None]
                new_accs += (product(weights, x, acc, C.COMPONENTS),)
            accs = new_accs
            stage = copy_next(ring, stage, history_ptr, samples, indices, start, end, C)

        if C.SCORE != "softmax":
            maximum, total = elementwise_stats(total, chunk)
        if partial >= 0:
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                acc = accs[column // COLUMNS]
                store_rows(partials.acc, acc, partial.to(gl.int64) * count, count, column, C.D)
            store_chunk_stats(partials, partial, count, maximum, total)
        else:
            inverse = store_stats(outputs, num_rows, row, count, maximum, total)
            for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
                out = accs[column // COLUMNS] * inverse[:, None]
                store_outputs(outputs, out, row, count, column, C.D)
