"""Elementwise weights: SiLU and the logistic sigmoid of scores, and their derivatives.

    sigmoid:  p = σ(s)        silu:  p = s · σ(s)         σ(s) = 1 / (1 + e⁻ˢ)

A score of ``-inf`` has a weight and a slope of zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.runtime.kernels.softmax import LN2, LOG2E, LOG2E_LOW

LEAST = tl.constexpr(-200.0)  # σ of it is zero in fp32


@triton.jit
def weights_and_slopes(scores, SCORE: tl.constexpr, EXACT: tl.constexpr):
    """``(weights, slopes)`` of ``scores``; accurate to a few units in the last place if EXACT."""
    scores = tl.where(scores < LEAST, LEAST, scores)  # NaN stays
    below = tl.where(scores < 0, scores, -scores)
    power = tl.exp2(below * LOG2E)
    if EXACT:
        y = below * LOG2E
        low = tl.fma(below, LOG2E, -y) + below * LOG2E_LOW
        power += power * (low * LN2)
        larger = tl.div_rn(1.0, 1.0 + power)
    else:
        larger = 1.0 / (1.0 + power)
    smaller = power * larger
    sigma = tl.where(scores < 0, smaller, larger)
    opposite = tl.where(scores < 0, larger, smaller)  # σ(-s)
    if SCORE == "silu":
        return scores * sigma, sigma * (1.0 + scores * opposite)
    return sigma, sigma * opposite
