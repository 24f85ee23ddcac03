"""History rows as Triton's kernels multiply them: read as they are, or made in registers.

For rows of digits see ``kernels/common/digits.py``. A narrow row has numbers of a byte, and a scale
and perhaps a bias for all of them:

    x_n = scale_n · c_n + bias_n

They are multiplied in fp32 and then rounded to the dtype of queries: D bytes are read of a row, and
4 or 8 for its scale and bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.kernels.common.digits import load_digits
from torchrec_jagged_attn.kernels.target.schedule import numbers_of_rows

__all__ = ["load_history"]


@triton.jit
def load_history(
    history_ptr, samples, n, visible, d, history_stride, dtype: tl.constexpr, C: tl.constexpr
):
    """``[BLOCK_N, BLOCK_D]``: the rows at the places ``n`` that are visible, in ``dtype``.

    Of rows of digits, these and, in the last column, a one. Plain rows are zeros where places are
    not visible, and beyond D. Others may be any numbers there, which count nothing.
    """
    row = numbers_of_rows(samples, n, visible)
    if C.FORM.format == "digits":
        ptrs = history_ptr + row * history_stride
        x = load_digits(ptrs, visible, d[None, :], C.D - 1, C.FORM.num_levels, C.FORM.per_byte)
        x = x.to(dtype)
    else:
        mask = visible & (d < C.D)[None, :]
        ptrs = history_ptr + row * history_stride + d[None, :]
        if C.FORM.copy_bytes < 16:  # Triton knows of multiples of 16 alone
            ptrs = tl.multiple_of(ptrs, [1, C.FORM.copy_bytes])
        x = tl.load(ptrs, mask=mask, other=0.0)
    if C.FORM.is_narrow:
        scale_ptrs = samples.row_scale + row * C.FORM.scale_stride
        scale = tl.load(scale_ptrs, mask=visible, other=0.0).to(tl.float32)
        x = _numbers_of_bytes(x, C.FORM.format) * scale
        if samples.row_bias is not None:
            bias_ptrs = samples.row_bias + row * C.FORM.bias_stride
            x += tl.load(bias_ptrs, mask=visible, other=0.0).to(tl.float32)
        x = x.to(dtype)
    return x


@triton.jit
def _numbers_of_bytes(x, FORMAT: tl.constexpr):
    """The fp32 numbers that bytes stand for; e4m3 by its bits, which every device understands."""
    if FORMAT == "e4m3":
        bits = x.to(tl.int32)
        magnitude = bits & 0x7F
        # Exponent and mantissa lie where fp32 has them, whose bias is larger by 127 - 7.
        number = (magnitude << 20).to(tl.float32, bitcast=True) * 2.0**120
        number = tl.where(magnitude == 0x7F, float("nan"), number)
        number = tl.where(bits < 0, -number, number)
    else:
        number = x.to(tl.float32)
    return number
