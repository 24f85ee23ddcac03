"""Packing of codes into bytes, and unpacking, on any device. Arguments are not checked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.codes import codes_per_byte


def pack_codes(codes: Tensor, num_levels: int) -> Tensor:
    """Pack integer codes ``[N, L]`` into ``[N, num_bytes]`` uint8."""
    per_byte = codes_per_byte(num_levels)
    digits = codes.to(torch.uint8) + num_levels // 2  # wraps around to 0 … num_levels - 1
    digits = F.pad(digits, (0, -codes.shape[1] % per_byte))
    packed = digits[:, per_byte - 1 :: per_byte]
    for k in range(per_byte - 2, -1, -1):
        packed = packed * num_levels + digits[:, k::per_byte]
    return packed.contiguous()


def unpack_codes(packed: Tensor, num_codes: int, num_levels: int) -> Tensor:
    """Unpack ``[N, num_bytes]`` uint8 into codes ``[N, L]`` int8."""
    exponents = torch.arange(codes_per_byte(num_levels), dtype=torch.int32, device=packed.device)
    values = torch.arange(256, dtype=torch.int32, device=packed.device).unsqueeze(1)
    table = values // num_levels**exponents % num_levels - num_levels // 2
    # A lookup in a table of all bytes: dividing every byte would take longer than attention does.
    codes = table.to(torch.int8).index_select(0, packed.flatten().int())
    return codes.view(packed.shape[0], packed.shape[1] * table.shape[1])[:, :num_codes].contiguous()


def rows_of_codes(packed: Tensor, width: int, num_levels: int, dtype: torch.dtype) -> Tensor:
    """Unpack codes to rows ``[N, width]`` with a constant 1 in the last column."""
    rows = torch.ones(packed.shape[0], width, dtype=dtype, device=packed.device)
    rows[:, :-1] = unpack_codes(packed, width - 1, num_levels)
    return rows
