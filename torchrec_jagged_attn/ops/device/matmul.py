"""Tiles of matrices, and products of tiles in a given precision.

``"bf16x6"`` and ``"bf16x8"`` decompose fp32 into three bf16 components, which tensor cores
multiply.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_DECOMPOSED_WIDTH = 256  # wider rows have too many bf16 components for registers
_TERMS = tl.constexpr(16)  # terms of each partial sum of an fp32 product


def product_precision(dtype: torch.dtype) -> str:
    """Return the precision of matrix products, by ``torch.get_float32_matmul_precision()``.

    fp32 products of ``"highest"`` precision are ``"bf16x6"``, or ``"ieee"`` in Triton's
    interpreter, which does not support ``"bf16x6"``. All other products are ``"tf32"``.
    """
    if dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee" if triton.knobs.runtime.interpret else "bf16x6"


def gradient_precision(precision: str) -> str:
    """Return the precision of products that may sum a single term, see :func:`multiply`.

    An example are gradients of weights for one target.
    """
    return "bf16x8" if precision == "bf16x6" else precision


def padded_width(width: int) -> int:
    """Return the number of columns of a tile for ``width`` columns: a power of two from 16 on."""
    return max(16, 1 << (width - 1).bit_length())


@triton.jit
def tile_of(
    i_begin,
    j_begin,
    num_i,
    num_j,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
    INDEX: tl.constexpr = tl.int32,
):
    """Return addresses and mask of a tile of a matrix ``[num_i, num_j]``.

    If TRANSPOSED, the matrix is stored as ``[num_j, num_i]``.

    Returns:
        ``(origin, offsets, mask)``: the offset of the tile (int64), the offsets of its elements
        from ``origin`` (INDEX), and the mask of elements inside the matrix.
    """
    i = tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    mask = (i < num_i - i_begin)[:, None] & (j < num_j - j_begin)[None, :]
    if TRANSPOSED:
        origin = tl.cast(j_begin, tl.int64) * num_i + i_begin
        offsets = i[:, None] + j.to(INDEX)[None, :] * num_i
    else:
        origin = tl.cast(i_begin, tl.int64) * num_j + j_begin
        offsets = i.to(INDEX)[:, None] * num_j + j[None, :]
    return origin, offsets, mask


@triton.jit
def load_tile(
    ptr,
    i_begin,
    j_begin,
    num_i,
    num_j,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
    INDEX: tl.constexpr = tl.int32,
):
    """Load a tile of a matrix, with zeros outside the matrix. Parameters are as in
    :func:`tile_of`.
    """
    origin, offsets, mask = tile_of(
        i_begin, j_begin, num_i, num_j, BLOCK_I, BLOCK_J, TRANSPOSED, INDEX
    )
    return tl.load(ptr + origin + offsets, mask=mask, other=0.0)


@triton.jit
def _decompose(x):
    """Decompose ``x`` (fp32) into an exact sum of three bf16 numbers.

    They are the upper bits of ``x``, the rounded remainder, and the final remainder. Integer
    operations are eight times as fast here as conversions to bf16. A NaN with a payload only in the
    lower 16 bits becomes infinity; no arithmetic returns such a NaN.
    """
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    remainder = x - high
    middle = ((remainder.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (remainder - middle).to(tl.bfloat16)


@triton.jit
def _separate_product(a, b):
    """Return ``a · b``, exact, with an accumulator of its own.

    Without ``max_num_imprecise_acc``, Triton fuses a later addition into the dot. Otherwise that
    option only affects fp8.
    """
    return tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=a.shape[1])


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a · b`` in fp32.

    Exact products are summed from zero and then added, so that they are not rounded to the
    magnitude of ``acc``:

    - ``"bf16x6"`` sums six of the nine products of bf16 components, small ones first. Small
      products that are NaN because of an infinity are skipped. If there is a single term, the
      error is up to five times the error of fp32.
    - ``"bf16x8"`` omits only the smallest product, and adds the largest one on CUDA cores, which
      round while tensor cores truncate. The error is the error of fp32.
    """
    if a.dtype != tl.float32:
        acc = tl.dot(a, b, acc)
    elif PRECISION == "bf16x6" or PRECISION == "bf16x8":
        a_high, a_middle, a_low = _decompose(a)
        b_high, b_middle, b_low = _decompose(b)
        if PRECISION == "bf16x8":
            out = tl.dot(a_low, b_middle)
            out = tl.dot(a_low, b_high, out)
            out = tl.dot(a_middle, b_high, out)
            mirrored = tl.dot(a_middle, b_low)
            mirrored = tl.dot(a_high, b_low, mirrored)
            mirrored = tl.dot(a_high, b_middle, mirrored)
            out = tl.dot(a_middle, b_middle, out + mirrored)
        else:
            out = tl.dot(a_low, b_high)
            out = tl.dot(a_middle, b_middle, out)
            out = tl.dot(a_high, b_low, out)
            out = tl.dot(a_middle, b_high, out)
            out = tl.dot(a_high, b_middle, out)
        out = tl.where(out == out, out, 0.0)
        if PRECISION == "bf16x8":
            acc += _separate_product(a_high, b_high) + out
        else:
            acc += tl.dot(a_high, b_high, out)
    elif PRECISION == "ieee":
        acc += _separate_product(a, b)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_in_pairs(x):
    """Return the pairwise sum of ``x`` ``[a power of two, m, n]`` over the first axis."""
    half: tl.constexpr = x.shape[0] // 2
    if half > 0:
        out = _sum_in_pairs(tl.sum(tl.reshape(x, [2, half, x.shape[1], x.shape[2]]), 0))
    else:
        out = tl.reshape(x, [x.shape[1], x.shape[2]])
    return out


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return ``a · b`` in fp32, without an accumulator.

    ``"ieee"`` products are pairwise sums of partial sums of 16 terms: CUDA cores add terms one by
    one, and 128 terms would have several times the error of cuBLAS. ``"bf16x6"`` products are
    Triton's own.
    """
    m: tl.constexpr = a.shape[0]
    n: tl.constexpr = b.shape[1]
    num_sums: tl.constexpr = a.shape[1] // _TERMS
    if a.dtype == tl.float32 and PRECISION == "ieee" and num_sums > 1:
        a = tl.permute(tl.reshape(a, [m, num_sums, _TERMS]), [1, 0, 2])
        out = tl.dot(a, tl.reshape(b, [num_sums, _TERMS, n]), input_precision=PRECISION)
        out = _sum_in_pairs(out)
    elif PRECISION == "bf16x6":
        out = tl.dot(a, b, input_precision=PRECISION)
    else:
        out = multiply(a, b, tl.zeros([m, n], tl.float32), PRECISION)
    return out
