"""Dropout of attention weights: checks its probability and draws seeds."""

# torch.jit.script reads annotations, so they are no strings here.
from numbers import Real

import torch
from torch import Tensor


def dropout_threshold(p: float, name: str) -> int:
    """Return the threshold of 32-bit draws for a dropout probability ``p`` in [0, 1).

    ``name`` is the argument that errors name.
    """
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"{name} must be a number, got {p!r}")
    if not 0 <= p < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {p!r}")
    return int(float(p) * 2**32)


def draw_dropout(drops: int, device: torch.device) -> Tensor | None:
    """Return ``[2]`` int64: a seed from PyTorch's generator of ``device``, and the threshold
    ``drops``. ``None`` without dropout, if ``drops`` is zero.

    A weight is dropped if its 32-bit draw is below the threshold. Nothing else is stored: forward
    and backward draw the same bits, on CPU and GPU. Each replay of a CUDA graph has a new seed.
    """
    if drops == 0:
        return None
    dropout = torch.randint(
        -4611686018427387904, 4611686018427387904, [2], dtype=torch.int64, device=device
    )
    dropout[1:].fill_(drops)  # a graph would not capture a copy from the host
    return dropout
