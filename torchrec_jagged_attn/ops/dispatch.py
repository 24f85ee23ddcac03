"""Which implementation an op takes on a device."""

from __future__ import annotations

import torch
import triton

__all__ = ["implementation"]


def implementation(device: torch.device) -> tuple[str, str]:
    """Name and reason of the implementation that every op takes on ``device``.

    Returns:
        ``(name, reason)``, the name one of ``"triton"`` (compiled kernels), ``"triton-interpreter"``
        (the same kernels, run by Triton's interpreter) and ``"reference"`` (plain PyTorch).

    Raises:
        NotImplementedError: no op runs on ``device``.

    Example:
        >>> implementation(torch.device("cuda"))
        ('triton', 'CUDA device')
    """
    if device.type == "cuda":
        return "triton", "CUDA device"
    if device.type != "cpu":
        raise NotImplementedError(f"the ops run on cpu and cuda tensors, got {device}")
    if triton.knobs.runtime.interpret:
        return "triton-interpreter", "CPU device, TRITON_INTERPRET=1"
    return "reference", "CPU device"
