"""``select_rows`` and ``take_rows``: the rows of each sample with the highest scores.

``select_rows`` returns the indices of the rows to keep, and ``take_rows`` copies these rows of any
number of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchrec_jagged_attn.checks import (
    check_float,
    check_has_values,
    check_int,
    check_integers,
    check_offsets_metadata,
    check_same,
    check_shape,
    check_tensor,
    should_validate,
)
from torchrec_jagged_attn.devices import implementation, implementation_of
from torchrec_jagged_attn.layout import check_offsets_values
from torchrec_jagged_attn.runtime.registration import register_op, register_op_without_grad
from torchrec_jagged_attn.selection import cpu as reference
from torchrec_jagged_attn.selection.kernels import copies as copy_kernels
from torchrec_jagged_attn.selection.kernels import rows as row_kernels

NO_LIMIT = 2**62


class SelectedRows(NamedTuple):
    """Which rows were kept, in their order, and their new indices.

    Attributes:
        rows: ``[C]`` int64: the row at each new index; -1 from ``offsets[B]`` on.
        inverse_indices: ``[N]`` int64: the new index of each row; -1 of removed rows.
        offsets: ``[B + 1]``, of the rows that were kept, in the dtype of the given offsets.
    """

    rows: Tensor
    inverse_indices: Tensor
    offsets: Tensor


def select_rows(
    offsets: Tensor,
    scores: Tensor | None = None,
    *,
    num_rows: int | None = None,
    keep: int | Sequence[int] | Tensor | None = None,
    threshold: float | None = None,
    segments: Tensor | None = None,
    capacity: int | None = None,
) -> SelectedRows:
    r"""Find the rows of each sample with its highest scores, in their order.

    A row is kept if its score is at least ``threshold`` and among the ``keep`` highest of its
    sample (and segment); of equal scores, newer rows are kept first. Rows whose score is NaN are
    never kept. Without scores, the newest rows are kept.

    It is deterministic, and no sample's selection depends on another sample.

    Args:
        offsets: ``[B + 1]`` int32 or int64, see :class:`JaggedLayout`. The oldest row is first.
        scores: ``[N]`` of fp32, bf16 or fp16 (on CPU also fp64). They have no gradient.
        num_rows: ``N``, needed without scores and segments.
        keep: maximum number of rows per sample: one number, or ``[B]`` integers. With ``segments``,
            per sample and segment: ``S`` numbers, or ``[B, S]`` integers. By default, all.
        threshold: lowest score that is kept.
        segments: ``[N]`` int32 or int64, the segment of each row in 0…S - 1; rows with other
            numbers are not kept.
        capacity: ``C``, maximum number of rows kept of all samples; rows beyond it, of the last
            samples, are dropped. The host then does not wait for the device. By default, the number
            is read, and the host waits once.

    Returns:
        A :class:`SelectedRows`.

    Raises:
        TypeError: a dtype or type does not fit.
        ValueError: a shape, a device, a number or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets or of ``keep`` do not fit, or
            there are more rows than ``capacity``.
        NotImplementedError: the device is neither CPU nor CUDA.

    Example:
        >>> scores = torch.tensor([0.1, 0.7, 0.4, 0.7, 0.2])
        >>> selected = select_rows(torch.tensor([0, 4, 5]), scores, keep=2)
        >>> selected.rows
        tensor([1, 3, 4])
        >>> selected.offsets
        tensor([0, 2, 3])
        >>> selected.inverse_indices
        tensor([-1,  0, -1,  1,  2])
    """
    num_rows = _check_rows(offsets, scores, segments, num_rows, threshold)
    limits, num_segments, limit = _check_keep(keep, segments, offsets)
    if capacity is not None:
        capacity = check_int(capacity, "capacity", 0, "an int or None")
    validates = should_validate(offsets)
    room = num_rows if capacity is None else capacity
    rows, inverse, new_offsets = selected_rows(
        offsets, scores, segments, limits, num_rows, max(room, num_rows) if validates else room,
        num_segments, limit, -torch.inf if threshold is None else float(threshold),
    )  # fmt: skip
    if capacity is None:
        rows = rows.narrow(0, 0, _read_last(new_offsets, num_rows))
    elif validates:
        if (count := int(new_offsets[-1])) > capacity:
            raise ValueError(
                f"capacity must be at least the {count} rows that are kept, got {capacity}"
            )
        rows = rows[:capacity]
    return SelectedRows(rows, inverse, new_offsets)


def take_rows(x: Tensor, selected: SelectedRows) -> Tensor:
    """Copy the selected rows: ``out[i] = x[selected.rows[i]]``, zeros where that is -1.

    The gradient of a row is that of its copy, and zero for those that were not kept.

    Args:
        x: ``[N, …]``: bool, integers, or floating point of 16 bits or more.
        selected: what :func:`select_rows` returns.

    Returns:
        ``[C, …]``, in the dtype of ``x``.

    Raises:
        TypeError: ``x`` is not a tensor of such a dtype, or ``selected`` not a
            :class:`SelectedRows`.
        ValueError: ``x`` has another number of rows, or lies on another device.

    Example:
        >>> selected = select_rows(torch.tensor([0, 2, 3]), torch.tensor([3.0, 1.0, 2.0]), keep=1)
        >>> take_rows(torch.tensor([[1, 2], [3, 4], [5, 6]]), selected)
        tensor([[1, 2],
                [5, 6]])
    """
    check_tensor(x, "x")
    if x.is_complex() or (x.is_floating_point() and x.element_size() == 1):
        raise TypeError(
            f"x must be bool, integers, or floating point of 16 bits or more, got {x.dtype}"
        )
    if not isinstance(selected, SelectedRows):
        raise TypeError(f"selected must be SelectedRows, got a {type(selected).__name__}")
    num_rows = selected.inverse_indices.shape[0]
    if x.dim() == 0 or x.shape[0] != num_rows:
        raise ValueError(f"x must have shape [N, …] with N = {num_rows}, got {list(x.shape)}")
    check_same(selected.rows, "selected", dtype=False, x=x)
    flat, row_shape = x.reshape(num_rows, math.prod(x.shape[1:])), x.shape[1:]
    out = call_copy_rows(flat, selected.rows, selected.inverse_indices)
    return out.view(selected.rows.shape[0], *row_shape)


def check_threshold(threshold: object) -> None:
    """``threshold`` must be a number, or ``None``."""
    if threshold is None:
        return
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"threshold must be a number or None, got {threshold!r}")
    if math.isnan(threshold):
        raise ValueError("threshold must be a number or None, got nan")


def _check_rows(
    offsets: Tensor,
    scores: Tensor | None,
    segments: Tensor | None,
    num_rows: int | None,
    threshold: float | None,
) -> int:
    """``N``, on which all arguments must agree."""
    check_offsets_metadata(offsets)
    implementation(offsets.device)
    check_threshold(threshold)
    if num_rows is not None:
        num_rows = check_int(num_rows, "num_rows", 0, "an int or None")
    if scores is not None:
        check_float(scores, "scores")
        check_shape(scores, "scores", "[N]", (num_rows,))
        num_rows = scores.shape[0]
    elif threshold is not None:
        raise ValueError(f"threshold must be None without scores, got {threshold}")
    if segments is not None:
        check_shape(segments, "segments", "[N]", (num_rows,))
        check_integers(segments, "segments")
        num_rows = segments.shape[0]
    if num_rows is None:
        raise ValueError("num_rows must be given without scores and segments, got None")
    check_same(offsets, "offsets", dtype=False, scores=scores, segments=segments)
    check_offsets_values(offsets, num_rows, "offsets")
    return num_rows


def _check_keep(
    keep: int | Sequence[int] | Tensor | None, segments: Tensor | None, offsets: Tensor
) -> tuple[Tensor | None, int, int]:
    """``[B, S]`` or ``[1, S]`` limits, or None; S; and the limit without them."""
    num_samples = offsets.shape[0] - 1
    if isinstance(keep, Tensor):
        check_integers(keep, "keep")
        check_same(offsets, "offsets", dtype=False, keep=keep)
        if segments is None:
            check_shape(keep, "keep", "[B]", (num_samples,))
            keep = keep.unsqueeze(1)
        check_shape(keep, "keep", "[B, S]", (num_samples, None))
        if keep.shape[1] == 0:
            raise ValueError(f"keep must have one segment or more, got {list(keep.shape)}")
        if should_validate(keep) and keep.numel() and (least := int(keep.min())) < 0:
            raise ValueError(f"keep must be at least 0, got {least}")
        return keep.long(), keep.shape[1], NO_LIMIT
    if segments is None:
        if keep is None:
            return None, 1, NO_LIMIT
        return None, 1, check_int(keep, "keep", 0, "an int or [B] integers")
    if not isinstance(keep, Sequence) or not keep:
        raise TypeError(f"keep must have a number for each segment, got {keep!r}")
    numbers = [check_int(number, "keep", 0, "ints, one for each segment") for number in keep]
    # Created on the device, since a copy from the host would synchronize.
    limits = [torch.full((1, 1), number, device=offsets.device) for number in numbers]
    return torch.cat(limits, 1), len(keep), NO_LIMIT


def _read_last(offsets: Tensor, num_rows: int) -> int:
    """How many of the rows are kept; waits for the device once."""
    check_has_values(offsets, "capacity")
    size = cast("int", offsets[-1].item())
    if torch.compiler.is_compiling():
        torch._check(size >= 0)
        torch._check(size <= num_rows)
    return size


def _select_rows(
    offsets: Tensor,
    scores: Tensor | None,
    segments: Tensor | None,
    keep: Tensor | None,
    num_rows: int,
    capacity: int,
    num_segments: int,
    limit: int,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return implementation_of(offsets, reference, row_kernels).select_rows(
        offsets, scores, segments, keep, num_rows, capacity, num_segments, limit, threshold
    )


def _select_rows_fake(
    offsets: Tensor, scores: object, segments: object, keep: object, num_rows: int, capacity: int,
    *others: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, inverse = (offsets.new_empty(size, dtype=torch.int64) for size in (capacity, num_rows))
    return rows, inverse, torch.empty_like(offsets)


selected_rows = register_op_without_grad(
    "selected_rows", forward=_select_rows, fake=_select_rows_fake
)


class CopiedRows(NamedTuple):
    """Rows of ``x [M, D]`` by ``index [R]``; ``inverse [M]`` is the new index of each row."""

    x: Tensor
    index: Tensor
    inverse: Tensor


class Copies(NamedTuple):
    """The output of ``copy_rows``, ``[R, D]``."""

    out: Tensor


class CopyGradients(NamedTuple):
    """The gradient of ``x``."""

    x: Tensor


def _copy(args: CopiedRows) -> Copies:
    of_device = implementation_of(args.x, reference, copy_kernels)
    return Copies(of_device.copy_rows(args.x, args.index))


def _copy_back(grad_out: Tensor, args: CopiedRows, *_: object) -> CopyGradients:
    """The backward is the same gather with the inverse indices."""
    return CopyGradients(*_copy(CopiedRows(grad_out, args.inverse, args.index)))


def _fake_copies(args: CopiedRows) -> Copies:
    return Copies(args.x.new_empty(args.index.shape[0], args.x.shape[1]))


copy_rows, call_copy_rows = register_op(
    "copy_rows",
    arguments=CopiedRows,
    outputs=Copies,
    forward=_copy,
    fake=_fake_copies,
    backward=_copy_back,
    fake_backward=lambda grad_out, args, _: CopyGradients(
        *_fake_copies(CopiedRows(grad_out, args.inverse, args.index))
    ),
    unsaved=("x",),
)
