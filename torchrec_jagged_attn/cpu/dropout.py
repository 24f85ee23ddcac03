"""What is dropped: ``kernels/common/dropout.py`` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropped_rows", "element_draws", "weight_factors"]


def dropped_rows(row_dropout: Tensor, num_rows: int) -> Tensor:
    """``[N]``: whether ``row_dropout`` (``[2]`` int64: a seed, and how many of 2^32 draws drop)
    drops each row.
    """
    seed, drops = row_dropout.unbind()
    return _draws(seed, torch.arange(num_rows, device=seed.device)) < drops


def weight_factors(dropout: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """``[R, N]`` fp64: what weights of the query rows ``r`` and the history rows ``n`` are
    multiplied with: zero of what ``dropout`` drops, else one by the probability to be kept.

    Query rows are rows times heads, in this order, and ``dropout`` is as ``row_dropout``.
    """
    seed, drops = dropout.unbind()
    bits = element_draws(seed, r, n)
    return torch.where(bits < drops, 0.0, 2**32 / (2**32 - drops).double())


def element_draws(seed: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """``[R, N]``: 32 bits, in int64, of the elements ``n`` of the rows ``r``."""
    x = _draws(seed, r).unsqueeze(1) ^ ((n * 0x9E3779B1) & 0xFFFFFFFF)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _draws(seed: Tensor, numbers: Tensor) -> Tensor:
    """32 bits of SplitMix64 for each of the ``numbers``, int64."""
    x = seed + (numbers + 1) * -7046029254386353131
    # Shifts of unsigned numbers.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 32) & 0xFFFFFFFF
