"""Autocast of the inputs of ops, as PyTorch casts the inputs of its own ops."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast_dtype(x: object) -> torch.dtype | None:
    """Return the dtype of autocast on the device of ``x``; ``None`` if autocast is disabled there,
    or if ``x`` is not a tensor.
    """
    if not isinstance(x, Tensor) or x.is_meta:
        return None
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables autocast on the device of ``x``; the meta device has none."""
    if x.is_meta:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def cast_as_products(*operands: Tensor) -> tuple[Tensor, ...]:
    """Cast ``operands`` to the dtype of autocast, as ``torch.bmm`` does; unchanged if it is off.

    fp64 tensors and arguments that are not floating-point tensors are returned unchanged.
    """
    dtype = autocast_dtype(operands[0])
    return operands if dtype is None else _cast(operands, dtype)


def cast_as_softmax(x: Tensor) -> Tensor:
    """Cast ``x`` to fp32 under autocast, as ``torch.softmax`` does; unchanged otherwise."""
    return x if autocast_dtype(x) is None else _cast((x,), torch.float32)[0]


def cast_as_sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Cast ``x`` and ``y`` to their promoted dtype under autocast; unchanged otherwise."""
    if autocast_dtype(x) is None or not isinstance(y, Tensor):
        return x, y
    return _cast((x, y), torch.promote_types(x.dtype, y.dtype))


def _cast(operands: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if _is_cast(x) else x for x in operands)


def _is_cast(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
