"""Forward of jagged flash attention in Triton: any dtype, width, bias and scale, on any GPU.

    out_i = Σ_j softmax_j(scale · q_i · k_j + bias_ij) · v_j       over the keys j of i's sample

Dropout follows the softmax.

A program has one tile of queries of one head. It goes over the keys of the sample from the last
tile to the first, with an online softmax: 2·(D + Dv) FLOPs for each pair of rows and head. It reads
q once, k and v once for each tile of queries, and writes out and the softmax statistics for
backward.

Without biases, only the tiles on the causal diagonal (first) and at the end of the window (last)
are masked. Tiles that no query sees are skipped.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.flash_attention.kernels.records import Arguments
from torchrec_jagged_attn.flash_attention.kernels.tiles import (
    drop_pairs,
    key_bias,
    load_keys,
    load_queries,
    load_rows,
    load_values,
    locate_queries,
    online_softmax,
    seen_from,
    seen_keys,
    store_rows,
    store_softmax_stats,
)
from torchrec_jagged_attn.runtime.kernels.matmul import multiply, product


@triton.jit
def _scores(q, args, tile, start, C: tl.constexpr, MASKED: tl.constexpr):
    """``(products, bias, visible)`` of the tile's queries with the keys from ``start`` on."""
    k = load_keys(args.inputs.k, tile, start, C, MASKED)
    products = product(q, tl.trans(k), C.PRECISION)  # [BLOCK_M, BLOCK_N]
    bias, visible = key_bias(args, tile, start, C)
    return products, bias, visible


@triton.jit
def _attend(
    acc, p, maximum, total, q, args, tile, first, last, C: tl.constexpr, MASKED: tl.constexpr
):
    """Attend to the tiles of keys before ``last``, backwards down to ``first``.

    All rows see all of these keys unless ``MASKED``. ``p`` are the weights of the tile ``last``,
    whose values have not been added yet; those that are returned are of the tile ``first``.
    """
    for start in range(last - C.BLOCK_N, first - 1, -C.BLOCK_N):
        products, bias, visible = _scores(q, args, tile, start, C, MASKED)
        row, count = tile.base + start + C.BLOCK_N, tile.num_keys - start - C.BLOCK_N
        v = load_rows(
            args.inputs.v, row, count, tile.kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D
        )
        # Here, so that no product is in flight across iterations: ptxas would then wait after every
        # instruction (C7515).
        acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
        p, rescale, maximum, total = online_softmax(
            products, args.factor, bias, visible, maximum, total, C.BIASED, MASKED
        )
        p = drop_pairs(p, args, tile, start, C)
        acc *= rescale[:, None]
    return acc, p, maximum, total


@triton.jit(do_not_specialize=["num_stats", "reach", "window"])
def forward_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    samples,  # Samples, whose tiles are of queries
    num_stats,
    reach,
    window,  # or None
    factor,
    C: tl.constexpr,  # Constants
):
    """One tile of query rows of one head, over all keys of its sample."""
    args = Arguments(inputs, biases, outputs, None, samples, num_stats, reach, window, factor, None)
    listed, tile = locate_queries(args, C)
    if not listed:
        return
    row, count, head, num_keys = tile.row, tile.count, tile.head, tile.num_keys
    i = tl.arange(0, C.BLOCK_M)
    stat = (row + i) * C.H + head
    maximum = tl.full([C.BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([C.BLOCK_M], tl.float32)
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    if num_keys == 0:
        store_rows(outputs.out, acc, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
        store_softmax_stats(outputs.stats, num_stats, stat, i < count, maximum, total, C.EXACT)
        return
    q = load_queries(inputs.q, row, count, head, C)
    seen_by_all, seen_by_any = seen_keys(tile, C)
    first, whole = seen_from(window, tile, C)
    start = tl.maximum(tl.cdiv(seen_by_any, C.BLOCK_N) - 1, 0) * C.BLOCK_N
    products, bias, visible = _scores(q, args, tile, start, C, MASKED=True)
    p, _, maximum, total = online_softmax(
        products, factor, bias, visible, maximum, total, C.BIASED, True
    )
    p = drop_pairs(p, args, tile, start, C)
    full = first
    if not C.BIASED:
        full = tl.minimum(seen_by_all // C.BLOCK_N * C.BLOCK_N, start)
        whole = tl.minimum(whole, full)
    if C.BIASED or C.CAUSAL:
        acc, p, maximum, total = _attend(
            acc, p, maximum, total, q, args, tile, full, start, C, MASKED=True
        )
    if not C.BIASED:
        acc, p, maximum, total = _attend(
            acc, p, maximum, total, q, args, tile, whole, full, C, MASKED=False
        )
        if window is not None:
            acc, p, maximum, total = _attend(
                acc, p, maximum, total, q, args, tile, first, whole, C, MASKED=True
            )
    v = load_values(inputs.v, tile, first, C)
    acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
    out = tl.div_rn(acc, tl.where(total > 0, total, 1.0)[:, None])
    store_rows(outputs.out, out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
    store_softmax_stats(outputs.stats, num_stats, stat, i < count, maximum, total, C.EXACT)
