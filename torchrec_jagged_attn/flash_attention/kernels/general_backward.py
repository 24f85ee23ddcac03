"""Backward of jagged flash attention in Triton: any dtype, width, bias and scale, on any GPU.

    p = softmax(scores)    dv = pᵀ·do    ds = p · (do·vᵀ - delta)    dq = ds·k    dk = dsᵀ·q

with ``delta`` = Σ do · out for each query. Dropout applies to do·vᵀ and to the p of dv. One kernel
goes over tiles of queries and writes dq and ``delta``; the next goes over tiles of keys and writes
dk, dv and the gradients of biases. Both recompute p and do·vᵀ: 4·D + 2·Dv and 4·D + 4·Dv FLOPs for
each pair of rows and head. There are no atomics, so that the order of sums is fixed.

Gradients of tables are summed per tile here, and over tiles by the caller. A third kernel computes
that of the table of distances, along diagonals of tiles, which have the same distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.attention.kernels.biases import load_bias, row_buckets
from torchrec_jagged_attn.attention.kernels.dropout import drop_weights, query_draws
from torchrec_jagged_attn.flash_attention.kernels.distance_bias import (
    add_gradient,
    scores_by_distance,
)
from torchrec_jagged_attn.flash_attention.kernels.records import Arguments
from torchrec_jagged_attn.flash_attention.kernels.tiles import (
    drop_pairs,
    key_weights,
    load_keys,
    load_queries,
    load_rows,
    load_softmax_stats,
    load_values,
    locate_queries,
    seen_from,
    seen_keys,
    softmax_of_stats,
    store_rows,
    window_begin,
)
from torchrec_jagged_attn.runtime.kernels.matmul import multiply, product
from torchrec_jagged_attn.runtime.kernels.softmax import LOG2E, mean_grad
from torchrec_jagged_attn.runtime.kernels.tile_list import locate_tile


class Rows(NamedTuple):
    """Rows of a tile of queries, and their statistics, see :func:`load_softmax_stats`."""

    q: Any
    grad_out: Any
    maximum: Any
    inverse: Any


@triton.jit
def _grad_of_queries(
    acc, residual, delta, rows, args, tile, first, last, alone, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the terms of the keys from ``first`` to ``last`` to dq; all rows see all of these keys
    unless ``MASKED``. ``alone``: they are one tile, and the rows see no other keys.
    """
    for start in range(first, last, C.BLOCK_N):
        k = load_keys(args.inputs.k, tile, start, C, MASKED)
        v = load_values(args.inputs.v, tile, start, C, MASKED)
        p = key_weights(rows.q, k, rows.maximum, rows.inverse, args, tile, start, C, MASKED)
        dp = product(rows.grad_out, tl.trans(v), C.PRECISION)
        dp = drop_pairs(dp, args, tile, start, C)
        if MASKED:
            delta = mean_grad(p, dp, delta, alone)
        ds = p * (dp - delta[:, None])
        # A separate product: with acc in flight, ptxas waits after every instruction (C7515).
        acc += product(ds.to(k.dtype), k, C.PRECISION) * args.scale
        if C.BIASED:
            residual += tl.sum(ds, 1)
    return acc, residual, delta


@triton.jit(do_not_specialize=["num_stats", "reach", "window"])
def grad_q_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``q`` and ``delta`` are written
    samples,  # Samples, whose tiles are of queries
    num_stats,
    reach,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants
):
    """Gradient of one tile of query rows of one head, over all keys of its sample."""
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, reach, window, factor, scale
    )
    listed, tile = locate_queries(args, C)
    if not listed:
        return
    row, count, head = tile.row, tile.count, tile.head
    i = tl.arange(0, C.BLOCK_M)
    stat = (row + i) * C.H + head
    q = load_queries(inputs.q, row, count, head, C)
    grad_out = load_rows(grads.out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
    out = load_rows(outputs.out, row, count, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D)
    maximum, inverse = load_softmax_stats(args, stat, i < count, C)
    rows = Rows(q, grad_out, maximum, inverse)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    seen_by_all, seen_by_any = seen_keys(tile, C)
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    residual = tl.zeros([C.BLOCK_M], tl.float32)  # Σ ds: zero, but for the rounding of out
    first, whole = seen_from(window, tile, C)
    full = first
    alone = seen_by_any - first <= C.BLOCK_N
    if not C.BIASED:
        full = seen_by_all // C.BLOCK_N * C.BLOCK_N
        if window is not None:
            whole = tl.minimum(whole, full)
            acc, residual, delta = _grad_of_queries(
                acc, residual, delta, rows, args, tile, first, whole, alone, C, MASKED=True
            )
        acc, residual, delta = _grad_of_queries(
            acc, residual, delta, rows, args, tile, whole, full, alone, C, MASKED=False
        )
    acc, residual, delta = _grad_of_queries(
        acc, residual, delta, rows, args, tile, full, seen_by_any, alone, C, MASKED=True
    )
    # With the residual added to delta, ds sum to zero, also in gradients of biases of many rows.
    tl.store(grads.delta + stat, delta + residual, mask=i < count)
    store_rows(grads.q, acc, row, count, head, C.H * C.D, C.D, C.BLOCK_M, C.BLOCK_D)


class _Keys(NamedTuple):
    """A tile of keys and their values, and the queries of its sample."""

    k: Any
    v: Any
    sample: Any
    row: Any  # first key of the tile
    own: Any  # mask of keys that belong to the sample, [BLOCK_N]
    base: Any  # first query of the sample
    num_rows: Any  # number of queries of the sample
    low: Any  # the first query that sees each key
    diagonal: Any  # the query on the causal diagonal of the tile's first key, see ``QueryTile``


@triton.jit
def _key_biases(args, keys, head, C: tl.constexpr):
    """Biases of keys for one head, times log2(e), ``[BLOCK_N]``, without that by distance."""
    bias = tl.zeros([C.BLOCK_N], tl.float32)
    if C.BIASED:
        j = keys.row + tl.arange(0, C.BLOCK_N)
        bias += load_bias(
            args.biases, args.samples.kv_offsets, keys.sample, j, keys.own, head, C.H, C
        )
    return bias * LOG2E


@triton.jit
def _seeing_queries(window, count, diagonal, num_rows, C: tl.constexpr):
    """The end of the queries that see any key of a tile, and of those that see its first key.

    The sample has ``count`` keys from the tile on; ``diagonal`` is that of :class:`_Keys`.
    """
    any_end, all_end = num_rows, num_rows
    if window is not None:
        LAST: tl.constexpr = C.BLOCK_N - 1
        any_end = diagonal + LAST + tl.minimum(count - LAST, window)
        all_end = diagonal + tl.minimum(count, window)
    return any_end, all_end


@triton.jit
def _query_weights(keys, bias, args, head, start, C: tl.constexpr, MASKED: tl.constexpr):
    """Weights ``[BLOCK_N, BLOCK_M]`` of a head's keys for the queries from ``start`` on.

    Returns:
        ``(p, q, grad_out, delta, draws)``: the weights, and rows; ``draws`` are for
        :func:`_drop_keys`.
    """
    i = start + tl.arange(0, C.BLOCK_M)
    row, remaining = keys.base + start, keys.num_rows - start
    q = load_rows(
        args.inputs.q, row, remaining, head, C.Q_STRIDE, C.D, C.BLOCK_M, C.BLOCK_D, MASKED
    )
    grad_out = load_rows(
        args.grads.out, row, remaining, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D, MASKED
    )
    stat, own = (keys.base + i) * C.H + head, i < keys.num_rows
    maximum, inverse = load_softmax_stats(args, stat, own, C, MASKED)
    if MASKED:
        delta = tl.load(args.grads.delta + stat, mask=own, other=0.0)
    else:
        delta = tl.load(args.grads.delta + stat)
    visible, scores_bias = own[None, :], 0.0
    if C.CAUSAL:
        visible = visible & (i[None, :] >= keys.low[:, None])
    if args.window is not None:
        own_query = keys.diagonal + tl.arange(0, C.BLOCK_N)
        visible = visible & (i[None, :] - own_query[:, None] < args.window)
    if C.BIASED:
        scores_bias = bias[:, None]
        if C.R > 0:
            scores_bias += scores_by_distance(
                args.biases.by_distance, args.reach, head, keys.diagonal - start,
                C.BLOCK_N, C.BLOCK_M,
            )  # fmt: skip
        visible = visible & (scores_bias != -float("inf"))
    products = product(keys.k, tl.trans(q), C.PRECISION)
    products = -products if C.NEGATIVE else products
    p = softmax_of_stats(
        products, args.factor, scores_bias, visible, maximum[None, :], inverse[None, :], C, MASKED
    )
    return p, q, grad_out, delta, query_draws(args.biases.dropout, stat)


@triton.jit
def _drop_keys(x, args, keys, draws, C: tl.constexpr):
    """:func:`drop_weights` of ``x`` ``[BLOCK_N, BLOCK_M]``."""
    n = keys.row + tl.arange(0, C.BLOCK_N)
    return drop_weights(x, args.biases.dropout, draws[None, :], n[:, None])


@triton.jit
def _grad_of_keys(
    acc_k, acc_v, grad_bias, keys, bias, args, head, first, last, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the terms of a head's queries from ``first`` to ``last`` to dk, dv and the gradient of
    biases; they see all keys of the tile unless ``MASKED``.
    """
    for start in range(first, last, C.BLOCK_M):
        p, q, grad_out, delta, draws = _query_weights(keys, bias, args, head, start, C, MASKED)
        kept = _drop_keys(p, args, keys, draws, C)
        acc_v = multiply(kept.to(grad_out.dtype), grad_out, acc_v, C.PRECISION)
        dp = product(keys.v, tl.trans(grad_out), C.PRECISION)
        dp = _drop_keys(dp, args, keys, draws, C)
        ds = p * (dp - delta[None, :])
        acc_k = multiply(ds.to(q.dtype), q, acc_k, C.PRECISION)
        if C.BIASED:
            grad_bias += tl.sum(ds, 1)
    return acc_k, acc_v, grad_bias


@triton.jit
def _store_bucket_sums(ptr, values, buckets, head, H: tl.constexpr, NUM_BUCKETS: tl.constexpr):
    """Store the sum of each bucket's ``values`` in a head's column of ``[NUM_BUCKETS, H]``."""
    for first in range(0, NUM_BUCKETS, 16):
        b = first + tl.arange(0, 16)
        of_bucket = tl.where(b[:, None] == buckets[None, :], values[None, :], 0.0)
        tl.store(ptr + b * H + head, tl.sum(of_bucket, 1), mask=b < NUM_BUCKETS)


@triton.jit
def _store_bias_gradients(args, grad_bias, keys, tile, head, C: tl.constexpr):
    """Store the gradients of a head's biases of a tile of keys, the ``tile``-th of the list."""
    grads, own = args.grads, keys.own
    if args.window is not None:
        grad_bias *= tl.where(args.window > 1, 1.0, 0.0)  # the weight of a single key is constant
    j = keys.row + tl.arange(0, C.BLOCK_N)
    if grads.bias is not None:
        tl.store(grads.bias + j * C.H + head, grad_bias, mask=own)
    if C.P > 0 or C.A > 0:
        of_position, of_age = row_buckets(
            j, own, args.samples.kv_offsets, args.biases, keys.sample, C
        )
        grad_bias = tl.where(own, grad_bias, 0.0)
        table_ptr = grads.tables + tile.to(tl.int64) * ((C.P + C.A) * C.H)
        if C.P > 0:
            _store_bucket_sums(table_ptr, grad_bias, of_position, head, C.H, C.P)
        if C.A > 0:
            _store_bucket_sums(table_ptr + C.P * C.H, grad_bias, of_age, head, C.H, C.A)


@triton.jit(do_not_specialize=["num_stats", "reach", "window"])
def grad_kv_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; of keys, values, and biases of keys are written
    samples,  # Samples, whose tiles are of keys
    num_stats,
    reach,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants
):
    """Gradients of one tile of key rows of one head, over all query rows that see them."""
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, reach, window, factor, scale
    )
    tile, kv_head = tl.program_id(0) // C.HK, tl.program_id(0) % C.HK
    listed, sample, row, count, base, num_rows, low, _, diagonal = locate_tile(
        samples.tiles, tile, C.CAUSAL, True, C.BLOCK_N
    )
    if not listed:
        return
    k = load_rows(inputs.k, row, count, kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
    v = load_rows(inputs.v, row, count, kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)
    own = tl.arange(0, C.BLOCK_N) < count
    keys = _Keys(k, v, sample, row, own, base, num_rows, low, diagonal)

    first, seeing_all = num_rows * 0, num_rows * 0
    if C.CAUSAL:
        first = tl.maximum(num_rows - count, 0) // C.BLOCK_M * C.BLOCK_M
        seeing_all = tl.maximum(num_rows - count + C.BLOCK_N - 1, 0)
        seeing_all = tl.minimum(tl.cdiv(seeing_all, C.BLOCK_M) * C.BLOCK_M, num_rows)
    end, all_end = _seeing_queries(window, count, diagonal, num_rows, C)
    full = tl.maximum(all_end // C.BLOCK_M * C.BLOCK_M, seeing_all)
    acc_k = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    acc_v = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
    for member in range(C.H // C.HK):
        head = kv_head * (C.H // C.HK) + member
        bias = _key_biases(args, keys, head, C)
        grad_bias = tl.zeros([C.BLOCK_N], tl.float32)
        masked_from = first
        if not C.BIASED:
            if C.CAUSAL:
                acc_k, acc_v, grad_bias = _grad_of_keys(
                    acc_k, acc_v, grad_bias, keys, bias, args, head, first, seeing_all,
                    C, MASKED=True,
                )  # fmt: skip
            acc_k, acc_v, grad_bias = _grad_of_keys(
                acc_k, acc_v, grad_bias, keys, bias, args, head, seeing_all, full, C,
                MASKED=False,
            )  # fmt: skip
            masked_from = full
        acc_k, acc_v, grad_bias = _grad_of_keys(
            acc_k, acc_v, grad_bias, keys, bias, args, head, masked_from, end, C,
            MASKED=True,
        )  # fmt: skip
        _store_bias_gradients(args, grad_bias, keys, tile, head, C)
    store_rows(
        grads.k, acc_k * scale, row, count, kv_head, C.GRAD_K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D
    )
    store_rows(grads.v, acc_v, row, count, kv_head, C.GRAD_V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)


@triton.jit(do_not_specialize=["num_stats", "reach", "window"])
def grad_relative_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``relative`` is written
    samples,  # Samples, whose tiles are of queries
    num_stats,
    reach,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants; BLOCK_N is BLOCK_M
):
    """The terms of some diagonals of a sample's square tiles, of BLOCK_M queries and as many keys,
    in the gradient of one head's column of the table.

    The diagonals of a program are as far apart as the sample has tiles of queries, so that all
    programs of a sample have about as many tiles.
    """
    BY_KEYS: tl.constexpr = (biases.bias is not None) or C.P > 0 or C.A > 0
    BLOCK: tl.constexpr = C.BLOCK_M
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, reach, window, factor, scale
    )
    tile, head = tl.program_id(0) // C.H, tl.program_id(0) % C.H
    kv_head = head // (C.H // C.HK)
    listed, sample, row, count, base, num_keys, _, _, _ = locate_tile(
        samples.tiles, tile, False, False, BLOCK
    )
    if not listed:
        return
    begin = tl.load(samples.q_offsets + sample).to(tl.int64)
    num_rows = (row + count - begin).to(tl.int32)
    num_tiles, num_key_tiles = tl.cdiv(num_rows, BLOCK), tl.cdiv(num_keys, BLOCK)
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    sums = tl.zeros([C.BLOCKS_R, 16], tl.float32)
    highest = (row - begin).to(tl.int32) // BLOCK
    first_step, end_step = num_keys * 0, tl.cdiv(highest + num_key_tiles, num_tiles)
    if window is not None:  # skip diagonals without a visible pair
        most, stride = num_keys - num_rows + highest * BLOCK, num_tiles * BLOCK
        first_step = tl.cdiv(window_begin(most - BLOCK + 1, window), stride)
        end_step = tl.minimum(end_step, tl.cdiv(tl.maximum(most + BLOCK, 0), stride))
    for step in range(first_step, end_step):
        diagonal = highest - step * num_tiles
        first = num_keys - num_rows + diagonal * BLOCK
        low, high = tl.maximum(diagonal, 0), tl.minimum(num_tiles, num_key_tiles + diagonal)
        bias = scores_by_distance(biases.by_distance, reach, head, first, BLOCK, BLOCK)
        if C.CAUSAL:
            bias = tl.where(first + i[:, None] >= j[None, :], bias, -float("inf"))
            high = tl.where(first + BLOCK > 0, high, low)
        if window is not None:
            bias = tl.where(first + i[:, None] - j[None, :] < window, bias, -float("inf"))
            high = tl.where(first - BLOCK < window - 1, high, low)
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        for m in range(low, high):
            q_row, key = begin + m * BLOCK, base + (m - diagonal) * BLOCK
            remaining, keys = num_rows - m * BLOCK, num_keys - (m - diagonal) * BLOCK
            q = load_rows(inputs.q, q_row, remaining, head, C.Q_STRIDE, C.D, BLOCK, C.BLOCK_D)
            k = load_rows(inputs.k, key, keys, kv_head, C.K_STRIDE, C.D, BLOCK, C.BLOCK_D)
            v = load_rows(inputs.v, key, keys, kv_head, C.V_STRIDE, C.DV, BLOCK, C.BLOCK_D)
            grad_out = load_rows(
                grads.out, q_row, remaining, head, C.H * C.DV, C.DV, BLOCK, C.BLOCK_D
            )
            stat, own = (q_row + i) * C.H + head, i < remaining
            maximum, inverse = load_softmax_stats(args, stat, own, C)
            delta = tl.load(grads.delta + stat, mask=own, other=0.0)
            scores_bias = bias
            if BY_KEYS:
                scores_bias += LOG2E * load_bias(
                    biases, samples.kv_offsets, sample, key + j[None, :], j[None, :] < keys, head,
                    C.H, C,
                )  # fmt: skip
            products = product(q, tl.trans(k), C.PRECISION)
            products = -products if C.NEGATIVE else products
            visible = own[:, None] & (j[None, :] < keys) & (scores_bias != -float("inf"))
            p = softmax_of_stats(
                products, factor, scores_bias, visible, maximum[:, None], inverse[:, None], C
            )
            dp = product(grad_out, tl.trans(v), C.PRECISION)
            draws = query_draws(biases.dropout, stat)
            dp = drop_weights(dp, biases.dropout, draws[:, None], (key + j)[None, :])
            acc += p * (dp - delta[:, None])
        if window is not None:  # the weight of a single key is constant
            acc *= tl.where(window > 1, 1.0, 0.0)
        sums = add_gradient(sums, acc, first, C.R, C.BLOCKS_R)
    r = tl.arange(0, C.BLOCKS_R)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(grads.relative + tl.program_id(0).to(tl.int64) * C.R + r, sums, mask=r < C.R)
