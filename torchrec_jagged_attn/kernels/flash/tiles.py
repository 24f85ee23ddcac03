"""What the general kernels of jagged flash attention share: records, rows, biases, softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.biases import load_bias
from torchrec_jagged_attn.kernels.common.softmax import LOG2E, store_stats
from torchrec_jagged_attn.kernels.flash.distance_bias import scores_by_distance

__all__ = [
    "Biases",
    "Constants",
    "Place",
    "is_finite",
    "key_bias",
    "load_rows",
    "load_softmax_stats",
    "online_softmax",
    "softmax_of_stats",
    "store_rows",
    "store_softmax_stats",
]


class Constants(NamedTuple):
    """Compile-time constants of the general kernels."""

    H: Any  # heads of queries
    HK: Any  # heads of keys and values
    D: Any  # width of queries and keys
    DV: Any  # width of values
    P: Any  # buckets of positions, 0 without
    A: Any  # buckets of ages, 0 without
    PRIOR: Any  # whether the bias is prior weights
    R: Any  # buckets of distances, 0 without
    BIASED: Any  # whether there is any bias
    Q_STRIDE: Any  # elements from row to row
    K_STRIDE: Any
    V_STRIDE: Any
    CAUSAL: Any
    NEGATIVE: Any  # whether the scale is
    PRECISION: Any  # of products
    BLOCK_D: Any  # columns of a tile of queries or keys
    BLOCK_DV: Any  # columns of a tile of values
    BLOCK_M: Any  # queries of a tile
    BLOCK_N: Any  # keys of a tile
    EXACT: Any  # whether statistics are those of fp32, see store_softmax_stats


class Biases(NamedTuple):
    """Pointers that biases are read from, as ``load_bias`` does; ``None`` where there is none.

    Attributes:
        by_distance: where the list of one head has the distance 0, see ``distance_bias.py``.
        kv_offsets: ``[B + 1]``.
    """

    bias: Any
    position_bias: Any
    age_bias: Any
    timestamps: Any
    by_distance: Any
    kv_offsets: Any


class Place(NamedTuple):
    """Where a tile of queries and the keys of its sample are, see ``locate_tile``.

    Attributes:
        base: first key of the sample.
        high: end of the keys that each query sees, a scalar or ``[BLOCK_M, 1]``.
        diagonal: the key that is as far from the last key as the tile's first query is from the
            last query.
    """

    sample: Any
    base: Any
    num_keys: Any
    high: Any
    diagonal: Any
    head: Any
    kv_head: Any


@triton.jit
def load_rows(
    ptr,
    row,
    count,
    STRIDE: tl.constexpr,
    column,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """``[BLOCK, BLOCK_D]``: rows from ``row`` on, ``D`` wide from ``column`` on, else zeros.

    Where ``MASKED``, there are ``count`` rows; else as many as the tile has.
    """
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + (row * STRIDE + column) + (r.to(tl.int64) * STRIDE + d)
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
    STRIDE: tl.constexpr,
    column,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store ``value`` where :func:`load_rows` would load it."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + (row * STRIDE + column) + (r.to(tl.int64) * STRIDE + d)
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=(r < count) & (d < D))


@triton.jit
def is_finite(x):
    """Whether each element of ``x`` is neither infinite nor NaN."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def key_bias(biases, place, start, C: tl.constexpr):
    """Biases of the keys from ``start`` on for a tile of queries, and which keys these see.

    The biases are times log2(e), as the scores are. A bias of ``-inf`` hides its key.
    """
    j = start + tl.arange(0, C.BLOCK_N)[None, :]
    visible = j < place.high
    bias = 0.0
    if C.BIASED:
        bias = load_bias(
            biases, biases.kv_offsets, place.sample, place.base + j,
            j < place.num_keys, place.head, C.H, C.H, C.P, C.A, C.PRIOR,
        )  # fmt: skip
        bias *= LOG2E
        if C.R > 0:
            bias += scores_by_distance(
                biases.by_distance, place.diagonal - start, C.BLOCK_M, C.BLOCK_N
            )
        visible = visible & (bias != -float("inf"))
    return bias, visible


@triton.jit
def online_softmax(
    products,
    factor,
    bias,
    visible,
    maximum,
    total,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One step of the online softmax over axis 1, of ``products · factor + bias``.

    As :func:`common.online_softmax_update`, where ``factor`` is not negative and all that is not
    ``visible`` is said to be so by ``MASKED``: the maximum is then that of the products.
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
def store_softmax_stats(stats_ptr, num_stats, rows, mask, maximum, total, EXACT: tl.constexpr):
    """:func:`common.store_stats`; unless ``EXACT``, of the log-sum-exp and a total of one.

    The logarithm is rounded by more than the sum is, but saves backward a product for each weight.
    """
    if not EXACT:
        seen = total != 0
        maximum = tl.where(seen, maximum + tl.log2(tl.where(seen, total, 1.0)), maximum)
        total = tl.where(seen, 1.0, 0.0)
    store_stats(stats_ptr, num_stats, rows, mask, maximum, total)


@triton.jit
def load_softmax_stats(stats_ptr, num_stats, rows, mask, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """What :func:`softmax_of_stats` needs of ``rows``: ``(maximum, inverse)``.

    Their weights do not overflow where masked, and the second is read only if ``EXACT``.
    """
    if MASKED:
        maximum = tl.load(stats_ptr + rows, mask=mask, other=float("inf"))
    else:
        maximum = tl.load(stats_ptr + rows)
    inverse = maximum
    if EXACT and MASKED:
        inverse = tl.load(stats_ptr + num_stats + rows, mask=mask, other=0.0)
    elif EXACT:
        inverse = tl.load(stats_ptr + num_stats + rows)
    return maximum, inverse


@triton.jit
def softmax_of_stats(
    products,
    factor,
    bias,
    visible,
    maximum,
    inverse,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Weights of the softmax of the same scores, from their statistics, shaped to go with them.

    Unless ``EXACT``, ``inverse`` is not read, since it is one where anything is visible.
    """
    if BIASED:
        weights = tl.exp2(products * factor + (bias - maximum))
    else:
        weights = tl.exp2(products * factor - maximum)
    if EXACT:
        weights *= inverse
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    return weights
