"""``draw_row_dropout``: which rows of a history attention leaves out while it trains."""

# torch.jit.script reads annotations, so they are no strings here.
import torch
from torch import Tensor

__all__ = ["draw_row_dropout", "drops_of"]


def drops_of(row_dropout: float) -> int:
    """How many of 2^32 draws drop a row, which is a probability below one."""
    if not 0 <= row_dropout < 1:
        raise ValueError(f"row_dropout must be at least 0 and below 1, got {row_dropout!r}")
    return int(row_dropout * 2**32)


def draw_row_dropout(drops: int, device: torch.device) -> Tensor:
    """``[2]`` int64: a new seed, of PyTorch's generator for ``device``, and ``drops``.

    Attention drops a row if the draw of its number is among these: nothing else is stored, forward
    and backward draw alike, and so do CPU and GPU. A CUDA graph has a new seed each time that it is
    replayed.
    """
    row_dropout = torch.randint(
        -4611686018427387904, 4611686018427387904, [2], dtype=torch.int64, device=device
    )
    row_dropout[1:].fill_(drops)  # not a copy from the host, which a graph would not capture
    return row_dropout
