"""Arguments shared by target and flash attention."""

# torch.jit.script reads annotations of records, so they are no strings here.
from typing import NamedTuple

from torch import Tensor

SCORES = ("softmax", "silu", "sigmoid")
"""Functions from the scores ``s`` of a query row to weights: the softmax over the row; or
elementwise ``s · σ(s)`` or ``σ(s)``, where σ is the logistic function.
"""


class Biases(NamedTuple):
    """Biases of the scores of ``H`` heads and ``N`` keys, and dropout of their weights."""

    prior_weights: Tensor | None = None  # [N], whose logarithms are added for all heads
    # [P, H], by the bucket of a row's position from the end of its sample
    position_bias: Tensor | None = None
    age_bias: Tensor | None = None  # [A, H], by the bucket of a row's age
    timestamps: Tensor | None = None  # [N] times of the rows, for their ages
    # [B], the time that ages are counted from; ``None`` for the time of the sample's newest row
    request_time: Tensor | None = None
    # [2] int64, seed and threshold, see ``attention/dropout.py``
    dropout: Tensor | None = None
