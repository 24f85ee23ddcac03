"""Jagged flash attention for short samples on Hopper, in half precision without biases, in Gluon.

A program processes several items, pairs of a sample and a head. It computes all pairs of rows of an
item in one tile, as in ``general_short.py``, while the tensor memory accelerator loads the rows of
the next item. The kernels are memory-bound: forward reads q, k, v and writes out; backward reads
q, k, v, grad_out and writes three gradients, and recomputes the softmax statistics. One launch
computes samples of at most 32 rows, another samples of 33 to 64 rows:

    at most 32 rows    one warp, ``mma`` products; half a tile for at most 16 rows
    33 to 64 rows      four warps, ``wgmma`` products

Rows have 64 columns in shared memory: with 128, a single warp would have too few registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.gluon import (
    as_operand,
    launch_dependents,
    products_by_warp,
    products_by_warpgroup,
    thread_barrier,
    wait_for_last_kernel,
)
from torchrec_jagged_attn.ops.device.tma import as_rows, copy_in, copy_out, jagged_rows
from torchrec_jagged_attn.ops.flash_attention.arguments import FlashOutputs
from torchrec_jagged_attn.ops.flash_attention.kernels import tiles
from torchrec_jagged_attn.ops.flash_attention.kernels.records import (
    Constants,
    Gradients,
    Inputs,
    Samples,
)
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options

MAX_ROWS = 64  # maximum rows of a short sample, on both sides
WIDTH = 64  # columns of rows in shared memory

store_softmax_stats = gluon.jit(tiles.store_softmax_stats.fn)
window_begin = gluon.jit(tiles.window_begin.fn)


class Item(NamedTuple):
    """A head of a sample."""

    q_end: Any  # end of the sample's queries
    num_rows: Any  # number of queries
    kv_end: Any  # end of the sample's keys
    num_keys: Any  # number of keys
    head: Any
    active: Any  # whether this launch computes the item


@gluon.jit
def _locate(item, end, samples, C: gl.constexpr, BACKWARD: gl.constexpr):
    """Return the :class:`Item` of index ``item``.

    It is active if ``item`` is below ``end``, the size of the sample is within the limits of this
    launch, and the sample has queries or, if BACKWARD, queries or keys.
    """
    index = gl.minimum(item, end - 1)
    sample = index // C.H
    head = index - sample * C.H
    q_row = gl.load(samples.q_offsets + sample).to(gl.int32)
    q_end = gl.load(samples.q_offsets + (sample + 1)).to(gl.int32)
    kv_row = gl.load(samples.kv_offsets + sample).to(gl.int32)
    kv_end = gl.load(samples.kv_offsets + (sample + 1)).to(gl.int32)
    num_rows, num_keys = q_end - q_row, kv_end - kv_row
    longest = gl.maximum(num_rows, num_keys)
    active = (item < end) & (longest <= C.BLOCK_M)
    if not C.HALVES:
        active = active & (longest > C.BLOCK_M // 2)
    active = active & ((longest if BACKWARD else num_rows) > 0)
    return Item(q_end, num_rows, kv_end, num_keys, head, active)


@gluon.jit
def _rows(tile, ROWS: gl.constexpr):
    """Return the first rows of a tile, ``[ROWS, width]``."""
    return as_rows(tile).slice(0, ROWS)


@gluon.constexpr_function
def _sums_layout(columns, warps):
    """Return the layout of a product of one warp or of a warpgroup."""
    return products_by_warp(warps) if warps == 1 else products_by_warpgroup(columns, warps)


@gluon.jit
def _multiply(a, b):
    """Return ``a @ b`` of tiles in shared memory."""
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = b.shape[1]
    layout: gl.constexpr = _sums_layout(N, gl.num_warps())
    zeros = gl.zeros([M, N], gl.float32, layout)
    if gl.num_warps() == 1:
        x = a.load(gl.DotOperandLayout(0, layout, 2))
        y = b.load(gl.DotOperandLayout(1, layout, 2))
        return mma_v2(x, y, zeros)
    else:
        product = warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)
        return warpgroup_mma_wait(0, deps=(product,))


@gluon.jit
def _multiply_weights(weights, b):
    """Return ``weights @ b`` of weights in registers and a tile in shared memory."""
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = b.shape[1]
    layout: gl.constexpr = _sums_layout(N, gl.num_warps())
    zeros = gl.zeros([M, N], gl.float32, layout)
    x = as_operand(weights, b.dtype)
    if gl.num_warps() == 1:
        return mma_v2(x, b.load(gl.DotOperandLayout(1, layout, 2)), zeros)
    else:
        product = warpgroup_mma(x, b, zeros, use_acc=False, is_async=True)
        product, x = warpgroup_mma_wait(0, deps=(product, x))
        return product


@gluon.jit
def _softmax(products, factor, visible):
    """Return ``(weights, maximum, total)``; ``weights`` are not divided by ``total``.

    As :func:`tiles.online_softmax` for a first tile. ``factor`` must not be zero: the masked
    products, ``-inf``, would become NaN.
    """
    products = gl.where(visible, products, -float("inf"))
    largest = gl.max(products, 1)
    has_keys = largest > -float("inf")
    maximum = gl.where(has_keys, largest * factor, largest)
    weights = gl.exp2(products * factor - gl.where(has_keys, maximum, 0.0)[:, None])
    return weights, maximum, gl.sum(weights, 1)


@gluon.jit
def _visible(products, num_rows, num_keys, window, CAUSAL: gl.constexpr, BACKWARD: gl.constexpr):
    """Return the mask of visible keys of each query; if BACKWARD, queries beyond the sample see
    none.
    """
    ROWS: gl.constexpr = products.shape[0]
    j = gl.arange(0, ROWS, gl.SliceLayout(0, products.type.layout))[None, :]
    high = num_keys
    if CAUSAL or BACKWARD:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, products.type.layout))
        if CAUSAL:
            high = gl.minimum(num_keys, i + (num_keys - num_rows + 1))
        if BACKWARD:
            high = gl.where(i < num_rows, high, 0)
        high = high[:, None]
    visible = j < high
    if window is not None:
        low = window_begin(i + (num_keys - num_rows + 1), window)
        visible = visible & (j >= low[:, None])
    return visible


@gluon.jit
def _read_queries_and_keys(q_desc, k_desc, tiles, barriers, item, C: gl.constexpr):
    """Start to copy the queries and keys of an item to shared memory, if it is active."""
    q_end, num_rows, kv_end, num_keys, head, active = item
    if active:
        barrier = barriers.index(0)
        mbarrier.expect(barrier, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
        copy_in(q_desc, q_end, num_rows, head, barrier, tiles.index(0))
        copy_in(k_desc, kv_end, num_keys, head // (C.H // C.HK), barrier, tiles.index(1))


@gluon.jit
def _read_values(v_desc, tiles, barriers, item, C: gl.constexpr):
    """Start to copy the values of an item to shared memory, if it is active."""
    _, _, kv_end, num_keys, head, active = item
    if active:
        barrier = barriers.index(1)
        mbarrier.expect(barrier, v_desc.block_type.nbytes)
        copy_in(v_desc, kv_end, num_keys, head // (C.H // C.HK), barrier, tiles.index(2))


@gluon.jit
def _attend(operands, item, following, step, C: gl.constexpr, ROWS: gl.constexpr):
    """Compute the output of an active item of at most ROWS rows, the ``step``-th of a program.

    The rows of the ``following`` item are copied as soon as buffers are free.
    """
    q_desc, k_desc, v_desc, out_desc, stats_ptr, tiles, out, barriers, numbers = operands
    num_stats, window, factor = numbers
    q_end, num_rows, _, num_keys, head, _ = item
    mbarrier.wait(barriers.index(0), step & 1)
    q, k = _rows(tiles.index(0), ROWS), _rows(tiles.index(1), ROWS)
    products = _multiply(q, k.permute((1, 0)))
    thread_barrier()
    _read_queries_and_keys(q_desc, k_desc, tiles, barriers, following, C)
    visible = _visible(products, num_rows, num_keys, window, C.CAUSAL, False)
    p, maximum, total = _softmax(products, factor, visible)
    mbarrier.wait(barriers.index(1), step & 1)
    acc = _multiply_weights(p, _rows(tiles.index(2), ROWS))
    tma.store_wait(0)
    thread_barrier()
    _read_values(v_desc, tiles, barriers, following, C)
    inverse = 1.0 / gl.where(total > 0, total, 1.0)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))
    _rows(out, ROWS).store((acc * inverse[:, None]).to(out.dtype))
    fence_async_shared()
    copy_out(out_desc, q_end, num_rows, head, out)
    by_lane: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])  # each row once
    maximum, total = gl.convert_layout(maximum, by_lane), gl.convert_layout(total, by_lane)
    r = gl.arange(0, ROWS, by_lane)
    stat = ((q_end - num_rows).to(gl.int64) + r) * C.H + head
    store_softmax_stats(stats_ptr, num_stats, stat, r < num_rows, maximum, total, False)


@gluon.jit(do_not_specialize=["num_stats", "num_items", "window"])
def forward_kernel(
    stats_ptr,  # [2, ΣLq, H] fp32
    q_desc,  # of [ΣLq, H, D], see jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    out_desc,  # of [ΣLq, H, Dv]
    samples,  # Samples
    num_stats,
    num_items,  # B · H
    window,  # or None
    factor,  # scale · log2(e), rounded once
    C: gl.constexpr,  # HopperConstants; BLOCK_N is BLOCK_M
):
    """Compute samples of at most BLOCK_M rows and, unless HALVES, more than BLOCK_M / 2 rows."""
    if C.OVERLAP:
        launch_dependents()
    shape: gl.constexpr = [3] + q_desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    tiles = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    out = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(2):
        mbarrier.init(barriers.index(index), count=1)
    factor = gl.maximum(factor, 1e-30)  # see _softmax
    operands = (
        q_desc, k_desc, v_desc, out_desc, stats_ptr, tiles, out, barriers,
        (num_stats, window, factor),
    )  # fmt: skip
    n = gl.program_id(0) * C.ITEMS
    end = gl.minimum(n + C.ITEMS, num_items)
    step = n * 0
    item = _locate(n, end, samples, C, False)
    fence_async_shared()
    thread_barrier()
    _read_queries_and_keys(q_desc, k_desc, tiles, barriers, item, C)
    _read_values(v_desc, tiles, barriers, item, C)
    while n < end:
        n += 1
        following = _locate(n, end, samples, C, False)
        if item.active:
            if C.HALVES and gl.maximum(item.num_rows, item.num_keys) <= C.BLOCK_M // 2:
                _attend(operands, item, following, step, C, C.BLOCK_M // 2)
            else:
                _attend(operands, item, following, step, C, C.BLOCK_M)
            step += 1
        else:
            _read_queries_and_keys(q_desc, k_desc, tiles, barriers, following, C)
            _read_values(v_desc, tiles, barriers, following, C)
        item = following
    tma.store_wait(0)
    if C.OVERLAP:
        wait_for_last_kernel()


@gluon.jit
def _read_all(inputs, tiles, barriers, stage, item, C: gl.constexpr):
    """Start to copy the rows of an item to the tiles of a stage, if it is active.

    If one side is empty, rows of the other side are read as zeros: their gradients are zeros even
    if the rows are infinite.
    """
    q_desc, k_desc, v_desc, grad_out_desc = inputs
    kv_head = item.head // (C.H // C.HK)
    q_end, num_rows, kv_end, num_keys, head, active = item
    num_rows, num_keys = gl.where(num_keys > 0, num_rows, 0), gl.where(num_rows > 0, num_keys, 0)
    if active:
        barrier = barriers.index(stage)
        mbarrier.expect(barrier, 4 * q_desc.block_type.nbytes)
        copy_in(q_desc, q_end, num_rows, head, barrier, tiles.index(stage * 4))
        copy_in(k_desc, kv_end, num_keys, kv_head, barrier, tiles.index(stage * 4 + 1))
        copy_in(v_desc, kv_end, num_keys, kv_head, barrier, tiles.index(stage * 4 + 2))
        copy_in(grad_out_desc, q_end, num_rows, head, barrier, tiles.index(stage * 4 + 3))


@gluon.jit
def _add_heads(sums, grad, member, MEMBERS: gl.constexpr):
    """Return ``grad`` plus the sum over previous heads of the same keys, which ``sums`` stores."""
    if MEMBERS > 1:
        sums = sums.slice(0, grad.shape[0])
        if member > 0:
            grad += sums.load(grad.type.layout)
        sums.store(grad)
    return grad


@gluon.jit
def _differentiate(operands, item, following, step, C: gl.constexpr, ROWS: gl.constexpr):
    """Compute the gradients of an active item of at most ROWS rows, the ``step``-th of a program.

    Gradients overwrite the rows in shared memory, and are copied out from there.
    """
    inputs, grads, tiles, weights, sums, barriers, window, factor, scale = operands
    grad_q_desc, grad_k_desc, grad_v_desc = grads
    q_end, num_rows, kv_end, num_keys, head, _ = item
    MEMBERS: gl.constexpr = C.H // C.HK
    stage = step % C.STAGES
    mbarrier.wait(barriers.index(stage), (step // C.STAGES) & 1)
    q_tile, k_tile = tiles.index(stage * 4), tiles.index(stage * 4 + 1)
    v_tile, grad_out_tile = tiles.index(stage * 4 + 2), tiles.index(stage * 4 + 3)
    q, k = _rows(q_tile, ROWS), _rows(k_tile, ROWS)
    v, grad_out = _rows(v_tile, ROWS), _rows(grad_out_tile, ROWS)
    products = _multiply(q, k.permute((1, 0)))
    dp = _multiply(grad_out, v.permute((1, 0)))
    if C.STAGES == 2:
        tma.store_wait(0)
        thread_barrier()
        _read_all(inputs, tiles, barriers, (step + 1) % C.STAGES, following, C)
    visible = _visible(products, num_rows, num_keys, window, C.CAUSAL, True)
    p, _, total = _softmax(products, factor, visible)
    inverse = 1.0 / gl.where(total != 0, total, 1.0)
    # delta is computed relative to the largest dp: exact if a single key is visible.
    largest = gl.max(gl.where(visible, dp, -float("inf")), 1)
    largest = gl.where(largest == -float("inf"), 0.0, largest)
    delta = largest + gl.sum(p * (dp - largest[:, None]), 1) * inverse
    p = p * inverse[:, None]
    ds = (p * (dp - delta[:, None])).to(tiles.dtype)
    p_rows = weights.index(0).slice(0, ROWS).slice(0, ROWS, dim=1)
    ds_rows = weights.index(1).slice(0, ROWS).slice(0, ROWS, dim=1)
    p_rows.store(p.to(tiles.dtype))
    ds_rows.store(ds)
    if gl.num_warps() > 1:
        fence_async_shared()
    thread_barrier()
    member = head % MEMBERS
    grad_v = _multiply(p_rows.permute((1, 0)), grad_out)
    v.store(_add_heads(sums.index(0), grad_v, member, MEMBERS).to(tiles.dtype))
    grad_q = _multiply_weights(ds, k)
    if gl.num_warps() > 1:
        thread_barrier()
    grad_out.store((grad_q * scale).to(tiles.dtype))
    grad_k = _multiply(ds_rows.permute((1, 0)), q)
    k.store((_add_heads(sums.index(1), grad_k, member, MEMBERS) * scale).to(tiles.dtype))
    fence_async_shared()
    thread_barrier()
    copy_out(grad_q_desc, q_end, num_rows, head, grad_out_tile)
    if member == MEMBERS - 1:
        copy_out(grad_v_desc, kv_end, num_keys, head // MEMBERS, v_tile)
        copy_out(grad_k_desc, kv_end, num_keys, head // MEMBERS, k_tile)
    if C.STAGES == 1:
        tma.store_wait(0)
        thread_barrier()
        _read_all(inputs, tiles, barriers, 0, following, C)


@gluon.jit(do_not_specialize=["num_items", "window"])
def backward_kernel(
    samples,  # Samples
    q_desc,  # of [ΣLq, H, D], see jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    grad_out_desc,  # of [ΣLq, H, Dv]
    grad_q_desc,  # of [ΣLq, H, D]
    grad_k_desc,  # of [ΣLk, Hk, D]
    grad_v_desc,  # of [ΣLk, Hk, Dv]
    num_items,  # B · H
    window,  # or None
    factor,  # scale · log2(e), rounded once
    scale,
    C: gl.constexpr,  # HopperConstants; BLOCK_N is BLOCK_M
):
    """Compute gradients of samples of at most BLOCK_M and, unless HALVES, over BLOCK_M / 2 rows.

    A program computes all heads that share keys, one after the other.
    """
    if C.OVERLAP:
        launch_dependents()
    BLOCK: gl.constexpr = C.BLOCK_M
    shape: gl.constexpr = [4 * C.STAGES] + q_desc.block_type.shape  # noqa: RUF005
    tiles = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    square: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK, 16, rank=2)
    weights = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK, BLOCK], square)
    sums = weights  # a placeholder if no heads share keys
    if C.H > C.HK:
        swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
        sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK, C.BLOCK_D], swizzled)
    barriers = gl.allocate_shared_memory(gl.int64, [C.STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(C.STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    inputs = (q_desc, k_desc, v_desc, grad_out_desc)
    grads = (grad_q_desc, grad_k_desc, grad_v_desc)
    factor = gl.maximum(factor, 1e-30)  # see _softmax
    operands = (inputs, grads, tiles, weights, sums, barriers, window, factor, scale)
    n = gl.program_id(0) * C.ITEMS
    end = gl.minimum(n + C.ITEMS, num_items)
    step = n * 0
    item = _locate(n, end, samples, C, True)
    fence_async_shared()
    thread_barrier()
    _read_all(inputs, tiles, barriers, step, item, C)
    while n < end:
        n += 1
        following = _locate(n, end, samples, C, True)
        if item.active:
            if C.HALVES and gl.maximum(item.num_rows, item.num_keys) <= BLOCK // 2:
                _differentiate(operands, item, following, step, C, BLOCK // 2)
            else:
                _differentiate(operands, item, following, step, C, BLOCK)
            step += 1
        else:  # the buffers of this stage are free: their stores have completed
            _read_all(inputs, tiles, barriers, step % C.STAGES, following, C)
        item = following
    tma.store_wait(0)
    if C.OVERLAP:
        wait_for_last_kernel()


# Constants and launch options by the maximum rows of a sample, the fastest on an H200
_FORWARD = {
    64: {"HALVES": False, "ITEMS": 2, "num_warps": 4, "maxnreg": 80},
    32: {"HALVES": True, "ITEMS": 2, "num_warps": 1, "maxnreg": 152},
}
_BACKWARD = {
    64: {"HALVES": False, "ITEMS": 4, "STAGES": 1, "num_warps": 4},
    32: {"HALVES": True, "ITEMS": 4, "STAGES": 2, "num_warps": 1},
}
# With fewer rows per sample on average, the launch for longer samples has more items per program,
# since most are skipped.
SPARSE_MEAN_ROWS = 24
SPARSE_ITEMS = 16
_launch_forward = Launcher(forward_kernel)
_launch_backward = Launcher(backward_kernel)


def _sizes(direction: dict[int, dict], num_rows: int, num_samples: int) -> list[tuple[int, dict]]:
    """Return the items of ``direction``, with ITEMS for the mean number of rows per sample."""
    sizes = dict(direction)
    if num_rows < SPARSE_MEAN_ROWS * num_samples:
        sizes[MAX_ROWS] = sizes[MAX_ROWS] | {"ITEMS": SPARSE_ITEMS}
    return list(sizes.items())


def forward(
    inputs: Inputs,
    outputs: FlashOutputs,
    samples: Samples,
    window: int | None,
    factor: float,
    constants: Constants,
) -> None:
    """Compute the rows of ``outputs`` of samples of at most ``MAX_ROWS`` rows."""
    (q, k, _), (out, stats) = inputs, outputs
    num_samples = samples.q_offsets.numel() - 1
    num_items = num_samples * constants.H
    overlap = overlap_options(devices.launches_overlap(q.device))
    for block, options in _sizes(_FORWARD, max(q.shape[0], k.shape[0]), num_samples):
        if window is not None and block == MAX_ROWS:
            options = options | {"maxnreg": options["maxnreg"] + 16}  # for the mask of the window
        _launch_forward(
            (triton.cdiv(num_items, options["ITEMS"]),),
            (
                stats, *(jagged_rows(x, block, WIDTH) for x in (*inputs, out)), samples,
                stats[0].numel(), num_items, window, factor,
            ),
            constants.hopper_launch_arguments(BLOCK_M=block, BLOCK_N=block, **options, **overlap),
        )  # fmt: skip


def backward(
    inputs: Inputs,
    grads: Gradients,
    samples: Samples,
    window: int | None,
    factor: float,
    scale: float,
    constants: Constants,
) -> None:
    """Compute the gradients of samples of at most ``MAX_ROWS`` rows."""
    q, k, _ = inputs
    num_samples = samples.q_offsets.numel() - 1
    num_items = num_samples * constants.H
    members = constants.H // constants.HK  # heads that share keys
    overlap = overlap_options(devices.launches_overlap(q.device))
    for block, options in _sizes(_BACKWARD, max(q.shape[0], k.shape[0]), num_samples):
        items = triton.cdiv(options["ITEMS"], members) * members
        rows = (*inputs, grads.out, grads.q, grads.k, grads.v)
        _launch_backward(
            (triton.cdiv(num_items, items),),
            (
                samples,
                *(jagged_rows(x, block, WIDTH) for x in rows),
                num_items,
                window,
                factor,
                scale,
            ),
            constants.hopper_launch_arguments(
                BLOCK_M=block, BLOCK_N=block, **options | {"ITEMS": items}, **overlap
            ),
        )
