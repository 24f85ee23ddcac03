"""What the length of a history does to its pooled row: ``ops/scale_by_length.py`` has the formula.

Forward reads and writes each element once; backward reads two and writes one. Each program of
backward writes a row of fp32 sums for the gradient of the power, and one for that of the bias, if
they are asked for. With few rows, as here, both are launch-bound. Sums have one order, whatever the
GPU.
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
ROOT_OF_12 = tl.constexpr(12**0.5)  # one by the deviation of what is uniform between 0 and 1


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
def _lengths(args, r, num_rows, num_samples, num_steps, num_targets):
    """Of the histories of the rows ``r``, in fp32."""
    r = tl.minimum(r, num_rows - 1)
    sample = r // num_targets
    if args.query_offsets is not None:
        sample = find_samples(args.query_offsets, r, num_samples, num_steps)
    begin, end = tl.load(args.offsets + sample), tl.load(args.offsets + sample + 1)
    return (end - begin).to(tl.float32)


@triton.jit
def _powers(args, whole, fraction, e, E: tl.constexpr):
    """What ``x`` is multiplied with, of lengths whose logarithms are given."""
    factor = tl.full([whole.shape[0], e.shape[0]], 1.0, tl.float32)
    if args.power is not None:
        power = tl.load(args.power + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
        factor = _power(whole[:, None], fraction[:, None], power)
    return factor


@triton.jit
def _kept(args, draws, e, root, DROPS: tl.constexpr):
    """What all is multiplied with: zero for what is dropped. ``root`` is that of the length."""
    factor = tl.full([root.shape[0], e.shape[0]], 1.0, tl.float32)
    if DROPS:
        # In single steps, each rounded to the nearest, so that each device drops the same.
        limit = (tl.div_rn(args.odds, root + args.odds) * 4294967296.0).to(tl.int64)
        bits = element_draws(draws[:, None], e.to(tl.int64)[None, :])
        factor *= (1.0 + tl.div_rn(args.odds, root))[:, None]
        factor = tl.where(bits.to(tl.int64) < limit[:, None], 0.0, factor)
    return factor


@triton.jit
def _noise(args, draws, e, length, root, E: tl.constexpr):
    """Its columns are drawn as if they followed those that are dropped."""
    bits = element_draws(draws[:, None], (E + e).to(tl.int64)[None, :])
    uniform = (bits ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.float32)
    scale = tl.where(length == 0, 0.0, tl.div_rn(args.noise, root))
    return uniform * (ROOT_OF_12 / 4294967296.0) * scale[:, None]


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
    NOISE: tl.constexpr,  # whether there is noise
    DROPS: tl.constexpr,  # whether elements are dropped
):
    """BLOCK_R rows, BLOCK_E columns."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    length = _lengths(args, r, num_rows, num_samples, num_steps, num_targets)
    at_least_one = tl.maximum(length, 1.0)
    root = tl.sqrt_rn(at_least_one)
    whole, fraction = _log2(at_least_one)
    at = r.to(tl.int64)[:, None] * E + e[None, :]
    mask = (r < num_rows)[:, None] & (e < E)[None, :]
    x = tl.load(args.x + at, mask=mask, other=0.0).to(tl.float32)
    out = x * _powers(args, whole, fraction, e, E)
    if args.bias is not None:
        bias = tl.load(args.bias + e, mask=e < E, other=0.0).to(tl.float32)
        out += bias[None, :] * ((whole + fraction) * LN2)[:, None]
    draws = query_draws(args.seed, r)
    if NOISE:
        out += _noise(args, draws, e, length, root, E)
    tl.store(out_ptr + at, out * _kept(args, draws, e, root, DROPS), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_samples", "num_steps", "num_targets"])
def _backward_kernel(
    args,  # LengthArguments
    grad_out_ptr,  # [R, E]
    grads,  # LengthGradients; of power and bias partial sums [row blocks, E] fp32
    num_rows,
    num_samples,
    num_steps,
    num_targets,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DROPS: tl.constexpr,  # whether elements are dropped
):
    """BLOCK_R rows, BLOCK_E columns, and their partial sums of the gradients of power and bias."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    length = _lengths(args, r, num_rows, num_samples, num_steps, num_targets)
    at_least_one = tl.maximum(length, 1.0)
    whole, fraction = _log2(at_least_one)
    log = ((whole + fraction) * LN2)[:, None]
    at = r.to(tl.int64)[:, None] * E + e[None, :]
    mask = (r < num_rows)[:, None] & (e < E)[None, :]
    grad = tl.load(grad_out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    grad *= _kept(args, query_draws(args.seed, r), e, tl.sqrt_rn(at_least_one), DROPS)
    sums_at = tl.program_id(0).to(tl.int64) * E + e
    if grads.bias is not None:
        tl.store(grads.bias + sums_at, tl.sum(grad * log, 0), mask=e < E)
    grad *= _powers(args, whole, fraction, e, E)
    tl.store(grads.x + at, grad, mask=mask)
    if grads.power is not None:
        x = tl.load(args.x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grads.power + sums_at, tl.sum(grad * x * log, 0), mask=e < E)


_forward = Launcher(_forward_kernel)
_backward = Launcher(_backward_kernel)


def forward(args: LengthArguments) -> Tensor:
    """``out``, in the shape and dtype of ``x``."""
    out = args.x.new_empty(args.x.shape)
    grid, sizes, constants = _launch(args)
    if sizes[0]:
        noise = args.seed is not None and args.noise > 0
        _forward(grid, (_read(args), out, *sizes), constants | {"NOISE": noise})
    return out


def backward(grad_out: Tensor, args: LengthArguments, needs: LengthArguments) -> LengthGradients:
    """Gradients; those of power and bias only where ``needs`` asks for them."""
    x, (grid, sizes, constants) = args.x, _launch(args)
    power = args.power if needs.power else None
    bias = args.bias if needs.bias else None

    def partial_sums(of: Tensor | None) -> Tensor | None:
        return None if of is None else of.new_empty(grid[0], x.shape[-1], dtype=torch.float32)

    def summed(partials: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if partials is None or like is None else partials.sum(0).to(like.dtype)

    grads = LengthGradients(
        x=x.new_empty(x.shape),
        power=partial_sums(power),
        bias=partial_sums(bias),
    )
    if sizes[0]:
        _backward(grid, (_read(args), grad_out.contiguous(), grads, *sizes), constants)
    return grads._replace(power=summed(grads.power, power), bias=summed(grads.bias, bias))


def _read(args: LengthArguments) -> LengthArguments:
    return LengthArguments(*(x.contiguous() if isinstance(x, Tensor) else x for x in args))


def _launch(
    args: LengthArguments,
) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """Programs; the numbers that kernels take, that of rows first; and constants."""
    *shape, width = args.x.shape
    num_targets = shape[1] if len(shape) == 2 else 1
    num_rows = shape[0] * num_targets
    constants = _constants(width, args.seed is not None and args.odds > 0)
    programs = -(-num_rows // constants["BLOCK_R"]), -(-width // constants["BLOCK_E"])
    num_samples = args.offsets.shape[0] - 1
    return programs, (num_rows, num_samples, num_samples.bit_length(), num_targets), constants


@functools.cache
def _constants(width: int, drops: bool) -> dict[str, int]:
    """Compile-time arguments of both kernels."""
    block_e = min(128, padded_width(width))
    block_r = BLOCK_ELEMENTS // block_e
    return {"E": width, "BLOCK_R": block_r, "BLOCK_E": block_e, "DROPS": drops}
