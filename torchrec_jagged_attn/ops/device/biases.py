"""Biases of the scores of target and flash attention, and their gradients.

A bias has one value per head and history row, or per head and bucket of position, age or distance.
Prior weights of rows are added as logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def recency_bucket(distance, num_buckets):
    """Return ``min(⌊4 log2(1 + distance)⌋, 96 + ⌊log2(1 + distance)⌋)``, at most the last bucket.

    The logarithm is read from the bits of ``1 + distance`` in fp32, as in ``_recency_buckets`` of
    ``flash_attention/cpu.py``.
    """
    bits = (distance + 1).to(tl.float32).to(tl.int32, bitcast=True)
    if distance.dtype != tl.int32:
        bits &= 0x7FFFFFFF  # 2^63 is negative in int64
    fraction = bits & 0x7FFFFF  # compared with the smallest fp32 >= 2^(1/4), 2^(2/4), 2^(3/4)
    quarters = (fraction >= 0x1837F1).to(tl.int32) + (fraction >= 0x3504F4).to(tl.int32)
    quarters += (fraction >= 0x5744FD).to(tl.int32)
    octave = (bits >> 23) - 127
    bucket = octave * 4 + quarters
    if distance.dtype != tl.int32:  # octaves of int32 end at 31
        bucket = tl.where(octave == 128, num_buckets - 1, tl.minimum(bucket, octave + 96))
    return tl.minimum(tl.maximum(bucket, 0), num_buckets - 1)


@triton.jit
def age_bucket(time, reference, num_buckets):
    """Return :func:`recency_bucket` of the age ``reference - time``.

    Negative ages are in the first bucket; NaN, and ages that overflow int64, in the last bucket.
    """
    if time.dtype == tl.int32:
        time, reference = time.to(tl.int64), reference.to(tl.int64)
    age = reference - time
    bucket = tl.where(age >= 0, recency_bucket(age, num_buckets), num_buckets - 1)
    return tl.where(time > reference, 0, bucket)


@triton.jit
def load_row_numbers(biases, n, visible):
    """Load the ``row_numbers`` of rows ``n`` (int64), by default ``n``; see ``TargetArguments``."""
    numbers = n
    if biases.row_numbers is not None:
        numbers = tl.load(biases.row_numbers + n, mask=visible, other=0).to(tl.int64)
    return numbers


@triton.jit
def row_buckets(n, visible, offsets_ptr, biases, sample, C: tl.constexpr):
    """Return the buckets of the position and of the age of rows ``n`` of ``sample``."""
    last = tl.load(offsets_ptr + sample + 1).to(tl.int64) - 1
    distance = last - n
    if biases.row_numbers is not None:
        end = tl.load(biases.row_number_ends + sample).to(tl.int64)
        distance = end - 1 - load_row_numbers(biases, n, visible)
    position_index = recency_bucket(distance.to(tl.int32), C.P)
    age_index = position_index
    if C.A > 0:
        time = tl.load(biases.timestamps + n, mask=visible, other=0)
        if biases.request_time is not None:
            reference = tl.load(biases.request_time + sample)
        else:
            reference = tl.load(biases.timestamps + last)
        age_index = age_bucket(time, reference, C.A)
    return position_index, age_index


@triton.jit
def load_bias(biases, offsets_ptr, sample, n, visible, r, count, C: tl.constexpr):
    """Return the sum of all biases of the history rows ``n`` for the query rows ``r``.

    ``n`` and ``r`` broadcast. ``biases`` are ``records.Biases``; C are the ``Constants`` of either
    attention. The logarithms of prior weights are ``-inf`` for weights of zero or less. Query rows
    from ``count`` on have a bias of zero, since they have no maximum to subtract.
    """
    mask = visible & (r < count)
    head = (r % C.H).to(tl.int32)
    bias = 0.0
    if biases.prior_weights is not None:
        # Loaded per query row as well: Triton miscompiles a broadcast of one column of weights.
        weights = tl.load(biases.prior_weights + n + head * 0, mask=mask, other=1.0)
        bias += tl.log(tl.where(weights < 0, 0.0, weights.to(tl.float32)))  # NaN stays
    if biases.bias is not None:
        bias += tl.load(biases.bias + n * C.H + head, mask=mask, other=0.0).to(tl.float32)
    if C.P > 0 or C.A > 0:
        position_index, age_index = row_buckets(n, visible, offsets_ptr, biases, sample, C)
        if C.P > 0:
            ptrs = biases.position_bias + position_index * C.H + head
            bias += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if C.A > 0:
            ptrs = biases.age_bias + age_index * C.H + head
            bias += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return bias


@triton.jit
def _dot(one_hot, values, acc, ONE_HOT_FIRST: tl.constexpr):
    return tl.dot(one_hot, values, acc) if ONE_HOT_FIRST else tl.dot(values, one_hot, acc)


@triton.jit
def _upper_bits(values):
    """``values`` (fp32) truncated to the 11 bits of TF32."""
    return (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot_one_hot(one_hot, values, acc, dtype, ONE_HOT_FIRST: tl.constexpr):
    """Return ``acc`` plus the product of ``one_hot`` and ``values`` (fp32), on tensor cores.

    ``values`` are decomposed into two components of ``dtype``, or three if it is fp32. In fp32 the
    tile is summed separately from ``acc``, since tensor cores truncate sums.
    """
    one_hot = one_hot.to(dtype)
    if dtype == tl.float32:
        upper = _upper_bits(values)
        middle = _upper_bits(values - upper)
        sums = _dot(one_hot, values - upper - middle, tl.zeros_like(acc), ONE_HOT_FIRST)
        sums = _dot(one_hot, upper, _dot(one_hot, middle, sums, ONE_HOT_FIRST), ONE_HOT_FIRST)
        return acc + sums
    rounded = values.to(dtype)
    remainder = (values - rounded.to(tl.float32)).to(dtype)
    return _dot(one_hot, rounded, _dot(one_hot, remainder, acc, ONE_HOT_FIRST), ONE_HOT_FIRST)


@triton.jit
def add_heads(acc, ds, r, h, dtype, H: tl.constexpr, ONE_TARGET: tl.constexpr):
    """Return ``acc`` ``[rows, heads]`` plus ``ds`` summed over the query rows ``r`` of each head.

    ``h`` are the heads, and ``dtype`` is the dtype of the history.
    """
    if ONE_TARGET:
        return acc + ds
    is_head = ((r % H)[:, None] == h[None, :]).to(tl.float32)
    return _dot_one_hot(is_head, ds, acc, dtype, ONE_HOT_FIRST=False)


@triton.jit
def add_to_table(table, buckets, heads, dtype, BLOCK_B: tl.constexpr):
    """Return ``table`` ``[BLOCK_B, BLOCK_H]`` plus ``heads`` ``[rows, BLOCK_H]`` of each bucket.

    ``buckets`` are the buckets of the rows, and ``dtype`` is the dtype of the history.
    """
    is_bucket = (tl.arange(0, BLOCK_B)[:, None] == buckets[None, :]).to(tl.float32)
    return _dot_one_hot(is_bucket, heads, table, dtype, ONE_HOT_FIRST=True)
