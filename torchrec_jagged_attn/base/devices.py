"""Properties of devices: the implementation of ops, supported dtypes, resources of kernels."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from triton.knobs import runtime

# Device type to name and reason; the fake implementation of an op serves the meta device.
IMPLEMENTATIONS = {
    "cpu": ("reference", "CPU device"),
    "cuda": ("triton", "CUDA device"),
    "meta": ("shapes", "meta device"),
}
# Triton reads TRITON_INTERPRET when a kernel is defined, so a later change has no effect.
if runtime.interpret:
    IMPLEMENTATIONS |= {
        "cpu": ("triton-interpreter", "CPU device, TRITON_INTERPRET=1"),
        "cuda": ("triton-interpreter", "CUDA device, TRITON_INTERPRET=1"),
    }

DTYPES = {
    "triton": (torch.float32, torch.bfloat16, torch.float16),
    "triton-interpreter": (torch.float32, torch.float16),  # no bf16 products
    "reference": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "shapes": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


def implementation(device: torch.device) -> tuple[str, str]:
    """Return the name of the implementation of all ops on ``device``, and the reason for it.

    The name is ``"triton"`` (compiled kernels), ``"triton-interpreter"`` (the same kernels in
    Triton's interpreter), ``"reference"`` (C++ for attention, PyTorch for other ops) or
    ``"shapes"`` (tensors on the meta device, which have no values).

    Raises:
        NotImplementedError: the device is not supported.
    """
    found = IMPLEMENTATIONS.get(device.type)
    if found is None:
        raise NotImplementedError(f"the ops run on cpu, cuda and meta tensors, got {device}")
    return found


def implementation_of(x: Tensor, reference: ModuleType, kernels: ModuleType) -> ModuleType:
    """Return the module that computes on the device of ``x``: ``reference`` or ``kernels``."""
    return reference if implementation(x.device)[0] == "reference" else kernels


def supported_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the floating-point dtypes that the implementation on ``device`` supports."""
    return DTYPES[implementation(device)[0]]


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the maximum bytes of shared memory of a program; unlimited in the interpreter."""
    if device.type != "cuda":
        return 2**31
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 2**16)  # unknown for AMD


@functools.cache
def gluon_shared_memory(device: torch.device) -> int:
    """Return :func:`shared_memory` for Gluon kernels, 0 if they are not supported.

    Their asynchronous copies need an Ampere GPU or later.
    """
    return shared_memory(device) if _compute_capability(device) >= (8, 0) else 0


@functools.cache
def hopper_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a Hopper GPU; 0 for other devices."""
    if _compute_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one ends: on Hopper GPUs or later."""
    return _compute_capability(device) >= (9, 0)


def _compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the capability of an NVIDIA GPU; ``(0, 0)`` for other devices or the interpreter."""
    if device.type != "cuda" or runtime.interpret or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
