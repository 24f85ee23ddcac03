"""Backward of jagged flash attention in Triton: any dtype, width, bias and scale, on any GPU.

    p = softmax(scores)    dv = pᵀ·do    ds = p · (do·vᵀ - delta)    dq = ds·k    dk = dsᵀ·q

with ``delta`` = Σ do · out for each query. One kernel goes over tiles of queries and writes dq and
``delta``; the next goes over tiles of keys and writes dk, dv and the gradients of biases. Each
computes p and do·vᵀ anew: 4·D + 2·Dv and 4·D + 4·Dv FLOPs for each pair of rows and head. There
are no atomics, so sums have one order.

Gradients of tables are summed by tile here, and over the tiles by the caller. The table of
distances has a kernel of its own. It goes along diagonals of a sample's tiles of pairs: tiles of
one diagonal have the same distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.biases import load_bias, row_buckets
from torchrec_jagged_attn.kernels.common.matmul import multiply
from torchrec_jagged_attn.kernels.common.softmax import LOG2E, mean_grad
from torchrec_jagged_attn.kernels.common.tile_list import locate_tile
from torchrec_jagged_attn.kernels.flash.distance_bias import add_gradient, scores_by_distance
from torchrec_jagged_attn.kernels.flash.tiles import (
    Biases,
    Constants,
    Place,
    key_bias,
    load_rows,
    load_softmax_stats,
    softmax_of_stats,
    store_rows,
)

__all__ = ["grad_kv_kernel", "grad_q_kernel", "grad_relative_kernel", "store_bias_gradients"]


class Rows(NamedTuple):
    """Rows of a tile of queries, and their statistics, see :func:`load_softmax_stats`."""

    q: Any
    grad_out: Any
    maximum: Any
    inverse: Any


@triton.jit
def _grad_of_queries(
    acc,
    residual,
    delta,
    rows,
    k_ptr,
    v_ptr,
    biases,
    place,
    first,
    last,
    factor,
    scale,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What the keys from ``first`` to ``last`` give; all rows see them all unless ``MASKED``."""
    for start in range(first, last, C.BLOCK_N):
        row, remaining = place.base + start, place.num_keys - start
        k = load_rows(
            k_ptr, row, remaining, C.K_STRIDE, place.kv_head * C.D, C.D, C.BLOCK_N, C.BLOCK_D,
            MASKED,
        )  # fmt: skip
        v = load_rows(
            v_ptr, row, remaining, C.V_STRIDE, place.kv_head * C.DV, C.DV, C.BLOCK_N, C.BLOCK_DV,
            MASKED,
        )  # fmt: skip
        bias, visible = key_bias(biases, place, start, C)
        products = tl.dot(rows.q, tl.trans(k), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        p = softmax_of_stats(
            products, factor, bias, visible, rows.maximum[:, None], rows.inverse[:, None],
            C.BIASED, MASKED, C.EXACT,
        )  # fmt: skip
        dp = tl.dot(rows.grad_out, tl.trans(v), input_precision=C.PRECISION)
        if MASKED:
            delta = mean_grad(p, dp, visible, delta, last <= C.BLOCK_N, 1)
        ds = p * (dp - delta[:, None])
        # Not into acc: where that stays in flight, ptxas waits after every instruction (C7515).
        acc += tl.dot(ds.to(k.dtype), k, input_precision=C.PRECISION) * scale
        if C.BIASED:
            residual += tl.sum(ds, 1)
    return acc, residual, delta


@triton.jit(do_not_specialize=["num_stats", "reach"])
def grad_q_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D], rows Q_STRIDE apart
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    bias_ptr,  # [ΣLk, H], or of PRIOR weights [ΣLk]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [ΣLk]
    by_distance_ptr,  # [H, 2 · reach] fp32, see distance_bias.py
    out_ptr,  # [ΣLq, H, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    grad_q_ptr,  # [ΣLq, H, D]
    delta_ptr,  # [ΣLq, H] fp32, out: Σ_d grad_out · out
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    num_stats,
    reach,
    factor,  # |scale| · log2(e), rounded once
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    PRIOR: tl.constexpr,
    R: tl.constexpr,
    BIASED: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradient of one tile of query rows of one head, over all keys of its sample."""
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    C: tl.constexpr = Constants(
        H, HK, D, DV, P, A, PRIOR, R, BIASED, Q_STRIDE, K_STRIDE, V_STRIDE, CAUSAL, NEGATIVE,
        PRECISION, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EXACT,
    )  # fmt: skip
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    kv_head = head // (H // HK)
    listed, sample, row, count, base, num_keys, _, high, diagonal = locate_tile(
        tiles_ptr, tile, CAUSAL, False, BLOCK_M
    )
    if not listed:
        return
    i = tl.arange(0, BLOCK_M)
    stat = (row + i) * H + head
    q = load_rows(q_ptr, row, count, Q_STRIDE, head * D, D, BLOCK_M, BLOCK_D, True)
    q = -q if NEGATIVE else q
    grad_out = load_rows(grad_out_ptr, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_DV, True)
    out = load_rows(out_ptr, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_DV, True)
    maximum, inverse = load_softmax_stats(stats_ptr, num_stats, stat, i < count, True, EXACT)
    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)

    seen_by_all, seen_by_any = num_keys, num_keys
    if CAUSAL:
        seen_by_all = tl.maximum(tl.minimum(num_keys, num_keys - count + 1), 0)
        seen_by_any = tl.minimum(num_keys, num_keys - count + BLOCK_M)
        high = high[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    residual = tl.zeros([BLOCK_M], tl.float32)  # Σ ds: zero, but for the rounding of out
    if R > 0:
        by_distance_ptr += head.to(tl.int64) * (2 * reach) + reach
    rows = Rows(q, grad_out, maximum, inverse)
    place = Place(sample, base, num_keys, high, diagonal, head, kv_head)
    biases = Biases(
        bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, by_distance_ptr, kv_offsets_ptr
    )
    full = num_keys * 0
    if not BIASED:
        full = seen_by_all // BLOCK_N * BLOCK_N
        acc, residual, delta = _grad_of_queries(
            acc, residual, delta, rows, k_ptr, v_ptr, biases, place, 0, full, factor, scale, C,
            MASKED=False,
        )  # fmt: skip
    acc, residual, delta = _grad_of_queries(
        acc, residual, delta, rows, k_ptr, v_ptr, biases, place, full, seen_by_any, factor, scale,
        C, MASKED=True,
    )  # fmt: skip
    # A delta larger by the residual would have made it zero; gradients of biases add up many rows.
    tl.store(delta_ptr + stat, delta + residual, mask=i < count)
    store_rows(grad_q_ptr, acc, row, count, H * D, head * D, D, BLOCK_M, BLOCK_D)


class Queries(NamedTuple):
    """Where the queries of a sample are read, and what backward needs of them.

    Attributes:
        num_stats: numbers of each of the two statistics.
        base: first query of the sample.
        num_rows: how many queries it has.
    """

    grad_out_ptr: Any
    q_ptr: Any
    stats_ptr: Any
    delta_ptr: Any
    num_stats: Any
    base: Any
    num_rows: Any


class Keys(NamedTuple):
    """A tile of keys of one head.

    Attributes:
        bias: that of the keys alone, times log2(e), ``[BLOCK_N]``.
        low: the first query that sees each key.
        diagonal: the query that is as far from the last query as the tile's first key is from the
            last key.
    """

    k: Any
    v: Any
    bias: Any
    low: Any
    diagonal: Any
    by_distance_ptr: Any  # as in Biases


@triton.jit
def _grad_of_keys(
    acc_k,
    acc_v,
    grad_bias,
    keys,
    queries,
    head,
    first,
    last,
    factor,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What a head's queries from ``first`` to ``last`` give; they see all unless ``MASKED``."""
    for start in range(first, last, C.BLOCK_M):
        i = start + tl.arange(0, C.BLOCK_M)
        row, remaining = queries.base + start, queries.num_rows - start
        q = load_rows(
            queries.q_ptr, row, remaining, C.Q_STRIDE, head * C.D, C.D, C.BLOCK_M, C.BLOCK_D, MASKED
        )
        grad_out = load_rows(
            queries.grad_out_ptr, row, remaining, C.H * C.DV, head * C.DV, C.DV, C.BLOCK_M,
            C.BLOCK_DV, MASKED,
        )  # fmt: skip
        stat, own = (queries.base + i) * C.H + head, i < queries.num_rows
        maximum, inverse = load_softmax_stats(
            queries.stats_ptr, queries.num_stats, stat, own, MASKED, C.EXACT
        )
        if MASKED:
            delta = tl.load(queries.delta_ptr + stat, mask=own, other=0.0)
        else:
            delta = tl.load(queries.delta_ptr + stat)
        visible = own[None, :]
        if C.CAUSAL:
            visible = visible & (i[None, :] >= keys.low[:, None])
        scores_bias = 0.0
        if C.BIASED:
            scores_bias = keys.bias[:, None]
            if C.R > 0:
                scores_bias += scores_by_distance(
                    keys.by_distance_ptr, keys.diagonal - start, C.BLOCK_N, C.BLOCK_M
                )
            visible = visible & (scores_bias != -float("inf"))
        products = tl.dot(keys.k, tl.trans(q), input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        products = -products if C.NEGATIVE else products
        p = softmax_of_stats(
            products, factor, scores_bias, visible, maximum[None, :], inverse[None, :],
            C.BIASED, MASKED, C.EXACT,
        )  # fmt: skip
        acc_v = multiply(p.to(grad_out.dtype), grad_out, acc_v, C.PRECISION)
        dp = tl.dot(keys.v, tl.trans(grad_out), input_precision=C.PRECISION)
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
def store_bias_gradients(
    grad_bias_ptr,
    grad_tables_ptr,
    grad_bias,
    timestamps_ptr,
    kv_offsets_ptr,
    sample,
    tile,
    j,
    own,
    head,
    C: tl.constexpr,
):
    """Store the gradients of a head's biases of those keys ``j`` that are the tile's ``own``."""
    if grad_bias_ptr is not None:
        tl.store(grad_bias_ptr + j * C.H + head, grad_bias, mask=own)
    if C.P > 0 or C.A > 0:
        of_position, of_age = row_buckets(j, own, kv_offsets_ptr, timestamps_ptr, sample, C.P, C.A)
        grad_bias = tl.where(own, grad_bias, 0.0)
        table_ptr = grad_tables_ptr + tile.to(tl.int64) * ((C.P + C.A) * C.H)
        if C.P > 0:
            _store_bucket_sums(table_ptr, grad_bias, of_position, head, C.H, C.P)
        if C.A > 0:
            _store_bucket_sums(table_ptr + C.P * C.H, grad_bias, of_age, head, C.H, C.A)


@triton.jit(do_not_specialize=["num_stats", "reach"])
def grad_kv_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D], rows Q_STRIDE apart
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    bias_ptr,  # [ΣLk, H], or of PRIOR weights [ΣLk]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [ΣLk]
    by_distance_ptr,  # [H, 2 · reach] fp32, see distance_bias.py
    stats_ptr,  # [2, ΣLq, H] fp32
    delta_ptr,  # [ΣLq, H] fp32
    grad_k_ptr,  # [ΣLk, Hk, D], rows GRAD_K_STRIDE apart
    grad_v_ptr,  # [ΣLk, Hk, Dv], rows GRAD_V_STRIDE apart
    grad_bias_ptr,  # [ΣLk, H]
    grad_tables_ptr,  # [tiles, P + A, H] fp32
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    num_stats,
    reach,
    factor,  # |scale| · log2(e), rounded once
    scale,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    PRIOR: tl.constexpr,
    R: tl.constexpr,
    BIASED: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    GRAD_K_STRIDE: tl.constexpr,
    GRAD_V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gradients of one tile of key rows of one head, over all query rows that see them."""
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    C: tl.constexpr = Constants(
        H, HK, D, DV, P, A, PRIOR, R, BIASED, Q_STRIDE, K_STRIDE, V_STRIDE, CAUSAL, NEGATIVE,
        PRECISION, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, EXACT,
    )  # fmt: skip
    tile, kv_head = tl.program_id(0) // HK, tl.program_id(0) % HK
    listed, sample, row, count, base, num_rows, low, _, diagonal = locate_tile(
        tiles_ptr, tile, CAUSAL, True, BLOCK_N
    )
    if not listed:
        return
    j = row + tl.arange(0, BLOCK_N)
    own = tl.arange(0, BLOCK_N) < count
    k = load_rows(k_ptr, row, count, K_STRIDE, kv_head * D, D, BLOCK_N, BLOCK_D, True)
    v = load_rows(v_ptr, row, count, V_STRIDE, kv_head * DV, DV, BLOCK_N, BLOCK_DV, True)

    first, seeing_all = num_rows * 0, num_rows * 0
    if CAUSAL:
        first = tl.maximum(num_rows - count, 0) // BLOCK_M * BLOCK_M
        seeing_all = tl.maximum(num_rows - count + BLOCK_N - 1, 0)
        seeing_all = tl.minimum(tl.cdiv(seeing_all, BLOCK_M) * BLOCK_M, num_rows)
    full = tl.maximum(num_rows // BLOCK_M * BLOCK_M, seeing_all)
    queries = Queries(grad_out_ptr, q_ptr, stats_ptr, delta_ptr, num_stats, base, num_rows)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(H // HK):
        head = kv_head * (H // HK) + member
        bias = tl.zeros([BLOCK_N], tl.float32)
        if BIASED:
            bias += load_bias(
                Biases(
                    bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, None, kv_offsets_ptr
                ),
                kv_offsets_ptr, sample, j, own, head, H, H, P, A, PRIOR,
            )  # fmt: skip
        bias *= LOG2E
        zero_ptr = by_distance_ptr
        if R > 0:
            zero_ptr += head.to(tl.int64) * (2 * reach) + reach
        keys = Keys(k, v, bias, low, diagonal, zero_ptr)
        grad_bias = tl.zeros([BLOCK_N], tl.float32)
        masked_from = first
        if not BIASED:
            if CAUSAL:
                acc_k, acc_v, grad_bias = _grad_of_keys(
                    acc_k, acc_v, grad_bias, keys, queries, head, first, seeing_all, factor, C,
                    MASKED=True,
                )  # fmt: skip
            acc_k, acc_v, grad_bias = _grad_of_keys(
                acc_k, acc_v, grad_bias, keys, queries, head, seeing_all, full, factor, C,
                MASKED=False,
            )  # fmt: skip
            masked_from = full
        acc_k, acc_v, grad_bias = _grad_of_keys(
            acc_k, acc_v, grad_bias, keys, queries, head, masked_from, num_rows, factor, C,
            MASKED=True,
        )  # fmt: skip
        store_bias_gradients(
            grad_bias_ptr, grad_tables_ptr, grad_bias, timestamps_ptr, kv_offsets_ptr, sample, tile,
            j, own, head, C,
        )  # fmt: skip
    store_rows(
        grad_k_ptr, acc_k * scale, row, count, GRAD_K_STRIDE, kv_head * D, D, BLOCK_N, BLOCK_D
    )
    store_rows(grad_v_ptr, acc_v, row, count, GRAD_V_STRIDE, kv_head * DV, DV, BLOCK_N, BLOCK_DV)


@triton.jit(do_not_specialize=["num_stats", "reach"])
def grad_relative_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    q_ptr,  # [ΣLq, H, D], rows Q_STRIDE apart
    k_ptr,  # [ΣLk, Hk, D], rows K_STRIDE apart
    v_ptr,  # [ΣLk, Hk, Dv], rows V_STRIDE apart
    bias_ptr,  # [ΣLk, H], or of PRIOR weights [ΣLk]
    position_bias_ptr,  # [P, H]
    age_bias_ptr,  # [A, H]
    timestamps_ptr,  # [ΣLk]
    by_distance_ptr,  # [H, 2 · reach] fp32, see distance_bias.py
    stats_ptr,  # [2, ΣLq, H] fp32
    delta_ptr,  # [ΣLq, H] fp32
    grads_ptr,  # [tiles, H, R] fp32
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, of queries, see tile_list.list_tiles
    num_stats,
    reach,
    factor,  # |scale| · log2(e), rounded once
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    A: tl.constexpr,
    PRIOR: tl.constexpr,
    R: tl.constexpr,
    BIASED: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """What some diagonals of a sample's tiles of pairs, of BLOCK queries and keys, give to the
    gradient of one head's column of the table.

    As many diagonals as there are tiles of queries before the next one of a program, so that all
    programs of a sample have as many tiles.
    """
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    BY_KEYS: tl.constexpr = (bias_ptr is not None) or P > 0 or A > 0
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    kv_head = head // (H // HK)
    listed, sample, row, count, base, num_keys, _, _, _ = locate_tile(
        tiles_ptr, tile, False, False, BLOCK
    )
    if not listed:
        return
    begin = tl.load(q_offsets_ptr + sample).to(tl.int64)
    num_rows = (row + count - begin).to(tl.int32)
    num_tiles, num_key_tiles = tl.cdiv(num_rows, BLOCK), tl.cdiv(num_keys, BLOCK)
    zero_ptr = by_distance_ptr + head.to(tl.int64) * (2 * reach) + reach
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    grads = tl.zeros([GROUPS, 16], tl.float32)
    highest = (row - begin).to(tl.int32) // BLOCK
    for turn in range(tl.cdiv(highest + num_key_tiles, num_tiles)):
        diagonal = highest - turn * num_tiles
        first = num_keys - num_rows + diagonal * BLOCK
        low, high = tl.maximum(diagonal, 0), tl.minimum(num_tiles, num_key_tiles + diagonal)
        bias = scores_by_distance(zero_ptr, first, BLOCK, BLOCK)
        if CAUSAL:
            bias = tl.where(first + i[:, None] >= j[None, :], bias, -float("inf"))
            high = tl.where(first + BLOCK > 0, high, low)
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        for m in range(low, high):
            start, key = m * BLOCK, (m - diagonal) * BLOCK
            remaining, keys = num_rows - start, num_keys - key
            q = load_rows(
                q_ptr, begin + start, remaining, Q_STRIDE, head * D, D, BLOCK, BLOCK_D, True
            )
            k = load_rows(k_ptr, base + key, keys, K_STRIDE, kv_head * D, D, BLOCK, BLOCK_D, True)
            v = load_rows(
                v_ptr, base + key, keys, V_STRIDE, kv_head * DV, DV, BLOCK, BLOCK_DV, True
            )
            grad_out = load_rows(
                grad_out_ptr, begin + start, remaining, H * DV, head * DV, DV, BLOCK, BLOCK_DV, True
            )
            stat, own = (begin + start + i) * H + head, i < remaining
            maximum, inverse = load_softmax_stats(stats_ptr, num_stats, stat, own, True, EXACT)
            delta = tl.load(delta_ptr + stat, mask=own, other=0.0)
            scores_bias = bias
            if BY_KEYS:
                biases = Biases(
                    bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, None, kv_offsets_ptr
                )
                scores_bias += LOG2E * load_bias(
                    biases, kv_offsets_ptr, sample, base + key + j[None, :], j[None, :] < keys,
                    head, H, H, P, A, PRIOR,
                )  # fmt: skip
            products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            products = -products if NEGATIVE else products
            visible = own[:, None] & (j[None, :] < keys) & (scores_bias != -float("inf"))
            p = softmax_of_stats(
                products, factor, scores_bias, visible, maximum[:, None], inverse[:, None],
                BIASED, True, EXACT,
            )  # fmt: skip
            dp = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
            acc += p * (dp - delta[:, None])
        if CAUSAL:  # what is hidden is so all along the diagonal, and may have added NaN
            acc = tl.where(first + i[:, None] >= j[None, :], acc, 0.0)
        grads = add_gradient(grads, acc, first, R, GROUPS)
    r = tl.arange(0, GROUPS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(grads_ptr + tl.program_id(0).to(tl.int64) * R + r, grads, mask=r < R)
