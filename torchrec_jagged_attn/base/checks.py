"""Checks of arguments, with consistent error messages.

``check_tensor``, ``check_shape`` and ``check_offsets_metadata`` accept any object. Other checks of
tensors expect a tensor that one of them has accepted.
"""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from types import NoneType
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchrec_jagged_attn.base.devices import implementation, supported_dtypes


def should_validate(tensor: Tensor) -> bool:
    """Return whether the values of ``tensor`` should be checked.

    Values on a CPU are always checked. On CUDA, reading them synchronizes with the device: they are
    checked only if the environment variable ``TORCHREC_JAGGED_ATTN_VALIDATE`` is ``1``. Values are
    not checked during compilation, nor if the tensor has none.
    """
    if torch.compiler.is_compiling():
        return False
    if not tensor.is_cpu and os.environ.get("TORCHREC_JAGGED_ATTN_VALIDATE") != "1":
        return False
    return has_values(tensor)


def has_values(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has values: not on the meta device, nor in ``FakeTensorMode``."""
    is_mode_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if tensor.is_meta or is_mode_fake:
        return False
    # is_fake is slow, and only subclasses and tensors that a transform wraps may be fake.
    is_plain = type(tensor) is Tensor and not torch._C._are_functorch_transforms_active()
    return is_plain or not is_fake(tensor)


def check_has_values(tensor: Tensor, name: str) -> None:
    """Check that ``tensor`` has values, from which the missing argument ``name`` is computed."""
    if not torch.compiler.is_compiling() and not has_values(tensor):
        raise ValueError(
            f"{name} must be given for tensors without values, such as tensors on the meta device "
            "or in FakeTensorMode, got None"
        )


def check_tensor(value: object, name: str, expected: str = "a tensor") -> None:
    """Check that ``value`` is a strided tensor. ``expected`` describes it in the error."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {expected}, got a {type(value).__name__}")
    if value.layout != torch.strided:
        way_out = ": give values() and offsets()" if value.is_nested else ""
        raise TypeError(f"{name} must be {expected} of torch.strided, got {value.layout}{way_out}")


def check_integers(tensor: Tensor, name: str) -> None:
    """Check that ``tensor`` is an int32 or int64 tensor."""
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")


def check_offsets_metadata(offsets: Tensor, name: str = "offsets") -> None:
    """Check that ``offsets`` are ``[B + 1]`` int32 or int64. Their values are not read."""
    check_tensor(offsets, name)
    check_integers(offsets, name)
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(f"{name} must have shape [B + 1], got {list(offsets.shape)}")


def check_float(tensor: Tensor, name: str) -> None:
    """Check that ``tensor`` has a dtype that the implementation on its device supports."""
    allowed = supported_dtypes(tensor.device)
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(
            f"{name} must be one of {names} (implementation {implementation(tensor.device)[0]}), "
            f"got {tensor.dtype}"
        )


def check_embeddings(x: Tensor, name: str) -> None:
    """Check that ``x`` is floating-point: embeddings, not ids."""
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must hold floating-point embeddings, got {x.dtype}: look the ids up in an "
            "EmbeddingCollection first"
        )


def check_shape(tensor: Tensor, name: str, symbols: str, expected: tuple[int | None, ...]) -> None:
    """Check that ``tensor`` has the shape ``expected``, in which ``None`` allows any size.

    ``symbols`` names the dimensions in the error, for example ``"[B, D]"``.
    """
    check_tensor(tensor, name)
    actual = tensor.shape
    if len(actual) == len(expected):
        for want, got in zip(expected, actual, strict=True):
            if want is not None and want != got:
                break
        else:
            return
    wanted = ", ".join("any" if size is None else str(size) for size in expected)
    raise ValueError(f"{name} must have shape {symbols} = [{wanted}], got {list(actual)}")


def check_same(like: Tensor, like_name: str, dtype: bool, **others: Tensor | None) -> None:
    """Check that ``others`` have the device and, if ``dtype``, the dtype of ``like``."""
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.device != like.device:
            raise ValueError(
                f"{name} must be on {like.device} as {like_name} is, got {tensor.device}"
            )
        if dtype and tensor.dtype != like.dtype:
            raise TypeError(f"{name} must be {like.dtype} as {like_name} is, got {tensor.dtype}")


def check_int(
    value: object, name: str, least: int, expected: str = "an int", *, bits: int = 63
) -> int:
    """Return ``value`` as an int. It must be an integer other than a bool, from ``least`` to
    ``2**bits - 1``. ``expected`` describes its type in the error.
    """
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name} must be {expected}, got {value!r}")
    number = cast("int", value if isinstance(value, torch.SymInt) else int(value))
    if number < least:
        or_none = ", or None" if expected.endswith("None") else ""
        raise ValueError(f"{name} must be at least {least}{or_none}, got {number}")
    if not torch.compiler.is_compiling() and number >= 2**bits:
        raise ValueError(f"{name} must be less than 2**{bits}, got {number}")
    return number


def check_number(value: object, name: str) -> float:
    """Return ``value`` as a float. It must be a finite real number other than a bool."""
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if torch.compiler.is_compiling():
        return cast("float", value)
    try:
        number = float(value)
    except OverflowError:  # an int larger than any float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    return number


def check_bool(value: object, name: str) -> None:
    """Check that ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_device(device: object) -> None:
    """Check that ``device`` is a valid argument of ``torch.device``, or ``None``."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int, NoneType)):
        raise TypeError(f"device must be a torch.device or None, got {device!r}")
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"device must be one that PyTorch knows, got {device!r}: {error}"
            ) from error


def check_module(value: object, name: str) -> None:
    """Check that ``value`` is a ``torch.nn.Module``."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got a {type(value).__name__}")


def check_dtype(dtype: object) -> None:
    """Check that ``dtype`` is a floating-point dtype, or ``None``."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")


def check_real(value: object, name: str, *, positive: bool = False) -> float:
    """Return ``value`` as a float. It must be finite, and at least 0, or ``positive``."""
    number = check_number(value, name)
    if number < 0 or (positive and number == 0):
        expected = "positive and finite" if positive else "finite and not negative"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return number


def check_numbers(numbers: Tensor, name: str, count: int) -> None:
    """Check that ``numbers`` are int32 or int64, and 0 to ``count - 1``.

    Their values are checked only if :func:`should_validate`.
    """
    check_integers(numbers, name)
    if should_validate(numbers) and numbers.numel():
        low, high = (int(x) for x in numbers.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"{name} must be 0 to {count - 1}, got {low} to {high}")


def check_finite(
    values: Tensor, name: str, *, not_negative: bool = False, offsets: Tensor | None = None
) -> None:
    """Check that ``values`` ``[N]`` are finite and, if ``not_negative``, at least 0.

    They are checked only if :func:`should_validate`. With ``offsets``, rows behind the last offset
    are ignored.
    """
    if not should_validate(values):
        return
    if offsets is not None:
        values = values[: int(offsets[-1])]
    allowed = values.isfinite() & (values >= 0) if not_negative else values.isfinite()
    wrong = torch.nonzero(~allowed)
    if wrong.numel():
        at, expected = int(wrong[0]), "finite and not negative" if not_negative else "finite"
        raise ValueError(f"{name} must be {expected}, got {values[at].item()} at position {at}")
