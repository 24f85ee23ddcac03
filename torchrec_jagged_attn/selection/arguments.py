"""What rows are selected of."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ScoredRows"]


class ScoredRows(NamedTuple):
    """Rows that some are selected of: see :func:`select_rows`.

    Attributes:
        offsets: ``[B + 1]``.
        scores: ``[N]``; ``None`` if all are alike.
        segments: ``[N]``; ``None`` if all rows of a sample are of one.
        num_rows: ``N``.
    """

    offsets: Tensor
    scores: Tensor | None
    segments: Tensor | None
    num_rows: int
