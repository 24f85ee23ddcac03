"""Device functions of the general kernels of jagged flash attention: rows, masks, softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.biases import load_bias
from torchrec_jagged_attn.ops.device.dropout import drop_weights, query_draws
from torchrec_jagged_attn.ops.device.matmul import product
from torchrec_jagged_attn.ops.device.softmax import LOG2E, store_stats
from torchrec_jagged_attn.ops.device.tile_list import locate_tile
from torchrec_jagged_attn.ops.flash_attention.kernels.distance_bias import load_distance_bias


class QueryTile(NamedTuple):
    """A tile of queries of a head, and the keys of its sample; see ``locate_tile``."""

    sample: Any
    row: Any  # first query of the tile
    count: Any  # number of queries of the sample from ``row`` on
    base: Any  # first key of the sample
    num_keys: Any  # number of keys of the sample
    high: Any  # end of the keys visible to each query, a scalar or [BLOCK_M, 1]
    # The key on the causal diagonal of the tile's first query: both have the same distance to the
    # end of the sample
    diagonal: Any
    head: Any
    kv_head: Any
    draws: Any  # [BLOCK_M], see ``query_draws``


@triton.jit
def locate_queries(args, C: tl.constexpr):
    """Return whether the program has a tile of queries, and its :class:`QueryTile`."""
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
def visible_ends(tile, C: tl.constexpr):
    """Return the end of the keys that all queries of a tile see, and of the keys that any sees."""
    all_end, any_end = tile.num_keys, tile.num_keys
    if C.CAUSAL:
        all_end = tl.maximum(tl.minimum(all_end, all_end - tile.count + 1), 0)
        any_end = tl.minimum(any_end, any_end - tile.count + C.BLOCK_M)
    return all_end, any_end


@triton.jit
def window_begin(end, window):
    """Return the first key in the window of a query that sees keys up to ``end - 1``."""
    return tl.maximum(end, window) - window


@triton.jit
def window_begins(window, tile, C: tl.constexpr):
    """Return the begin of the first visible tile of keys, and of the first unmasked one.

    A tile of keys is visible if any query sees any of its keys, and unmasked by the window if all
    its keys are in the windows of all queries.
    """
    first, unmasked_begin = tile.num_keys * 0, tile.num_keys * 0
    if window is not None:
        _, end = visible_ends(tile, C)
        first = window_begin(tile.diagonal + 1, window) // C.BLOCK_N * C.BLOCK_N
        unmasked_begin = tl.cdiv(window_begin(end, window), C.BLOCK_N) * C.BLOCK_N
    return first, unmasked_begin


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
    """Load ``[BLOCK, BLOCK_D]`` rows of a head from ``row`` on.

    Columns beyond ``D`` are zeros and, if ``MASKED``, rows from ``row + count`` on.
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
    """Store ``value`` at the addresses of :func:`load_rows`."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + (row * STRIDE + head * D) + (r.to(tl.int64) * STRIDE + d)
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=(r < count) & (d < D))


@triton.jit
def load_queries(q_ptr, row, count, head, C: tl.constexpr):
    """Load queries ``[BLOCK_M, BLOCK_D]``, negated if the scale is negative."""
    q = load_rows(q_ptr, row, count, head, C.Q_STRIDE, C.D, C.BLOCK_M, C.BLOCK_D)
    return -q if C.NEGATIVE else q


@triton.jit
def load_keys(k_ptr, tile, start, C: tl.constexpr, MASKED: tl.constexpr):
    """Load keys ``[BLOCK_N, BLOCK_D]`` from the sample's row ``start`` on."""
    row, count = tile.base + start, tile.num_keys - start
    return load_rows(k_ptr, row, count, tile.kv_head, C.K_STRIDE, C.D, C.BLOCK_N, C.BLOCK_D, MASKED)


@triton.jit
def load_values(v_ptr, tile, start, C: tl.constexpr, MASKED: tl.constexpr = True):
    """Load values ``[BLOCK_N, BLOCK_D]`` from the sample's row ``start`` on."""
    row, count = tile.base + start, tile.num_keys - start
    return load_rows(
        v_ptr, row, count, tile.kv_head, C.V_STRIDE, C.DV, C.BLOCK_N, C.BLOCK_D, MASKED
    )


@triton.jit
def visible_pairs(window, tile, j):
    """Return the mask of keys ``j`` that causality and ``window`` make visible to each query."""
    visible = j < tile.high
    if window is not None:
        visible = visible & (j >= window_begin(tile.high, window))
    return visible


@triton.jit
def bias_and_mask(args, tile, start, C: tl.constexpr):
    """Return the biases of the keys from ``start`` on for a tile of queries, and their mask.

    Biases are multiplied by log2(e), as scores are. A bias of ``-inf`` masks its key.
    """
    j = start + tl.arange(0, C.BLOCK_N)[None, :]
    visible = visible_pairs(args.window, tile, j)
    bias = 0.0
    if C.BIASED:
        bias = load_bias(
            args.biases, args.samples.kv_offsets, tile.sample, tile.base + j, j < tile.num_keys,
            tile.head, C.H, C,
        )  # fmt: skip
        bias *= LOG2E
        if C.R > 0:
            bias += load_distance_bias(
                args.biases.by_distance, args.max_distance, tile.head, tile.diagonal - start,
                C.BLOCK_M, C.BLOCK_N,
            )  # fmt: skip
        visible = visible & (bias != -float("inf"))
    return bias, visible


@triton.jit
def online_softmax(
    products, factor, bias, visible, maximum, total, BIASED: tl.constexpr, MASKED: tl.constexpr
):
    """Update the online softmax over axis 1 with a tile of scores, ``products · factor + bias``.

    As :func:`online_softmax_update` of ``ops/device/softmax.py``, except that ``factor`` must
    not be negative, so that the largest product has the largest score if there is no bias, and that
    ``visible`` is only read if ``MASKED``.
    """
    scores = products * factor + bias if BIASED else products
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    tile_maximum = tl.max(scores, 1)
    if not BIASED:  # of the products: the factor is applied to their maximum
        tile_maximum = tl.where(tile_maximum == -float("inf"), tile_maximum, tile_maximum * factor)
    new_maximum = tl.maximum(maximum, tile_maximum)
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
    """Apply :func:`drop_weights` to ``x`` ``[BLOCK_M, BLOCK_N]``, for keys from ``start`` on."""
    n = tile.base + start + tl.arange(0, C.BLOCK_N)
    return drop_weights(x, args.biases.dropout, tile.draws[:, None], n[None, :])


@triton.jit
def store_softmax_stats(stats_ptr, num_stats, rows, mask, maximum, total, EXACT: tl.constexpr):
    """Apply :func:`store_stats`; unless ``EXACT``, to the log-sum-exp and a total of one.

    The log-sum-exp is less exact, but saves a multiplication per weight in backward.
    """
    if not EXACT:
        has_keys = total != 0
        maximum = tl.where(has_keys, maximum + tl.log2(tl.where(has_keys, total, 1.0)), maximum)
        total = tl.where(has_keys, 1.0, 0.0)
    store_stats(stats_ptr, num_stats, rows, mask, maximum, total)


@triton.jit
def load_softmax_stats(args, rows, mask, C: tl.constexpr, MASKED: tl.constexpr = True):
    """Load ``(maximum, inverse)`` of ``rows``, for :func:`softmax_of_stats`.

    Masked rows have an infinite maximum, so that weights do not overflow. Unless EXACT, ``inverse``
    is a placeholder.
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
    """Recompute the weights of the softmax from products and statistics, which broadcast.

    Unless EXACT, the inverse is one and ``inverse`` is not read.
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
    """Return weights ``[BLOCK_M, BLOCK_N]`` of the keys ``k``, which begin at ``start``."""
    bias, visible = bias_and_mask(args, tile, start, C)
    products = product(q, tl.trans(k), C.PRECISION)
    return softmax_of_stats(
        products, args.factor, bias, visible, maximum[:, None], inverse[:, None], C, MASKED
    )
