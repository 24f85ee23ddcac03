"""What kernels in Gluon share: layouts of products, barriers, launches that overlap."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
)

from torchrec_jagged_attn.kernels.common.tma import wait_full

__all__ = [
    "as_operand",
    "as_rows",
    "launch_dependents",
    "multiply_keys",
    "next_tile",
    "products_by_group",
    "products_by_warp",
    "tell",
    "thread_barrier",
]
GROUP_ROWS = gl.constexpr(64)  # queries of a group of warps


@gluon.jit
def tell(places, turn, tile, STAGES: gl.constexpr):
    """Leave where this turn's tile lies, four numbers, in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for field in gl.static_range(4):
        value = gl.full([1], tile[field], gl.int32, layout)
        places.index(turn % STAGES * 4 + field).store(value)


@gluon.jit
def _hear(places, turn, field: gl.constexpr, STAGES: gl.constexpr):
    """One of the numbers that :func:`tell` has left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(places.index(turn % STAGES * 4 + field).load(layout), 0)


@gluon.jit
def next_tile(places, queries, turn, STAGES: gl.constexpr):
    """``(row, count, num_keys, head)`` of this turn's tile, once its queries are there."""
    wait_full(queries, turn, STAGES)
    row, count = _hear(places, turn, 0, STAGES), _hear(places, turn, 1, STAGES)
    num_keys, head = _hear(places, turn, 2, STAGES), _hear(places, turn, 3, STAGES)
    return row, count, num_keys, head


@gluon.jit
def multiply_keys(q, keys, n, STAGES: gl.constexpr):
    """Begin the products of queries and the ``n``-th tile of keys."""
    k = wait_full(keys, n, STAGES)
    BLOCK_N: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def as_operand(weights, dtype: gl.constexpr):
    """Weights as the left side of a product."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, weights.type.layout, 2))


@gluon.constexpr_function
def products_by_group(columns, warps):
    """The tensor cores' products of groups of four warps, ``columns`` on their N side."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def as_rows(box):
    """A box of rows in shared memory, as ``[rows, width]``."""
    return box.reshape([box.shape[2], box.shape[4]])


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6's name, 3.7's


@gluon.constexpr_function
def products_by_warp(warps):
    """The tensor cores' products of single warps, ``warps`` of them along M."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def launch_dependents():
    """Let the next kernel begin once all programs have: it waits for their results itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_last_kernel():
    """Wait until the kernel before this one, which may have let it begin early, has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
