"""History rows as Triton's kernels multiply them: read as they are, or unpacked in registers.

For packed codes see ``codes/kernels/rows.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.codes.kernels.rows import load_codes
from torchrec_jagged_attn.target_attention.kernels.schedule import numbers_of_rows

__all__ = ["load_history"]


@triton.jit
def load_history(
    history_ptr, samples, start, end, d, history_stride, dtype: tl.constexpr, C: tl.constexpr
):
    """``(n, visible, x)`` of the places from ``start`` on: their numbers and whether they are
    visible, which they are up to ``end``, ``[BLOCK_N, 1]``, and their rows in ``dtype``,
    ``[BLOCK_N, BLOCK_D]``.

    Of rows of codes, these and, in the last column, a one. Plain rows are zeros where places are
    not visible, and beyond D. Codes may be any numbers there, which count nothing.
    """
    index = tl.arange(0, C.BLOCK_N)
    n = (start + index)[:, None]
    visible = (index < (end - start).to(tl.int32))[:, None]
    row = numbers_of_rows(samples, n, visible)
    ptrs = history_ptr + row * history_stride
    if C.LEVELS > 0:
        x = load_codes(ptrs, visible, d[None, :], C.D - 1, C.LEVELS, C.PER_BYTE).to(dtype)
    else:
        x = tl.load(ptrs + d[None, :], mask=visible & (d < C.D)[None, :], other=0.0)
    return n, visible, x
