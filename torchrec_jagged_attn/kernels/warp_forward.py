"""Forward of target attention by single warps: see ``warp_tiles.py``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from torchrec_jagged_attn.kernels.common import LOG2E
from torchrec_jagged_attn.kernels.warp_tiles import (
    BLOCK_R,
    LEFT,
    MMA,
    RIGHT,
    copy_tile,
    find_chunk,
    load_bias,
    load_columns,
    ring_layout,
    row_buckets,
    store_rows,
)

__all__ = ["forward_kernel"]


@gluon.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_slots"])
def forward_kernel(
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows STRIDE apart
    bias_ptr,  # [N, H]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [N]
    out_ptr,  # [rows, D]
    rest_ptr,  # [rows, D]: what out was rounded by
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
    STRIDE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):
    """All query rows of a sample over one chunk of its history."""
    busy, sample, first, length, begin, end, slot = find_chunk(
        offsets_ptr, num_samples, num_slots, CHUNK
    )
    if busy:
        history_ptr += first * STRIDE
        if bias_ptr is not None:
            bias_ptr += first * H
        dtype: gl.constexpr = history_ptr.dtype.element_ty
        shape: gl.constexpr = [NUM_STAGES, BLOCK_N, BLOCK_D]
        ring = gl.allocate_shared_memory(dtype, shape, ring_layout(BLOCK_D))
        for stage in gl.static_range(NUM_STAGES - 1):
            copy_tile(ring.index(stage), history_ptr, begin + stage * BLOCK_N, end, D, STRIDE)
        count = num_targets * H
        row = sample.to(gl.int64) * count
        q = load_columns(query_ptr, row * 0 if SHARED else row, count, D, BLOCK_D)

        index = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
        r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, MMA))
        acc = gl.zeros([BLOCK_D, BLOCK_R], gl.float32, MMA)
        total = gl.zeros([BLOCK_N, BLOCK_R], gl.float32, MMA)  # each row's own: summed up once
        maximum = gl.full([BLOCK_R], -float("inf"), gl.float32, gl.SliceLayout(0, MMA))
        stage = 0
        for start in range(begin, end, BLOCK_N):
            async_copy.wait_group(NUM_STAGES - 2)
            tile = ring.index(stage)
            dots = mma_v2(tile.load(LEFT), q, gl.zeros([BLOCK_N, BLOCK_R], gl.float32, MMA))
            n = start + index
            visible = (n < end)[:, None]
            of_position, of_age = row_buckets(n, first, length, timestamps_ptr, P, A)
            bias = load_bias(
                bias_ptr, position_bias_ptr, age_bias_ptr, of_position[:, None], of_age[:, None],
                n[:, None], r[None, :], visible, count, H, P, A,
            )  # fmt: skip
            scores = gl.where(visible, dots * scale + bias, -float("inf"))
            new_maximum = gl.maximum(maximum, gl.max(scores, 0))
            shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            p = gl.exp2((scores - shift[None, :]) * LOG2E)
            rescale = gl.exp2((maximum - shift) * LOG2E)[None, :]
            maximum = new_maximum
            total = total * rescale + p
            weights = gl.convert_layout(p.to(tile.dtype), RIGHT)
            acc = mma_v2(tile.permute((1, 0)).load(LEFT), weights, acc * rescale)
            ahead: gl.constexpr = NUM_STAGES - 1
            to = gl.where(stage == 0, ahead, stage - 1)
            copy_tile(ring.index(to), history_ptr, start + ahead * BLOCK_N, end, D, STRIDE)
            stage = gl.where(stage == ahead, 0, stage + 1)

        total = gl.sum(total, 0)
        if slot >= 0:
            store_rows(sums_ptr, gl.permute(acc, (1, 0)), slot.to(gl.int64) * count, count, D)
            ptrs = sums_stats_ptr + slot.to(gl.int64) * 2 * count + r
            gl.store(ptrs, maximum, mask=r < count)
            gl.store(ptrs + count, total, mask=r < count)
        else:
            inverse = gl.where(total > 0, 1.0 / gl.where(total > 0, total, 1.0), 0.0)
            out = gl.permute(acc * inverse[None, :], (1, 0))
            store_rows(out_ptr, out, row, count, D)
            rest = out - out.to(out_ptr.dtype.element_ty).to(gl.float32)
            store_rows(rest_ptr, rest, row, count, D)
            ptrs = stats_ptr + row + r
            gl.store(ptrs, gl.where(total > 0, maximum, 0.0), mask=r < count)
            gl.store(ptrs + num_rows, inverse, mask=r < count)
