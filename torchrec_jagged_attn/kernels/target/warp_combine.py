"""Outputs and query gradients of a sample that was cut into chunks, from the sums of its chunks.

A counter tells the program that ends last. It reads the sums of all chunks of its sample, a few at
a time, and adds them up in their order: the bits do not depend on which program is the last.

    outputs    Σ_c acc_c · e^(max_c - max) / Σ_c total_c · e^(max_c - max)
    queries    scale · Σ_c acc_c
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchrec_jagged_attn.kernels.common.gluon import thread_barrier
from torchrec_jagged_attn.kernels.target.warp_parts import (
    BLOCK_R,
    exp,
    load_rows,
    row_layout,
    store_rows,
)

__all__ = ["combine_outputs", "combine_queries", "is_last_chunk", "store_outputs", "store_stats"]

AT_ONCE = gl.constexpr(4)  # chunks whose sums are loaded at a time


@gluon.constexpr_function
def _columns_at_once(rows, width, warps):
    """How many columns of a chunk's sums, ``[rows, width]``, registers hold at a time."""
    return min(width, (1024 if warps == 1 else 512 * warps) // rows)


@gluon.jit
def is_last_chunk(slots_ptr, num_slots, first_slot, chunks):
    """Whether the sample's other chunks have ended, and what they have stored is there to read.

    Which one ends last differs from call to call: nothing of a result may depend on that.
    """
    thread_barrier()  # what any lane has stored is stored before lane 0 counts
    ended = gl.atomic_add(slots_ptr + num_slots + first_slot, 1, sem="acq_rel", scope="gpu")
    return ended == chunks - 1


@gluon.jit
def store_stats(stats_ptr, num_rows, row, count, maximum, total):
    """Store what backward computes weights from. Returns the inverse totals."""
    inverse = gl.where(total > 0, gl.div_rn(1.0, gl.where(total > 0, total, 1.0)), 0.0)
    r = gl.arange(0, maximum.shape[0], maximum.type.layout)
    gl.store(stats_ptr + row + r, gl.where(total > 0, maximum, 0.0), mask=r < count)
    gl.store(stats_ptr + num_rows + row + r, inverse, mask=r < count)
    return inverse


@gluon.jit
def store_outputs(out_ptr, residual_ptr, out, row, count, column: gl.constexpr, D: gl.constexpr):
    """Store ``out``, ``[rows, columns]`` in fp32, and its residual."""
    store_rows(out_ptr, out, row, count, column, D)
    if residual_ptr is not None:
        residual = out - out.to(out_ptr.dtype.element_ty).to(gl.float32)
        store_rows(residual_ptr, residual, row, count, column, D)


@gluon.jit
def combine_outputs(
    sums_ptr,
    sums_stats_ptr,
    out_ptr,
    residual_ptr,
    stats_ptr,
    num_rows,
    row,
    count,
    first_slot,
    chunks,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr = BLOCK_R,
):
    """Outputs and statistics of a sample, from the sums of its chunks in their order."""
    COLUMNS: gl.constexpr = _columns_at_once(ROWS, BLOCK_D, gl.num_warps())
    layout: gl.constexpr = row_layout(COLUMNS, gl.float32, gl.num_warps())
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, ROWS, by_row)
    for column in gl.static_range(0, BLOCK_D, COLUMNS):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        maximum = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        total = gl.zeros([ROWS], gl.float32, by_row)
        for chunk in range(0, chunks, AT_ONCE):
            loaded = ()
            for i in gl.static_range(AT_ONCE):
                there = gl.where(chunk + i < chunks, count, 0)
                slot = (first_slot + chunk + i).to(gl.int64)
                ptrs = sums_stats_ptr + slot * 2 * count + r
                sums = load_rows(sums_ptr, slot * count, there, column, [ROWS, COLUMNS], layout, D)
                of_chunk = gl.load(ptrs, mask=r < there, other=-float("inf"))
                loaded += (sums, of_chunk, gl.load(ptrs + count, mask=r < there, other=0.0))
            for i in gl.static_range(AT_ONCE):
                new_maximum = gl.maximum(maximum, loaded[3 * i + 1])
                shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
                rescale = exp(maximum - shift, PARTS)
                of_chunk = exp(loaded[3 * i + 1] - shift, PARTS)
                acc = acc * rescale[:, None] + loaded[3 * i] * of_chunk[:, None]
                total = total * rescale + loaded[3 * i + 2] * of_chunk
                maximum = new_maximum
        inverse = store_stats(stats_ptr, num_rows, row, count, maximum, total)
        store_outputs(out_ptr, residual_ptr, acc * inverse[:, None], row, count, column, D)


@gluon.jit
def combine_queries(
    sums_ptr,
    grad_query_ptr,
    row,
    count,
    first_slot,
    chunks,
    scale,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    ROWS: gl.constexpr = BLOCK_R,
):
    """Gradients of a sample's queries, from the sums of its chunks in their order."""
    COLUMNS: gl.constexpr = _columns_at_once(ROWS, BLOCK_D, gl.num_warps())
    layout: gl.constexpr = row_layout(COLUMNS, gl.float32, gl.num_warps())
    shape: gl.constexpr = [ROWS, COLUMNS]
    for column in gl.static_range(0, BLOCK_D, COLUMNS):
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for chunk in range(0, chunks, AT_ONCE):
            loaded = ()
            for i in gl.static_range(AT_ONCE):
                there = gl.where(chunk + i < chunks, count, 0)
                first = (first_slot + chunk + i).to(gl.int64) * count
                loaded += (load_rows(sums_ptr, first, there, column, shape, layout, D),)
            for i in gl.static_range(AT_ONCE):
                acc += loaded[i]
        store_rows(grad_query_ptr, acc * scale, row, count, column, D)
