"""Whole short samples on Hopper: programs of few warps, rows by TMA, the next sample's ahead.

A program takes ``per_program`` (sample, head) items one after the other. While it computes one, the
rows of the next are on their way (TMA is told where a sample ends, see flash_hopper._jagged_rows).
BLOCK 32: one warp, mma_v2; BLOCK 64: four warps, wgmma. Samples of more than LOW rows on a side and
at most BLOCK on both are taken; where SMALL, those of at most BLOCK // 2 rows by smaller products.
"""
from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchrec_jagged_attn.kernels import flash_tiles
from torchrec_jagged_attn.kernels.flash_hopper import END, _jagged_rows
from torchrec_jagged_attn.kernels.launch import Launcher, launches_overlap, overlap_options
from torchrec_jagged_attn.kernels.warp_tiles import wait_for_last_kernel

store_softmax_stats = gluon.jit(flash_tiles.store_softmax_stats.fn)


@gluon.jit
def let_next_begin():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def power_of_two(x):
    """``2^x``, zero below 2^-126: without the three instructions that subnormal ones take."""
    return gl.exp2(x)


@gluon.jit
def inverse_of(x):
    """``1 / x``, of what is not subnormal, within one last place."""
    return 1.0 / x


@gluon.jit
def _locate(
    item, end, q_offsets_ptr, kv_offsets_ptr, H: gl.constexpr, LOW: gl.constexpr,
    BLOCK: gl.constexpr, OF_KEYS: gl.constexpr,
):
    """``(q_end, num_rows, kv_end, num_keys, head, taken)`` of an item."""
    at = gl.minimum(item, end - 1)
    sample = at // H
    head = at - sample * H
    q_row = gl.load(q_offsets_ptr + sample).to(gl.int32)
    q_end = gl.load(q_offsets_ptr + (sample + 1)).to(gl.int32)
    kv_row = gl.load(kv_offsets_ptr + sample).to(gl.int32)
    kv_end = gl.load(kv_offsets_ptr + (sample + 1)).to(gl.int32)
    num_rows, num_keys = q_end - q_row, kv_end - kv_row
    largest = gl.maximum(num_rows, num_keys)
    taken = (item < end) & (largest <= BLOCK) & (largest > LOW)
    if OF_KEYS:
        taken = taken & (largest > 0)
    else:
        taken = taken & (num_rows > 0)
    return q_end, num_rows, kv_end, num_keys, head, taken


@gluon.jit
def _copy(desc, end, count, head, bar, tile):
    tma.async_copy_global_to_shared(desc, [END, end, END - count, head, 0], bar, tile)


@gluon.jit
def _write(desc, end, count, head, tile):
    tma.async_copy_shared_to_global(desc, [END, end, END - count, head, 0], tile)


@gluon.jit
def _flat(tile, ROWS: gl.constexpr):
    """The first rows of a tile in shared memory, ``[ROWS, width]``."""
    return tile.reshape([tile.shape[2], tile.shape[4]]).slice(0, ROWS)


@gluon.jit
def _multiply(a, b, N: gl.constexpr, WARPS: gl.constexpr):
    """``a @ b`` of tiles in shared memory."""
    M: gl.constexpr = a.shape[0]
    if WARPS == 1:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
        zeros = gl.zeros([M, N], gl.float32, layout)
        x = a.load(gl.DotOperandLayout(0, layout, 2))
        y = b.load(gl.DotOperandLayout(1, layout, 2))
        return mma_v2(x, y, zeros)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
        zeros = gl.zeros([M, N], gl.float32, layout)
        product = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
        return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _multiply_weights(p, b, N: gl.constexpr, WARPS: gl.constexpr):
    """``p @ b`` of weights in registers and a tile in shared memory."""
    M: gl.constexpr = p.shape[0]
    if WARPS == 1:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
        zeros = gl.zeros([M, N], gl.float32, layout)
        x = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2))
        y = b.load(gl.DotOperandLayout(1, layout, 2))
        return mma_v2(x, y, zeros)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
        zeros = gl.zeros([M, N], gl.float32, layout)
        x = gl.convert_layout(p, gl.DotOperandLayout(0, p.type.layout, 2))
        product = warpgroup_mma(x, b, zeros, use_acc=False, is_async=True)
        product, x = warpgroup_mma_wait(0, deps=(product, x))
        return product


@gluon.jit
def _visible(products, num_rows, num_keys, CAUSAL: gl.constexpr, QUERIES: gl.constexpr):
    ROWS: gl.constexpr = products.shape[0]
    j = gl.arange(0, ROWS, gl.SliceLayout(0, products.type.layout))[None, :]
    visible = j < num_keys
    if CAUSAL or QUERIES:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, products.type.layout))[:, None]
        if QUERIES:
            visible = visible & (i < num_rows)
        if CAUSAL:
            visible = visible & (j <= i + (num_keys - num_rows))
    return visible


@gluon.jit
def _softmax(products, factor, visible):
    tops = gl.where(visible, products, -float("inf"))
    top = gl.max(tops, 1)
    seen = top > -float("inf")
    maximum = gl.where(seen, top * factor, top)
    shift = gl.where(seen, maximum, 0.0)
    p = power_of_two(tops * factor - shift[:, None])
    total = gl.sum(p, 1)
    return p, maximum, total


# ---------------------------------------------------------------- forward
@gluon.jit
def _fill_qk(q_desc, k_desc, tiles, bars, place, H: gl.constexpr, HK: gl.constexpr):
    q_end, num_rows, kv_end, num_keys, head, taken = place
    if taken:
        bar = bars.index(0)
        mbarrier.expect(bar, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
        _copy(q_desc, q_end, num_rows, head, bar, tiles.index(0))
        _copy(k_desc, kv_end, num_keys, head // (H // HK), bar, tiles.index(1))


@gluon.jit
def _fill_v(v_desc, tiles, bars, place, H: gl.constexpr, HK: gl.constexpr):
    _, _, kv_end, num_keys, head, taken = place
    if taken:
        bar = bars.index(1)
        mbarrier.expect(bar, v_desc.block_type.nbytes)
        _copy(v_desc, kv_end, num_keys, head // (H // HK), bar, tiles.index(2))


@gluon.jit
def _attend(
    operands, place, following, phase, H: gl.constexpr, HK: gl.constexpr, CAUSAL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_D: gl.constexpr, WARPS: gl.constexpr,
):
    q_desc, k_desc, v_desc, out_desc, stats_ptr, tiles, out, bars, num_stats, factor = operands
    q_end, num_rows, _, num_keys, head, _ = place
    mbarrier.wait(bars.index(0), phase)
    q, k = _flat(tiles.index(0), ROWS), _flat(tiles.index(1), ROWS)
    products = _multiply(q, k.permute((1, 0)), ROWS, WARPS)
    gl.thread_barrier()
    _fill_qk(q_desc, k_desc, tiles, bars, following, H, HK)
    p, maximum, total = _softmax(
        products, factor, _visible(products, num_rows, num_keys, CAUSAL, False)
    )
    mbarrier.wait(bars.index(1), phase)
    acc = _multiply_weights(p.to(tiles.dtype), _flat(tiles.index(2), ROWS), BLOCK_D, WARPS)
    tma.store_wait(0)
    gl.thread_barrier()
    _fill_v(v_desc, tiles, bars, following, H, HK)
    inverse = inverse_of(gl.where(total > 0, total, 1.0))
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))
    _flat(out, ROWS).store((acc * inverse[:, None]).to(out.dtype))
    fence_async_shared()
    _write(out_desc, q_end, num_rows, head, out)
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])  # each row once
    maximum, total = gl.convert_layout(maximum, by_lane), gl.convert_layout(total, by_lane)
    i = gl.arange(0, ROWS, by_lane)
    stat = ((q_end - num_rows).to(gl.int64) + i) * H + head
    store_softmax_stats(stats_ptr, num_stats, stat, i < num_rows, maximum, total, False)


@gluon.jit(do_not_specialize=["num_stats", "num_items", "per_program"])
def forward_kernel(
    stats_ptr, q_desc, k_desc, v_desc, out_desc, q_offsets_ptr, kv_offsets_ptr,
    num_stats, num_items, per_program, factor,
    H: gl.constexpr, HK: gl.constexpr, CAUSAL: gl.constexpr, LOW: gl.constexpr,
    BLOCK: gl.constexpr, BLOCK_D: gl.constexpr, SMALL: gl.constexpr, WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        let_next_begin()
    shape: gl.constexpr = [3] + q_desc.block_type.shape  # noqa: RUF005
    tiles = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    out = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    factor = gl.maximum(factor, 1e-30)  # with which what is hidden gets no weight
    operands = (
        q_desc, k_desc, v_desc, out_desc, stats_ptr, tiles, out, bars, num_stats, factor,
    )
    n = gl.program_id(0) * per_program
    end = gl.minimum(n + per_program, num_items)
    phase = n * 0
    place = _locate(n, end, q_offsets_ptr, kv_offsets_ptr, H, LOW, BLOCK, False)
    fence_async_shared()
    gl.thread_barrier()
    _fill_qk(q_desc, k_desc, tiles, bars, place, H, HK)
    _fill_v(v_desc, tiles, bars, place, H, HK)
    while n < end:
        n += 1
        following = _locate(n, end, q_offsets_ptr, kv_offsets_ptr, H, LOW, BLOCK, False)
        if place[5]:
            if SMALL and gl.maximum(place[1], place[3]) <= BLOCK // 2:
                _attend(
                    operands, place, following, phase, H, HK, CAUSAL, BLOCK // 2, BLOCK_D, WARPS
                )
            else:
                _attend(operands, place, following, phase, H, HK, CAUSAL, BLOCK, BLOCK_D, WARPS)
            phase = phase ^ 1
        else:
            _fill_qk(q_desc, k_desc, tiles, bars, following, H, HK)
            _fill_v(v_desc, tiles, bars, following, H, HK)
        place = following
    tma.store_wait(0)
    if OVERLAP:
        wait_for_last_kernel()


# ---------------------------------------------------------------- backward (H == HK)
@gluon.jit
def _fill_all(descs, tiles, bars, stage, place):
    q_desc, k_desc, v_desc, grad_out_desc = descs
    q_end, num_rows, kv_end, num_keys, head, taken = place
    if taken:
        bar = bars.index(stage)
        mbarrier.expect(bar, 4 * q_desc.block_type.nbytes)
        _copy(q_desc, q_end, num_rows, head, bar, tiles.index(stage * 4))
        _copy(k_desc, kv_end, num_keys, head, bar, tiles.index(stage * 4 + 1))
        _copy(v_desc, kv_end, num_keys, head, bar, tiles.index(stage * 4 + 2))
        _copy(grad_out_desc, q_end, num_rows, head, bar, tiles.index(stage * 4 + 3))


@gluon.jit
def _differentiate(
    descs, outs, tiles, scratch, bars, place, following, turn, factor, scale,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    grad_q_desc, grad_k_desc, grad_v_desc = outs
    q_end, num_rows, kv_end, num_keys, head, _ = place
    stage = turn % STAGES
    mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
    q_tile, k_tile = tiles.index(stage * 4), tiles.index(stage * 4 + 1)
    v_tile, grad_out_tile = tiles.index(stage * 4 + 2), tiles.index(stage * 4 + 3)
    q, k = _flat(q_tile, ROWS), _flat(k_tile, ROWS)
    v, grad_out = _flat(v_tile, ROWS), _flat(grad_out_tile, ROWS)
    dtype: gl.constexpr = tiles.dtype
    products = _multiply(q, k.permute((1, 0)), ROWS, WARPS)
    dp = _multiply(grad_out, v.permute((1, 0)), ROWS, WARPS)
    if STAGES == 2:
        tma.store_wait(0)
        gl.thread_barrier()
        _fill_all(descs, tiles, bars, (turn + 1) % STAGES, following)
    visible = _visible(products, num_rows, num_keys, CAUSAL, True)
    p, _, total = _softmax(products, factor, visible)
    inverse = inverse_of(gl.where(total > 0, total, 1.0))
    largest = gl.max(gl.where(visible, dp, -float("inf")), 1)
    largest = gl.where(largest == -float("inf"), 0.0, largest)
    delta = largest + gl.sum(p * (dp - largest[:, None]), 1) * inverse
    p = p * inverse[:, None]
    p_low = p.to(dtype)
    scratch.index(0).slice(0, ROWS).slice(0, ROWS, dim=1).store(p_low)
    ds = (p * (dp - delta[:, None])).to(dtype)
    scratch.index(1).slice(0, ROWS).slice(0, ROWS, dim=1).store(ds)
    if WARPS > 1:
        fence_async_shared()
    gl.thread_barrier()
    p_t = scratch.index(0).slice(0, ROWS).slice(0, ROWS, dim=1).permute((1, 0))
    ds_t = scratch.index(1).slice(0, ROWS).slice(0, ROWS, dim=1).permute((1, 0))
    grad_v = _multiply(p_t, grad_out, BLOCK_D, WARPS)
    v.store(grad_v.to(dtype))
    grad_q = _multiply_weights(ds, k, BLOCK_D, WARPS)
    if WARPS > 1:
        gl.thread_barrier()
    grad_out.store((grad_q * scale).to(dtype))
    grad_k = _multiply(ds_t, q, BLOCK_D, WARPS)
    k.store((grad_k * scale).to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    _write(grad_v_desc, kv_end, num_keys, head, v_tile)
    _write(grad_q_desc, q_end, num_rows, head, grad_out_tile)
    _write(grad_k_desc, kv_end, num_keys, head, k_tile)
    if STAGES == 1:
        tma.store_wait(0)
        gl.thread_barrier()
        _fill_all(descs, tiles, bars, 0, following)


@gluon.jit(do_not_specialize=["num_items", "per_program"])
def backward_kernel(
    q_offsets_ptr, q_desc, k_desc, v_desc, grad_out_desc, grad_q_desc, grad_k_desc, grad_v_desc,
    kv_offsets_ptr, num_items, per_program, factor, scale,
    H: gl.constexpr, CAUSAL: gl.constexpr, LOW: gl.constexpr, BLOCK: gl.constexpr,
    BLOCK_D: gl.constexpr, SMALL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    if OVERLAP:
        let_next_begin()
    shape: gl.constexpr = [4 * STAGES] + q_desc.block_type.shape  # noqa: RUF005
    tiles = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    square: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK, 16, rank=2)
    scratch = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK, BLOCK], square)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    descs = (q_desc, k_desc, v_desc, grad_out_desc)
    outs = (grad_q_desc, grad_k_desc, grad_v_desc)
    factor = gl.maximum(factor, 1e-30)  # with which what is hidden gets no weight
    n = gl.program_id(0) * per_program
    end = gl.minimum(n + per_program, num_items)
    turn = n * 0
    place = _locate(n, end, q_offsets_ptr, kv_offsets_ptr, H, LOW, BLOCK, True)
    fence_async_shared()
    gl.thread_barrier()
    _fill_all(descs, tiles, bars, turn, place)
    while n < end:
        n += 1
        following = _locate(n, end, q_offsets_ptr, kv_offsets_ptr, H, LOW, BLOCK, True)
        if place[5]:
            if SMALL and gl.maximum(place[1], place[3]) <= BLOCK // 2:
                _differentiate(
                    descs, outs, tiles, scratch, bars, place, following, turn, factor, scale,
                    CAUSAL, BLOCK // 2, BLOCK_D, STAGES, WARPS,
                )
            else:
                _differentiate(
                    descs, outs, tiles, scratch, bars, place, following, turn, factor, scale,
                    CAUSAL, BLOCK, BLOCK_D, STAGES, WARPS,
                )
            turn += 1
        else:
            tma.store_wait(0)
            gl.thread_barrier()
            _fill_all(descs, tiles, bars, turn % STAGES, following)
        place = following
    tma.store_wait(0)
    if OVERLAP:
        wait_for_last_kernel()


_forward = {}
_backward = {}


def _launcher(table, kernel, dtype):
    if dtype not in table:
        table[dtype] = Launcher(kernel)
    return table[dtype]


def forward(q, k, v, out, stats, q_offsets, kv_offsets, factor, causal, width,
            low=0, block=32, small=True, per_program=4, maxnreg=None):
    num_items = (q_offsets.numel() - 1) * q.shape[1]
    per_program = min(per_program, num_items)
    warps = 1 if block <= 32 else 4
    constants = {
        "H": q.shape[1], "HK": k.shape[1], "CAUSAL": causal, "LOW": low, "BLOCK": block,
        "BLOCK_D": width, "SMALL": small and block == 32, "WARPS": warps, "num_warps": warps,
        **overlap_options(launches_overlap(q.device)),
    }
    if maxnreg:
        constants["maxnreg"] = maxnreg
    _launcher(_forward, forward_kernel, q.dtype)(
        (triton.cdiv(num_items, per_program),),
        (stats, *(_jagged_rows(x, block, width) for x in (q, k, v, out)), q_offsets, kv_offsets,
         stats[0].numel(), num_items, per_program, factor),
        constants,
    )


def backward(grad_out, q, k, v, grad_q, grad_k, grad_v, q_offsets, kv_offsets, factor, scale,
             causal, width, low=0, block=32, small=True, stages=2, per_program=4, maxnreg=None):
    assert q.shape[1] == k.shape[1]
    num_items = (q_offsets.numel() - 1) * q.shape[1]
    per_program = min(per_program, num_items)
    warps = 1 if block <= 32 else 4
    constants = {
        "H": q.shape[1], "CAUSAL": causal, "LOW": low, "BLOCK": block, "BLOCK_D": width,
        "SMALL": small and block == 32, "STAGES": stages, "WARPS": warps, "num_warps": warps,
        **overlap_options(launches_overlap(q.device)),
    }
    if maxnreg:
        constants["maxnreg"] = maxnreg
    inputs = (_jagged_rows(x, block, width) for x in (q, k, v, grad_out, grad_q, grad_k, grad_v))
    _launcher(_backward, backward_kernel, q.dtype)(
        (triton.cdiv(num_items, per_program),),
        (q_offsets, *inputs, kv_offsets, num_items, per_program, factor, scale),
        constants,
    )
