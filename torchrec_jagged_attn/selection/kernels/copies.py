"""Copies of rows by gather indices, zeros where an index is negative.

With R indices and rows of W bytes, it reads up to R·(8 + W) bytes and writes R·W.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.runtime.launch import Launcher

TILE = 4096  # elements copied by a program


@triton.jit(do_not_specialize=["num_rows"])
def _copy_rows_kernel(
    x_ptr,  # [M, D]
    index_ptr,  # [R] int64, -1 for zeros
    out_ptr,  # [R, D]
    num_rows,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy a tile of BLOCK_N rows and BLOCK_D columns."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(index_ptr + n, mask=n < num_rows, other=-1)
    x_mask = (row >= 0)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * D + d[None, :], mask=x_mask, other=0)
    mask = (n < num_rows)[:, None] & (d < D)[None, :]
    tl.store(out_ptr + n[:, None] * D + d[None, :], x, mask=mask)


_copy_rows = Launcher(_copy_rows_kernel)


def copy_rows(x: Tensor, index: Tensor) -> Tensor:
    """``[R, D]``: the rows of ``x [M, D]`` by ``index [R]``, zeros where that is -1."""
    num_rows, width = index.shape[0], x.shape[1]
    out = x.new_empty(num_rows, width)
    if out.numel():
        constants = _constants(width)
        grid = (-(-num_rows // constants["BLOCK_N"]), -(-width // constants["BLOCK_D"]))
        _copy_rows(grid, (x.contiguous(), index.contiguous(), out, num_rows), constants)
    return out


@functools.cache
def _constants(width: int) -> dict:
    """Compile-time arguments, for rows of ``width`` elements."""
    block_d = min(512, triton.next_power_of_2(width))
    return {"D": width, "BLOCK_N": min(1024, TILE // block_d), "BLOCK_D": block_d}
