"""Forward of the general kernels of jagged flash attention: any dtype, width, bias and scale.

    out_i = Σ_j softmax_j(scale · q_i · k_j + bias_ij) · v_j       over the keys j of i's sample

Dropout follows the softmax.

A program computes one tile of queries of one head. It iterates over the tiles of keys of the sample
from the last to the first, with an online softmax: 2·(D + Dv) FLOPs per pair of rows and head. It
reads q once, and k and v once per tile of queries; it writes out and the softmax statistics for
backward.

Tiles of keys that no query sees are skipped. Without biases, only the tiles on the causal diagonal
and at the begin of the window are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.matmul import multiply, product
from torchrec_jagged_attn.ops.flash_attention.kernels.records import Arguments
from torchrec_jagged_attn.ops.flash_attention.kernels.tiles import (
    bias_and_mask,
    drop_pairs,
    load_keys,
    load_queries,
    load_rows,
    load_values,
    locate_queries,
    online_softmax,
    store_rows,
    store_softmax_stats,
    visible_ends,
    window_begins,
)


@triton.jit
def _scores(q, args, tile, start, C: tl.constexpr, MASKED: tl.constexpr):
    """Return ``(products, bias, visible)`` of a tile of queries and the keys from ``start`` on."""
    k = load_keys(args.inputs.k, tile, start, C, MASKED)
    products = product(q, tl.trans(k), C.PRECISION)  # [BLOCK_M, BLOCK_N]
    bias, visible = bias_and_mask(args, tile, start, C)
    return products, bias, visible


@triton.jit
def _attend(
    acc, p, maximum, total, q, args, tile, first, last, C: tl.constexpr, MASKED: tl.constexpr
):
    """Attend to the tiles of keys from ``first`` to before ``last``, in reverse order.

    ``MASKED`` is false if all queries see all of these keys. The values of a tile are added one
    iteration later: ``p`` are the weights of the tile ``last``, and the returned weights are the
    weights of the tile ``first``.
    """
    for start in range(last - C.BLOCK_N, first - 1, -C.BLOCK_N):
        products, bias, visible = _scores(q, args, tile, start, C, MASKED)
        row, count = tile.base + start + C.BLOCK_N, tile.num_keys - start - C.BLOCK_N
        v = load_rows(
            args.inputs.v, row, count, tile.kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D
        )
        # Added here so that no product is in flight across iterations: otherwise ptxas waits after
        # every instruction (C7515).
        acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
        p, rescale, maximum, total = online_softmax(
            products, args.factor, bias, visible, maximum, total, C.BIASED, MASKED
        )
        p = drop_pairs(p, args, tile, start, C)
        acc *= rescale[:, None]
    return acc, p, maximum, total


@triton.jit(do_not_specialize=["num_stats", "max_distance", "window"])
def forward_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    samples,  # Samples, whose tiles are of queries
    num_stats,
    max_distance,
    window,  # or None
    factor,
    C: tl.constexpr,  # Constants
):
    """Compute one tile of queries of one head, over all keys of its sample."""
    args = Arguments(
        inputs, biases, outputs, None, samples, num_stats, max_distance, window, factor, None
    )
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
    all_end, any_end = visible_ends(tile, C)
    first, unmasked_begin = window_begins(window, tile, C)
    start = tl.maximum(tl.cdiv(any_end, C.BLOCK_N) - 1, 0) * C.BLOCK_N
    products, bias, visible = _scores(q, args, tile, start, C, MASKED=True)
    p, _, maximum, total = online_softmax(
        products, factor, bias, visible, maximum, total, C.BIASED, True
    )
    p = drop_pairs(p, args, tile, start, C)
    unmasked_end = first
    if not C.BIASED:
        unmasked_end = tl.minimum(all_end // C.BLOCK_N * C.BLOCK_N, start)
        unmasked_begin = tl.minimum(unmasked_begin, unmasked_end)
    if C.BIASED or C.CAUSAL:
        acc, p, maximum, total = _attend(
            acc, p, maximum, total, q, args, tile, unmasked_end, start, C, MASKED=True
        )
    if not C.BIASED:
        acc, p, maximum, total = _attend(
            acc, p, maximum, total, q, args, tile, unmasked_begin, unmasked_end, C, MASKED=False
        )
        if window is not None:
            acc, p, maximum, total = _attend(
                acc, p, maximum, total, q, args, tile, first, unmasked_begin, C, MASKED=True
            )
    v = load_values(inputs.v, tile, first, C)
    acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
    out = tl.div_rn(acc, tl.where(total > 0, total, 1.0)[:, None])
    store_rows(outputs.out, out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
    store_softmax_stats(outputs.stats, num_stats, stat, i < count, maximum, total, C.EXACT)
