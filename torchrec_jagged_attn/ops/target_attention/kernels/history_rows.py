"""Load history rows in the Triton kernels, by gather indices, if given, and unpacked from packed
codes (``codes/kernels/rows.py``); and load their biases.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchrec_jagged_attn.codes.kernels.rows import load_codes
from torchrec_jagged_attn.ops.device.biases import load_bias
from torchrec_jagged_attn.ops.target_attention.kernels.schedule import gather_indices


@triton.jit
def load_history(history_ptr, samples, start, end, d, dtype: tl.constexpr, C: tl.constexpr):
    """``(n, visible, x)``: the positions from ``start`` to ``end``, their mask (``[BLOCK_N, 1]``
    each), and their rows ``[BLOCK_N, BLOCK_D]`` in ``dtype``.

    Unpacked codes are followed by a one in the last column. Masked elements are zeros, but of
    packed codes arbitrary.
    """
    index = tl.arange(0, C.BLOCK_N)
    n = (start + index)[:, None]
    visible = (index < (end - start).to(tl.int32))[:, None]
    row = gather_indices(samples, n, visible)
    ptrs = history_ptr + row * C.STRIDE
    if C.LEVELS > 0:
        x = load_codes(ptrs, visible, d[None, :], C.D - 1, C.LEVELS, C.PER_BYTE).to(dtype)
    else:
        x = tl.load(ptrs + d[None, :], mask=visible & (d < C.D)[None, :], other=0.0)
    return n, visible, x


@triton.jit
def load_tile_bias(biases, samples, work, start, n, visible, r, C: tl.constexpr):
    """``[BLOCK_N, BLOCK_R]``: the sum of all biases of the positions ``n``, of
    :func:`load_history`, for the query rows ``r`` of ``work``; 0 without biases.

    The branch is always taken. Triton does not pipeline loads in a branch: it would copy the bias
    of each pair to shared memory, where lanes that read the same address take turns.
    """
    bias = 0.0
    if (biases.prior_weights is not None) or C.P + C.A > 0:
        bias = tl.zeros([C.BLOCK_N, C.BLOCK_R], tl.float32)
        if start < work.end:
            bias = load_bias(
                biases, samples.offsets, work.sample, n, visible, r[None, :], work.count, C
            )
    return bias
