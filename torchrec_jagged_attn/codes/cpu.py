"""Codes in bytes and out of them, in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.codes import bytes_of_codes, codes_per_byte


def pack(codes: Tensor, num_levels: int) -> Tensor:
    """``[N, num_bytes]`` uint8 of codes ``[N, L]``."""
    num_codes, per_byte = codes.shape[1], codes_per_byte(num_levels)
    num_bytes = bytes_of_codes(num_codes, num_levels)
    filled = F.pad(codes.int() + num_levels // 2, (0, num_bytes * per_byte - num_codes))
    of_bytes = filled.reshape(-1, num_bytes, per_byte)
    return (of_bytes * _place_values(codes, num_levels)).sum(2).to(torch.uint8)


def unpack(packed: Tensor, num_codes: int, num_levels: int) -> Tensor:
    """``[N, L]`` int8 of bytes ``[N, num_bytes]``."""
    values = torch.arange(256, dtype=torch.int32, device=packed.device).unsqueeze(1)
    codes = values // _place_values(packed, num_levels) % num_levels - num_levels // 2
    # A row of these for each byte: divisions of every byte would take longer than attention does.
    found = codes.to(torch.int8).index_select(0, packed.flatten().int())
    return found.view(len(packed), packed.shape[1] * codes.shape[1])[:, :num_codes].contiguous()


def rows_of_codes(packed: Tensor, width: int, num_levels: int, dtype: torch.dtype) -> Tensor:
    """``[N, width]``: the codes of bytes, and a one in the last column."""
    rows = torch.ones(len(packed), width, dtype=dtype, device=packed.device)
    rows[:, :-1] = unpack(packed, width - 1, num_levels)
    return rows


def _place_values(like: Tensor, num_levels: int) -> Tensor:
    """What each code of a byte counts, ``[codes_per_byte]``."""
    exponents = torch.arange(codes_per_byte(num_levels), dtype=torch.int32, device=like.device)
    return num_levels**exponents
