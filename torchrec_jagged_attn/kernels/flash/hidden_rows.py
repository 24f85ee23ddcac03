"""Takes out of jagged flash attention what causality hides, where it is infinite or NaN.

A product of matrices adds up 0 · x for each pair that causality hides: NaN, where x is infinite or
NaN. To keep x out would slow the kernels down, so they let it in. After them, one kernel for each
direction looks for it, and computes the elements that it has come into once more, without it.

It looks at one row of each tile: at the first of a tile of queries, and at the last of a tile of
keys. What the tile adds up but hides from any of its rows is hidden from that one, too, and has
come into it. So it reads a row for each tile, and no more where these are finite.

Elements that a visible row has made infinite or NaN keep what they are, and so does all that is
finite. The gradient of the table of distances needs none of this: see ``grad_relative_kernel``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.biases import load_bias
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.matmul import multiply
from torchrec_jagged_attn.kernels.common.softmax import LOG2E
from torchrec_jagged_attn.kernels.common.tile_list import FIELDS
from torchrec_jagged_attn.kernels.flash.distance_bias import scores_by_distance
from torchrec_jagged_attn.kernels.flash.general_backward import store_bias_gradients
from torchrec_jagged_attn.kernels.flash.tiles import (
    Biases,
    Constants,
    Place,
    is_finite,
    key_bias,
    load_rows,
    load_softmax_stats,
    softmax_of_stats,
    store_rows,
)

__all__ = ["mend_gradients", "mend_outputs"]

BLOCK = 16  # rows, of queries and of keys, that are computed at a time
LOOKED_AT = 8192  # elements that a program looks at, at a time


class Inputs(NamedTuple):
    """Pointers to what is read, and numbers.

    Attributes:
        grad_out: not read in forward.
        delta: Σ_d grad_out · out as kernels of biases have it, ``[ΣLq, H]``; ``None`` elsewhere.
        num_stats: numbers of each of the two statistics.
        biases: the list by distance is that of all heads, ``[H, 2 · reach]``.
    """

    q: Any
    k: Any
    v: Any
    biases: Any
    out: Any
    grad_out: Any
    stats: Any
    delta: Any
    q_offsets: Any
    num_stats: Any
    reach: Any
    factor: Any
    scale: Any


@triton.jit
def _find_tiles(offsets_ptr, num_samples, group, shift, LANES: tl.constexpr):
    """``(sample, begin, end, number)`` of each lane: its sample, that one's rows, and which tile.

    A sample has ``2 ** shift`` lanes.
    """
    lane = tl.arange(0, LANES)
    sample = group * (LANES >> shift) + (lane >> shift)
    mask = sample < num_samples
    begin = tl.load(offsets_ptr + sample, mask=mask, other=0).to(tl.int64)
    end = tl.load(offsets_ptr + sample + 1, mask=mask, other=0).to(tl.int64)
    return sample, begin, end, lane & ((1 << shift) - 1)


@triton.jit
def _are_bad(
    ptr,
    row,
    mask,
    STRIDE: tl.constexpr,
    column,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One for each of the rows that has an infinity or a NaN, else zero."""
    d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + (row * STRIDE + column)[:, None] + d
    x = tl.load(ptrs, mask=mask[:, None] & (d < D), other=0.0)
    return tl.max(tl.where(is_finite(x), 0, 1), 1)


@triton.jit
def _pick(chosen, x):
    """The only element of ``x``, which is not negative, that is ``chosen``."""
    return tl.max(tl.where(chosen, x, 0))


@triton.jit
def _place(inputs, sample, row, end, head, C: tl.constexpr):
    """The queries from ``row`` on, and the keys of their sample."""
    base = tl.load(inputs.biases.kv_offsets + sample).to(tl.int64)
    num_keys = (tl.load(inputs.biases.kv_offsets + sample + 1).to(tl.int64) - base).to(tl.int32)
    diagonal = num_keys - (end - row).to(tl.int32)
    high = tl.minimum(num_keys, diagonal + tl.arange(0, C.BLOCK_M) + 1)[:, None]
    return Place(sample, base, num_keys, high, diagonal, head, head // (C.H // C.HK))


@triton.jit
def _load_queries(ptr, row, count, head, D: tl.constexpr, C: tl.constexpr):
    """Rows of ``out`` or its gradient, or of that of queries, from ``row`` on."""
    return load_rows(ptr, row, count, C.H * D, head * D, D, C.BLOCK_M, C.BLOCK_D, True)


@triton.jit
def _load_keys(place, start, ptr, STRIDE: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Rows of keys or values, from the sample's row ``start`` on."""
    return load_rows(
        ptr, place.base + start, place.num_keys - start, STRIDE, place.kv_head * D, D, C.BLOCK_N,
        C.BLOCK_D, True,
    )  # fmt: skip


@triton.jit
def _distance_zero(inputs, head):
    """Where the list of a head has the distance 0."""
    return inputs.biases.by_distance + head.to(tl.int64) * (2 * inputs.reach) + inputs.reach


@triton.jit
def _weights(q, k, maximum, inverse, place, start, inputs, C: tl.constexpr):
    """Weights of the keys from ``start`` on, ``[BLOCK_M, BLOCK_N]``."""
    biases = inputs.biases
    if C.R > 0:
        zero_ptr = _distance_zero(inputs, place.head)
        biases = Biases(
            biases.bias, biases.position_bias, biases.age_bias, biases.timestamps, zero_ptr,
            biases.kv_offsets,
        )  # fmt: skip
    bias, visible = key_bias(biases, place, start, C)
    products = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
    return softmax_of_stats(
        products, inputs.factor, bias, visible, maximum[:, None], inverse[:, None], C.BIASED, True,
        C.EXACT,
    )  # fmt: skip


@triton.jit
def _without_bad(x, index, first):
    """``x`` with zeros where it is not finite; and the ``first`` row, by column, that is not."""
    finite = is_finite(x)
    bad = tl.min(tl.where(finite, 2**31 - 1, index[:, None]), 0)
    return tl.where(finite, x, 0.0).to(x.dtype), tl.minimum(first, bad)


@triton.jit
def _mend_outputs(inputs, sample, row, end, head, C: tl.constexpr):
    """Outputs of a block of queries."""
    i = tl.arange(0, C.BLOCK_M)
    count = end - row
    out = _load_queries(inputs.out, row, count, head, C.DV, C)
    if tl.max(tl.where(is_finite(out), 0, 1)) > 0:
        place = _place(inputs, sample, row, end, head, C)
        q = load_rows(inputs.q, row, count, C.Q_STRIDE, head * C.D, C.D, C.BLOCK_M, C.BLOCK_D, True)
        q = -q if C.NEGATIVE else q
        stat = (row + i) * C.H + head
        maximum, inverse = load_softmax_stats(
            inputs.stats, inputs.num_stats, stat, i < count, True, C.EXACT
        )
        acc = tl.zeros([C.BLOCK_M, C.BLOCK_DV], tl.float32)
        first = tl.full([C.BLOCK_DV], 2**31 - 1, tl.int32)
        for start in range(0, tl.minimum(place.num_keys, place.diagonal + C.BLOCK_M), C.BLOCK_N):
            k = _load_keys(place, start, inputs.k, C.K_STRIDE, C.D, C)
            v = _load_keys(place, start, inputs.v, C.V_STRIDE, C.DV, C)
            p = _weights(q, k, maximum, inverse, place, start, inputs, C)
            v, first = _without_bad(v, start + tl.arange(0, C.BLOCK_N), first)
            acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
        hidden = ~is_finite(out) & (first[None, :] >= place.high)
        out = tl.where(hidden, acc.to(out.dtype), out)
        store_rows(
            inputs.out, out, row, count, C.H * C.DV, head * C.DV, C.DV, C.BLOCK_M, C.BLOCK_DV
        )


@triton.jit
def _mend_query_gradients(grad_q_ptr, inputs, sample, row, end, head, C: tl.constexpr):
    """Gradients of a block of queries."""
    i = tl.arange(0, C.BLOCK_M)
    count = end - row
    grad_q = _load_queries(grad_q_ptr, row, count, head, C.D, C)
    if tl.max(tl.where(is_finite(grad_q), 0, 1)) > 0:
        place = _place(inputs, sample, row, end, head, C)
        q = load_rows(inputs.q, row, count, C.Q_STRIDE, head * C.D, C.D, C.BLOCK_M, C.BLOCK_D, True)
        q = -q if C.NEGATIVE else q
        grad_out = _load_queries(inputs.grad_out, row, count, head, C.DV, C)
        out = _load_queries(inputs.out, row, count, head, C.DV, C)
        delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
        stat = (row + i) * C.H + head
        maximum, inverse = load_softmax_stats(
            inputs.stats, inputs.num_stats, stat, i < count, True, C.EXACT
        )
        acc = tl.zeros([C.BLOCK_M, C.BLOCK_D], tl.float32)
        first = tl.full([C.BLOCK_D], 2**31 - 1, tl.int32)
        for start in range(0, tl.minimum(place.num_keys, place.diagonal + C.BLOCK_M), C.BLOCK_N):
            j = start + tl.arange(0, C.BLOCK_N)
            k = _load_keys(place, start, inputs.k, C.K_STRIDE, C.D, C)
            v = _load_keys(place, start, inputs.v, C.V_STRIDE, C.DV, C)
            p = _weights(q, k, maximum, inverse, place, start, inputs, C)
            dp = tl.dot(grad_out, tl.trans(v), input_precision=C.PRECISION)
            ds = tl.where(j[None, :] < place.high, p * (dp - delta[:, None]), 0.0)
            k, first = _without_bad(k, j, first)
            acc = multiply(ds.to(k.dtype), k, acc, C.PRECISION)
        hidden = ~is_finite(grad_q) & (first[None, :] >= place.high)
        grad_q = tl.where(hidden, (acc * inputs.scale).to(grad_q.dtype), grad_q)
        store_rows(grad_q_ptr, grad_q, row, count, C.H * C.D, head * C.D, C.D, C.BLOCK_M, C.BLOCK_D)


class KeyGradients(NamedTuple):
    """Pointers to gradients of keys and values, and of biases of keys.

    Attributes:
        tables: of each tile of the list of ``tiles``.
    """

    k: Any
    v: Any
    bias: Any
    tables: Any
    tiles: Any


@triton.jit
def _find_in_list(tiles_ptr, row):
    """Number of the tile in the list whose first row is ``row``."""
    num_tiles = tl.load(tiles_ptr).to(tl.int32)
    found = num_tiles * 0
    for start in range(0, num_tiles, 1024):
        n = start + tl.arange(0, 1024)
        first = tl.load(tiles_ptr + (1 + n) * FIELDS + 1, mask=n < num_tiles, other=-1)
        found = tl.maximum(found, tl.max(tl.where(first == row, n, 0)))
    return found


@triton.jit
def _mend_key_gradients(
    grads,
    inputs,
    sample,
    row,
    end,
    kv_head,
    GRAD_K_STRIDE: tl.constexpr,
    GRAD_V_STRIDE: tl.constexpr,
    C: tl.constexpr,
):
    """Gradients of a block of keys and values, and of biases, whose block is a tile."""
    BY_KEYS: tl.constexpr = (grads.bias is not None) or C.P > 0 or C.A > 0
    i, j = tl.arange(0, C.BLOCK_M), tl.arange(0, C.BLOCK_N)
    count = (end - row).to(tl.int32)
    grad_k = load_rows(
        grads.k, row, count, GRAD_K_STRIDE, kv_head * C.D, C.D, C.BLOCK_N, C.BLOCK_D, True
    )
    grad_v = load_rows(
        grads.v, row, count, GRAD_V_STRIDE, kv_head * C.DV, C.DV, C.BLOCK_N, C.BLOCK_DV, True
    )
    bad = tl.max(tl.where(is_finite(grad_k), 0, 1)) + tl.max(tl.where(is_finite(grad_v), 0, 1))
    if bad > 0:
        base = tl.load(inputs.q_offsets + sample).to(tl.int64)
        num_rows = (tl.load(inputs.q_offsets + sample + 1).to(tl.int64) - base).to(tl.int32)
        diagonal = num_rows - count
        low = tl.maximum(diagonal + j, 0)[:, None]  # the first query that sees a key
        k = load_rows(
            inputs.k, row, count, C.K_STRIDE, kv_head * C.D, C.D, C.BLOCK_N, C.BLOCK_D, True
        )
        v = load_rows(
            inputs.v, row, count, C.V_STRIDE, kv_head * C.DV, C.DV, C.BLOCK_N, C.BLOCK_DV, True
        )
        acc_k = tl.zeros([C.BLOCK_N, C.BLOCK_D], tl.float32)
        acc_v = tl.zeros([C.BLOCK_N, C.BLOCK_DV], tl.float32)
        # Counted from the sample's last query on, so that the first is the last that is bad.
        last_q = tl.full([C.BLOCK_D], 2**31 - 1, tl.int32)
        last_grad_out = tl.full([C.BLOCK_DV], 2**31 - 1, tl.int32)
        tile = row
        if C.P > 0 or C.A > 0:
            tile = _find_in_list(grads.tiles, row)
        for member in range(C.H // C.HK):
            head = kv_head * (C.H // C.HK) + member
            bias = tl.zeros([C.BLOCK_N], tl.float32)
            if C.BIASED:
                bias += load_bias(
                    inputs.biases, inputs.biases.kv_offsets, sample, row + j, j < count, head, C.H,
                    C.H, C.P, C.A, C.PRIOR,
                )  # fmt: skip
            bias *= LOG2E
            grad_bias = tl.zeros([C.BLOCK_N], tl.float32)
            for start in range(
                tl.maximum(diagonal, 0) // C.BLOCK_M * C.BLOCK_M, num_rows, C.BLOCK_M
            ):
                first, remaining = base + start, num_rows - start
                q = load_rows(
                    inputs.q, first, remaining, C.Q_STRIDE, head * C.D, C.D, C.BLOCK_M, C.BLOCK_D,
                    True,
                )  # fmt: skip
                grad_out = _load_queries(inputs.grad_out, first, remaining, head, C.DV, C)
                stat, own = (first + i) * C.H + head, i < remaining
                if inputs.delta is not None:
                    delta = tl.load(inputs.delta + stat, mask=own, other=0.0)
                else:
                    out = _load_queries(inputs.out, first, remaining, head, C.DV, C)
                    delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
                maximum, inverse = load_softmax_stats(
                    inputs.stats, inputs.num_stats, stat, own, True, C.EXACT
                )
                seen = own[None, :] & (start + i[None, :] >= low)
                visible, scores_bias = seen, 0.0
                if C.BIASED:
                    scores_bias = bias[:, None]
                    if C.R > 0:
                        zero_ptr = _distance_zero(inputs, head)
                        scores_bias += scores_by_distance(
                            zero_ptr, diagonal - start, C.BLOCK_N, C.BLOCK_M
                        )
                    visible = visible & (scores_bias != -float("inf"))
                products = tl.dot(k, tl.trans(q), input_precision=C.PRECISION)
                products = -products if C.NEGATIVE else products
                p = softmax_of_stats(
                    products, inputs.factor, scores_bias, visible, maximum[None, :],
                    inverse[None, :], C.BIASED, True, C.EXACT,
                )  # fmt: skip
                dp = tl.dot(v, tl.trans(grad_out), input_precision=C.PRECISION)
                ds = tl.where(seen, p * (dp - delta[None, :]), 0.0)
                grad_bias += tl.sum(ds, 1)
                from_last = num_rows - 1 - start - i
                q, last_q = _without_bad(q, from_last, last_q)
                grad_out, last_grad_out = _without_bad(grad_out, from_last, last_grad_out)
                acc_k = multiply(ds.to(q.dtype), q, acc_k, C.PRECISION)
                acc_v = multiply(p.to(grad_out.dtype), grad_out, acc_v, C.PRECISION)
            if BY_KEYS:
                store_bias_gradients(
                    grads.bias, grads.tables, grad_bias, inputs.biases.timestamps,
                    inputs.biases.kv_offsets, sample, tile, row + j, j < count, head, C,
                )  # fmt: skip
        high = num_rows - low
        hidden = ~is_finite(grad_k) & (last_q[None, :] >= high)
        grad_k = tl.where(hidden, (acc_k * inputs.scale).to(grad_k.dtype), grad_k)
        hidden = ~is_finite(grad_v) & (last_grad_out[None, :] >= high)
        grad_v = tl.where(hidden, acc_v.to(grad_v.dtype), grad_v)
        store_rows(
            grads.k, grad_k, row, count, GRAD_K_STRIDE, kv_head * C.D, C.D, C.BLOCK_N, C.BLOCK_D
        )
        store_rows(
            grads.v, grad_v, row, count, GRAD_V_STRIDE, kv_head * C.DV, C.DV, C.BLOCK_N,
            C.BLOCK_DV,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "shift", "num_stats", "reach"])
def mend_outputs_kernel(
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
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    num_samples,
    shift,  # a sample has 2 ** shift lanes
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
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of the tiles of TILE queries of some samples."""
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    C: tl.constexpr = Constants(
        H, HK, D, DV, P, A, PRIOR, R, BIASED, Q_STRIDE, K_STRIDE, V_STRIDE, CAUSAL, NEGATIVE,
        PRECISION, BLOCK_D, BLOCK_DV, BLOCK, BLOCK, EXACT,
    )  # fmt: skip
    biases = Biases(
        bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, by_distance_ptr, kv_offsets_ptr
    )
    inputs = Inputs(
        q_ptr, k_ptr, v_ptr, biases, out_ptr, out_ptr, stats_ptr, None, q_offsets_ptr, num_stats,
        reach, factor, factor,
    )  # fmt: skip
    group, head = tl.program_id(0) // H, tl.program_id(0) % H
    sample, begin, end, number = _find_tiles(q_offsets_ptr, num_samples, group, shift, LANES)
    if OVERLAP:
        cuda.gdc_wait()
    for start in range(0, tl.max((end - begin).to(tl.int32)), TILE << shift):
        row = begin + start + number * TILE
        bad = _are_bad(out_ptr, row, row < end, H * DV, head * DV, DV, BLOCK_DV)
        if tl.max(bad) > 0:
            for lane in range(LANES):
                chosen = (bad > 0) & (tl.arange(0, LANES) == lane)
                last = tl.minimum(_pick(chosen, row) + TILE, _pick(chosen, end))
                for first in range(_pick(chosen, row), last, BLOCK):
                    _mend_outputs(inputs, _pick(chosen, sample), first, _pick(chosen, end), head, C)


@triton.jit(
    do_not_specialize=["num_samples", "num_q_programs", "q_shift", "kv_shift", "num_stats", "reach"]
)
def mend_gradients_kernel(
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
    delta_ptr,  # [ΣLq, H] fp32
    grad_q_ptr,  # [ΣLq, H, D]
    grad_k_ptr,  # [ΣLk, Hk, D], rows GRAD_K_STRIDE apart
    grad_v_ptr,  # [ΣLk, Hk, Dv], rows GRAD_V_STRIDE apart
    grad_bias_ptr,  # [ΣLk, H]
    grad_tables_ptr,  # [tiles, P + A, H] fp32
    tiles_ptr,  # [1 + capacity, FIELDS] int64, of keys, see tile_list.list_tiles; for tables alone
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    num_samples,
    num_q_programs,  # the first ones, which look at queries
    q_shift,  # a sample has 2 ** q_shift lanes, of queries
    kv_shift,  # and of keys
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
    BLOCK: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of the tiles of Q_TILE queries of some samples, or of those of KV_TILE keys."""
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    BY_KEYS: tl.constexpr = (grad_bias_ptr is not None) or P > 0 or A > 0
    KEYS: tl.constexpr = KV_TILE if BY_KEYS else BLOCK
    C: tl.constexpr = Constants(
        H, HK, D, DV, P, A, PRIOR, R, BIASED, Q_STRIDE, K_STRIDE, V_STRIDE, CAUSAL, NEGATIVE,
        PRECISION, BLOCK_D, BLOCK_DV, BLOCK, KEYS, EXACT,
    )  # fmt: skip
    biases = Biases(
        bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, by_distance_ptr, kv_offsets_ptr
    )
    grads = KeyGradients(grad_k_ptr, grad_v_ptr, grad_bias_ptr, grad_tables_ptr, tiles_ptr)
    inputs = Inputs(
        q_ptr, k_ptr, v_ptr, biases, out_ptr, grad_out_ptr, stats_ptr, delta_ptr, q_offsets_ptr,
        num_stats, reach, factor, scale,
    )  # fmt: skip
    lanes = tl.arange(0, LANES)
    if tl.program_id(0) < num_q_programs:
        group, head = tl.program_id(0) // H, tl.program_id(0) % H
        sample, begin, end, number = _find_tiles(q_offsets_ptr, num_samples, group, q_shift, LANES)
        if OVERLAP:
            cuda.gdc_wait()
        for start in range(0, tl.max((end - begin).to(tl.int32)), Q_TILE << q_shift):
            row = begin + start + number * Q_TILE
            bad = _are_bad(grad_q_ptr, row, row < end, H * D, head * D, D, BLOCK_D)
            if tl.max(bad) > 0:
                for lane in range(LANES):
                    chosen = (bad > 0) & (lanes == lane)
                    last = tl.minimum(_pick(chosen, row) + Q_TILE, _pick(chosen, end))
                    for first in range(_pick(chosen, row), last, BLOCK):
                        _mend_query_gradients(
                            grad_q_ptr, inputs, _pick(chosen, sample), first, _pick(chosen, end),
                            head, C,
                        )  # fmt: skip
    else:
        program = tl.program_id(0) - num_q_programs
        group, head = program // HK, program % HK
        sample, begin, end, number = _find_tiles(
            kv_offsets_ptr, num_samples, group, kv_shift, LANES
        )
        if OVERLAP:
            cuda.gdc_wait()
        for start in range(0, tl.max((end - begin).to(tl.int32)), KV_TILE << kv_shift):
            row = begin + start + number * KV_TILE
            last_row = tl.minimum(row + KV_TILE, end) - 1
            bad = _are_bad(grad_k_ptr, last_row, row < end, GRAD_K_STRIDE, head * D, D, BLOCK_D)
            if tl.max(bad) > 0:
                for lane in range(LANES):
                    chosen = (bad > 0) & (lanes == lane)
                    last = tl.minimum(_pick(chosen, row) + KV_TILE, _pick(chosen, end))
                    for first in range(_pick(chosen, row), last, KEYS):
                        _mend_key_gradients(
                            grads, inputs, _pick(chosen, sample), first,
                            _pick(chosen, end), head, GRAD_K_STRIDE, GRAD_V_STRIDE, C,
                        )  # fmt: skip


_launch_outputs = Launcher(mend_outputs_kernel)
_launch_gradients = Launcher(mend_gradients_kernel)


def _lanes(num_rows: int, num_samples: int, tile: int, lanes: int) -> tuple[int, int]:
    """How many lanes the tiles of a sample get, as a power of two, and how many groups that makes.

    About as many as the tiles of twice the mean sample: others take turns.
    """
    tiles = num_rows // max(1, num_samples * tile)
    shift = min(tiles.bit_length(), lanes.bit_length() - 1)
    return shift, triton.cdiv(num_samples, lanes >> shift)


def _constants(width: int, x: Tensor) -> dict[str, Any]:
    """Constants for rows ``width`` wide in a tile, of the dtype of ``x``."""
    return {
        "BLOCK": BLOCK,
        "LANES": min(128, LOOKED_AT // width),
        "num_warps": 4 if width * x.element_size() < 512 else 8,
        "num_stages": 1,
        "maxnreg": 128,
        **overlap_options(devices.launches_overlap(x.device)),
    }


def mend_outputs(
    inputs: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, ...],
    out: Tensor,
    stats: Tensor,
    offsets: tuple[Tensor, Tensor],
    reach: int,
    factor: float,
    tile: int,
    shape: dict[str, Any],
) -> None:
    """Compute again what should not have come into ``out`` of causal attention.

    Args:
        inputs: q, k and v.
        biases: as the general kernels take them.
        offsets: of queries and of keys.
        tile: queries that all see what any of them has multiplied; or a whole sample, if it is of
            fewer.
        shape: constants of the general kernels.
    """
    num_samples, width = offsets[0].numel() - 1, shape["BLOCK_DV"]
    constants = _constants(width, out)
    shift, groups = _lanes(out.shape[0], num_samples, tile, constants["LANES"])
    _launch_outputs(
        (groups * shape["H"],),
        (
            *inputs, *biases, out, stats, *offsets, num_samples, shift, stats[0].numel(), reach,
            factor,
        ),
        shape | {"TILE": tile} | constants,
    )  # fmt: skip


def mend_gradients(
    grad_out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, ...],
    out: Tensor,
    stats: Tensor,
    delta: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    grads_of_biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    offsets: tuple[Tensor, Tensor],
    reach: int,
    factor: float,
    scale: float,
    tiles: tuple[int, int],
    shape: dict[str, Any],
) -> None:
    """Compute again what should not have come into ``grads``, of q, k and v.

    See :func:`mend_outputs`; ``tiles`` are of queries and of keys. ``grads_of_biases`` are those of
    keys, of tables by tile of keys, and the list of these tiles.
    """
    num_samples, width = offsets[0].numel() - 1, shape["BLOCK_D"]
    constants = _constants(width, out)
    lanes = constants["LANES"]
    q_shift, q_groups = _lanes(out.shape[0], num_samples, tiles[0], lanes)
    kv_shift, kv_groups = _lanes(grads[1].shape[0], num_samples, tiles[1], lanes)
    _launch_gradients(
        (q_groups * shape["H"] + kv_groups * shape["HK"],),
        (
            grad_out, *inputs, *biases, out, stats, delta, *grads, *grads_of_biases, *offsets,
            num_samples,
            q_groups * shape["H"], q_shift, kv_shift, stats[0].numel(), reach, factor, scale,
        ),
        shape | {"Q_TILE": tiles[0], "KV_TILE": tiles[1]} | constants,
    )  # fmt: skip
