"""The learned recency bias of a history's rows."""

import torch
from torch import nn

from torchrec_jagged_attn.checks import check_bool, check_int

__all__ = ["RecencyBias"]


class RecencyBias(nn.Module):
    r"""Tables of a learned score per head for how far back in its history a row lies.

    ``jagged_target_attention`` adds to the scores of row :math:`n`

    .. math:: bias_{nh} = P_{\beta(position_n), h} + A_{\beta(age_n), h}, \qquad
              \beta(x) = \min(\lfloor 4 \log_2(1 + x) \rfloor, 96 + \lfloor \log_2(1 + x) \rfloor)

    Positions count the newer rows of the sample; ages are the time from a row to the newest, which
    is the last row of its sample, or to the time of the request where there is one, and zero where
    that is negative. Both fall into four buckets per octave below 2^32, and ages into one per
    octave above, so that the 160 buckets hold every age of int64, in any unit. The last bucket of
    positions has no end: it begins at position 55,108 (2^15.75 - 1).

    The table of positions starts as ALiBi's straight lines, ``P = -slope · position`` at the nearer
    end of each bucket, with slopes ``2^(-8/H), 2^(-16/H), …``, but the last of several heads flat;
    the table of ages starts at zero.

    Args:
        num_heads: ``H``.
        ages: whether to learn a table of ages, too.
        device: of the tables.
        dtype: of the tables.

    Example:
        The scores of the newest four rows, in buckets 0, 4, 6 and 8, by the head of slope 2^-4:

        >>> RecencyBias(num_heads=2).position_weight.detach()[[0, 4, 6, 8], 0] * 2**4
        tensor([ 0.0000, -1.0000, -1.8284, -3.0000])

    Source:
        ALiBi (https://arxiv.org/abs/2108.12409), Section 3, for the slopes.
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
        """Start the positions at ALiBi's slopes, one head of several flat, and the ages at zero."""
        num_heads = self.position_weight.shape[1]
        slopes = [2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
        if num_heads > 1:
            slopes[-1] = 0.0
        device = self.position_weight.device
        buckets = torch.arange(self.POSITION_BUCKETS, device=device)
        newer = 1 - torch.exp2(buckets / self.BUCKETS_PER_OCTAVE)  # minus the position
        with torch.no_grad():
            self.position_weight.copy_(torch.outer(newer, torch.tensor(slopes, device=device)))
            if self.age_weight is not None:
                self.age_weight.zero_()
