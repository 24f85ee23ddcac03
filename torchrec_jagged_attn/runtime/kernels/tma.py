"""Boxes of jagged rows for the tensor memory accelerator, and ring buffers of them.

A ring buffer has STAGES tiles in shared memory: one producer warp fills them, consumers read them,
and tile ``n`` replaces tile ``n - STAGES``. Each stage has two barriers: ``full`` completes once
the tile has arrived, ``empty`` once all consumers have released it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

END = gl.constexpr(2**30)  # see jagged_rows


class Barriers(NamedTuple):
    """Barriers of a ring, ``[STAGES, 1]`` each."""

    full: Any
    empty: Any


class Ring(NamedTuple):
    """Barriers and ``tiles`` ``[STAGES, *box]`` of a ring."""

    full: Any
    empty: Any
    tiles: Any


@gluon.jit
def make_barriers(STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """The barriers of a ring. WRITERS commit each tile, and READERS release it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Barriers(full, empty)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr = 2):
    """A ring for boxes of ``desc``, which :func:`fill` copies."""
    shape: gl.constexpr = [STAGES] + desc.block_type.shape  # noqa: RUF005  (Gluon takes no star)
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    full, empty = make_barriers(STAGES, 1, READERS)
    return Ring(full, empty, tiles)


@gluon.jit
def wait_full(ring, n):
    """Consumer: wait until tile ``n`` of a ring has arrived."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def wait_empty(ring, n):
    """Producer: wait until the stage of tile ``n`` of a ring is free."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.empty.index(n % STAGES), (n // STAGES + 1) & 1)


@gluon.jit
def commit(ring, n):
    """Producer: signal that tile ``n`` of a ring is complete."""
    mbarrier.arrive(ring.full.index(n % ring.full.shape[0]))


@gluon.jit
def release(ring, n):
    """Consumer: free the stage of tile ``n`` of a ring."""
    mbarrier.arrive(ring.empty.index(n % ring.full.shape[0]))


@gluon.jit
def as_rows(box):
    """A five-dimensional box of rows in shared memory, as ``[rows, width]``."""
    return box.reshape([box.shape[2], box.shape[4]])


@gluon.jit
def rows(ring, n):
    """Tile ``n`` of a ring, ``[rows, width]``."""
    return as_rows(ring.tiles.index(n % ring.full.shape[0]))


@gluon.jit
def read(ring, n):
    """Consumer: tile ``n`` of a ring, ``[rows, width]``, once it has arrived."""
    wait_full(ring, n)
    return rows(ring, n)


@gluon.jit
def copy_in(desc, end, remaining, head, barrier, tile, pred=True):
    """If ``pred``, start to copy the box from ``remaining`` rows before ``end`` on to ``tile``."""
    coordinates = [END, end, END - remaining, head, 0]
    tma.async_copy_global_to_shared(desc, coordinates, barrier, tile, pred)


@gluon.jit
def copy_out(desc, end, remaining, head, tile, column=0):
    """Start to copy ``tile`` to the box that :func:`copy_in` would read, from ``column`` on."""
    tma.async_copy_shared_to_global(desc, [END, end, END - remaining, head, column], tile)


@gluon.jit
def fill(ring, n, desc, end, remaining, head, MORE_BYTES: gl.constexpr = 0):
    """Producer: start to copy tile ``n`` of a ring, see :func:`copy_in`.

    MORE_BYTES of other copies arrive at the same barrier.
    """
    stage = n % ring.full.shape[0]
    full = ring.full.index(stage)
    mbarrier.expect(full, desc.block_type.nbytes + MORE_BYTES)
    copy_in(desc, end, remaining, head, full, ring.tiles.index(stage))


_SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=5)


def is_addressable(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can address rows of ``[L, H, D]``."""
    rows, heads, width = x.shape
    stride = x.stride(0)
    aligned = x.data_ptr() % 16 == 0 and stride % 8 == 0 and width % 8 == 0
    return aligned and stride >= heads * width and rows <= END.value


class Descriptor(TensorDescriptor):
    """A descriptor without checks of its fields, which take longer than the rest of a launch."""

    def __post_init__(self) -> None:
        pass


def jagged_rows(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Boxes of ``rows`` of one head of ``x`` ``[L, H, D]`` that are cut off where a sample ends.

    The row ``j`` rows before ``end``, the end of its sample, has the coordinates
    ``(END, end, END - j)``: the bound of the third dimension is END, so that rows from ``end`` on
    are out of bounds. With a stride of ``s`` elements between rows, that of the first dimension is
    ``2^34 - s``, so that the address is ``2^64 + s · (end - j)`` elements; 2^64 wraps to zero.
    """
    s = x.stride(0)
    endless = 2**31 - 2**16
    _, heads, of_head = x.shape
    shape = [endless, endless, END.value, heads, of_head]
    strides = [2**34 - s, s, s, of_head, 1]
    return Descriptor(x, shape, strides, [1, 1, rows, 1, width], _SWIZZLED)
