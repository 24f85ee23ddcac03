"""Tiles of matrices and their products, as exact as asked for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "MOST_COLUMNS_OF_PARTS",
    "gradient_precision",
    "load_tile",
    "multiply",
    "padded_width",
    "product",
    "product_precision",
    "tile_of",
    "tile_rows",
]

MOST_COLUMNS_OF_PARTS = 256  # of rows whose bf16 parts fit in registers
_TERMS = tl.constexpr(16)  # of a product of fp32, that are added one after the other


def product_precision(dtype: torch.dtype) -> str:
    """Precision of matrix products; of fp32, as ``torch.get_float32_matmul_precision()`` asks.

    Exact products of fp32 are those of three bf16 parts, which hold it whole and which tensor cores
    multiply. Triton's interpreter does not know them, and is exact.
    """
    if dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee" if triton.knobs.runtime.interpret else "bf16x6"


def gradient_precision(precision: str) -> str:
    """That of products whose sums may be of one term, as gradients of weights of one target are:
    see :func:`multiply`.
    """
    return "bf16x8" if precision == "bf16x6" else precision


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
    """A tile of ``[num_i, num_j]``, or of what is its transpose where that is TRANSPOSED.

    Returns where it begins, its elements from there in the integers that INDEX names, and which of
    them there are.
    """
    i = tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    mask = (i < num_i - i_begin)[:, None] & (j < num_j - j_begin)[None, :]
    if TRANSPOSED:
        origin = tl.cast(j_begin, tl.int64) * num_i + i_begin
        at = i[:, None] + j.to(INDEX)[None, :] * num_i
    else:
        origin = tl.cast(i_begin, tl.int64) * num_j + j_begin
        at = i.to(INDEX)[:, None] * num_j + j[None, :]
    return origin, at, mask


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
    """The elements of a :func:`tile_of`; 0 where there are none."""
    origin, at, mask = tile_of(i_begin, j_begin, num_i, num_j, BLOCK_I, BLOCK_J, TRANSPOSED, INDEX)
    return tl.load(ptr + origin + at, mask=mask, other=0.0)


@triton.jit
def _parts(x):
    """``x`` (fp32) as a sum of three bf16 that hold it whole: the upper bits, the
    rounded remainder, and the remainder of that.

    By integers: conversions to bf16 that are then taken apart are an eighth as fast. A NaN that has
    its payload in the lower half alone, which no arithmetic makes, is cut to an infinity.
    """
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    remainder = x - high
    middle = ((remainder.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (remainder - middle).to(tl.bfloat16)


@triton.jit
def _product_apart(a, b):
    """``a · b``, exact, which is not begun at what is added to it.

    Triton makes one sum of two without the number given, which says nothing else but of fp8.
    """
    return tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=a.shape[1])


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a · b``, in fp32.

    Exact products begin at zero, so that their sums stay as exact as they are. ``"bf16x6"`` takes
    them of three bf16 parts: the small ones first, and where an infinity made NaN of them, without.
    The error of a sum of one term is then up to five times fp32's. ``"bf16x8"`` leaves out no more
    than the least product, and adds the largest in fp32 units, which round where tensor cores cut
    off: that error is fp32's.
    """
    if a.dtype != tl.float32:
        acc = tl.dot(a, b, acc)
    elif PRECISION == "bf16x6" or PRECISION == "bf16x8":
        a_high, a_middle, a_low = _parts(a)
        b_high, b_middle, b_low = _parts(b)
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
            acc += _product_apart(a_high, b_high) + out
        else:
            acc += tl.dot(a_high, b_high, out)
    elif PRECISION == "ieee":
        acc += _product_apart(a, b)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_in_pairs(x):
    """``x`` ``[a power of two, m, n]`` added up over its first axis."""
    half: tl.constexpr = x.shape[0] // 2
    if half > 0:
        out = _sum_in_pairs(tl.sum(tl.reshape(x, [2, half, x.shape[1], x.shape[2]]), 0))
    else:
        out = tl.reshape(x, [x.shape[1], x.shape[2]])
    return out


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """``a · b`` of rows and columns, in fp32; exact sums of many terms are sums of partial sums.

    Tensor cores add up few terms at a time, but fp32 units one after the other: of 128 terms the
    error is then several times that of a matrix product by cuBLAS. Partial sums are added in pairs.
    ``"bf16x6"`` is Triton's own.
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
