"""Tensors of varying size, and their counterparts of fixed size for a CUDA graph."""

# torch.jit.script reads annotations, so they must not be strings.
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class Segments(NamedTuple):
    """A tensor whose first dimension is divided into segments of varying size.

    Its static counterpart contains a block of ``capacity + spare`` rows for each segment: the rows
    of the segment, followed by ``fill``. A segment without a name always has as many rows as at the
    capture, and no spare rows. Segments with the same name share a capacity.
    """

    tensor: Tensor  # [sum(counts), …]
    counts: list[int]  # rows of each segment
    names: list[str | None]  # of the capacities; None if the count never varies within a capture
    spare: int = 0  # rows after the capacity of each segment with a name
    fill: int | None = 0  # value of the rows after each segment; None: rows of earlier steps


class PaddedJaggedTensor(JaggedTensor):
    """A JaggedTensor with more rows than the sum of its lengths. Further rows are padding."""


def num_rows(sequence: JaggedTensor) -> int:
    """Return the number of rows of ``sequence.values()``, without reading them."""
    return sequence._values.shape[0]


class _UnreadableJaggedTensor(JaggedTensor):
    """A feature of :class:`PaddedFeatures`, with lengths but without readable values."""

    def __init__(self, key: str, rows: JaggedTensor) -> None:
        super().__init__(rows.values(), rows.weights_or_none(), lengths=rows.lengths())
        self._key = key

    def values(self) -> Tensor:
        raise PaddedValuesError(f"the values of {self._key!r}")

    def weights(self) -> Tensor:
        raise PaddedValuesError(f"the weights of {self._key!r}")

    weights_or_none = weights


class PaddedValuesError(RuntimeError):
    """A layer of another package read padded values of a KeyedJaggedTensor."""


class PaddedFeatures(KeyedJaggedTensor):
    """The KeyedJaggedTensor of a captured step, whose ``values()`` cannot be read as a whole.

    Attention reads single features by :meth:`rows_of`. ``lengths()`` has no padding, ``[K B]``.

    Args:
        keys, lengths, stride: arguments of a KeyedJaggedTensor.
        rows: function that returns the padded values, and weights or None, of a key. It is called
            when the key is first read.
    """

    def __init__(
        self,
        keys: list[str],
        lengths: Tensor,
        stride: int,
        rows: Callable[[str], tuple[Tensor, Tensor | None]],
    ) -> None:
        super().__init__(keys, lengths.new_empty(0), lengths=lengths, stride=stride)
        self._read_rows = rows
        self._rows: dict[str, JaggedTensor] = {}

    def rows_of(self, key: str) -> JaggedTensor:
        """Return the feature ``key``, with values ``[capacity]``."""
        if key not in self._rows:
            begin = self.keys().index(key) * self.stride()
            values, weights = self._read_rows(key)
            lengths = self.lengths()[begin : begin + self.stride()]
            self._rows[key] = JaggedTensor(values, weights, lengths=lengths)
        rows = self._rows[key]
        # Offsets are computed anew in each pass, and so in the captured one.
        return JaggedTensor(rows.values(), rows.weights_or_none(), lengths=rows.lengths())

    def __getitem__(self, key: str) -> JaggedTensor:
        return _UnreadableJaggedTensor(key, self.rows_of(key))

    def _refuse(self, *_: object) -> NoReturn:
        raise PaddedValuesError("the values")

    values = weights = weights_or_none = offsets = length_per_key = offset_per_key = _refuse
