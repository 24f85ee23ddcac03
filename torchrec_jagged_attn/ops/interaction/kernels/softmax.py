"""Softmax within each sample: of the columns of ``[L, T]``, or of the rows of its pairs.

    columns: out_nt = exp(x_nt) / Σ_m exp(x_mt)      pairs: out_ij = exp(x_ij) / Σ_k exp(x_ik)
    gradient of x: out · (dout - Σ out · dout)

It is memory-bound: with E elements of e bytes each, forward moves 2·E·e bytes and backward 3·E·e.
Lines that do not fit in a tile are read again, if possible from cache.

A line is a vector that sums to one: a column of ``[L, T]``, or a row of ``[Lx, Ly]`` pairs. Tiles
are ``[i, r]``: lines ``i``, elements ``r``; pairs are contiguous along ``r``, columns along ``i``.
For pairs, the length of a sample decides between the variants in ``plan.py``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.ops.device.jagged import find_tile
from torchrec_jagged_attn.ops.device.softmax import LOG2E, online_softmax_update
from torchrec_jagged_attn.ops.interaction.plan import MAX_TILE_LENGTH
from torchrec_jagged_attn.ops.launch import Launcher

# Bytes of a tile of columns: small, so that several are loaded ahead.
COLUMN_TILE = 2048
# Pairs of a tile. A program computes the rows that begin in its tile. It has a single warp, so that
# reductions need no barrier.
SPAN = 1024
PAIR_CONSTANTS = {"SPAN": SPAN, "BLOCK_R": MAX_TILE_LENGTH, "num_warps": 1, "maxnreg": 64}
SHAPES = tl.constexpr(4)  # of a tile, see ``_pairs_kernel``


class Operands(NamedTuple):
    """Operands of a softmax, or of its gradient. All are ``[N, T]`` or ``[Σ Lx·Ly]``."""

    x: Any  # the input; backward: the gradient of the output
    p: Any  # None; backward: the output
    out: Any  # the output; backward: the gradient of the input


@triton.jit
def _tile_of_lines(
    first,
    i_begin,
    r_begin,
    end_line,
    length,
    T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the offset of a tile of lines before ``end_line``, the offsets of its elements within
    it, and their mask. T is 0 for pairs.

    BLOCK_I times the length of a line is less than 2^31.
    """
    i = tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    mask = (i < end_line - i_begin)[:, None] & (r < length - r_begin)[None, :]
    if T == 0:
        origin = first + tl.cast(i_begin, tl.int64) * length + r_begin
        at = i[:, None] * length + r[None, :]
    else:
        origin = first + tl.cast(r_begin, tl.int64) * T + i_begin
        at = i[:, None] + r[None, :] * T
    return origin, at, mask


@triton.jit
def _load(ptr, at, mask, other):
    return tl.load(ptr + at, mask=mask, other=other).to(tl.float32)


@triton.jit
def _inverse(total):
    """Return 1 / ``total``, or 1 if it is 0."""
    return tl.div_rn(1.0, tl.where(total == 0, 1.0, total))


@triton.jit
def _single_tile(ptrs, first, line, end_line, length, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr):
    """Rows of pairs that fit in a tile: each is read once."""
    for i in range(line, end_line, BLOCK_I):
        origin, at, mask = _tile_of_lines(first, i, 0, end_line, length, 0, BLOCK_I, BLOCK_R)
        if ptrs.p is None:
            x = _load(ptrs.x + origin, at, mask, -float("inf"))
            maximum = tl.max(x, 1)
            maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
            weights = tl.exp2((x - maximum[:, None]) * LOG2E)
            out = weights * _inverse(tl.sum(weights, 1))[:, None]
        else:
            x = _load(ptrs.x + origin, at, mask, 0.0)
            p = _load(ptrs.p + origin, at, mask, 0.0)
            out = p * (x - tl.sum(p * x, 1)[:, None])
        tl.store(ptrs.out + origin + at, out, mask=mask)


@triton.jit
def _multi_pass(
    ptrs,
    first,
    line,
    end_line,
    length,
    T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Lines of several tiles: statistics first, then results. T is 0 for pairs."""
    for i in range(line, end_line, BLOCK_I):
        maximum = tl.full([BLOCK_I], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_I], tl.float32)
        for r in tl.range(0, length, BLOCK_R, num_stages=NUM_STAGES):
            origin, at, mask = _tile_of_lines(first, i, r, end_line, length, T, BLOCK_I, BLOCK_R)
            x = _load(ptrs.x + origin, at, mask, 0.0)
            if ptrs.p is None:
                _, _, maximum, total = online_softmax_update(x, 1.0, 0.0, mask, maximum, total, 1)
            else:
                total += tl.sum(_load(ptrs.p + origin, at, mask, 0.0) * x, 1)
        maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
        inverse = _inverse(total)
        for r in tl.range(0, length, BLOCK_R, num_stages=NUM_STAGES):
            origin, at, mask = _tile_of_lines(first, i, r, end_line, length, T, BLOCK_I, BLOCK_R)
            x = _load(ptrs.x + origin, at, mask, 0.0)
            if ptrs.p is None:
                out = tl.exp2((x - maximum[:, None]) * LOG2E) * inverse[:, None]
            else:
                out = _load(ptrs.p + origin, at, mask, 0.0) * (x - total[:, None])
            tl.store(ptrs.out + origin + at, out, mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def _pairs_kernel(
    ptrs,  # Operands
    offsets_ptr,  # [B + 1], of pairs
    y_offsets_ptr,  # [B + 1]
    num_samples,
    SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Softmax of the rows of pairs that begin in one tile of SPAN pairs, or its gradient,
    ``p · (x - Σ_r p · x)``.

    A tile has the smallest of SHAPES widths that holds a row: BLOCK_R, half of it, and so on.
    """
    tile = tl.program_id(0).to(tl.int64)
    sample, first, end, start = find_tile(offsets_ptr, num_samples, tile, 1, SPAN)
    length = tl.load(y_offsets_ptr + sample + 1) - tl.load(y_offsets_ptr + sample)
    stop = tl.minimum(start + SPAN, tl.maximum(end - first, start))
    line = tl.cdiv(start, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    end_line = tl.cdiv(stop, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    length = length.to(tl.int32)
    if length > BLOCK_R:
        _multi_pass(ptrs, first, line, end_line, length, 0, 1, BLOCK_R, 1)
    for shape in tl.static_range(SHAPES):
        fits = length <= BLOCK_R >> shape
        if shape + 1 < SHAPES:
            fits &= length > BLOCK_R >> (shape + 1)
        if fits:
            _single_tile(ptrs, first, line, end_line, length, 1 << shape, BLOCK_R >> shape)


@triton.jit
def _columns_kernel(
    ptrs,  # Operands
    offsets_ptr,  # [B + 1]
    T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Softmax of BLOCK_I columns of a sample, or its gradient, ``p · (x - Σ_r p · x)``."""
    TILES: tl.constexpr = (T + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0).to(tl.int64)
    sample = program // TILES
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin).to(tl.int32)
    line = (program % TILES).to(tl.int32) * BLOCK_I
    end_line = tl.minimum(line + BLOCK_I, T)
    _multi_pass(ptrs, begin * T, line, end_line, length, T, BLOCK_I, BLOCK_R, 5)


_columns = Launcher(_columns_kernel)
_pairs = Launcher(_pairs_kernel)


def softmax(
    x: Tensor, offsets: Tensor, y_offsets: Tensor | None, p: Tensor | None = None
) -> Tensor:
    """Softmax of each column of each sample's rows of ``x`` ``[N, T]``.

    With ``y_offsets``, of each row of each sample's pairs ``[Σ Lx·Ly]``, and ``offsets`` are pair
    offsets. With the output ``p``, ``x`` is its gradient, and the result is the gradient of the
    input.
    """
    out = x.new_empty(*x.shape)
    if x.numel() == 0:
        return out
    operands = Operands(x.contiguous(), None if p is None else p.contiguous(), out)
    offsets, num_samples = offsets.contiguous(), offsets.numel() - 1
    if y_offsets is None:
        constants = _column_constants(x.shape[1], x.element_size())
        num_tiles = -(-x.shape[1] // constants["BLOCK_I"])
        _columns((num_samples * num_tiles,), (operands, offsets), constants)
    else:
        num_tiles = x.shape[0] // SPAN + num_samples
        arguments = (operands, offsets, y_offsets.contiguous(), num_samples)
        _pairs((num_tiles,), arguments, PAIR_CONSTANTS)
    return out


def softmax_backward(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Gradient of the input of :func:`softmax`."""
    return softmax(grad_out, offsets, y_offsets, out)


@functools.cache
def _column_constants(width: int, size: int) -> dict[str, int]:
    """Compile-time arguments of ``_columns_kernel``: ``width`` columns, ``size`` bytes each."""
    block_i = min(32, triton.next_power_of_2(width))
    return {
        "T": width,
        "BLOCK_I": block_i,
        "BLOCK_R": COLUMN_TILE // size // block_i,
        "num_warps": 2,
    }
