"""What autocast does to the operands of an op, as to those of PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cast_as_products", "cast_as_softmax", "cast_as_sums"]


def cast_as_products(*operands: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the ``operands`` in its dtype, as ``torch.bmm`` takes them; else as they are.

    fp64 stays fp64, and what has no floating point, or eight bits, is left alone.
    """
    if not _is_on(operands[0]):
        return operands
    return _cast(operands, torch.get_autocast_dtype(operands[0].device.type))


def cast_as_softmax(x: Tensor) -> Tensor:
    """Under autocast ``x`` in fp32, as ``torch.softmax`` takes it; else as it is."""
    return _cast((x,), torch.float32)[0] if _is_on(x) else x


def cast_as_sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Under autocast both in the wider dtype of the two, as sums take them; else as they are."""
    if not _is_on(x) or not isinstance(y, Tensor):
        return x, y
    return _cast((x, y), torch.promote_types(x.dtype, y.dtype))


def _is_on(x: object) -> bool:
    if not isinstance(x, Tensor):  # for the op to refuse
        return False
    device_type = x.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _cast(operands: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if _is_cast(x) else x for x in operands)


def _is_cast(x: object) -> bool:
    return (
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.dtype != torch.float64
        and x.element_size() > 1
    )
