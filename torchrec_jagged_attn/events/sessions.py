"""``segment_sessions`` divides events into active and passive sessions."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import (
    check_float,
    check_integers,
    check_real,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.base.layout import JaggedLayout, check_offsets_values, check_order


def segment_sessions(
    relevance: Tensor, offsets: Tensor, timestamps: Tensor, *, gap: float, threshold: float
) -> Tensor:
    r"""Return whether each event belongs to an active or a passive session.

    A session begins with a user's first event, and with each event more than ``gap`` after the
    previous one. It is active if the probability that any of its events converts is at least
    ``threshold``:

    .. math:: 1 - \prod_{n \in session} (1 - r_n) \ge \tau

    The host does not wait for the device.

    Args:
        relevance: ``[N]``, the probability ``r`` that each event converts, such as the output of
            :class:`Relevance`.
        offsets: ``[B + 1]`` int32 or int64, offsets of the users, see :class:`JaggedLayout`.
        timestamps: ``[N]`` int32 or int64, never decreasing within a user.
        gap: longest time between events of a session, in the unit of the timestamps; at least 0.
        threshold: ``τ``, from 0 to 1.

    Returns:
        ``[N]`` int64: 1 for events of active sessions, else 0.

    Raises:
        TypeError: a dtype or type does not fit.
        ValueError: a shape, a device or a number does not fit; or (on CPU, or under
            ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the values of offsets do not fit, a relevance is
            not from 0 to 1, or timestamps decrease.

    Example:
        >>> relevance = torch.tensor([0.5, 0.5, 0.1, 0.6])
        >>> times = torch.tensor([0, 10, 5000, 5000])
        >>> segment_sessions(relevance, torch.tensor([0, 3, 4]), times, gap=1800, threshold=0.7)
        tensor([1, 1, 0, 0])
    """
    check_shape(relevance, "relevance", "[N]", (None,))
    check_float(relevance, "relevance")
    num_rows = relevance.shape[0]
    layout = JaggedLayout(offsets, num_rows)
    check_shape(timestamps, "timestamps", "[N]", (num_rows,))
    check_integers(timestamps, "timestamps")
    check_same(relevance, "relevance", dtype=False, offsets=offsets, timestamps=timestamps)
    gap = check_real(gap, "gap")
    check_real(threshold, "threshold")
    if threshold > 1:
        raise ValueError(f"threshold must be a probability, 0 to 1, got {threshold}")
    check_offsets_values(offsets, num_rows, "offsets")
    if should_validate(relevance):
        wrong = ~((relevance >= 0) & (relevance <= 1))
        if wrong.any():
            raise ValueError(f"relevance must be 0 to 1, got {relevance[wrong][0].item()}")
    check_order(timestamps, offsets)
    users = layout.sample_ids()
    is_start = torch.ones_like(users, dtype=torch.bool)
    is_start[1:] = (users.diff() != 0) | (timestamps.long().diff().double() > gap)
    session = is_start.cumsum(0) - 1
    # Offsets of N sessions, the maximum number; the last ones are empty.
    numbers = torch.arange(num_rows + 1, device=session.device)
    session_offsets = torch.searchsorted(session, numbers)
    log_fails = torch.segment_reduce(
        torch.log1p(-relevance.double()), "sum", offsets=session_offsets, initial=0.0, unsafe=True
    )
    return (-torch.expm1(log_fails) >= threshold).long()[session]
