"""``draw_dropout``: what attention leaves out while it trains."""

# torch.jit.script reads annotations, so they are no strings here.
from numbers import Real

import torch
from torch import Tensor


def drops_of(p: float, name: str) -> int:
    """How many of 2^32 draws drop, with a probability ``p`` below one, the argument ``name``."""
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"{name} must be a number, got {p!r}")
    if not 0 <= p < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {p!r}")
    return int(float(p) * 2**32)


def draw_dropout(drops: int, device: torch.device) -> Tensor | None:
    """``[2]`` int64: a new seed, of PyTorch's generator for ``device``, and ``drops``; or ``None``,
    if these are zero.

    A weight is dropped if its draw is below ``drops``. Nothing else is stored: forward and
    backward draw alike, and so do CPU and GPU. A CUDA graph has a new seed each time that it is
    replayed.
    """
    if drops == 0:
        return None
    dropout = torch.randint(
        -4611686018427387904, 4611686018427387904, [2], dtype=torch.int64, device=device
    )
    dropout[1:].fill_(drops)  # not a copy from the host, which a graph would not capture
    return dropout
