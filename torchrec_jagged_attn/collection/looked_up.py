"""``LookedUp``: rows that a ``ShardedHistoryEmbeddingCollection`` looked up, before the exchange.

The *owner rank* of a row is the rank whose shard contains it, the *source rank* of a sample the
rank whose batch contains it. All tensors and host numbers that the exchange of rows, and attention
on the owner ranks behind it, read are in this record. A CUDA graph of them reads a copy of it whose
tensors are static, see ``padding.py``: the numbers of rows are then capacities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.collection.id_exchange import Feature
from torchrec_jagged_attn.collection.padding import Segments
from torchrec_jagged_attn.modules.owned_rows import OwnedRows

SPARE = 1
"""Rows of zeros behind the capacity of each segment that is sent."""

Capacities = Callable[[str | None, int], int]
"""The capacity of a segment, by the name of its capacity and its number of rows."""


class SentFeatures(NamedTuple):
    """Features whose rows are sent by one all-to-all, and the names of capacities."""

    name: str
    features: list[Feature]
    send_capacities: list[str | None]  # of the rows to each source rank
    recv_capacities: list[str | None]  # of the rows from each owner rank

    @classmethod
    def create(cls, features: list[Feature], rank: int, num_ranks: int) -> SentFeatures:
        others = ", …" if len(features) > 1 else ""
        name = f"{features[0].name}{others}"
        owners = {owner for feature in features for owner in feature.owners}

        def capacity(owner: int, source: int) -> str | None:
            return f"{name}: {owner} -> {source}" if owner in owners else None

        return cls(
            name,
            features,
            [capacity(rank, source) for source in range(num_ranks)],
            [capacity(owner, rank) for owner in range(num_ranks)],
        )


class Padding(NamedTuple):
    """Maps indices of rows received from owner ranks to indices with padding."""

    recv_ends: Tensor  # [ranks] int64, where the rows of each owner rank end without padding
    recv_starts: Tensor  # [ranks] int64, where they start with it
    spare: int  # index of a row of zeros

    def index(self, order: Tensor) -> Tensor:
        """Indices with padding of the indices ``order`` without it, where -1 is a row of zeros."""
        starts = torch.cat([self.recv_ends.new_zeros(1), self.recv_ends[:-1]])
        owner = torch.bucketize(order, self.recv_ends, right=True)
        shifts = (self.recv_starts - starts).index_select(0, owner)
        return (order + shifts).masked_fill(order < 0, self.spare)


class SentRows(NamedTuple):
    """Rows that are sent to the source ranks of their samples by one all-to-all."""

    sent: SentFeatures
    rows: Tensor  # [sum(send_splits), D], of the samples of each source rank
    send_splits: list[int]  # rows to each source rank
    recv_splits: list[int]  # rows from each owner rank
    # [sum(counts)] int64: the index, among the rows received, of each row of this rank's samples.
    # None if it is its own.
    order: Tensor | None
    counts: list[int]  # rows of each feature of this rank's samples
    padding: Padding | None = None

    def tensors(self) -> dict[str, Tensor | Segments]:
        order = self.order
        if order is None:
            order = torch.arange(sum(self.counts), device=self.rows.device)
        capacities = [feature.capacity for feature in self.sent.features]
        return {
            f"{self.sent.name}: rows": Segments(
                self.rows, self.send_splits, self.sent.send_capacities, SPARE
            ),
            f"{self.sent.name}: order": Segments(order, self.counts, capacities, fill=-1),
        }

    def with_tensors(
        self, tensors: dict[str, Tensor], recv_ends: Tensor, capacities: Capacities
    ) -> SentRows:
        send, recv = (
            [capacities(name, count) + SPARE for name, count in zip(names, counts, strict=True)]
            for names, counts in (
                (self.sent.send_capacities, self.send_splits),
                (self.sent.recv_capacities, self.recv_splits),
            )
        )
        starts = [0, *itertools.accumulate(recv[:-1])]
        features = zip(self.sent.features, self.counts, strict=True)
        return SentRows(
            self.sent,
            tensors[f"{self.sent.name}: rows"],
            send,
            recv,
            tensors[f"{self.sent.name}: order"],
            [capacities(feature.capacity, count) for feature, count in features],
            Padding(recv_ends, torch.tensor(starts, device=recv_ends.device), recv[0] - 1),
        )


class LocalHistory(NamedTuple):
    """A history with attention on the owner ranks of its rows."""

    feature: Feature
    num_rows: int  # of this rank's samples, on all owner ranks
    owned: OwnedRows

    def tensors(self) -> dict[str, Tensor | Segments]:
        name, owned = self.feature.name, self.owned
        rank = owned.group.rank()
        capacity = f"{name} on {rank}" if rank in owned.owners else None

        def segment(x: Tensor) -> Segments:
            return Segments(x, [x.shape[0]], [capacity])

        tensors: dict[str, Tensor | Segments] = {
            f"{name}: rows": segment(owned.rows),
            f"{name}: lengths": owned.lengths,
            f"{name}: positions": segment(owned.positions),
            # Tells the number of rows on all owner ranks.
            f"{name}: placeholder": Segments(
                owned.rows.new_empty(self.num_rows, 0), [self.num_rows], [self.feature.capacity]
            ),
        }
        if owned.ages is not None:
            tensors[f"{name}: ages"] = segment(owned.ages)
        if owned.prior_weights is not None:
            tensors[f"{name}: prior weights"] = segment(owned.prior_weights)
        return tensors

    def with_tensors(self, tensors: dict[str, Tensor], capacities: Capacities) -> LocalHistory:
        name = self.feature.name
        owned = self.owned._replace(
            rows=tensors[f"{name}: rows"],
            lengths=tensors[f"{name}: lengths"],
            positions=tensors[f"{name}: positions"],
            ages=tensors.get(f"{name}: ages"),
            prior_weights=tensors.get(f"{name}: prior weights"),
        )
        return LocalHistory(self.feature, capacities(self.feature.capacity, self.num_rows), owned)


class ReplicatedRows(NamedTuple):
    """Rows of this rank's samples from replicated tables."""

    name: str
    features: list[str]
    capacities: list[str | None]  # of the rows of each feature
    rows: Tensor  # [sum(counts), D]
    lengths: Tensor  # [features, B]
    counts: list[int]  # rows of each feature

    def tensors(self) -> dict[str, Tensor | Segments]:
        return {
            f"{self.name}: rows": Segments(self.rows, self.counts, self.capacities),
            f"{self.name}: lengths": self.lengths,
        }

    def with_tensors(self, tensors: dict[str, Tensor], capacities: Capacities) -> ReplicatedRows:
        counts = map(capacities, self.capacities, self.counts)
        return self._replace(
            rows=tensors[f"{self.name}: rows"],
            lengths=tensors[f"{self.name}: lengths"],
            counts=[*counts],
        )


class LookedUp(NamedTuple):
    """Rows that were looked up, and all that their exchange reads."""

    lengths: Tensor  # [features, B], of this rank's samples
    features: list[Feature]  # of `lengths`
    samples_per_rank: list[int]
    sent: list[SentRows]
    histories: list[LocalHistory]
    replicated: list[ReplicatedRows]
    is_padded: bool = False

    def tensors(self) -> dict[str, Tensor | Segments]:
        """All tensors by name. Rows of trained tables require a gradient."""
        tensors: dict[str, Tensor | Segments] = {"lengths": self.lengths}
        if self.sent:
            ends = [[*itertools.accumulate(x.recv_splits)] for x in self.sent]
            # From pinned memory: a copy from any other waits for the device.
            ends = torch.tensor(ends, pin_memory=self.lengths.is_cuda)
            tensors["ends of rows received"] = ends.to(self.lengths.device, non_blocking=True)
        for x in (*self.sent, *self.histories, *self.replicated):
            tensors |= x.tensors()
        return tensors

    def constants(self) -> tuple:
        """All numbers that must be equal to those at a capture, besides capacities."""
        features = [
            *((x.features, x.capacities, x.counts) for x in self.replicated),
            *(
                (
                    [feature.name for feature in x.sent.features],
                    [feature.capacity for feature in x.sent.features],
                    x.counts,
                )
                for x in self.sent
            ),
        ]
        counts = (
            (name, count)
            for names, capacities, counts in features
            for name, capacity, count in zip(names, capacities, counts, strict=True)
            if capacity is None
        )
        return tuple(self.samples_per_rank), tuple(self.lengths.shape), *counts

    def with_tensors(self, tensors: dict[str, Tensor], capacities: Capacities) -> LookedUp:
        """A copy for a CUDA graph, which reads the static counterparts of :meth:`tensors`.

        Its numbers of rows are ``capacities``. On the device, this copies constants from the host:
        call it before the capture.

        With jagged candidates, its first attention gathers the numbers of candidates of all ranks,
        and waits for the device. Later calls, such as the capture, use the same numbers.
        """
        ends = tensors["ends of rows received"] if self.sent else ()
        queries_per_rank: list[int] = []
        histories = [x.with_tensors(tensors, capacities) for x in self.histories]
        return self._replace(
            lengths=tensors["lengths"],
            sent=[
                x.with_tensors(tensors, recv_ends, capacities)
                for x, recv_ends in zip(self.sent, ends, strict=True)
            ],
            histories=[
                x._replace(owned=x.owned._replace(queries_per_rank=queries_per_rank))
                for x in histories
            ],
            replicated=[x.with_tensors(tensors, capacities) for x in self.replicated],
            is_padded=True,
        )
