"""What is added to the scores of target and flash attention, and the gradients of it.

A bias has one value per history row and head, or per bucket of a position, age or distance and
head. Prior weights of rows count by their logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.attention.kernels.dropout import is_dropped

__all__ = [
    "add_heads",
    "add_to_table",
    "age_bucket",
    "load_bias",
    "recency_bucket",
    "row_buckets",
    "row_numbers",
]


@triton.jit
def recency_bucket(distance, num_buckets):
    """``min(⌊4 log2(1 + distance)⌋, 96 + ⌊log2(1 + distance)⌋)``, of ``1 + distance`` rounded to
    fp32, at most the last bucket; that of infinity.

    Read from the bits of the number, as ``_recency_buckets`` of ``flash_attention/cpu.py`` does.
    """
    bits = (distance + 1).to(tl.float32).to(tl.int32, bitcast=True)
    if distance.dtype != tl.int32:
        bits &= 0x7FFFFFFF  # 2^63 has a sign in int64
    fraction = bits & 0x7FFFFF  # held against the least fp32 at or above 2^(1/4), 2^(2/4), 2^(3/4)
    quarters = (fraction >= 0x1837F1).to(tl.int32) + (fraction >= 0x3504F4).to(tl.int32)
    quarters += (fraction >= 0x5744FD).to(tl.int32)
    octave = (bits >> 23) - 127
    bucket = octave * 4 + quarters
    if distance.dtype != tl.int32:  # whose octaves end at 31
        bucket = tl.where(octave == 128, num_buckets - 1, tl.minimum(bucket, octave + 96))
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def age_bucket(time, reference, num_buckets):
    """:func:`recency_bucket` of the age that a row of ``time`` has at the time ``reference``.

    The first one where the row is newer than that. The last one of an age that is NaN, or that
    int64 does not hold: subtraction wraps around.
    """
    if time.dtype == tl.int32:
        time, reference = time.to(tl.int64), reference.to(tl.int64)
    age = reference - time
    bucket = tl.where(age >= 0, recency_bucket(age, num_buckets), num_buckets - 1)
    return tl.where(time > reference, 0, bucket)


@triton.jit
def row_numbers(biases, n, visible):
    """The numbers by which the rows ``n`` (int64) draw: their places, where these are given."""
    numbers = n
    if biases.places is not None:
        numbers = tl.load(biases.places + n, mask=visible, other=0).to(tl.int64)
    return numbers


@triton.jit
def row_buckets(n, visible, offsets_ptr, biases, sample, C: tl.constexpr):
    """Buckets of position and age of the rows ``n`` of ``sample``."""
    last = tl.load(offsets_ptr + sample + 1).to(tl.int64) - 1
    distance = last - n
    if biases.places is not None:
        end = tl.load(biases.ends + sample).to(tl.int64)
        distance = end - 1 - row_numbers(biases, n, visible)
    of_position = recency_bucket(distance.to(tl.int32), C.P)
    of_age = of_position
    if C.A > 0:
        time = tl.load(biases.timestamps + n, mask=visible, other=0)
        if biases.request_time is not None:
            reference = tl.load(biases.request_time + sample)
        else:
            reference = tl.load(biases.timestamps + last)
        of_age = age_bucket(time, reference, C.A)
    return of_position, of_age


@triton.jit
def load_bias(biases, offsets_ptr, sample, n, visible, r, count, C: tl.constexpr):
    """All ``biases`` of the rows ``n`` for the query rows ``r``, both shaped as in scores.

    ``biases`` has pointers in the fields of ``arguments.Biases``, but ``relative_bias``; C are
    Constants of either attention.

    PRIOR weights count by their logarithm, ``-inf`` of zero and of what is below, for all heads;
    rows that are dropped have ``-inf``. Zero for the query rows from ``count`` on: they have no
    maximum to keep it from overflowing.
    """
    mask = visible & (r < count)
    head = (r % C.H).to(tl.int32)
    bias = 0.0
    if C.PRIOR:
        # For each query row, too: a column of weights, spread over these rows, is lowered wrongly.
        weights = tl.load(biases.bias + n + head * 0, mask=mask, other=1.0)
        bias += tl.log(tl.where(weights < 0, 0.0, weights.to(tl.float32)))  # NaN stays
    elif biases.bias is not None:
        bias += tl.load(biases.bias + n * C.H + head, mask=mask, other=0.0).to(tl.float32)
    if C.P > 0 or C.A > 0:
        of_position, of_age = row_buckets(n, visible, offsets_ptr, biases, sample, C)
        if C.P > 0:
            ptrs = biases.position_bias + of_position * C.H + head
            bias += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if C.A > 0:
            ptrs = biases.age_bias + of_age * C.H + head
            bias += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if biases.row_dropout is not None:
        numbers = row_numbers(biases, n, visible).to(tl.int64)
        dropped = is_dropped(biases.row_dropout, numbers) & mask
        bias = tl.where(dropped, -float("inf"), bias)
    return bias


@triton.jit
def _dot(choice, values, acc, CHOICE_FIRST: tl.constexpr):
    return tl.dot(choice, values, acc) if CHOICE_FIRST else tl.dot(values, choice, acc)


@triton.jit
def _upper_bits(values):
    """``values`` (fp32) as tensor cores read them in TF32: cut to 11 bits."""
    return (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot_choice(choice, values, acc, dtype, CHOICE_FIRST: tl.constexpr):
    """``acc`` plus the product of ``choice``, of zeros and ones, and ``values`` (fp32).

    On tensor cores, which read the upper bits of values, and then what these left. In fp32, tiles
    are summed up on their own: tensor cores would cut their sum with ``acc`` short.
    """
    choice = choice.to(dtype)
    if dtype == tl.float32:
        upper = _upper_bits(values)
        middle = _upper_bits(values - upper)
        sums = _dot(choice, values - upper - middle, tl.zeros_like(acc), CHOICE_FIRST)
        sums = _dot(choice, upper, _dot(choice, middle, sums, CHOICE_FIRST), CHOICE_FIRST)
        return acc + sums
    rounded = values.to(dtype)
    left = (values - rounded.to(tl.float32)).to(dtype)
    return _dot(choice, rounded, _dot(choice, left, acc, CHOICE_FIRST), CHOICE_FIRST)


@triton.jit
def add_heads(acc, ds, r, h, dtype, H: tl.constexpr, ONE_TARGET: tl.constexpr):
    """``acc`` plus ``ds``, summed over the query rows ``r`` of each head ``h``: ``[rows, heads]``.

    ``dtype`` is the history's.
    """
    if ONE_TARGET:
        return acc + ds
    of_head = ((r % H)[:, None] == h[None, :]).to(tl.float32)
    return _dot_choice(of_head, ds, acc, dtype, CHOICE_FIRST=False)


@triton.jit
def add_to_table(table, buckets, heads, dtype, BLOCK_B: tl.constexpr):
    """``table`` (``[BLOCK_B, BLOCK_H]``) plus the ``heads`` of rows in their ``buckets``.

    ``dtype`` is the history's.
    """
    of_bucket = (tl.arange(0, BLOCK_B)[:, None] == buckets[None, :]).to(tl.float32)
    return _dot_choice(of_bucket, heads, table, dtype, CHOICE_FIRST=True)
