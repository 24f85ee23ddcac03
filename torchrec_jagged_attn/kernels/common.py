"""What all kernels share: tiles of jagged rows, the online softmax, precision."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "LOG2E",
    "age_bucket",
    "dot_precision",
    "find_sample",
    "find_tile",
    "load_stats",
    "mean_grad",
    "online_softmax_update",
    "padded_width",
    "product_precision",
    "recency_bucket",
    "softmax_weights",
    "store_stats",
    "tile_rows",
]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sample(
    offsets_ptr, num_samples, slot, SCALE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """The last sample ``b`` with ``offsets[b] · SCALE // BLOCK + STEP · b`` at most ``slot``.

    In each step, all lanes of a warp look, each at the beginning of a 32nd of what is left.
    """
    low = slot * 0
    high = low + num_samples
    while low + 1 < high:
        step = tl.cdiv(high - low, 32)
        at = low + step * tl.arange(0, 32)
        offset = tl.load(offsets_ptr + at, mask=at < high, other=0).to(tl.int64)
        begun = (at < high) & (offset * SCALE // BLOCK + STEP * at <= slot)
        low += step * (tl.sum(begun.to(tl.int32)) - 1)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def find_tile(offsets_ptr, num_samples, tile, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The sample that owns ``tile``, that sample's rows, and the tile's first row in it.

    A device-side ``JaggedLayout.tiles``: sample ``b`` owns the tiles from ``offsets[b] // BLOCK +
    b``. A row that ``offsets`` (``[B + 1]``) count stands for ``SCALE``.

    Returns ``(sample, begin, end, start)``; the tile is idle where ``begin + start >= end``.
    """
    sample = find_sample(offsets_ptr, num_samples, tile, SCALE, BLOCK, 1)
    begin = tl.load(offsets_ptr + sample).to(tl.int64) * SCALE
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64) * SCALE
    return sample, begin, end, (tile - begin // BLOCK - sample) * BLOCK


@triton.jit
def recency_bucket(distance, num_buckets):
    """``⌊4 log2(1 + distance)⌋``, of ``1 + distance`` rounded to fp32, at most the last bucket.

    Read from the bits of the number, as ``reference.recency_buckets`` does.
    """
    bits = (distance + 1).to(tl.float32).to(tl.int32, bitcast=True)
    fraction = bits & 0x7FFFFF  # held against the least fp32 at or above 2^(1/4), 2^(2/4), 2^(3/4)
    quarters = (fraction >= 0x1837F1).to(tl.int32) + (fraction >= 0x3504F4).to(tl.int32)
    quarters += (fraction >= 0x5744FD).to(tl.int32)
    bucket = ((bits >> 23) - 127) * 4 + quarters
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def age_bucket(time, newest, num_buckets):
    """:func:`recency_bucket` of the age of a row of ``time``, in a sample whose last is ``newest``.

    The first one where the row is newer than that. The last one of an age that is NaN, or that
    int64 does not hold together with one: subtraction wraps around.
    """
    if time.dtype == tl.int32:
        time, newest = time.to(tl.int64), newest.to(tl.int64)
    age = newest - time
    bucket = tl.where(age + 1 > 0, recency_bucket(age, num_buckets), num_buckets - 1)
    return tl.where(time > newest, 0, bucket)


@triton.jit
def online_softmax_update(
    products,
    factor,
    bias,
    visible,
    maximum,
    total,
    AXIS: tl.constexpr,
    LOG2_BASE: tl.constexpr,
):
    """One step of the online softmax over ``AXIS``, of ``products · factor + bias``.

    The maximum is taken off in one fused multiply-add, so that no score is rounded before. All of
    a row's scores may be ``-inf`` so far: it then has weights of zero. LOG2_BASE is log2(e), or 1
    where factor and bias have it in them.

    Returns the tile's weights, the factor for what was summed before, the new maximum and the new
    total.
    """
    scores = tl.where(visible, products * factor + bias, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, AXIS))
    shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    below = products * factor + (bias - tl.expand_dims(shift, AXIS))
    weights = tl.where(visible, tl.exp2(below * LOG2_BASE), 0.0)
    rescale = tl.exp2((maximum - shift) * LOG2_BASE)
    return weights, rescale, new_maximum, total * rescale + tl.sum(weights, AXIS)


@triton.jit
def store_stats(stats_ptr, num_rows, rows, mask, maximum, total):
    """Keep what :func:`softmax_weights` needs of ``rows``, in ``[2, num_rows]`` fp32.

    Not their log-sum-exp: it would round the weights by as much as it is larger than one. Rows that
    see nothing are kept as zeros.
    """
    seen = total > 0
    tl.store(stats_ptr + rows, tl.where(seen, maximum, 0.0), mask=mask)
    inverse = tl.where(seen, tl.div_rn(1.0, tl.where(seen, total, 1.0)), 0.0)
    tl.store(stats_ptr + num_rows + rows, inverse, mask=mask)


@triton.jit
def load_stats(stats_ptr, num_rows, rows, mask):
    """``(maximum, inverse total)`` of ``rows``, zeros where masked."""
    maximum = tl.load(stats_ptr + rows, mask=mask, other=0.0)
    return maximum, tl.load(stats_ptr + num_rows + rows, mask=mask, other=0.0)


@triton.jit
def softmax_weights(
    products,
    factor,
    bias,
    visible,
    maximum,
    inverse,
    AXIS: tl.constexpr,
    LOG2_BASE: tl.constexpr,
):
    """Weights of the softmax over ``AXIS`` of the same scores, from their statistics."""
    below = products * factor + (bias - tl.expand_dims(maximum, AXIS))
    weights = tl.exp2(below * LOG2_BASE)
    return tl.where(visible, weights * tl.expand_dims(inverse, AXIS), 0.0)


@triton.jit
def mean_grad(p, dp, visible, delta, whole, AXIS: tl.constexpr):
    """``delta = Σ p·dp`` of the softmax's gradient, from this very tile where it is the ``whole``.

    Taken from the largest ``dp`` on, and by weights that sum to one, it is exact where a single key
    is visible: that key gets a gradient of zero.
    """
    largest = tl.max(tl.where(visible, dp, -float("inf")), AXIS)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(p, AXIS)
    below = tl.sum(p * (dp - tl.expand_dims(largest, AXIS)), AXIS)
    of_tile = largest + tl.div_rn(below, tl.where(total > 0, total, 1.0))
    return tl.where(whole, of_tile, delta)


def dot_precision(dtype: torch.dtype) -> str:
    """Precision of matrix products; of fp32, as ``torch.get_float32_matmul_precision()`` asks."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def product_precision(dtype: torch.dtype) -> str:
    """As :func:`dot_precision`, but exact products of fp32 are those of three bf16 parts.

    The parts hold fp32 whole, and tensor cores multiply them. Triton's interpreter does not know
    them, and is exact.
    """
    precision = dot_precision(dtype)
    return "bf16x6" if precision == "ieee" and not triton.knobs.runtime.interpret else precision


def tile_rows(row_bytes: int, precision: str = "tf32", registers: int = 0) -> int:
    """Rows of a tile, 16 to 64, by the bytes of its rows.

    Products on tensor cores read their operands from shared memory, where a few tiles of 32 KiB
    fit. Exact fp32 products hold them in registers, where that many bytes fit.
    """
    budget = registers if precision == "ieee" else 32768
    return max(16, min(64, budget // row_bytes))


def padded_width(width: int) -> int:
    """The power of two, at least 16, that a tile needs to hold ``width`` columns."""
    return max(16, 1 << (width - 1).bit_length())
