"""Layout of a jagged tensor: offsets of the rows of each sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import (
    check_has_values,
    check_int,
    check_integers,
    check_offsets_metadata,
    check_shape,
    should_validate,
)


@dataclass(frozen=True)
class JaggedLayout:
    """The layout of ``B`` samples of different lengths, stored one after the other in ``N`` rows.

    Sample ``b`` has the rows ``offsets[b] … offsets[b + 1] - 1``. Properties and methods compute on
    the device of ``offsets`` without synchronization, except :meth:`validate` and, without
    ``num_rows``, :meth:`from_lengths`.

    Args:
        offsets: ``[B + 1]`` int32 or int64, from 0 to ``num_rows``, never decreasing.
        num_rows: ``N``, the number of rows of the tensor.

    Raises:
        TypeError: ``offsets`` is neither int32 nor int64.
        ValueError: ``offsets`` is not one-dimensional, or has no element.

    Example:
        >>> layout = JaggedLayout.from_lengths(torch.tensor([2, 0, 3]))
        >>> layout.offsets
        tensor([0, 2, 2, 5])
        >>> layout.sample_ids()
        tensor([0, 0, 2, 2, 2])
        >>> layout.positions_from_end()
        tensor([1, 0, 2, 1, 0])
    """

    offsets: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        check_offsets_metadata(self.offsets)
        num_rows = check_int(self.num_rows, "num_rows", 0)
        object.__setattr__(self, "num_rows", num_rows)  # NumPy ints may overflow

    @classmethod
    def from_lengths(cls, lengths: Tensor, num_rows: int | None = None) -> JaggedLayout:
        """Return the layout of samples of ``lengths`` (``[B]`` int32 or int64), with int64 offsets.

        Without ``num_rows``, the sum of ``lengths`` is read, which synchronizes with the device.
        """
        check_shape(lengths, "lengths", "[B]", (None,))
        check_integers(lengths, "lengths")
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        if num_rows is None:
            check_has_values(offsets, "num_rows")
            num_rows = int(offsets[-1])
        return cls(offsets, num_rows)

    @property
    def batch_size(self) -> int:
        """``B``, the number of samples."""
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """``[B]`` rows of each sample, in the dtype of ``offsets``."""
        return self.offsets.diff()

    def sample_ids(self) -> Tensor:
        """Return ``[N]`` int64: the sample of each row."""
        return sample_ids(self.offsets, self.num_rows)

    def positions_from_end(self) -> Tensor:
        """Return ``[N]`` int64: the number of later rows in the same sample; 0 for the last row."""
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        return self.offsets[1:][self.sample_ids()] - 1 - rows

    def validate(self, name: str = "offsets", *, exact: bool = True) -> None:
        """Check that ``offsets`` start at 0, never decrease and end at ``num_rows``.

        Reads the values, which synchronizes with the device.

        Args:
            name: name of the argument in the error message.
            exact: whether all rows must belong to a sample. Otherwise ``offsets`` may end before
                ``num_rows``.

        Raises:
            ValueError: ``offsets`` are not valid.
        """
        _validate_offsets(self.offsets, self.num_rows, name, exact)


def sample_ids(offsets: Tensor, num_rows: int) -> Tensor:
    """Return ``[N]`` int64: the sample of each of ``num_rows`` rows."""
    samples = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(samples, offsets.diff(), output_size=num_rows)


def is_behind(offsets: Tensor, num_rows: int) -> Tensor:
    """Return ``[N]`` bool: whether each row is behind the last offset, and so in no sample."""
    return torch.arange(num_rows, device=offsets.device) >= offsets[-1]


def check_offsets_values(offsets: Tensor, num_rows: int, name: str, *, exact: bool = True) -> None:
    """Check that ``offsets`` divide ``num_rows`` rows, or, unless ``exact``, the first of them.

    They are checked only if :func:`should_validate`.
    """
    if should_validate(offsets):
        _validate_offsets(offsets, num_rows, name, exact)


def _validate_offsets(offsets: Tensor, num_rows: int, name: str, exact: bool) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{name} must start at 0, got {first}")
    if last > num_rows or (exact and last != num_rows):
        end = "at" if exact else "at or before"
        raise ValueError(f"{name} must end {end} the {num_rows} rows they divide, got {last}")
    decreasing = torch.nonzero(offsets.diff() < 0)
    if decreasing.numel():
        position = int(decreasing[0])
        before, after = int(offsets[position]), int(offsets[position + 1])
        raise ValueError(
            f"{name} must never decrease, got {before} then {after} at position {position + 1}"
        )


def check_order(timestamps: Tensor, offsets: Tensor, name: str = "timestamps") -> None:
    """Check that ``timestamps`` do not decrease within a sample.

    They are checked only if :func:`should_validate`. Rows behind the last offset are ignored.
    """
    if not should_validate(timestamps):
        return
    timestamps = timestamps[: int(offsets[-1])]
    samples = sample_ids(offsets, timestamps.shape[0])
    decreases = (timestamps[1:] < timestamps[:-1]) & (samples[1:] == samples[:-1])
    if (wrong := torch.nonzero(decreases)).numel():
        at = int(wrong[0])
        raise ValueError(
            f"{name} must not decrease within a sample, from the oldest event to the newest, got "
            f"{timestamps[at].item()} then {timestamps[at + 1].item()} at position {at + 1}"
        )
