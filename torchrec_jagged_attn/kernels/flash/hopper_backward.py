"""Backward of jagged flash attention on Hopper, of half precision, in Gluon.

A program stays on its multiprocessor and takes one tile of keys after the other, with all queries
that see it: five products for each pair of tiles. Two groups of four warps have half of the keys
each: scores and their gradients lie transposed in their registers, keys by queries, from where they
are multiplied with the rows of ``grad_out`` and ``q``. A third group has the gradient of queries,
to which the gradients of scores come through shared memory. At width 128 there are no registers
for a third one: the two then have half of the width each, one tile of queries behind, so that
neither waits for what the other has yet to give. One warp does nothing but bring in rows, ahead of
them all.

Tiles of keys add to a gradient of queries in fp32, in global memory, one after the other, so that
sums are the same bit for bit: each waits for its turn, which a fourth role looks out for, and a
fifth passes on. The last one writes the gradient. Tiles are taken in an order in which a turn has
come long before it is needed, and the one before has always begun.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra import cuda

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.kernels.common.gluon import as_operand, wait_for_last_kernel
from torchrec_jagged_attn.kernels.common.jagged import find_tile
from torchrec_jagged_attn.kernels.common.launch import Launcher, overlap_options
from torchrec_jagged_attn.kernels.common.tile_list import FIELDS
from torchrec_jagged_attn.kernels.common.tma import END, Descriptor, jagged_rows
from torchrec_jagged_attn.kernels.flash.hopper_forward import scores_by_distance
from torchrec_jagged_attn.kernels.flash.tiles import load_rows, store_rows

__all__ = ["BLOCK_N", "backward", "prepare"]

BLOCK_M = 64  # queries of a tile
BLOCK_N = 128  # keys of a tile
GROUP_ROWS = gl.constexpr(64)  # keys of a group of warps
PLACES = gl.constexpr(8)  # numbers that say where a tile lies
WEIGHT_STAGES = gl.constexpr(2)
TURN_STAGES = gl.constexpr(4)
PREPARING = 16  # programs to a multiprocessor that prepare


@triton.jit(do_not_specialize=["num_samples", "num_slots"])
def prepare_kernel(
    grad_out_ptr,  # [ΣLq, H, Dv]
    out_ptr,  # [ΣLq, H, Dv]
    stats_ptr,  # [2, ΣLq, H] fp32
    grad_q_ptr,  # [ΣLq, H, D]
    row_stats_ptr,  # [tiles of queries, H, 2, BLOCK_M] fp32: log-sum-exp, Σ_d grad_out · out
    turns_ptr,  # [tiles of queries, H] int32
    delta_ptr,  # [ΣLq, H] fp32: the second of row_stats, if it is not None
    q_offsets_ptr,  # [B + 1]
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    num_samples,
    num_slots,  # most tiles of queries
    H: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    SHORT: tl.constexpr,
    IS_SELF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """What the tiles of keys need of each tile of queries of one head; and zeros if it sees none.

    Nothing is done where no tile of keys is listed, unless samples without keys may have queries.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    num_work = num_slots * H
    if IS_SELF:
        num_work = tl.where(tl.load(tiles_ptr) > 0, num_work, 0)
    work = tl.program_id(0)
    while work < num_work:
        slot, head = work // H, work % H
        sample, begin, end, start = find_tile(q_offsets_ptr, num_samples, slot, 1, BLOCK_M)
        num_keys = tl.load(kv_offsets_ptr + sample + 1) - tl.load(kv_offsets_ptr + sample)
        row, count = begin + start, end - begin - start
        if (count > 0) & ((end - begin > SHORT) | (num_keys > SHORT)):
            grad_out = load_rows(
                grad_out_ptr, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_D, True
            )
            out = load_rows(out_ptr, row, count, H * DV, head * DV, DV, BLOCK_M, BLOCK_D, True)
            i = tl.arange(0, BLOCK_M)
            # Rows that are not there have weights of zero.
            lse = tl.load(stats_ptr + (row + i) * H + head, mask=i < count, other=float("inf"))
            delta = tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
            ptrs = row_stats_ptr + work.to(tl.int64) * (2 * BLOCK_M) + i
            tl.store(ptrs, lse)
            tl.store(ptrs + BLOCK_M, delta)
            if delta_ptr is not None:
                tl.store(delta_ptr + (row + i) * H + head, delta, mask=i < count)
            tl.store(turns_ptr + work, 0)
            seen = num_keys
            if CAUSAL:
                seen = tl.minimum(seen, num_keys - count + tl.minimum(count, BLOCK_M))
            if seen <= 0:
                zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                store_rows(grad_q_ptr, zeros, row, count, H * D, head * D, D, BLOCK_M, BLOCK_D)
        work += tl.num_programs(0)


@gluon.jit
def _make_barriers(STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """``(full, empty)``, of as many stages."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def _make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """``(full, empty, tiles)``: room for ``STAGES`` tiles, and barriers."""
    shape: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full, empty = _make_barriers(STAGES, 1, READERS)
    return full, empty, tiles


@gluon.jit
def _wait_full(ring, n, STAGES: gl.constexpr):
    """Wait until the ``n``-th tile of a ring is there."""
    mbarrier.wait(ring[0].index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def _wait_empty(ring, n, STAGES: gl.constexpr):
    """Wait until the tile before the ``n``-th of a ring, in its place, has been read."""
    mbarrier.wait(ring[1].index(n % STAGES), (n // STAGES + 1) & 1)


@gluon.jit
def _give(ring, n, STAGES: gl.constexpr):
    """Say that the ``n``-th tile of a ring is there."""
    mbarrier.arrive(ring[0].index(n % STAGES))


@gluon.jit
def _release(ring, n, STAGES: gl.constexpr):
    """Say that this group has read the ``n``-th tile of a ring."""
    mbarrier.arrive(ring[1].index(n % STAGES))


@gluon.jit
def _fill(ring, n, desc, end, rest, head, STAGES: gl.constexpr, MORE: gl.constexpr = 0):
    """Begin to copy the tile whose first row is ``rest`` rows before ``end``, see jagged_rows."""
    stage = n % STAGES
    mbarrier.expect(ring[0].index(stage), desc.block_type.nbytes + MORE)
    tma.async_copy_global_to_shared(
        desc, [END, end, END - rest, head, 0], ring[0].index(stage), ring[2].index(stage)
    )


@gluon.jit
def _rows(ring, n, STAGES: gl.constexpr):
    """The ``n``-th tile of a ring, ``[rows, width]``."""
    tile = ring[2].index(n % STAGES)
    return tile.reshape([tile.shape[2], tile.shape[4]])


@gluon.jit
def _next_tile(tiles, places, turn, ITEMS: gl.constexpr):
    """``(row, count, base, num_rows, kv_head, tile, place, of_sums)`` of this turn's tile."""
    _wait_full(tiles, turn, ITEMS)
    row, count = _hear_one(places, turn, 0, ITEMS), _hear_one(places, turn, 1, ITEMS)
    base, num_rows = _hear_one(places, turn, 2, ITEMS), _hear_one(places, turn, 3, ITEMS)
    kv_head, tile = _hear_one(places, turn, 4, ITEMS), _hear_one(places, turn, 5, ITEMS)
    place, of_sums = _hear_one(places, turn, 6, ITEMS), _hear_one(places, turn, 7, ITEMS)
    _release(tiles, turn, ITEMS)
    return row, count, base, num_rows, kv_head, tile, place, of_sums


@gluon.jit
def _tell_all(places, turn, tile, STAGES: gl.constexpr):
    """Leave where this turn's tile lies, PLACES numbers, in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for field in gl.static_range(PLACES):
        value = gl.full([1], tile[field], gl.int32, layout)
        places.index(turn % STAGES * PLACES + field).store(value)


@gluon.jit
def _hear_one(places, turn, field: gl.constexpr, STAGES: gl.constexpr):
    """One of the numbers that :func:`_tell_all` has left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(places.index(turn % STAGES * PLACES + field).load(layout), 0)


@gluon.jit
def _query_tiles(count, num_rows, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr):
    """First of the tiles of queries that see a tile of keys, and the end of them."""
    first = num_rows * 0
    if CAUSAL:
        first = gl.maximum(num_rows - count, 0) // BLOCK_M
    return first, gl.cdiv(num_rows, BLOCK_M)


@gluon.jit
def _is_last(
    m, count, num_rows, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Whether no later tile of keys is seen by the ``m``-th tile of queries."""
    if CAUSAL:
        return gl.minimum(m * BLOCK_M + (BLOCK_M - 1), num_rows - 1) < num_rows - count + BLOCK_N
    else:
        return count <= BLOCK_N


@gluon.jit
def _load(
    operands,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KV_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """What one warp does: take tiles from the list, and bring in their rows."""
    if OVERLAP:
        wait_for_last_kernel()
    (
        q_desc,
        k_desc,
        v_desc,
        grad_out_desc,
        stats_desc,
        queries,
        stats,
        keys,
        values,
        grads,
        tiles,
        places,
        tiles_ptr,
        kv_offsets_ptr,
    ) = operands
    num_work = gl.load(tiles_ptr).to(gl.int32) * HK
    # Which program takes a tile depends on time, and nothing on which program it is. All that are
    # taken have begun: none waits for a program that has no multiprocessor yet.
    work = gl.atomic_add(tiles_ptr + 1, 1).to(gl.int32)
    n = work * 0
    turn = work * 0
    while work < num_work:
        kv_head = work % HK
        tile_ptr = tiles_ptr + (1 + work // HK) * FIELDS
        sample = gl.load(tile_ptr)
        row = gl.load(tile_ptr + 1).to(gl.int32)
        count = gl.load(tile_ptr + 2).to(gl.int32)
        base = gl.load(tile_ptr + 3).to(gl.int32)
        num_rows = gl.load(tile_ptr + 4).to(gl.int32)
        first_key = gl.load(kv_offsets_ptr + sample).to(gl.int32)
        tile = (row - first_key) // BLOCK_N
        place = base // BLOCK_M + sample.to(gl.int32)
        of_sums = base // BLOCK_M + gl.minimum(sample.to(gl.int32), first_key // BLOCK_N)
        _wait_empty(tiles, turn, 2)
        _tell_all(places, turn, (row, count, base, num_rows, kv_head, tile, place, of_sums), 2)
        _give(tiles, turn, 2)
        _wait_empty(keys, turn, KV_STAGES)
        _fill(keys, turn, k_desc, row + count, count, kv_head, KV_STAGES)
        first, end = _query_tiles(count, num_rows, CAUSAL, BLOCK_M)
        new = gl.to_tensor(True)
        for member in range(H // HK):
            head = kv_head * (H // HK) + member
            for m in range(first, end):
                rest = num_rows - m * BLOCK_M
                _wait_empty(queries, n, STAGES)
                _fill(queries, n, q_desc, base + num_rows, rest, head, STAGES, BLOCK_M * 8)
                tma.async_copy_global_to_shared(
                    stats_desc,
                    [(place + m) * H + head, 0],
                    queries[0].index(n % STAGES),
                    stats.index(n % STAGES),
                )
                if new:
                    _wait_empty(values, turn, KV_STAGES)
                    _fill(values, turn, v_desc, row + count, count, kv_head, KV_STAGES)
                    new = gl.to_tensor(False)
                _wait_empty(grads, n, STAGES)
                _fill(grads, n, grad_out_desc, base + num_rows, rest, head, STAGES)
                n += 1
        if new:
            _wait_empty(values, turn, KV_STAGES)
            _fill(values, turn, v_desc, row + count, count, kv_head, KV_STAGES)
        turn += 1
        work = gl.atomic_add(tiles_ptr + 1, 1).to(gl.int32)
    _wait_empty(tiles, turn, 2)
    _tell_all(places, turn, (work, work, work, work, -1, work, work, work), 2)
    _give(tiles, turn, 2)


@gluon.jit
def _add_part(
    sums,
    acc,
    m,
    n,
    place,
    scale,
    H: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PART: gl.constexpr,
):
    """Add what a tile gives to a part of the ``m``-th gradient of queries, when it is its turn.

    The last tile writes the gradient, the others leave sums.
    """
    sums_ptr, granted, added, grad_tile, desc = sums
    count, base, num_rows, head, tile, first_slot = place
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    slot = (first_slot + m) * H + head
    last = _is_last(m, count, num_rows, CAUSAL, ROWS, BLOCK_N)
    PARTS: gl.constexpr = grad_tile.shape[0]
    # In the order in which the registers of a warp hold them, so that all accesses are whole ones.
    flat = acc.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    flat = flat.reshape([ROWS * WIDTH])
    at = gl.arange(0, ROWS * WIDTH, flat.type.layout)
    ptrs = sums_ptr + (slot.to(gl.int64) * PARTS + PART) * (ROWS * WIDTH) + at
    if last:
        tma.store_wait(0)
    _wait_full(granted, n, TURN_STAGES)
    _release(granted, n, TURN_STAGES)
    if last:
        if tile > 0:
            flat += gl.load(ptrs, cache_modifier=".cg")
        total = flat.reshape([4, WIDTH // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
        total = gl.convert_layout(total.reshape([ROWS, WIDTH]), acc.type.layout)
        out = grad_tile.index(PART)
        out.reshape([ROWS, WIDTH]).store((total * scale).to(grad_tile.dtype))
        fence_async_shared()
        end, rest = base + num_rows, num_rows - m * ROWS
        tma.async_copy_shared_to_global(desc, [END, end, END - rest, head, PART * WIDTH], out)
    elif tile > 0:
        gl.atomic_add(ptrs, flat, sem="relaxed", scope="gpu")
    else:
        gl.store(ptrs, flat)
    _wait_empty(added, n, TURN_STAGES)
    _give(added, n, TURN_STAGES)


@gluon.jit
def _multiply_weights(weights, n, k, zeros):
    """Begin to multiply the ``n``-th gradients of scores with keys ``k``."""
    ds = weights[2].index(n % WEIGHT_STAGES).permute((1, 0))
    return warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(
    acc_k,
    acc_v,
    k,
    v,
    k_tile,
    queries,
    stats,
    grads,
    weights,
    sums,
    n,
    first,
    seeing_all,
    end,
    place,
    high,
    own,
    zero_ptr,
    diagonal,
    factor,
    scale,
    H: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    GROUP: gl.constexpr,
    ALONE: gl.constexpr,
):
    """What the tiles of queries from ``first`` to ``end`` give to a group's keys.

    Those from ``seeing_all`` on see all of them. (They have no loop of their own: of the addresses
    of products in two loops, ptxas 12.8 makes some only on the way into the first one.)
    """
    BLOCK_M: gl.constexpr = stats.shape[2] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = k.dtype
    zeros = gl.zeros([GROUP_ROWS, BLOCK_M], gl.float32, layout)
    if not ALONE:
        k_part = k_tile.slice(GROUP * BLOCK_M, BLOCK_M, dim=1)
    for m in range(first, end):
        _wait_full(queries, n, STAGES)
        q = _rows(queries, n, STAGES)
        if (
            not ALONE
        ):  # of the last tile of queries, to which the other group has given its part by now
            if m > first:
                _wait_full(weights, n - 1, WEIGHT_STAGES)
            dq = _multiply_weights(weights, n + (WEIGHT_STAGES - 1), k_part, zeros)
        products = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if not ALONE:
            dq = warpgroup_mma_wait(1, deps=(dq,))
            if m > first:
                _release(weights, n - 1, WEIGHT_STAGES)
                _add_part(sums, dq, m - 1, n - 1, place, scale, H, CAUSAL, BLOCK_N, GROUP)
        if ALONE:
            _wait_full(grads, n, STAGES)
            grad_out = _rows(grads, n, STAGES)
            dp = warpgroup_mma(v, grad_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
        stat = stats.index(n % STAGES)
        lse = stat.slice(0, BLOCK_M, dim=1).load(layout)
        if BY_DISTANCE:  # rows that are not there keep their infinity, whatever the score
            score = scores_by_distance(zero_ptr, diagonal - m * BLOCK_M, zeros)
            lse = gl.where(lse < float("inf"), lse - score, lse)
        products = warpgroup_mma_wait(1 if ALONE else 0, deps=(products,))
        p = gl.exp2(products * factor - lse)  # [keys, queries]
        if m < seeing_all:
            visible = own
            if CAUSAL:
                i = m * BLOCK_M + gl.arange(0, BLOCK_M, by_query)
                visible = visible & (i[None, :] >= high)
            p = gl.where(visible, p, 0.0)
        if not ALONE:
            p = p.to(dtype)  # registers for both would not do
            _wait_full(grads, n, STAGES)
            grad_out = _rows(grads, n, STAGES)
            dp = warpgroup_mma(v, grad_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
        p_operand = as_operand(p, dtype)
        acc_v = warpgroup_mma(p_operand, grad_out, acc_v, is_async=True)
        delta = stat.slice(BLOCK_M, BLOCK_M, dim=1).load(layout)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p.to(gl.float32) * (dp - delta)).to(dtype)
        _wait_empty(weights, n, WEIGHT_STAGES)
        weights[2].index(n % WEIGHT_STAGES).slice(GROUP * GROUP_ROWS, GROUP_ROWS).store(ds)
        fence_async_shared()
        _give(weights, n, WEIGHT_STAGES)
        ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, layout, 2))
        acc_k = warpgroup_mma(ds_operand, q, acc_k, is_async=True)
        acc_v, p_operand = warpgroup_mma_wait(1, deps=(acc_v, p_operand))
        _release(grads, n, STAGES)
        acc_k, ds_operand = warpgroup_mma_wait(0, deps=(acc_k, ds_operand))
        _release(queries, n, STAGES)
        n += 1
    if (not ALONE) and first < end:
        _wait_full(weights, n - 1, WEIGHT_STAGES)
        dq = _multiply_weights(weights, n - 1, k_part, zeros)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _release(weights, n - 1, WEIGHT_STAGES)
        _add_part(sums, dq, end - 1, n - 1, place, scale, H, CAUSAL, BLOCK_N, GROUP)
    return acc_k, acc_v, n


@gluon.jit
def _store(outs, desc, value, end, rest, head, GROUP: gl.constexpr):
    """Write the rows of a group of warps."""
    tma.store_wait(0)
    out = outs.index(GROUP)
    out.reshape(value.shape).store(value.to(outs.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [END, end, END - rest, head, 0], out)


@gluon.jit
def _grad_of_keys(
    operands,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    KV_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    GROUP: gl.constexpr,
    ALONE: gl.constexpr,
):
    """What four warps do: gradients of their half of each tile's keys and values."""
    (
        grad_k_desc,
        grad_v_desc,
        queries,
        stats,
        keys,
        values,
        grads,
        weights,
        sums,
        outs,
        tiles,
        places,
        by_distance_ptr,
        reach,
        factor,
        scale,
    ) = operands
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    by_width: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    skipped: gl.constexpr = GROUP * GROUP_ROWS
    r = (skipped + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout)))[:, None]
    turn = gl.to_tensor(0)
    n = gl.to_tensor(0)
    row, count, base, num_rows, kv_head, tile, _, of_sums = _next_tile(tiles, places, turn, 2)
    while kv_head >= 0:
        first, end = _query_tiles(count, num_rows, CAUSAL, BLOCK_M)
        own, high = r < count, r + (num_rows - count)
        seeing_all = first
        if CAUSAL:
            last_key = num_rows - count + (skipped + GROUP_ROWS - 1)
            seeing_all = gl.maximum(gl.cdiv(gl.maximum(last_key, 0), BLOCK_M), first)
        if count < skipped + GROUP_ROWS:
            seeing_all = end
        seeing_all = gl.minimum(seeing_all, end)
        acc_k = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, by_width)
        acc_v = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, by_width)
        _wait_full(keys, turn, KV_STAGES)
        _wait_full(values, turn, KV_STAGES)
        k_tile = _rows(keys, turn, KV_STAGES)
        k = k_tile.slice(skipped, GROUP_ROWS)
        v = _rows(values, turn, KV_STAGES).slice(skipped, GROUP_ROWS)
        for member in range(H // HK):
            head = kv_head * (H // HK) + member
            at = (count, base, num_rows, head, tile, of_sums)
            zero_ptr = by_distance_ptr + (head.to(gl.int64) * (2 * reach) + reach)
            acc_k, acc_v, n = _add_queries(
                acc_k, acc_v, k, v, k_tile, queries, stats, grads, weights, sums, n, first,
                seeing_all, end, at, high, own, zero_ptr, num_rows - count + skipped, factor,
                scale, H, CAUSAL, BLOCK_N, STAGES, BY_DISTANCE, GROUP, ALONE,
            )  # fmt: skip
        _release(keys, turn, KV_STAGES)
        _release(values, turn, KV_STAGES)
        if count > skipped:
            _store(outs, grad_v_desc, acc_v, row + count, count - skipped, kv_head, GROUP)
            _store(outs, grad_k_desc, acc_k * scale, row + count, count - skipped, kv_head, GROUP)
        turn += 1
        row, count, base, num_rows, kv_head, tile, _, of_sums = _next_tile(tiles, places, turn, 2)
    tma.store_wait(0)


@gluon.jit
def _grad_of_queries(
    operands,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    KV_STAGES: gl.constexpr,
):
    """What four warps do: what a tile's keys give to the gradients of queries."""
    sums, keys, weights, tiles, places, scale = operands
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    zeros = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout)
    turn = gl.to_tensor(0)
    n = gl.to_tensor(0)
    _, count, base, num_rows, kv_head, tile, _, of_sums = _next_tile(tiles, places, turn, 2)
    while kv_head >= 0:
        first, end = _query_tiles(count, num_rows, CAUSAL, BLOCK_M)
        _wait_full(keys, turn, KV_STAGES)
        k = _rows(keys, turn, KV_STAGES)
        for member in range(H // HK):
            at = (count, base, num_rows, kv_head * (H // HK) + member, tile, of_sums)
            for m in range(first, end):
                _wait_full(weights, n, WEIGHT_STAGES)
                acc = _multiply_weights(weights, n, k, zeros)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                _release(weights, n, WEIGHT_STAGES)
                _add_part(sums, acc, m, n, at, scale, H, CAUSAL, BLOCK_N, 0)
                n += 1
        _release(keys, turn, KV_STAGES)
        turn += 1
        _, count, base, num_rows, kv_head, tile, _, of_sums = _next_tile(tiles, places, turn, 2)
    tma.store_wait(0)


@gluon.jit
def _await_turns(
    turns_ptr,
    granted,
    tiles,
    places,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """What one warp does: look out for a tile's turn to add to each gradient of queries."""
    turn = gl.to_tensor(0)
    n = gl.to_tensor(0)
    _, count, _, num_rows, kv_head, tile, place, _ = _next_tile(tiles, places, turn, 2)
    while kv_head >= 0:
        first, end = _query_tiles(count, num_rows, CAUSAL, BLOCK_M)
        for member in range(H // HK):
            head = kv_head * (H // HK) + member
            for m in range(first, end):
                _wait_empty(granted, n, TURN_STAGES)
                seen = tile * 0
                while seen < tile:
                    turn_ptr = turns_ptr + ((place + m) * H + head)
                    seen = gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu")
                _give(granted, n, TURN_STAGES)
                n += 1
        turn += 1
        _, count, _, num_rows, kv_head, tile, place, _ = _next_tile(tiles, places, turn, 2)


@gluon.jit
def _pass_turns(
    turns_ptr,
    added,
    tiles,
    places,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PASSER: gl.constexpr,
    PASSERS: gl.constexpr,
):
    """What one warp does: give the turn to the next tile once this one has added."""
    turn = gl.to_tensor(0)
    n = gl.to_tensor(0)
    _, count, _, num_rows, kv_head, _, place, _ = _next_tile(tiles, places, turn, 2)
    while kv_head >= 0:
        first, end = _query_tiles(count, num_rows, CAUSAL, BLOCK_M)
        for member in range(H // HK):
            head = kv_head * (H // HK) + member
            for m in range(first, end):
                if n % PASSERS == PASSER:
                    _wait_full(added, n, TURN_STAGES)
                    if not _is_last(m, count, num_rows, CAUSAL, BLOCK_M, BLOCK_N):
                        turn_ptr = turns_ptr + ((place + m) * H + head)
                        gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")
                    _release(added, n, TURN_STAGES)
                n += 1
        turn += 1
        _, count, _, num_rows, kv_head, _, place, _ = _next_tile(tiles, places, turn, 2)


@gluon.jit(do_not_specialize=["reach"])
def backward_kernel(
    sums_ptr,  # [tiles of queries of several tiles of keys, H, BLOCK_M · BLOCK_D] fp32
    turns_ptr,  # [tiles of queries, H] int32, zeros
    q_desc,  # of [ΣLq, H, D], see jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    grad_out_desc,  # of [ΣLq, H, Dv]
    stats_desc,  # of [tiles of queries · H, 2 · BLOCK_M] fp32
    grad_q_desc,  # of [ΣLq, H, D]
    grad_k_desc,  # of [ΣLk, Hk, D]
    grad_v_desc,  # of [ΣLk, Hk, Dv]
    by_distance_ptr,  # [H, 2 · reach] fp32, see distance_bias.py; not read unless BY_DISTANCE
    kv_offsets_ptr,  # [B + 1]
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    reach,
    factor,  # scale · log2(e), rounded once
    scale,
    H: gl.constexpr,
    HK: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    KV_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Tiles of keys of one head, with all queries of their sample, until the list is done."""
    ALONE: gl.constexpr = BLOCK_D == 64  # each half of the keys by itself
    PARTS: gl.constexpr = BLOCK_D // 64
    queries = _make_ring(q_desc, STAGES, 2)
    grads = _make_ring(grad_out_desc, STAGES, 2)
    keys = _make_ring(k_desc, KV_STAGES, 3 if ALONE else 2)
    values = _make_ring(v_desc, KV_STAGES, 2)
    stats = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2 * BLOCK_M], stats_desc.layout)
    tiles = _make_barriers(2, 1, 6 if ALONE else 5)
    places = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds_full, ds_empty = _make_barriers(WEIGHT_STAGES, 2, PARTS)
    ds = gl.allocate_shared_memory(q_desc.dtype, [WEIGHT_STAGES, BLOCK_N, BLOCK_M], swizzled)
    weights = (ds_full, ds_empty, ds)
    granted = _make_barriers(TURN_STAGES, 1, PARTS)
    added = _make_barriers(TURN_STAGES, PARTS, 1)
    grad_shape: gl.constexpr = [PARTS] + grad_q_desc.block_type.shape  # noqa: RUF005
    grad_tile = gl.allocate_shared_memory(grad_q_desc.dtype, grad_shape, grad_q_desc.layout)
    sums = (sums_ptr, granted, added, grad_tile, grad_q_desc)
    shape: gl.constexpr = [2] + grad_k_desc.block_type.shape  # noqa: RUF005
    outs = gl.allocate_shared_memory(grad_k_desc.dtype, shape, grad_k_desc.layout)
    of_keys = (
        grad_k_desc, grad_v_desc, queries, stats, keys, values, grads, weights, sums, outs, tiles,
        places, by_distance_ptr, reach, factor, scale,
    )  # fmt: skip
    of_queries = (sums, keys, weights, tiles, places, scale)
    load = (
        q_desc, k_desc, v_desc, grad_out_desc, stats_desc, queries, stats, keys, values, grads,
        tiles, places, tiles_ptr, kv_offsets_ptr,
    )  # fmt: skip
    if ALONE:
        gl.warp_specialize(
            [
                (_grad_of_keys, (
                    of_keys, H, HK, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, KV_STAGES, STAGES,
                    BY_DISTANCE, 0, True,
                )),
                (_grad_of_keys, (
                    of_keys, H, HK, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, KV_STAGES, STAGES,
                    BY_DISTANCE, 1, True,
                )),
                (_grad_of_queries, (
                    of_queries, H, HK, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, KV_STAGES,
                )),
                (_load, (load, H, HK, CAUSAL, BLOCK_M, BLOCK_N, KV_STAGES, STAGES, OVERLAP)),
                (_await_turns, (turns_ptr, granted, tiles, places, H, HK, CAUSAL, BLOCK_M)),
                (_pass_turns, (
                    turns_ptr, added, tiles, places, H, HK, CAUSAL, BLOCK_M, BLOCK_N, 0, 2,
                )),
                (_pass_turns, (
                    turns_ptr, added, tiles, places, H, HK, CAUSAL, BLOCK_M, BLOCK_N, 1, 2,
                )),
            ],
            [4, 4, 1, 1, 1, 1],
            [208, 64, 32, 32, 32, 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_grad_of_keys, (
                    of_keys, H, HK, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, KV_STAGES, STAGES,
                    BY_DISTANCE, 0, False,
                )),
                (_grad_of_keys, (
                    of_keys, H, HK, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, KV_STAGES, STAGES,
                    BY_DISTANCE, 1, False,
                )),
                (_load, (load, H, HK, CAUSAL, BLOCK_M, BLOCK_N, KV_STAGES, STAGES, OVERLAP)),
                (_await_turns, (turns_ptr, granted, tiles, places, H, HK, CAUSAL, BLOCK_M)),
                (_pass_turns, (
                    turns_ptr, added, tiles, places, H, HK, CAUSAL, BLOCK_M, BLOCK_N, 0, 2,
                )),
                (_pass_turns, (
                    turns_ptr, added, tiles, places, H, HK, CAUSAL, BLOCK_M, BLOCK_N, 1, 2,
                )),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )  # fmt: skip


_prepare = Launcher(prepare_kernel)
# A launcher does not ask for the dtype of a descriptor.
_launch = {dtype: Launcher(backward_kernel) for dtype in (torch.bfloat16, torch.float16)}
_FLAT = gl.NVMMASharedLayout(0, 32, rank=2)


def prepare(
    grad_out: Tensor,
    out: Tensor,
    stats: Tensor,
    grad_q: Tensor,
    delta: Tensor | None,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    tiles: Tensor,
    causal: bool,
    width: int,
    short: int,
    is_self: bool,
) -> tuple[Tensor, Tensor]:
    """``row_stats`` and ``turns`` for :func:`backward`; zeros in ``grad_q`` where no key is seen.

    Where it is wanted, ``delta`` ``[ΣLq, H]`` becomes Σ_d grad_out · out.

    Of the samples that have more than ``short`` rows on a side; all have as many queries as keys if
    ``is_self``. It waits for the kernel before it, which is to be that of the list of ``tiles``.
    """
    num_queries, H, D = grad_q.shape
    num_samples = q_offsets.numel() - 1
    num_slots = num_queries // BLOCK_M + num_samples
    row_stats = out.new_empty(num_slots * H, 2 * BLOCK_M, dtype=torch.float32)
    turns = out.new_empty(num_slots * H, dtype=torch.int32)
    _prepare(
        (min(num_slots * H, PREPARING * devices.hopper_multiprocessors(out.device)),),
        (
            grad_out, out, stats, grad_q, row_stats, turns, delta, q_offsets, kv_offsets, tiles,
            num_samples, num_slots,
        ),
        {
            "H": H,
            "D": D,
            "DV": out.shape[2],
            "CAUSAL": causal,
            "SHORT": short,
            "IS_SELF": is_self,
            "BLOCK_M": BLOCK_M,
            "BLOCK_D": width,
            "num_warps": 4,
            **overlap_options(devices.launches_overlap(out.device)),
        },
    )  # fmt: skip
    return row_stats, turns


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_q: Tensor,
    grad_out: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    row_stats: Tensor,
    turns: Tensor,
    by_distance: Tensor | None,
    kv_offsets: Tensor,
    tiles: Tensor,
    factor: float,
    scale: float,
    causal: bool,
    width: int,
) -> None:
    """Write the gradients of the samples in the list of ``tiles``, after :func:`prepare`."""
    num_queries, H, _ = q.shape
    HK = k.shape[1]
    # Only samples of several tiles of keys have sums of several.
    of_sums = num_queries // BLOCK_M + min(kv_offsets.numel() - 1, k.shape[0] // BLOCK_N)
    sums = torch.empty(of_sums * H, BLOCK_M * width, dtype=torch.float32, device=q.device)
    group = GROUP_ROWS.value
    descriptors = (
        jagged_rows(q, BLOCK_M, width),
        jagged_rows(k, BLOCK_N, width),
        jagged_rows(v, BLOCK_N, width),
        jagged_rows(grad_out, BLOCK_M, width),
        Descriptor(row_stats, list(row_stats.shape), [2 * BLOCK_M, 1], [1, 2 * BLOCK_M], _FLAT),
        jagged_rows(grad_q, BLOCK_M, 64),
        jagged_rows(grad_k, group, width),
        jagged_rows(grad_v, group, width),
    )
    reach = 0 if by_distance is None else by_distance.shape[1] // 2
    list_or_other = sums if by_distance is None else by_distance
    num_work = (tiles.shape[0] - 1) * HK
    _launch[q.dtype](
        (min(num_work, devices.hopper_multiprocessors(q.device)),),
        (sums, turns, *descriptors, list_or_other, kv_offsets, tiles, reach, factor, scale),
        {
            "H": H,
            "HK": HK,
            "CAUSAL": causal,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_D": width,
            "KV_STAGES": 2 if width == 64 else 1,
            "STAGES": 4 if width == 64 else 2,
            "BY_DISTANCE": by_distance is not None,
            "num_warps": 4,
            **overlap_options(devices.launches_overlap(q.device)),
        },
    )
