"""Helpers of the Gluon kernels of target attention with a warpgroup (four warps), on Hopper.

``wgmma`` products read operands from shared memory. Their M side has 64 rows or more: history rows,
or columns of history. Query rows are on the N side, in multiples of eight.

The tensor memory accelerator (TMA) copies tiles that end with their sample: ``tma.jagged_rows``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torchrec_jagged_attn.ops.device.gluon import thread_barrier
from torchrec_jagged_attn.ops.device.tma import copy_in, read
from torchrec_jagged_attn.ops.target_attention.kernels.warp_common import (
    LOG2E,
    load_bias,
    row_buckets,
    row_layout,
)

PROGRAMS = gl.constexpr(256)  # programs that run while the schedule is written


@gluon.constexpr_function
def warpgroup_layout(width):
    """Rows of half precision in shared memory, as ``wgmma`` reads them."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, rank=2)


class HistoryRing(NamedTuple):
    """A ring as in ``tma.py``, without ``empty`` barriers: all warps synchronize before a stage is
    reused.
    """

    full: Any
    tiles: Any


@gluon.jit
def _expect(ring, n, desc, remaining):
    """Expect the bytes of the ``n``-th tile, if it has rows."""
    full = ring.full.index(n % ring.full.shape[0])
    mbarrier.expect(full, desc.block_type.nbytes, pred=remaining > 0)


@gluon.jit
def _copy(ring, n, desc, last, remaining):
    """Start to copy the ``n``-th tile, if it has rows."""
    stage = n % ring.full.shape[0]
    full, tile = ring.full.index(stage), ring.tiles.index(stage)
    copy_in(desc, last, remaining, 0, full, tile, remaining > 0)


@gluon.jit
def open_ring(desc, last, remaining, NUM_STAGES: gl.constexpr):
    """A ring of NUM_STAGES tiles; copies of all but the last are started.

    The first tile begins ``remaining`` rows before row ``last``, the chunk's end.
    """
    shape: gl.constexpr = [NUM_STAGES] + desc.block_type.shape  # noqa: RUF005  (no star)
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(stage), count=1)
    ring = HistoryRing(full, tiles)
    for stage in gl.static_range(NUM_STAGES - 1):
        _expect(ring, stage, desc, remaining - stage * tiles.shape[3])
        _copy(ring, stage, desc, last, remaining - stage * tiles.shape[3])
    return ring


@gluon.jit
def wait_for_tile(ring, n, desc, remaining):
    """The ``n``-th tile, once it has arrived, ``remaining`` rows before the chunk's end."""
    ahead: gl.constexpr = ring.full.shape[0] - 1
    tile = read(ring, n)
    _expect(ring, n + ahead, desc, remaining - ahead * tile.shape[0])
    return tile


@gluon.jit
def copy_next(ring, n, desc, last, remaining):
    """Start to copy the next tile to the stage of tile ``n - 1``, once all warps have read that."""
    thread_barrier()
    ahead: gl.constexpr = ring.full.shape[0] - 1
    _copy(ring, n + ahead, desc, last, remaining - ahead * ring.tiles.shape[3])


@gluon.jit
def _query_elements(tile, count, D: gl.constexpr):
    """Offsets of the elements of ``tile`` in rows of width ``D``, and the mask of ``count``."""
    layout: gl.constexpr = row_layout(tile.shape[1], tile.dtype, gl.num_warps())
    r = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))[None, :]
    return r * D + d, (r < count) & (d < D)


@gluon.jit
def copy_queries(ptr, count, C: gl.constexpr):
    """``[BLOCK_R, BLOCK_D]`` in shared memory, to which ``count`` rows from ``ptr`` on are being
    copied, padded with zeros.
    """
    shape: gl.constexpr = [C.BLOCK_R, C.BLOCK_D]
    tile = gl.allocate_shared_memory(ptr.dtype.element_ty, shape, warpgroup_layout(C.BLOCK_D))
    elements, mask = _query_elements(tile, count, C.D)
    async_copy.async_copy_global_to_shared(tile, ptr + elements, mask=mask)
    return tile


@gluon.jit
def store_transposed(ptr, value, tile, count, D: gl.constexpr):
    """Store the columns of ``value`` as ``count`` rows from ``ptr`` on, through ``tile``."""
    elements, mask = _query_elements(tile, count, D)
    tile.permute((1, 0)).store(value)
    layout: gl.constexpr = row_layout(tile.shape[1], tile.dtype, gl.num_warps())
    gl.store(ptr + elements, tile.load(layout), mask=mask)


@gluon.jit
def add_biases(scores, biases, start, chunk, count, C: gl.constexpr):
    """``scores`` ``[rows, queries]``, in base 2, of the rows from ``start`` on, plus all biases.

    The columns of a lane are eight apart. If the number of heads divides eight, they belong to one
    head, whose bias the lane loads once.
    """
    if biases.prior_weights is not None or C.P + C.A > 0:
        PERIOD: gl.constexpr = 8 if 8 % C.H == 0 else C.BLOCK_R
        by_period = gl.reshape(scores, [C.BLOCK_N, C.BLOCK_R // PERIOD, PERIOD])
        layout: gl.constexpr = gl.SliceLayout(1, by_period.type.layout)
        n = start + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, layout))
        r = gl.arange(0, PERIOD, gl.SliceLayout(0, layout))
        bias = load_bias(biases, row_buckets(n, biases, chunk, C), n, r, chunk, count, C)
        by_period += gl.expand_dims(bias * LOG2E, 1)
        scores = gl.convert_layout(
            gl.reshape(by_period, [C.BLOCK_N, C.BLOCK_R]), scores.type.layout
        )
    return scores
