"""Helpers of the general kernels of jagged flash attention: rows, masks, biases, softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.attention.kernels.biases import load_bias
from torchrec_jagged_attn.attention.kernels.dropout import drop_weights, query_draws
from torchrec_jagged_attn.flash_attention.kernels.distance_bias import scores_by_distance
from torchrec_jagged_attn.runtime.kernels.matmul import product
from torchrec_jagged_attn.runtime.kernels.softmax import LOG2E, store_stats
from torchrec_jagged_attn.runtime.kernels.tile_list import locate_tile


class QueryTile(NamedTuple):
    """A tile of queries of a head, and the keys of its sample, see ``locate_tile``."""

    sample: Any
    row: Any  # first query of the tile
    count: Any  # number of queries of the sample from there on
    base: Any  # first key of the sample
    num_keys: Any
    high: Any  # end of the keys that each query sees, a scalar or [BLOCK_M, 1]
    # The key on the causal diagonal of the tile's first query: as far from the last key as that
    # query is from the last query
    diagonal: Any
    head: Any
    kv_head: Any
    draws: Any  # [BLOCK_M], see ``query_draws``


@triton.jit
def locate_queries(args, C: tl.constexpr):
    """Whether the program has a tile of queries, and its :class:`QueryTile`."""
    index, head = tl.program_id(0) // C.H, tl.program_id(0) % C.H
    listed, sample, row, count, base, num_keys, _, high, diagonal = locate_tile(
        args.samples.tiles, index, C.CAUSAL, False, C.BLOCK_M
    )
    if C.CAUSAL:
        high = high[:, None]
    kv_head = head // (C.H // C.HK)
    draws = query_draws(args.biases.dropout, (row + tl.arange(0, C.BLOCK_M)) * C.H + head)
    return listed, QueryTile(
        sample, row, count, base, num_keys, high, diagonal, head, kv_head, draws
    )


@triton.jit
def seen_keys(tile, C: tl.constexpr):
    """The end of the keys that all queries of a tile see, and of those that any of them sees."""
    by_all, by_any = tile.num_keys, tile.num_keys
    if C.CAUSAL:
        by_all = tl.maximum(tl.minimum(by_all, by_all - tile.count + 1), 0)
        by_any = tl.minimum(by_any, by_any - tile.count + C.BLOCK_M)
    return by_all, by_any


@triton.jit
def window_begin(end, window):
    """The first key that a query sees if the last one is ``end - 1``; at least 0."""
    return tl.maximum(end, window) - window


@triton.jit
def seen_from(window, tile, C: tl.constexpr):
    """Begin of the first tile of keys that any query of a tile sees, and of the first that no
    query's window cuts.
    """
    by_any, by_last = tile.num_keys * 0, tile.num_keys * 0
    if window is not None:
        _, end = seen_keys(tile, C)
        by_any = window_begin(tile.diagonal + 1, window) // C.BLOCK_N * C.BLOCK_N
        by_last = tl.cdiv(window_begin(end, window), C.BLOCK_N) * C.BLOCK_N
    return by_any, by_last


@triton.jit
def load_rows(
    ptr,
    row,
    count,
    head,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr = True,
):
    """``[BLOCK, BLOCK_D]``: a head's rows from ``row`` on, with zeros beyond ``D`` and, if
    ``MASKED``, from row ``count`` on.
    """
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + (row * STRIDE + head * D) + (r.to(tl.int64) * STRIDE + d)
    if MASKED and D < BLOCK_D:
        x = tl.load(ptrs, mask=(r < count) & (d < D), other=0.0)
    elif MASKED:
        x = tl.load(ptrs, mask=r < count, other=0.0)
    elif D < BLOCK_D:
        x = tl.load(ptrs, mask=d < D, other=0.0)
    else:
        x = tl.load(ptrs)
    return x


@triton.jit
def store_rows(
    ptr,
    value,
    row,
    count,
    head,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store ``value`` where :func:`load_rows` would load it."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + (row * STRIDE + head * D) + (r.to(tl.int64) * STRIDE + d)
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=(r < count) & (d < D))


@triton.jit
def load_queries(q_ptr, row, count, head, C: tl.constexpr):
    """Queries ``[BLOCK_M, BLOCK_D]``, negated where the scale is negative."""
    q = load_rows(q_ptr, row, count, head, C.Q_STRIDE, C.D, C.BLOCK_M, C.BLOCK_D)
    return -q if C.NEGATIVE else q


@triton.jit
def load_keys(k_ptr, tile, start, C: tl.constexpr, MASKED: tl.constexpr):
    """Keys ``[BLOCK_N, BLOCK_D]`` from the sample's row ``start`` on."""
    row, count = tile.base + start, tile.num_keys - start
    return load_rows(k_ptr, row, count, tile.kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D, MASKED)


@triton.jit
def load_values(v_ptr, tile, start, C: tl.constexpr, MASKED: tl.constexpr = True):
    """Values ``[BLOCK_N, BLOCK_D]`` from the sample's row ``start`` on."""
    row, count = tile.base + start, tile.num_keys - start
    return load_rows(
        v_ptr, row, count, tile.kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D, MASKED
    )


@triton.jit
def seen_pairs(window, tile, j):
    """Mask of the keys ``j`` that each query sees by causality and window."""
    seen = j < tile.high
    if window is not None:
        seen = seen & (j >= window_begin(tile.high, window))
    return seen


@triton.jit
def key_bias(args, tile, start, C: tl.constexpr):
    """Biases of the keys from ``start`` on for a tile of queries, and the mask of visible keys.

    The biases include the factor log2(e) of the scores. A bias of ``-inf`` masks its key.
    """
    j = start + tl.arange(0, C.BLOCK_N)[None, :]
    visible = seen_pairs(args.window, tile, j)
    bias = 0.0
    if C.BIASED:
        bias = load_bias(
            args.biases, args.samples.kv_offsets, tile.sample, tile.base + j, j < tile.num_keys,
            tile.head, C.H, C,
        )  # fmt: skip
        bias *= LOG2E
        if C.R > 0:
            bias += scores_by_distance(
                args.biases.by_distance, args.reach, tile.head, tile.diagonal - start,
                C.BLOCK_M, C.BLOCK_N,
            )  # fmt: skip
        visible = visible & (bias != -float("inf"))
    return bias, visible


@triton.jit
def online_softmax(
    products, factor, bias, visible, maximum, total, BIASED: tl.constexpr, MASKED: tl.constexpr
):
    """One step of the online softmax over axis 1, of ``products · factor + bias``.

    As :func:`online_softmax_update` of ``runtime/kernels/softmax.py``, but ``factor`` must not be
    negative, so that without a bias the maximum is that of the products; and ``visible`` is read
    only if ``MASKED``.
    """
    tops = products * factor + bias if BIASED else products
    if MASKED:
        tops = tl.where(visible, tops, -float("inf"))
    top = tl.max(tops, 1)
    if not BIASED:
        top = tl.where(top == -float("inf"), top, top * factor)
    new_maximum = tl.maximum(maximum, top)
    shift = new_maximum
    if MASKED or BIASED:
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    if BIASED:
        weights = tl.exp2(products * factor + (bias - shift[:, None]))
    else:
        weights = tl.exp2(products * factor - shift[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    rescale = tl.exp2(maximum - shift)
    return weights, rescale, new_maximum, total * rescale + tl.sum(weights, 1)


@triton.jit
def drop_pairs(x, args, tile, start, C: tl.constexpr):
    """:func:`drop_weights` of ``x`` ``[BLOCK_M, BLOCK_N]``, of the keys from ``start`` on."""
    n = tile.base + start + tl.arange(0, C.BLOCK_N)
    return drop_weights(x, args.biases.dropout, tile.draws[:, None], n[None, :])


@triton.jit
def store_softmax_stats(stats_ptr, num_stats, rows, mask, maximum, total, EXACT: tl.constexpr):
    """:func:`store_stats`; unless ``EXACT``, of the log-sum-exp and a total of one.

    The log-sum-exp is less exact, but saves backward a multiplication per weight.
    """
    if not EXACT:
        seen = total != 0
        maximum = tl.where(seen, maximum + tl.log2(tl.where(seen, total, 1.0)), maximum)
        total = tl.where(seen, 1.0, 0.0)
    store_stats(stats_ptr, num_stats, rows, mask, maximum, total)


@triton.jit
def load_softmax_stats(args, rows, mask, C: tl.constexpr, MASKED: tl.constexpr = True):
    """``(maximum, inverse)`` of ``rows``, for :func:`softmax_of_stats`.

    Masked rows have an infinite maximum, so that weights do not overflow. The inverse is read only
    if EXACT.
    """
    stats_ptr = args.outputs.stats
    if MASKED:
        maximum = tl.load(stats_ptr + rows, mask=mask, other=float("inf"))
    else:
        maximum = tl.load(stats_ptr + rows)
    inverse = maximum
    if C.EXACT and MASKED:
        inverse = tl.load(stats_ptr + args.num_stats + rows, mask=mask, other=0.0)
    elif C.EXACT:
        inverse = tl.load(stats_ptr + args.num_stats + rows)
    return maximum, inverse


@triton.jit
def softmax_of_stats(
    products, factor, bias, visible, maximum, inverse, C: tl.constexpr, MASKED: tl.constexpr = True
):
    """Weights of the softmax, recomputed from scores and their statistics, which broadcast.

    Unless EXACT, ``inverse`` is not read: it is one.
    """
    if C.BIASED:
        weights = tl.exp2(products * factor + (bias - maximum))
    else:
        weights = tl.exp2(products * factor - maximum)
    if C.EXACT:
        weights *= inverse
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    return weights


@triton.jit
def key_weights(q, k, maximum, inverse, args, tile, start, C: tl.constexpr, MASKED: tl.constexpr):
    """Weights ``[BLOCK_M, BLOCK_N]`` of ``k``, keys from ``start`` on."""
    bias, visible = key_bias(args, tile, start, C)
    products = product(q, tl.trans(k), C.PRECISION)
    return softmax_of_stats(
        products, args.factor, bias, visible, maximum[:, None], inverse[:, None], C, MASKED
    )
