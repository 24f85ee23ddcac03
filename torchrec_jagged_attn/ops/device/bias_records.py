"""Arguments of kernels that target and flash attention share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Biases(NamedTuple):
    """Biases of scores, and dropout. The first six fields are as in ``arguments.Biases``."""

    prior_weights: Any
    position_bias: Any
    age_bias: Any
    timestamps: Any
    request_time: Any
    dropout: Any
    # [N] and [B], see ``TargetArguments``; only in target attention
    row_numbers: Any = None
    row_number_ends: Any = None
    bias: Any = None  # [ΣLk, H], only in flash attention
    # [H, 2 · max_distance] fp32, see ``distance_bias.py``; only in flash attention
    by_distance: Any = None
