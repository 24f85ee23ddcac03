"""Forward of target attention by single warps, for samples of up to 8 query rows.

A program is one warp: it computes all query rows of a sample over one chunk of its history. History
rows are read once, which is the floor: N·D·e bytes. Tiles of them lie on the M side of products,
``[rows, queries]`` for scores and ``[width, queries]`` for outputs, and both read them from the
same place in shared memory. Programs this small run side by side in numbers that keep enough bytes
on their way. The last program of a sample combines its chunks: see ``warp_combine.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from torchrec_jagged_attn.kernels.target.warp_combine import (
    combine_outputs,
    is_last_chunk,
    store_outputs,
    store_stats,
)
from torchrec_jagged_attn.kernels.target.warp_parts import (
    BLOCK_R,
    LEFT,
    MMA,
    RIGHT,
    allocate_parts,
    columns_at_once,
    exp,
    find_listed_chunk,
    load_bias,
    load_columns,
    load_parts,
    open_ring,
    product,
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
    slots_ptr,  # [2, slots] of list_slots_kernel
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
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """All query rows of a sample over one chunk of its history."""
    busy, sample, first, length, begin, end, slot, chunks = find_listed_chunk(
        slots_ptr, offsets_ptr, num_samples, num_slots, CHUNK, OVERLAP
    )
    if busy:
        history_ptr += first * STRIDE
        dtype: gl.constexpr = history_ptr.dtype.element_ty
        ring = open_ring(history_ptr, begin, end, D, STRIDE, NUM_STAGES, BLOCK_N, BLOCK_D)
        count = num_targets * H
        row = sample.to(gl.int64) * count
        q = load_columns(query_ptr, row * 0 if SHARED else row, count, D, BLOCK_D)
        q = split(q, PARTS)
        if PARTS > 1:  # they do not fit in registers
            queries = allocate_parts(gl.bfloat16, PARTS, BLOCK_R, BLOCK_D)
            store_parts(queries, 0, q, True)

        index = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
        r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
        zeros = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, MMA)
        COLUMNS: gl.constexpr = columns_at_once(BLOCK_D, BLOCK_N, PARTS)
        accs = ()
        for _ in gl.static_range(0, BLOCK_D, COLUMNS):
            accs += (gl.zeros([COLUMNS, BLOCK_R], gl.float32, MMA),)
        total = zeros  # each row's own: summed up once
        maximum = gl.full([BLOCK_R], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
        stage = 0
        for start in range(begin, end, BLOCK_N):
            async_copy.wait_group(NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = zeros
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                x = split(tile.slice(column, COLUMNS, 1).load(LEFT), PARTS)
                if PARTS > 1:
                    of_q = load_parts(queries, (0, BLOCK_R), (column, COLUMNS), RIGHT, True)
                else:
                    of_q = q
                dots = product(x, of_q, dots, PARTS, APART=True)
            n = start + index
            visible = (n < end)[:, None]
            of_position, of_age = row_buckets(n, biases, first, length, P, A)
            bias = load_bias(
                biases, first, of_position[:, None], of_age[:, None],
                n[:, None], r[None, :], visible, count, H, P, A, PRIOR,
            )  # fmt: skip
            scores = gl.where(visible, dots * scale + bias, -float("inf"))
            new_maximum = gl.maximum(maximum, gl.max(scores, 0))
            shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            p = exp(scores - shift[None, :], PARTS)
            rescale = exp(maximum - shift, PARTS)[None, :]
            maximum = new_maximum
            total = total * rescale + p
            weights = split(gl.convert_layout(p.to(dtype), RIGHT), PARTS)
            sums = ()
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                columns = tile.slice(column, COLUMNS, 1).permute((1, 0)).load(LEFT)
                acc = accs[column // COLUMNS] * rescale
                sums += (product(split(columns, PARTS), weights, acc, PARTS),)
            accs = sums
            stage = turn_ring(ring, stage, history_ptr, start, end, D, STRIDE)

        total = gl.sum(total, 0)
        if slot < 0:
            inverse = store_stats(stats_ptr, num_rows, row, count, maximum, total)
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                out = gl.permute(accs[column // COLUMNS] * inverse[None, :], (1, 0))
                store_outputs(out_ptr, residual_ptr, out, row, count, column, D)
        else:
            for column in gl.static_range(0, BLOCK_D, COLUMNS):
                acc = gl.permute(accs[column // COLUMNS], (1, 0))
                store_rows(sums_ptr, acc, slot.to(gl.int64) * count, count, column, D)
            ptrs = sums_stats_ptr + slot.to(gl.int64) * 2 * count + r
            gl.store(ptrs, maximum, mask=r < count)
            gl.store(ptrs + count, total, mask=r < count)
            first_slot = (first // CHUNK).to(gl.int32)
            if is_last_chunk(slots_ptr, num_slots, first_slot, chunks):
                combine_outputs(
                    sums_ptr, sums_stats_ptr, out_ptr, residual_ptr, stats_ptr, num_rows, row,
                    count, first_slot, chunks, D, BLOCK_D, PARTS,
                )  # fmt: skip
