"""Forward of jagged flash attention on Hopper, of half precision, in Gluon.

A program stays on its multiprocessor and takes one tile of queries after the other. One warp does
nothing but bring in rows, ahead of two groups of four warps, each of which attends for half of a
tile's queries. These multiply their weights with the values of one tile of keys while they compute
the weights of the next one.

Rows arrive by the tensor memory accelerator, which is told where a sample ends: rows beyond that
are zeros and are never read, and results beyond it are not written. Of biases it has the one by
distance (``distance_bias.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.gluon import (
    GROUP_ROWS,
    as_operand,
    multiply_keys,
    next_tile,
    tell,
    wait_for_last_kernel,
)
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.tile_list import FIELDS
from torchrec_jagged_attn.kernels.common.tma import (
    copy_out,
    fill,
    give,
    jagged_rows,
    make_ring,
    read,
    release,
    rows,
    wait_empty,
    wait_full,
)
from torchrec_jagged_attn.kernels.flash import tiles

__all__ = ["BLOCK_M", "forward", "scores_by_distance"]

BLOCK_M = 128  # queries of a tile
BLOCK_N = 128  # keys of a tile
STAGES = 2  # tiles of queries, of keys and of values in shared memory

online_softmax = gluon.jit(tiles.online_softmax.fn)
store_softmax_stats = gluon.jit(tiles.store_softmax_stats.fn)


@gluon.jit
def _last_keys(count, num_keys, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where the last tile of keys begins that any query of a tile sees; the first one at least."""
    seen_by_any = num_keys
    if CAUSAL:
        seen_by_any = gl.minimum(num_keys, num_keys - count + BLOCK_M)
    return gl.maximum(gl.cdiv(seen_by_any, BLOCK_N) - 1, 0) * BLOCK_N


@gluon.jit
def _load(
    q_desc,
    k_desc,
    v_desc,
    queries,
    keys,
    values,
    places,
    tiles_ptr,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """What one warp does: take tiles from the list, and bring in their rows."""
    if OVERLAP:
        wait_for_last_kernel()
    num_work = gl.load(tiles_ptr).to(gl.int32) * H
    work = gl.program_id(0)
    n = work * 0
    turn = work * 0
    while work < num_work:
        head = work % H
        tile_ptr = tiles_ptr + (1 + work // H) * FIELDS
        row = gl.load(tile_ptr + 1).to(gl.int32)
        count = gl.load(tile_ptr + 2).to(gl.int32)
        base = gl.load(tile_ptr + 3).to(gl.int32)
        num_keys = gl.load(tile_ptr + 4).to(gl.int32)
        # Which program takes a tile depends on time, and nothing on which program it is.
        work = gl.num_programs(0) + gl.atomic_add(tiles_ptr + 1, 1).to(gl.int32)
        wait_empty(queries, turn)
        tell(places, turn, (row, count, num_keys, head), STAGES)
        fill(queries, turn, q_desc, row + count, count, head)
        turn += 1
        kv_head = head // (H // HK)
        last = _last_keys(count, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
        for start in range(last, -1, -BLOCK_N):
            end, remaining = base + num_keys, num_keys - start
            wait_empty(keys, n)
            fill(keys, n, k_desc, end, remaining, kv_head)
            wait_empty(values, n)
            fill(values, n, v_desc, end, remaining, kv_head)
            n += 1
    wait_empty(queries, turn)
    tell(places, turn, (work, work, work, -1), STAGES)
    give(queries, turn)


@gluon.jit
def scores_by_distance(zero_ptr, first, scores):
    """As :func:`distance_bias.scores_by_distance`, of as many rows and columns as ``scores``."""
    layout: gl.constexpr = scores.type.layout
    i = gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))[None, :]
    return gl.load(zero_ptr + first + (i - j))


@gluon.jit
def _softmax(
    products,
    factor,
    zero_ptr,
    start,
    diagonal,
    high,
    maximum,
    total,
    BY_DISTANCE: gl.constexpr,
    MASKED: gl.constexpr,
):
    """One step of the online softmax; the keys from ``start`` on are seen up to ``high``."""
    visible = True
    bias = 0.0
    if BY_DISTANCE:
        bias = scores_by_distance(zero_ptr, diagonal - start, products)
    if MASKED:
        BLOCK_N: gl.constexpr = products.shape[1]
        index = gl.arange(0, BLOCK_N, gl.SliceLayout(0, products.type.layout))
        visible = (start + index)[None, :] < high
    return online_softmax(products, factor, bias, visible, maximum, total, BY_DISTANCE, MASKED)


@gluon.jit
def _attend_to(
    acc,
    p,
    maximum,
    total,
    q,
    keys,
    values,
    n,
    first,
    last,
    high,
    factor,
    zero_ptr,
    diagonal,
    BLOCK_N: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Attend to the tiles of keys before ``last``, from the later ones down to ``first``.

    All rows see all of these keys unless ``MASKED``. ``p`` are the weights of the ``n``-th tile,
    whose values are added up here; what is returned are those of the tile ``first``.
    """
    for start in range(last - BLOCK_N, first - 1, -BLOCK_N):
        products = multiply_keys(q, keys, n + 1)
        acc = warpgroup_mma(p, read(values, n), acc, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        release(keys, n + 1)
        weights, rescale, maximum, total = _softmax(
            products, factor, zero_ptr, start, diagonal, high, maximum, total, BY_DISTANCE, MASKED
        )
        next_p = as_operand(weights, p.dtype)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        release(values, n)
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = next_p
        n += 1
    return acc, p, maximum, total, n


@gluon.jit
def _leave_out(keys, values, n, num_tiles):
    """Let tiles pass that are only for the other group."""
    for tile in range(num_tiles):
        wait_full(keys, n + tile)
        release(keys, n + tile)
        wait_full(values, n + tile)
        release(values, n + tile)
    return n + num_tiles


@gluon.jit
def _attend(
    stats_ptr,
    by_distance_ptr,
    out_desc,
    queries,
    keys,
    values,
    places,
    outs,
    num_stats,
    reach,
    factor,
    H: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    GROUP: gl.constexpr,
):
    """What four warps do: attend for their half of each tile's queries."""
    by_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    by_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    by_query: gl.constexpr = gl.SliceLayout(1, by_keys)
    skipped: gl.constexpr = GROUP * GROUP_ROWS
    r = skipped + gl.arange(0, GROUP_ROWS, by_query)
    n = num_stats * 0
    turn = num_stats * 0
    row, count, num_keys, head = next_tile(places, queries, turn)
    while head >= 0:
        last = _last_keys(count, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
        if count <= skipped:
            release(queries, turn)
            n = _leave_out(keys, values, n, last // BLOCK_N + 1)
        else:
            high = num_keys
            seen_by_all = num_keys
            if CAUSAL:
                high = gl.minimum(num_keys, r + (num_keys - count + 1))[:, None]
                seen_by_all = gl.minimum(num_keys, num_keys - count + 1 + skipped)
            full = gl.minimum(gl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N, last)
            zero_ptr = by_distance_ptr + (head.to(gl.int64) * (2 * reach) + reach)
            diagonal = num_keys - count + skipped
            q = rows(queries, turn).slice(skipped, GROUP_ROWS)
            maximum = gl.full([GROUP_ROWS], -float("inf"), gl.float32, by_query)
            total = gl.zeros([GROUP_ROWS], gl.float32, by_query)
            acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, by_values)
            products = warpgroup_mma_wait(0, deps=(multiply_keys(q, keys, n),))
            release(keys, n)
            weights, _, maximum, total = _softmax(
                products, factor, zero_ptr, last, diagonal, high, maximum, total, BY_DISTANCE, True
            )
            p = as_operand(weights, outs.dtype)
            if CAUSAL:
                acc, p, maximum, total, n = _attend_to(
                    acc, p, maximum, total, q, keys, values, n, full, last, high, factor,
                    zero_ptr, diagonal, BLOCK_N, BY_DISTANCE, MASKED=True,
                )  # fmt: skip
            acc, p, maximum, total, n = _attend_to(
                acc, p, maximum, total, q, keys, values, n, 0, full, high, factor,
                zero_ptr, diagonal, BLOCK_N, BY_DISTANCE, MASKED=False,
            )  # fmt: skip
            release(queries, turn)
            acc = warpgroup_mma(p, read(values, n), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            release(values, n)
            n += 1

            inverse = 1.0 / gl.where(total > 0, total, 1.0)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, by_values))
            tma.store_wait(0)
            out = outs.index(GROUP)
            out.reshape([GROUP_ROWS, BLOCK_D]).store((acc * inverse[:, None]).to(outs.dtype))
            fence_async_shared()
            copy_out(out_desc, row + count, count - skipped, head, out)
            stat = (row.to(gl.int64) + r) * H + head
            store_softmax_stats(stats_ptr, num_stats, stat, r < count, maximum, total, False)
        turn += 1
        row, count, num_keys, head = next_tile(places, queries, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_stats", "reach"])
def forward_kernel(
    stats_ptr,  # [2, ΣLq, H] fp32
    q_desc,  # of [ΣLq, H, D], see jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    out_desc,  # of [ΣLq, H, Dv]
    by_distance_ptr,  # [H, 2 · reach] fp32, see distance_bias.py; not read unless BY_DISTANCE
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    num_stats,
    reach,
    factor,  # scale · log2(e), rounded once
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Tiles of queries of one head, over all keys of their sample, until the list is done."""
    queries = make_ring(q_desc, STAGES)
    keys = make_ring(k_desc, STAGES)
    values = make_ring(v_desc, STAGES)
    places = gl.allocate_shared_memory(
        gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    shape: gl.constexpr = [2] + out_desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    outs = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    gl.warp_specialize(
        [
            (_attend, (
                stats_ptr, by_distance_ptr, out_desc, queries, keys, values, places, outs,
                num_stats, reach, factor, H, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BY_DISTANCE, 0,
            )),
            (_attend, (
                stats_ptr, by_distance_ptr, out_desc, queries, keys, values, places, outs,
                num_stats, reach, factor, H, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, BY_DISTANCE, 1,
            )),
            (_load, (
                q_desc, k_desc, v_desc, queries, keys, values, places, tiles_ptr,
                H, HK, CAUSAL, BLOCK_M, BLOCK_N, STAGES, OVERLAP,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# A launcher does not ask for the dtype of a descriptor.
_launch = {dtype: Launcher(forward_kernel) for dtype in (torch.bfloat16, torch.float16)}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    by_distance: Tensor | None,
    tiles: Tensor,
    factor: float,
    causal: bool,
    width: int,
) -> None:
    """Write the rows of ``out`` and ``stats`` that are in the list of ``tiles``."""
    reach = 0 if by_distance is None else by_distance.shape[1] // 2
    list_or_other = stats if by_distance is None else by_distance
    descriptors = (
        jagged_rows(q, BLOCK_M, width),
        jagged_rows(k, BLOCK_N, width),
        jagged_rows(v, BLOCK_N, width),
        jagged_rows(out, GROUP_ROWS.value, width),
    )
    num_work = (tiles.shape[0] - 1) * q.shape[1]
    _launch[q.dtype](
        (min(num_work, devices.hopper_multiprocessors(q.device)),),
        (stats, *descriptors, list_or_other, tiles, stats[0].numel(), reach, factor),
        {
            "H": q.shape[1],
            "HK": k.shape[1],
            "CAUSAL": causal,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_D": width,
            "STAGES": STAGES,
            "BY_DISTANCE": by_distance is not None,
            "num_warps": 4,
            **overlap_options(devices.launches_overlap(q.device)),
        },
    )
