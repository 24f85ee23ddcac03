"""Digits into bytes, and out of them: memory-bound, N·L·(e + 1/5) bytes for digits of e bytes."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.digits import bytes_of_digits, digits_per_byte
from torchrec_jagged_attn.kernels.common.digits import load_digits
from torchrec_jagged_attn.kernels.common.launch import Launcher

__all__ = ["pack", "unpack"]

TILE = 4096  # elements


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _pack_kernel(
    digits_ptr,  # [N, L] integers, rows stride apart
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
        there = (n < num_rows) & (d < L)
        digit = tl.load(digits_ptr + n * stride + d, mask=there, other=0).to(tl.int32)
        value = value * LEVELS + tl.where(there, digit + LEVELS // 2, 0)
    mask = (n < num_rows) & (b < BYTES)
    tl.store(packed_ptr + n * BYTES + b, value.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _unpack_kernel(
    packed_ptr,  # [N, bytes], rows stride apart
    digits_ptr,  # [N, L] int8
    num_rows,
    stride,
    L: tl.constexpr,
    LEVELS: tl.constexpr,
    PER_BYTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Digits of BLOCK_N rows, BLOCK_D of each."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    digits = load_digits(packed_ptr + n * stride, n < num_rows, d, L, LEVELS, PER_BYTE)
    mask = (n < num_rows) & (d < L)
    tl.store(digits_ptr + n * L + d, digits.to(tl.int8), mask=mask)


_pack = Launcher(_pack_kernel)
_unpack = Launcher(_unpack_kernel)


def pack(digits: Tensor, num_levels: int) -> Tensor:
    """``[N, num_bytes]`` uint8 of digits ``[N, L]``."""
    num_rows, num_digits = digits.shape
    num_bytes = bytes_of_digits(num_digits, num_levels)
    packed = digits.new_empty(num_rows, num_bytes, dtype=torch.uint8)
    if num_rows:
        digits = _unit_stride(digits)
        constants = _constants(num_bytes, L=num_digits, BYTES=num_bytes, LEVELS=num_levels)
        _pack(_grid(num_rows, num_bytes, constants), (digits, packed, *_sizes(digits)), constants)
    return packed


def unpack(packed: Tensor, num_digits: int, num_levels: int) -> Tensor:
    """``[N, L]`` int8 of bytes ``[N, num_bytes]``."""
    digits = packed.new_empty(packed.shape[0], num_digits, dtype=torch.int8)
    if digits.numel():
        packed = _unit_stride(packed)
        constants = _constants(num_digits, L=num_digits, LEVELS=num_levels)
        grid = _grid(packed.shape[0], num_digits, constants)
        _unpack(grid, (packed, digits, *_sizes(packed)), constants)
    return digits


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
        "PER_BYTE": digits_per_byte(others["LEVELS"]),
        "BLOCK_N": TILE // block_d,
        "BLOCK_D": block_d,
    }
