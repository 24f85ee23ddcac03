"""What the length of a history does to its pooled row, in PyTorch: see the op of this name."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrec_jagged_attn.arguments import LengthArguments, LengthGradients
from torchrec_jagged_attn.cpu.attention import compute_dtype
from torchrec_jagged_attn.cpu.dropout import are_among, element_draws

__all__ = ["backward", "forward"]


def forward(args: LengthArguments) -> Tensor:
    """``out``, in the shape and dtype of ``x``."""
    length = _lengths(args)
    out = args.x.contiguous() * _powers(args, length)
    if args.bias is not None:
        out = out + args.bias.to(out.dtype) * _logarithm(length)
    if args.seed is not None and args.noise > 0:
        # In fp32, step by step, so that each device draws the same.
        scale = length.new_full((), args.noise, dtype=torch.float32)
        scale = scale / length.float().clamp(min=1).sqrt()
        bits = _draws(args, first=args.x.shape[-1]) ^ -(2**31)
        noise = bits.float() * (math.sqrt(12) / 2**32) * scale
        out = out + torch.where(length == 0, 0, noise)
    return _dropped(out, args, length).to(args.x.dtype)


def backward(grad_out: Tensor, args: LengthArguments, needs: LengthArguments) -> LengthGradients:
    """Gradients; those of power and bias only where ``needs`` asks for them."""
    length = _lengths(args)
    grad = _dropped(grad_out.contiguous().to(length.dtype), args, length)
    grad_x, of_power, of_bias = grad * _powers(args, length), None, None
    if args.power is not None and needs.power:
        of_power = _summed(grad_x * args.x * _logarithm(length), args.power)
    if args.bias is not None and needs.bias:
        of_bias = _summed(grad * _logarithm(length), args.bias)
    return LengthGradients(grad_x.to(args.x.dtype), of_power, of_bias)


def _summed(of_rows: Tensor, column: Tensor) -> Tensor:
    return of_rows.flatten(0, -2).sum(0).to(column.dtype)


def _lengths(args: LengthArguments) -> Tensor:
    """``[..., 1]``, of the history of each row of ``x``."""
    lengths = args.offsets.diff().to(compute_dtype(args.x))
    if args.query_offsets is not None:
        lengths = lengths.repeat_interleave(args.query_offsets.diff(), output_size=len(args.x))
    return lengths.view(-1, *[1] * (args.x.dim() - 1))


def _logarithm(length: Tensor) -> Tensor:
    return length.clamp(min=1).log()


def _powers(args: LengthArguments, length: Tensor) -> Tensor:
    """What ``x`` is multiplied with."""
    if args.power is None:
        return torch.ones_like(length)
    return length.clamp(min=1) ** args.power.to(length.dtype)


def _draws(args: LengthArguments, first: int = 0) -> Tensor:
    """32 bits of each element of ``x``, whose columns have the numbers from ``first`` on."""
    assert args.seed is not None
    rows = torch.arange(args.x.shape[:-1].numel(), device=args.x.device)
    columns = torch.arange(first, first + args.x.shape[-1], device=args.x.device)
    return element_draws(args.seed[0], rows, columns).view(args.x.shape)


def _dropped(x: Tensor, args: LengthArguments, length: Tensor) -> Tensor:
    """``x`` with elements dropped, and the others divided by their probability to be kept."""
    if args.seed is None or args.odds == 0:
        return x
    # In fp32, step by step, so that each device drops the same.
    length = length.clamp(min=1)
    odds, root = length.new_full((), args.odds, dtype=torch.float32), length.float().sqrt()
    limit = (odds / (root + odds) * 2**32).long()
    return torch.where(are_among(_draws(args), limit), 0, x * (1 + args.odds / length.sqrt()))
