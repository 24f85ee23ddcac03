"""Checks of the arguments of target and flash attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_float,
    check_int,
    check_integers,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.codes.checks import check_packed
from torchrec_jagged_attn.ops.attention.arguments import SCORES, Biases

MAX_WIDTH = 512
TIMESTAMP_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


def check_score(score: str, prior_weights: Tensor | None = None) -> None:
    """Check that ``score`` is one of ``SCORES``, and the softmax if there are prior weights."""
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    if prior_weights is not None and score != "softmax":
        raise NotImplementedError(
            f"prior_weights must be None unless score is 'softmax', got score={score!r}"
        )


def check_width(width: int, name: str) -> None:
    """Check that the head width of ``name`` is supported."""
    if not 1 <= width <= MAX_WIDTH:
        raise NotImplementedError(f"{name} must have a width of 1 to {MAX_WIDTH}, got {width}")


def check_heads(num_heads: int, embed_dim: int) -> tuple[int, int]:
    """Return ``num_heads`` and ``embed_dim`` as ints. ``num_heads`` must divide ``embed_dim``."""
    embed_dim = check_int(embed_dim, "embed_dim", 0)
    num_heads = check_int(num_heads, "num_heads", 0)
    if not 1 <= num_heads <= embed_dim or embed_dim % num_heads != 0:
        raise ValueError(f"num_heads must divide embed_dim {embed_dim}, got {num_heads}")
    return num_heads, embed_dim


WAYS_OUT = {
    "score": "all its scores are a softmax, JaggedTargetAttention supports 'silu' and 'sigmoid'",
    "softcap": "use flex_attention of torch.nn.attention, or no softcap",
}


def refuse_options(function: str, options: Mapping[str, object]) -> None:
    """Raise an error if there are ``options``, which ``function`` does not have."""
    for name, value in options.items():
        if name not in WAYS_OUT:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        raise NotImplementedError(
            f"{name} must not be given to {function}, got {value!r}: {WAYS_OUT[name]}"
        )


def check_window(window: int | None, causal: bool) -> int | None:
    """Return ``window`` as an int or ``None``: the maximum number of keys that a query attends to.

    It must be ``None`` unless attention is ``causal``.
    """
    check_bool(causal, "causal")
    if window is None:
        return None
    window = check_int(window, "window", 1, "an int or None")
    if not causal:
        raise ValueError(
            f"causal must be True with a window, got causal=False and window={window}: give "
            "causal=True, or window=None"
        )
    return window


def check_biases(
    query: Tensor,
    query_name: str,
    num_rows: int,
    num_samples: int,
    biases: Biases,
    bias: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> None:
    """Check the biases of ``num_rows`` keys, in ``num_samples``, for the heads of ``query``."""
    num_heads = query.shape[-2]
    prior_weights, position_bias, age_bias, timestamps, request_time, *_ = biases
    if bias is not None:
        check_shape(bias, "bias", "[N, H]", (num_rows, num_heads))
        check_float(bias, "bias")
    for table, name, symbols in (
        (position_bias, "position_bias", "[P, H]"),
        (age_bias, "age_bias", "[A, H]"),
        (relative_bias, "relative_bias", "[R, H]"),
    ):
        if table is None:
            continue
        check_shape(table, name, symbols, (None, num_heads))
        check_float(table, name)
        if table.shape[0] == 0:
            raise ValueError(f"{name} must have at least one bucket, got {list(table.shape)}")
    if timestamps is not None:
        check_timestamps(timestamps, num_rows)
    if (age_bias is None) != (timestamps is None):
        given = "age_bias" if timestamps is None else "timestamps"
        raise ValueError(f"age_bias and timestamps must be given together, got {given} alone")
    if request_time is not None:
        check_request_time(request_time, timestamps, num_samples)
    if prior_weights is not None:
        check_prior_weights(prior_weights, num_rows)
    check_same(
        query, query_name, dtype=False,
        bias=bias, position_bias=position_bias, age_bias=age_bias, timestamps=timestamps,
        prior_weights=prior_weights, relative_bias=relative_bias,
    )  # fmt: skip


def check_timestamps(timestamps: Tensor, num_rows: int) -> None:
    """Check that ``timestamps`` are ``[N]`` of one of ``TIMESTAMP_DTYPES``."""
    check_shape(timestamps, "timestamps", "[N]", (num_rows,))
    if timestamps.dtype not in TIMESTAMP_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TIMESTAMP_DTYPES)
        raise TypeError(f"timestamps must be one of {names}, got {timestamps.dtype}")


def check_request_time(request_time: Tensor, timestamps: Tensor | None, num_samples: int) -> None:
    """Check that ``request_time`` is ``[B]``, on the device and in the dtype of ``timestamps``.

    It requires ``timestamps``.
    """
    if timestamps is None:
        raise ValueError("request_time must be None without timestamps, got a tensor")
    check_shape(request_time, "request_time", "[B]", (num_samples,))
    check_same(timestamps, "timestamps", dtype=True, request_time=request_time)


def check_prior_weights(prior_weights: Tensor, num_rows: int) -> None:
    """Check that ``prior_weights`` are ``[N]`` of a supported dtype."""
    check_shape(prior_weights, "prior_weights", "[N]", (num_rows,))
    check_float(prior_weights, "prior_weights")


def check_indices(indices: Tensor) -> None:
    """Check that gather ``indices`` are ``[N]`` int32 or int64."""
    check_shape(indices, "indices", "[N]", (None,))
    check_integers(indices, "indices")


def check_indices_values(indices: Tensor, num_rows: int, offsets: Tensor) -> None:
    """Check that gather ``indices`` are 0 to ``num_rows - 1``; see :func:`should_validate`.

    Indices behind the last offset are ignored.
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


def check_packed_history(history: Tensor, width: int, num_levels: int) -> None:
    """Check that ``history`` are packed rows of ``width - 1`` codes, for queries of ``width``."""
    if width < 2:
        raise ValueError(
            "query must have a width of at least 2 with num_levels, for codes and a constant 1, "
            f"got {width}"
        )
    check_packed(history, "history", width - 1, num_levels)
