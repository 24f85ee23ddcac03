"""Checks of packed codes."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import check_int, check_shape, check_tensor, should_validate
from torchrec_jagged_attn.codes import MAX_LEVELS, bytes_of_codes, codes_per_byte


def check_num_levels(num_levels: int) -> int:
    """Return the number of levels of a code as an int. It must be odd and fit in a byte."""
    num_levels = check_int(num_levels, "num_levels", 0)
    if not 3 <= num_levels <= MAX_LEVELS or num_levels % 2 == 0:
        raise ValueError(f"num_levels must be odd and 3 to {MAX_LEVELS}, got {num_levels}")
    return num_levels


def check_packed(packed: Tensor, name: str, num_codes: int, num_levels: int) -> None:
    """Check that ``packed`` are uint8 rows of ``num_codes`` codes."""
    check_tensor(packed, name)
    if packed.dtype != torch.uint8:
        raise TypeError(f"{name} must be uint8, got {packed.dtype}")
    num_bytes = bytes_of_codes(num_codes, num_levels)
    check_shape(packed, name, "[N, num_bytes]", (None, num_bytes))


def check_packed_values(
    packed: Tensor, name: str, num_codes: int, num_levels: int, offsets: Tensor | None = None
) -> None:
    """Check that the bytes of ``packed`` rows are valid codes; see :func:`should_validate`.

    With ``offsets``, rows behind the last offset are ignored.
    """
    if not should_validate(packed):
        return
    if offsets is not None:
        packed = packed[: int(offsets[-1])]
    if packed.numel() == 0:
        return
    per_byte = codes_per_byte(num_levels)
    codes_in_last_byte = num_codes - (packed.shape[1] - 1) * per_byte
    for values, where, count in (
        (packed, "", per_byte),
        (packed[:, -1], " in the last byte of a row", codes_in_last_byte),
    ):
        max_byte = num_levels**count - 1
        if values.max() > max_byte:
            raise ValueError(f"{name} must be at most {max_byte}{where}, got {values.max().item()}")
