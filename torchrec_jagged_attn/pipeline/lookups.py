"""Lookups of sharded modules: the ids of a batch, the rows looked up, and the module's output.

A captured step starts from the rows if lookups are outside the graph, and from the ids if they are
inside. It reads static copies of their tensors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn.base.row_gradients import split_rows
from torchrec_jagged_attn.collection.sharding.looked_up import Capacities, LookedUp
from torchrec_jagged_attn.collection.sharding.padding import PaddedJaggedTensor, Segments
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection


class Lookup(Protocol):
    """The rows that a sharded module looked up for one batch."""

    def tensors(self) -> Mapping[str, Tensor | Segments]:
        """Return all tensors that :meth:`output` reads."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> Lookup:
        """Return a copy that reads the static counterparts of :meth:`tensors`."""
        ...

    def output(self) -> Any:
        """Return the output of the module's forward."""
        ...


class Ids(Protocol):
    """The ids of one batch that a sharded module looks up on this rank."""

    def counts(self) -> dict[str, int]:
        """Return the numbers of rows, by the names of their capacities."""
        ...

    def constants(self) -> tuple[Any, ...]:
        """Return all other Python numbers that lookups and outputs read."""
        ...

    def num_ids(self) -> tuple[Any, ...] | None:
        """Return the numbers of ids that must not vary if the lookup is in a graph.

        Returns None if the number of ids of a group of tables is not known on the host. The lookup
        cannot be in a graph then.
        """
        ...

    def tensors(self) -> Mapping[str, Tensor | Segments]:
        """Return all tensors that :meth:`look_up` reads."""
        ...

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> Ids:
        """Return a copy that reads the static counterparts of :meth:`tensors`."""
        ...

    def look_up(self, detach: bool = False) -> Lookup:
        """Look up the rows. With ``detach``, backward does not reach the tables."""
        ...


def ids_of(module: ShardedModule, context: Any, ids: Any, fixed: set[str]) -> Ids:
    """Return the ids of a batch that a sharded module looks up.

    Args:
        module: the sharded module.
        context, ids: results of its input dist.
        fixed: features with a fixed number of rows, by their names in the output.
    """
    if isinstance(module, ShardedHistoryEmbeddingCollection):
        return _HistoryIds(module, context, ids)
    if isinstance(module, ShardedEmbeddingCollection):
        lengths = [x.lengths().view(len(x.keys()), -1) for x in ids]
        return _SequenceIds(module, [*ids], lengths, fixed)
    assert isinstance(module, ShardedEmbeddingBagCollection)
    return _BagIds(module, context, [*ids])


def _detach(rows: Tensor, detach: bool) -> Tensor:
    return rows.detach().requires_grad_() if detach else rows


class _BagIds:
    """Ids of pooled features, for each lookup, of the samples of all ranks."""

    def __init__(
        self,
        module: ShardedEmbeddingBagCollection,
        context: Any,
        ids: list[KeyedJaggedTensor],
        is_static: bool = False,
    ) -> None:
        self._module, self._context, self._ids = module, context, ids
        self._is_static = is_static

    def counts(self) -> dict[str, int]:
        return {}

    def constants(self) -> tuple[Any, ...]:
        return tuple(
            (tuple(x.batch_size_per_rank), tuple(x.batch_size_per_feature_pre_a2a))
            for x in self._context.sharding_contexts
            if x is not None
        )

    def num_ids(self) -> tuple[Any, ...] | None:
        numbers: list[Any] = []
        for lookup, x in zip(self._module._lookups, self._ids, strict=True):
            number: Any = x.values().numel()
            if len(getattr(lookup, "_emb_modules", ())) > 1:  # ids are divided among groups
                number = x.length_per_key_or_none()
                if number is None:
                    return None
            numbers.append(number)
        return tuple(numbers)

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {}
        for i, x in enumerate(self._ids):
            tensors |= {f"ids {i}": x.values(), f"lengths {i}": x.lengths()}
            if (weights := x.weights_or_none()) is not None:
                tensors[f"weights {i}"] = weights
        if self._context.divisor is not None:  # of mean pooling of row-wise tables
            tensors["divisor"] = self._context.divisor
        return tensors

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _BagIds:
        context = copy.copy(self._context)
        context.divisor = tensors.get("divisor")
        ids = [
            KeyedJaggedTensor(
                x.keys(),
                tensors[f"ids {i}"],
                tensors.get(f"weights {i}"),
                lengths=tensors[f"lengths {i}"],
                stride=x.stride(),
                length_per_key=x.length_per_key_or_none(),
            )
            for i, x in enumerate(self._ids)
        ]
        return _BagIds(self._module, context, ids, True)

    def look_up(self, detach: bool = False) -> _BagRows:
        rows = []
        for lookup, ids in zip(self._module._lookups, self._ids, strict=True):
            if self._is_static:  # offsets are computed in each pass, and so in the captured one
                ids._offsets = None
            rows.append(_detach(lookup(ids), detach))
            wait: Any = getattr(lookup, "wait_for_forward", None)  # of TorchRec's Triton kernels
            if wait is not None:
                wait()
        return _BagRows(self._module, self._context, rows)


class _BagRows:
    """Pooled rows ``[B, sum of widths]`` of each lookup, ``B`` over the samples of all ranks."""

    def __init__(
        self, module: ShardedEmbeddingBagCollection, context: Any, rows: list[Tensor]
    ) -> None:
        self._module, self._context, self._rows = module, context, rows

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {str(i): x for i, x in enumerate(self._rows)}
        if self._context.divisor is not None:
            tensors["divisor"] = self._context.divisor
        return tensors

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _BagRows:
        context = copy.copy(self._context)
        context.divisor = tensors.get("divisor")
        rows = [tensors[str(i)] for i in range(len(self._rows))]
        return _BagRows(self._module, context, rows)

    def output(self) -> Any:
        module: Any = self._module
        lookups = module._lookups
        module._lookups = [lambda _, rows=rows: rows for rows in self._rows]
        try:
            return module.compute_and_output_dist(self._context, [None] * len(lookups))
        finally:
            module._lookups = lookups


class _SequenceIds:
    """Ids of an EmbeddingCollection that sends no rows to other ranks.

    Args:
        module: the EmbeddingCollection.
        ids: ids of each lookup.
        lengths: lengths of each lookup, ``[features, B]``.
        fixed: features with a fixed number of rows.
    """

    def __init__(
        self,
        module: ShardedEmbeddingCollection,
        ids: list[KeyedJaggedTensor],
        lengths: list[Tensor],
        fixed: set[str],
    ) -> None:
        self._module, self._ids, self._lengths, self._fixed = module, ids, lengths, fixed

    def _names(self) -> list[list[str | None]]:
        """Return the names of the capacities of the features of each lookup."""
        features_per_lookup = self._module._embedding_names_per_sharding
        return [[None if x in self._fixed else x for x in xs] for xs in features_per_lookup]

    def _sizes(self) -> list[tuple[str | None, int]]:
        counts = (x.length_per_key() for x in self._ids)
        pairs = zip(self._names(), counts, strict=True)
        return [pair for lists in pairs for pair in zip(*lists, strict=True)]

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self._sizes() if name is not None}

    def constants(self) -> tuple[Any, ...]:
        return tuple(count for name, count in self._sizes() if name is None)

    def num_ids(self) -> tuple[Any, ...] | None:
        return ()

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {}
        for i, (x, names) in enumerate(zip(self._ids, self._names(), strict=True)):
            tensors[f"ids {i}"] = Segments(x.values(), x.length_per_key(), names, fill=None)
            tensors[f"lengths {i}"] = self._lengths[i]
        return tensors

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _SequenceIds:
        ids = []
        for i, (x, names) in enumerate(zip(self._ids, self._names(), strict=True)):
            blocks = [*map(capacities, names, x.length_per_key())]
            # One bag for each feature, as lookups of rows take any bags.
            offsets = torch.tensor([0, *itertools.accumulate(blocks)], device=x.values().device)
            values = tensors[f"ids {i}"]
            ids.append(
                KeyedJaggedTensor(
                    x.keys(), values, offsets=offsets, stride=1, length_per_key=blocks
                )
            )
        lengths = [tensors[f"lengths {i}"] for i in range(len(ids))]
        return _SequenceIds(self._module, ids, lengths, self._fixed)

    def look_up(self, detach: bool = False) -> _SequenceRows:
        module = self._module
        widths = map(module._embedding_dim_for_sharding_type, module._sharding_type_to_sharding)
        rows = [
            _detach(lookup(ids).view(-1, width), detach)
            for lookup, ids, width in zip(module._lookups, self._ids, widths, strict=True)
        ]
        counts = [x.length_per_key() for x in self._ids]
        return _SequenceRows(module, rows, self._lengths, counts, self._names())


class _SequenceRows:
    """Rows of an EmbeddingCollection that sends none to other ranks.

    Args:
        module: the EmbeddingCollection.
        rows: rows of each lookup, ``[N, D]``, one feature after the other.
        lengths: lengths of each lookup, ``[features, B]``.
        counts: numbers of rows of the features of each lookup.
        names: names of the capacities of the features of each lookup.
    """

    def __init__(
        self,
        module: ShardedEmbeddingCollection,
        rows: list[Tensor],
        lengths: list[Tensor],
        counts: list[list[int]],
        names: list[list[str | None]],
    ) -> None:
        self._module, self._rows, self._lengths = module, rows, lengths
        self._counts, self._names = counts, names

    def tensors(self) -> dict[str, Tensor | Segments]:
        tensors: dict[str, Tensor | Segments] = {}
        for i, (rows, counts) in enumerate(zip(self._rows, self._counts, strict=True)):
            tensors[f"rows {i}"] = Segments(rows, counts, self._names[i])
            tensors[f"lengths {i}"] = self._lengths[i]
        return tensors

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _SequenceRows:
        rows = [tensors[f"rows {i}"] for i in range(len(self._rows))]
        lengths = [tensors[f"lengths {i}"] for i in range(len(self._rows))]
        pairs = zip(self._names, self._counts, strict=True)
        counts = [[*map(capacities, names, numbers)] for names, numbers in pairs]
        return _SequenceRows(self._module, rows, lengths, counts, self._names)

    def output(self) -> dict[str, JaggedTensor]:
        columns: dict[str, list[JaggedTensor]] = {}
        for i, features in enumerate(self._module._embedding_names_per_sharding):
            rows = split_rows(self._rows[i], self._counts[i])
            lengths = self._lengths[i].unbind()
            for at, feature in enumerate(features):
                kind = JaggedTensor if self._names[i][at] is None else PaddedJaggedTensor
                columns.setdefault(feature, []).append(kind(rows[at], lengths=lengths[at]))
        orders = self._module._features_to_permute_indices  # of tables that are sharded by column
        for feature, parts in columns.items():
            if len(parts) > 1:
                order = orders.get(feature, range(len(parts)))
                joined = torch.cat([parts[i].values() for i in order], dim=1)
                columns[feature] = [type(parts[0])(joined, lengths=parts[0].lengths())]
        return {feature: parts[0] for feature, parts in columns.items()}


class _HistoryIds:
    """Ids of an EmbeddingCollection with attention on the owner ranks of history rows."""

    def __init__(self, module: ShardedHistoryEmbeddingCollection, context: Any, ids: Any) -> None:
        self._module, self._context, self._ids = module, context, ids

    def counts(self) -> dict[str, int]:
        return self._module.sizes(self._context, self._ids)[0]

    def constants(self) -> tuple[Any, ...]:
        return self._module.sizes(self._context, self._ids)[1]

    def num_ids(self) -> tuple[Any, ...] | None:
        return ()

    def tensors(self) -> dict[str, Tensor | Segments]:
        return self._module.id_tensors(self._ids)

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _HistoryIds:
        ids = self._module.padded_input(self._ids, dict(tensors), capacities)
        return _HistoryIds(self._module, self._context, ids)

    def look_up(self, detach: bool = False) -> _HistoryRows:
        looked_up = self._module.look_up(self._context, self._ids, detach)
        return _HistoryRows(self._module, looked_up)


class _HistoryRows:
    """Rows of an EmbeddingCollection with attention on the owner ranks of history rows."""

    def __init__(self, module: ShardedHistoryEmbeddingCollection, looked_up: LookedUp) -> None:
        self._module, self._looked_up = module, looked_up

    def tensors(self) -> Mapping[str, Tensor | Segments]:
        return self._looked_up.tensors()

    def with_tensors(self, tensors: Mapping[str, Tensor], capacities: Capacities) -> _HistoryRows:
        looked_up = self._looked_up.with_tensors(dict(tensors), capacities)
        return _HistoryRows(self._module, looked_up)

    def output(self) -> Any:
        return self._module.exchange(self._looked_up)
