"""Softmax of tiles of scores: online softmax, recomputation from statistics, gradient."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.9259629911266175e-08)  # log2(e) minus LOG2E in fp32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax_update(products, factor, bias, visible, maximum, total, AXIS: tl.constexpr):
    """Update the online softmax over ``AXIS`` with a tile of scores, ``products · factor + bias``.

    The maximum is subtracted in a fused multiply-add, before scores are rounded. Rows with scores
    of only ``-inf`` so far have weights of zero.

    Returns:
        ``(weights, rescale, maximum, total)``: the weights of the tile, the factor by which earlier
        sums are rescaled, the new maximum and the new total.
    """
    scores = tl.where(visible, products * factor + bias, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, AXIS))
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    below = products * factor + (bias - tl.expand_dims(shift, AXIS))
    weights = tl.where(visible, tl.exp2(below * LOG2E), 0.0)
    rescale = tl.exp2((maximum - shift) * LOG2E)
    return weights, rescale, new_maximum, total * rescale + tl.sum(weights, AXIS)


@triton.jit
def store_stats(stats_ptr, num_rows, rows, mask, maximum, total):
    """Store the maximum and the inverse total of ``rows`` in ``[2, num_rows]`` fp32.

    A log-sum-exp would be less exact: its rounding error grows with its magnitude, and would scale
    the weights. Rows without a visible key have zeros, rows with a NaN score an inverse of NaN.
    """
    has_keys = total != 0
    tl.store(stats_ptr + rows, tl.where(has_keys, maximum, 0.0), mask=mask)
    inverse = tl.where(has_keys, tl.div_rn(1.0, tl.where(has_keys, total, 1.0)), 0.0)
    tl.store(stats_ptr + num_rows + rows, inverse, mask=mask)


@triton.jit
def load_stats(stats_ptr, num_rows, rows, mask):
    """Load ``(maximum, inverse total)`` of ``rows``; zeros for masked rows."""
    maximum = tl.load(stats_ptr + rows, mask=mask, other=0.0)
    return maximum, tl.load(stats_ptr + num_rows + rows, mask=mask, other=0.0)


@triton.jit
def softmax_weights(products, factor, bias, visible, maximum, inverse):
    """Recompute the weights of the softmax over axis 0, from the statistics of the scores."""
    below = products * factor + (bias - maximum[None, :])
    return tl.where(visible, tl.exp2(below * LOG2E) * inverse[None, :], 0.0)


@triton.jit
def score_gradients(p, dp, delta, grad_lse, alone):
    """Return the gradients of the scores of a softmax over axis 0.

    ``p`` are the weights, and ``dp`` the gradients of the weights. ``delta`` is the mean of ``dp``
    under ``p``, minus ``grad_lse``, the gradient of the log-sum-exp, if given. ``alone`` is true
    for the only row of a sample: its weight is constant, so that only the log-sum-exp has a
    gradient.
    """
    single_grad = 0.0
    if grad_lse is not None:
        single_grad = p * grad_lse[None, :]
    return tl.where(alone, single_grad, p * (dp - delta[None, :]))


@triton.jit
def mean_grad(p, dp, delta, is_only_tile):
    """Return ``Σ p·dp / Σ p`` of a softmax over axis 1 if ``is_only_tile``, ``delta`` otherwise.

    The result is the mean plus the mean of the remainders. It is exact if a single key is visible,
    whose score then has a gradient of exactly zero. Otherwise it has the rounding error of one sum.
    """
    total = tl.sum(p, 1)
    total = tl.where(total > 0, total, 1.0)
    mean = tl.div_rn(tl.sum(p * dp, 1), total)
    remainder = tl.sum(p * (dp - mean[:, None]), 1)
    return tl.where(is_only_tile, mean + tl.div_rn(remainder, total), delta)
