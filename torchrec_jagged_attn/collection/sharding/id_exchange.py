"""``IdExchange``: sends the ids of an EmbeddingCollection to the ranks that store their rows.

The *source rank* of a sample is the rank whose batch contains it, the *owner rank* of a row the
rank whose shard contains it. *Local* histories are histories whose rows are read by attention on
their owner ranks. The rows of all other features are sent back to the source ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.collection.batch_checks import check_equal_lengths, check_single_rows
from torchrec_jagged_attn.collection.sharding.id_router import IdRouter, Route, as_weights
from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature

T = TypeVar("T")


class Feature(NamedTuple):
    """A feature whose ids are exchanged."""

    name: str  # in the output of the collection
    key: str  # in the batch
    lookup: int  # index of the lookup that contains its table
    owners: list[int]  # ranks that store rows of the table, in the order of the rows
    rows_per_owner: int  # rows of the table on each owner rank but the last
    history: HistoryFeature | None
    # Name of the capacity of its rows on the source rank; None if each sample, or each candidate,
    # has one row.
    capacity: str | None

    @property
    def is_local(self) -> bool:
        """Whether this is a history whose rows remain on their owner ranks."""
        return self.history is not None and self.history.is_local


class OwnedIds(NamedTuple):
    """History rows stored on this rank, for the samples of every rank, grouped by source rank."""

    lengths: Tensor  # [S] int64, of the samples of all ranks; [0] if this is no owner rank
    positions: Tensor  # [N'] int64, of each row in its whole history, -1 is the newest
    ages: Tensor | None  # [N'] int64
    prior_weights: Tensor | None  # [N']


def owned_ids(history: HistoryFeature, lengths: Tensor, columns: Mapping[str, Tensor]) -> OwnedIds:
    """Return the received ``lengths`` and columns, by name, of a history."""
    return OwnedIds(
        lengths.long(),
        columns["positions"],
        columns["ages"] if history.has_ages else None,
        as_weights(columns["weights"]) if history.has_weights else None,
    )


class Received(NamedTuple):
    """The result of an exchange of ids, for this rank as a source rank and as an owner rank."""

    lengths: Tensor  # [features, B], of this rank's samples
    counts: dict[str, int]  # rows of this rank's samples, by feature
    # Of each of ``IdExchange.groups``: the index, among the rows sent back, of each row of this
    # rank's samples. None if both are in the same order.
    orders: list[Tensor | None]
    ids: dict[int, KeyedJaggedTensor]  # of each lookup, ordered by feature and source rank
    owned: dict[str, OwnedIds]  # of each local history
    counts_per_owner: list[dict[str, int]]  # rows of this rank's samples, by owner rank, feature
    counts_per_source: list[dict[str, int]]  # rows on this rank, by source rank and feature
    samples_per_rank: list[int]
    # Only if ids are padded, see ``padding.py``: of each of ``IdExchange.groups``, a map of the
    # rows sent back; and the number of jagged queries on each source rank, if it is known.
    paddings: list[Any] | None = None
    queries_per_rank: list[int] | None = None

    def record_stream(self, stream: Any) -> None:
        """Record a stream for all tensors, as TorchRec's pipelines do for input of lookups."""
        for ids in self.ids.values():
            ids.record_stream(stream)
        for x in (self.lengths, *self.orders, *itertools.chain(*self.owned.values())):
            if x is not None:
                x.record_stream(stream)


class CachedAwaitable(Awaitable[T], Generic[T]):
    """An Awaitable whose first ``wait()`` calls ``finish``, and whose others return its result.

    TorchRec 1.6 waits twice for the last batch of an epoch.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        super().__init__()
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    def _wait_impl(self) -> T:
        if self._result is None:
            if self._finish is None:
                raise RuntimeError(
                    "ids must not be waited for again after an error, see the first one"
                )
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


class _SortedIds(NamedTuple):
    """The ids of a batch, sorted by block and sample. A block is a feature on an owner rank."""

    lengths: Tensor  # [features, B], of the batch
    counts: dict[str, int]  # ids of the batch, by feature
    orders: list[Tensor | None]  # see ``Received``
    columns: list[str]  # names of the numbers of each id
    payload: Tensor  # [N, columns] int64: ids and the other numbers that are sent with them
    block_counts: Tensor  # [blocks], ids of each block
    segment_lengths: Tensor | None  # [blocks of local histories, B] int32, ids of each sample


class _Sizes(NamedTuple):
    """Numbers of rows and samples, on the host. See ``Received``."""

    counts_per_owner: list[dict[str, int]]
    counts_per_source: list[dict[str, int]]
    samples_per_rank: list[int]


class IdExchange:
    """Sends the ids of ``features`` to the owner ranks of their rows.

    A source rank sorts the ids of all features by owner rank, feature and sample. For one history,
    whose table is divided between two ranks, and samples ``a`` to ``d``::

        source rank 0    sorted by owner         owner rank 0, rows 0 to 4
          a [7 1 8]        1 3 0 | 7 8     ->      a [1]    b [3 0]  c [4]  d [2]
          b [3 0]
        source rank 1                            owner rank 1, rows 5 to 9
          c [4 9]          4 2 | 9 6       ->      a [7 8]  b []     c [9]  d [6]
          d [2 6]

    Ids are sent as indices into the shard, such as 2 for the 7 of sample ``a``.

    Three stages, which a training pipeline runs in the steps before the lookups:

    1. :meth:`send_sizes` sends the number of ids of each feature to each owner rank.
    2. The first wait sends the ids and, of local histories, the position of each row in its history
       (in the example -2 for the 1 of sample ``a``), the lengths of samples and, if needed, ages
       and prior weights.
    3. The second wait returns :class:`Received`.

    Each stage sends all features together. Owner ranks do not sort again.

    Args:
        features: the features of each lookup, in its order.
        group: process group of the exchange.
        device: device of the batches.

    Attributes:
        features: the same features, in the order of ``Received.lengths``.
        groups: features whose rows are sent back, one all-to-all per group: first all features
            other than histories together, then each history that is not local.
        owned_features: features with rows on this rank, in the order of the lookups.
    """

    def __init__(
        self, features: Sequence[Feature], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.group, self.device = group, device
        other_features = [x for x in features if x.history is None]
        gathered_histories = [x for x in features if x.history is not None and not x.is_local]
        local_histories = [x for x in features if x.is_local]
        self.features = [*other_features, *gathered_histories, *local_histories]
        self.groups = [[x] for x in gathered_histories]
        if other_features:
            self.groups.insert(0, other_features)
        self._has_weights = any(x.history and x.history.has_weights for x in features)
        self._routers: dict[tuple[str, ...], IdRouter] = {}  # by the keys of a batch
        ranks = range(group.size())
        self._features_per_rank = [[x for x in self.features if r in x.owners] for r in ranks]
        self.owned_features = [x for x in features if group.rank() in x.owners]
        blocks = [(rank, feature) for rank in ranks for feature in self._features_per_rank[rank]]
        self._num_blocks = len(blocks)
        block_index = {(rank, feature.name): i for i, (rank, feature) in enumerate(blocks)}
        local_blocks = [i for i, (_, feature) in enumerate(blocks) if feature.is_local]
        self._local_blocks = torch.tensor(local_blocks, dtype=torch.int64, device=device)
        # Each owner rank is sent the counts of its blocks, followed by the number of samples.
        sizes: list[int] = []
        for rank in ranks:
            sizes += [block_index[rank, x.name] for x in self._features_per_rank[rank]]
            sizes.append(self._num_blocks)
        self._size_index = torch.tensor(sizes, device=device)
        self._sizes_per_rank = [len(x) + 1 for x in self._features_per_rank]
        self._histories_per_rank = [sum(x.is_local for x in xs) for xs in self._features_per_rank]

    def routes(self, input: int) -> list[Route]:
        """Return the routes of ``features``, whose ids are in a KeyedJaggedTensor of a batch."""
        groups = {x.name: (self, i) for i, group in enumerate(self.groups) for x in group}
        return [
            Route(
                input,
                x.key,
                x.owners,
                x.rows_per_owner,
                group=groups.get(x.name),
                history=x.history,
            )
            for x in self.features
        ]

    def send_sizes(self, batch: KeyedJaggedTensor) -> Awaitable[Awaitable[Received]]:
        """Sort the ids of ``batch`` by owner rank and start to send their numbers."""
        ids = self._sort(batch)
        num_samples = ids.block_counts.new_full((1,), ids.lengths.shape[1])
        sizes = torch.cat([ids.block_counts, num_samples])[self._size_index]
        recv_splits = [len(self.owned_features) + 1] * self.group.size()
        received, work = self._all_to_all(sizes, recv_splits, self._sizes_per_rank)
        return CachedAwaitable(functools.partial(self._send_ids, ids, received, work))

    def _send_ids(self, ids: _SortedIds, received: Tensor, work: Any) -> Awaitable[Received]:
        """Wait for the sizes and start to send the ids."""
        work.wait()
        # One copy to the host of all numbers, received and sent.
        numbers = iter(torch.cat([received, ids.block_counts]).tolist())
        counts_per_source, samples_per_rank = [], []
        for _ in range(self.group.size()):
            names = (x.name for x in self._features_per_rank[self.group.rank()])
            counts_per_source.append({name: next(numbers) for name in names})
            samples_per_rank.append(next(numbers))
        counts_per_owner = [{x.name: next(numbers) for x in xs} for xs in self._features_per_rank]
        sizes = _Sizes(counts_per_owner, counts_per_source, samples_per_rank)
        recv_splits, send_splits = (
            [sum(counts.values()) for counts in per_rank]
            for per_rank in (counts_per_source, counts_per_owner)
        )
        payload, work = self._all_to_all(ids.payload, recv_splits, send_splits)
        works, lengths = [work], None
        if ids.segment_lengths is not None:
            num_local = self._histories_per_rank[self.group.rank()]
            lengths, work = self._all_to_all(
                ids.segment_lengths.flatten(),
                [n * num_local for n in samples_per_rank],
                [n * ids.lengths.shape[1] for n in self._histories_per_rank],
            )
            works.append(work)
        return CachedAwaitable(
            functools.partial(self._receive, ids, sizes, payload, lengths, works)
        )

    def _receive(
        self, ids: _SortedIds, sizes: _Sizes, payload: Tensor, lengths: Tensor | None, works: list
    ) -> Received:
        """Wait for the ids and group them by lookup, feature and source rank."""
        for work in works:
            work.wait()
        counts = [n for per_feature in sizes.counts_per_source for n in per_feature.values()]
        received = self._features_per_rank[self.group.rank()]
        names = [feature.name for feature in received]
        numbers = zip(ids.columns, payload.unbind(1), strict=True)
        columns = {name: _by_feature(names, x.split(counts)) for name, x in numbers}
        lookups: dict[int, list[Feature]] = {feature.lookup: [] for feature in self.features}
        for feature in self.owned_features:
            lookups[feature.lookup].append(feature)
        owned: dict[str, OwnedIds] = {}
        empty = [payload.new_empty(0)]  # if this is no owner rank
        if lengths is not None:
            names = [feature.name for feature in received if feature.is_local]
            counts = [n for n in sizes.samples_per_rank for _ in names]
            local_lengths = _by_feature(names, lengths.split(counts))
            for feature in self.features:
                if feature.history is None or not feature.is_local:
                    continue
                owned[feature.name] = owned_ids(
                    feature.history,
                    torch.cat(local_lengths.get(feature.name, empty)),
                    {name: torch.cat(x.get(feature.name, empty)) for name, x in columns.items()},
                )
        return Received(
            ids.lengths,
            ids.counts,
            ids.orders,
            {
                lookup: one_bag_per_feature(
                    [x.key for x in features],
                    torch.cat([*empty, *(y for x in features for y in columns["ids"][x.name])]),
                    [sum(n[x.name] for n in sizes.counts_per_source) for x in features],
                )
                for lookup, features in lookups.items()
            },
            owned,
            *sizes,
        )

    def _sort(self, batch: KeyedJaggedTensor) -> _SortedIds:
        keys = tuple(batch.keys())
        if keys not in self._routers:
            self._routers[keys] = IdRouter(
                self.routes(0),
                [keys],
                [self._has_weights],
                self.group.rank(),
                self.group.size(),
                self.device,
            )
        router = self._routers[keys]
        _check_times(batch, self.features)
        per_key = dict(zip(keys, batch.length_per_key(), strict=True))
        counts = {feature.name: per_key[feature.key] for feature in self.features}
        ids = router.read(router.join([batch]))
        found = router.sort(ids, sum(counts.values()))
        orders = dict(zip(counts, found.order.split([*counts.values()]), strict=True))
        is_local = "positions" in router.columns
        return _SortedIds(
            ids.lengths,
            counts,
            [
                None
                if len(group) == 1 and len(group[0].owners) == 1
                else torch.cat([orders[feature.name] for feature in group])
                for group in self.groups
            ],
            router.columns,
            torch.stack(found.columns, dim=1),
            found.block_lengths.sum(1),
            found.block_lengths[self._local_blocks] if is_local else None,
        )

    def _all_to_all(
        self, x: Tensor, recv_splits: list[int], send_splits: list[int]
    ) -> tuple[Tensor, Any]:
        """Start an all-to-all. Returns the tensor that it fills, and an object to wait for."""
        out = x.new_empty(sum(recv_splits), *x.shape[1:])
        work = dist.all_to_all_single(
            out, x, recv_splits, send_splits, group=self.group, async_op=True
        )
        return out, work


def _by_feature(names: list[str], pieces: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Return the pieces of each feature, given one of each feature for each source rank."""
    return {name: [*pieces[i :: len(names)]] for i, name in enumerate(names)}


def one_bag_per_feature(keys: list[str], ids: Tensor, counts: list[int]) -> KeyedJaggedTensor:
    """Return the ids of features as one bag each: lookups without pooling accept any bags."""
    # From pinned memory: a copy from any other waits for the device.
    offsets = torch.tensor([0, *itertools.accumulate(counts)], pin_memory=ids.is_cuda)
    offsets = offsets.to(ids.device, non_blocking=True)
    return KeyedJaggedTensor(keys, ids, offsets=offsets, stride=1, length_per_key=counts)


def _check_times(batch: KeyedJaggedTensor, features: Sequence[Feature]) -> None:
    """Check that timestamps of local histories have the lengths of their ids."""
    for feature in features:
        history = feature.history
        if history is not None and history.has_ages:
            rows, timestamps = batch[history.feature], batch[history.timestamps]
            check_equal_lengths(timestamps, history.timestamps, rows, history.feature)
            # The placeholder of a batch without samples has no request time.
            if history.request_time and rows.values().numel() > 0:
                request_time = batch[history.request_time]
                check_single_rows([request_time], [history.request_time], "request_time", "integer")
