"""What is dropped, by counter-based generators: nothing of it is stored.

A row's number is the counter of SplitMix64 (Steele, Lea and Flood, OOPSLA '14), so that forward,
backward and every device draw the same for it. Of weights, the counter is the number of the query
row, of all samples and heads; its draw and the number of the history row, spread out, go through
the finalizer of MurmurHash3 (Appleby).
``attention/cpu_dropout.py`` does it in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["drop_weights", "element_draws", "is_dropped", "query_draws"]


@triton.jit
def _draws(seed, n):
    """32 bits, in int64, of each of the numbers ``n`` (int64)."""
    x = seed + (n + 1) * -7046029254386353131
    # Shifts of unsigned numbers.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 32) & 0xFFFFFFFF


@triton.jit
def is_dropped(row_dropout_ptr, n):
    """Whether ``row_dropout`` (``[2]`` int64: a seed, and how many of 2^32 draws drop) drops the
    rows ``n`` (int64).
    """
    return _draws(tl.load(row_dropout_ptr), n) < tl.load(row_dropout_ptr + 1)


@triton.jit
def query_draws(dropout_ptr, r):
    """What :func:`element_draws` needs of the rows ``r``: of weights, rows × heads of all samples.

    ``dropout`` begins with a seed, or is None: then there is nothing to draw.
    """
    draws = r
    if dropout_ptr is not None:
        draws = _draws(tl.load(dropout_ptr), r.to(tl.int64)).to(tl.uint32)
    return draws


@triton.jit
def element_draws(draws, n):
    """32 bits of each element: of its row's ``draws`` and its number ``n`` (int64) in the row."""
    bits = draws ^ (n.to(tl.uint32) * 0x9E3779B1)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def drop_weights(x, dropout_ptr, draws, n):
    """``x``, weights or gradients of them: zero of those that are dropped, and the others divided
    by the probability to be kept.

    ``draws`` of query rows and the history rows ``n`` (int64) are shaped to go with ``x``.
    """
    if dropout_ptr is not None:
        bits = element_draws(draws, n)
        drops = tl.load(dropout_ptr + 1)
        factor = tl.div_rn(4294967296.0, (4294967296 - drops).to(tl.float32))
        x *= tl.where(bits < drops.to(tl.uint32), 0.0, factor)
    return x
