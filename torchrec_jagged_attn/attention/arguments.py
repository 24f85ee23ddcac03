"""Records of what both kinds of attention take."""

# torch.jit.script reads annotations of records, so they are no strings here.
from typing import NamedTuple

from torch import Tensor

SCORES = ("softmax", "silu", "sigmoid")
"""What makes weights of the scores ``s`` of a query row: their softmax; or, of each by itself,
``s · σ(s)`` or ``σ(s)``, where σ is the logistic function.
"""


class Biases(NamedTuple):
    """What is added to the scores of ``H`` heads, and what is dropped, of ``N`` rows of keys."""

    # [N, H]; or [N] prior weights, whose logarithm is the bias of all heads
    bias: Tensor | None = None
    # [P, H], by the bucket of a row's position from the end of its sample
    position_bias: Tensor | None = None
    age_bias: Tensor | None = None  # [A, H], by the bucket of a row's age
    timestamps: Tensor | None = None  # [N], of which the ages are taken
    # [B], the time that a sample's ages are counted from; ``None`` for that of its newest row
    request_time: Tensor | None = None
    # [2] int64, see ``attention/dropout.py``: weights that it drops are zero, and the others larger
    dropout: Tensor | None = None

    @property
    def are_prior_weights(self) -> bool:
        """Whether ``bias`` is ``[N]`` prior weights."""
        return self.bias is not None and self.bias.dim() == 1
