"""Checks that every op makes of its arguments, worded alike."""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from types import NoneType
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchrec_jagged_attn.attention.arguments import SCORES, Biases
from torchrec_jagged_attn.codes import MAX_LEVELS, bytes_of_codes, codes_per_byte
from torchrec_jagged_attn.devices import implementation, supported_dtypes


def should_validate(tensor: Tensor) -> bool:
    """Whether reading the values of ``tensor`` to check them is allowed here.

    Always on CPU. On CUDA a read waits for the device, so only when the environment variable
    ``TORCHREC_JAGGED_ATTN_VALIDATE`` is ``1``. Never while compiling, nor of what has no values.
    """
    if torch.compiler.is_compiling():
        return False
    if not tensor.is_cpu and os.environ.get("TORCHREC_JAGGED_ATTN_VALIDATE") != "1":
        return False
    return has_values(tensor)


def has_values(tensor: Tensor) -> bool:
    """Whether there are values to read: not on the meta device, nor in ``FakeTensorMode``."""
    is_mode_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if tensor.is_meta or is_mode_fake:
        return False
    # Only a subclass, or what a transform wraps, may be fake: is_fake takes longer than all else.
    is_plain = type(tensor) is Tensor and not torch._C._are_functorch_transforms_active()
    return is_plain or not is_fake(tensor)


def check_has_values(tensor: Tensor, name: str) -> None:
    """The number ``name``, which ``tensor`` would tell, must be given where it has no values."""
    if not torch.compiler.is_compiling() and not has_values(tensor):
        raise ValueError(
            f"{name} must be given for tensors without values, as those on the meta device or in "
            "FakeTensorMode are, got None"
        )


def check_tensor(value: object, name: str, expected: str = "a tensor") -> None:
    """``value`` must be a tensor with strides, or is not what was ``expected``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {expected}, got a {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be {expected} of torch.strided, got {value.layout}")


def check_integers(tensor: Tensor, name: str) -> None:
    """``tensor`` must be int32 or int64."""
    check_tensor(tensor, name)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")


def check_offsets_metadata(offsets: Tensor, name: str = "offsets") -> None:
    """Check dtype and shape of ``offsets`` (``[B + 1]`` int32 or int64), never their values."""
    check_integers(offsets, name)
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError(f"{name} must have shape [B + 1], got {list(offsets.shape)}")


MAX_WIDTH = 512
TIMESTAMP_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


def check_float(tensor: Tensor, name: str) -> None:
    """``tensor`` must have a dtype that its device's implementation computes with."""
    check_tensor(tensor, name)
    allowed = supported_dtypes(tensor.device)
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        how = implementation(tensor.device)[0]
        raise TypeError(f"{name} must be one of {names} (implementation {how}), got {tensor.dtype}")


def check_embeddings(x: Tensor, name: str) -> None:
    """``x`` must be rows of embeddings, not ids."""
    if not x.is_floating_point():
        raise TypeError(
            f"{name} must hold floating-point embeddings, got {x.dtype}: look the ids up in an "
            "EmbeddingCollection first"
        )


def check_shape(tensor: Tensor, name: str, symbols: str, expected: tuple[int | None, ...]) -> None:
    """``tensor`` must have the shape ``expected`` (``None``: any size), called ``symbols``."""
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
    """The others must be on the device and, if ``dtype``, of the dtype of ``like``."""
    for name, tensor in others.items():
        if tensor is None:
            continue
        check_tensor(tensor, name)
        if tensor.device != like.device:
            raise ValueError(
                f"{name} must be on {like.device} as {like_name} is, got {tensor.device}"
            )
        if dtype and tensor.dtype != like.dtype:
            raise TypeError(f"{name} must be {like.dtype} as {like_name} is, got {tensor.dtype}")


def check_rows(x: Tensor, name: str, symbols: str, offsets: Tensor, offsets_name: str) -> None:
    """``x`` must be two-dimensional, of a supported dtype, and where its offsets are."""
    check_offsets_metadata(offsets, offsets_name)
    check_float(x, name)
    check_shape(x, name, symbols, (None, None))
    check_same(x, name, dtype=False, **{offsets_name: offsets})


def check_score(score: str, prior_weights: Tensor | None = None) -> None:
    """``score`` must be a known one, and of prior weights the softmax."""
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    if prior_weights is not None and score != "softmax":
        raise NotImplementedError(
            f"prior_weights must be None unless score is 'softmax', got score={score!r}"
        )


def check_width(width: int, name: str) -> None:
    """A head width must lie in 1…512."""
    if not 1 <= width <= MAX_WIDTH:
        raise NotImplementedError(f"{name} must have a width of 1 to {MAX_WIDTH}, got {width}")


def check_int(
    value: object, name: str, least: int, expected: str = "an int", *, bits: int = 63
) -> int:
    """``value``, which must be an integer of any kind, but no bool, from ``least`` on."""
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
    """``value``, which must be a finite number of any kind, but no bool."""
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if torch.compiler.is_compiling():
        return cast("float", value)
    try:
        number = float(value)
    except OverflowError:  # an int that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    return number


def check_bool(value: object, name: str) -> None:
    """``value`` must be a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_device(device: object) -> None:
    """``device`` must be one that PyTorch knows, or ``None``."""
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
    """``value`` must be a module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got a {type(value).__name__}")


def check_dtype(dtype: object) -> None:
    """``dtype``, of parameters, must be floating-point, or ``None``."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")


def check_real(value: object, name: str, *, positive: bool = False) -> float:
    """``value``, which must be a finite number that is not negative or, if ``positive``, over 0."""
    number = check_number(value, name)
    if number < 0 or (positive and number == 0):
        expected = "positive and finite" if positive else "finite and not negative"
        raise ValueError(f"{name} must be {expected}, got {value}")
    return number


def check_heads(num_heads: int, embed_dim: int) -> tuple[int, int]:
    """Both, of which ``num_heads`` must divide ``embed_dim``."""
    embed_dim = check_int(embed_dim, "embed_dim", 0)
    num_heads = check_int(num_heads, "num_heads", 0)
    if not 1 <= num_heads <= embed_dim or embed_dim % num_heads != 0:
        raise ValueError(f"num_heads must divide embed_dim {embed_dim}, got {num_heads}")
    return num_heads, embed_dim


def check_window(window: int | None, causal: bool) -> int | None:
    """``window``, which must be ``None``, or a number of keys that causal attention is cut to."""
    check_bool(causal, "causal")
    if window is None:
        return None
    window = check_int(window, "window", 1, "an int or None")
    if not causal:
        raise ValueError(f"causal must be True with a window, got causal=False and window={window}")
    return window


def check_biases(
    query: Tensor,
    query_name: str,
    num_rows: int,
    num_samples: int,
    biases: Biases,
    prior_weights: Tensor | None,
    relative_bias: Tensor | None = None,
) -> None:
    """What ``num_rows`` key rows of ``num_samples`` may add to the scores of ``query``'s heads."""
    num_heads = query.shape[-2]
    bias, position_bias, age_bias, timestamps, request_time, *_ = biases
    check_same(
        query, query_name, dtype=False,
        bias=bias, position_bias=position_bias, age_bias=age_bias, timestamps=timestamps,
        request_time=request_time, prior_weights=prior_weights, relative_bias=relative_bias,
    )  # fmt: skip
    if bias is not None:
        check_float(bias, "bias")
        check_shape(bias, "bias", "[N, H]", (num_rows, num_heads))
    for table, name, symbols in (
        (position_bias, "position_bias", "[P, H]"),
        (age_bias, "age_bias", "[A, H]"),
        (relative_bias, "relative_bias", "[R, H]"),
    ):
        if table is None:
            continue
        check_float(table, name)
        check_shape(table, name, symbols, (None, num_heads))
        if table.shape[0] == 0:
            raise ValueError(f"{name} must have at least one bucket, got {list(table.shape)}")
    if (age_bias is None) != (timestamps is None):
        given = "age_bias" if timestamps is None else "timestamps"
        raise ValueError(f"age_bias and timestamps must be given together, got {given} alone")
    if timestamps is not None:
        check_timestamps(timestamps, num_rows)
    if request_time is not None:
        check_request_time(request_time, timestamps, num_samples)
    if prior_weights is not None:
        check_prior_weights(prior_weights, num_rows)


def check_indices(indices: Tensor) -> None:
    """``indices`` of rows must be ``[N]`` int32 or int64."""
    check_shape(indices, "indices", "[N]", (None,))
    check_integers(indices, "indices")


def check_indices_values(indices: Tensor, num_rows: int, offsets: Tensor) -> None:
    """They must name some of ``num_rows`` rows, up to the last of ``offsets``; skipped where
    reading would wait.
    """
    if not should_validate(indices):
        return
    indices = indices[: int(offsets[-1])]
    wrong = torch.nonzero((indices < 0) | (indices >= num_rows))
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(
            f"indices must be 0 to {num_rows - 1}, of the {num_rows} rows of history, got "
            f"{int(indices[at])} at position {at}"
        )


def check_num_levels(num_levels: int) -> int:
    """``num_levels`` of a code, which must be odd, and few enough for a byte."""
    num_levels = check_int(num_levels, "num_levels", 0)
    if not 3 <= num_levels <= MAX_LEVELS or num_levels % 2 == 0:
        raise ValueError(f"num_levels must be odd and 3 to {MAX_LEVELS}, got {num_levels}")
    return num_levels


def check_packed_history(history: Tensor, width: int, num_levels: int) -> None:
    """``history`` must be packed rows of codes, one fewer than the ``width`` of queries."""
    if width < 2:
        raise ValueError(
            "query must have a width of at least 2, of codes and a one, where num_levels is "
            f"given, got {width}"
        )
    check_packed(history, "history", width - 1, num_levels)


def check_packed(packed: Tensor, name: str, num_codes: int, num_levels: int) -> None:
    """``packed`` must be rows of bytes that hold so many codes."""
    check_tensor(packed, name)
    if packed.dtype != torch.uint8:
        raise TypeError(f"{name} must be uint8, got {packed.dtype}")
    num_bytes = bytes_of_codes(num_codes, num_levels)
    check_shape(packed, name, "[N, num_bytes]", (None, num_bytes))


def check_packed_values(
    packed: Tensor, name: str, num_codes: int, num_levels: int, offsets: Tensor | None = None
) -> None:
    """They must be bytes that codes have; skipped where reading would wait.

    With ``offsets``, only rows up to the last of them are checked.
    """
    if not should_validate(packed):
        return
    if offsets is not None:
        packed = packed[: int(offsets[-1])]
    if packed.numel() == 0:
        return
    per_byte = codes_per_byte(num_levels)
    in_last = num_codes - (packed.shape[1] - 1) * per_byte
    for values, of, count in (
        (packed, "", per_byte),
        (packed[:, -1], " in the last byte of a row", in_last),
    ):
        most = num_levels**count - 1
        if values.max() > most:
            raise ValueError(f"{name} must be at most {most}{of}, got {values.max().item()}")


def check_numbers(numbers: Tensor, name: str, count: int) -> None:
    """``numbers`` must be int32 or int64, and from 0 to ``count - 1``; they are not read where that
    would wait.
    """
    check_integers(numbers, name)
    if should_validate(numbers) and numbers.numel():
        low, high = (int(x) for x in numbers.aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"{name} must be 0 to {count - 1}, got {low} to {high}")


def check_timestamps(timestamps: Tensor, num_rows: int) -> None:
    """``timestamps`` must be ``[N]``, of a dtype that times are kept in."""
    check_shape(timestamps, "timestamps", "[N]", (num_rows,))
    if timestamps.dtype not in TIMESTAMP_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TIMESTAMP_DTYPES)
        raise TypeError(f"timestamps must be one of {names}, got {timestamps.dtype}")


def check_request_time(request_time: Tensor, timestamps: Tensor | None, num_samples: int) -> None:
    """``request_time`` must be ``[B]``, of the dtype of ``timestamps``, which it needs."""
    if timestamps is None:
        raise ValueError("request_time must be None without timestamps, got a tensor")
    check_shape(request_time, "request_time", "[B]", (num_samples,))
    check_same(timestamps, "timestamps", dtype=True, request_time=request_time)


def check_prior_weights(prior_weights: Tensor, num_rows: int) -> None:
    """``prior_weights`` must be ``[N]``, of a dtype that is computed with."""
    check_float(prior_weights, "prior_weights")
    check_shape(prior_weights, "prior_weights", "[N]", (num_rows,))


def check_finite(
    values: Tensor, name: str, *, not_negative: bool = False, offsets: Tensor | None = None
) -> None:
    """``values`` ``[N]`` must be finite, and ``not_negative``; skipped where reading would wait.

    With ``offsets``, only rows up to the last of them are checked.
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
