"""``RecencyBias``: learned biases of attention scores by position and age."""

import math

import torch
from torch import nn

from torchrec_jagged_attn.base.checks import check_bool, check_int


class RecencyBias(nn.Module):
    r"""Learned biases of attention scores per head, by the position and age of a history row.

    ``jagged_target_attention`` adds to the scores of row :math:`n`

    .. math:: bias_{nh} = P_{\beta(position_n), h} + A_{\beta(age_n), h}, \qquad
              \beta(x) = \min(\lfloor 4 \log_2(1 + x) \rfloor, 96 + \lfloor \log_2(1 + x) \rfloor)

    The position of a row is the number of newer rows of its sample. Its age is the time from the
    row to the request, if its time is given, or else to the last row of the sample; negative ages
    count as zero. Both have four buckets per octave below 2^32, and ages have one per octave above,
    so that 160 buckets cover int64, in any unit. The last bucket of positions is unbounded: it
    begins at position 55,108 (2^15.75 - 1).

    The table of positions is initialized to ``P = -log(1 + position)`` at the lower bound of each
    bucket, equally for all heads: with equal scores, the weight of the k-th newest row is
    proportional to 1/k. The table of ages is initialized to zeros.

    Args:
        num_heads: ``H``.
        ages: whether to learn a table of ages.
        device, dtype: device and dtype of the tables.

    Example:
        The factors of the weights at positions 0, 1, 3 and 7, in buckets 0, 4, 8 and 12:

        >>> RecencyBias(num_heads=2).position_weight.detach()[[0, 4, 8, 12], 0].exp()
        tensor([1.0000, 0.5000, 0.2500, 0.1250])

    Source:
        The initialization is the logarithmic variant of KERPLE (https://arxiv.org/abs/2205.09921).
    """

    BUCKETS_PER_OCTAVE = 4
    POSITION_BUCKETS = 64
    AGE_BUCKETS = 160

    def __init__(
        self,
        num_heads: int,
        ages: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_heads = check_int(num_heads, "num_heads", 1)
        check_bool(ages, "ages")
        self.position_weight = nn.Parameter(
            torch.empty(self.POSITION_BUCKETS, num_heads, device=device, dtype=dtype)
        )
        self.age_weight: nn.Parameter | None = None
        if ages:
            self.age_weight = nn.Parameter(
                torch.empty(self.AGE_BUCKETS, num_heads, device=device, dtype=dtype)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the biases of positions to ``-log(1 + position)``, and of ages to zeros."""
        buckets = torch.arange(self.POSITION_BUCKETS, device=self.position_weight.device)
        octaves = buckets.unsqueeze(1) / self.BUCKETS_PER_OCTAVE
        with torch.no_grad():
            self.position_weight.copy_(-math.log(2) * octaves)
            if self.age_weight is not None:
                self.age_weight.zero_()
