"""Softmax within each sample, and a dense row per sample added to or multiplied with its rows.

All are bound by memory: with e bytes an element and E elements,

    softmax       reads and writes E·e bytes, backward 3·E·e; where a sample or row is longer than
                  a tile, it is read once more (from the cache, if it fits)
    element-wise  2·E·e bytes, and the gradient of the dense row reads E·e or 2·E·e

A softmax is over a column of a sample's ``[L, T]``, or over a row of its ``[Lx, Ly]`` pairs: here,
over ``r`` in ``[i, r]``, where pairs have ``i`` in rows and columns have ``i`` next to each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.kernels.common import LOG2E, find_tile, online_softmax_update
from torchrec_jagged_attn.kernels.jagged_products import add_chunks, find_chunk
from torchrec_jagged_attn.kernels.launch import Launcher
from torchrec_jagged_attn.layout import JaggedLayout

__all__ = ["elementwise", "softmax", "softmax_backward", "sum_rows"]

# Elements of a tile.
TILE = 2048


@triton.jit
def _find_lines(
    offsets_ptr,
    y_offsets_ptr,
    num_samples,
    T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPAN: tl.constexpr,
):
    """What to take the softmax of: columns of a sample, or rows of its pairs.

    A program has the rows of pairs that begin in one tile of SPAN pairs.

    Returns the first element of the sample, the first and the last (excluded) line, and how long
    lines are.
    """
    program = tl.program_id(0).to(tl.int64)
    if PAIRS:
        sample, first, end, start = find_tile(offsets_ptr, num_samples, program, 1, SPAN)
        length = tl.load(y_offsets_ptr + sample + 1) - tl.load(y_offsets_ptr + sample)
        stop = tl.minimum(start + SPAN, tl.maximum(end - first, start))
        line = tl.cdiv(start, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
        last_line = tl.cdiv(stop, tl.maximum(length, 1).to(tl.int64)).to(tl.int32)
    else:
        TILES: tl.constexpr = (T + BLOCK_I - 1) // BLOCK_I
        sample = program // TILES
        begin = tl.load(offsets_ptr + sample).to(tl.int64)
        length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - begin
        first = begin * T
        line = (program % TILES).to(tl.int32) * BLOCK_I
        last_line = tl.minimum(line + BLOCK_I, T)
    return first, line, last_line, length.to(tl.int32)


@triton.jit
def _line_tile(
    first,
    i,
    r,
    last_line,
    length,
    T: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Elements ``[i, r]`` of the lines up to ``last_line``, and which of them there are."""
    if PAIRS:
        at = i.to(tl.int64)[:, None] * length + r[None, :]
    else:
        at = i[:, None] + r.to(tl.int64)[None, :] * T
    return first + at, (i < last_line)[:, None] & (r < length)[None, :]


@triton.jit(do_not_specialize=["num_samples"])
def _softmax_kernel(
    x_ptr,  # [N, T], or pairs
    out_ptr,  # as x
    offsets_ptr,  # [B + 1], of rows or of pairs
    y_offsets_ptr,  # [B + 1], for pairs
    num_samples,
    T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Softmax of some lines of a sample: statistics first, then weights."""
    first, line, last_line, length = _find_lines(
        offsets_ptr, y_offsets_ptr, num_samples, T, PAIRS, BLOCK_I, SPAN
    )
    for i_start in range(line, last_line, BLOCK_I):
        i = i_start + tl.arange(0, BLOCK_I)
        maximum = tl.full([BLOCK_I], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_I], tl.float32)
        for start in range(0, length, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            at, visible = _line_tile(first, i, r, last_line, length, T, PAIRS)
            x = tl.load(x_ptr + at, mask=visible, other=0.0).to(tl.float32)
            _, _, maximum, total = online_softmax_update(
                x, 1.0, 0.0, visible, maximum, total, 1, LOG2E
            )
        maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
        total = tl.where(total == 0, 1.0, total)
        for start in range(0, length, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            at, visible = _line_tile(first, i, r, last_line, length, T, PAIRS)
            x = tl.load(x_ptr + at, mask=visible, other=0.0).to(tl.float32)
            weights = tl.exp2((x - maximum[:, None]) * LOG2E)
            tl.store(out_ptr + at, tl.div_rn(weights, total[:, None]), mask=visible)


@triton.jit(do_not_specialize=["num_samples"])
def _softmax_backward_kernel(
    grad_out_ptr,  # [N, T], or pairs
    out_ptr,  # as grad_out
    grad_x_ptr,  # as grad_out
    offsets_ptr,  # [B + 1], of rows or of pairs
    y_offsets_ptr,  # [B + 1], for pairs
    num_samples,
    T: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPAN: tl.constexpr,
):
    """``out · (grad_out - Σ_r out · grad_out)`` of some lines of a sample."""
    first, line, last_line, length = _find_lines(
        offsets_ptr, y_offsets_ptr, num_samples, T, PAIRS, BLOCK_I, SPAN
    )
    for i_start in range(line, last_line, BLOCK_I):
        i = i_start + tl.arange(0, BLOCK_I)
        mean = tl.zeros([BLOCK_I], tl.float32)
        for start in range(0, length, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            at, visible = _line_tile(first, i, r, last_line, length, T, PAIRS)
            out = tl.load(out_ptr + at, mask=visible, other=0.0).to(tl.float32)
            grad_out = tl.load(grad_out_ptr + at, mask=visible, other=0.0).to(tl.float32)
            mean += tl.sum(out * grad_out, 1)
        for start in range(0, length, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            at, visible = _line_tile(first, i, r, last_line, length, T, PAIRS)
            out = tl.load(out_ptr + at, mask=visible, other=0.0).to(tl.float32)
            grad_out = tl.load(grad_out_ptr + at, mask=visible, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + at, out * (grad_out - mean[:, None]), mask=visible)


@triton.jit(do_not_specialize=["num_samples"])
def _elementwise_kernel(
    x_ptr,  # [N, D]
    y_ptr,  # [B, D]
    out_ptr,  # [N, D]
    offsets_ptr,  # [B + 1]
    num_samples,
    D: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of a sample's rows, plus or times the sample's row of y."""
    tile = tl.program_id(0).to(tl.int64)
    sample, begin, end, start = find_tile(offsets_ptr, num_samples, tile, 1, BLOCK_N)
    n = begin + start + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = n[:, None] * D + d[None, :]
    mask = (n < end)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + sample * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    out = x * y if MULTIPLY else x + y
    tl.store(out_ptr + at, out, mask=mask)


@triton.jit(do_not_specialize=["num_samples", "num_slots"])
def _sum_rows_kernel(
    x_ptr,  # [N, D]
    y_ptr,  # [N, D], to sum x · y, or None, to sum x
    out_ptr,  # [B, D]
    sums_ptr,  # [slots, D] fp32
    offsets_ptr,  # [B + 1]
    num_samples,
    num_slots,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum of one chunk of a sample's rows."""
    work = tl.program_id(0).to(tl.int64)
    busy, sample, begin, end, slot = find_chunk(offsets_ptr, num_samples, work, num_slots, CHUNK)
    if not busy:
        return
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=3):
        n = start + tl.arange(0, BLOCK_N)
        at = n[:, None] * D + d[None, :]
        mask = (n < end)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if y_ptr is not None:
            x *= tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        acc += x
    total = tl.sum(acc, 0)
    if slot >= 0:
        tl.store(sums_ptr + slot * D + d, total, mask=d < D)
    else:
        tl.store(out_ptr + sample * D + d, total, mask=d < D)


_softmax = Launcher(_softmax_kernel)
_softmax_backward = Launcher(_softmax_backward_kernel)
_elementwise = Launcher(_elementwise_kernel)
_sum_rows = Launcher(_sum_rows_kernel)


def softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    """Of each column of each sample's rows of ``[N, T]``.

    Or, given y's offsets, of each row of each sample's pairs in ``[Σ Lx·Ly]``, where
    ``offsets`` are those of pairs.
    """
    out = x.new_empty(x.shape)
    _launch_softmax(_softmax, (x, out), offsets, y_offsets)
    return out


def softmax_backward(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Gradient of what :func:`softmax` made ``out`` of."""
    grad_x = out.new_empty(out.shape)
    _launch_softmax(_softmax_backward, (grad_out, out, grad_x), offsets, y_offsets)
    return grad_x


def _launch_softmax(
    kernel: Launcher, tensors: tuple[Tensor, ...], offsets: Tensor, y_offsets: Tensor | None
) -> None:
    """Launch one of the two kernels on ``tensors``, all of one shape."""
    if tensors[0].numel() == 0:
        return
    num_samples = offsets.numel() - 1
    if y_offsets is None:
        width = tensors[0].shape[1]
        block_i = min(64, triton.next_power_of_2(width))
        num_programs = num_samples * triton.cdiv(width, block_i)
    else:
        width, block_i = 0, 8
        num_programs = JaggedLayout(offsets, tensors[0].shape[0]).num_tiles(2 * TILE)
        y_offsets = y_offsets.contiguous()
    kernel(
        (num_programs,),
        (*(x.contiguous() for x in tensors), offsets.contiguous(), y_offsets, num_samples),
        {
            "T": width,
            "PAIRS": y_offsets is not None,
            "BLOCK_I": block_i,
            "BLOCK_R": 128 if width == 0 else min(512, TILE // block_i),
            "SPAN": 2 * TILE,
        },
    )


def elementwise(x: Tensor, y: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    """``[N, D]`` plus or times the row of ``[B, D]`` of each row's sample."""
    out = x.new_empty(x.shape)
    if out.numel():
        tiles = _row_tiles(x.shape[1], TILE)
        num_tiles = JaggedLayout(offsets, x.shape[0]).num_tiles(tiles["BLOCK_N"])
        _elementwise(
            (num_tiles, triton.cdiv(x.shape[1], tiles["BLOCK_D"])),
            (x.contiguous(), y.contiguous(), out, offsets.contiguous(), offsets.numel() - 1),
            {"D": x.shape[1], "MULTIPLY": multiply} | tiles,
        )
    return out


def sum_rows(x: Tensor, y: Tensor | None, offsets: Tensor) -> Tensor:
    """``[N, D] → [B, D]``: the sum of each sample's rows of x, or of x · y."""
    num_samples, (num_rows, width) = offsets.numel() - 1, x.shape
    out = x.new_empty(num_samples, width)
    if out.numel():
        tiles, chunk = _row_tiles(width, 512), 256
        num_slots = num_rows // chunk
        sums = out.new_empty(num_slots, width, dtype=torch.float32)
        offsets = offsets.contiguous()
        y = None if y is None else y.contiguous()
        _sum_rows(
            (num_slots + num_samples, triton.cdiv(width, tiles["BLOCK_D"])),
            (x.contiguous(), y, out, sums, offsets, num_samples, num_slots),
            {"D": width, "CHUNK": chunk} | tiles,
        )
        add_chunks(sums, out, offsets, chunk)
    return out


def _row_tiles(width: int, size: int) -> dict:
    """Tiles of at least 16 rows of ``width``, of about ``size`` elements.

    The fewer rows, the shorter the chains of a sum.
    """
    block_d = min(128, triton.next_power_of_2(width))
    return {"BLOCK_N": max(16, min(128, size // block_d)), "BLOCK_D": block_d}
