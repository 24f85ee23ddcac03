"""What sharded modules look up, and what they make of it: the border of the captured step.

Lookups run in each step, outside the graph, with the true number of ids. Everything behind them
reads static copies of the tensors named here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
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
        widths = map(module._embedding_dim_for_sharding_type, module._sharding_type_to_sharding)
        lookups = zip(module._lookups, ids, widths, strict=True)
        rows = [lookup(of_lookup).view(-1, width) for lookup, of_lookup, width in lookups]
        lengths = [x.lengths().view(len(x.keys()), -1) for x in ids]
        counts = [x.length_per_key() for x in ids]
        return _SequenceLookup(module, rows, lengths, counts, fixed)
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
        module._lookups = [lambda _, rows=rows: rows for rows in self._rows]  # pyright: ignore
        try:
            return module.compute_and_output_dist(self._context, [None] * len(lookups))  # pyright: ignore
        finally:
            module._lookups = lookups


class _SequenceLookup:
    """Rows of an EmbeddingCollection that sends none to other ranks, by the lookups of its shards.

    Args:
        module: the EmbeddingCollection.
        rows: of each lookup, ``[N, D]``, one feature after the other.
        lengths: of each lookup, ``[features, B]``.
        counts: of each lookup, the number of rows of each feature.
        fixed: the features with a fixed number of rows.
    """

    def __init__(
        self,
        module: ShardedEmbeddingCollection,
        rows: list[Tensor],
        lengths: list[Tensor],
        counts: list[list[int]],
        fixed: set[str],
    ) -> None:
        self._module, self._rows, self._lengths = module, rows, lengths
        self._counts, self._fixed = counts, fixed

    def _names(self) -> list[list[str]]:
        return self._module._embedding_names_per_sharding

    def _capacities(self, names: list[str]) -> list[str | None]:
        return [None if name in self._fixed else name for name in names]

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {}
        for i, (rows, counts) in enumerate(zip(self._rows, self._counts, strict=True)):
            tensors[f"rows {i}"] = Segments(rows, counts, self._capacities(self._names()[i]))
            tensors[f"lengths {i}"] = self._lengths[i]
        return tensors

    def constants(self) -> tuple[Any, ...]:
        return ()

    def with_tensors(
        self, tensors: Mapping[str, Tensor], capacities: Capacities
    ) -> _SequenceLookup:
        rows = [tensors[f"rows {i}"] for i in range(len(self._rows))]
        lengths = [tensors[f"lengths {i}"] for i in range(len(self._rows))]
        counts = [
            [*map(capacities, self._capacities(names), of_lookup)]
            for names, of_lookup in zip(self._names(), self._counts, strict=True)
        ]
        return _SequenceLookup(self._module, rows, lengths, counts, self._fixed)

    def output(self) -> dict[str, JaggedTensor]:
        columns: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for i, names in enumerate(self._names()):
            rows = self._rows[i].split(self._counts[i])
            for name, *of_name in zip(names, rows, self._lengths[i].unbind(), strict=True):
                columns.setdefault(name, []).append((*of_name,))  # pyright: ignore
        orders = self._module._features_to_permute_indices  # of tables that are sharded by column
        output: dict[str, JaggedTensor] = {}
        for name, parts in columns.items():
            parts = [parts[i] for i in orders.get(name, range(len(parts)))]
            rows = parts[0][0] if len(parts) == 1 else torch.cat([x for x, _ in parts], dim=1)
            kind = JaggedTensor if name in self._fixed else PaddedJaggedTensor
            output[name] = kind(rows, lengths=parts[0][1])
        return output


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
