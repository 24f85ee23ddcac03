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

import functools

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.knobs import runtime

from torchrec_jagged_attn.kernels import flash_tiles
from torchrec_jagged_attn.kernels.flash_schedule import FIELDS
from torchrec_jagged_attn.kernels.launch import Launcher, launches_overlap, overlap_options
from torchrec_jagged_attn.kernels.warp_tiles import wait_for_last_kernel

__all__ = ["BLOCK_M", "TAKEN", "forward", "multiprocessors", "scores_by_distance", "takes"]

BLOCK_M = 128  # queries of a tile
BLOCK_N = 128  # keys of a tile
STAGES = 2  # tiles of queries, of keys and of values in shared memory
GROUP_ROWS = gl.constexpr(64)  # queries of a group of warps
END = gl.constexpr(2**30)  # see _jagged_rows

online_softmax = gluon.jit(flash_tiles.online_softmax.fn)
store_softmax_stats = gluon.jit(flash_tiles.store_softmax_stats.fn)


@gluon.jit
def _make_ring(desc, STAGES: gl.constexpr):
    """``(tiles, full, empty)``: room for ``STAGES`` tiles that both groups read, and barriers."""
    shape: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return tiles, full, empty


@gluon.jit
def _wait_empty(ring, n, STAGES: gl.constexpr):
    """Wait until the tile before the ``n``-th of a ring, in its place, has been read."""
    mbarrier.wait(ring[2].index(n % STAGES), (n // STAGES + 1) & 1)


@gluon.jit
def _fill(ring, n, desc, end, rest, head, STAGES: gl.constexpr):
    """Begin to copy the tile whose first row is ``rest`` rows before ``end``, see _jagged_rows."""
    stage = n % STAGES
    mbarrier.expect(ring[1].index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc, [END, end, END - rest, head, 0], ring[1].index(stage), ring[0].index(stage)
    )


@gluon.jit
def _wait_full(ring, n, STAGES: gl.constexpr):
    """The ``n``-th tile of a ring, ``[rows, width]``, once it is there."""
    stage = n % STAGES
    mbarrier.wait(ring[1].index(stage), (n // STAGES) & 1)
    tile = ring[0].index(stage)
    return tile.reshape([tile.shape[2], tile.shape[4]])


@gluon.jit
def _release(ring, n, STAGES: gl.constexpr):
    """Say that this group has read the ``n``-th tile of a ring."""
    mbarrier.arrive(ring[2].index(n % STAGES))


@gluon.jit
def _tell(places, turn, tile, STAGES: gl.constexpr):
    """Leave where this turn's tile lies, four numbers, in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for field in gl.static_range(4):
        value = gl.full([1], tile[field], gl.int32, layout)
        places.index(turn % STAGES * 4 + field).store(value)


@gluon.jit
def _hear(places, turn, field: gl.constexpr, STAGES: gl.constexpr):
    """One of the numbers that :func:`_tell` has left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(places.index(turn % STAGES * 4 + field).load(layout), 0)


@gluon.jit
def _next_tile(places, queries, turn, STAGES: gl.constexpr):
    """``(row, count, num_keys, head)`` of this turn's tile, once its queries are there."""
    _wait_full(queries, turn, STAGES)
    row, count = _hear(places, turn, 0, STAGES), _hear(places, turn, 1, STAGES)
    num_keys, head = _hear(places, turn, 2, STAGES), _hear(places, turn, 3, STAGES)
    return row, count, num_keys, head


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
        _wait_empty(queries, turn, STAGES)
        _tell(places, turn, (row, count, num_keys, head), STAGES)
        _fill(queries, turn, q_desc, row + count, count, head, STAGES)
        turn += 1
        kv_head = head // (H // HK)
        last = _last_keys(count, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
        for start in range(last, -1, -BLOCK_N):
            end, rest = base + num_keys, num_keys - start
            _wait_empty(keys, n, STAGES)
            _fill(keys, n, k_desc, end, rest, kv_head, STAGES)
            _wait_empty(values, n, STAGES)
            _fill(values, n, v_desc, end, rest, kv_head, STAGES)
            n += 1
    _wait_empty(queries, turn, STAGES)
    _tell(places, turn, (work, work, work, -1), STAGES)
    mbarrier.arrive(queries[1].index(turn % STAGES))


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
def _multiply_keys(q, keys, n, STAGES: gl.constexpr):
    """Begin the products of queries and the ``n``-th tile of keys."""
    k = _wait_full(keys, n, STAGES)
    BLOCK_N: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _as_operand(weights, dtype: gl.constexpr):
    """Weights as the left side of a product."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, weights.type.layout, 2))


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
    STAGES: gl.constexpr,
    BY_DISTANCE: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Attend to the tiles of keys before ``last``, from the later ones down to ``first``.

    All rows see all of these keys unless ``MASKED``. ``p`` are the weights of the ``n``-th tile,
    whose values are added up here; what is returned are those of the tile ``first``.
    """
    for start in range(last - BLOCK_N, first - 1, -BLOCK_N):
        products = _multiply_keys(q, keys, n + 1, STAGES)
        acc = warpgroup_mma(p, _wait_full(values, n, STAGES), acc, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products,))
        _release(keys, n + 1, STAGES)
        weights, rescale, maximum, total = _softmax(
            products, factor, zero_ptr, start, diagonal, high, maximum, total, BY_DISTANCE, MASKED
        )
        next_p = _as_operand(weights, p.dtype)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        _release(values, n, STAGES)
        acc *= gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = next_p
        n += 1
    return acc, p, maximum, total, n


@gluon.jit
def _leave_out(keys, values, n, num_tiles, STAGES: gl.constexpr):
    """Let tiles pass that are only for the other group."""
    for tile in range(num_tiles):
        _wait_full(keys, n + tile, STAGES)
        _release(keys, n + tile, STAGES)
        _wait_full(values, n + tile, STAGES)
        _release(values, n + tile, STAGES)
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
    STAGES: gl.constexpr,
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
    row, count, num_keys, head = _next_tile(places, queries, turn, STAGES)
    while head >= 0:
        last = _last_keys(count, num_keys, CAUSAL, BLOCK_M, BLOCK_N)
        if count <= skipped:
            _release(queries, turn, STAGES)
            n = _leave_out(keys, values, n, last // BLOCK_N + 1, STAGES)
        else:
            high = num_keys
            seen_by_all = num_keys
            if CAUSAL:
                high = gl.minimum(num_keys, r + (num_keys - count + 1))[:, None]
                seen_by_all = gl.minimum(num_keys, num_keys - count + 1 + skipped)
            full = gl.minimum(gl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N, last)
            zero_ptr = by_distance_ptr + (head.to(gl.int64) * (2 * reach) + reach)
            diagonal = num_keys - count + skipped
            q = queries[0].index(turn % STAGES).reshape([BLOCK_M, BLOCK_D])
            q = q.slice(skipped, GROUP_ROWS)
            maximum = gl.full([GROUP_ROWS], -float("inf"), gl.float32, by_query)
            total = gl.zeros([GROUP_ROWS], gl.float32, by_query)
            acc = gl.zeros([GROUP_ROWS, BLOCK_D], gl.float32, by_values)
            products = warpgroup_mma_wait(0, deps=(_multiply_keys(q, keys, n, STAGES),))
            _release(keys, n, STAGES)
            weights, _, maximum, total = _softmax(
                products, factor, zero_ptr, last, diagonal, high, maximum, total, BY_DISTANCE, True
            )
            p = _as_operand(weights, outs.dtype)
            if CAUSAL:
                acc, p, maximum, total, n = _attend_to(
                    acc, p, maximum, total, q, keys, values, n, full, last, high, factor,
                    zero_ptr, diagonal, BLOCK_N, STAGES, BY_DISTANCE, MASKED=True,
                )  # fmt: skip
            acc, p, maximum, total, n = _attend_to(
                acc, p, maximum, total, q, keys, values, n, 0, full, high, factor,
                zero_ptr, diagonal, BLOCK_N, STAGES, BY_DISTANCE, MASKED=False,
            )  # fmt: skip
            _release(queries, turn, STAGES)
            acc = warpgroup_mma(p, _wait_full(values, n, STAGES), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            _release(values, n, STAGES)
            n += 1

            inverse = 1.0 / gl.where(total > 0, total, 1.0)
            inverse = gl.convert_layout(inverse, gl.SliceLayout(1, by_values))
            tma.store_wait(0)
            out = outs.index(GROUP)
            out.reshape([GROUP_ROWS, BLOCK_D]).store((acc * inverse[:, None]).to(outs.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                out_desc, [END, row + count, END - count + skipped, head, 0], out
            )
            stat = (row.to(gl.int64) + r) * H + head
            store_softmax_stats(stats_ptr, num_stats, stat, r < count, maximum, total, False)
        turn += 1
        row, count, num_keys, head = _next_tile(places, queries, turn, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_stats", "reach"])
def forward_kernel(
    stats_ptr,  # [2, ΣLq, H] fp32
    q_desc,  # of [ΣLq, H, D], see _jagged_rows
    k_desc,  # of [ΣLk, Hk, D]
    v_desc,  # of [ΣLk, Hk, Dv]
    out_desc,  # of [ΣLq, H, Dv]
    by_distance_ptr,  # [H, 2 · reach] fp32, see distance_bias.py; not read unless BY_DISTANCE
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see flash_schedule.list_tiles
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
    queries = _make_ring(q_desc, STAGES)
    keys = _make_ring(k_desc, STAGES)
    values = _make_ring(v_desc, STAGES)
    places = gl.allocate_shared_memory(
        gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    shape: gl.constexpr = [2] + out_desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    outs = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    gl.warp_specialize(
        [
            (_attend, (
                stats_ptr, by_distance_ptr, out_desc, queries, keys, values, places, outs,
                num_stats, reach, factor, H, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, STAGES,
                BY_DISTANCE, 0,
            )),
            (_attend, (
                stats_ptr, by_distance_ptr, out_desc, queries, keys, values, places, outs,
                num_stats, reach, factor, H, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D, STAGES,
                BY_DISTANCE, 1,
            )),
            (_load, (
                q_desc, k_desc, v_desc, queries, keys, values, places, tiles_ptr,
                H, HK, CAUSAL, BLOCK_M, BLOCK_N, STAGES, OVERLAP,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=5)
# A launcher does not ask for the dtype of a descriptor.
_launch = {dtype: Launcher(forward_kernel) for dtype in (torch.bfloat16, torch.float16)}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors of Hopper a device has: none if it is another."""
    if device.type != "cuda" or runtime.interpret or torch.version.cuda is None:
        return 0
    if torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


TAKEN = "half precision, widths that 8 divides, the larger 33 to 128, rows at multiples of 16 bytes"


def takes(q: Tensor, k: Tensor, v: Tensor, width: int) -> bool:
    """Whether :func:`forward` takes these inputs, ``width`` wide in shared memory: ``TAKEN``.

    It depends on nothing that differs from batch to batch, but for a batch without keys.
    """
    return (
        multiprocessors(q.device) > 0
        and q.dtype in _launch
        and width in (64, 128)
        and k.shape[0] > 0
        and all(_is_addressable(x) for x in (q, k, v))
    )


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
        _jagged_rows(q, BLOCK_M, width),
        _jagged_rows(k, BLOCK_N, width),
        _jagged_rows(v, BLOCK_N, width),
        _jagged_rows(out, GROUP_ROWS.value, width),
    )
    num_work = (tiles.shape[0] - 1) * q.shape[1]
    _launch[q.dtype](
        (min(num_work, multiprocessors(q.device)),),
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
            **overlap_options(launches_overlap(q.device)),
        },
    )


def _is_addressable(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can address rows of ``[L, H, D]``."""
    rows, heads, width = x.shape
    stride = x.stride(0)
    aligned = x.data_ptr() % 16 == 0 and stride % 8 == 0 and width % 8 == 0
    return aligned and stride >= heads * width and rows <= END.value


class _Descriptor(TensorDescriptor):
    """One whose fields have been checked by :func:`takes`: checks take longer than all else."""

    def __post_init__(self) -> None:
        pass


def _jagged_rows(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Boxes of ``rows`` of one head of ``x`` ``[L, H, D]`` that end where a sample ends.

    Row ``j`` from the end of a sample, whose rows are before row ``end``, has the coordinates
    ``(END, end, END - j)``: the third one has its bound there. In steps of ``s`` elements from row
    to row the first one is worth ``2^34 - s``, so that all is ``2^64 + s · (end - j)`` elements,
    and addresses have 64 bits, of bytes.
    """
    s = x.stride(0)
    endless = 2**31 - 2**16
    _, heads, of_head = x.shape
    shape = [endless, endless, END.value, heads, of_head]
    strides = [2**34 - s, s, s, of_head, 1]
    return _Descriptor(x, shape, strides, [1, 1, rows, 1, width], _SWIZZLED)
