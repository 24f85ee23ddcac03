"""Dropout masks from counter-based random numbers, which need not be stored.

The random bits of a weight are a hash of the seed, the query row (over all samples and heads) and
the number of the history row: SplitMix64 (Steele, Lea and Flood, OOPSLA '14) of the query row,
mixed with the history row by the finalizer of MurmurHash3 (Appleby). So forward, backward and all
devices draw the same masks; on a CPU, ``flash_attention/attention.cpp`` does. ``dropout`` is
``[2]`` int64: the seed, and 2^32 times the probability.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _draws(seed, n):
    """Return 32 random bits, in int64, for each counter ``n`` (int64)."""
    x = seed + (n + 1) * -7046029254386353131
    # The masks make the shifts unsigned.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 32) & 0xFFFFFFFF


@triton.jit
def query_draws(dropout_ptr, r):
    """Return 32 random bits for each query row ``r`` (over all samples and heads).

    They are a parameter of :func:`element_draws`. Without dropout, ``r`` is returned.
    """
    draws = r
    if dropout_ptr is not None:
        draws = _draws(tl.load(dropout_ptr), r.to(tl.int64)).to(tl.uint32)
    return draws


@triton.jit
def element_draws(draws, n):
    """Return 32 random bits per element, from ``draws`` of query rows and history rows ``n``."""
    bits = draws ^ (n.to(tl.uint32) * 0x9E3779B1)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def load_dropout(dropout_ptr):
    """Return ``(threshold, factor)``, ``(0, 1)`` without dropout.

    Weights whose random bits are below ``threshold`` are dropped, and the others are multiplied by
    ``factor``.
    """
    threshold, factor = 0, 1.0
    if dropout_ptr is not None:
        threshold = tl.load(dropout_ptr + 1)
        factor = tl.div_rn(4294967296.0, (4294967296 - threshold).to(tl.float32))
        threshold = threshold.to(tl.uint32)
    return threshold, factor


@triton.jit
def drop_weights(x, dropout_ptr, draws, n):
    """Return ``x``, weights or their gradients, after dropout.

    ``draws`` are the :func:`query_draws` of query rows, and ``n`` (int64) the numbers of history
    rows. Both broadcast to ``x``.
    """
    if dropout_ptr is not None:
        threshold, factor = load_dropout(dropout_ptr)
        x *= tl.where(element_draws(draws, n) < threshold, 0.0, factor)
    return x
