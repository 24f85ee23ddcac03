"""Records that the kernels of both kinds of attention take."""

from __future__ import annotations

from typing import Any, NamedTuple


class Biases(NamedTuple):
    """Biases of scores, and dropout; the first six fields are those of ``arguments.Biases``."""

    bias: Any
    position_bias: Any
    age_bias: Any
    timestamps: Any
    request_time: Any
    dropout: Any
    # [N], see ``TargetArguments``; of target attention alone, like the next
    row_numbers: Any = None
    row_number_ends: Any = None  # [B], see there
    # [H, 2 · reach] fp32, see ``distance_bias.py``; of flash attention alone
    by_distance: Any = None
