"""Copies of jagged rows by the tensor memory accelerator (TMA), and ring buffers in shared memory.

A ring buffer has STAGES tiles: a producer warp fills them, consumers read them, and tile ``n``
replaces tile ``n - STAGES``. Each stage has two barriers: ``full`` completes when the tile has
arrived, ``empty`` when all consumers have released it. One thread arrives for its partition:
Triton inserts a barrier of the partition before, so that all threads have read the tile.
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
    """Barriers of a ring buffer, ``[STAGES, 1]`` each."""

    full: Any
    empty: Any


class Ring(NamedTuple):
    """Barriers and ``tiles`` ``[STAGES, *block_shape]`` of a ring buffer."""

    full: Any
    empty: Any
    tiles: Any


@gluon.jit
def make_barriers(STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Allocate the barriers of a ring. WRITERS commit each tile, and READERS release it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Barriers(full, empty)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr = 2):
    """Allocate a ring for blocks of ``desc``, which :func:`fill` copies."""
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
def as_rows(block):
    """View a block of :func:`jagged_rows` in shared memory as ``[rows, width]``."""
    return block.reshape([block.shape[2], block.shape[4]])


@gluon.jit
def rows(ring, n):
    """Return tile ``n`` of a ring, ``[rows, width]``, without waiting."""
    return as_rows(ring.tiles.index(n % ring.full.shape[0]))


@gluon.jit
def read(ring, n):
    """Consumer: wait for tile ``n`` of a ring and return it, ``[rows, width]``."""
    wait_full(ring, n)
    return rows(ring, n)


@gluon.jit
def copy_in(desc, end, remaining, head, barrier, tile, pred=True):
    """Start to copy rows to ``tile``, from row ``end - remaining`` on, if ``pred``.

    ``end`` is the end of the sample. Rows beyond it arrive as zeros.
    """
    coordinates = [END, end, END - remaining, head, 0]
    tma.async_copy_global_to_shared(desc, coordinates, barrier, tile, pred)


@gluon.jit
def copy_out(desc, end, remaining, head, tile, column=0):
    """Start to copy ``tile`` to rows from ``end - remaining`` on, columns from ``column`` on.

    Rows beyond ``end`` are not written.
    """
    tma.async_copy_shared_to_global(desc, [END, end, END - remaining, head, column], tile)


@gluon.jit
def fill(ring, n, desc, end, remaining, head, MORE_BYTES: gl.constexpr = 0):
    """Producer: start to copy tile ``n`` of a ring, see :func:`copy_in`.

    MORE_BYTES are the bytes of other copies that arrive at the same barrier.
    """
    stage = n % ring.full.shape[0]
    full = ring.full.index(stage)
    mbarrier.expect(full, desc.block_type.nbytes + MORE_BYTES)
    copy_in(desc, end, remaining, head, full, ring.tiles.index(stage))


_SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=5)


def is_tma_compatible(x: Tensor) -> bool:
    """Return whether :func:`jagged_rows` supports ``x`` ``[L, H, D]``."""
    rows, heads, width = x.shape
    stride = x.stride(0)
    aligned = x.data_ptr() % 16 == 0 and stride % 8 == 0 and width % 8 == 0
    return aligned and stride >= heads * width and rows <= END.value


class Descriptor(TensorDescriptor):
    """A descriptor without checks of its fields, which would take most of the time of a launch."""

    def __post_init__(self) -> None:
        pass


def jagged_rows(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Return a descriptor of blocks of ``rows`` of one head of ``x`` ``[L, H, D]``.

    A block never extends beyond the end of its sample: copies clip it there. Row ``end - j`` has
    the coordinates ``(END, end, END - j)``, where ``end`` is the end of the sample. The third
    dimension has the size END, so rows from ``end`` on are out of bounds. With a stride of ``s``
    elements between rows, the stride of the first dimension is ``2^34 - s``. So the address is
    ``2^64 + s · (end - j)`` elements, and 2^64 wraps to zero.
    """
    s = x.stride(0)
    unbounded = 2**31 - 2**16
    _, heads, head_dim = x.shape
    shape = [unbounded, unbounded, END.value, heads, head_dim]
    strides = [2**34 - s, s, s, head_dim, 1]
    return Descriptor(x, shape, strides, [1, 1, rows, 1, width], _SWIZZLED)
