"""The record of rows that the selection reads."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScoredRows(NamedTuple):
    """Rows to select from: see :func:`select_rows`.

    Attributes:
        offsets: ``[B + 1]``.
        scores: ``[N]``; ``None`` if all are equal.
        segments: ``[N]``; ``None`` if each sample is one segment.
        num_rows: ``N``.
    """

    offsets: Tensor
    scores: Tensor | None
    segments: Tensor | None
    num_rows: int
