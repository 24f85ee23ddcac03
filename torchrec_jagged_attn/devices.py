"""Which implementation an op takes on a device."""

from __future__ import annotations

import functools

import torch
from triton import knobs
from triton.knobs import runtime

__all__ = ["implementation", "multiprocessors", "supported_dtypes"]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors of Hopper a device has: none if it is another."""
    if device.type != "cuda" or runtime.interpret or torch.version.cuda is None:
        return 0
    if torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


# Triton reads TRITON_INTERPRET when a kernel is defined, so a later change has no effect.
if knobs.runtime.interpret:
    _IMPLEMENTATIONS = {
        "cpu": ("triton-interpreter", "CPU device, TRITON_INTERPRET=1"),
        "cuda": ("triton-interpreter", "CUDA device, TRITON_INTERPRET=1"),
    }
else:
    _IMPLEMENTATIONS = {"cpu": ("reference", "CPU device"), "cuda": ("triton", "CUDA device")}

_DTYPES = {
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "triton-interpreter": (torch.float32, torch.float16),  # it has no bf16 products
    "reference": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


def implementation(device: torch.device) -> tuple[str, str]:
    """Name and reason of the implementation that every op takes on ``device``.

    Returns:
        ``(name, reason)``. The name is one of ``"triton"`` (compiled kernels),
        ``"triton-interpreter"`` (the same kernels, run by Triton's interpreter) and
        ``"reference"`` (plain PyTorch, but attention in C++ where that can be built).

    Raises:
        NotImplementedError: no op runs on ``device``.

    Example:
        >>> implementation(torch.device("cuda"))
        ('triton', 'CUDA device')
    """
    found = _IMPLEMENTATIONS.get(device.type)
    if found is None:
        raise NotImplementedError(f"the ops run on cpu and cuda tensors, got {device}")
    return found


def supported_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Floating-point dtypes that the implementation on ``device`` computes with."""
    return _DTYPES[implementation(device)[0]]
