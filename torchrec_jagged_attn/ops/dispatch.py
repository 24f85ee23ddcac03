"""Which implementation an op takes on a device."""

from __future__ import annotations

import torch
from triton import knobs

__all__ = ["implementation", "supported_dtypes"]

# Triton reads the variable when a kernel is defined, so a later change has no effect.
_INTERPRETED = bool(knobs.runtime.interpret)


def implementation(device: torch.device) -> tuple[str, str]:
    """Name and reason of the implementation that every op takes on ``device``.

    Returns:
        ``(name, reason)``. The name is one of ``"triton"`` (compiled kernels),
        ``"triton-interpreter"`` (the same kernels, run by Triton's interpreter) and
        ``"reference"`` (plain PyTorch).

    Raises:
        NotImplementedError: no op runs on ``device``.

    Example:
        >>> implementation(torch.device("cuda"))
        ('triton', 'CUDA device')
    """
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"the ops run on cpu and cuda tensors, got {device}")
    where = "CUDA device" if device.type == "cuda" else "CPU device"
    if _INTERPRETED:
        return "triton-interpreter", f"{where}, TRITON_INTERPRET=1"
    return ("triton" if device.type == "cuda" else "reference"), where


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """Floating-point dtypes that the implementation on ``device`` computes with."""
    return {
        "triton": [torch.float32, torch.bfloat16, torch.float16],
        "triton-interpreter": [torch.float32, torch.float16],  # it has no bf16 products
        "reference": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    }[implementation(device)[0]]
