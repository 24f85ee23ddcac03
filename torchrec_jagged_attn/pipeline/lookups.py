"""What sharded modules look up, and what they make of it: the border of the captured step.

Lookups run in each step, outside the graph, with the true number of ids. Everything behind them
reads static copies of the tensors named here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.collection.history_sharding import ShardedHistoryEmbeddingCollection
from torchrec_jagged_attn.collection.looked_up import Capacities, LookedUp
from torchrec_jagged_attn.collection.padding import PaddedJaggedTensor, Segments


class Lookup(Protocol):
    """The rows that a sharded module looked up for one batch."""

    def tensors(self) -> Mapping[str, Tensor | Segments]:
        """Everything that :meth:`output` reads."""
        ...

    def constants(self) -> tuple[Any, ...]:
        """The host's numbers that :meth:`output` reads and that may differ between batches."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> Lookup:
        """A copy that reads ``tensors`` of other sizes."""
        ...

    def output(self) -> Any:
        """What the forward of the module returns."""
        ...


def look_up(module: ShardedModule, context: Any, ids: Any, fixed: set[str]) -> Lookup:
    """Look up ``ids``, which the input dist of ``module`` returned together with ``context``.

    ``fixed`` are the features with a fixed number of rows, by the names in the output.
    """
    if isinstance(module, ShardedHistoryEmbeddingCollection):
        return _HistoryLookup(module, module.look_up(context, ids))
    if isinstance(module, ShardedEmbeddingCollection):
        return _SequenceLookup(module.compute_and_output_dist(context, ids).wait(), fixed)
    assert isinstance(module, ShardedEmbeddingBagCollection)
    rows = []
    for lookup, of_lookup in zip(module._lookups, ids, strict=True):
        rows.append(lookup(of_lookup))
        if hasattr(lookup, "wait_for_forward"):  # of TorchRec's Triton kernels
            lookup.wait_for_forward()
    return _BagLookup(module, context, rows)


class _BagLookup:
    """Pooled rows ``[B, sum of widths]`` of each lookup, ``B`` over the samples of all ranks."""

    def __init__(
        self, module: ShardedEmbeddingBagCollection, context: Any, rows: list[Tensor]
    ) -> None:
        self._module, self._context, self._rows = module, context, rows

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {str(i): x for i, x in enumerate(self._rows)}
        if self._context.divisor is not None:  # of mean pooling of row-wise tables
            tensors["divisor"] = self._context.divisor
        return tensors

    def constants(self) -> tuple[Any, ...]:
        return tuple(
            (tuple(x.batch_size_per_rank), tuple(x.batch_size_per_feature_pre_a2a))
            for x in self._context.sharding_contexts
            if x is not None
        )

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _BagLookup:
        context = copy.copy(self._context)
        context.divisor = tensors.get("divisor")
        rows = [tensors[str(i)] for i in range(len(self._rows))]
        return _BagLookup(self._module, context, rows)

    def output(self) -> Any:
        module, lookups = self._module, self._module._lookups
        module._lookups = [_Given(rows) for rows in self._rows]
        try:
            return module.compute_and_output_dist(self._context, [None] * len(lookups))  # pyright: ignore
        finally:
            module._lookups = lookups


class _Given(nn.Module):
    """A lookup whose rows are known."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, _: Any) -> Tensor:
        return self._rows


class _SequenceLookup:
    """The output of an EmbeddingCollection that sends no rows to other ranks."""

    def __init__(self, sequences: Mapping[str, JaggedTensor], fixed: set[str]) -> None:
        self._sequences, self._fixed = sequences, fixed

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {}
        for name, sequence in self._sequences.items():
            rows = sequence.values()
            capacity = None if name in self._fixed else name
            tensors[name] = Segments(rows, [rows.shape[0]], [capacity])
            tensors[f"{name}.lengths"] = sequence.lengths()
        return tensors

    def constants(self) -> tuple[Any, ...]:
        return ()

    def with_tensors(
        self, tensors: Mapping[str, Tensor], capacities: Capacities
    ) -> _SequenceLookup:
        sequences = {
            name: (JaggedTensor if name in self._fixed else PaddedJaggedTensor)(
                tensors[name], lengths=tensors[f"{name}.lengths"]
            )
            for name in self._sequences
        }
        return _SequenceLookup(sequences, self._fixed)

    def output(self) -> dict[str, JaggedTensor]:
        return {  # offsets are computed anew, and so in each replay
            name: type(x)(x.values(), lengths=x.lengths()) for name, x in self._sequences.items()
        }


class _HistoryLookup:
    """Rows of which those of histories stay with their owners."""

    def __init__(self, module: ShardedHistoryEmbeddingCollection, looked_up: LookedUp) -> None:
        self._module, self._looked_up = module, looked_up

    def tensors(self) -> Mapping[str, Tensor | Segments]:
        return self._looked_up.tensors()

    def constants(self) -> tuple[Any, ...]:
        return self._looked_up.constants()

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _HistoryLookup:
        looked_up = self._looked_up.with_tensors(dict(tensors), capacities)
        return _HistoryLookup(self._module, looked_up)

    def output(self) -> Any:
        return self._module.exchange(self._looked_up)
