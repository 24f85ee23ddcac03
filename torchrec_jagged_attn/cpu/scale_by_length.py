"""What the length of a history does to its pooled row, in PyTorch: see the op of this name."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.arguments import LengthArguments, LengthGradients
from torchrec_jagged_attn.cpu.attention import compute_dtype
from torchrec_jagged_attn.cpu.dropout import are_among, element_draws

__all__ = ["backward", "forward"]


def forward(args: LengthArguments) -> Tensor:
    """``out``, in the shape and dtype of ``x``."""
    return (args.x.contiguous() * _factors(args, _lengths(args))).to(args.x.dtype)


def backward(grad_out: Tensor, args: LengthArguments, needs_power: bool) -> LengthGradients:
    """Gradients; that of the power only where it is asked for."""
    length = _lengths(args)
    grad = grad_out.contiguous() * _factors(args, length)
    grad_power = None
    if args.power is not None and needs_power:
        of_rows = grad * args.x * length.log()
        grad_power = of_rows.flatten(0, -2).sum(0).to(args.power.dtype)
    return LengthGradients(grad.to(args.x.dtype), grad_power)


def _lengths(args: LengthArguments) -> Tensor:
    """``[..., 1]``, of the history of each row of ``x``, at least one."""
    lengths = args.offsets.diff().clamp(min=1).to(compute_dtype(args.x))
    if args.query_offsets is not None:
        lengths = lengths.repeat_interleave(args.query_offsets.diff(), output_size=len(args.x))
    return lengths.view(-1, *[1] * (args.x.dim() - 1))


def _factors(args: LengthArguments, length: Tensor) -> Tensor:
    """What ``x`` is multiplied with."""
    factors = torch.ones_like(length)
    if args.power is not None:
        factors = length ** args.power.to(length.dtype)
    if args.seed is None:
        return factors
    # In fp32, step by step, so that each device drops the same.
    odds, root = length.new_full((), args.odds, dtype=torch.float32), length.float().sqrt()
    limit = (odds / (root + odds) * 2**32).long()
    rows = torch.arange(args.x.shape[:-1].numel(), device=length.device)
    columns = torch.arange(args.x.shape[-1], device=length.device)
    draws = element_draws(args.seed[0], rows, columns).view(args.x.shape)
    return torch.where(are_among(draws, limit), 0, factors * (1 + args.odds / length.sqrt()))
