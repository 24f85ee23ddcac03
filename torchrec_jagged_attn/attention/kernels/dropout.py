"""Dropout masks by counter-based random numbers, so that none is stored.

SplitMix64 (Steele, Lea and Flood, OOPSLA '14) of the query row (over all samples and heads) is
mixed with the number of the history row by the finalizer of MurmurHash3 (Appleby), so that forward,
backward and all devices agree. ``dropout`` is ``[2]`` int64: a seed, and 2^32 times the
probability. ``flash_attention/attention.cpp`` draws the same on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _draws(seed, n):
    """32 random bits, in int64, for each counter ``n`` (int64)."""
    x = seed + (n + 1) * -7046029254386353131
    # The masks make shifts unsigned.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 32) & 0xFFFFFFFF


@triton.jit
def query_draws(dropout_ptr, r):
    """32 random bits for each query row ``r`` (over all samples and heads), for
    :func:`element_draws`; ``r`` if ``dropout`` is None.
    """
    draws = r
    if dropout_ptr is not None:
        draws = _draws(tl.load(dropout_ptr), r.to(tl.int64)).to(tl.uint32)
    return draws


@triton.jit
def element_draws(draws, n):
    """32 random bits per element, of the ``draws`` of its row and its column ``n`` (int64)."""
    bits = draws ^ (n.to(tl.uint32) * 0x9E3779B1)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def drop_weights(x, dropout_ptr, draws, n):
    """Dropout of weights, or of their gradients, ``x``.

    ``draws`` of query rows and row numbers ``n`` (int64) broadcast to ``x``.
    """
    if dropout_ptr is not None:
        bits = element_draws(draws, n)
        drops = tl.load(dropout_ptr + 1)
        factor = tl.div_rn(4294967296.0, (4294967296 - drops).to(tl.float32))
        x *= tl.where(bits < drops.to(tl.uint32), 0.0, factor)
    return x
