"""Digits in bytes and out of them, in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.digits import bytes_of_digits, digits_per_byte

__all__ = ["pack", "rows_of_digits", "unpack"]


def pack(digits: Tensor, num_levels: int) -> Tensor:
    """``[N, num_bytes]`` uint8 of digits ``[N, L]``."""
    num_digits, per_byte = digits.shape[1], digits_per_byte(num_levels)
    num_bytes = bytes_of_digits(num_digits, num_levels)
    filled = F.pad(digits.int() + num_levels // 2, (0, num_bytes * per_byte - num_digits))
    of_bytes = filled.reshape(-1, num_bytes, per_byte)
    return (of_bytes * _place_values(digits, num_levels)).sum(2).to(torch.uint8)


def unpack(packed: Tensor, num_digits: int, num_levels: int) -> Tensor:
    """``[N, L]`` int8 of bytes ``[N, num_bytes]``."""
    values = torch.arange(256, dtype=torch.int32, device=packed.device).unsqueeze(1)
    digits = values // _place_values(packed, num_levels) % num_levels - num_levels // 2
    # A row of these for each byte: divisions of every byte would take longer than attention does.
    found = digits.to(torch.int8).index_select(0, packed.flatten().int())
    return found.view(len(packed), packed.shape[1] * digits.shape[1])[:, :num_digits].contiguous()


def rows_of_digits(packed: Tensor, width: int, num_levels: int, dtype: torch.dtype) -> Tensor:
    """``[N, width]``: the digits of bytes, and a one in the last column."""
    rows = torch.ones(len(packed), width, dtype=dtype, device=packed.device)
    rows[:, :-1] = unpack(packed, width - 1, num_levels)
    return rows


def _place_values(like: Tensor, num_levels: int) -> Tensor:
    """What each digit of a byte counts, ``[digits_per_byte]``."""
    exponents = torch.arange(digits_per_byte(num_levels), dtype=torch.int32, device=like.device)
    return num_levels**exponents
