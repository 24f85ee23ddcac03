"""Packed codes in the Gluon kernels: each lane unpacks whole rows.

See ``codes/kernels/rows.py`` for the Triton kernels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TO_INTEGER = gl.constexpr(12582912.0)  # 1.5 · 2^23: x + TO_INTEGER - TO_INTEGER rounds x


@gluon.constexpr_function
def _lane_layout(warps):
    """One row per lane."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def _byte_of_zeros(codes, levels):
    """The byte that packs ``codes`` codes of zero."""
    return (levels**codes - 1) // 2


@gluon.constexpr_function
def _one_by_power(levels, k):
    """``1 / levels^k``."""
    return 1.0 / levels**k


@gluon.constexpr_function
def _bytes_of_row(width, per_byte):
    """Bytes of a row of ``width - 1`` codes."""
    return (width - 2) // per_byte + 1


@gluon.constexpr_function
def _steps_to_join(columns):
    """The logarithm to base 2 of ``columns``, a power of two."""
    return columns.bit_length() - 1


@gluon.constexpr_function
def _codes_of_byte(at, width, per_byte):
    """Number of codes in the byte ``at`` of a row."""
    return min(per_byte, width - 1 - at * per_byte)


@gluon.jit
def bytes_of_tile(history_ptr, samples, chunk, start, end, C: gl.constexpr):
    """The bytes of a tile's rows, from ``start`` on: ``[BLOCK_N]`` each."""
    i = gl.arange(0, C.BLOCK_N, _lane_layout(gl.num_warps()))
    mask = i < end - start
    if samples.indices is None:
        ptrs = history_ptr + start.to(gl.int64) * C.STRIDE + i * C.STRIDE
    else:
        row = gl.load(samples.indices + chunk.first + start + i, mask=mask, other=0)
        ptrs = history_ptr + row.to(gl.int64) * C.STRIDE
    packed = ()
    for at in gl.static_range(_bytes_of_row(C.D, C.PER_BYTE)):
        packed += (gl.load(ptrs + at, mask=mask, other=0),)
    return packed


@gluon.jit
def store_codes(tile, packed, C: gl.constexpr):
    """Store the codes of ``packed`` bytes (:func:`bytes_of_tile`), then a one, then zeros.

    With ``w`` a byte minus the byte of zero codes, and ``r_k`` the integer nearest to
    ``w / levels^k``, code ``k`` is ``r_k - levels · r_(k+1)``: three operations in fp32. Lanes
    unpack whole rows, so that they store vectors of 16 bytes.
    """
    columns = ()
    for at in gl.static_range(_bytes_of_row(C.D, C.PER_BYTE)):
        w = packed[at].to(gl.float32) - _byte_of_zeros(
            _codes_of_byte(at, C.D, C.PER_BYTE), C.LEVELS
        )
        rounded = w
        for k in gl.static_range(1, _codes_of_byte(at, C.D, C.PER_BYTE)):
            after = (w * _one_by_power(C.LEVELS, k) + TO_INTEGER) - TO_INTEGER
            columns += (rounded - after * C.LEVELS,)
            rounded = after
        columns += (rounded,)
    by_lane: gl.constexpr = _lane_layout(gl.num_warps())
    columns += (gl.full([C.BLOCK_N], 1.0, gl.float32, by_lane),)
    for _ in gl.static_range(C.BLOCK_D - C.D):
        columns += (gl.full([C.BLOCK_N], 0.0, gl.float32, by_lane),)
    WIDTH: gl.constexpr = min(C.BLOCK_D, 64)
    for first in gl.static_range(0, C.BLOCK_D, WIDTH):
        joined = ()
        for i in gl.static_range(WIDTH):
            joined += (columns[first + i],)
        for step in gl.static_range(1, 1 + _steps_to_join(WIDTH)):
            pairs = ()
            for i in gl.static_range(WIDTH >> step):
                pairs += (gl.join(joined[i], joined[i + (WIDTH >> step)]),)
            joined = pairs
        rows = gl.reshape(joined[0], [C.BLOCK_N, WIDTH])
        tile.slice(first, WIDTH, 1).store(rows.to(tile.dtype))
