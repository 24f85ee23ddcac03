"""Softmax of tiles of scores: online, from saved statistics, and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.9259629911266175e-08)  # log2(e) minus LOG2E in fp32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax_update(products, factor, bias, visible, maximum, total, AXIS: tl.constexpr):
    """One step of the online softmax over ``AXIS``, of ``products · factor + bias``.

    The maximum is subtracted in a fused multiply-add, so that scores are not rounded before. A row
    whose scores are all ``-inf`` so far has weights of zero.

    Returns the tile's weights, the factor that rescales earlier sums, the new maximum and the new
    total.
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
    """Store the maximum and inverse total of ``rows`` in ``[2, num_rows]`` fp32.

    A log-sum-exp instead would round the weights by its own rounding error, which grows with its
    magnitude. Rows without a visible key have zeros; with NaN among their scores, a total of NaN.
    """
    seen = total != 0
    tl.store(stats_ptr + rows, tl.where(seen, maximum, 0.0), mask=mask)
    inverse = tl.where(seen, tl.div_rn(1.0, tl.where(seen, total, 1.0)), 0.0)
    tl.store(stats_ptr + num_rows + rows, inverse, mask=mask)


@triton.jit
def load_stats(stats_ptr, num_rows, rows, mask):
    """``(maximum, inverse total)`` of ``rows``, zeros where masked."""
    maximum = tl.load(stats_ptr + rows, mask=mask, other=0.0)
    return maximum, tl.load(stats_ptr + num_rows + rows, mask=mask, other=0.0)


@triton.jit
def softmax_weights(products, factor, bias, visible, maximum, inverse):
    """Weights of the softmax over axis 0 of the same scores, from their statistics."""
    below = products * factor + (bias - maximum[None, :])
    return tl.where(visible, tl.exp2(below * LOG2E) * inverse[None, :], 0.0)


@triton.jit
def score_gradients(p, dp, delta, grad_lse, alone, AXIS: tl.constexpr):
    """Gradients of scores, of a softmax over ``AXIS``, from its weights and the gradients of these.

    ``delta`` is the mean of ``dp`` minus ``grad_lse``, the gradient of the log-sum-exp, if there is
    one. A row that is ``alone`` in its sample weighs one, whatever its score: that has no gradient
    but its log-sum-exp's.
    """
    of_alone = 0.0
    if grad_lse is not None:
        of_alone = p * tl.expand_dims(grad_lse, AXIS)
    return tl.where(alone, of_alone, p * (dp - tl.expand_dims(delta, AXIS)))


@triton.jit
def mean_grad(p, dp, delta, whole):
    """``delta = Σ p·dp`` of a softmax over axis 1, from this very tile where it is the ``whole``.

    The mean of ``dp`` by weights that sum to one, and then the mean of what is left: that is exact
    where a single key is visible, whose gradient is zero, and else rounds as ``delta`` itself does.
    """
    total = tl.sum(p, 1)
    total = tl.where(total > 0, total, 1.0)
    mean = tl.div_rn(tl.sum(p * dp, 1), total)
    left = tl.sum(p * (dp - mean[:, None]), 1)
    return tl.where(whole, mean + tl.div_rn(left, total), delta)
