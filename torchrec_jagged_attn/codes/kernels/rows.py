"""Unpacking of rows of codes in registers; see ``PackedCodes`` for the layout of bytes.

Code ``k`` of a byte ``v`` of ``n`` levels is ``⌊n · frac(v / n^(k+1))⌋ - (n - 1) / 2``: in fixed
point two products, a mask and a shift, with one factor per column. Each lane unpacks elements of
any row; ``store_codes`` (``target_attention/kernels/warp_codes.py``) unpacks a whole row per lane.

Rows of ``L`` codes of three levels take ``L / 5`` bytes instead of ``2·L``, but as many FLOPs, so
that attention over them is compute-bound. Lookup tables do not help: a table of partial scores by
byte (``[bytes, 256]`` per query row) serves scores only, while the weighted sum of rows needs the
codes anyway; and a table of the codes of each byte takes more shared memory cycles than unpacking.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bits of a fraction: a byte times the rounding error of a factor must be below the least fraction.
BITS = tl.constexpr(22)
FRACTION = tl.constexpr(1 << 22)


@triton.jit
def load_codes(ptr, mask, d, L: tl.constexpr, LEVELS: tl.constexpr, PER_BYTE: tl.constexpr):
    """Load the codes in columns ``d`` ``[1, BLOCK_D]`` of packed rows as int32; 1 from ``L`` on.

    Rows begin at ``ptr`` ``[BLOCK_N, 1]``. Rows outside of ``mask`` are not read, and their codes
    are arbitrary.
    """
    power = tl.full(d.shape, LEVELS, tl.int32)
    for k in tl.static_range(1, PER_BYTE):
        power = tl.where(d % PER_BYTE >= k, power * LEVELS, power)
    factor = (FRACTION + power - 1) // power
    # Masked elements load 1, which this factor decodes as the code 1.
    factor = tl.where(d < L, factor, FRACTION * (LEVELS // 2 + 1) // LEVELS + 1)
    v = tl.load(ptr + d // PER_BYTE, mask=mask & (d < L), other=1).to(tl.int32)
    return (((v * factor) & (FRACTION - 1)) * LEVELS >> BITS) - LEVELS // 2
