"""Helpers of Gluon kernels: layouts of products, queues of tiles, dependent launches."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from torchrec_jagged_attn.ops.device.tma import read, wait_full

WG_ROWS = gl.constexpr(64)  # rows per warpgroup of a product


@gluon.jit
def store_fields(fields, step, tile, STAGES: gl.constexpr):
    """Store the fields of ``tile``, a tuple of int32, in the stage of ``step`` in shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    FIELDS: gl.constexpr = fields.shape[0] // STAGES
    for field in gl.static_range(FIELDS):
        value = gl.full([1], tile[field], gl.int32, layout)
        fields.index(step % STAGES * FIELDS + field).store(value)


@gluon.jit
def load_field(fields, step, field: gl.constexpr, STAGES: gl.constexpr):
    """Load a field that :func:`store_fields` stored for ``step``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    FIELDS: gl.constexpr = fields.shape[0] // STAGES
    return gl.max(fields.index(step % STAGES * FIELDS + field).load(layout), 0)


@gluon.jit
def next_tile(fields, queries, step):
    """Return ``(row, count, base, num_keys, head)`` of a tile, once its queries have arrived."""
    STAGES: gl.constexpr = queries.full.shape[0]
    wait_full(queries, step)
    row, count = load_field(fields, step, 0, STAGES), load_field(fields, step, 1, STAGES)
    base, num_keys = load_field(fields, step, 2, STAGES), load_field(fields, step, 3, STAGES)
    return row, count, base, num_keys, load_field(fields, step, 4, STAGES)


@gluon.jit
def multiply_keys(q, keys, n):
    """Issue the asynchronous product of ``q`` and the transpose of tile ``n`` of keys."""
    k = read(keys, n)
    BLOCK_N: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([WG_ROWS, BLOCK_N], gl.float32, layout)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def as_operand(weights, dtype: gl.constexpr):
    """Convert ``weights`` to the left operand of a product, in registers."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, weights.type.layout, 2))


@gluon.constexpr_function
def products_by_warpgroup(columns, warps):
    """Return the layout of ``wgmma`` products with N = ``columns``; a warpgroup is four warps."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # names in Triton 3.6 and 3.7


@gluon.constexpr_function
def products_by_warp(warps):
    """Return the layout of ``mma`` products, with all ``warps`` along M."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def launch_dependents():
    """Allow the next kernel to start once all programs have called this or ended.

    That kernel must call :func:`wait_for_last_kernel` before it reads their results.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_last_kernel():
    """Wait until the previous kernel has ended; with overlapping launches it may still run."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
