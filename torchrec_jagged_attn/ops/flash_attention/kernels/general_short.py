"""Jagged flash attention for short samples in Triton, in half precision.

A program computes one head of a sample, all pairs of rows in one tile. Scores and weights stay in
registers, so the kernels are memory-bound: forward reads q, k, v and writes out; backward reads
q, k, v, grad_out and writes three gradients, and recomputes the softmax statistics. There is a
launch for each size of tiles. The only supported bias is ``relative_bias``, whose gradient is
computed by ``general_backward.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from torchrec_jagged_attn.ops.device.dropout import drop_weights, query_draws
from torchrec_jagged_attn.ops.device.softmax import mean_grad
from torchrec_jagged_attn.ops.flash_attention.kernels.distance_bias import load_distance_bias
from torchrec_jagged_attn.ops.flash_attention.kernels.tiles import (
    load_rows,
    online_softmax,
    store_rows,
    store_softmax_stats,
)


@triton.jit
def _locate_sample(sample, samples, window, C: tl.constexpr):
    """Return ``(active, q_row, num_rows, kv_row, num_keys, visible)`` of a sample.

    ``active`` is true if this launch computes samples of its size. The others are the first row and
    the number of its queries and of its keys, and the mask ``[BLOCK_M, BLOCK_N]`` of visible pairs.
    """
    q_row = tl.load(samples.q_offsets + sample).to(tl.int64)
    kv_row = tl.load(samples.kv_offsets + sample).to(tl.int64)
    num_rows = (tl.load(samples.q_offsets + sample + 1).to(tl.int64) - q_row).to(tl.int32)
    num_keys = (tl.load(samples.kv_offsets + sample + 1).to(tl.int64) - kv_row).to(tl.int32)
    longest = tl.maximum(num_rows, num_keys)
    active = (longest > C.SHORT) & (longest <= C.BLOCK_M)
    i, j = tl.arange(0, C.BLOCK_M)[:, None], tl.arange(0, C.BLOCK_N)[None, :]
    visible = (i < num_rows) & (j < num_keys)
    if C.CAUSAL:
        visible = visible & (j <= i + num_keys - num_rows)
    if window is not None:
        visible = visible & (i + num_keys - num_rows - j < window)
    return active, q_row, num_rows, kv_row, num_keys, visible


@triton.jit
def _drop(x, dropout_ptr, q_row, kv_row, head, C: tl.constexpr):
    """Apply :func:`drop_weights` to the weights of a sample, or to their gradients."""
    draws = query_draws(dropout_ptr, (q_row + tl.arange(0, C.BLOCK_M)) * C.H + head)
    n = kv_row + tl.arange(0, C.BLOCK_N)
    return drop_weights(x, dropout_ptr, draws[:, None], n[None, :])


@triton.jit
def _softmax(q, k, visible, biases, max_distance, head, first, factor, C: tl.constexpr):
    """Return ``(p, maximum, total)`` of a sample; weights ``p`` are not divided by ``total``.

    ``first`` is the distance of the first query and the first key.
    """
    bias = 0.0
    if C.BIASED:
        bias = load_distance_bias(
            biases.by_distance, max_distance, head, first, C.BLOCK_M, C.BLOCK_N
        )
    products = tl.dot(-q if C.NEGATIVE else q, tl.trans(k))  # [BLOCK_M, BLOCK_N]
    lowest = tl.full([C.BLOCK_M], -float("inf"), tl.float32)
    zero = tl.zeros([C.BLOCK_M], tl.float32)
    p, _, maximum, total = online_softmax(
        products, factor, bias, visible, lowest, zero, C.BIASED, True
    )
    return p, maximum, total


@triton.jit(do_not_specialize=["num_stats", "max_distance", "window"])
def forward_short_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    samples,  # Samples
    num_stats,
    max_distance,
    window,  # or None
    factor,
    C: tl.constexpr,  # Constants; BLOCK_N is BLOCK_M
):
    """Compute one head of a sample of more than SHORT rows on a side, at most BLOCK_M on both."""
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
    sample, head = tl.program_id(0) // C.H, tl.program_id(0) % C.H
    kv_head = head // (C.H // C.HK)
    active, q_row, num_rows, kv_row, num_keys, visible = _locate_sample(sample, samples, window, C)
    if active & (num_rows > 0):
        q = load_rows(inputs.q, q_row, num_rows, head, C.Q_STRIDE, C.D, C.BLOCK_M, C.BLOCK_D)
        k = load_rows(inputs.k, kv_row, num_keys, kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
        v = load_rows(inputs.v, kv_row, num_keys, kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)
        p, maximum, total = _softmax(
            q, k, visible, biases, max_distance, head, num_keys - num_rows, factor, C
        )
        p = _drop(p, biases.dropout, q_row, kv_row, head, C)
        out = tl.dot(p.to(v.dtype), v) / tl.where(total > 0, total, 1.0)[:, None]
        store_rows(outputs.out, out, q_row, num_rows, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
        i = tl.arange(0, C.BLOCK_M)
        stat = (q_row + i) * C.H + head
        store_softmax_stats(outputs.stats, num_stats, stat, i < num_rows, maximum, total, False)
    if C.OVERLAP:
        cuda.gdc_wait()


@triton.jit(do_not_specialize=["max_distance", "window"])
def backward_short_kernel(
    inputs,  # Inputs
    biases,  # Biases
    grads,  # Gradients; ``q``, ``k`` and ``v`` are written, and ``delta`` if there is a bias
    samples,  # Samples
    max_distance,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants; BLOCK_N is BLOCK_M
):
    """As :func:`forward_short_kernel`, for one key head."""
    if C.OVERLAP:
        cuda.gdc_launch_dependents()
    sample, kv_head = tl.program_id(0) // C.HK, tl.program_id(0) % C.HK
    active, q_row, num_rows, kv_row, num_keys, visible = _locate_sample(sample, samples, window, C)
    if active:
        # If one side is empty, rows of the other side are read as zeros: their gradients are zeros
        # even if the rows are infinite.
        rows, keys = tl.where(num_keys > 0, num_rows, 0), tl.where(num_rows > 0, num_keys, 0)
        k = load_rows(inputs.k, kv_row, keys, kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
        v = load_rows(inputs.v, kv_row, keys, kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)
        acc_k = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
        acc_v = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
        for member in range(C.H // C.HK):
            head = kv_head * (C.H // C.HK) + member
            q = load_rows(inputs.q, q_row, rows, head, C.Q_STRIDE, C.D, C.BLOCK_M, C.BLOCK_D)
            grad_out = load_rows(
                grads.out, q_row, rows, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D
            )
            p, _, total = _softmax(
                q, k, visible, biases, max_distance, head, num_keys - num_rows, factor, C
            )
            p /= tl.where(total != 0, total, 1.0)[:, None]
            p_dropped = _drop(p, biases.dropout, q_row, kv_row, head, C)
            acc_v = tl.dot(tl.trans(p_dropped.to(grad_out.dtype)), grad_out, acc_v)
            dp = tl.dot(grad_out, tl.trans(v))
            dp = _drop(dp, biases.dropout, q_row, kv_row, head, C)
            delta = mean_grad(p, dp, tl.zeros([C.BLOCK_M], tl.float32), True)
            if C.BIASED:
                i = tl.arange(0, C.BLOCK_M)
                tl.store(grads.delta + (q_row + i) * C.H + head, delta, mask=i < num_rows)
            ds = (p * (dp - delta[:, None])).to(k.dtype)
            acc_k = tl.dot(tl.trans(ds), q, acc_k)
            grad_q = tl.dot(ds, k) * scale
            store_rows(grads.q, grad_q, q_row, num_rows, head, C.H * C.D, C.D, C.BLOCK_M, C.BLOCK_D)
        store_rows(
            grads.k, acc_k * scale, kv_row, num_keys, kv_head, C.GRAD_K_STRIDE, C.D, C.BLOCK_N,
            C.BLOCK_D,
        )  # fmt: skip
        store_rows(
            grads.v, acc_v, kv_row, num_keys, kv_head, C.GRAD_V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D
        )
    if C.OVERLAP:
        cuda.gdc_wait()
