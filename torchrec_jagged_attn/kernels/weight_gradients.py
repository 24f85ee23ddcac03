"""Gradients of the projections of keys and values, where they are absorbed on the targets' side.

    ∂W_K,h = Σ_r q_rh ⊗ ∂u_rh      ∂W_V,h = Σ_r ∂values_rh ⊗ pooled_rh      [X, Y], over R rows

There are few outputs, and rows of all targets of a batch: 4·H·X·Y FLOPs a row and 2·H·(X + Y)
elements of it. So rows are split into parts, as many as fill a GPU, and their sums added in one
order, whatever GPU it is. A batched product of cuBLAS has a program for each tile of outputs, and
in fp32 adds one row after the other.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from torchrec_jagged_attn.kernels.common import padded_width, product_precision
from torchrec_jagged_attn.kernels.launch import Launcher, launches_overlap, overlap_options
from torchrec_jagged_attn.kernels.product_tiles import load_tile, multiply, tile_of

__all__ = ["weight_gradients"]

# How many programs rows are split for: two for each multiprocessor of an H200.
PROGRAMS = 264
# The fewest rows that are worth a program, and how many are added at a time.
ROWS = 128
BLOCK_R = 32


@triton.jit(do_not_specialize=["num_rows", "rows_of_part"])
def _parts_kernel(
    q_ptr,  # [R, H, X]
    grad_u_ptr,  # [R, H, Y]
    grad_values_ptr,  # [R, H, X]
    pooled_ptr,  # [R, H, Y]
    grad_w_k_ptr,  # [H, X, Y]
    grad_w_v_ptr,  # [H, X, Y]
    sums_ptr,  # [parts, 2, H, X, Y] fp32, of both; unused where there is one part
    num_rows,
    rows_of_part,
    H: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of one of both gradients, of one head, over one part of the rows.

    Tiles wider than a head read on in the next one: what becomes of that is not stored.
    """
    if OVERLAP:
        cuda.gdc_launch_dependents()
    TILES_Y: tl.constexpr = (Y + BLOCK_Y - 1) // BLOCK_Y
    TILES: tl.constexpr = (X + BLOCK_X - 1) // BLOCK_X * TILES_Y
    program = tl.program_id(0)
    part = tl.program_id(1)
    of_values = program // (H * TILES)
    a_ptr, b_ptr, out_ptr = q_ptr, grad_u_ptr, grad_w_k_ptr
    if of_values == 1:
        a_ptr, b_ptr, out_ptr = grad_values_ptr, pooled_ptr, grad_w_v_ptr
    h = program // TILES % H
    x = program % TILES // TILES_Y * BLOCK_X
    y = program % TILES_Y * BLOCK_Y
    begin = part * rows_of_part
    end = tl.minimum(begin + rows_of_part, num_rows)
    acc = tl.zeros([BLOCK_X, BLOCK_Y], tl.float32)
    for r in tl.range(begin, end, BLOCK_R, num_stages=NUM_STAGES):
        a = load_tile(a_ptr, h * X + x, r, H * X, end, BLOCK_X, BLOCK_R, True, tl.int32)
        b = load_tile(b_ptr, r, h * Y + y, end, H * Y, BLOCK_R, BLOCK_Y, False, tl.int32)
        acc = multiply(a, b, acc, PRECISION)
    origin, at, mask = tile_of(x, y, X, Y, BLOCK_X, BLOCK_Y, False, tl.int32)
    if tl.num_programs(1) > 1:
        sums_ptr += ((part * 2 + of_values) * H + h) * (X * Y)
        tl.store(sums_ptr + origin + at, acc, mask=mask)
    else:
        tl.store(out_ptr + h * (X * Y) + origin + at, acc, mask=mask)


@triton.jit(do_not_specialize=["num_parts"])
def _add_kernel(
    sums_ptr,  # [parts, 2, SIZE] fp32
    grad_w_k_ptr,  # [SIZE]
    grad_w_v_ptr,  # [SIZE]
    num_parts,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The sum of all parts of BLOCK elements of one of both gradients."""
    of_values = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out_ptr = grad_w_k_ptr
    if of_values == 1:
        out_ptr = grad_w_v_ptr
    acc = tl.zeros([BLOCK_PARTS, BLOCK], tl.float32)
    if OVERLAP:
        cuda.gdc_wait()
    for first in range(0, num_parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        at = (part * 2 + of_values)[:, None] * SIZE + i[None, :]
        mask = (part < num_parts)[:, None] & (i < SIZE)[None, :]
        acc += tl.load(sums_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + i, tl.sum(acc, 0), mask=i < SIZE)


_parts = Launcher(_parts_kernel)
_add = Launcher(_add_kernel)


def weight_gradients(
    q: Tensor,
    grad_u: Tensor,
    grad_values: Tensor,
    pooled: Tensor,
    grad_w_k: Tensor,
    grad_w_v: Tensor,
) -> None:
    """Sum outer products of ``[R, H, X]`` and ``[R, H, Y]``, of one dtype, over their rows.

    Those of ``q`` and ``grad_u`` into ``grad_w_k``, and those of ``grad_values`` and ``pooled``
    into ``grad_w_v``, ``[H, X, Y]`` and contiguous both.
    """
    num_rows, (num_heads, x, y), size = q.shape[0], grad_w_k.shape, grad_w_k.numel()
    overlap = launches_overlap(q.device)
    constants = _constants(product_precision(q.dtype), num_heads, x, y, overlap)
    num_tiles = 2 * num_heads * -(-x // constants["BLOCK_X"]) * -(-y // constants["BLOCK_Y"])
    rows_of_part = max(ROWS, -(-num_rows * num_tiles // (PROGRAMS * BLOCK_R)) * BLOCK_R)
    num_parts = max(1, -(-num_rows // rows_of_part))
    sums = q.new_empty(num_parts if num_parts > 1 else 0, 2, size, dtype=torch.float32)
    operands = [x.contiguous() for x in (q, grad_u, grad_values, pooled)]
    _parts(
        (num_tiles, num_parts),
        (*operands, grad_w_k, grad_w_v, sums, num_rows, rows_of_part),
        constants,
    )
    if num_parts > 1:
        constants = _add_constants(size, overlap)
        grid = -(-size // constants["BLOCK"]), 2
        _add(grid, (sums, grad_w_k, grad_w_v, num_parts), constants)


@functools.cache
def _constants(precision: str, heads: int, x: int, y: int, overlap: bool) -> dict:
    """Compile-time arguments of ``_parts_kernel``."""
    return {
        "H": heads,
        "X": x,
        "Y": y,
        "PRECISION": precision,
        "BLOCK_X": min(64, padded_width(x)),
        "BLOCK_Y": min(64, padded_width(y)),
        "BLOCK_R": BLOCK_R,
        "NUM_STAGES": 3,
        "OVERLAP": overlap,
        # Four warps would multiply together, and transpose TF32 for that; two do not.
        "num_warps": 2 if precision == "tf32" else 4,
    }


@functools.cache
def _add_constants(size: int, overlap: bool) -> dict:
    """Compile-time arguments of ``_add_kernel``."""
    return {"SIZE": size, "BLOCK": 128, "BLOCK_PARTS": 16, **overlap_options(overlap)}
