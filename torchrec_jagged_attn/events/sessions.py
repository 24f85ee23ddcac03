"""``segment_sessions``: which sessions of a user are active, and which passive."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrec_jagged_attn.checks import check_float, check_same, check_shape, check_timestamps
from torchrec_jagged_attn.layout import JaggedLayout, check_offsets_values

__all__ = ["segment_sessions"]


def segment_sessions(
    relevance: Tensor, offsets: Tensor, timestamps: Tensor, *, gap: float, threshold: float
) -> Tensor:
    r"""Divide events into those of active and of passive sessions.

    A session begins with a user's first event, and with each that comes more than ``gap`` after the
    one before it. It is active if it is likely enough that one of its events converts:

    .. math:: 1 - \prod_{n \in session} (1 - r_n) \ge \tau

    The host does not wait for the device.

    Args:
        relevance: ``[N]``, the probability ``r`` of each event to convert, as :class:`Relevance`
            gives.
        offsets: ``[B + 1]`` int32 or int64: user ``b`` has the events ``offsets[b]`` to
            ``offsets[b + 1] - 1``.
        timestamps: ``[N]`` int32, int64, fp32 or fp64, never decreasing within a user.
        gap: longest pause within a session, in the unit of the timestamps.
        threshold: ``τ``.

    Returns:
        ``[N]`` int64: 1 for events of active sessions, else 0.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the
            values of offsets do not fit.

    Example:
        >>> relevance = torch.tensor([0.5, 0.5, 0.1, 0.6])
        >>> times = torch.tensor([0, 10, 5000, 5000])
        >>> segment_sessions(relevance, torch.tensor([0, 3, 4]), times, gap=1800, threshold=0.7)
        tensor([1, 1, 0, 0])
    """
    check_float(relevance, "relevance")
    check_shape(relevance, "relevance", "[N]", (None,))
    num_rows = relevance.shape[0]
    layout = JaggedLayout(offsets, num_rows)
    check_same(relevance, "relevance", dtype=False, offsets=offsets, timestamps=timestamps)
    check_timestamps(timestamps, num_rows)
    check_offsets_values(offsets, num_rows, "offsets")
    users = layout.sample_ids()
    begins = torch.ones_like(users, dtype=torch.bool)
    begins[1:] = (users.diff() != 0) | (timestamps.diff() > gap)
    session = begins.cumsum(0) - 1
    # As many sessions as events, at most; the last ones are empty.
    numbers = torch.arange(num_rows + 1, device=session.device)
    bounds = torch.searchsorted(session, numbers)
    log_fails = torch.log1p(-relevance.double())
    log_fails = torch.segment_reduce(log_fails, "sum", offsets=bounds, initial=0.0, unsafe=True)
    return (-torch.expm1(log_fails) >= threshold).long()[session]
