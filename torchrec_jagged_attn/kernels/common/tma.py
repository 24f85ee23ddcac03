"""Boxes of jagged rows for the tensor memory accelerator, and rings of them in shared memory."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "Descriptor",
    "fill",
    "is_addressable",
    "jagged_rows",
    "make_ring",
    "release",
    "wait_empty",
    "wait_full",
]
END = gl.constexpr(2**30)  # see jagged_rows


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr):
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
def wait_empty(ring, n, STAGES: gl.constexpr):
    """Wait until the tile before the ``n``-th of a ring, in its place, has been read."""
    mbarrier.wait(ring[2].index(n % STAGES), (n // STAGES + 1) & 1)


@gluon.jit
def fill(ring, n, desc, end, rest, head, STAGES: gl.constexpr):
    """Begin to copy the tile whose first row is ``rest`` rows before ``end``, see jagged_rows."""
    stage = n % STAGES
    mbarrier.expect(ring[1].index(stage), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        desc, [END, end, END - rest, head, 0], ring[1].index(stage), ring[0].index(stage)
    )


@gluon.jit
def wait_full(ring, n, STAGES: gl.constexpr):
    """The ``n``-th tile of a ring, ``[rows, width]``, once it is there."""
    stage = n % STAGES
    mbarrier.wait(ring[1].index(stage), (n // STAGES) & 1)
    tile = ring[0].index(stage)
    return tile.reshape([tile.shape[2], tile.shape[4]])


@gluon.jit
def release(ring, n, STAGES: gl.constexpr):
    """Say that this group has read the ``n``-th tile of a ring."""
    mbarrier.arrive(ring[2].index(n % STAGES))


_SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=5)


def is_addressable(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can address rows of ``[L, H, D]``."""
    rows, heads, width = x.shape
    stride = x.stride(0)
    aligned = x.data_ptr() % 16 == 0 and stride % 8 == 0 and width % 8 == 0
    return aligned and stride >= heads * width and rows <= END.value


class Descriptor(TensorDescriptor):
    """One whose fields have been checked by :func:`takes`: checks take longer than all else."""

    def __post_init__(self) -> None:
        pass


def jagged_rows(x: Tensor, rows: int, width: int) -> TensorDescriptor:
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
    return Descriptor(x, shape, strides, [1, 1, rows, 1, width], _SWIZZLED)
