"""What the length of a history does to its pooled row, in PyTorch: see the op of this name."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.arguments import LengthArguments, LengthGradients
from torchrec_jagged_attn.cpu.attention import compute_dtype
from torchrec_jagged_attn.cpu.dropout import element_draws

__all__ = ["backward", "forward"]


def forward(args: LengthArguments) -> Tensor:
    """``out``, in the shape and dtype of ``x``."""
    length = _lengths(args)
    return (args.x * (_scale(args, length) * _dropout(args, length))).to(args.x.dtype)


def backward(grad_out: Tensor, args: LengthArguments, needs_power: bool) -> LengthGradients:
    """Gradients; that of the power only where it is asked for."""
    length = _lengths(args)
    grad = grad_out * (_scale(args, length) * _dropout(args, length))
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


def _scale(args: LengthArguments, length: Tensor) -> Tensor:
    """``n^p``, to go with ``x``."""
    return torch.ones_like(length) if args.power is None else length ** args.power.to(length.dtype)


def _dropout(args: LengthArguments, length: Tensor) -> Tensor:
    """Zero of what is dropped, else one by the probability to be kept, to go with ``x``."""
    if args.output_dropout is None:
        return torch.ones_like(length)
    seed, drops = args.output_dropout.unbind()
    # In fp32, step by step, so that each device drops the same.
    odds = drops.float() / (2**32 - drops).float()
    root = length.float().sqrt()
    limit = (odds / (root + odds) * 2**32).long()
    rows = torch.arange(args.x.shape[:-1].numel(), device=seed.device)
    columns = torch.arange(args.x.shape[-1], device=seed.device)
    is_dropped = element_draws(seed, rows, columns).view(args.x.shape) < limit
    return torch.where(is_dropped, 0.0, 1 + odds / length.sqrt())
