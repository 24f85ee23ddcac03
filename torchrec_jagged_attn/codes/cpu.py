"""Packing and unpacking of codes in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.codes import bytes_of_codes, codes_per_byte


def pack(codes: Tensor, num_levels: int) -> Tensor:
    """Pack codes ``[N, L]`` into ``[N, num_bytes]`` uint8."""
    num_codes, per_byte = codes.shape[1], codes_per_byte(num_levels)
    num_bytes = bytes_of_codes(num_codes, num_levels)
    padded = F.pad(codes.int() + num_levels // 2, (0, num_bytes * per_byte - num_codes))
    grouped = padded.reshape(-1, num_bytes, per_byte)
    return (grouped * _powers(codes, num_levels)).sum(2).to(torch.uint8)


def unpack(packed: Tensor, num_codes: int, num_levels: int) -> Tensor:
    """Unpack ``[N, num_bytes]`` uint8 into codes ``[N, L]`` int8."""
    values = torch.arange(256, dtype=torch.int32, device=packed.device).unsqueeze(1)
    table = values // _powers(packed, num_levels) % num_levels - num_levels // 2
    # A lookup in a table of all bytes: dividing every byte would take longer than attention does.
    codes = table.to(torch.int8).index_select(0, packed.flatten().int())
    return codes.view(len(packed), packed.shape[1] * table.shape[1])[:, :num_codes].contiguous()


def rows_of_codes(packed: Tensor, width: int, num_levels: int, dtype: torch.dtype) -> Tensor:
    """Unpack codes to rows ``[N, width]`` with a constant 1 in the last column."""
    rows = torch.ones(len(packed), width, dtype=dtype, device=packed.device)
    rows[:, :-1] = unpack(packed, width - 1, num_levels)
    return rows


def _powers(like: Tensor, num_levels: int) -> Tensor:
    """Powers of ``num_levels``, the factors of the codes in a byte: ``[codes_per_byte]``."""
    exponents = torch.arange(codes_per_byte(num_levels), dtype=torch.int32, device=like.device)
    return num_levels**exponents
