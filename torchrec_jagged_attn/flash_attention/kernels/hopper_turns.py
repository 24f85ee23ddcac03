"""How tiles of keys add to the gradient of queries in turn, in the backward pass on Hopper.

Several tiles of keys give to one tile of that gradient. They add in fp32, in global memory, in the
order of the keys, so that sums are the same bit for bit. Each waits for its turn, a number per tile
of queries and head: one warp looks out for it, so that nobody else waits for memory, and others
pass it on to the next tile. The last tile writes the gradient itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torchrec_jagged_attn.flash_attention.kernels import tiles
from torchrec_jagged_attn.runtime.kernels.gluon import hear
from torchrec_jagged_attn.runtime.kernels.tma import copy_out, give, release, wait_empty, wait_full

__all__ = [
    "PASSERS",
    "TILES",
    "Board",
    "KeyTile",
    "Sums",
    "add_slice",
    "await_turns",
    "next_tile",
    "pass_turns",
    "query_tiles",
]

window_begin = gluon.jit(tiles.window_begin.fn)

TILES = gl.constexpr(2)  # tiles of keys that a program knows of
PASSERS = gl.constexpr(2)  # warps that pass turns on


class KeyTile(NamedTuple):
    """A tile of keys of one head, and the queries of its sample; all are int32.

    Attributes:
        row: its first row.
        remaining: how many rows its sample has from there on.
        base: the first of the sample's queries.
        num_rows: how many queries the sample has.
        kv_head: the head; negative once there are no more tiles.
        number: how many tiles of keys the sample has before it.
        slot: number of the sample's first tile of queries among the turns.
        sum_slot: its number among the sums.
    """

    row: Any
    remaining: Any
    base: Any
    num_rows: Any
    kv_head: Any
    number: Any
    slot: Any
    sum_slot: Any


class Board(NamedTuple):
    """Barriers of the tiles of keys that a program takes, and ``fields``: a KeyTile for each."""

    full: Any
    empty: Any
    fields: Any


class Sums(NamedTuple):
    """Where the gradient of queries is summed, and the barriers of turns.

    Attributes:
        sums_ptr: ``[slots, H, slices, ...]`` fp32, in slices of columns.
        granted: of tiles of queries whose turn has come.
        added: of those to which this tile of keys has added.
        tiles: ``[slices, *box]`` in shared memory, from where a gradient leaves.
        desc: of the gradient.
        window: how many keys each query sees at most, or ``None``.
    """

    sums_ptr: Any
    granted: Any
    added: Any
    tiles: Any
    desc: Any
    window: Any


@gluon.jit
def next_tile(board, step):
    """This step's KeyTile, once it is known."""
    wait_full(board, step)
    fields = board.fields
    row, count = hear(fields, step, 0, TILES), hear(fields, step, 1, TILES)
    base, num_rows = hear(fields, step, 2, TILES), hear(fields, step, 3, TILES)
    kv_head, number = hear(fields, step, 4, TILES), hear(fields, step, 5, TILES)
    slot, sum_slot = hear(fields, step, 6, TILES), hear(fields, step, 7, TILES)
    release(board, step)
    return KeyTile(row, count, base, num_rows, kv_head, number, slot, sum_slot)


@gluon.jit
def query_tiles(tile, window, C: gl.constexpr):
    """First of the tiles of queries that see a tile of keys, and the end of them."""
    first, end = tile.num_rows * 0, tile.num_rows
    if C.CAUSAL:
        first = gl.maximum(tile.num_rows - tile.remaining, 0) // C.BLOCK_M
    if window is not None:
        LAST: gl.constexpr = C.BLOCK_N - 1
        own_query = tile.num_rows - tile.remaining + LAST  # of the tile's last key
        end = gl.maximum(own_query + gl.minimum(tile.remaining - LAST, window), 0)
    return first, gl.cdiv(end, C.BLOCK_M)


@gluon.jit
def _num_before(m, tile, window, C: gl.constexpr):
    """How many tiles of keys the ``m``-th tile of queries sees before this one."""
    number = tile.number
    if window is not None:
        ahead = tile.number * C.BLOCK_N + tile.remaining - tile.num_rows  # of keys to queries
        number -= window_begin(ahead + m * C.BLOCK_M + 1, window) // C.BLOCK_N
    return number


@gluon.jit
def _is_last(m, tile, C: gl.constexpr):
    """Whether no later tile of keys is seen by the ``m``-th tile of queries."""
    if C.CAUSAL:
        highest = gl.minimum(m * C.BLOCK_M + (C.BLOCK_M - 1), tile.num_rows - 1)
        return highest < tile.num_rows - tile.remaining + C.BLOCK_N
    else:
        return tile.remaining <= C.BLOCK_N


@gluon.jit
def add_slice(sums, acc, m, n, tile, head, scale, C: gl.constexpr, SLICE: gl.constexpr):
    """Add what a tile gives to a slice of the ``m``-th gradient of queries, when it is its turn.

    The last tile writes the gradient, the others leave sums.
    """
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    SLICES: gl.constexpr = sums.tiles.shape[0]
    slot = (tile.sum_slot + m) * C.H + head
    last = _is_last(m, tile, C)
    num_before = _num_before(m, tile, sums.window, C)
    # In the order in which the registers of a warp hold them, so that all accesses are whole ones.
    flat = acc.reshape([4, 2, 8, WIDTH // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    flat = flat.reshape([ROWS * WIDTH])
    at = gl.arange(0, ROWS * WIDTH, flat.type.layout)
    ptrs = sums.sums_ptr + (slot.to(gl.int64) * SLICES + SLICE) * (ROWS * WIDTH) + at
    if last:
        tma.store_wait(0)
    wait_full(sums.granted, n)
    release(sums.granted, n)
    if last:
        if num_before > 0:
            flat += gl.load(ptrs, cache_modifier=".cg")
        total = flat.reshape([4, WIDTH // 8, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
        total = gl.convert_layout(total.reshape([ROWS, WIDTH]), acc.type.layout)
        out = sums.tiles.index(SLICE)
        out.reshape([ROWS, WIDTH]).store((total * scale).to(sums.tiles.dtype))
        fence_async_shared()
        end, remaining = tile.base + tile.num_rows, tile.num_rows - m * ROWS
        copy_out(sums.desc, end, remaining, head, out, SLICE * WIDTH)
    elif num_before > 0:
        gl.atomic_add(ptrs, flat, sem="relaxed", scope="gpu")
    else:
        gl.store(ptrs, flat)
    wait_empty(sums.added, n)
    give(sums.added, n)


@gluon.jit
def await_turns(turns_ptr, granted, board, window, C: gl.constexpr):
    """What one warp does: look out for a tile's turn to add to each gradient of queries."""
    step = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = next_tile(board, step)
    while tile.kv_head >= 0:
        first, end = query_tiles(tile, window, C)
        for member in range(C.H // C.HK):
            head = tile.kv_head * (C.H // C.HK) + member
            for m in range(first, end):
                wait_empty(granted, n)
                num_before = _num_before(m, tile, window, C)
                seen = tile.number * 0
                while seen < num_before:
                    turn_ptr = turns_ptr + ((tile.slot + m) * C.H + head)
                    seen = gl.atomic_add(turn_ptr, 0, sem="acquire", scope="gpu")
                give(granted, n)
                n += 1
        step += 1
        tile = next_tile(board, step)


@gluon.jit
def pass_turns(turns_ptr, added, board, window, C: gl.constexpr, PASSER: gl.constexpr):
    """What one warp does: give every other turn to the next tile once this one has added."""
    step = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = next_tile(board, step)
    while tile.kv_head >= 0:
        first, end = query_tiles(tile, window, C)
        for member in range(C.H // C.HK):
            head = tile.kv_head * (C.H // C.HK) + member
            for m in range(first, end):
                if n % PASSERS == PASSER:
                    wait_full(added, n)
                    if not _is_last(m, tile, C):
                        turn_ptr = turns_ptr + ((tile.slot + m) * C.H + head)
                        gl.atomic_add(turn_ptr, 1, sem="release", scope="gpu")
                    release(added, n)
                n += 1
        step += 1
        tile = next_tile(board, step)
