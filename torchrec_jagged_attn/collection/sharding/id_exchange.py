"""Ids of an EmbeddingCollection on their way to the ranks whose shards have their rows.

The *home* of a sample is the rank whose batch contains it, the *owner* of a row the rank whose
shard contains it. A home sorts the ids of all features by owner, feature and sample, in one stable
sort. It sends how many ids of which feature go to which owner, and a step of a training pipeline
later the ids, with the position of each in its history and, if needed, age and prior weight. Both
are all-to-alls of all features together, and nothing is regrouped on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.collection.batch_checks import check_equal_lengths, check_single_rows

LARGEST = torch.iinfo(torch.int64).max
LARGEST_ID = LARGEST // 2
LARGEST_KEY = torch.iinfo(torch.int32).max


class HistoryFeatures(NamedTuple):
    """What an EmbeddingCollection of a TargetAttentionEmbeddingBagCollection knows of a history."""

    feature: str  # its key in batches
    key: str  # of the output
    stays: bool  # whether attention supports rows that stay, and gather indices
    timestamps: str  # their key, or empty
    request_time: str  # its key, or empty
    is_weighted: bool  # whether batches have prior weights
    capacity: str  # name of the capacity of its rows, see ``padding.py``

    @property
    def has_ages(self) -> bool:
        return self.stays and bool(self.timestamps)

    @property
    def has_weights(self) -> bool:
        return self.stays and self.is_weighted

    @property
    def num_columns(self) -> int:
        """Numbers sent of each row: its id and, where it stays, position and any age and weight."""
        return 1 + self.stays + self.has_ages + self.has_weights


class Feature(NamedTuple):
    """A feature whose ids are exchanged."""

    name: str  # what the collection calls its rows
    key: str  # in batches
    lookup: int  # the one of the collection's lookups that has its table
    owners: list[int]  # the ranks that have rows of the table, in the order of the rows
    rows_per_owner: int  # of all owners but the last
    history: HistoryFeatures | None  # what is known of it, if it is a history
    # Name of the capacity of its rows on the source rank; None if each sample, or each candidate,
    # has one row.
    capacity: str | None

    @property
    def stays(self) -> bool:
        return self.history is not None and self.history.stays


class OwnedIds(NamedTuple):
    """What a rank has received of a history of all homes, besides ids."""

    lengths: Tensor  # [S] int64, of the samples of all homes; [0] if it is no owner
    positions: Tensor  # [N'] int64, of each row in its whole history, where -1 is the newest
    ages: Tensor | None  # [N'] int64
    prior_weights: Tensor | None  # [N']


class Received(NamedTuple):
    """What a rank has, as home and as owner, once ids are exchanged."""

    lengths: Tensor  # [features, B], of this rank's samples
    counts: dict[str, int]  # rows of this rank's samples, by the names of features
    # Where the rows of each of ``IdExchange.groups`` that come back lie; None if in order.
    orders: list[Tensor | None]
    ids: dict[int, KeyedJaggedTensor]  # of each lookup; in [features, homes], as stride=1
    owned: dict[str, OwnedIds]  # by the names of histories that stay
    rows_of_owners: list[dict[str, int]]  # rows of this rank's samples, by owner and feature
    rows_of_homes: list[dict[str, int]]  # rows that this rank has, by home and feature
    samples_of_homes: list[int]
    # Only if ids are padded, see ``padding.py``: of each of ``IdExchange.groups``, a map of the
    # rows that come back; and the number of jagged queries on each source rank, if it is known.
    paddings: list[Any] | None = None
    queries_per_rank: list[int] | None = None

    def record_stream(self, stream: Any) -> None:
        """As of tensors: for a pipeline, that takes this for a KeyedJaggedTensor."""
        for ids in self.ids.values():
            ids.record_stream(stream)
        for x in (self.lengths, *self.orders, *itertools.chain(*self.owned.values())):
            if x is not None:
                x.record_stream(stream)


class IdExchange:
    """The ids of ``features``, those of each lookup in its order, to their owners.

    Attributes:
        features: in the order in which :meth:`start` takes them.
        groups: those whose rows come back, each as what is sent at once: all but histories; and
            each history that is needed whole.
        local: those of which this rank is an owner, in the order of the lookups.
    """

    def __init__(
        self, features: Sequence[Feature], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.group, self.device = group, device
        singles = [of for of in features if of.history is None]
        wholes = [of for of in features if of.history is not None and not of.stays]
        staying = [of for of in features if of.stays]
        self.features = [*singles, *wholes, *staying]
        self.groups = [*([singles] if singles else []), *([of] for of in wholes)]
        histories = [of.history for of in staying if of.history is not None]
        self._has_positions = bool(histories)
        self._has_ages = any(of.has_ages for of in histories)
        self._has_weights = any(of.has_weights for of in histories)

        ranks = range(group.size())
        self._of_ranks = [[of for of in features if rank in of.owners] for rank in ranks]
        self.local = self._of_ranks[group.rank()]
        # Ids are sorted by blocks, one of each owner and feature, and by samples within them.
        blocks = [(rank, of) for rank in ranks for of in self._of_ranks[rank]]
        self._blocks = blocks
        at = {(rank, of.name): block for block, (rank, of) in enumerate(blocks)}
        shifts = torch.zeros(len(self.features), group.size(), dtype=torch.int32)
        for i, of in enumerate(self.features):
            for shard, rank in enumerate(of.owners):
                shifts[i, shard] = at[rank, of.name] - i
        # Of each owner its blocks, and at last the number of samples.
        sizes = [
            block
            for rank in ranks
            for block in [*(at[rank, of.name] for of in self._of_ranks[rank]), len(blocks)]
        ]
        self._shifts, self._sizes = shifts.to(device), torch.tensor(sizes, device=device)
        self._rows_per_shard = torch.tensor(
            [of.rows_per_owner if len(of.owners) > 1 else LARGEST for of in self.features],
            device=device,
        )
        self._staying_blocks = torch.tensor(
            [i for i, (_, of) in enumerate(blocks) if of.stays], dtype=torch.int64, device=device
        )
        self._sizes_per_rank = [len(of_rank) + 1 for of_rank in self._of_ranks]
        self._staying_per_rank = [sum(of.stays for of in of_rank) for of_rank in self._of_ranks]

    def start(self, batch: KeyedJaggedTensor) -> _Sizes:
        """Sort the ids of the features of a ``batch``, and send how many there are."""
        features = self._select(batch)
        num_samples, num_blocks = features.stride(), len(self._blocks)
        if num_samples * num_blocks > LARGEST_KEY:  # PyTorch would wrap around
            raise ValueError(
                f"features must have at most {LARGEST_KEY // num_blocks} samples with "
                f"HistoryEmbeddingCollectionSharder, got {num_samples}"
            )
        lengths = features.lengths().int()
        cell = torch.repeat_interleave(lengths, output_size=features.values().numel())
        feature = cell // num_samples
        # FBGEMM checks bounds, but takes -1 for no row: ids below zero come to lie above all.
        ids = features.values().long() & LARGEST_ID
        rows_per_shard = self._rows_per_shard[feature]
        shard = (ids // rows_per_shard).clamp_(max=self.group.size() - 1)
        ids -= shard * rows_per_shard
        key = torch.add(cell, self._shifts[feature, shard], alpha=num_samples)
        in_order, order = key.sort(stable=True)
        cells = torch.arange(num_blocks * num_samples + 1, dtype=torch.int32, device=self.device)
        ends = torch.searchsorted(in_order, cells)
        of_blocks = ends[::num_samples].diff()
        columns = [x[order] for x in (ids, *self._columns(features, batch, cell))]
        sizes = torch.cat([of_blocks, of_blocks.new_full((1,), num_samples)])[self._sizes]
        counts = None
        if self._has_positions:
            counts = ends.diff().int().view(num_blocks, num_samples)[self._staying_blocks]
        lengths = features.lengths().view(len(self.features), num_samples)
        local = lengths, dict(zip(features.keys(), features.length_per_key(), strict=True))
        orders = [self._order(of_group, features, key) for of_group in self.groups]
        columns = torch.stack(columns, dim=1)
        return _Sizes(self._steps(num_samples, local, orders, of_blocks, sizes, counts, columns))

    def _select(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features of a ``batch``, in the order of ``features``."""
        keys, counts = batch.keys(), batch.length_per_key()
        order = [keys.index(of.key) for of in self.features]
        weights = batch.weights().split(counts) if self._has_weights else None
        values, lengths = batch.values().split(counts), batch.lengths().view(len(keys), -1).unbind()
        return KeyedJaggedTensor(
            [of.name for of in self.features],
            torch.cat([values[i] for i in order]),
            torch.cat([weights[i] for i in order]) if weights else None,
            lengths=torch.cat([lengths[i] for i in order]),
            stride=batch.stride(),
            length_per_key=[counts[i] for i in order],
        )

    def _order(
        self, of_group: list[Feature], features: KeyedJaggedTensor, key: Tensor
    ) -> Tensor | None:
        """Where rows that come back in the order of ``key`` lie, for those of a group."""
        if len(of_group) == 1 and len(of_group[0].owners) == 1:
            return None
        at = self.features.index(of_group[0])
        counts = features.length_per_key()
        first = sum(counts[:at])
        of_rows = key[first : first + sum(counts[at : at + len(of_group)])]
        sent = of_rows.argsort(stable=True)
        return torch.empty_like(sent).scatter_(0, sent, torch.arange(len(sent), device=sent.device))

    def _columns(
        self, features: KeyedJaggedTensor, batch: KeyedJaggedTensor, cell: Tensor
    ) -> list[Tensor]:
        """What is sent besides ids, ``[N]`` int64 each."""
        if not self._has_positions:
            return []
        device = cell.device
        ends = features.offsets()[1:].long()
        columns = [torch.arange(cell.numel(), device=device) - ends[cell]]
        if self._has_ages:
            ages, first = torch.zeros_like(columns[0]), 0
            counts = features.length_per_key()
            for i, (of, count) in enumerate(zip(self.features, counts, strict=True)):
                if of.history is not None and of.history.has_ages:
                    sample = cell[first : first + count] - i * features.stride()
                    ages[first : first + count] = _ages(batch, of.history, sample)
                first += count
            columns.append(ages)
        if self._has_weights:
            columns.append(features.weights().detach().double().view(torch.int64))
        return columns

    def _steps(
        self,
        num_samples: int,
        local: tuple[Tensor, dict[str, int]],
        orders: list[Tensor | None],
        of_blocks: Tensor,
        sizes: Tensor,
        lengths: Tensor | None,
        columns: Tensor,
    ) -> Iterator[Received | None]:
        """Yields once sizes are sent, once ids are, and then what has come, by features."""
        width = len(self.local) + 1
        of_ranks = [width] * self.group.size()
        received, sending = self._send(sizes, of_ranks, self._sizes_per_rank)
        yield
        sending.wait()
        numbers = torch.cat([received, of_blocks]).tolist()
        count = received.numel()
        of_homes = [numbers[i : i + width] for i in range(0, count, width)]
        of_owners, samples = numbers[count:], [of_home[-1] for of_home in of_homes]
        blocks = iter(of_owners)
        sent = [sum(itertools.islice(blocks, n - 1)) for n in self._sizes_per_rank]
        of_rows, sending = self._send(columns, [sum(x[:-1]) for x in of_homes], sent)
        works, of_samples = [sending], None
        staying = [of.name for of in self.local if of.stays]
        if lengths is not None:
            of_samples, sending = self._send(
                lengths.flatten(),
                [n * len(staying) for n in samples],
                [num_samples * n for n in self._staying_per_rank],
            )
            works.append(sending)
        yield
        for work in works:
            work.wait()
        names = [of.name for of in self.local]
        chunks = [count for of_home in of_homes for count in of_home[:-1]]

        def by_feature(column: Tensor) -> dict[str, list[Tensor]]:
            pieces = column.split(chunks)
            return {name: [*pieces[i :: len(names)]] for i, name in enumerate(names)}

        of_columns = [by_feature(column) for column in of_rows.unbind(1)]
        lookups: dict[int, list[str]] = {of.lookup: [] for of in self.features}
        for of in self.local:
            lookups[of.lookup].append(of.name)
        keys = {of.name: of.key for of in self.local}
        ids = {
            lookup: _bags(
                [keys[name] for name in of_lookup],
                [of_columns[0][name] for name in of_lookup],
                columns,
            )
            for lookup, of_lookup in lookups.items()
        }
        owned = {}
        if of_samples is not None:
            of_samples = of_samples.split([n for n in samples for _ in staying])
            for of in self.features:
                if of.history is None or not of.stays:
                    continue
                nothing = [columns.new_empty(0)]  # unless this rank has a part of the table
                pieces = [column.get(of.name, nothing) for column in of_columns]
                counts = nothing
                if of.name in staying:
                    counts = of_samples[staying.index(of.name) :: len(staying)]
                has_ages, has_weights = of.history.has_ages, of.history.has_weights
                owned[of.name] = OwnedIds(
                    torch.cat(counts).long(),
                    positions=torch.cat(pieces[1]),
                    ages=torch.cat(pieces[2]) if has_ages else None,
                    prior_weights=torch.cat(pieces[-1]).view(torch.float64).float()
                    if has_weights
                    else None,
                )
        blocks = iter(of_owners)
        yield Received(
            *local,
            orders,
            ids,
            owned,
            [{of.name: next(blocks) for of in of_rank} for of_rank in self._of_ranks],
            [dict(zip(names, of_home[:-1], strict=True)) for of_home in of_homes],
            samples,
        )

    def _send(self, x: Tensor, received: list[int], sent: list[int]) -> tuple[Tensor, Any]:
        """What will have come, and what waits for it."""
        out = x.new_empty(sum(received), *x.shape[1:])
        return out, dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=True)


def _bags(keys: list[str], pieces: list[list[Tensor]], columns: Tensor) -> KeyedJaggedTensor:
    """Ids of features as one bag each, since rows are not pooled."""
    ids = torch.cat([columns.new_empty(0), *itertools.chain(*pieces)])
    counts = [sum(piece.numel() for piece in of_feature) for of_feature in pieces]
    # From pinned memory: a copy from any other waits for the device.
    offsets = torch.tensor([0, *itertools.accumulate(counts)], pin_memory=ids.is_cuda)
    offsets = offsets.to(ids.device, non_blocking=True)
    return KeyedJaggedTensor(keys, ids, offsets=offsets, stride=1, length_per_key=counts)


def _ages(batch: KeyedJaggedTensor, of: HistoryFeatures, sample: Tensor) -> Tensor:
    """``[N]`` int64: at the time of the request, or else of the newest row. Zero of what is newer,
    the largest number of what int64 does not hold.
    """
    history, timestamps = batch[of.feature], batch[of.timestamps]
    check_equal_lengths(timestamps, of.timestamps, history, of.feature)
    times = timestamps.values().long()
    if of.request_time:
        request_time = batch[of.request_time]
        if sample.numel() > 0:  # the replacement of a batch without samples has no time
            check_single_rows([request_time], [of.request_time], "request_time", "integer")
        references = request_time.values().long()[sample]
    else:
        references = times[(history.offsets()[1:] - 1)[sample]]
    ages = references - times
    ages.masked_fill_(ages < 0, LARGEST)
    return ages.masked_fill_(times > references, 0)


class _Ids(Awaitable[Any]):
    """Ids on their way. Each wait returns the same: TorchRec 1.6 waits twice as an epoch ends."""

    def __init__(self, steps: Iterator[Received | None]) -> None:
        super().__init__()
        self._steps, self._result = steps, None
        self._next()

    def _next(self) -> Any:
        try:
            return next(self._steps)
        except StopIteration:  # which a training loop would take for the end of its data
            raise RuntimeError(
                "ids must not be waited for again after an error, see the first one"
            ) from None

    def _wait_impl(self) -> Any:
        if self._result is None:
            self._result = self._next()
        return self._result


class _Sizes(_Ids):
    """Sizes on their way. A pipeline waits for them one step before their ids are needed."""

    def _wait_impl(self) -> _Ids:
        if self._result is None:
            self._result = _Ids(self._steps)
        return self._result
