"""Backward of target attention in Triton, for any call.

With p the weights of the softmax, ``dp_rn = ∂out_r · x_n`` and ``delta_r = ∂out_r · out_r``:

    ds_rn = p_rn · (dp_rn - delta_r)        ∂q_r = scale · Σ_n ds_rn · x_n
    ∂log(w_n) = Σ_r ds_rn                   ∂x_n = Σ_r p_rn · ∂out_r + scale · ds_rn · q_r

Dropout applies to dp and to the p that ∂out is multiplied by. The gradient of a log-sum-exp is
subtracted from its delta.

In half precision, ``grad_history_kernel`` computes all gradients of samples with one block of query
rows: it reads x once and writes ∂x once, 2·N·D·e bytes and 10·N·R·D FLOPs. Otherwise
``grad_query_kernel`` first computes ∂q and an exact delta, and reads x once more: 14·N·R·D FLOPs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.biases import (
    add_heads,
    add_to_table,
    load_row_numbers,
    row_buckets,
)
from torchrec_jagged_attn.ops.device.dropout import drop_weights, query_draws
from torchrec_jagged_attn.ops.device.jagged import clear_rows
from torchrec_jagged_attn.ops.device.matmul import product
from torchrec_jagged_attn.ops.device.scores import weights_and_slopes
from torchrec_jagged_attn.ops.device.softmax import (
    load_stats,
    score_gradients,
    softmax_weights,
)
from torchrec_jagged_attn.ops.target_attention.kernels.history_rows import (
    load_history,
    load_tile_bias,
)
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import (
    JAGGED,
    SHARED,
    clear_gradients,
    find_work,
    load_queries,
    partial_rows,
    store_queries,
)


class Queries(NamedTuple):
    """A block of query rows, and the statistics for gradients of their scores."""

    q: Any  # [BLOCK_R, BLOCK_D]
    grad_out: Any  # [BLOCK_R, BLOCK_D]
    delta: Any  # [BLOCK_R], the mean of the gradients of weights minus ``grad_lse``
    maximum: Any  # [BLOCK_R], the largest score
    inverse: Any  # [BLOCK_R], one over the total of weights
    draws: Any  # [BLOCK_R], see ``query_draws``


@triton.jit
def _load_grad_lse(outputs, rows, inverse):
    """Gradients of log-sum-exps of ``rows``, or None; zero if no history row is visible, when
    ``inverse`` is zero.

    Triton 3.6 cannot return None in a tuple, so there is a function for these alone.
    """
    grad_lse = None
    if outputs.grad_lse is not None:
        grad_lse = tl.load(outputs.grad_lse + rows, mask=inverse != 0, other=0.0)
    return grad_lse


@triton.jit
def _score_gradients(queries, grad_lse, x, n, biases, bias, visible, alone, scale, C: tl.constexpr):
    """Weights ``[rows, queries]`` after dropout, and the gradients of their scores.

    The softmax weight of a row that is ``alone`` in its sample is constant: only its log-sum-exp
    has a gradient.
    """
    dots = product(x, tl.trans(queries.q), C.PRECISION)
    dp = product(x, tl.trans(queries.grad_out), C.PRECISION)
    dropout, draws = biases.dropout, queries.draws[None, :]
    numbers = load_row_numbers(biases, n, visible)
    dp = drop_weights(dp, dropout, draws, numbers)
    if C.SCORE == "softmax":
        p = softmax_weights(dots, scale, bias, visible, queries.maximum, queries.inverse)
        ds = score_gradients(p, dp, queries.delta, grad_lse, alone)
        return drop_weights(p, dropout, draws, numbers), ds
    p, slope = weights_and_slopes(dots * scale + bias, C.SCORE, x.dtype == tl.float32)
    p = drop_weights(tl.where(visible, p, 0.0), dropout, draws, numbers)
    return p, tl.where(visible, slope * dp, 0.0)


@triton.jit
def _grad_history(acc, p, ds, queries, scale, dtype, PRECISION: tl.constexpr):
    """``acc`` plus the gradient of history rows from a block of query rows."""
    acc = tl.dot(p.to(dtype), queries.grad_out, acc, input_precision=PRECISION)
    return tl.dot((ds * scale).to(dtype), queries.q, acc, input_precision=PRECISION)


@triton.jit
def _store_grad_of_history(grads, grad_x, n, visible, d, D: tl.constexpr):
    """Store the gradients of the positions ``n``; with ``targets``, to the rows these name."""
    row = n
    if grads.targets is not None:
        row = tl.load(grads.targets + n, mask=visible, other=-1).to(tl.int64)
        visible = visible & (row >= 0)
    tl.store(grads.history + row * D + d[None, :], grad_x, mask=visible & (d < D)[None, :])


@triton.jit
def _load_block(
    query_ptr, grad_out_ptr, dropout_ptr, outputs, num_rows, work, r, d, C: tl.constexpr
):
    """:class:`Queries` of the rows ``r`` of a sample, and their outputs ``[BLOCK_R, BLOCK_D]``."""
    query_row = 0 if C.LAYOUT == SHARED else work.row
    q = load_queries(query_ptr, query_row, r, work.count, d, C.D)
    grad_out = load_queries(grad_out_ptr, work.row, r, work.count, d, C.D)
    out = load_queries(outputs.out, work.row, r, work.count, d, C.D)
    exact = out.to(tl.float32)
    if outputs.residual is not None:
        exact += load_queries(outputs.residual, work.row, r, work.count, d, C.D).to(tl.float32)
    delta = tl.sum(grad_out.to(tl.float32) * exact, 1)
    maximum, inverse = load_stats(outputs.stats, num_rows, work.row + r, r < work.count)
    draws = query_draws(dropout_ptr, work.row + r)
    if outputs.grad_lse is not None:
        delta -= _load_grad_lse(outputs, work.row + r, inverse)
    return Queries(q, grad_out, delta, maximum, inverse, draws), out


@triton.jit(
    do_not_specialize=[
        "num_samples", "num_targets", "num_rows", "num_partials", "num_history_rows",
    ]
)  # fmt: skip
def grad_query_kernel(
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
    C: tl.constexpr,  # Constants
):
    """Gradient of one block of a sample's query rows, over one chunk of its history.

    If SINGLE_PASS, ``grad_history_kernel`` computes samples of one block instead. Gradients of
    query rows behind the last offset are set to zero.
    """
    if C.LAYOUT == JAGGED:
        end = tl.load(samples.query_offsets + num_samples).to(tl.int64) * C.H
        clear_rows(grads.query, end, num_rows, C.D, C.D, C.BLOCK_D)
    work = find_work(samples, num_samples, num_targets, num_partials, C, ALL_BLOCKS=False)
    row, count = work.row, work.count
    if not work.busy or (C.SINGLE_PASS and count <= C.BLOCK_R):
        return
    r = work.block * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    d = tl.arange(0, C.BLOCK_D)
    queries, out = _load_block(
        query_ptr, grad_out_ptr, biases.dropout, outputs, num_rows, work, r, d, C
    )
    grad_lse = _load_grad_lse(outputs, row + r, queries.inverse)
    delta = queries.delta
    alone = (work.end - work.begin == 1) & (work.partial < 0)

    acc = tl.zeros([C.BLOCK_D, C.BLOCK_R], tl.float32)
    ds_total = tl.zeros([C.BLOCK_R], tl.float32)  # zero or grad_lse, but for the rounding of out
    for start in tl.range(work.begin, work.end, C.BLOCK_N, num_stages=C.NUM_STAGES):
        n, visible, x = load_history(history_ptr, samples, start, work.end, d, out.dtype, C)
        bias = load_tile_bias(biases, samples, work, start, n, visible, r, C)
        _, ds = _score_gradients(queries, grad_lse, x, n, biases, bias, visible, alone, scale, C)
        acc = tl.dot(tl.trans(x), ds.to(x.dtype), acc, input_precision=C.PRECISION)
        if C.SCORE == "softmax":
            ds_total += tl.sum(ds, 0)
    acc = tl.trans(acc)
    if work.partial >= 0:
        capacity = partial_rows(num_targets, C)
        local = tl.arange(0, C.BLOCK_R)
        store_queries(partials.acc, acc, work.partial * capacity, local, capacity, d, C.D)
        tl.store(partials.totals + work.partial * capacity + local, ds_total, mask=local < capacity)
    else:
        # With ds_total added to delta, ds sum to zero, and acc is smaller by ds_total · out.
        if grad_lse is not None:
            ds_total -= grad_lse
        delta += ds_total
        acc -= ds_total[:, None] * out.to(tl.float32)
        store_queries(grads.query, acc * scale, row, r, count, d, C.D)
    if tl.program_id(0) >= num_partials:  # the first chunk
        tl.store(grads.delta + row + r, delta, mask=r < count)


@triton.jit(
    do_not_specialize=[
        "num_samples", "num_targets", "num_rows", "num_partials", "num_history_rows",
    ]
)  # fmt: skip
def grad_history_kernel(
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
    C: tl.constexpr,  # Constants
    ONE_BLOCK: tl.constexpr,
):
    """Gradients of one chunk of a sample's history and of its biases, over all its query rows.

    If ONE_BLOCK, for samples with one block of query rows, and with the gradients of queries; else
    for the other samples, whose ``delta`` is read. Gradients behind the last offset are set to
    zero, by the first of both launches if samples differ.
    """
    if ONE_BLOCK or C.LAYOUT != JAGGED or not C.SINGLE_PASS:
        clear_gradients(grads, samples, num_samples, num_history_rows, C)
    work = find_work(samples, num_samples, num_targets, num_partials, C, ALL_BLOCKS=True)
    row, count = work.row, work.count
    if not work.busy or (C.SINGLE_PASS and count <= C.BLOCK_R) != ONE_BLOCK:
        return
    query_row = 0 if C.LAYOUT == SHARED else row
    alone = (work.end - work.begin == 1) & (work.partial < 0)
    d = tl.arange(0, C.BLOCK_D)
    h = tl.arange(0, C.BLOCK_H)
    r = tl.arange(0, C.BLOCK_R).to(tl.int64)
    if ONE_BLOCK:
        queries, _ = _load_block(
            query_ptr, grad_out_ptr, biases.dropout, outputs, num_rows, work, r, d, C
        )
        grad_lse = _load_grad_lse(outputs, row + r, queries.inverse)
        acc_query = tl.zeros([C.BLOCK_D, C.BLOCK_R], tl.float32)

    if C.P > 0:
        grad_position_bias = tl.zeros([C.BLOCK_P, C.BLOCK_H], tl.float32)
    if C.A > 0:
        grad_age_bias = tl.zeros([C.BLOCK_A, C.BLOCK_H], tl.float32)
    for start in tl.range(work.begin, work.end, C.BLOCK_N, num_stages=C.NUM_STAGES):
        dtype: tl.constexpr = query_ptr.dtype.element_ty
        n, visible, x = load_history(history_ptr, samples, start, work.end, d, dtype, C)
        grad_x = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
        heads = tl.zeros([C.BLOCK_N, C.BLOCK_H], tl.float32)
        if ONE_BLOCK:
            bias = load_tile_bias(biases, samples, work, start, n, visible, r, C)
            p, ds = _score_gradients(
                queries, grad_lse, x, n, biases, bias, visible, alone, scale, C
            )
            acc_query = tl.dot(tl.trans(x), ds.to(x.dtype), acc_query, input_precision=C.PRECISION)
            if grads.history is not None:
                grad_x = _grad_history(grad_x, p, ds, queries, scale, x.dtype, C.PRECISION)
            heads = add_heads(heads, ds, r, h, x.dtype, C.H, C.ONE_TARGET)
        else:
            for r_start in range(0, count, C.BLOCK_R):
                rows = r_start + r
                q = load_queries(query_ptr, query_row, rows, count, d, C.D)
                grad_out = load_queries(grad_out_ptr, row, rows, count, d, C.D)
                delta = tl.load(grads.delta + row + rows, mask=rows < count, other=0.0)
                maximum, inverse = load_stats(outputs.stats, num_rows, row + rows, rows < count)
                bias = load_tile_bias(biases, samples, work, start, n, visible, rows, C)
                draws = query_draws(biases.dropout, row + rows)
                grad_lse = _load_grad_lse(outputs, row + rows, inverse)
                queries = Queries(q, grad_out, delta, maximum, inverse, draws)
                p, ds = _score_gradients(
                    queries, grad_lse, x, n, biases, bias, visible, alone, scale, C
                )
                if grads.history is not None:
                    grad_x = _grad_history(grad_x, p, ds, queries, scale, x.dtype, C.PRECISION)
                heads = add_heads(heads, ds, rows, h, x.dtype, C.H, C.ONE_TARGET)
        if grads.history is not None:
            _store_grad_of_history(grads, grad_x, n, visible, d, C.D)
        if grads.prior_weights is not None:
            tl.store(grads.prior_weights + n, tl.sum(heads, 1)[:, None], mask=visible)
        if C.P > 0 or C.A > 0:
            flat = start + tl.arange(0, C.BLOCK_N)
            position_buckets, age_buckets = row_buckets(
                flat, flat < work.end, samples.offsets, biases, work.sample, C
            )
            if C.P > 0:
                grad_position_bias = add_to_table(
                    grad_position_bias, position_buckets, heads, x.dtype, C.BLOCK_P
                )
            if C.A > 0:
                grad_age_bias = add_to_table(grad_age_bias, age_buckets, heads, x.dtype, C.BLOCK_A)

    if ONE_BLOCK:
        grad_query = tl.trans(acc_query)
        if work.partial >= 0:
            capacity = partial_rows(num_targets, C)
            store_queries(partials.acc, grad_query, work.partial * capacity, r, capacity, d, C.D)
        else:
            store_queries(grads.query, grad_query * scale, row, r, count, d, C.D)
        if (samples.indices is not None) and (grads.delta is not None):
            if tl.program_id(0) >= num_partials:  # the first chunk
                tl.store(grads.delta + row + r, queries.delta, mask=r < count)
    table = tl.program_id(0).to(tl.int64) * (C.P + C.A)
    if C.P > 0:
        b = tl.arange(0, C.BLOCK_P)
        store_queries(grads.tables, grad_position_bias, table, b, C.P, h, C.H)
    if C.A > 0:
        b = tl.arange(0, C.BLOCK_A)
        store_queries(grads.tables, grad_age_bias, table + C.P, b, C.A, h, C.H)
