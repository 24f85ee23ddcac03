"""What the path ``one_warp`` has for narrow history rows: their bytes become bf16 in registers.

A tile stays as it is in shared memory, where a pair of bytes is read as one element of 16 bits: by
the instructions, and at the cost, of a tile of half the width. Bytes of even columns and of odd
ones are then operands apart, which hold every number of a byte exactly. With x_n = s_n · c_n + b_n,
scales and biases of rows go into scores and weights:

    q · x_n = s_n · (q · c_n) + b_n · Σ_d q_d
    Σ_n p_n · x_n = Σ_n (p_n · s_n) · c_n + Σ_n p_n · b_n

Rows that are made wide and rounded have scores of their own: so there is no backward of these.

**Integers** are not converted. The bits of a byte u, from 0 to 255, are those of the bf16
number u · 2^-133, which tensor cores multiply as exactly as any. Queries and weights are made
2^80 times as large, so that no product is that small: both must be less than 2^47.

u is c + 128; of uint8, the byte is u, and c, which is 128 less, goes with a bias that is 128 s_n
more. Sums of u are too large by 128 times the sum of queries, or of weights as they were rounded:
that is taken off in fp32. So what rounding takes from a weight is multiplied by c, not by u.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchrec_jagged_attn.kernels.target.warp_parts import MMA, load_columns, ring_layout

LARGER = gl.constexpr(2.0**80)  # queries and weights than they are, where rows are of integers
BACK = gl.constexpr(2.0**53)  # to what sums are: 2^133 / 2^80
MIDDLE = gl.constexpr(128.0)  # of the numbers from 0 to 255

__all__ = [
    "even_and_odd",
    "load_even_and_odd",
    "load_scales",
    "pairs_of",
    "products_of_rows",
    "rows_of_tile",
    "side_by_side",
    "weights_of_numbers",
]


@gluon.jit
def pairs_of(ring):
    """``[stages, rows, width]`` of bytes, as half as many elements of 16 bits."""
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = ring.shape[1]
    PAIRS: gl.constexpr = ring.shape[2] // 2
    layout: gl.constexpr = ring_layout(PAIRS, gl.int16)
    return ring._reinterpret(gl.int16, [STAGES, ROWS, PAIRS], layout)


@gluon.constexpr_function
def _assembly(row_format):
    """From two pairs in ``$2`` to their even bytes in ``$0`` and odd ones in ``$1``, as bf16x2."""
    if row_format == "e4m3":
        return """{
            .reg .b16 low, high, h<4>;
            .reg .b32 a, b;
            .reg .f32 f<4>;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 a, low;
            cvt.rn.f16x2.e4m3x2 b, high;
            mov.b32 {h0, h1}, a;
            mov.b32 {h2, h3}, b;
            cvt.f32.f16 f0, h0;
            cvt.f32.f16 f1, h1;
            cvt.f32.f16 f2, h2;
            cvt.f32.f16 f3, h3;
            cvt.rn.bf16x2.f32 $0, f2, f0;
            cvt.rn.bf16x2.f32 $1, f3, f1;
        }"""
    if row_format == "uint8":
        return "prmt.b32 $0, $2, 0, 0x4240; prmt.b32 $1, $2, 0, 0x4341;"
    return """{
            .reg .b32 x;
            shr.u32 x, $2, 8;
            lop3.b32 $0, $2, 0x00ff00ff, 0x00800080, 0x6a;  // (bytes & 0xff) ^ 0x80
            lop3.b32 $1, x, 0x00ff00ff, 0x00800080, 0x6a;
        }"""


@gluon.jit
def even_and_odd(pairs, FORMAT: gl.constexpr):
    """The numbers in even and in odd columns of bytes, whose ``pairs`` are given: two of bf16.

    Of integers, u · 2^-133.
    """
    return gl.inline_asm_elementwise(
        _assembly(FORMAT),
        "=&r,=&r,r",
        [pairs],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_even_and_odd(query_ptr, first, count, C: gl.constexpr):
    """Even and odd columns of queries, ``[BLOCK_D / 2, 8]`` each; and the sums of both, ``[8]``.

    The columns are 2^80 times what they are, where rows are of integers.
    """
    even = load_columns(query_ptr, first, count, C, 2, 0)
    odd = load_columns(query_ptr, first, count, C, 2, 1)
    total = gl.sum(even.to(gl.float32) + odd.to(gl.float32), 0)
    if C.FORM.format != "e4m3":
        even, odd = even * LARGER, odd * LARGER
    return (even, odd), gl.convert_layout(total, gl.SliceLayout(0, MMA))


@gluon.jit
def rows_of_tile(samples, chunk, start, C: gl.constexpr):
    """``[BLOCK_N]`` int64: the numbers of a tile's rows."""
    n = start + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, MMA))
    rows = chunk.first + n
    if samples.indices is not None:
        rows = gl.load(samples.indices + rows, mask=n < chunk.end, other=0).to(gl.int64)
    return rows


@gluon.jit
def load_scales(samples, chunk, rows, start, C: gl.constexpr):
    """``[BLOCK_N]`` each: scales and biases of the ``rows`` of the tile that begins at ``start``.

    Zeros of rows beyond the chunk.
    """
    there = start + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, MMA)) < chunk.end
    scale = gl.load(samples.row_scale + rows * C.FORM.scale_stride, mask=there, other=0.0)
    scale = scale.to(gl.float32)
    bias = gl.zeros([C.BLOCK_N], gl.float32, gl.SliceLayout(1, MMA))
    if samples.row_bias is not None:
        ptrs = samples.row_bias + rows * C.FORM.bias_stride
        bias += gl.load(ptrs, mask=there, other=0.0).to(gl.float32)
    if C.FORM.format == "uint8":
        bias += MIDDLE * scale
    return scale, bias


@gluon.jit
def products_of_rows(dots, scale, bias, sum_of_q, FORMAT: gl.constexpr):
    """``[BLOCK_N, 8]``: q · x, from the products of queries and numbers."""
    if FORMAT != "e4m3":
        bias -= MIDDLE * scale
        scale *= BACK
    return dots * scale[:, None] + bias[:, None] * sum_of_q[None, :]


@gluon.jit
def weights_of_numbers(p, scale, bias, total_bias, dtype: gl.constexpr, FORMAT: gl.constexpr):
    """``[BLOCK_N, 8]``: weights of a tile's numbers, rounded; and ``total_bias`` plus what is
    beside their sums.
    """
    total_bias += p * bias[:, None]
    if FORMAT == "e4m3":
        return (p * scale[:, None]).to(dtype), total_bias
    weights = (p * (scale * LARGER)[:, None]).to(dtype)
    return weights, total_bias - weights.to(gl.float32) * (MIDDLE / LARGER)


@gluon.jit
def side_by_side(accs, bias, FORMAT: gl.constexpr):
    """``[BLOCK_D, 8]``: the sums of even columns and of odd ones, plus ``bias`` ``[8]``."""
    even, odd = accs
    if FORMAT != "e4m3":
        even, odd = even * BACK, odd * BACK
    joined = gl.join(even + bias[None, :], odd + bias[None, :])
    shape: gl.constexpr = [2 * even.shape[0], even.shape[1]]
    return gl.convert_layout(gl.reshape(gl.permute(joined, (0, 2, 1)), shape), MMA)
