"""Tensors of varying size, and their counterparts of fixed size for a CUDA graph."""

# torch.jit.script reads annotations, so they are no strings here.
from typing import NamedTuple

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor


class Segments(NamedTuple):
    """A tensor whose first dimension holds segments of varying size, one after the other.

    Its static counterpart has shape ``[sum(capacity + spare), …]``: each segment starts at the
    beginning of its block, and ``fill`` follows it. The capacity of a segment without a name is its
    count at the capture. Segments of equal names share a capacity.
    """

    tensor: Tensor  # [sum(counts), …]
    counts: list[int]  # rows of each segment
    names: list[str | None]  # of the capacities; None if the count never varies within a capture
    spare: int = 0  # rows behind the capacity of each segment, which always have the value `fill`
    fill: int = 0  # value of the rows behind each segment's count


class PaddedJaggedTensor(JaggedTensor):
    """A JaggedTensor with more rows than its lengths add up to: those behind them are padding."""


def num_rows(sequence: JaggedTensor) -> int:
    """The number of rows of ``sequence.values()``, without reading them."""
    return sequence._values.shape[0]
