"""Forward of jagged flash attention in Triton: any dtype, width, bias and scale, on any GPU.

    out_i = Σ_j softmax_j(scale · q_i · k_j + bias_ij) · v_j       over the keys j of i's sample

A program has one tile of queries of one head. It goes over the keys of the sample from the last
tile to the first, with an online softmax, so that scores stay in registers: 2·(D + Dv) FLOPs for
each pair of rows and head. It reads q once, k and v once for each tile of queries, and writes out
and the softmax statistics, which backward needs.

Tiles that not all rows see come first. Only they are masked; biases mask all tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.matmul import multiply
from torchrec_jagged_attn.kernels.common.tile_list import locate_tile
from torchrec_jagged_attn.kernels.flash.tiles import (
    Biases,
    Constants,
    Place,
    key_bias,
    load_rows,
    online_softmax,
    store_rows,
    store_softmax_stats,
)

__all__ = ["forward_kernel"]


@triton.jit
def _scores(q, k_ptr, biases, place, start, C: tl.constexpr, MASKED: tl.constexpr):
    """``(products, bias, visible)`` of the tile's queries with the keys from ``start`` on."""
    k = load_rows(
        k_ptr, place.base + start, place.num_keys - start, C.K_STRIDE, place.kv_head * C.D, C.D,
        C.BLOCK_N, C.BLOCK_D, MASKED,
    )  # fmt: skip
    products = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
    bias, visible = key_bias(biases, place, start, C)
    return products, bias, visible


@triton.jit
def _load_values(v_ptr, row, remaining, place, C: tl.constexpr):
    """Values ``[BLOCK_N, BLOCK_DV]`` from ``row`` on, of which the sample has ``remaining``."""
    column = place.kv_head * C.DV
    return load_rows(v_ptr, row, remaining, C.V_STRIDE, column, C.DV, C.BLOCK_N, C.BLOCK_DV, True)


@triton.jit
def _attend(
    acc,
    p,
    maximum,
    total,
    q,
    k_ptr,
    v_ptr,
    biases,
    place,
    first,
    last,
    factor,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend over the tiles of keys before ``last``, from the later ones down to ``first``.

    All rows see all of these keys unless ``MASKED``. ``p`` are the weights of the tile from
    ``last`` on, whose values are added up here; what is returned are those of the tile ``first``.
    """
    for start in range(last - C.BLOCK_N, first - 1, -C.BLOCK_N):
        products, bias, visible = _scores(q, k_ptr, biases, place, start, C, MASKED)
        row, remaining = place.base + start + C.BLOCK_N, place.num_keys - start - C.BLOCK_N
        v = _load_values(v_ptr, row, remaining, place, C)
        # A product whose sum is next needed in the next iteration would stay in flight till then,
        # and ptxas wait after every instruction (C7515).
        acc = multiply(p.to(v.dtype), v, acc, C.PRECISION)
        p, rescale, maximum, total = online_softmax(
            products, factor, bias, visible, maximum, total, C.BIASED, MASKED
        )
        acc *= rescale[:, None]
    return acc, p, maximum, total


@triton.jit(do_not_specialize=["num_stats", "reach"])
def forward_kernel(
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
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of query rows of one head, over all keys of its sample."""
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
    maximum = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if num_keys == 0:
        store_rows(out_ptr, acc, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_DV)
        store_softmax_stats(stats_ptr, num_stats, stat, i < count, maximum, total, EXACT)
        return
    q = load_rows(q_ptr, row, count, Q_STRIDE, head * D, D, BLOCK_M, BLOCK_D, True)
    q = -q if NEGATIVE else q
    if R > 0:
        by_distance_ptr += head.to(tl.int64) * (2 * reach) + reach

    seen_by_all, seen_by_any = num_keys, num_keys
    if CAUSAL:
        seen_by_all = tl.maximum(tl.minimum(num_keys, num_keys - count + 1), 0)
        seen_by_any = tl.minimum(num_keys, num_keys - count + BLOCK_M)
        high = high[:, None]
    place = Place(sample, base, num_keys, high, diagonal, head, kv_head)
    biases = Biases(
        bias_ptr, position_bias_ptr, age_bias_ptr, timestamps_ptr, by_distance_ptr, kv_offsets_ptr
    )
    # From the last tile of keys to the first: those that not all rows see come first.
    start = tl.maximum(tl.cdiv(seen_by_any, BLOCK_N) - 1, 0) * BLOCK_N
    products, bias, visible = _scores(q, k_ptr, biases, place, start, C, MASKED=True)
    p, _, maximum, total = online_softmax(
        products, factor, bias, visible, maximum, total, BIASED, True
    )
    full = num_keys * 0
    if not BIASED:
        full = tl.minimum(seen_by_all // BLOCK_N * BLOCK_N, start)
    if BIASED or CAUSAL:
        acc, p, maximum, total = _attend(
            acc, p, maximum, total, q, k_ptr, v_ptr, biases, place, full, start, factor, C,
            MASKED=True,
        )  # fmt: skip
    if not BIASED:
        acc, p, maximum, total = _attend(
            acc, p, maximum, total, q, k_ptr, v_ptr, biases, place, 0, full, factor, C,
            MASKED=False,
        )  # fmt: skip
    v = _load_values(v_ptr, base, num_keys, place, C)
    acc = multiply(p.to(v.dtype), v, acc, PRECISION)
    out = tl.div_rn(acc, tl.where(total > 0, total, 1.0)[:, None])
    store_rows(out_ptr, out, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_DV)
    store_softmax_stats(stats_ptr, num_stats, stat, i < count, maximum, total, EXACT)
