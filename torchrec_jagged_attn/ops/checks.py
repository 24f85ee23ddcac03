"""Checks that every op makes of its arguments, worded alike."""

from __future__ import annotations

from torch import Tensor

from torchrec_jagged_attn.layout import JaggedLayout, should_validate
from torchrec_jagged_attn.ops.dispatch import implementation, supported_dtypes

__all__ = ["check_float", "check_offsets_values", "check_same", "check_shape", "check_width"]

MAX_WIDTH = 512


def check_float(tensor: Tensor, name: str) -> None:
    """``tensor`` must have a dtype that its device's implementation computes with."""
    allowed = supported_dtypes(tensor.device)
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        path = implementation(tensor.device)[0]
        raise TypeError(f"{name} must be one of {names} ({path} path), got {tensor.dtype}")


def check_shape(tensor: Tensor, name: str, symbols: str, expected: tuple[int | None, ...]) -> None:
    """``tensor`` must have the shape ``expected`` (``None``: any size), called ``symbols``."""
    actual = list(tensor.shape)
    if len(actual) != len(expected) or any(
        want is not None and want != got for want, got in zip(expected, actual, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} must have shape {symbols} = [{wanted}], got {actual}")


def check_same(
    reference: Tensor, reference_name: str, dtype: bool, **others: Tensor | None
) -> None:
    """The others must be on the device and, if ``dtype``, of the dtype of ``reference``."""
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.device != reference.device:
            raise ValueError(
                f"{name} must be on {reference.device} as {reference_name} is, got {tensor.device}"
            )
        if dtype and tensor.dtype != reference.dtype:
            raise TypeError(
                f"{name} must be {reference.dtype} as {reference_name} is, got {tensor.dtype}"
            )


def check_width(width: int, name: str) -> None:
    """A head width must lie in 1…512."""
    if not 1 <= width <= MAX_WIDTH:
        raise NotImplementedError(f"{name} must have a width of 1 to {MAX_WIDTH}, got {width}")


def check_offsets_values(offsets: Tensor, num_rows: int, name: str) -> None:
    """The values of ``offsets`` must divide ``num_rows`` rows; skipped where reading would wait."""
    if should_validate(offsets):
        JaggedLayout(offsets, num_rows).validate(name)
