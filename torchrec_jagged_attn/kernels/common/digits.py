"""Rows of digits, made of their bytes in registers; ``SemanticIds`` says how digits lie in bytes.

Digit ``k`` of a byte ``v`` of ``n`` levels is ``⌊n · frac(v / n^(k+1))⌋ - (n - 1) / 2``. In fixed
point that is two products, a mask and a shift, with one factor for each column that no loop makes
again. A table of 256 digits, or of what a byte adds to a score, would save these, but its look-ups
at random cost more: a warp reads as many lines as its bytes have values. And it serves scores
alone: the weighted sum of rows would have to be scattered by value, which takes atomics.

Rows of ``L`` digits take ``L / 5`` bytes in place of ``2·L`` or, of decoded rows, ``2·D``, but no
fewer products. So what bounds attention over them is not memory. With N rows and R query rows, it
takes N·L·(4 integer operations, a conversion and a load from the cache) to make digits, N·R·4·L
FLOPs on tensor cores, and N·R exponentials, where R counts as 16 at least.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_digits"]

# Of fractions: a byte times the rounding of a factor must stay below the least fraction.
BITS = tl.constexpr(22)
FRACTION = tl.constexpr(1 << 22)


@triton.jit
def load_digits(ptr, mask, d, L: tl.constexpr, LEVELS: tl.constexpr, PER_BYTE: tl.constexpr):
    """Digits in the columns ``d`` (``[1, BLOCK_D]``) of packed rows, in int32; ones from ``L`` on.

    Rows begin at ``ptr`` (``[BLOCK_N, 1]``); those that are not in ``mask`` are not read, and have
    any digits.
    """
    power = tl.full(d.shape, LEVELS, tl.int32)
    for k in tl.static_range(1, PER_BYTE):
        power = tl.where(d % PER_BYTE >= k, power * LEVELS, power)
    factor = (FRACTION + power - 1) // power
    # What is not read counts as a byte of one, which this factor makes a digit of one.
    factor = tl.where(d < L, factor, FRACTION * (LEVELS // 2 + 1) // LEVELS + 1)
    v = tl.load(ptr + d // PER_BYTE, mask=mask & (d < L), other=1).to(tl.int32)
    return (((v * factor) & (FRACTION - 1)) * LEVELS >> BITS) - LEVELS // 2
