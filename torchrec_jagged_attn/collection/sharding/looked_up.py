"""``LookedUp``: rows that a ``ShardedHistoryEmbeddingCollection`` looked up, before the exchange.

The *owner rank* of a row is the rank whose shard contains it, the *source rank* of a sample the
rank whose batch contains it. ``LookedUp`` contains all tensors and host numbers that the exchange
of rows, and attention on the owner ranks, read. A CUDA graph reads a copy with static tensors, see
``padding.py``. Its numbers of rows are capacities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_jagged_attn.collection.sharding.id_exchange import Feature, OwnedIds
from torchrec_jagged_attn.collection.sharding.padding import Segments
from torchrec_jagged_attn.collection.sharding.remote_attention import OwnedRows

SPARE = 1
"""Number of spare rows that follow the capacity of each segment of rows on an owner rank."""

Capacities = Callable[[str | None, int], int]
"""Function of the name of a capacity and a number of rows that returns the capacity."""


class SendGroup(NamedTuple):
    """Features whose rows are sent by one all-to-all, and the names of capacities.

    A capacity limits the rows of one feature from one owner rank to one source rank. Its name is
    None if the owner rank has no rows of the feature.
    """

    name: str
    features: list[Feature]
    send_capacities: list[str | None]  # to each source rank, of each feature
    recv_capacities: list[str | None]  # from each owner rank, of each feature

    @classmethod
    def create(cls, features: list[Feature], rank: int, num_ranks: int) -> SendGroup:
        ranks = range(num_ranks)
        return cls(
            f"{features[0].name}{', …' if len(features) > 1 else ''}",
            features,
            [sent_capacity(feature, rank, source) for source in ranks for feature in features],
            [sent_capacity(feature, owner, rank) for owner in ranks for feature in features],
        )

    def splits(self, counts: list[int]) -> list[int]:
        """Return the sum of ``counts`` over features, for each rank."""
        n = len(self.features)
        return [sum(counts[i : i + n]) for i in range(0, len(counts), n)]


def sent_capacity(feature: Feature, owner: int, source: int) -> str | None:
    """Return the name of the capacity of rows from an owner rank to a source rank."""
    return f"{feature.name}: {owner} -> {source}" if owner in feature.owners else None


def block_sizes(
    names: Sequence[str | None],
    counts: Sequence[int],
    capacities: Capacities,
    spare: int = SPARE,
) -> list[int]:
    """Return the sizes of blocks of segments, with spare rows unless the capacity is zero."""
    sizes = [*map(capacities, names, counts)]
    has_spare = (name is not None and size > 0 for name, size in zip(names, sizes, strict=True))
    return [size + spare * x for size, x in zip(sizes, has_spare, strict=True)]


class Padding(NamedTuple):
    """Maps indices of rows received from owner ranks to indices of the same rows with padding.

    There is one block of rows for each owner rank and feature.
    """

    recv_ends: Tensor  # [blocks] int64, end of each block without padding
    recv_starts: Tensor  # [blocks] int64, start of each block with padding
    spare: int  # index of a spare row

    @classmethod
    def create(cls, recv_ends: Tensor, names: list[str | None], blocks: list[int]) -> Padding:
        ends = [*itertools.accumulate(blocks)]
        starts = torch.tensor([0, *ends[:-1]], device=recv_ends.device)
        named = zip(names, ends, blocks, strict=True)
        spares = [end - 1 for name, end, size in named if name is not None and size > 0]
        return cls(recv_ends, starts, spares[0] if spares else 0)

    def index(self, order: Tensor) -> Tensor:
        """Map the indices ``order`` without padding to indices with padding; -1 is a spare row."""
        starts = torch.cat([self.recv_ends.new_zeros(1), self.recv_ends[:-1]])
        block = torch.bucketize(order, self.recv_ends, right=True)
        block = block.clamp_(max=starts.shape[0] - 1)
        shifts = (self.recv_starts - starts).index_select(0, block)
        return (order + shifts).masked_fill(order < 0, self.spare)


class SentRows(NamedTuple):
    """Rows that are sent to the source ranks of their samples by one all-to-all."""

    group: SendGroup
    rows: Tensor  # [sum(send_counts), D], of the samples of each source rank
    send_counts: list[int]  # rows to each source rank, of each feature
    recv_counts: list[int]  # rows from each owner rank, of each feature
    # [sum(counts)] int64: the index, among the rows received, of each row of this rank's samples.
    # None if both are in the same order.
    order: Tensor | None
    counts: list[int]  # rows of each feature of this rank's samples
    padding: Padding | None = None

    def tensors(self) -> dict[str, Tensor | Segments]:
        rows = Segments(self.rows, self.send_counts, self.group.send_capacities, SPARE)
        return {f"{self.group.name}: rows": rows} | self.order_tensors()

    def order_tensors(self) -> dict[str, Tensor | Segments]:
        """Return the tensors that a source rank reads besides the rows that it receives."""
        order, device = self.order, self.rows.device
        if order is None:
            order = torch.arange(sum(self.counts), device=device)
        # From pinned memory: a copy from any other waits for the device.
        ends = [*itertools.accumulate(self.recv_counts)]
        ends = torch.tensor(ends, pin_memory=device.type == "cuda")
        capacities = [feature.capacity for feature in self.group.features]
        return {
            f"{self.group.name}: order": Segments(order, self.counts, capacities, fill=-1),
            f"{self.group.name}: ends of rows received": ends.to(device, non_blocking=True),
        }

    def with_tensors(self, tensors: dict[str, Tensor], capacities: Capacities) -> SentRows:
        group = self.group
        recv = block_sizes(group.recv_capacities, self.recv_counts, capacities)
        recv_ends = tensors[f"{group.name}: ends of rows received"]
        features = zip(group.features, self.counts, strict=True)
        return SentRows(
            group,
            tensors[f"{group.name}: rows"],
            block_sizes(group.send_capacities, self.send_counts, capacities),
            recv,
            tensors[f"{group.name}: order"],
            [capacities(feature.capacity, count) for feature, count in features],
            Padding.create(recv_ends, group.recv_capacities, recv),
        )


def local_capacity(feature: Feature, rank: int) -> str | None:
    """Return the name of the capacity of the rows of a history on an owner rank."""
    return f"{feature.name} on {rank}" if rank in feature.owners else None


class LocalHistory(NamedTuple):
    """A history with attention on the owner ranks of its rows."""

    feature: Feature
    num_rows: int  # of this rank's samples, on all owner ranks
    owned: OwnedRows

    def tensors(self) -> dict[str, Tensor | Segments]:
        rows, group = self.owned.rows, self.owned.group
        capacity = local_capacity(self.feature, group.rank())
        segments = Segments(rows, [rows.shape[0]], [capacity], SPARE)
        ids = OwnedIds(*self.owned[1:5])
        return {f"{self.feature.name}: rows": segments} | local_tensors(
            self.feature, ids, self.num_rows, group
        )

    def with_tensors(self, tensors: dict[str, Tensor], capacities: Capacities) -> LocalHistory:
        owned = self.owned._replace(
            rows=tensors[f"{self.feature.name}: rows"],
            **static_local_ids(self.feature, tensors)._asdict(),
        )
        return LocalHistory(self.feature, capacities(self.feature.capacity, self.num_rows), owned)


def local_tensors(
    feature: Feature, ids: OwnedIds, num_rows: int, group: dist.ProcessGroup
) -> dict[str, Tensor | Segments]:
    """Return the tensors of a local history except its rows; ``num_rows`` are on all ranks."""
    capacity = local_capacity(feature, group.rank())
    tensors: dict[str, Tensor | Segments] = {
        f"{feature.name}: lengths": ids.lengths,
        # The number of rows on all owner ranks, as the size of a tensor without elements.
        f"{feature.name}: placeholder": Segments(
            ids.positions.new_empty(num_rows, 0), [num_rows], [feature.capacity]
        ),
    }
    for name, x in zip(ROW_TENSORS, ids[1:], strict=True):
        if x is not None:
            tensors[f"{feature.name}: {name}"] = Segments(x, [x.shape[0]], [capacity], SPARE)
    return tensors


ROW_TENSORS = ("positions", "ages", "prior weights")


def static_local_ids(feature: Feature, tensors: dict[str, Tensor]) -> OwnedIds:
    """Return the static counterparts of the ids passed to :func:`local_tensors`."""
    lengths = tensors[f"{feature.name}: lengths"]
    positions, *others = (tensors.get(f"{feature.name}: {name}") for name in ROW_TENSORS)
    assert positions is not None
    return OwnedIds(lengths, positions, *others)


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
    """Rows that were looked up, and the inputs of their exchange."""

    lengths: Tensor  # [features, B], of this rank's samples
    features: list[Feature]  # of `lengths`
    samples_per_rank: list[int]
    sent: list[SentRows]
    histories: list[LocalHistory]
    replicated: list[ReplicatedRows]
    is_padded: bool = False

    def tensors(self) -> dict[str, Tensor | Segments]:
        """Return all tensors by name. Tensors that require a gradient receive one."""
        tensors: dict[str, Tensor | Segments] = {"lengths": self.lengths}
        for x in (*self.sent, *self.histories, *self.replicated):
            tensors |= x.tensors()
        return tensors

    def with_tensors(self, tensors: dict[str, Tensor], capacities: Capacities) -> LookedUp:
        """Return a copy for a CUDA graph, which reads static counterparts of :meth:`tensors`.

        Its numbers of rows are ``capacities``. This copies constants from the host to the device:
        call it before the capture.

        With jagged candidates, its first attention gathers the numbers of candidates of all ranks,
        and waits for the device. Later calls, such as the capture, use the same numbers.
        """
        queries_per_rank: list[int] = []
        histories = [x.with_tensors(tensors, capacities) for x in self.histories]
        return self._replace(
            lengths=tensors["lengths"],
            sent=[x.with_tensors(tensors, capacities) for x in self.sent],
            histories=[
                x._replace(owned=x.owned._replace(queries_per_rank=queries_per_rank))
                for x in histories
            ],
            replicated=[x.with_tensors(tensors, capacities) for x in self.replicated],
            is_padded=True,
        )
