"""Deterministic accumulation of dq in backward on Hopper, as in FlashAttention.

The tiles of keys add their terms to the dq of a tile of queries in global memory, in fp32, in the
order of the keys. A semaphore per tile of queries and head counts the tiles of keys that have been
added. One warp waits for it, so that other warps do not wait for memory, and RELEASE_WARPS warps
increment it. The last tile of keys writes dq.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torchrec_jagged_attn.ops.device.gluon import load_field
from torchrec_jagged_attn.ops.device.tma import (
    commit,
    copy_out,
    release,
    wait_empty,
    wait_full,
)
from torchrec_jagged_attn.ops.flash_attention.kernels import tiles

window_begin = gluon.jit(tiles.window_begin.fn)

TILES = gl.constexpr(2)  # capacity of the queue of tiles of keys
RELEASE_WARPS = gl.constexpr(2)


class KeyTile(NamedTuple):
    """A tile of keys of one head, and the queries of its sample; all fields are int32."""

    row: Any  # first row of the tile
    remaining: Any  # number of keys of the sample from ``row`` on
    base: Any  # first query of the sample
    num_rows: Any  # number of queries of the sample
    kv_head: Any  # negative at the end of the queue
    number: Any  # index of the tile within its sample
    q_tile: Any  # index of the semaphores of the sample's first tile of queries
    accum_tile: Any  # index of the sample's first tile of queries in the accumulator


class KeyTileQueue(NamedTuple):
    """Queue of the tiles of keys of a program: ``fields`` in shared memory, and barriers."""

    full: Any
    empty: Any
    fields: Any


class DqAccumulator(NamedTuple):
    """Accumulator of dq, and barriers between consumer warpgroups and semaphore warps."""

    accum_ptr: Any  # [tiles, H, slices, ...] fp32, in slices of columns
    acquired: Any  # barriers, complete once the semaphore of a tile of queries is acquired
    added: Any  # barriers, complete once this tile of keys has been added
    tiles: Any  # [slices, *block_shape] in shared memory, from which dq is copied
    desc: Any  # descriptor of dq
    window: Any  # maximum number of keys that a query attends to, or ``None``


@gluon.jit
def next_tile(queue, step):
    """Wait for the :class:`KeyTile` of ``step`` in the queue, and return it."""
    wait_full(queue, step)
    fields = queue.fields
    row, count = load_field(fields, step, 0, TILES), load_field(fields, step, 1, TILES)
    base, num_rows = load_field(fields, step, 2, TILES), load_field(fields, step, 3, TILES)
    kv_head, number = load_field(fields, step, 4, TILES), load_field(fields, step, 5, TILES)
    q_tile, accum_tile = load_field(fields, step, 6, TILES), load_field(fields, step, 7, TILES)
    release(queue, step)
    return KeyTile(row, count, base, num_rows, kv_head, number, q_tile, accum_tile)


@gluon.jit
def query_tiles(tile, window, C: gl.constexpr):
    """Return ``(first, end)`` of the tiles of queries that see any key of ``tile``."""
    first, end = tile.num_rows * 0, tile.num_rows
    if C.CAUSAL:
        first = gl.maximum(tile.num_rows - tile.remaining, 0) // C.BLOCK_M
    if window is not None:
        LAST: gl.constexpr = C.BLOCK_N - 1
        diagonal_query = tile.num_rows - tile.remaining + LAST  # of the last key
        end = gl.maximum(diagonal_query + gl.minimum(tile.remaining - LAST, window), 0)
    return first, gl.cdiv(end, C.BLOCK_M)


@gluon.jit
def _num_before(m, tile, window, C: gl.constexpr):
    """Return the number of tiles of keys before ``tile`` that the ``m``-th tile of queries sees."""
    number = tile.number
    if window is not None:
        surplus = tile.number * C.BLOCK_N + tile.remaining - tile.num_rows  # keys minus queries
        number -= window_begin(surplus + m * C.BLOCK_M + 1, window) // C.BLOCK_N
    return number


@gluon.jit
def _is_last(m, tile, C: gl.constexpr):
    """Return whether ``tile`` is the last tile of keys that the ``m``-th tile of queries sees."""
    if C.CAUSAL:
        highest = gl.minimum(m * C.BLOCK_M + (C.BLOCK_M - 1), tile.num_rows - 1)
        return highest < tile.num_rows - tile.remaining + C.BLOCK_N
    else:
        return tile.remaining <= C.BLOCK_N


@gluon.jit
def add_slice(accum, acc, m, n, tile, head, scale, C: gl.constexpr, SLICE: gl.constexpr):
    """Add ``acc``, the term of ``tile``, to a slice of the ``m``-th tile of dq.

    Waits until the semaphore is acquired. The first tile of keys stores its term; the last one
    writes dq.
    """
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    SLICES: gl.constexpr = accum.tiles.shape[0]
    index = (tile.accum_tile + m) * C.H + head
    last = _is_last(m, tile, C)
    num_before = _num_before(m, tile, accum.window, C)
    # In the order of the registers of a warp, so that accesses are coalesced
    flat = acc.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    flat = flat.reshape([ROWS * WIDTH])
    element = gl.arange(0, ROWS * WIDTH, flat.type.layout)
    ptrs = accum.accum_ptr + (index.to(gl.int64) * SLICES + SLICE) * (ROWS * WIDTH) + element
    if last:
        tma.store_wait(0)
    wait_full(accum.acquired, n)
    release(accum.acquired, n)
    if last:
        if num_before > 0:
            flat += gl.load(ptrs, cache_modifier=".cg")
        total = flat.reshape([4, WIDTH // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
        total = gl.convert_layout(total.reshape([ROWS, WIDTH]), acc.type.layout)
        out = accum.tiles.index(SLICE)
        out.reshape([ROWS, WIDTH]).store((total * scale).to(accum.tiles.dtype))
        fence_async_shared()
        end, remaining = tile.base + tile.num_rows, tile.num_rows - m * ROWS
        copy_out(accum.desc, end, remaining, head, out, SLICE * WIDTH)
    elif num_before > 0:
        gl.atomic_add(ptrs, flat, sem="relaxed", scope="gpu")
    else:
        gl.store(ptrs, flat)
    wait_empty(accum.added, n)
    commit(accum.added, n)


@gluon.jit
def wait_semaphores(semaphores_ptr, acquired, queue, window, C: gl.constexpr):
    """One warp: acquire the semaphore of each tile of queries once this tile of keys is next."""
    step = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = next_tile(queue, step)
    while tile.kv_head >= 0:
        first, end = query_tiles(tile, window, C)
        for member in range(C.H // C.HK):
            head = tile.kv_head * (C.H // C.HK) + member
            for m in range(first, end):
                wait_empty(acquired, n)
                num_before = _num_before(m, tile, window, C)
                num_added = tile.number * 0
                while num_added < num_before:
                    semaphore_ptr = semaphores_ptr + ((tile.q_tile + m) * C.H + head)
                    num_added = gl.atomic_add(semaphore_ptr, 0, sem="acquire", scope="gpu")
                commit(acquired, n)
                n += 1
        step += 1
        tile = next_tile(queue, step)


@gluon.jit
def release_semaphores(semaphores_ptr, added, queue, window, C: gl.constexpr, WARP: gl.constexpr):
    """RELEASE_WARPS warps: increment each semaphore once this tile of keys has been added."""
    step = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = next_tile(queue, step)
    while tile.kv_head >= 0:
        first, end = query_tiles(tile, window, C)
        for member in range(C.H // C.HK):
            head = tile.kv_head * (C.H // C.HK) + member
            for m in range(first, end):
                if n % RELEASE_WARPS == WARP:
                    wait_full(added, n)
                    if not _is_last(m, tile, C):
                        semaphore_ptr = semaphores_ptr + ((tile.q_tile + m) * C.H + head)
                        gl.atomic_add(semaphore_ptr, 1, sem="release", scope="gpu")
                    release(added, n)
                n += 1
        step += 1
        tile = next_tile(queue, step)
