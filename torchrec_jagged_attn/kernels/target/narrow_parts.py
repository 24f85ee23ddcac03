"""What the path ``one_warp`` has for narrow history rows: their bytes become bf16 in registers.

A tile stays as it is in shared memory, where a pair of bytes is read as one element of 16 bits: by
the instructions, and at the cost, of a tile of half the width. Bytes of even columns and of odd
ones are then operands apart, which hold every number of a byte exactly. With x_n = s_n · c_n + b_n,
scales and biases of rows go into scores and weights:

    q · x_n = s_n · (q · c_n) + b_n · Σ_d q_d
    Σ_n p_n · x_n = Σ_n (p_n · s_n) · c_n + Σ_n p_n · b_n

Rows that are made wide and rounded have scores of their own: so there is no backward of these.

Of uint8, c is 128 less than its byte, and b so much more: both sums are then about as large as what
comes out, so that little is lost where weights are rounded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchrec_jagged_attn.kernels.target.warp_parts import MMA, load_columns, ring_layout

__all__ = [
    "even_and_odd",
    "load_even_and_odd",
    "load_scales",
    "pairs_of",
    "rows_of_tile",
    "side_by_side",
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
    # Of a number's 8 bits, the lower 7 are the mantissa of 128 to 255. What that is too much is 128
    # or, by the upper bit, 256: the bit is the last one of the exponent.
    sign = {"int8": "0xc300c300", "uint8": "0xc380c380"}[row_format]
    of_bytes = """
            lop3.b32 a, {x}, 0x007f007f, low, 0xea;  // (x & 0x7f) | low
            lop3.b32 b, {x}, 0x00800080, high, 0x6a;  // (x & 0x80) ^ high
            fma.rn.bf16x2 {out}, a, one, b;"""
    return f"""{{
            .reg .b32 a, b, x, low, high, one;
            mov.b32 low, 0x43004300;
            mov.b32 high, {sign};
            mov.b32 one, 0x3f803f80;
            shr.u32 x, $2, 8;{of_bytes.format(x="$2", out="$0")}{of_bytes.format(x="x", out="$1")}
        }}"""


@gluon.jit
def even_and_odd(pairs, FORMAT: gl.constexpr):
    """The numbers in even and in odd columns of bytes, whose ``pairs`` are given: two of bf16."""
    return gl.inline_asm_elementwise(
        _assembly(FORMAT),
        "=r,=r,r",
        [pairs],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_even_and_odd(query_ptr, first, count, C: gl.constexpr):
    """Even and odd columns of queries, ``[BLOCK_D / 2, 8]`` each; and the sums of both, ``[8]``."""
    even = load_columns(query_ptr, first, count, C, 2, 0)
    odd = load_columns(query_ptr, first, count, C, 2, 1)
    total = gl.sum(even.to(gl.float32) + odd.to(gl.float32), 0)
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
        bias += 128.0 * scale
    return scale, bias


@gluon.jit
def side_by_side(accs, bias):
    """``[BLOCK_D, 8]``: the sums of even columns and of odd ones, plus ``bias`` ``[8]``."""
    joined = gl.join(accs[0] + bias[None, :], accs[1] + bias[None, :])
    shape: gl.constexpr = [2 * accs[0].shape[0], accs[0].shape[1]]
    return gl.convert_layout(gl.reshape(gl.permute(joined, (0, 2, 1)), shape), MMA)
