"""Softmax within each sample: of the columns of its ``[L, T]``, or of the rows of its pairs.

    columns: out_nt = exp(x_nt) / Σ_m exp(x_mt)      pairs: out_ij = exp(x_ij) / Σ_k exp(x_ik)
    gradient of x: out · (dout - Σ out · dout)

It is memory-bound: with E elements of e bytes each, forward moves 2·E·e bytes and backward 3·E·e.
Lines that do not fit in a tile are read again, from cache if they fit there.

A line is what one softmax is over: a column of ``[L, T]``, or a row of ``[Lx, Ly]`` pairs. Tiles
are ``[i, r]``: lines ``i``, elements ``r``; pairs are contiguous along ``r``, columns along ``i``.
The length of a sample decides between the variants in ``plan.py``.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.interaction.plan import MAX_SHORT_LENGTH, MAX_TILE_LENGTH
from torchrec_jagged_attn.runtime.kernels.jagged import find_tile
from torchrec_jagged_attn.runtime.kernels.softmax import LOG2E, online_softmax_update
from torchrec_jagged_attn.runtime.launch import Launcher

# Bytes of a tile of long columns: small, so that several are loaded ahead.
LONG_TILE = 2048
# Pairs of a tile. A program computes the rows that begin in its tile. It is a single warp, so that
# reductions need no barrier.
SPAN = 1024
PAIR_CONSTANTS = {
    "SPAN": SPAN,
    "BLOCK_R": MAX_TILE_LENGTH,
    "SHAPES": 4,
    "num_warps": 1,
    "maxnreg": 64,
}


@triton.jit
def _line_tile(
    first,
    i_begin,
    r_begin,
    last_line,
    length,
    T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A tile of the lines up to ``last_line``: its offset, those of its elements from there, and
    their mask.

    BLOCK_I times the length of a line is less than 2^31.
    """
    i = tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    mask = (i < last_line - i_begin)[:, None] & (r < length - r_begin)[None, :]
    if PAIRS:
        origin = first + tl.cast(i_begin, tl.int64) * length + r_begin
        at = i[:, None] * length + r[None, :]
    else:
        origin = first + tl.cast(r_begin, tl.int64) * T + i_begin
        at = i[:, None] + r[None, :] * T
    return origin, at, mask


@triton.jit
def _load_lines(ptr, at, mask):
    """Elements of a tile in fp32, 0 where masked."""
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _single_tile(
    x_ptr,
    p_ptr,
    out_ptr,
    first,
    line,
    last_line,
    length,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Rows of pairs that fit in a tile: each is read once."""
    for i in range(line, last_line, BLOCK_I):
        origin, at, mask = _line_tile(first, i, 0, last_line, length, 0, True, BLOCK_I, BLOCK_R)
        if p_ptr is None:
            x = tl.load(x_ptr + origin + at, mask=mask, other=-float("inf")).to(tl.float32)
            maximum = tl.max(x, 1)
            maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
            weights = tl.exp2((x - maximum[:, None]) * LOG2E)
            total = tl.sum(weights, 1)
            out = weights * tl.div_rn(1.0, tl.where(total == 0, 1.0, total))[:, None]
        else:
            x = _load_lines(x_ptr + origin, at, mask)
            p = _load_lines(p_ptr + origin, at, mask)
            out = p * (x - tl.sum(p * x, 1)[:, None])
        tl.store(out_ptr + origin + at, out, mask=mask)


@triton.jit
def _multi_pass(
    x_ptr,
    p_ptr,
    out_ptr,
    first,
    line,
    last_line,
    length,
    T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Lines of several tiles: statistics first, then results."""
    for i in range(line, last_line, BLOCK_I):
        maximum = tl.full([BLOCK_I], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_I], tl.float32)
        for r in tl.range(0, length, BLOCK_R, num_stages=NUM_STAGES):
            origin, at, mask = _line_tile(
                first, i, r, last_line, length, T, PAIRS, BLOCK_I, BLOCK_R
            )
            x = _load_lines(x_ptr + origin, at, mask)
            if p_ptr is None:
                _, _, maximum, total = online_softmax_update(x, 1.0, 0.0, mask, maximum, total, 1)
            else:
                total += tl.sum(_load_lines(p_ptr + origin, at, mask) * x, 1)
        maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
        inverse = tl.div_rn(1.0, tl.where(total == 0, 1.0, total))
        for r in tl.range(0, length, BLOCK_R, num_stages=NUM_STAGES):
            origin, at, mask = _line_tile(
                first, i, r, last_line, length, T, PAIRS, BLOCK_I, BLOCK_R
            )
            x = _load_lines(x_ptr + origin, at, mask)
            if p_ptr is None:
                out = tl.exp2((x - maximum[:, None]) * LOG2E) * inverse[:, None]
            else:
                out = _load_lines(p_ptr + origin, at, mask) * (x - total[:, None])
            tl.store(out_ptr + origin + at, out, mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def _pairs_kernel(
    x_ptr,  # [Σ Lx·Ly]; backward: the gradient of the output
    p_ptr,  # None; backward: the output
    out_ptr,  # [Σ Lx·Ly]: the output, or the gradient of the input
    offsets_ptr,  # [B + 1], of pairs
    y_offsets_ptr,  # [B + 1]
    num_samples,
    SPAN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Softmax of the rows of pairs that begin in one tile of SPAN pairs, or its gradient,
    ``p · (x - Σ_r p · x)``.

    A tile has the least of SHAPES widths that holds a row: BLOCK_R, or a half of it, and so on.
    """
    tile = tl.program_id(0).to(tl.int64)
    sample, first, end, start = find_tile(offsets_ptr, num_samples, tile, 1, SPAN)
    length = tl.load(y_offsets_ptr + sample + 1) - tl.load(y_offsets_ptr + sample)
    stop = tl.minimum(start + SPAN, tl.maximum(end - first, start))
    line = tl.cdiv(start, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    last_line = tl.cdiv(stop, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    length = length.to(tl.int32)
    if length > BLOCK_R:
        _multi_pass(x_ptr, p_ptr, out_ptr, first, line, last_line, length, 0, True, 1, BLOCK_R, 1)
    for shape in tl.static_range(SHAPES):
        fits = length <= BLOCK_R >> shape
        if shape + 1 < SHAPES:
            fits &= length > BLOCK_R >> (shape + 1)
        if fits:
            _single_tile(
                x_ptr, p_ptr, out_ptr, first, line, last_line, length, 1 << shape, BLOCK_R >> shape
            )


@triton.jit
def _load_rows(ptr, at, r, rows, inside, other):
    """The first ``rows`` of some columns, in fp32, and their mask."""
    mask = (r < rows)[:, None] & inside
    return tl.load(ptr + at, mask=mask, other=other).to(tl.float32), mask


@triton.jit
def _short(
    x_ptr,
    p_ptr,
    out_ptr,
    first,
    line,
    length,
    T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Columns of one sample, from ``line`` on. Maxima and sums are per thread, and reduced after
    the last row.
    """
    i = tl.arange(0, BLOCK_I)
    r = tl.arange(0, BLOCK_R)
    at = r[:, None] * T + i[None, :]
    inside = (i < T - line)[None, :]
    first += line
    total = tl.zeros([BLOCK_R, BLOCK_I], tl.float32)
    if p_ptr is None:
        lowest = -float("inf")
        maximum = tl.full([BLOCK_R, BLOCK_I], lowest, tl.float32)
        for n in range(0, length, BLOCK_R):
            x, _ = _load_rows(x_ptr + first + n * T, at, r, length - n, inside, lowest)
            maximum = tl.maximum(maximum, x)
        shift = tl.max(maximum, 0)
        shift = tl.where(shift == lowest, 0.0, shift)[None, :]
        for n in range(0, length, BLOCK_R):
            x, _ = _load_rows(x_ptr + first + n * T, at, r, length - n, inside, lowest)
            total += tl.exp2((x - shift) * LOG2E)
        total_i = tl.sum(total, 0)
        inverse = tl.div_rn(1.0, tl.where(total_i == 0, 1.0, total_i))[None, :]
        for n in range(0, length, BLOCK_R):
            x, mask = _load_rows(x_ptr + first + n * T, at, r, length - n, inside, lowest)
            out = tl.exp2((x - shift) * LOG2E) * inverse
            tl.store(out_ptr + first + n * T + at, out, mask=mask)
    else:
        for n in range(0, length, BLOCK_R):
            x, _ = _load_rows(x_ptr + first + n * T, at, r, length - n, inside, 0.0)
            p, _ = _load_rows(p_ptr + first + n * T, at, r, length - n, inside, 0.0)
            total += p * x
        mean = tl.sum(total, 0)[None, :]
        for n in range(0, length, BLOCK_R):
            x, _ = _load_rows(x_ptr + first + n * T, at, r, length - n, inside, 0.0)
            p, mask = _load_rows(p_ptr + first + n * T, at, r, length - n, inside, 0.0)
            tl.store(out_ptr + first + n * T + at, p * (x - mean), mask=mask)


@triton.jit
def _columns_kernel(
    x_ptr,  # [N, T]; backward: the gradient of the output
    p_ptr,  # None; backward: the output
    out_ptr,  # [N, T]: the output, or the gradient of the input
    offsets_ptr,  # [B + 1]
    T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LONG: tl.constexpr,
    LONG_TILE: tl.constexpr,
):
    """Softmax of BLOCK_I columns of a sample, or its gradient, ``p · (x - Σ_r p · x)``."""
    TILES: tl.constexpr = (T + BLOCK_I - 1) // BLOCK_I
    program = tl.program_id(0).to(tl.int64)
    sample = program // TILES
    begin = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin).to(tl.int32)
    first = begin * T
    line = (program % TILES).to(tl.int32) * BLOCK_I
    if length > LONG:
        last_line = tl.minimum(line + BLOCK_I, T)
        _multi_pass(
            x_ptr, p_ptr, out_ptr, first, line, last_line, length,
            T, False, BLOCK_I, LONG_TILE // BLOCK_I, 5,
        )  # fmt: skip
    else:
        _short(x_ptr, p_ptr, out_ptr, first, line, length, T, BLOCK_I, BLOCK_R)


_columns = Launcher(_columns_kernel)
_pairs = Launcher(_pairs_kernel)


def softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    """Softmax of each column of each sample's rows of ``x`` ``[N, T]``.

    With ``y_offsets``, of each row of each sample's pairs in ``[Σ Lx·Ly]``; ``offsets`` are then
    those of pairs.
    """
    return _launch_softmax(x, None, offsets, y_offsets)


def softmax_backward(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Gradient of the input of :func:`softmax`."""
    return _launch_softmax(grad_out, out, offsets, y_offsets)


def _launch_softmax(
    x: Tensor, p: Tensor | None, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Softmax of ``x``; or with ``p``, the output, its gradient, where ``x`` is that of ``p``."""
    out = x.new_empty(*x.shape)
    if x.numel() == 0:
        return out
    x, p = x.contiguous(), None if p is None else p.contiguous()
    offsets, num_samples = offsets.contiguous(), offsets.numel() - 1
    if y_offsets is None:
        constants = _column_constants(x.shape[1], x.element_size(), p is not None)
        num_tiles = -(-x.shape[1] // constants["BLOCK_I"])
        _columns((num_samples * num_tiles,), (x, p, out, offsets), constants)
    else:
        num_tiles = x.shape[0] // SPAN + num_samples
        arguments = (x, p, out, offsets, y_offsets.contiguous(), num_samples)
        _pairs((num_tiles,), arguments, PAIR_CONSTANTS)
    return out


@functools.cache
def _column_constants(width: int, size: int, backward: bool) -> dict:
    """Compile-time arguments of the softmax over rows of ``width`` elements of ``size`` bytes."""
    block_i = min(32, triton.next_power_of_2(width))
    return {
        "T": width,
        "BLOCK_I": block_i,
        "BLOCK_R": 128 if backward or block_i < 16 else 64,
        "LONG": MAX_SHORT_LENGTH,
        "LONG_TILE": LONG_TILE // size,
        "num_warps": 4 if backward or block_i > 16 else 2,
        **({} if backward else {"maxnreg": 48}),
    }
