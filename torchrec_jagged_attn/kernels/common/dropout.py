"""Which rows of a history are dropped, by a counter-based generator: nothing of it is stored.

A row's number is the counter of SplitMix64 (Steele, Lea and Flood, OOPSLA '14), so that forward,
backward and every device draw the same for it. ``cpu/dropout.py`` does it in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["is_dropped"]


@triton.jit
def is_dropped(row_dropout_ptr, n):
    """Whether ``row_dropout`` (``[2]`` int64: a seed, and how many of 2^32 draws drop) drops the
    rows ``n`` (int64).
    """
    x = tl.load(row_dropout_ptr) + (n + 1) * -7046029254386353131
    # Shifts of unsigned numbers.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 32) & 0xFFFFFFFF) < tl.load(row_dropout_ptr + 1)
