"""Forward of target attention in Triton, for any call.

    out_r = Σ_n p_rn · x_n          p_rn = softmax_n(scale · q_r · x_n + bias_rn)

Dropout follows the softmax.

A program computes one block of query rows over one chunk of their sample's history, with an online
softmax. The history is read once for each block of query rows: N·D·e bytes, 4·N·R·D FLOPs. History
rows are on the M side of the products, since query rows are too few to fill it.

If a sample has several chunks, ``general_combine.py`` combines them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.biases import load_row_numbers
from torchrec_jagged_attn.ops.device.dropout import drop_weights, query_draws
from torchrec_jagged_attn.ops.device.matmul import product
from torchrec_jagged_attn.ops.device.scores import weights_and_slopes
from torchrec_jagged_attn.ops.device.softmax import online_softmax_update
from torchrec_jagged_attn.ops.target_attention.kernels.history_rows import (
    load_history,
    load_tile_bias,
)
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import (
    SHARED,
    clear_outputs,
    find_work,
    load_queries,
    partial_rows,
    store_outputs,
    store_queries,
)


@triton.jit(do_not_specialize=["num_samples", "num_targets", "num_rows", "num_partials"])
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
    C: tl.constexpr,  # Constants
):
    """One block of query rows over one chunk of its sample's history."""
    clear_outputs(outputs, samples, num_samples, num_rows, C)
    work = find_work(samples, num_samples, num_targets, num_partials, C, ALL_BLOCKS=False)
    if not work.busy:
        return
    r = work.block * C.BLOCK_R + tl.arange(0, C.BLOCK_R)
    d = tl.arange(0, C.BLOCK_D)
    q = load_queries(query_ptr, 0 if C.LAYOUT == SHARED else work.row, r, work.count, d, C.D)
    draws = query_draws(biases.dropout, work.row + r)[None, :]

    # [BLOCK_D, BLOCK_R], so that history fills the M side of products
    acc = tl.zeros([C.BLOCK_D, C.BLOCK_R], tl.float32)
    total = tl.zeros([C.BLOCK_R], tl.float32)
    maximum = total - float("inf")
    for start in tl.range(work.begin, work.end, C.BLOCK_N, num_stages=C.NUM_STAGES):
        n, visible, x = load_history(history_ptr, samples, start, work.end, d, q.dtype, C)
        bias = load_tile_bias(biases, samples, work, start, n, visible, r, C)
        dots = product(x, tl.trans(q), C.PRECISION)
        if C.SCORE == "softmax":
            p, rescale, maximum, total = online_softmax_update(
                dots, scale, bias, visible, maximum, total, 0
            )
            acc *= rescale[None, :]
        else:
            p = weights_and_slopes(dots * scale + bias, C.SCORE, x.dtype == tl.float32)[0]
            p = tl.where(visible, p, 0.0)
        p = drop_weights(p, biases.dropout, draws, load_row_numbers(biases, n, visible))
        acc = tl.dot(tl.trans(x), p.to(x.dtype), acc, input_precision=C.PRECISION)

    if C.SCORE != "softmax":  # no normalization: a total of one over all chunks of a sample
        maximum = tl.zeros([C.BLOCK_R], tl.float32)
        is_first = (tl.program_id(0) >= num_partials) & (work.end > work.begin)
        total = maximum + is_first.to(tl.float32)
    acc = tl.trans(acc)
    if work.partial >= 0:
        capacity = partial_rows(num_targets, C)
        local = tl.arange(0, C.BLOCK_R)
        store_queries(partials.acc, acc, work.partial * capacity, local, capacity, d, C.D)
        weights_ptr = partials.totals + work.partial * 2 * capacity + local
        tl.store(weights_ptr, maximum, mask=local < capacity)
        tl.store(weights_ptr + capacity, total, mask=local < capacity)
    else:
        store_outputs(outputs, acc, maximum, total, num_rows, work.row, r, work.count, d, C.D)
