"""Combine the partial results of a sample's chunks: outputs and query gradients.

An atomic counter identifies the last program of a sample. It reads the partial results, a few at a
time, and sums them in order, so that results do not depend on which program is last.

    outputs    Σ_c acc_c · e^(max_c - max) / Σ_c total_c · e^(max_c - max)
    queries    scale · Σ_c acc_c
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchrec_jagged_attn.ops.device.gluon import thread_barrier
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    exp,
    load_rows,
    row_layout,
    store_rows,
)

AT_ONCE = gl.constexpr(4)  # partial results loaded at a time


class QueryStats(NamedTuple):
    """Statistics of query rows for backward, ``[rows]`` each."""

    maximum: Any  # the largest score
    inverse: Any  # one over the total of weights; 0 if no row is visible
    grad_lse: Any  # the gradient of the log-sum-exp, 0 if no row is visible; or None
    delta: Any  # the mean of the gradients of weights minus ``grad_lse``


@gluon.constexpr_function
def _columns_at_once(rows, width, warps):
    """Columns of a partial result, ``[rows, width]``, that fit in registers."""
    return min(width, (1024 if warps == 1 else 512 * warps) // rows)


@gluon.jit
def is_last_chunk(samples, num_partials, chunk):
    """Whether all other chunks of the sample have been stored.

    The last program may differ from call to call, so results must not depend on it.
    """
    thread_barrier()  # the stores of all lanes precede the atomic of lane 0
    counter_ptr = samples.schedule + num_partials + chunk.first_partial
    return gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == chunk.chunks - 1


@gluon.jit
def store_stats(outputs, num_rows, row, count, maximum, total):
    """Store maxima and inverse totals for backward. Returns the latter."""
    inverse = gl.where(total > 0, gl.div_rn(1.0, gl.where(total > 0, total, 1.0)), 0.0)
    r = gl.arange(0, maximum.shape[0], maximum.type.layout)
    gl.store(outputs.stats + row + r, gl.where(total > 0, maximum, 0.0), mask=r < count)
    gl.store(outputs.stats + num_rows + row + r, inverse, mask=r < count)
    return inverse


@gluon.jit
def elementwise_stats(total, chunk):
    """``(maximum, total)`` of elementwise weights: zero, and a total over all chunks of one."""
    begins = (chunk.begin == 0) & (chunk.end > 0)
    return total * 0.0, total * 0.0 + gl.where(begins, 1.0, 0.0)


@gluon.jit
def load_stats(outputs, num_rows, row, r, count):
    """Maxima and inverse totals of the query rows ``r``, stored by :func:`store_stats`."""
    maximum = gl.load(outputs.stats + row + r, mask=r < count, other=0.0)
    return maximum, gl.load(outputs.stats + num_rows + row + r, mask=r < count, other=0.0)


@gluon.jit
def load_grad_lse(outputs, row, r, inverse):
    """Gradients of log-sum-exps of the query rows ``r``, zero if no row is visible; or None.

    Triton 3.6 cannot return None in a tuple, so there is a function for these alone.
    """
    grad_lse = None
    if outputs.grad_lse is not None:
        grad_lse = gl.load(outputs.grad_lse + row + r, mask=inverse != 0, other=0.0)
    return grad_lse


@gluon.jit
def store_delta(grads, delta, grad_lse, row, r, count, chunk):
    """Return ``delta``, Σ grad_out · out, minus ``grad_lse``, if given. The program of a sample's
    first chunk stores it, if a later kernel reads it.
    """
    if grad_lse is not None:
        delta -= grad_lse
    if grads.delta is not None:
        gl.store(grads.delta + row + r, delta, mask=(r < count) & (chunk.begin == 0))
    return delta


@gluon.jit
def store_chunk_stats(partials, partial, count, maximum, total):
    """Store the largest scores and totals of weights of a partial result."""
    r = gl.arange(0, maximum.shape[0], maximum.type.layout)
    ptrs = partials.totals + partial.to(gl.int64) * 2 * count + r
    gl.store(ptrs, maximum, mask=r < count)
    gl.store(ptrs + count, total, mask=r < count)


@gluon.jit
def store_outputs(outputs, out, row, count, column: gl.constexpr, D: gl.constexpr):
    """Store ``out``, ``[rows, columns]`` in fp32, and its residual."""
    store_rows(outputs.out, out, row, count, column, D)
    if outputs.residual is not None:
        residual = out - out.to(outputs.out.dtype.element_ty).to(gl.float32)
        store_rows(outputs.residual, residual, row, count, column, D)


@gluon.jit
def combine_outputs(partials, outputs, num_rows, row, count, chunk, C: gl.constexpr):
    """Outputs and statistics of a chunk's sample, from its partial results."""
    COLUMNS: gl.constexpr = _columns_at_once(C.BLOCK_R, C.BLOCK_D, gl.num_warps())
    shape: gl.constexpr = [C.BLOCK_R, COLUMNS]
    layout: gl.constexpr = row_layout(COLUMNS, gl.float32, gl.num_warps())
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, C.BLOCK_R, by_row)
    for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
        acc = gl.zeros(shape, gl.float32, layout)
        maximum = gl.full([C.BLOCK_R], -float("inf"), gl.float32, by_row)
        total = gl.zeros([C.BLOCK_R], gl.float32, by_row)
        for at in range(0, chunk.chunks, AT_ONCE):
            loaded = ()
            for i in gl.static_range(AT_ONCE):
                num_rows_i = gl.where(at + i < chunk.chunks, count, 0)
                partial = (chunk.first_partial + at + i).to(gl.int64)
                ptrs = partials.totals + partial * 2 * count + r
                chunk_acc = load_rows(
                    partials.acc, partial * count, num_rows_i, column, shape, layout, C.D
                )
                chunk_maximum = gl.load(ptrs, mask=r < num_rows_i, other=-float("inf"))
                loaded += (
                    chunk_acc,
                    chunk_maximum,
                    gl.load(ptrs + count, mask=r < num_rows_i, other=0.0),
                )
            for i in gl.static_range(AT_ONCE):
                new_maximum = gl.maximum(maximum, loaded[3 * i + 1])
                shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
                rescale = exp(maximum - shift, C.COMPONENTS)
                chunk_rescale = exp(loaded[3 * i + 1] - shift, C.COMPONENTS)
                acc = acc * rescale[:, None] + loaded[3 * i] * chunk_rescale[:, None]
                total = total * rescale + loaded[3 * i + 2] * chunk_rescale
                maximum = new_maximum
        inverse = store_stats(outputs, num_rows, row, count, maximum, total)
        store_outputs(outputs, acc * inverse[:, None], row, count, column, C.D)


@gluon.jit
def combine_queries(partials, grads, row, count, chunk, scale, C: gl.constexpr):
    """Gradients of the queries of a chunk's sample, from its partial results."""
    COLUMNS: gl.constexpr = _columns_at_once(C.BLOCK_R, C.BLOCK_D, gl.num_warps())
    layout: gl.constexpr = row_layout(COLUMNS, gl.float32, gl.num_warps())
    shape: gl.constexpr = [C.BLOCK_R, COLUMNS]
    for column in gl.static_range(0, C.BLOCK_D, COLUMNS):
        acc = gl.zeros(shape, gl.float32, layout)
        for at in range(0, chunk.chunks, AT_ONCE):
            loaded = ()
            for i in gl.static_range(AT_ONCE):
                num_rows = gl.where(at + i < chunk.chunks, count, 0)
                first = (chunk.first_partial + at + i).to(gl.int64) * count
                loaded += (load_rows(partials.acc, first, num_rows, column, shape, layout, C.D),)
            for i in gl.static_range(AT_ONCE):
                acc += loaded[i]
        store_rows(grads.query, acc * scale, row, count, column, C.D)
