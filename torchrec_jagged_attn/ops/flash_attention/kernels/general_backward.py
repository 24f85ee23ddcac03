"""Backward of the general kernels of jagged flash attention: any dtype, width, bias and scale.

    p = softmax(scores)    dv = pᵀ·do    ds = p · (do·vᵀ - delta)    dq = ds·k    dk = dsᵀ·q

with ``delta`` = Σ do · out for each query. Dropout applies to do·vᵀ and to the p of dv. One kernel
computes tiles of queries and writes dq and ``delta``; the next computes tiles of keys and writes
dk, dv and the gradients of biases of keys. Both recompute p and do·vᵀ: 4·D + 2·Dv and 4·D + 4·Dv
FLOPs per pair of rows and head. A third kernel computes the gradient of ``relative_bias`` along
diagonals of tiles, on which distances are equal. There are no atomics, so the order of sums is
fixed. Gradients of bias tables are summed per tile here, and over tiles by the caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.biases import load_bias, row_buckets
from torchrec_jagged_attn.ops.device.dropout import drop_weights, query_draws
from torchrec_jagged_attn.ops.device.matmul import multiply, product
from torchrec_jagged_attn.ops.device.softmax import LOG2E, mean_grad
from torchrec_jagged_attn.ops.device.tile_list import locate_tile
from torchrec_jagged_attn.ops.flash_attention.kernels.distance_bias import (
    add_gradient,
    load_distance_bias,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.records import Arguments
from torchrec_jagged_attn.ops.flash_attention.kernels.tiles import (
    drop_pairs,
    key_weights,
    load_keys,
    load_queries,
    load_rows,
    load_softmax_stats,
    load_values,
    locate_queries,
    softmax_of_stats,
    store_rows,
    visible_ends,
    window_begin,
    window_begins,
)


class _QueryRows(NamedTuple):
    """Rows of a tile of queries, and their statistics; see :func:`load_softmax_stats`."""

    q: Any
    grad_out: Any
    maximum: Any
    inverse: Any


@triton.jit
def _grad_of_queries(
    acc, residual, delta, rows, args, tile, first, last, is_only_tile, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the terms of keys ``first`` to ``last - 1`` to dq.

    ``MASKED`` is false if all queries see all of these keys. ``is_only_tile`` is true if the keys
    are a single tile, and the queries see no other keys.
    """
    for start in range(first, last, C.BLOCK_N):
        k = load_keys(args.inputs.k, tile, start, C, MASKED)
        v = load_values(args.inputs.v, tile, start, C, MASKED)
        p = key_weights(rows.q, k, rows.maximum, rows.inverse, args, tile, start, C, MASKED)
        dp = product(rows.grad_out, tl.trans(v), C.PRECISION)
        dp = drop_pairs(dp, args, tile, start, C)
        if MASKED:
            delta = mean_grad(p, dp, delta, is_only_tile)
        ds = p * (dp - delta[:, None])
        # A separate product: with acc in flight, ptxas would wait after every instruction (C7515).
        acc += product(ds.to(k.dtype), k, C.PRECISION) * args.scale
        if C.BIASED:
            residual += tl.sum(ds, 1)
    return acc, residual, delta


@triton.jit(do_not_specialize=["num_stats", "max_distance", "window"])
def grad_q_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``q`` and ``delta`` are written
    samples,  # Samples, whose tiles are of queries
    num_stats,
    max_distance,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants
):
    """Compute dq of one tile of queries of one head, over all keys of its sample."""
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, max_distance, window, factor, scale
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
    rows = _QueryRows(q, grad_out, maximum, inverse)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    all_end, any_end = visible_ends(tile, C)
    acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
    residual = tl.zeros([C.BLOCK_M], tl.float32)  # Σ ds: zero except for the rounding of out
    first, unmasked_begin = window_begins(window, tile, C)
    unmasked_end = first
    is_only_tile = any_end - first <= C.BLOCK_N
    if not C.BIASED:
        unmasked_end = all_end // C.BLOCK_N * C.BLOCK_N
        if window is not None:
            unmasked_begin = tl.minimum(unmasked_begin, unmasked_end)
            acc, residual, delta = _grad_of_queries(
                acc, residual, delta, rows, args, tile, first, unmasked_begin, is_only_tile, C,
                MASKED=True,
            )  # fmt: skip
        acc, residual, delta = _grad_of_queries(
            acc, residual, delta, rows, args, tile, unmasked_begin, unmasked_end, is_only_tile, C,
            MASKED=False,
        )  # fmt: skip
    acc, residual, delta = _grad_of_queries(
        acc, residual, delta, rows, args, tile, unmasked_end, any_end, is_only_tile, C, MASKED=True
    )
    # With the residual added to delta, ds sum to zero, which matters if biases sum many rows.
    tl.store(grads.delta + stat, delta + residual, mask=i < count)
    store_rows(grads.q, acc, row, count, head, C.H * C.D, C.D, C.BLOCK_M, C.BLOCK_D)


class _Keys(NamedTuple):
    """A tile of keys and their values, and the queries of its sample."""

    k: Any
    v: Any
    sample: Any
    row: Any  # first key of the tile
    in_sample: Any  # [BLOCK_N], mask of keys of the sample
    base: Any  # first query of the sample
    num_rows: Any  # number of queries of the sample
    low: Any  # first query that sees each key
    diagonal: Any  # query on the causal diagonal of the tile's first key, see ``QueryTile``


@triton.jit
def _key_biases(args, keys, head, C: tl.constexpr):
    """Return the biases of keys ``[BLOCK_N]`` of one head, times log2(e), without distances."""
    bias = tl.zeros([C.BLOCK_N], tl.float32)
    if C.BIASED:
        j = keys.row + tl.arange(0, C.BLOCK_N)
        bias += load_bias(
            args.biases, args.samples.kv_offsets, keys.sample, j, keys.in_sample, head, C.H, C
        )
    return bias * LOG2E


@triton.jit
def _visible_query_ends(window, count, diagonal, num_rows, C: tl.constexpr):
    """Return the end of the queries that see any key of a tile, and that see its first key.

    The sample has ``count`` keys from the tile on. ``diagonal`` is the field of :class:`_Keys`.
    """
    any_end, all_end = num_rows, num_rows
    if window is not None:
        LAST: tl.constexpr = C.BLOCK_N - 1
        any_end = diagonal + LAST + tl.minimum(count - LAST, window)
        all_end = diagonal + tl.minimum(count, window)
    return any_end, all_end


@triton.jit
def _weights_of_queries(keys, bias, args, head, start, C: tl.constexpr, MASKED: tl.constexpr):
    """Recompute the weights of a tile of keys for the queries from ``start`` on.

    Returns:
        ``(p, q, grad_out, delta, draws)``: weights ``[BLOCK_N, BLOCK_M]``, rows of the queries, and
        random bits for :func:`_drop_keys`.
    """
    i = start + tl.arange(0, C.BLOCK_M)
    row, remaining = keys.base + start, keys.num_rows - start
    q = load_rows(
        args.inputs.q, row, remaining, head, C.Q_STRIDE, C.D, C.BLOCK_M, C.BLOCK_D, MASKED
    )
    grad_out = load_rows(
        args.grads.out, row, remaining, head, C.H * C.DV, C.DV, C.BLOCK_M, C.BLOCK_D, MASKED
    )
    stat, in_sample = (keys.base + i) * C.H + head, i < keys.num_rows
    maximum, inverse = load_softmax_stats(args, stat, in_sample, C, MASKED)
    if MASKED:
        delta = tl.load(args.grads.delta + stat, mask=in_sample, other=0.0)
    else:
        delta = tl.load(args.grads.delta + stat)
    visible, score_bias = in_sample[None, :], 0.0
    if C.CAUSAL:
        visible = visible & (i[None, :] >= keys.low[:, None])
    if args.window is not None:
        diagonal_query = keys.diagonal + tl.arange(0, C.BLOCK_N)
        visible = visible & (i[None, :] - diagonal_query[:, None] < args.window)
    if C.BIASED:
        score_bias = bias[:, None]
        if C.R > 0:
            score_bias += load_distance_bias(
                args.biases.by_distance, args.max_distance, head, keys.diagonal - start,
                C.BLOCK_N, C.BLOCK_M,
            )  # fmt: skip
        visible = visible & (score_bias != -float("inf"))
    products = product(keys.k, tl.trans(q), C.PRECISION)
    products = -products if C.NEGATIVE else products
    p = softmax_of_stats(
        products, args.factor, score_bias, visible, maximum[None, :], inverse[None, :], C, MASKED
    )
    return p, q, grad_out, delta, query_draws(args.biases.dropout, stat)


@triton.jit
def _drop_keys(x, args, keys, draws, C: tl.constexpr):
    """Apply :func:`drop_weights` to ``x`` ``[BLOCK_N, BLOCK_M]``."""
    n = keys.row + tl.arange(0, C.BLOCK_N)
    return drop_weights(x, args.biases.dropout, draws[None, :], n[:, None])


@triton.jit
def _grad_of_keys(
    acc_k, acc_v, grad_bias, keys, bias, args, head, first, last, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the terms of queries ``first`` to ``last - 1`` of a head to dk, dv and bias gradients.

    ``MASKED`` is false if all of these queries see all keys of the tile.
    """
    for start in range(first, last, C.BLOCK_M):
        p, q, grad_out, delta, draws = _weights_of_queries(keys, bias, args, head, start, C, MASKED)
        p_dropped = _drop_keys(p, args, keys, draws, C)
        acc_v = multiply(p_dropped.to(grad_out.dtype), grad_out, acc_v, C.PRECISION)
        dp = product(keys.v, tl.trans(grad_out), C.PRECISION)
        dp = _drop_keys(dp, args, keys, draws, C)
        ds = p * (dp - delta[None, :])
        acc_k = multiply(ds.to(q.dtype), q, acc_k, C.PRECISION)
        if C.BIASED:
            grad_bias += tl.sum(ds, 1)
    return acc_k, acc_v, grad_bias


@triton.jit
def _store_bucket_sums(ptr, values, buckets, head, H: tl.constexpr, NUM_BUCKETS: tl.constexpr):
    """Store the sums of ``values`` by bucket in the column of a head of ``[NUM_BUCKETS, H]``."""
    for first in range(0, NUM_BUCKETS, 16):
        b = first + tl.arange(0, 16)
        in_bucket = tl.where(b[:, None] == buckets[None, :], values[None, :], 0.0)
        tl.store(ptr + b * H + head, tl.sum(in_bucket, 1), mask=b < NUM_BUCKETS)


@triton.jit
def _store_bias_gradients(args, grad_bias, keys, tile, head, C: tl.constexpr):
    """Store the gradients of the biases of a head and tile of keys; ``tile`` is its list index."""
    grads, in_sample = args.grads, keys.in_sample
    if args.window is not None:
        grad_bias *= tl.where(args.window > 1, 1.0, 0.0)  # a single key has a constant weight
    j = keys.row + tl.arange(0, C.BLOCK_N)
    if grads.bias is not None:
        tl.store(grads.bias + j * C.H + head, grad_bias, mask=in_sample)
    if C.P > 0 or C.A > 0:
        position_index, age_index = row_buckets(
            j, in_sample, args.samples.kv_offsets, args.biases, keys.sample, C
        )
        grad_bias = tl.where(in_sample, grad_bias, 0.0)
        table_ptr = grads.tables + tile.to(tl.int64) * ((C.P + C.A) * C.H)
        if C.P > 0:
            _store_bucket_sums(table_ptr, grad_bias, position_index, head, C.H, C.P)
        if C.A > 0:
            _store_bucket_sums(table_ptr + C.P * C.H, grad_bias, age_index, head, C.H, C.A)


@triton.jit(do_not_specialize=["num_stats", "max_distance", "window"])
def grad_kv_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``k``, ``v``, ``bias`` and ``tables`` are written
    samples,  # Samples, whose tiles are of keys
    num_stats,
    max_distance,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants
):
    """Compute dk, dv and bias gradients of one tile of keys of one key head."""
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, max_distance, window, factor, scale
    )
    tile, kv_head = tl.program_id(0) // C.HK, tl.program_id(0) % C.HK
    listed, sample, row, count, base, num_rows, low, _, diagonal = locate_tile(
        samples.tiles, tile, C.CAUSAL, True, C.BLOCK_N
    )
    if not listed:
        return
    k = load_rows(inputs.k, row, count, kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D)
    v = load_rows(inputs.v, row, count, kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)
    in_sample = tl.arange(0, C.BLOCK_N) < count
    keys = _Keys(k, v, sample, row, in_sample, base, num_rows, low, diagonal)

    first, all_begin = num_rows * 0, num_rows * 0
    if C.CAUSAL:
        first = tl.maximum(num_rows - count, 0) // C.BLOCK_M * C.BLOCK_M
        all_begin = tl.maximum(num_rows - count + C.BLOCK_N - 1, 0)
        all_begin = tl.minimum(tl.cdiv(all_begin, C.BLOCK_M) * C.BLOCK_M, num_rows)
    end, all_end = _visible_query_ends(window, count, diagonal, num_rows, C)
    unmasked_end = tl.maximum(all_end // C.BLOCK_M * C.BLOCK_M, all_begin)
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
                    acc_k, acc_v, grad_bias, keys, bias, args, head, first, all_begin,
                    C, MASKED=True,
                )  # fmt: skip
            acc_k, acc_v, grad_bias = _grad_of_keys(
                acc_k, acc_v, grad_bias, keys, bias, args, head, all_begin, unmasked_end, C,
                MASKED=False,
            )  # fmt: skip
            masked_from = unmasked_end
        acc_k, acc_v, grad_bias = _grad_of_keys(
            acc_k, acc_v, grad_bias, keys, bias, args, head, masked_from, end, C,
            MASKED=True,
        )  # fmt: skip
        _store_bias_gradients(args, grad_bias, keys, tile, head, C)
    store_rows(
        grads.k, acc_k * scale, row, count, kv_head, C.GRAD_K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D
    )
    store_rows(grads.v, acc_v, row, count, kv_head, C.GRAD_V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D)


@triton.jit(do_not_specialize=["num_stats", "max_distance", "window"])
def grad_relative_kernel(
    inputs,  # Inputs
    biases,  # Biases
    outputs,  # arguments.FlashOutputs
    grads,  # Gradients; ``relative`` is written
    samples,  # Samples, whose tiles are of queries
    num_stats,
    max_distance,
    window,  # or None
    factor,
    scale,
    C: tl.constexpr,  # Constants; BLOCK_N is BLOCK_M
):
    """Compute the terms of some diagonals of tiles in the gradient of ``relative_bias``.

    The pairs of a sample are divided into square tiles of BLOCK_M queries and keys. A program
    computes one head, and every ``num_tiles``-th diagonal of tiles, where ``num_tiles`` is the
    number of tiles of queries. So all programs of a sample have about the same number of tiles.
    """
    BY_ROW: tl.constexpr = (biases.bias is not None) or (biases.prior_weights is not None)
    BY_KEYS: tl.constexpr = BY_ROW or C.P > 0 or C.A > 0
    BLOCK: tl.constexpr = C.BLOCK_M
    args = Arguments(
        inputs, biases, outputs, grads, samples, num_stats, max_distance, window, factor, scale
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
        longest, stride = num_keys - num_rows + highest * BLOCK, num_tiles * BLOCK
        first_step = tl.cdiv(window_begin(longest - BLOCK + 1, window), stride)
        end_step = tl.minimum(end_step, tl.cdiv(tl.maximum(longest + BLOCK, 0), stride))
    for step in range(first_step, end_step):
        diagonal = highest - step * num_tiles
        first = num_keys - num_rows + diagonal * BLOCK
        low, high = tl.maximum(diagonal, 0), tl.minimum(num_tiles, num_key_tiles + diagonal)
        bias = load_distance_bias(biases.by_distance, max_distance, head, first, BLOCK, BLOCK)
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
            stat, in_sample = (q_row + i) * C.H + head, i < remaining
            maximum, inverse = load_softmax_stats(args, stat, in_sample, C)
            delta = tl.load(grads.delta + stat, mask=in_sample, other=0.0)
            score_bias = bias
            if BY_KEYS:
                score_bias += LOG2E * load_bias(
                    biases, samples.kv_offsets, sample, key + j[None, :], j[None, :] < keys, head,
                    C.H, C,
                )  # fmt: skip
            products = product(q, tl.trans(k), C.PRECISION)
            products = -products if C.NEGATIVE else products
            visible = in_sample[:, None] & (j[None, :] < keys) & (score_bias != -float("inf"))
            p = softmax_of_stats(
                products, factor, score_bias, visible, maximum[:, None], inverse[:, None], C
            )
            dp = product(grad_out, tl.trans(v), C.PRECISION)
            draws = query_draws(biases.dropout, stat)
            dp = drop_weights(dp, biases.dropout, draws[:, None], (key + j)[None, :])
            acc += p * (dp - delta[:, None])
        if window is not None:  # a single key has a constant weight
            acc *= tl.where(window > 1, 1.0, 0.0)
        sums = add_gradient(sums, acc, first, C.R, C.BLOCKS_R)
    r = tl.arange(0, C.BLOCKS_R)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(grads.relative + tl.program_id(0).to(tl.int64) * C.R + r, sums, mask=r < C.R)
