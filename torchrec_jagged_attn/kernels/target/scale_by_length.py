"""What the length of a history does to its pooled row: ``ops/scale_by_length.py`` has the formula.

Forward reads and writes each element once; backward reads two and writes one, and each program
writes a row of fp32 sums for the gradient of the power. With few rows, as here, both are
launch-bound. Sums have one order, whatever the GPU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrec_jagged_attn.arguments import LengthArguments, LengthGradients
from torchrec_jagged_attn.kernels.common.dropout import element_draws, query_draws
from torchrec_jagged_attn.kernels.common.jagged import find_samples
from torchrec_jagged_attn.kernels.common.launch import Launcher
from torchrec_jagged_attn.kernels.common.matmul import padded_width
from torchrec_jagged_attn.kernels.common.softmax import LN2, LOG2E

__all__ = ["backward", "forward"]

BLOCK_ELEMENTS = 2048  # of a program


@triton.jit
def _log2(length):
    """``whole + fraction`` of lengths of at least one, in fp32.

    ``fraction`` is between -0.5 and 0.5, and off by less than a unit in its last place.

    By the series of artanh, of a quotient ``s`` and what its rounding left. A GPU's own logarithm
    is off by more where ``fraction`` is small.
    """
    bits = length.to(tl.int32, bitcast=True)
    whole = ((bits >> 23) - 127).to(tl.float32)
    x = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # length / 2^whole
    is_high = x > 1.4142135
    x, whole = tl.where(is_high, 0.5 * x, x), tl.where(is_high, whole + 1.0, whole)
    above = x - 1.0
    s = tl.div_rn(above, x + 1.0)
    low = tl.div_rn(tl.fma(-s, above, above - 2.0 * s), x + 1.0)
    square = s * s
    y = tl.fma(square, LOG2E * (2 / 9), LOG2E * (2 / 7))
    y = tl.fma(square, y, LOG2E * (2 / 5))
    y = tl.fma(square, y, LOG2E * (2 / 3))
    fraction = tl.fma(low, LOG2E * 2, s * (square * y))
    return whole, tl.fma(s, LOG2E * 2, fraction)


@triton.jit
def _power(whole, fraction, p):
    """``2^((whole + fraction) · p)``, by the nearest power of two and the series of e.

    It is off by less than two units in its last place up to ``|p| = 5``. Sums are fused with
    products here, not where a compiler chooses to: all that is compiled of it has the same bits.
    """
    exponent = tl.fma(whole, p, fraction * p)
    nearest = tl.floor(exponent + 0.5)
    remainder = tl.fma(fraction, p, tl.fma(whole, p, -nearest))
    # What is so large is 0 or infinite.
    x = tl.where(tl.abs(exponent) > 160.0, 0.0, remainder * LN2)
    y = tl.full(x.shape, 1.0, tl.float32)
    for k in tl.static_range(7, 0, -1):
        y = tl.fma(x * (1.0 / k), y, 1.0)
    nearest = tl.minimum(tl.maximum(nearest, -160.0), 160.0)
    half = tl.floor(nearest * 0.5)  # of which the power is finite, where that of all is not
    return tl.exp2(half) * y * tl.exp2(nearest - half)


@triton.jit
def _factors(args, r, e, num_rows, num_samples, num_steps, num_targets, E: tl.constexpr):
    """Of the rows ``r`` and columns ``e``: what ``x`` is multiplied with, and the logarithms of the
    lengths.
    """
    r = tl.minimum(r, num_rows - 1)
    sample = r // num_targets
    if args.query_offsets is not None:
        sample = find_samples(args.query_offsets, r, num_samples, num_steps)
    begin, end = tl.load(args.offsets + sample), tl.load(args.offsets + sample + 1)
    length = tl.maximum(end - begin, 1).to(tl.float32)
    whole, fraction = _log2(length)
    factor = tl.full([r.shape[0], e.shape[0]], 1.0, tl.float32)
    if args.power is not None:
        power = tl.load(args.power + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
        factor = _power(whole[:, None], fraction[:, None], power)
    if args.seed is not None:
        # In single steps, each rounded to the nearest, so that each device drops the same.
        root = tl.sqrt_rn(length)
        limit = (tl.div_rn(args.odds, root + args.odds) * 4294967296.0).to(tl.int64)
        draws = query_draws(args.seed, r)
        draws = element_draws(draws[:, None], e.to(tl.int64)[None, :])
        is_dropped = draws.to(tl.int64) < limit[:, None]
        factor = tl.where(is_dropped, 0.0, factor * (1.0 + tl.div_rn(args.odds, root))[:, None])
    return factor, (whole + fraction) * LN2


@triton.jit(do_not_specialize=["num_rows", "num_samples", "num_steps", "num_targets"])
def _forward_kernel(
    args,  # LengthArguments
    out_ptr,  # [R, E]
    num_rows,
    num_samples,
    num_steps,
    num_targets,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_R rows, BLOCK_E columns."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    factor, _ = _factors(args, r, e, num_rows, num_samples, num_steps, num_targets, E)
    at = r.to(tl.int64)[:, None] * E + e[None, :]
    mask = (r < num_rows)[:, None] & (e < E)[None, :]
    x = tl.load(args.x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, x * factor, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "num_steps", "num_targets"])
def _backward_kernel(
    args,  # LengthArguments
    grad_out_ptr,  # [R, E]
    grad_x_ptr,  # [R, E]
    partials_ptr,  # [row blocks, E] fp32, or None
    num_rows,
    num_samples,
    num_steps,
    num_targets,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """BLOCK_R rows, BLOCK_E columns, and their partial sum of the gradient of the power."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    factor, log = _factors(args, r, e, num_rows, num_samples, num_steps, num_targets, E)
    at = r.to(tl.int64)[:, None] * E + e[None, :]
    mask = (r < num_rows)[:, None] & (e < E)[None, :]
    grad = tl.load(grad_out_ptr + at, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(grad_x_ptr + at, grad, mask=mask)
    if partials_ptr is not None:
        x = tl.load(args.x + at, mask=mask, other=0.0).to(tl.float32)
        partial = tl.sum(grad * x * log[:, None], 0)
        tl.store(partials_ptr + tl.program_id(0).to(tl.int64) * E + e, partial, mask=e < E)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)


def forward(args: LengthArguments) -> Tensor:
    """``out``, in the shape and dtype of ``x``."""
    out = args.x.new_empty(args.x.shape)
    grid, sizes, constants = _launch(args)
    if sizes[0]:
        _forward(grid, (_read(args), out, *sizes), constants)
    return out


def backward(grad_out: Tensor, args: LengthArguments, needs_power: bool) -> LengthGradients:
    """Gradients; that of the power only where it is asked for."""
    grad_x, partials = args.x.new_empty(args.x.shape), None
    grid, sizes, constants = _launch(args)
    if args.power is not None and needs_power:
        partials = args.x.new_empty(grid[0], args.x.shape[-1], dtype=torch.float32)
    if sizes[0]:
        taken = (_read(args), grad_out.contiguous(), grad_x, partials, *sizes)
        _backward(grid, taken, constants)
    if partials is None or args.power is None:
        return LengthGradients(grad_x, None)
    return LengthGradients(grad_x, partials.sum(0).to(args.power.dtype))


def _read(args: LengthArguments) -> LengthArguments:
    return LengthArguments(*(x.contiguous() if isinstance(x, Tensor) else x for x in args))


def _launch(
    args: LengthArguments,
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """Programs; the numbers that kernels take, that of rows first; and constants."""
    *shape, width = args.x.shape
    num_targets = shape[1] if len(shape) == 2 else 1
    num_rows = shape[0] * num_targets
    constants = _constants(width)
    programs = -(-num_rows // constants["BLOCK_R"]), -(-width // constants["BLOCK_E"])
    num_samples = args.offsets.shape[0] - 1
    return programs, (num_rows, num_samples, num_samples.bit_length(), num_targets), constants


@functools.cache
def _constants(width: int) -> dict[str, int]:
    """Compile-time arguments of both kernels."""
    block_e = min(128, padded_width(width))
    return {"E": width, "BLOCK_R": BLOCK_ELEMENTS // block_e, "BLOCK_E": block_e}
