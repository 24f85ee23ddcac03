"""Forward of jagged flash attention on Hopper, in half precision, in Gluon.

The function and the number of FLOPs are as in ``general_forward.py``; the only supported bias is
``relative_bias`` (``distance_bias.py``). Without it and dropout, the kernel is bound by the tensor
cores.

As in FlashAttention-3, the kernel is persistent and warp-specialized: a program processes several
tiles of queries, a producer warp loads rows, and two consumer warpgroups compute attention for half
of the queries each. A warpgroup computes the scores of a tile of keys while it multiplies the
weights of the previous tile by its values. Tiles of keys that no query sees are not loaded.

The tensor memory accelerator clips its copies at the end of the sample: rows beyond are read as
zeros, and not written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from torchrec_jagged_attn.ops.device import dropout as dropout_masks
from torchrec_jagged_attn.ops.device.gluon import (
    WG_ROWS,
    as_operand,
    multiply_keys,
    next_tile,
    store_fields,
    wait_for_last_kernel,
)
from torchrec_jagged_attn.ops.device.tile_list import FIELDS
from torchrec_jagged_attn.ops.device.tma import (
    commit,
    copy_out,
    fill,
    jagged_rows,
    make_ring,
    read,
    release,
    rows,
    wait_empty,
    wait_full,
)
from torchrec_jagged_attn.ops.flash_attention.arguments import FlashOutputs
from torchrec_jagged_attn.ops.flash_attention.kernels import tiles
from torchrec_jagged_attn.ops.flash_attention.kernels.records import Constants, Inputs
from torchrec_jagged_attn.ops.launch import Launcher, overlap_options

BLOCK_M = 128  # queries of a tile
BLOCK_N = 128  # keys of a tile
STAGES = 2  # tiles of queries, of keys and of values in shared memory

online_softmax = gluon.jit(tiles.online_softmax.fn)
visible_pairs = gluon.jit(tiles.visible_pairs.fn)
store_softmax_stats = gluon.jit(tiles.store_softmax_stats.fn)
window_begin = gluon.jit(tiles.window_begin.fn)
query_draws = gluon.jit(dropout_masks.query_draws.fn)
element_draws = gluon.jit(dropout_masks.element_draws.fn)
load_dropout = gluon.jit(dropout_masks.load_dropout.fn)


class Rings(NamedTuple):
    """Ring buffers of the inputs, and ``fields`` of the tiles of ``q``, see ``next_tile``."""

    q: Any
    k: Any
    v: Any
    fields: Any


class Scores(NamedTuple):
    """Parameters of scores, masks and dropout."""

    factor: Any  # scale · log2(e)
    zero_ptr: Any  # pointer to the bias at distance 0 of the head, see ``distance_bias.py``
    diagonal: Any  # key on the diagonal of the warpgroup's first query, see ``QueryTile``
    high: Any  # end of the keys visible to each query, a scalar or [WG_ROWS, 1]
    window: Any  # maximum number of keys that a query attends to, or ``None``
    base: Any  # first key of the sample
    draws: Any  # [WG_ROWS, 1], random bits of the queries, see ``dropout.query_draws``
    dropout_ptr: Any  # see dropout.py
    threshold: Any  # see ``dropout.load_dropout``


@gluon.jit
def _last_keys(count, num_keys, C: gl.constexpr):
    """Return the begin of the last tile of keys that any query sees, at least 0."""
    any_end = num_keys
    if C.CAUSAL:
        any_end = gl.minimum(num_keys, num_keys - count + C.BLOCK_M)
    return gl.maximum(gl.cdiv(any_end, C.BLOCK_N) - 1, 0) * C.BLOCK_N


@gluon.jit
def _first_keys(count, num_keys, window, C: gl.constexpr):
    """Return the begin of the first tile of keys that any query sees."""
    first = num_keys * 0
    if window is not None:
        first = window_begin(num_keys - count + 1, window) // C.BLOCK_N * C.BLOCK_N
    return first


@gluon.jit
def _load(q_desc, k_desc, v_desc, rings, tiles_ptr, window, C: gl.constexpr):
    """Producer warp: iterate over the list of tiles and load their rows."""
    if C.OVERLAP:
        wait_for_last_kernel()
    num_work = gl.load(tiles_ptr).to(gl.int32) * C.H
    work = gl.program_id(0)
    n = work * 0
    step = work * 0
    while work < num_work:
        head = work % C.H
        tile_ptr = tiles_ptr + (1 + work // C.H) * FIELDS
        row = gl.load(tile_ptr + 1).to(gl.int32)
        count = gl.load(tile_ptr + 2).to(gl.int32)
        base = gl.load(tile_ptr + 3).to(gl.int32)
        num_keys = gl.load(tile_ptr + 4).to(gl.int32)
        # Results do not depend on which program computes a tile.
        work = gl.num_programs(0) + gl.atomic_add(tiles_ptr + 1, 1).to(gl.int32)
        wait_empty(rings.q, step)
        store_fields(rings.fields, step, (row, count, base, num_keys, head), C.STAGES)
        fill(rings.q, step, q_desc, row + count, count, head)
        step += 1
        kv_head = head // (C.H // C.HK)
        last = _last_keys(count, num_keys, C)
        first = _first_keys(count, num_keys, window, C)
        for start in range(last, first - 1, -C.BLOCK_N):
            end, remaining = base + num_keys, num_keys - start
            wait_empty(rings.k, n)
            fill(rings.k, n, k_desc, end, remaining, kv_head)
            wait_empty(rings.v, n)
            fill(rings.v, n, v_desc, end, remaining, kv_head)
            n += 1
    wait_empty(rings.q, step)
    store_fields(rings.fields, step, (work, work, work, work, -1), C.STAGES)
    commit(rings.q, step)


@gluon.jit
def load_distance_bias(zero_ptr, first, scores):
    """As :func:`distance_bias.load_distance_bias`, in the shape and layout of ``scores``."""
    layout: gl.constexpr = scores.type.layout
    i = gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))[None, :]
    return gl.load(zero_ptr + first + (i - j))


@gluon.jit
def _softmax(
    products, scores, start, maximum, total, BY_DISTANCE: gl.constexpr, MASKED: gl.constexpr
):
    """Update the online softmax with the tile of keys from ``start`` on.

    Returned weights are after dropout, without its factor.
    """
    visible = True
    bias = 0.0
    if BY_DISTANCE:
        bias = load_distance_bias(scores.zero_ptr, scores.diagonal - start, products)
    BLOCK_N: gl.constexpr = products.shape[1]
    j = (start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, products.type.layout)))[None, :]
    if MASKED:
        visible = visible_pairs(scores.window, scores, j)
    weights, rescale, maximum, total = online_softmax(
        products, scores.factor, bias, visible, maximum, total, BY_DISTANCE, MASKED
    )
    if scores.dropout_ptr is not None:
        bits = element_draws(scores.draws, scores.base + j)
        weights = gl.where(bits < scores.threshold, 0.0, weights)
    return weights, rescale, maximum, total


@gluon.jit
def _attend_to(
    acc, p, maximum, total, q, rings, n, first, last, scores, C: gl.constexpr, MASKED: gl.constexpr
):
    """Attend to the tiles of keys from ``first`` to before ``last``, in reverse order.

    ``MASKED`` is false if all queries see all of these keys. The values of a tile are added one
    iteration later: ``p`` are the weights of tile ``n`` of the rings, and the returned weights are
    the weights of the tile ``first``.
    """
    for start in range(last - C.BLOCK_N, first - 1, -C.BLOCK_N):
        products = multiply_keys(q, rings.k, n + 1)
        acc = warpgroup_mma(p, read(rings.v, n), acc, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        release(rings.k, n + 1)
        weights, rescale, maximum, total = _softmax(
            products, scores, start, maximum, total, C.BY_DISTANCE, MASKED
        )
        next_p = as_operand(weights, p.dtype)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        release(rings.v, n)
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = next_p
        n += 1
    return acc, p, maximum, total, n


@gluon.jit
def _skip_tiles(rings, n, num_tiles):
    """Release tiles of keys and values that only the other warpgroup uses."""
    for tile in range(num_tiles):
        wait_full(rings.k, n + tile)
        release(rings.k, n + tile)
        wait_full(rings.v, n + tile)
        release(rings.v, n + tile)
    return n + num_tiles


@gluon.jit
def _attend(
    stats_ptr,
    by_distance_ptr,
    dropout_ptr,
    out_desc,
    rings,
    outs,
    num_stats,
    max_distance,
    window,
    factor,
    C: gl.constexpr,
    WG: gl.constexpr,
):
    """Consumer warpgroup: compute attention for its half of each tile of queries."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    by_keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    by_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    by_query: gl.constexpr = gl.SliceLayout(1, by_keys)
    skipped: gl.constexpr = WG * WG_ROWS
    r = skipped + gl.arange(0, WG_ROWS, by_query)
    n = num_stats * 0
    step = num_stats * 0
    threshold, dropout_factor = load_dropout(dropout_ptr)
    row, count, base, num_keys, head = next_tile(rings.fields, rings.q, step)
    while head >= 0:
        last = _last_keys(count, num_keys, C)
        first = _first_keys(count, num_keys, window, C)
        if count <= skipped:
            release(rings.q, step)
            n = _skip_tiles(rings, n, (last - first) // BLOCK_N + 1)
        else:
            high = num_keys
            all_end = num_keys
            if C.CAUSAL:
                high = gl.minimum(num_keys, r + (num_keys - count + 1))[:, None]
                all_end = gl.minimum(num_keys, num_keys - count + 1 + skipped)
            unmasked_end = gl.minimum(gl.maximum(all_end, 0) // BLOCK_N * BLOCK_N, last)
            unmasked_begin = first
            if window is not None:
                end = gl.minimum(num_keys, num_keys - count + skipped + WG_ROWS)
                unmasked_begin = gl.cdiv(window_begin(end, window), BLOCK_N) * BLOCK_N
                unmasked_begin = gl.minimum(unmasked_begin, unmasked_end)
            zero_ptr = by_distance_ptr + (head.to(gl.int64) * (2 * max_distance) + max_distance)
            stat = (row.to(gl.int64) + r) * C.H + head
            draws = query_draws(dropout_ptr, stat)[:, None]
            diagonal = num_keys - count + skipped
            scores = Scores(
                factor, zero_ptr, diagonal, high, window, base, draws, dropout_ptr, threshold
            )
            q = rows(rings.q, step).slice(skipped, WG_ROWS)
            maximum = gl.full([WG_ROWS], -float("inf"), gl.float32, by_query)
            total = gl.zeros([WG_ROWS], gl.float32, by_query)
            acc = gl.zeros([WG_ROWS, C.BLOCK_D], gl.float32, by_values)
            products = warpgroup_mma_wait(0, deps=(multiply_keys(q, rings.k, n),))
            release(rings.k, n)
            weights, _, maximum, total = _softmax(
                products, scores, last, maximum, total, C.BY_DISTANCE, True
            )
            p = as_operand(weights, outs.dtype)
            if C.CAUSAL:
                acc, p, maximum, total, n = _attend_to(
                    acc, p, maximum, total, q, rings, n, unmasked_end, last, scores, C, MASKED=True
                )
            acc, p, maximum, total, n = _attend_to(
                acc, p, maximum, total, q, rings, n, unmasked_begin, unmasked_end, scores, C,
                MASKED=False,
            )  # fmt: skip
            if window is not None:
                acc, p, maximum, total, n = _attend_to(
                    acc, p, maximum, total, q, rings, n, first, unmasked_begin, scores, C,
                    MASKED=True,
                )  # fmt: skip
            release(rings.q, step)
            acc = warpgroup_mma(p, read(rings.v, n), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            release(rings.v, n)
            n += 1

            inverse = dropout_factor / gl.where(total > 0, total, 1.0)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, by_values))
            tma.store_wait(0)
            out = outs.index(WG)
            out.reshape([WG_ROWS, C.BLOCK_D]).store((acc * inverse[:, None]).to(outs.dtype))
            fence_async_shared()
            copy_out(out_desc, row + count, count - skipped, head, out)
            store_softmax_stats(stats_ptr, num_stats, stat, r < count, maximum, total, False)
        step += 1
        row, count, base, num_keys, head = next_tile(rings.fields, rings.q, step)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_stats", "max_distance", "window"])
def hopper_forward_kernel(
    stats_ptr,  # [2, ΣLq, H] fp32
    q_desc,  # of [ΣLq, H, D], see jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    out_desc,  # of [ΣLq, H, Dv]
    by_distance_ptr,  # [H, 2 · max_distance] fp32, see distance_bias.py; read if BY_DISTANCE
    dropout_ptr,  # [2], see dropout.py, or None
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    num_stats,
    max_distance,
    window,  # or None
    factor,  # scale · log2(e), rounded once
    C: gl.constexpr,  # HopperConstants
):
    """Compute the tiles of queries in the list, over all keys of their samples."""
    queries = make_ring(q_desc, C.STAGES)
    keys = make_ring(k_desc, C.STAGES)
    values = make_ring(v_desc, C.STAGES)
    fields = gl.allocate_shared_memory(
        gl.int32, [5 * C.STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    rings = Rings(queries, keys, values, fields)
    shape: gl.constexpr = [2] + out_desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    outs = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    gl.warp_specialize(
        [
            (_attend, (
                stats_ptr, by_distance_ptr, dropout_ptr, out_desc, rings, outs, num_stats,
                max_distance, window, factor, C, 0,
            )),
            (_attend, (
                stats_ptr, by_distance_ptr, dropout_ptr, out_desc, rings, outs, num_stats,
                max_distance, window, factor, C, 1,
            )),
            (_load, (q_desc, k_desc, v_desc, rings, tiles_ptr, window, C)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_launch = Launcher(hopper_forward_kernel)


def forward(
    inputs: Inputs,
    by_distance: Tensor | None,
    dropout: Tensor | None,
    outputs: FlashOutputs,
    tiles: Tensor,
    window: int | None,
    factor: float,
    constants: Constants,
) -> None:
    """Compute the rows of ``outputs`` in the list of ``tiles`` of queries."""
    (q, k, v), (out, stats) = inputs, outputs
    max_distance = 0 if by_distance is None else by_distance.shape[1] // 2
    bias_or_placeholder = stats if by_distance is None else by_distance
    width = constants.hopper_width
    descriptors = (
        jagged_rows(q, BLOCK_M, width),
        jagged_rows(k, BLOCK_N, width),
        jagged_rows(v, BLOCK_N, width),
        jagged_rows(out, WG_ROWS.value, width),
    )
    num_work = (tiles.shape[0] - 1) * constants.H
    _launch(
        (min(num_work, devices.hopper_multiprocessors(q.device)),),
        (
            stats, *descriptors, bias_or_placeholder, dropout, tiles, stats[0].numel(),
            max_distance, window, factor,
        ),
        constants.hopper_launch_arguments(
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            STAGES=STAGES,
            num_warps=4,
            **overlap_options(devices.launches_overlap(q.device)),
        ),
    )  # fmt: skip
