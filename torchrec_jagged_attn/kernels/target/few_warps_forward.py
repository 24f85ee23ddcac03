"""Forward of target attention by one to four warps, for samples of 9 to 64 query rows.

Each warp has 16 query rows on the M side of its products, and history rows on the N side. All warps
of a program read the same tiles, so that history rows are read once: N·D·e bytes, 4·N·R·D FLOPs.
These are the kernels for fp32, which tensor cores multiply in parts of bf16, and for half precision
that no warpgroup serves. ``general_combine.py`` sums up the chunks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torchrec_jagged_attn.kernels.common.gluon import launch_dependents, products_by_warp
from torchrec_jagged_attn.kernels.target.warp_combine import store_outputs, store_stats
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
    split,
    store_parts,
    store_rows,
    turn_ring,
)

__all__ = ["forward_kernel"]


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def forward_kernel(
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows STRIDE apart
    biases,  # pointers in an ``arguments.Biases``
    out_ptr,  # [rows, D]
    residual_ptr,  # [rows, D]: fp32 output minus its rounded value; None where nobody asks
    stats_ptr,  # [2, rows] fp32
    sums_ptr,  # [slots, count, D] fp32
    sums_stats_ptr,  # [slots, 2, count] fp32: maximum and total
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
    """All query rows of a sample over one chunk of its history."""
    mma: gl.constexpr = products_by_warp(gl.num_warps())
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    if OVERLAP:
        launch_dependents()
    busy, sample, first, length, begin, end, slot = find_chunk(
        offsets_ptr, num_samples, num_slots, CHUNK
    )
    if busy:
        history_ptr += first * STRIDE
        dtype: gl.constexpr = history_ptr.dtype.element_ty
        ring = open_ring(history_ptr, begin, end, D, STRIDE, NUM_STAGES, BLOCK_N, BLOCK_D)
        count = num_targets * H
        row = sample.to(gl.int64) * count
        q_row = row * 0 if SHARED else row
        q = split(load_rows(query_ptr, q_row, count, 0, [BLOCK_R, BLOCK_D], left, D), PARTS)
        if PARTS > 1:  # they do not fit in registers
            by_row: gl.constexpr = ring_layout(BLOCK_D, gl.bfloat16)
            queries = gl.allocate_shared_memory(gl.bfloat16, [PARTS, BLOCK_R, BLOCK_D], by_row)
            store_parts(queries, 0, q, False)

        by_query: gl.constexpr = gl.SliceLayout(1, mma)
        index = gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma))
        r = gl.arange(0, BLOCK_R, by_query)
        COLUMNS: gl.constexpr = columns_at_once(BLOCK_D, BLOCK_N, PARTS)
        accs = ()
        for _ in gl.static_range(0, BLOCK_D, COLUMNS):
            accs += (gl.zeros([BLOCK_R, COLUMNS], gl.float32, mma),)
        total = gl.zeros([BLOCK_R], gl.float32, by_query)
        maximum = gl.full([BLOCK_R], -float("inf"), gl.float32, by_query)
        stage = 0
        for start in range(begin, end, BLOCK_N):
            async_copy.wait_group(NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = gl.zeros([BLOCK_R, BLOCK_N], gl.float32, mma)
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).permute((1, 0)).load(right), PARTS)
                if PARTS > 1:
                    of_q = load_parts(queries, (0, BLOCK_R), (column, COLUMNS), left, False)
                else:
                    of_q = q
                dots = product(of_q, x, dots, PARTS)
            n = start + index
            visible = (n < end)[None, :]
            of_position, of_age = row_buckets(n, biases, first, length, P, A)
            bias = load_bias(
                biases, first, of_position[None, :], of_age[None, :],
                n[None, :], r[:, None], visible, count, H, P, A, PRIOR,
            )  # fmt: skip
            scores = gl.where(visible, dots * scale + bias, -float("inf"))
            new_maximum = gl.maximum(maximum, gl.max(scores, 1))
            shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            p = exp(scores - shift[:, None], PARTS)
            rescale = exp(maximum - shift, PARTS)
            maximum = new_maximum
            total = total * rescale + gl.sum(p, 1)
            weights = split(gl.convert_layout(p.to(dtype), left), PARTS)
            sums = ()
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).load(right), PARTS)
                acc = accs[column // COLUMNS] * rescale[:, None]
                sums += (product(weights, x, acc, PARTS),)
            accs = sums
            stage = turn_ring(ring, stage, history_ptr, start, end, D, STRIDE)

        if slot >= 0:
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                acc = accs[column // COLUMNS]
                store_rows(sums_ptr, acc, slot.to(gl.int64) * count, count, column, D)
            ptrs = sums_stats_ptr + slot.to(gl.int64) * 2 * count + r
            gl.store(ptrs, maximum, mask=r < count)
            gl.store(ptrs + count, total, mask=r < count)
        else:
            inverse = store_stats(stats_ptr, num_rows, row, count, maximum, total)
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                out = accs[column // COLUMNS] * inverse[:, None]
                store_outputs(out_ptr, residual_ptr, out, row, count, column, D)
