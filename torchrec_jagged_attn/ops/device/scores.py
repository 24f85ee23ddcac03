"""Elementwise weights instead of the softmax: SiLU and sigmoid of scores, and derivatives.

    sigmoid:  p = σ(s)        silu:  p = s · σ(s)         σ(s) = 1 / (1 + e⁻ˢ)

Scores of ``-inf`` have weights and derivatives of zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.ops.device.softmax import LN2, LOG2E, LOG2E_LOW

MIN_SCORE = tl.constexpr(-200.0)  # its sigmoid is zero in fp32


@triton.jit
def weights_and_slopes(scores, SCORE: tl.constexpr, EXACT: tl.constexpr):
    """Return ``(weights, slopes)``: weights and their derivatives with respect to ``scores``.

    With EXACT, they are accurate to a few units in the last place.
    """
    scores = tl.where(scores < MIN_SCORE, MIN_SCORE, scores)  # NaN stays
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
