"""What a device is: the implementation it takes, its dtypes, and what its kernels may use."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from triton.knobs import runtime

# Of the meta device, which has no values, shapes alone, by the fake of an op.
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
    "triton-interpreter": (torch.float32, torch.float16),  # it has no bf16 products
    "reference": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "shapes": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


def implementation(device: torch.device) -> tuple[str, str]:
    """Name and reason of the implementation that every op takes on ``device``.

    The name is one of ``"triton"`` (compiled kernels), ``"triton-interpreter"`` (the same kernels,
    run by Triton's interpreter), ``"reference"`` (plain PyTorch, but attention in C++ where that
    can be built) and ``"shapes"`` (of tensors on the meta device, which have no values).
    """
    found = IMPLEMENTATIONS.get(device.type)
    if found is None:
        raise NotImplementedError(f"the ops run on cpu, cuda and meta tensors, got {device}")
    return found


def implementation_of(x: Tensor, reference: ModuleType, kernels: ModuleType) -> ModuleType:
    """Which module computes on the device of ``x``: ``reference``, or the one with kernels."""
    return reference if implementation(x.device)[0] == "reference" else kernels


def supported_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Floating-point dtypes that the implementation on ``device`` computes with."""
    return DTYPES[implementation(device)[0]]


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels compute in ``dtype`` on ``device``, compiled or interpreted."""
    name, _ = implementation(device)
    return name in ("triton", "triton-interpreter") and dtype in DTYPES[name]


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; as many as it likes in the interpreter."""
    if device.type != "cuda":
        return 2**31
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 2**16)  # which AMD's do not tell


@functools.cache
def gluon_shared_memory(device: torch.device) -> int:
    """:func:`shared_memory` of a program in Gluon, or 0 where none runs.

    Their asynchronous copies need an Ampere GPU or a later one.
    """
    return shared_memory(device) if _compute_capability(device) >= (8, 0) else 0


@functools.cache
def hopper_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a Hopper GPU has; 0 for any other device."""
    if _compute_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel may begin before the last one ends: from Hopper GPUs on."""
    return _compute_capability(device) >= (9, 0)


def _compute_capability(device: torch.device) -> tuple[int, int]:
    """That of an NVIDIA GPU; ``(0, 0)`` of any other device, and in the interpreter."""
    if device.type != "cuda" or runtime.interpret or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)
