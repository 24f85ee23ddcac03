"""What autocast does to the operands of an op, as to those of PyTorch's own."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast_dtype(x: object) -> torch.dtype | None:
    """That of autocast on the device of ``x``; ``None`` where it is off, or ``x`` no tensor."""
    if not isinstance(x, Tensor) or x.is_meta:
        return None
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast on the device of ``x``; the meta device never has it."""
    if x.is_meta:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def cast_as_products(*operands: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the ``operands`` in its dtype, as ``torch.bmm`` takes them; else as they are.

    fp64 stays fp64, and what is no floating point, or no tensor, is left for the op to refuse.
    """
    dtype = autocast_dtype(operands[0])
    return operands if dtype is None else _cast(operands, dtype)


def cast_as_softmax(x: Tensor) -> Tensor:
    """Under autocast ``x`` in fp32, as ``torch.softmax`` takes it; else as it is."""
    return x if autocast_dtype(x) is None else _cast((x,), torch.float32)[0]


def cast_as_sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Under autocast both in the wider dtype of the two, as sums take them; else as they are."""
    if autocast_dtype(x) is None or not isinstance(y, Tensor):
        return x, y
    return _cast((x, y), torch.promote_types(x.dtype, y.dtype))


def _cast(operands: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if _is_cast(x) else x for x in operands)


def _is_cast(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
