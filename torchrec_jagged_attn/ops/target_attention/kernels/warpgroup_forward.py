"""Forward of target attention by a warpgroup, on Hopper: 9 to 64 query rows in half precision.

History rows are on the M side of ``wgmma`` products: for scores, ``[rows, queries]``, and,
transposed, for outputs, ``[width, queries]``. They are read once: N·D·e bytes, 4·N·R·D FLOPs.

The softmax is online, but its sums are rescaled only if a score exceeds the subtracted shift by
more than MARGIN, so that warps rarely have to agree on a new shift. The last program of a sample
combines its chunks: see ``warp_combine.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchrec_jagged_attn.ops.device.gluon import products_by_warpgroup, thread_barrier
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import SHARED
from torchrec_jagged_attn.ops.target_attention.kernels.warp_combine import (
    combine_outputs,
    elementwise_stats,
    is_last_chunk,
    store_chunk_stats,
    store_stats,
)
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    LN2,
    LOG2E,
    drop_weights,
    find_scheduled_chunk,
    load_row_numbers,
    query_draws,
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

MARGIN = gl.constexpr(10.0)  # largest score above the shift, in base 2
LOWEST = gl.constexpr(-3e38)


@gluon.jit
def _raise_shift(scores, shift, total, acc):
    """Make the largest scores so far the shift, and rescale ``total`` and ``acc``."""
    largest = gl.maximum(shift, gl.max(scores, 0))
    rescale = gl.exp2(shift - largest)[None, :]
    return largest, total * rescale, acc * rescale


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_partials"])
def forward_kernel(
    query_ptr,  # [rows, D]
    history_desc,  # of [N, 1, D], see ``tma.jagged_rows``
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
    mma: gl.constexpr = products_by_warpgroup(C.BLOCK_R, gl.num_warps())
    by_query: gl.constexpr = gl.SliceLayout(0, mma)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    chunk = find_scheduled_chunk(samples, num_samples, num_partials, C, PROGRAMS)
    begin, end, partial = chunk.begin, chunk.end, chunk.partial
    if chunk.busy:
        count = num_targets * C.H
        row = chunk.sample.to(gl.int64) * count
        queries = copy_queries(query_ptr if C.LAYOUT == SHARED else query_ptr + row * C.D, count, C)
        async_copy.commit_group()
        last = (chunk.first + end).to(gl.int32)
        ring = open_ring(history_desc, last, end - begin, C.NUM_STAGES)
        WARPS: gl.constexpr = gl.num_warps()
        all_in_each: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        largest = gl.allocate_shared_memory(gl.float32, [WARPS], plain)
        weights = gl.allocate_shared_memory(
            dtype, [C.BLOCK_N, C.BLOCK_R], warpgroup_layout(C.BLOCK_R)
        )

        index = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, mma))
        r = gl.arange(0, C.BLOCK_R, by_query)
        draws = query_draws(biases.dropout, row + r)[None, :]
        zeros = gl.zeros([C.BLOCK_N, C.BLOCK_R], gl.float32, mma)
        acc = gl.zeros([C.BLOCK_D, C.BLOCK_R], gl.float32, mma)
        total = zeros  # by row, summed after the loop
        shift = gl.full([C.BLOCK_R], LOWEST, gl.float32, by_query)
        async_copy.wait_group(0)
        fence_async_shared()
        for tile in range(gl.cdiv(end - begin, C.BLOCK_N)):
            start = begin + tile * C.BLOCK_N
            x = wait_for_tile(ring, tile, history_desc, end - start)
            dots = warpgroup_mma(x, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dots = warpgroup_mma_wait(0, deps=(dots,))
            copy_next(ring, tile, history_desc, last, end - start)
            n = start + index
            visible = (n < end)[:, None]
            scores = add_biases(dots * (scale * LOG2E), biases, start, chunk, count, C)
            scores = gl.where(visible, scores, -float("inf"))
            numbers = load_row_numbers(biases, chunk.first + n, n < end)[:, None]
            if C.SCORE == "softmax":
                below = scores - shift[None, :]
                p = gl.exp2(below)
                weights.store(drop_weights(p, biases.dropout, draws, numbers).to(dtype))
                fence_async_shared()
                warp_maxima = gl.max(gl.reshape(gl.max(below, 1), [WARPS, C.BLOCK_N // WARPS]), 1)
                largest.store(warp_maxima)
                thread_barrier()
                if gl.max(largest.load(all_in_each), 0) > MARGIN:
                    shift, total, acc = _raise_shift(scores, shift, total, acc)
                    p = gl.exp2(scores - shift[None, :])
                    weights.store(drop_weights(p, biases.dropout, draws, numbers).to(dtype))
                    fence_async_shared()
                    thread_barrier()
                total += p
            else:
                p = weights_and_slopes(scores * LN2, C.SCORE, False)[0]
                weights.store(drop_weights(p, biases.dropout, draws, numbers).to(dtype))
                fence_async_shared()
                thread_barrier()
            acc = warpgroup_mma(x.permute((1, 0)), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))

        total = gl.sum(total, 0)
        maximum = shift / LOG2E
        if C.SCORE != "softmax":
            maximum, total = elementwise_stats(total, chunk)
        if partial >= 0:
            column = gl.arange(0, C.BLOCK_D, gl.SliceLayout(1, mma))[:, None]
            ptrs = partials.acc + partial.to(gl.int64) * count * C.D + (r[None, :] * C.D + column)
            gl.store(ptrs, acc, mask=(r < count)[None, :] & (column < C.D))
            store_chunk_stats(partials, partial, count, maximum, total)
            if is_last_chunk(samples, num_partials, chunk):
                combine_outputs(partials, outputs, num_rows, row, count, chunk, C)
        else:
            inverse = store_stats(outputs, num_rows, row, count, maximum, total)
            out = acc * inverse[None, :]
            rounded = out.to(dtype)
            store_transposed(outputs.out + row * C.D, rounded, queries, count, C.D)
            if outputs.residual is not None:
                residual = (out - rounded.to(gl.float32)).to(dtype)
                store_transposed(outputs.residual + row * C.D, residual, queries, count, C.D)
