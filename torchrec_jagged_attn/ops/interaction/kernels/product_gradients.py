"""Both gradients of a product within each sample, in one pass over its rows.

    of x · y_b,  with dout [N, T]      dx = dout · y_bᵀ      dy_b = xᵀ · dout
    of xᵀ · y,   with dout [B, D, T]   dx = y · dout_bᵀ      dy = x · dout_b

The kernels read x once and write dx once: 2·N·D·e bytes, with e bytes per element, and 4·N·D·T
FLOPs. A tile holds all of T: see ``is_supported``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.base import devices
from torchrec_jagged_attn.ops.device.jagged import add_chunks, find_chunk, find_tile
from torchrec_jagged_attn.ops.device.matmul import (
    load_tile,
    multiply,
    padded_width,
    product_precision,
    tile_of,
)
from torchrec_jagged_attn.ops.interaction.kernels.products import fewest_rows_of_chunk
from torchrec_jagged_attn.ops.launch import Launcher

MAX_WIDTH = 64  # largest T of one tile


@triton.jit(do_not_specialize=["num_samples"])
def _dense_kernel(
    grad_out_ptr,  # [N, T]
    x_ptr,  # [N, D]
    y_ptr,  # [B, D, T]
    grad_x_ptr,  # [N, D]
    grad_y_ptr,  # [B, D, T]
    sums_ptr,  # [splits, D, T] fp32
    offsets_ptr,  # [B + 1]
    num_samples,
    D: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Gradients of ``x · y_b`` for BLOCK_D of D, over one chunk of a sample's rows."""
    if OVERLAP:
        cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    program = tl.program_id(0).to(tl.int64)
    busy, sample, begin, end, split = find_chunk(offsets_ptr, num_samples, program // TILES, CHUNK)
    if not busy:
        return
    d = (program % TILES).to(tl.int32) * BLOCK_D
    rows = (end - begin).to(tl.int32)
    y_first = sample * (D * T)
    y = load_tile(y_ptr + y_first, 0, d, T, D, BLOCK_T, BLOCK_D, True)
    acc = tl.zeros([BLOCK_D, BLOCK_T], tl.float32)
    for r in tl.range(0, rows, BLOCK_R, num_stages=3):
        grad_out = load_tile(grad_out_ptr + begin * T, r, 0, rows, T, BLOCK_R, BLOCK_T)
        x = load_tile(x_ptr + begin * D, d, r, D, rows, BLOCK_D, BLOCK_R, True)
        acc = multiply(x, grad_out, acc, PRECISION)
        grad_x = multiply(grad_out, y, tl.zeros([BLOCK_R, BLOCK_D], tl.float32), PRECISION)
        origin, at, mask = tile_of(r, d, rows, D, BLOCK_R, BLOCK_D)
        tl.store(grad_x_ptr + begin * D + origin + at, grad_x, mask=mask)
    origin, at, mask = tile_of(d, 0, D, T, BLOCK_D, BLOCK_T)
    if split >= 0:
        tl.store(sums_ptr + split * (D * T) + origin + at, acc, mask=mask)
    else:
        tl.store(grad_y_ptr + y_first + origin + at, acc, mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def _jagged_kernel(
    grad_out_ptr,  # [B, D, T]
    x_ptr,  # [N, D]
    y_ptr,  # [N, T]
    grad_x_ptr,  # [N, D]
    grad_y_ptr,  # [N, T]
    offsets_ptr,  # [B + 1]
    num_samples,
    D: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Gradients of ``xᵀ · y`` for one tile of a sample's rows."""
    tile = tl.program_id(0).to(tl.int64)
    sample, begin, end, start = find_tile(offsets_ptr, num_samples, tile, 1, BLOCK_R)
    if start >= end - begin:
        return
    rows = (end - begin).to(tl.int32)
    r = start.to(tl.int32)
    sample_ptr = grad_out_ptr + sample * (D * T)
    y = load_tile(y_ptr + begin * T, r, 0, rows, T, BLOCK_R, BLOCK_T)
    acc = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for d in tl.range(0, D, BLOCK_D, num_stages=3):
        x = load_tile(x_ptr + begin * D, r, d, rows, D, BLOCK_R, BLOCK_D)
        grad_out = load_tile(sample_ptr, d, 0, D, T, BLOCK_D, BLOCK_T)
        acc = multiply(x, grad_out, acc, PRECISION)
        grad_x = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        grad_x = multiply(y, tl.trans(grad_out), grad_x, PRECISION)
        origin, at, mask = tile_of(r, d, rows, D, BLOCK_R, BLOCK_D)
        tl.store(grad_x_ptr + begin * D + origin + at, grad_x, mask=mask)
    origin, at, mask = tile_of(r, 0, rows, T, BLOCK_R, BLOCK_T)
    tl.store(grad_y_ptr + begin * T + origin + at, acc, mask=mask)


_dense = Launcher(_dense_kernel)
_jagged = Launcher(_jagged_kernel)


def is_supported(x: Tensor, width: int) -> bool:
    """Return whether these kernels support ``x`` ``[N, D]`` with ``width`` ``T``."""
    return x.numel() > 0 and 0 < width <= MAX_WIDTH


def jagged_dense_bmm_backward(
    grad_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """``dx [N, D]`` and ``dy [B, D, T]`` of ``x [N, D] × y [B, D, T] → [N, T]``."""
    (num_rows, depth), width, num_samples = x.shape, y.shape[2], offsets.numel() - 1
    constants = _dense_constants(
        x.dtype, product_precision(x.dtype), depth, width, devices.launches_overlap(x.device)
    )
    chunk = constants["CHUNK"]
    num_splits = num_rows // chunk
    grad_x, grad_y = x.new_empty(num_rows, depth), x.new_empty(num_samples, depth, width)
    sums = x.new_empty(num_splits, depth, width, dtype=torch.float32)
    offsets = offsets.contiguous()
    operands = grad_out.contiguous(), x.contiguous(), y.contiguous()
    _dense(
        ((num_splits + num_samples) * -(-depth // constants["BLOCK_D"]),),
        (*operands, grad_x, grad_y, sums, offsets, num_samples),
        constants,
    )
    add_chunks(sums, grad_y, offsets, depth * width, chunk)
    return grad_x, grad_y


def jagged_jagged_bmm_backward(
    grad_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """``dx [N, D]`` and ``dy [N, T]`` of ``x [N, D] × y [N, T] → [B, D, T]``."""
    (num_rows, depth), width, num_samples = x.shape, y.shape[1], offsets.numel() - 1
    constants = _constants(x.dtype, product_precision(x.dtype), depth, width)
    grad_x, grad_y = x.new_empty(num_rows, depth), x.new_empty(num_rows, width)
    operands = grad_out.contiguous(), x.contiguous(), y.contiguous()
    _jagged(
        (num_rows // constants["BLOCK_R"] + num_samples,),
        (*operands, grad_x, grad_y, offsets.contiguous(), num_samples),
        constants,
    )
    return grad_x, grad_y


@functools.cache
def _dense_constants(
    dtype: torch.dtype, precision: str, depth: int, width: int, overlap: bool
) -> dict:
    """Compile-time arguments of ``_dense_kernel``."""
    constants = _constants(dtype, precision, depth, width)
    return {
        **constants,
        "BLOCK_R": 32,
        "BLOCK_D": min(constants["BLOCK_D"], 64),
        "CHUNK": fewest_rows_of_chunk(depth, width),
        "OVERLAP": overlap,
    }


@functools.cache
def _constants(dtype: torch.dtype, precision: str, depth: int, width: int) -> dict:
    """Compile-time arguments of ``_jagged_kernel``.

    fp32 products use few warps, since each warp decomposes the whole narrow operand.
    """
    half, block_t = dtype.itemsize == 2, padded_width(width)
    return {
        "D": depth,
        "T": width,
        "PRECISION": precision,
        "BLOCK_R": 64 if half else 32,
        "BLOCK_D": min(128 if half else 32, padded_width(depth)),
        "BLOCK_T": block_t,
        "num_warps": 4 if half else min(block_t // 16, 4) * (2 if precision == "tf32" else 1),
    }
