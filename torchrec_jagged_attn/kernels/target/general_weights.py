"""Weights of target attention in Triton, for any call: those that its forward sums rows by.

    p_rn = softmax_n(scale · q_r · x_n + bias_rn)

A program computes one block of query rows over their sample's history, in two passes: statistics of
the softmax, then weights. Each pass reads the history: 2·N·D·e bytes and 4·N·R·D FLOPs for each
block of query rows, and N·R·e bytes are written. Weights of rows by themselves take the second pass
alone. Both passes make the same products: the weights of a query row have a sum of one, whatever
the rounding of its scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.biases import load_bias
from torchrec_jagged_attn.kernels.common.matmul import product
from torchrec_jagged_attn.kernels.common.scores import weights_and_slopes
from torchrec_jagged_attn.kernels.common.softmax import (
    LOG2E,
    online_softmax_update,
    softmax_weights,
)
from torchrec_jagged_attn.kernels.target.history_rows import load_history
from torchrec_jagged_attn.kernels.target.schedule import SHARED, load_queries, query_rows

__all__ = ["weights_kernel"]


@triton.jit
def _products_and_bias(
    q, history_ptr, biases, samples, sample, start, end, r, count, history_stride, C: tl.constexpr
):
    """Of BLOCK_N rows from ``start`` on: products with ``q``, biases, and which rows are there."""
    index = tl.arange(0, C.BLOCK_N)
    d = tl.arange(0, C.BLOCK_D)
    n = (start + index)[:, None]
    visible = (index < (end - start).to(tl.int32))[:, None]
    x = load_history(history_ptr, samples, n, visible, d, history_stride, q.dtype, C)
    bias = load_bias(
        biases, samples.offsets, sample, n, visible, r[None, :], count, C.H, C.P, C.A, C.PRIOR
    )
    return product(x, tl.trans(q), C.PRECISION), bias, visible, n


@triton.jit(do_not_specialize=["num_targets"])
def weights_kernel(
    query_ptr,  # [rows, D]
    history_ptr,  # [N, D], rows history_stride apart
    biases,  # arguments.Biases
    out_ptr,  # [N, count]
    samples,  # Samples
    num_targets,
    history_stride,
    scale,
    C: tl.constexpr,  # Constants
):
    """One block of query rows over their sample's history."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(num_targets * C.H, C.BLOCK_R)
    sample = program // blocks
    row, count = query_rows(samples, sample, num_targets, C)
    begin = tl.load(samples.offsets + sample).to(tl.int64)
    end = tl.load(samples.offsets + sample + 1).to(tl.int64)
    r = (program - sample * blocks) * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    d = tl.arange(0, C.BLOCK_D)
    q = load_queries(query_ptr, 0 if C.LAYOUT == SHARED else row, r, count, d, C.D)

    if C.SCORE == "softmax":
        total = tl.zeros([C.BLOCK_R], tl.float32)
        maximum = total - float("inf")
        for start in tl.range(begin, end, C.BLOCK_N, num_stages=C.NUM_STAGES):
            dots, bias, visible, _ = _products_and_bias(
                q, history_ptr, biases, samples, sample, start, end, r, count, history_stride, C
            )
            _, _, maximum, total = online_softmax_update(
                dots, scale, bias, visible, maximum, total, 0, LOG2E
            )
        seen = total != 0  # NaN is
        maximum = tl.where(seen, maximum, 0.0)
        inverse = tl.where(seen, tl.div_rn(1.0, tl.where(seen, total, 1.0)), 0.0)
    for start in tl.range(begin, end, C.BLOCK_N, num_stages=C.NUM_STAGES):
        dots, bias, visible, n = _products_and_bias(
            q, history_ptr, biases, samples, sample, start, end, r, count, history_stride, C
        )
        if C.SCORE == "softmax":
            p = softmax_weights(dots, scale, bias, visible, maximum, inverse, 0, LOG2E)
        else:
            exact: tl.constexpr = q.dtype == tl.float32
            p = weights_and_slopes(dots * scale + bias, C.SCORE, exact)[0]
        tl.store(out_ptr + n * count + r[None, :], p, mask=visible & (r < count)[None, :])
