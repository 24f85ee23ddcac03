"""Backward of jagged flash attention on Hopper, in half precision, in Gluon.

The kernel is persistent: a program processes several tiles of keys, each with all queries that see
any of its keys. There are five products per pair of tiles. Warps are specialized:

- Two warpgroups compute dk and dv, each for half of the keys. They hold scores and their gradients
  ds transposed in registers, ``[keys, queries]``, as operands of the products with do and q.
- A third warpgroup computes dq from ds in shared memory. At width 128 there are no registers for a
  third warpgroup: the other two compute half of the columns each, one tile of queries later, so
  that neither waits for the ds of the other.
- A producer warp loads rows.
- Three warps wait for semaphores, which order the sums of dq, and increment them: see
  ``hopper_dq_semaphores.py``. The order of the list ensures that earlier tiles of keys of a sample
  have started, and usually that semaphores are acquired before they are needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.gluon import (
    WG_ROWS,
    as_operand,
    store_fields,
    wait_for_last_kernel,
)
from torchrec_jagged_attn.ops.device.tile_list import FIELDS
from torchrec_jagged_attn.ops.device.tma import (
    Descriptor,
    Ring,
    commit,
    copy_out,
    fill,
    jagged_rows,
    make_barriers,
    make_ring,
    read,
    release,
    rows,
    wait_empty,
    wait_full,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.hopper_dq_semaphores import (
    TILES,
    DqAccumulator,
    KeyTile,
    KeyTileQueue,
    add_slice,
    next_tile,
    query_tiles,
    release_semaphores,
    wait_semaphores,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.hopper_forward import (
    element_draws,
    load_distance_bias,
    load_dropout,
)
from torchrec_jagged_attn.ops.flash_attention.kernels.hopper_prepare import BLOCK_M
from torchrec_jagged_attn.ops.flash_attention.kernels.records import (
    Constants,
    Gradients,
    Inputs,
    Prepared,
    Samples,
)
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options

BLOCK_N = 128  # keys of a tile
DS_STAGES = gl.constexpr(2)  # tiles of ds in shared memory
SEMAPHORE_STAGES = gl.constexpr(4)  # number of semaphores that are acquired in advance


class Descriptors(NamedTuple):
    """Descriptors of the inputs; ``stats`` are the ``row_stats`` of ``hopper_prepare.py``."""

    q: Any
    k: Any
    v: Any
    grad_out: Any
    stats: Any


class Rings(NamedTuple):
    """Ring buffers of the inputs; ``stats`` arrive at the barriers of ``q``."""

    q: Any
    stats: Any
    k: Any
    v: Any
    grad_out: Any


class Scalars(NamedTuple):
    """Parameters of the scores and of their gradients."""

    by_distance_ptr: Any  # see distance_bias.py
    max_distance: Any
    dropout_ptr: Any  # see dropout.py
    window: Any  # maximum number of keys that a query attends to, or ``None``
    factor: Any  # scale · log2(e)
    scale: Any


class Keys(NamedTuple):
    """The half of a tile of keys of one warpgroup. Masks are by key, ``[WG_ROWS, 1]``."""

    k: Any
    v: Any
    tile: Any  # all keys of the tile
    numbers: Any  # rows of the keys
    in_sample: Any  # whether the key is in the sample
    low: Any  # first query that sees the key if causal


@gluon.jit
def _load(inputs, rings, queue, samples, window, C: gl.constexpr):
    """Producer warp: iterate over the list of tiles of keys and load rows."""
    tiles_ptr = samples.tiles
    if C.OVERLAP:
        wait_for_last_kernel()
    num_work = gl.load(tiles_ptr).to(gl.int32) * C.HK
    # Running programs draw tiles from a counter, so that no program waits for a semaphore of one
    # that has not started. Results do not depend on which program computes a tile.
    work = gl.atomic_add(tiles_ptr + 1, 1).to(gl.int32)
    n = work * 0
    step = work * 0
    while work < num_work:
        kv_head = work % C.HK
        tile_ptr = tiles_ptr + (1 + work // C.HK) * FIELDS
        sample = gl.load(tile_ptr)
        row = gl.load(tile_ptr + 1).to(gl.int32)
        count = gl.load(tile_ptr + 2).to(gl.int32)
        base = gl.load(tile_ptr + 3).to(gl.int32)
        num_rows = gl.load(tile_ptr + 4).to(gl.int32)
        first_key = gl.load(samples.kv_offsets + sample).to(gl.int32)
        number = (row - first_key) // C.BLOCK_N
        q_tile = base // C.BLOCK_M + sample.to(gl.int32)
        accum_tile = base // C.BLOCK_M + gl.minimum(sample.to(gl.int32), first_key // C.BLOCK_N)
        tile = KeyTile(row, count, base, num_rows, kv_head, number, q_tile, accum_tile)
        wait_empty(queue, step)
        store_fields(queue.fields, step, tile, TILES)
        commit(queue, step)
        wait_empty(rings.k, step)
        fill(rings.k, step, inputs.k, row + count, count, kv_head)
        first, end = query_tiles(tile, window, C)
        is_new = gl.to_tensor(True)
        for member in range(C.H // C.HK):
            head = kv_head * (C.H // C.HK) + member
            for m in range(first, end):
                q_end, remaining = base + num_rows, num_rows - m * C.BLOCK_M
                wait_empty(rings.q, n)
                fill(rings.q, n, inputs.q, q_end, remaining, head, inputs.stats.block_type.nbytes)
                stage = n % rings.stats.shape[0]
                tma.async_copy_global_to_shared(
                    inputs.stats,
                    [(q_tile + m) * C.H + head, 0],
                    rings.q.full.index(stage),
                    rings.stats.index(stage),
                )
                if is_new:
                    wait_empty(rings.v, step)
                    fill(rings.v, step, inputs.v, row + count, count, kv_head)
                    is_new = gl.to_tensor(False)
                wait_empty(rings.grad_out, n)
                fill(rings.grad_out, n, inputs.grad_out, q_end, remaining, head)
                n += 1
        if is_new:
            wait_empty(rings.v, step)
            fill(rings.v, step, inputs.v, row + count, count, kv_head)
        step += 1
        work = gl.atomic_add(tiles_ptr + 1, 1).to(gl.int32)
    wait_empty(queue, step)
    store_fields(queue.fields, step, (work, work, work, work, -1, work, work, work), TILES)
    commit(queue, step)


@gluon.jit
def _multiply_ds(ds_ring, n, k, zeros):
    """Issue the product of the ``n``-th tile of ds and the keys ``k``."""
    ds = ds_ring.tiles.index(n % DS_STAGES).permute((1, 0))
    return warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(
    acc_k, acc_v, n, keys, rings, ds_ring, accum, tile, head, bounds, scalars, C: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Add the terms of tiles ``first`` to ``end - 1`` of queries to dk and dv of a warpgroup.

    Tiles from ``unmasked_begin`` to ``unmasked_end - 1`` see all keys of the warpgroup and are not
    masked. They have no separate loop: ptxas 12.8 miscompiles the addresses of products in two
    loops. The factor of dropout is not in the terms of dv.
    """
    first, unmasked_begin, unmasked_end, end = bounds
    by_distance_ptr, max_distance, dropout_ptr, window, factor, scale = scalars
    threshold, dropout_factor = load_dropout(dropout_ptr)
    k, v = keys.k, keys.v
    BLOCK_M: gl.constexpr = C.BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    by_query: gl.constexpr = gl.SliceLayout(0, layout)
    dtype: gl.constexpr = k.dtype
    zero_ptr = by_distance_ptr + (head.to(gl.int64) * (2 * max_distance) + max_distance)
    diagonal = tile.num_rows - tile.remaining + WG * WG_ROWS  # query of the warpgroup's first key
    zeros = gl.zeros([WG_ROWS, BLOCK_M], gl.float32, layout)
    if not C.DQ_WARPGROUP:
        k_slice = keys.tile.slice(WG * BLOCK_M, BLOCK_M, dim=1)
    for m in range(first, end):
        q = read(rings.q, n)
        if not C.DQ_WARPGROUP:  # dq of the previous tile of queries, whose ds is complete
            if m > first:
                wait_full(ds_ring, n - 1)
            dq = _multiply_ds(ds_ring, n + (DS_STAGES - 1), k_slice, zeros)
        products = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if not C.DQ_WARPGROUP:
            dq = warpgroup_mma_wait(1, deps=(dq,))
            if m > first:
                release(ds_ring, n - 1)
                add_slice(accum, dq, m - 1, n - 1, tile, head, scale, C, WG)
        if C.DQ_WARPGROUP:
            grad_out = read(rings.grad_out, n)
            dp = warpgroup_mma(v, grad_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
        stat = rings.stats.index(n % rings.stats.shape[0])
        lse = stat.slice(0, BLOCK_M, dim=1).load(layout)
        if C.BY_DISTANCE:  # rows beyond the sample keep an infinite log-sum-exp
            score = load_distance_bias(zero_ptr, diagonal - m * BLOCK_M, zeros)
            lse = gl.where(lse < float("inf"), lse - score, lse)
        products = warpgroup_mma_wait(1 if C.DQ_WARPGROUP else 0, deps=(products,))
        p = gl.exp2(products * factor - lse)  # [keys, queries]
        is_masked = m < unmasked_begin
        if window is not None:
            is_masked = is_masked | (m >= unmasked_end)
        if is_masked:
            visible = keys.in_sample
            if C.CAUSAL:
                i = m * BLOCK_M + gl.arange(0, BLOCK_M, by_query)
                visible = visible & (i[None, :] >= keys.low)
                if window is not None:
                    visible = visible & (i[None, :] - keys.low < window)
            p = gl.where(visible, p, 0.0)
        if dropout_ptr is not None:  # the weights that are dropped become negative
            draws = stat.slice(2 * BLOCK_M, BLOCK_M, dim=1).load(layout)
            bits = element_draws(draws.to(gl.uint32, bitcast=True), keys.numbers)
            p = gl.where(bits < threshold, -p, p)
        if not C.DQ_WARPGROUP:
            p = p.to(dtype)  # fp32 would need too many registers
            grad_out = read(rings.grad_out, n)
            dp = warpgroup_mma(v, grad_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
        p_operand = as_operand(p if dropout_ptr is None else gl.where(p > 0, p, 0.0), dtype)
        acc_v = warpgroup_mma(p_operand, grad_out, acc_v, is_async=True)
        delta = stat.slice(BLOCK_M, BLOCK_M, dim=1).load(layout)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        p = p.to(gl.float32)
        if dropout_ptr is not None:
            dp = gl.where(p > 0, dp * dropout_factor, 0.0)
            p = gl.maximum(p, -p)
        ds = (p * (dp - delta)).to(dtype)
        wait_empty(ds_ring, n)
        ds_ring.tiles.index(n % DS_STAGES).slice(WG * WG_ROWS, WG_ROWS).store(ds)
        fence_async_shared()
        commit(ds_ring, n)
        ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, layout, 2))
        acc_k = warpgroup_mma(ds_operand, q, acc_k, is_async=True)
        acc_v, p_operand = warpgroup_mma_wait(1, deps=(acc_v, p_operand))
        release(rings.grad_out, n)
        acc_k, ds_operand = warpgroup_mma_wait(0, deps=(acc_k, ds_operand))
        release(rings.q, n)
        n += 1
    if (not C.DQ_WARPGROUP) and first < end:
        wait_full(ds_ring, n - 1)
        dq = _multiply_ds(ds_ring, n - 1, k_slice, zeros)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        release(ds_ring, n - 1)
        add_slice(accum, dq, end - 1, n - 1, tile, head, scale, C, WG)
    return acc_k, acc_v, n


@gluon.jit
def _store(outs, desc, value, end, remaining, head, WG: gl.constexpr):
    """Store the rows ``value`` of a warpgroup."""
    tma.store_wait(0)
    out = outs.index(WG)
    out.reshape(value.shape).store(value.to(outs.dtype))
    fence_async_shared()
    copy_out(desc, end, remaining, head, out)


@gluon.jit
def _grad_of_keys(operands, scalars, C: gl.constexpr, WG: gl.constexpr):
    """Consumer warpgroup: compute dk and dv of its half of each tile of keys."""
    grad_k_desc, grad_v_desc, rings, ds_ring, accum, outs, queue = operands
    window, scale = scalars.window, scalars.scale
    _, dropout_factor = load_dropout(scalars.dropout_ptr)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_M, 16])
    by_width: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    skipped: gl.constexpr = WG * WG_ROWS
    r = (skipped + gl.arange(0, WG_ROWS, gl.SliceLayout(1, layout)))[:, None]
    step = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = next_tile(queue, step)
    while tile.kv_head >= 0:
        row, count, num_rows = tile.row, tile.remaining, tile.num_rows
        first, end = query_tiles(tile, window, C)
        unmasked_begin = first
        if C.CAUSAL:
            last_key = num_rows - count + (skipped + WG_ROWS - 1)
            unmasked_begin = gl.maximum(gl.cdiv(gl.maximum(last_key, 0), C.BLOCK_M), first)
        if count < skipped + WG_ROWS:
            unmasked_begin = end
        unmasked_begin = gl.minimum(unmasked_begin, end)
        unmasked_end = end
        if window is not None:
            first_key = num_rows - count + skipped
            unmasked_end = (first_key + gl.minimum(count - skipped, window)) // C.BLOCK_M
        acc_k = gl.zeros([WG_ROWS, C.BLOCK_D], gl.float32, by_width)
        acc_v = gl.zeros([WG_ROWS, C.BLOCK_D], gl.float32, by_width)
        wait_full(rings.k, step)
        wait_full(rings.v, step)
        k_tile = rows(rings.k, step)
        keys = Keys(
            k_tile.slice(skipped, WG_ROWS), rows(rings.v, step).slice(skipped, WG_ROWS), k_tile,
            row + r, r < count, r + (num_rows - count),
        )  # fmt: skip
        bounds = first, unmasked_begin, unmasked_end, end
        for member in range(C.H // C.HK):
            head = tile.kv_head * (C.H // C.HK) + member
            acc_k, acc_v, n = _add_queries(
                acc_k, acc_v, n, keys, rings, ds_ring, accum, tile, head, bounds, scalars, C, WG
            )
        release(rings.k, step)
        release(rings.v, step)
        if count > skipped:
            end, remaining, kv_head = row + count, count - skipped, tile.kv_head
            _store(outs, grad_v_desc, acc_v * dropout_factor, end, remaining, kv_head, WG)
            _store(outs, grad_k_desc, acc_k * scale, end, remaining, kv_head, WG)
        step += 1
        tile = next_tile(queue, step)
    tma.store_wait(0)


@gluon.jit
def _grad_of_queries(accum, keys, ds_ring, queue, window, scale, C: gl.constexpr):
    """Consumer warpgroup: compute the terms of dq of each tile of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    zeros = gl.zeros([C.BLOCK_M, C.BLOCK_D], gl.float32, layout)
    step = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = next_tile(queue, step)
    while tile.kv_head >= 0:
        first, end = query_tiles(tile, window, C)
        k = read(keys, step)
        for member in range(C.H // C.HK):
            head = tile.kv_head * (C.H // C.HK) + member
            for m in range(first, end):
                wait_full(ds_ring, n)
                acc = _multiply_ds(ds_ring, n, k, zeros)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(ds_ring, n)
                add_slice(accum, acc, m, n, tile, head, scale, C, 0)
                n += 1
        release(keys, step)
        step += 1
        tile = next_tile(queue, step)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_distance", "window"])
def hopper_backward_kernel(
    accum_ptr,  # [tiles of queries that see several tiles of keys, H, BLOCK_M · BLOCK_D] fp32
    semaphores_ptr,  # [tiles of queries, H] int32, zeros
    q_desc,  # of [ΣLq, H, D], see jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    grad_out_desc,  # of [ΣLq, H, Dv]
    stats_desc,  # of Prepared.row_stats
    grad_q_desc,  # of [ΣLq, H, D]
    grad_k_desc,  # of [ΣLk, Hk, D]
    grad_v_desc,  # of [ΣLk, Hk, Dv]
    by_distance_ptr,  # [H, 2 · max_distance] fp32, see distance_bias.py; read if BY_DISTANCE
    dropout_ptr,  # [2], see dropout.py, or None
    samples,  # Samples, whose tiles are of keys
    max_distance,
    window,  # or None
    factor,  # scale · log2(e), rounded once
    scale,
    C: gl.constexpr,  # HopperConstants
):
    """Compute the gradients of the tiles of keys in the list, over all queries of their samples."""
    SLICES: gl.constexpr = C.BLOCK_D // 64
    queries = make_ring(q_desc, C.STAGES)
    grads = make_ring(grad_out_desc, C.STAGES)
    keys = make_ring(k_desc, C.KV_STAGES, 3 if C.DQ_WARPGROUP else 2)
    values = make_ring(v_desc, C.KV_STAGES)
    stats_shape: gl.constexpr = [C.STAGES] + stats_desc.block_type.shape  # noqa: RUF005
    stats = gl.allocate_shared_memory(gl.float32, stats_shape, stats_desc.layout)
    queue_full, queue_empty = make_barriers(TILES, 1, 6 if C.DQ_WARPGROUP else 5)
    fields = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds_full, ds_empty = make_barriers(DS_STAGES, 2, SLICES)
    ds = gl.allocate_shared_memory(q_desc.dtype, [DS_STAGES, C.BLOCK_N, C.BLOCK_M], swizzled)
    acquired = make_barriers(SEMAPHORE_STAGES, 1, SLICES)
    added = make_barriers(SEMAPHORE_STAGES, SLICES, 1)
    grad_shape: gl.constexpr = [SLICES] + grad_q_desc.block_type.shape  # noqa: RUF005
    grad_tile = gl.allocate_shared_memory(grad_q_desc.dtype, grad_shape, grad_q_desc.layout)
    shape: gl.constexpr = [2] + grad_k_desc.block_type.shape  # noqa: RUF005
    outs = gl.allocate_shared_memory(grad_k_desc.dtype, shape, grad_k_desc.layout)
    inputs = Descriptors(q_desc, k_desc, v_desc, grad_out_desc, stats_desc)
    rings = Rings(queries, stats, keys, values, grads)
    queue = KeyTileQueue(queue_full, queue_empty, fields)
    ds_ring = Ring(ds_full, ds_empty, ds)
    accum = DqAccumulator(accum_ptr, acquired, added, grad_tile, grad_q_desc, window)
    key_operands = (grad_k_desc, grad_v_desc, rings, ds_ring, accum, outs, queue)
    scalars = Scalars(by_distance_ptr, max_distance, dropout_ptr, window, factor, scale)
    if C.DQ_WARPGROUP:
        gl.warp_specialize(
            [
                (_grad_of_keys, (key_operands, scalars, C, 0)),
                (_grad_of_keys, (key_operands, scalars, C, 1)),
                (_grad_of_queries, (accum, keys, ds_ring, queue, window, scale, C)),
                (_load, (inputs, rings, queue, samples, window, C)),
                (wait_semaphores, (semaphores_ptr, acquired, queue, window, C)),
                (release_semaphores, (semaphores_ptr, added, queue, window, C, 0)),
                (release_semaphores, (semaphores_ptr, added, queue, window, C, 1)),
            ],
            [4, 4, 1, 1, 1, 1],
            [208, 64, 32, 32, 32, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_grad_of_keys, (key_operands, scalars, C, 0)),
                (_grad_of_keys, (key_operands, scalars, C, 1)),
                (_load, (inputs, rings, queue, samples, window, C)),
                (wait_semaphores, (semaphores_ptr, acquired, queue, window, C)),
                (release_semaphores, (semaphores_ptr, added, queue, window, C, 0)),
                (release_semaphores, (semaphores_ptr, added, queue, window, C, 1)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )


_launch = Launcher(hopper_backward_kernel)
_FLAT = gl.NVMMASharedLayout(0, 32, rank=2)


def backward(
    inputs: Inputs,
    by_distance: Tensor | None,
    dropout: Tensor | None,
    grads: Gradients,
    prepared: Prepared,
    samples: Samples,
    window: int | None,
    factor: float,
    scale: float,
    constants: Constants,
) -> None:
    """Compute the gradients of the samples in the list of tiles of keys.

    ``prepared`` is the result of :func:`hopper_prepare.prepare`.
    """
    (q, k, v), (row_stats, semaphores) = inputs, prepared
    H, HK, width = constants.H, constants.HK, constants.hopper_width
    # Samples with one tile of keys need no accumulator.
    max_tiles = q.shape[0] // BLOCK_M + min(samples.kv_offsets.numel() - 1, k.shape[0] // BLOCK_N)
    accum = q.new_empty(max_tiles * H, BLOCK_M * width, dtype=torch.float32)
    descriptors = (
        jagged_rows(q, BLOCK_M, width),
        jagged_rows(k, BLOCK_N, width),
        jagged_rows(v, BLOCK_N, width),
        jagged_rows(grads.out, BLOCK_M, width),
        Descriptor(
            row_stats,
            list(row_stats.shape),
            list(row_stats.stride()),
            [1, row_stats.shape[1]],
            _FLAT,
        ),
        jagged_rows(grads.q, BLOCK_M, 64),
        jagged_rows(grads.k, WG_ROWS.value, width),
        jagged_rows(grads.v, WG_ROWS.value, width),
    )
    max_distance = 0 if by_distance is None else by_distance.shape[1] // 2
    bias_or_placeholder = accum if by_distance is None else by_distance
    num_work = (samples.tiles.shape[0] - 1) * HK
    is_narrow = width == 64
    _launch(
        (min(num_work, devices.hopper_multiprocessors(q.device)),),
        (
            accum, semaphores, *descriptors, bias_or_placeholder, dropout, samples, max_distance,
            window, factor, scale,
        ),
        constants.hopper_launch_arguments(
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            KV_STAGES=2 if is_narrow else 1,
            STAGES=4 if is_narrow else 2,
            DQ_WARPGROUP=is_narrow,
            num_warps=4,
            **overlap_options(devices.launches_overlap(q.device)),
        ),
    )  # fmt: skip
