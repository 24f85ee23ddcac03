"""Which rows of a history are dropped: ``kernels/common/dropout.py`` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropped_rows"]


def dropped_rows(row_dropout: Tensor, num_rows: int) -> Tensor:
    """``[N]``: whether ``row_dropout`` (``[2]`` int64: a seed, and how many of 2^32 draws drop)
    drops each row.
    """
    seed, drops = row_dropout.unbind()
    x = seed + torch.arange(1, num_rows + 1, device=seed.device) * -7046029254386353131
    # Shifts of unsigned numbers.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 32) & 0xFFFFFFFF) < drops
