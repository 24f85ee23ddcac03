"""What is dropped: ``attention/kernels/dropout.py`` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_factors(dropout: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """``[R, N]`` fp64: what weights of the query rows ``r`` and the history rows ``n`` are
    multiplied with: zero of what ``dropout`` drops, else one by the probability to be kept.

    Query rows are rows times heads, in this order, and ``dropout`` is ``[2]`` int64: a seed, and
    how many of 2^32 draws drop.
    """
    seed, drops = dropout.unbind()
    factor = 2**32 / (2**32 - drops).double()
    return torch.where(are_among(element_draws(seed, r, n), drops), 0.0, factor)


def element_draws(seed: Tensor, r: Tensor, n: Tensor) -> Tensor:
    """``[R, N]`` of the elements ``n`` of the rows ``r``: 32 bits of each, for :func:`are_among`.

    int32 wraps as uint32 does in kernels, and takes half the memory of int64.
    """
    x = _draws(seed, r).to(torch.int32).unsqueeze(1) ^ (n * 0x9E3779B1).to(torch.int32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= (x >> shift) & (2 ** (32 - shift) - 1)  # a shift of unsigned numbers
        x *= factor - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


def are_among(draws: Tensor, drops: Tensor) -> Tensor:
    """Whether the 32 bits of ``draws``, as unsigned numbers, are below ``drops`` (int64)."""
    return (draws ^ -(2**31)) < torch.atleast_1d(drops) - 2**31  # a scalar would be cast to int32


def _draws(seed: Tensor, numbers: Tensor) -> Tensor:
    """32 bits of SplitMix64 for each of the ``numbers``, int64."""
    x = seed + (numbers + 1) * -7046029254386353131
    # Shifts of unsigned numbers.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 32) & 0xFFFFFFFF
