"""Products of all pairs of rows of a sample on Hopper, of half precision, in Gluon.

    out_b [Lx, Ly] = x_b · y_bᵀ                 2·D·Lx·Ly FLOPs, 2·Lx·Ly bytes written

The kernel is bound by writing. It is persistent and warp-specialized: a program takes one tile of
BLOCK_M rows of x after the other. A producer warp loads rows with the tensor memory accelerator;
two consumer warpgroups hold half of the rows of x each in registers, and multiply them with all
tiles of y.

Rows of the output begin at any element, but stores should be aligned vectors of 16 bytes. So a
warpgroup shifts its tile by up to seven columns, to the next multiple of 16 bytes. Tiles of y
overlap by eight columns: elements shifted out of one tile are in the first vector of the next. At
either end of a row, up to seven elements fill no vector and are stored one by one, from separate
products with the sample's first and last eight rows of y.

The order of sums over D is the same in all products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from torchrec_jagged_attn import devices
from torchrec_jagged_attn.runtime.kernels.gluon import (
    WG_ROWS,
    multiply_keys,
    next_tile,
    products_by_warpgroup,
    store_fields,
    thread_barrier,
    wait_for_last_kernel,
)
from torchrec_jagged_attn.runtime.kernels.matmul import padded_width
from torchrec_jagged_attn.runtime.kernels.tile_list import FIELDS, list_tiles, most_tiles
from torchrec_jagged_attn.runtime.kernels.tma import (
    commit,
    fill,
    jagged_rows,
    make_ring,
    release,
    rows,
    wait_empty,
    wait_full,
)
from torchrec_jagged_attn.runtime.launch import Launcher, overlap_options

BLOCK_M = 128  # rows of x of a tile, half of them for each warpgroup
BLOCK_N = 128  # rows of y of a tile
STAGES, STAGES_Y = gl.constexpr(2), gl.constexpr(3)  # tiles of x and of y in shared memory
VECTOR = gl.constexpr(8)  # elements of 16 bytes
# An index of 61 bits is passed as two int32: its quotient and remainder by 2^30.
LOW = gl.constexpr(2**30)

# A lane has eight elements in $4 to $7. $0 to $3 are eight elements of the previous lane's and its
# own, from the (8 - $8)-th on; $8 is 0 to 7 ($9 to $15 are the same).
SHIFT = gl.constexpr("""{
    .reg .pred p, q;
    .reg .b32 a<4>, b<6>, c<5>, bits, left;
    shfl.sync.up.b32 a0, $4, 1, 0, 0xffffffff;
    shfl.sync.up.b32 a1, $5, 1, 0, 0xffffffff;
    shfl.sync.up.b32 a2, $6, 1, 0, 0xffffffff;
    shfl.sync.up.b32 a3, $7, 1, 0, 0xffffffff;
    and.b32 bits, $8, 4;
    setp.ne.u32 p, bits, 0;
    and.b32 bits, $8, 2;
    setp.ne.u32 q, bits, 0;
    and.b32 bits, $8, 1;
    shl.b32 bits, bits, 4;
    sub.u32 left, 32, bits;
    selp.b32 b0, a0, a2, p;
    selp.b32 b1, a1, a3, p;
    selp.b32 b2, a2, $4, p;
    selp.b32 b3, a3, $5, p;
    selp.b32 b4, $4, $6, p;
    selp.b32 b5, $5, $7, p;
    selp.b32 c0, b0, b1, q;
    selp.b32 c1, b1, b2, q;
    selp.b32 c2, b2, b3, q;
    selp.b32 c3, b3, b4, q;
    selp.b32 c4, b4, b5, q;
    shf.r.clamp.b32 $0, c0, c1, left;
    shf.r.clamp.b32 $1, c1, c2, left;
    shf.r.clamp.b32 $2, c2, c3, left;
    shf.r.clamp.b32 $3, c3, c4, left;
}""")
OPERANDS = gl.constexpr("=&r,=&r,=&r,=&r" + ",r" * 12)


class Rings(NamedTuple):
    """Rings of the inputs."""

    x: Any
    y: Any
    ends: Any  # the first and the last eight rows of y, two tiles per tile of x
    fields: Any  # of each tile of x, see ``next_tile``


@gluon.jit
def shift_columns(tile, count):
    """Shift the elements of each row to the right by ``count`` (0 to 7, ``[rows, columns]``).

    A thread has eight columns, the previous lane the eight before these. The first columns of a row
    become arbitrary.
    """
    return gl.inline_asm_elementwise(
        SHIFT, OPERANDS, [tile, count], dtype=tile.dtype, is_pure=False, pack=VECTOR
    )


@gluon.jit
def _num_tiles(num_n, BLOCK_N: gl.constexpr):
    """Tiles of ``num_n`` rows of y, which overlap by eight rows."""
    remaining = gl.maximum(num_n - VECTOR, 1)
    return gl.where(num_n >= VECTOR, gl.cdiv(remaining, BLOCK_N - VECTOR), 0)


@gluon.jit
def _load(
    x_desc, y_desc, ends_desc, rings, tiles_ptr, x_offsets_ptr, pair_offsets_ptr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Producer warp: take tiles from the list, and load their rows."""
    xs, ys, ends = rings.x, rings.y, rings.ends
    BLOCK_N: gl.constexpr = ys.tiles.shape[3]
    if OVERLAP:
        wait_for_last_kernel()
    num_work = gl.load(tiles_ptr).to(gl.int32)
    work = gl.program_id(0)
    n = work * 0
    step = work * 0
    while work < num_work:
        tile_ptr = tiles_ptr + (1 + work) * FIELDS
        sample, row = gl.load(tile_ptr), gl.load(tile_ptr + 1)
        count = gl.load(tile_ptr + 2).to(gl.int32)
        base = gl.load(tile_ptr + 3).to(gl.int32)
        num_n = gl.load(tile_ptr + 4).to(gl.int32)
        # Results do not depend on which program takes a tile.
        work = gl.num_programs(0) + gl.atomic_add(tiles_ptr + 1, 1, sem="relaxed").to(gl.int32)
        before = row - gl.load(x_offsets_ptr + sample).to(gl.int64)
        first = gl.load(pair_offsets_ptr + sample) + before * num_n
        high = first // LOW
        low = first - high * LOW
        y_end = base + num_n
        wait_empty(xs, step)
        store_fields(
            rings.fields, step, (count, num_n, low.to(gl.int32), high.to(gl.int32)), STAGES
        )
        fill(xs, step, x_desc, row.to(gl.int32) + count, count, 0)
        wait_empty(ends, 2 * step)
        fill(ends, 2 * step, ends_desc, y_end, num_n, 0)
        wait_empty(ends, 2 * step + 1)
        fill(ends, 2 * step + 1, ends_desc, y_end, gl.minimum(num_n, VECTOR), 0)
        step += 1
        for tile in range(_num_tiles(num_n, BLOCK_N)):
            wait_empty(ys, n)
            fill(ys, n, y_desc, y_end, num_n - tile * (BLOCK_N - VECTOR), 0)
            n += 1
    wait_empty(xs, step)
    store_fields(rings.fields, step, (work, work, work, -1), STAGES)
    commit(xs, step)


@gluon.constexpr_function
def _vectors_layout(columns):
    """Layout of rows for stores of 16 bytes, with the same rows per warp as ``wgmma`` results."""
    lanes = columns // 8
    rows = 32 // lanes
    return gl.BlockedLayout([16 // rows, 8], [rows, lanes], [4, 1], [1, 0])


@gluon.jit
def _locate_rows(first, num_n, skipped, layout: gl.constexpr):
    """``(r, begin, shift)`` of a warpgroup's rows: their indices in the tile, and their begin in
    the output, ``shift`` elements (0 to 7) after the vector ``begin``.
    """
    r = skipped + gl.arange(0, WG_ROWS, layout)
    at = first + r.to(gl.int64) * num_n
    begin = at // VECTOR * VECTOR
    return r, begin, (at - begin).to(gl.int32)


@gluon.jit
def _multiply_tile(x, ring, n):
    """``(product, x)`` with the ``n``-th tile of a ring, once it has arrived.

    One at a time: with two in flight, the compiler waits after every step of a product.
    """
    product = multiply_keys(x, ring, n)
    product, x = warpgroup_mma_wait(0, deps=(product, x))
    release(ring, n)
    return product, x


@gluon.jit
def _store_ends(out_ptr, x, ends, n, first, count, num_n, skipped):
    """Store the elements of rows before the first whole vector and after the last, up to 7 each.

    They are products with the first and the last eight rows of y, two tiles of the ring. A thread
    has four elements, four neighboring threads have a row.
    """
    layout: gl.constexpr = products_by_warpgroup(VECTOR, 4)
    r, begin, shift = _locate_rows(first, num_n, skipped, gl.SliceLayout(1, layout))
    x = gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2))
    head, x = _multiply_tile(x, ends, n)
    tail, x = _multiply_tile(x, ends, n + 1)
    c = gl.arange(0, VECTOR, gl.SliceLayout(0, layout))
    inside = (r < count)[:, None]
    whole = gl.minimum((shift + 7) // VECTOR * VECTOR - shift, num_n)  # begin of vectors
    tail_begin = gl.maximum((shift + num_n) // VECTOR * VECTOR - shift, whole)  # end of vectors
    ptrs = out_ptr + (begin + shift)[:, None] + c[None, :]
    gl.store(ptrs, head.to(x.dtype), mask=inside & (c[None, :] < whole[:, None]))
    c += gl.maximum(num_n - VECTOR, 0)
    ptrs = out_ptr + (begin + shift)[:, None] + c[None, :]
    in_tail = (c[None, :] >= tail_begin[:, None]) & (c < num_n)[None, :]
    gl.store(ptrs, tail.to(x.dtype), mask=inside & in_tail)


@gluon.jit
def _multiply(out_ptr, rings, WG: gl.constexpr):
    """Consumer warpgroup: products of its half of each tile's rows."""
    xs, ys, ends = rings.x, rings.y, rings.ends
    BLOCK_N: gl.constexpr = ys.tiles.shape[3]
    vectors: gl.constexpr = _vectors_layout(BLOCK_N)
    skipped: gl.constexpr = WG * WG_ROWS
    c = gl.arange(0, BLOCK_N, gl.SliceLayout(0, vectors))
    zeros = gl.full([WG_ROWS, BLOCK_N], 0, gl.int32, vectors)
    step = gl.program_id(0) * 0
    n = step
    count, num_n, low, high = next_tile(rings.fields, xs, step)
    while high >= 0:
        num_tiles = _num_tiles(num_n, BLOCK_N)
        if count <= skipped:
            release(xs, step)
            n = _skip_tiles(ys, n, num_tiles)
            _skip_tiles(ends, 2 * step, 2)
        else:
            x = rows(xs, step).slice(skipped, WG_ROWS)
            x = x.load(gl.DotOperandLayout(0, products_by_warpgroup(BLOCK_N, 4), 2))
            thread_barrier()
            release(xs, step)
            first = high.to(gl.int64) * LOW + low
            _store_ends(out_ptr, x, ends, 2 * step, first, count, num_n, skipped)
            r, begin, shift = _locate_rows(first, num_n, skipped, gl.SliceLayout(1, vectors))
            inside = (r < count)[:, None]
            by_vector = shift[:, None] + zeros
            for tile in range(num_tiles):
                acc, x = _multiply_tile(x, ys, n)
                n += 1
                out = shift_columns(gl.convert_layout(acc.to(x.dtype), vectors), by_vector)
                start = tile * (BLOCK_N - VECTOR)
                column = (start + c // VECTOR * VECTOR)[None, :] - shift[:, None]  # of each vector
                whole = (column >= 0) & (column <= num_n - VECTOR)
                new = ((c >= VECTOR) | (start == 0))[None, :]
                ptrs = out_ptr + (begin[:, None] + (start + c)[None, :])
                gl.store(ptrs, out, mask=inside & whole & new)
        step += 1
        count, num_n, low, high = next_tile(rings.fields, xs, step)


@gluon.jit
def _skip_tiles(ring, n, num_tiles):
    """Release tiles that only the other warpgroup needs."""
    for tile in range(num_tiles):
        wait_full(ring, n + tile)
        release(ring, n + tile)
    return n + num_tiles


@gluon.jit
def pairs_kernel(
    out_ptr,  # [Σ Lx·Ly]
    x_desc,  # of [ΣLx, 1, D], see tma.jagged_rows
    y_desc,  # of [ΣLy, 1, D]
    ends_desc,  # of [ΣLy, 1, D], boxes of eight rows
    tiles_ptr,  # [1 + capacity, FIELDS] int64, see tile_list.list_tiles
    x_offsets_ptr,  # [B + 1]
    pair_offsets_ptr,  # [B + 1] int64
    OVERLAP: gl.constexpr,
):
    """The tiles of rows of x in the list, times all rows of y of their samples."""
    xs = make_ring(x_desc, STAGES)
    ys = make_ring(y_desc, STAGES_Y)
    ends = make_ring(ends_desc, 2 * STAGES)
    fields = gl.allocate_shared_memory(
        gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    rings = Rings(xs, ys, ends, fields)
    gl.warp_specialize(
        [
            (_multiply, (out_ptr, rings, 0)),
            (_multiply, (out_ptr, rings, 1)),
            (_load, (
                x_desc, y_desc, ends_desc, rings, tiles_ptr, x_offsets_ptr, pair_offsets_ptr,
                OVERLAP,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


_launch = Launcher(pairs_kernel)


def pair_bmm(
    x: Tensor, y: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor
) -> None:
    """Write ``out``, which begins at a multiple of 16 bytes; offsets are contiguous."""
    num_samples = x_offsets.numel() - 1
    capacity = most_tiles(x.shape[0], y.shape[0], num_samples, 0, BLOCK_M)
    tiles = list_tiles(x_offsets, y_offsets, capacity, 0, BLOCK_M)
    width = max(64, padded_width(x.shape[1]))
    x, y = x.unsqueeze(1), y.unsqueeze(1)  # of one head
    descriptors = (
        jagged_rows(x, BLOCK_M, width),
        jagged_rows(y, BLOCK_N, width),
        jagged_rows(y, VECTOR.value, width),
    )
    _launch(
        (min(capacity, devices.hopper_multiprocessors(x.device)),),
        (out, *descriptors, tiles, x_offsets, pair_offsets),
        {"num_warps": 4, **overlap_options(devices.launches_overlap(x.device))},
    )
