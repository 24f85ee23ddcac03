"""The learned recency bias of a history's rows."""

import math

import torch
from torch import nn

from torchrec_jagged_attn.checks import check_bool, check_int


class RecencyBias(nn.Module):
    r"""Learned biases of scores per head, by the position and age of a row in its history.

    ``jagged_target_attention`` adds to the scores of row :math:`n`

    .. math:: bias_{nh} = P_{\beta(position_n), h} + A_{\beta(age_n), h}, \qquad
              \beta(x) = \min(\lfloor 4 \log_2(1 + x) \rfloor, 96 + \lfloor \log_2(1 + x) \rfloor)

    Positions count the newer rows of the sample; ages are the time from a row to the newest, which
    is the last row of its sample, or to the time of the request where there is one, and zero where
    that is negative. Both fall into four buckets per octave below 2^32, and ages into one per
    octave above, so that the 160 buckets hold every age of int64, in any unit. The last bucket of
    positions has no end: it begins at position 55,108 (2^15.75 - 1).

    The table of positions starts at ``P = -log(1 + position)`` at the nearer end of each bucket,
    alike for all heads: with equal scores, the weight of the k-th newest row is proportional to
    1/k. The table of ages starts at zero.

    Args:
        num_heads: ``H``.
        ages: whether to learn a table of ages, too.
        device, dtype: of the tables.

    Example:
        The factors of the weights of rows 0, 1, 3 and 7 from the newest, in buckets 0, 4, 8 and 12:

        >>> RecencyBias(num_heads=2).position_weight.detach()[[0, 4, 8, 12], 0].exp()
        tensor([1.0000, 0.5000, 0.2500, 0.1250])

    Source:
        KERPLE (https://arxiv.org/abs/2205.09921), the logarithmic variant, for the start.
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
        """Start the positions at ``-log(1 + position)``, and the ages at zero."""
        buckets = torch.arange(self.POSITION_BUCKETS, device=self.position_weight.device)
        octaves = buckets.unsqueeze(1) / self.BUCKETS_PER_OCTAVE
        with torch.no_grad():
            self.position_weight.copy_(-math.log(2) * octaves)
            if self.age_weight is not None:
                self.age_weight.zero_()
