"""Pack codes into bytes and unpack them: memory-bound, N·L·(e + 1/5) bytes for codes of e bytes."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.codes import bytes_of_codes, codes_per_byte
from torchrec_jagged_attn.codes.kernels.rows import load_codes
from torchrec_jagged_attn.runtime.launch import Launcher

TILE = 4096  # elements


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _pack_kernel(
    codes_ptr,  # [N, L] integers, rows stride apart
    packed_ptr,  # [N, BYTES]
    num_rows,
    stride,
    L: tl.constexpr,
    BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Bytes of BLOCK_N rows, BLOCK_D of each."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    b = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    value = tl.zeros([BLOCK_N, BLOCK_D], tl.int32)
    for k in tl.static_range(PER_BYTE - 1, -1, -1):
        d = b * PER_BYTE + k
        code_mask = (n < num_rows) & (d < L)
        code = tl.load(codes_ptr + n * stride + d, mask=code_mask, other=0).to(tl.int32)
        value = value * LEVELS + tl.where(code_mask, code + LEVELS // 2, 0)
    mask = (n < num_rows) & (b < BYTES)
    tl.store(packed_ptr + n * BYTES + b, value.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _unpack_kernel(
    packed_ptr,  # [N, bytes], rows stride apart
    codes_ptr,  # [N, L] int8
    num_rows,
    stride,
    L: tl.constexpr,
    LEVELS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Codes of BLOCK_N rows, BLOCK_D of each."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    codes = load_codes(packed_ptr + n * stride, n < num_rows, d, L, LEVELS, PER_BYTE)
    mask = (n < num_rows) & (d < L)
    tl.store(codes_ptr + n * L + d, codes.to(tl.int8), mask=mask)


_pack = Launcher(_pack_kernel)
_unpack = Launcher(_unpack_kernel)


def pack(codes: Tensor, num_levels: int) -> Tensor:
    """``[N, num_bytes]`` uint8 of codes ``[N, L]``."""
    num_rows, num_codes = codes.shape
    num_bytes = bytes_of_codes(num_codes, num_levels)
    packed = codes.new_empty(num_rows, num_bytes, dtype=torch.uint8)
    if num_rows:
        codes = _unit_stride(codes)
        constants = _constants(num_bytes, L=num_codes, BYTES=num_bytes, LEVELS=num_levels)
        _pack(_grid(num_rows, num_bytes, constants), (codes, packed, *_sizes(codes)), constants)
    return packed


def unpack(packed: Tensor, num_codes: int, num_levels: int) -> Tensor:
    """``[N, L]`` int8 of bytes ``[N, num_bytes]``."""
    codes = packed.new_empty(packed.shape[0], num_codes, dtype=torch.int8)
    if codes.numel():
        packed = _unit_stride(packed)
        constants = _constants(num_codes, L=num_codes, LEVELS=num_levels)
        grid = _grid(packed.shape[0], num_codes, constants)
        _unpack(grid, (packed, codes, *_sizes(packed)), constants)
    return codes


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.stride(0)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _grid(num_rows: int, width: int, constants: dict[str, int]) -> tuple[int, int]:
    return -(-num_rows // constants["BLOCK_N"]), -(-width // constants["BLOCK_D"])


@functools.cache
def _constants(width: int, **others: int) -> dict[str, int]:
    """Compile-time arguments: ``others``, and tiles of rows that are ``width`` elements wide."""
    block_d = min(128, triton.next_power_of_2(width))
    return {
        **others,
        "PER_BYTE": codes_per_byte(others["LEVELS"]),
        "BLOCK_N": TILE // block_d,
        "BLOCK_D": block_d,
    }
