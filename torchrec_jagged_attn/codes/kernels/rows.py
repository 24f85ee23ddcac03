"""Rows of codes, made of their bytes in registers; ``PackedCodes`` says how codes lie in bytes.

Here any lane makes any code, as Triton's layouts ask for; where a lane makes whole rows, see
``store_codes`` of ``target/code_parts.py``.

Code ``k`` of a byte ``v`` of ``n`` levels is ``⌊n · frac(v / n^(k+1))⌋ - (n - 1) / 2``: in fixed
point two products, a mask and a shift, with one factor for each column, made once.

Rows of ``L`` codes of three levels take ``L / 5`` bytes in place of ``2·L`` or, of decoded rows,
``2·D``; but no fewer products, and their codes must be made. So arithmetic bounds attention over
them, not memory. A table of what each value of a byte adds to a score, ``[bytes, 256]`` in shared
memory for each query row, would save codes and products of scores, in ``L / 5`` look-ups a row and
query. But the weighted sum of rows has no such form, other than sums by value, whose rows collide:
they take atomics, or as many look-ups once more, sorted. With codes made for the sum, scores take
tensor cores next to nothing. A table of codes, 243 entries of five, takes a look-up a byte, of
16 bytes at random: more cycles of shared memory than making the codes takes of the units.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_codes"]

# Of fractions: a byte times the rounding of a factor must stay below the least fraction.
BITS = tl.constexpr(22)
FRACTION = tl.constexpr(1 << 22)


@triton.jit
def load_codes(ptr, mask, d, L: tl.constexpr, LEVELS: tl.constexpr, PER_BYTE: tl.constexpr):
    """Codes in the columns ``d`` (``[1, BLOCK_D]``) of packed rows, in int32; ones from ``L`` on.

    Rows begin at ``ptr`` (``[BLOCK_N, 1]``); those that are not in ``mask`` are not read, and have
    any codes.
    """
    power = tl.full(d.shape, LEVELS, tl.int32)
    for k in tl.static_range(1, PER_BYTE):
        power = tl.where(d % PER_BYTE >= k, power * LEVELS, power)
    factor = (FRACTION + power - 1) // power
    # What is not read counts as a byte of one, which this factor makes a code of one.
    factor = tl.where(d < L, factor, FRACTION * (LEVELS // 2 + 1) // LEVELS + 1)
    v = tl.load(ptr + d // PER_BYTE, mask=mask & (d < L), other=1).to(tl.int32)
    return (((v * factor) & (FRACTION - 1)) * LEVELS >> BITS) - LEVELS // 2
