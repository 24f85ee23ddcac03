"""``IdRouter``: sorts the ids of a batch by the ranks that store their rows, without the host.

The *source rank* of a sample is the rank whose batch contains it, the *owner rank* of a row the
rank whose shard contains it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.base.devices import implementation
from torchrec_jagged_attn.collection.sharding.kernels import pack_ids as kernels
from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature

INT64_MAX = torch.iinfo(torch.int64).max
MAX_ID = INT64_MAX // 2
NUM_VALUES = "ids of all features"
"""Name of a capacity: the number of ids of a batch, also of features that are not exchanged."""


class Route(NamedTuple):
    """A feature whose ids are sent to the owner ranks of the rows that one lookup reads."""

    input: int  # index of the KeyedJaggedTensor
    key: str
    owners: list[int]  # ranks that store rows of the table, in the order of the rows
    rows_per_owner: int  # rows of the table on each owner rank but the last
    is_replicated: bool = False  # each rank looks up the ids of its own samples
    group: Any = None  # of routes whose rows are sent back together
    history: HistoryFeature | None = None

    @property
    def is_local(self) -> bool:
        """Whether this is a history whose rows remain on their owner ranks."""
        return self.history is not None and self.history.is_local


class JoinedIds(NamedTuple):
    """The KeyedJaggedTensors of a batch, joined."""

    values: Tensor  # [N] int64, N > 0
    weights: Tensor | None  # [N] fp32, if the weights of ids are sent
    lengths: Tensor  # [features, B]
    is_sent: Tensor  # [] bool, otherwise owner ranks learn that the batch cannot be sent


class BatchIds(NamedTuple):
    """The ids of a batch, by route and sample."""

    ids: Tensor  # [N] int64, and timestamps
    weights: Tensor | None  # [N] int32, the bits of fp32 numbers
    lengths: Tensor  # [routes, B]
    begins: Tensor  # [routes, B] int64, where the ids of a sample begin in ``ids``
    # For ages, where its timestamps begin, and the time to which they are relative.
    time_begins: Tensor | None  # [routes, B] int64
    references: Tensor | None  # [routes, B] int64
    # [] bool, whether it is sent, there is one timestamp for each id, and one request time
    is_valid: Tensor


class RouteTensors(NamedTuple):
    """Properties of each route, on the device."""

    id_mask: Tensor  # [routes] int64, bits of valid ids
    num_owners: Tensor  # [routes] int64, number of ranks that the table is divided between
    rows_per_owner: Tensor  # [routes] int64
    has_ages: Tensor  # [routes] bool
    block_index: Tensor  # [routes, ranks] int64, index of each shard's block, or -1


class SortedIds(NamedTuple):
    """Ids sorted by block and sample. A block is a route to one owner rank."""

    columns: list[Tensor]  # [N] int64 each: ids, and the other numbers that are sent with them
    block_lengths: Tensor  # [blocks, B] int32
    # [N] int64, in the order of routes and samples: the index of an id's row among the rows of
    # its group, in the order in which owner ranks send them back.
    order: Tensor


class IdRouter:
    """Sorts the ids of a batch by owner rank, route and sample.

    Args:
        routes: the routes of all lookups.
        keys: keys of each KeyedJaggedTensor of a batch.
        is_weighted: whether each of them has weights, which are sent then.
        rank, num_ranks: this rank, and the number of ranks.
        device: device of the batches.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        keys: Sequence[Sequence[str]],
        is_weighted: Sequence[bool],
        rank: int,
        num_ranks: int,
        device: torch.device,
    ) -> None:
        self.routes, self.keys, self.is_weighted = [*routes], [[*x] for x in keys], [*is_weighted]
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        histories = [route.history for route in routes if route.history is not None]
        has = {
            "positions": any(route.is_local for route in routes),
            "ages": any(history.has_ages for history in histories),
            "weights": any(is_weighted),
        }
        self.columns = ["ids", *(name for name, x in has.items() if x)]
        self.blocks = [
            (owner, route) for owner in range(num_ranks) for route in self.routes_to(rank, owner)
        ]
        block_index = torch.full((len(self.routes), num_ranks), -1)
        for i, (owner, route) in enumerate(self.blocks):
            owners = [rank] if routes[route].is_replicated else routes[route].owners
            block_index[route, owners.index(owner)] = i
        num_owners = [1 if route.is_replicated else len(route.owners) for route in routes]
        # FBGEMM would take -1 for a pruned row, and not check its bounds. TorchRec sends such ids
        # to its lookups of tables on one rank, too.
        id_mask = [
            -1 if n == 1 and route.history is None and route.group is None else MAX_ID
            for n, route in zip(num_owners, routes, strict=True)
        ]
        groups = dict.fromkeys(route.group for route in routes)
        is_in_group = torch.tensor(
            [[routes[route].group == group for _, route in self.blocks] for group in groups]
        )
        self._is_in_group = is_in_group.to(device)
        self._true = torch.ones((), dtype=torch.bool, device=device)
        begins = [0, *itertools.accumulate(len(x) for x in keys)]

        def features(key_of: Sequence[str | None]) -> Tensor:
            pairs = zip(routes, key_of, strict=True)
            return torch.tensor(
                [0 if k is None else begins[r.input] + keys[r.input].index(k) for r, k in pairs],
                device=device,
            )

        self._features = features([route.key for route in routes])
        with_ages = [x.history if x.history and x.history.has_ages else None for x in routes]
        times = [
            x.timestamps if x else route.key for x, route in zip(with_ages, routes, strict=True)
        ]
        self._times = features(times)
        requests = [(x.request_time or None) if x else None for x in with_ages]
        self._requests = features(requests)
        self.tensors = RouteTensors(
            torch.tensor(id_mask, device=device),
            torch.tensor(num_owners, device=device),
            torch.tensor([max(route.rows_per_owner, 1) for route in routes], device=device),
            torch.tensor([x is not None for x in with_ages], device=device),
            block_index.to(device),
        )
        self._has_request = torch.tensor([x is not None for x in requests], device=device)

    def routes_to(self, source: int, owner: int) -> list[int]:
        """Return the indices of the routes from a source rank to an owner rank."""
        return [
            i
            for i, route in enumerate(self.routes)
            if (source == owner if route.is_replicated else owner in route.owners)
        ]

    def accepts(self, inputs: Sequence[KeyedJaggedTensor]) -> bool:
        """Return whether a batch has samples, and the keys and weights of this router."""
        return all(
            x.stride() == inputs[0].stride() > 0
            and x.keys() == keys
            and (x.weights_or_none() is not None) == is_weighted
            for x, keys, is_weighted in zip(inputs, self.keys, self.is_weighted, strict=True)
        )

    def join(self, inputs: Sequence[KeyedJaggedTensor]) -> JoinedIds:
        """Join the KeyedJaggedTensors of a batch."""
        weights = None
        if "weights" in self.columns:
            parts = [
                x.weights().detach() if y else torch.zeros_like(x.values(), dtype=torch.float32)
                for x, y in zip(inputs, self.is_weighted, strict=True)
            ]
            weights = _not_empty(_join(parts)).float()
        values = _not_empty(_join([x.values() for x in inputs])).long()
        lengths = _join([x.lengths() for x in inputs])
        is_sent = self._true
        if len(inputs) > 1:  # values behind the last sample would shift the ids of the next one
            counts = [x.lengths().sum() == x.values().numel() for x in inputs]
            is_sent = torch.stack(counts).all()
        return JoinedIds(values, weights, lengths.view(-1, inputs[0].stride()), is_sent)

    def empty(self, num_samples: int, dtype: torch.dtype) -> JoinedIds:
        """Return a batch without ids that is not sent. Lengths have the given ``dtype``."""
        num_features = sum(map(len, self.keys))
        lengths = torch.zeros(num_features, num_samples, dtype=dtype, device=self.device)
        values = torch.zeros(1, dtype=torch.int64, device=self.device)
        weights = values.float() if "weights" in self.columns else None
        return JoinedIds(values, weights, lengths, ~self._true)

    def read(self, batch: JoinedIds) -> BatchIds:
        """Return the ids of a batch by route. Nothing is read from the device."""
        values, lengths = batch.values, batch.lengths
        ends = lengths.flatten().cumsum(0, dtype=torch.int64).view(lengths.shape)
        begins = ends - lengths
        is_valid, time_begins, references = batch.is_sent, None, None
        if "ages" in self.columns:
            time_begins = begins[self._times]
            has_request = self._has_request[:, None]
            references = torch.where(has_request, begins[self._requests], ends[self._times] - 1)
            references = values[references.clamp_(0, values.numel() - 1)]
            has_one = (lengths[self._requests] == 1) | ~has_request
            has_times = lengths[self._times] == lengths[self._features]
            is_valid = is_valid & (has_times & has_one).all()
        return BatchIds(
            values,
            None if batch.weights is None else batch.weights.view(torch.int32),
            lengths[self._features],
            begins[self._features],
            time_begins,
            references,
            is_valid,
        )

    def sort(self, batch: BatchIds, size: int | None = None) -> SortedIds:
        """Sort the ids of all routes.

        Args:
            batch: the ids.
            size: their number. If it is not given, it is read from the device.
        """
        if size is None:
            size = int(batch.lengths.sum())
        num_blocks, num_samples = len(self.blocks), batch.lengths.shape[1]
        if implementation(self.device)[0] != "reference":
            block_lengths = kernels.count_owners(self, batch)
            counts = block_lengths.sum(1)
            end = torch.full_like(counts, size)
            blocks = self.blocks_at(block_lengths, counts, counts.cumsum(0) - counts, end, end)
            columns = batch.ids.new_empty(len(self.columns), size)
            order = kernels.pack_ids(self, batch, blocks, columns, size)
            return SortedIds([*columns.unbind()], block_lengths, order)
        lengths = batch.lengths.flatten().long()
        # [N], the index of each id's route and sample: route * num_samples + sample
        segment = torch.repeat_interleave(lengths, output_size=size)
        index = torch.arange(size, device=self.device)
        ends = lengths.cumsum(0)
        in_segment = index - (ends - lengths)[segment]
        route = segment // num_samples
        source = batch.begins.flatten()[segment] + in_segment
        ids = batch.ids[source] & self.tensors.id_mask[route]
        rows_per_owner = self.tensors.rows_per_owner[route]
        shard = torch.div(ids, rows_per_owner, rounding_mode="floor").clamp_(min=0)
        shard = torch.minimum(shard, self.tensors.num_owners[route] - 1)
        ids -= shard * rows_per_owner
        block = self.tensors.block_index[route, shard]
        key = block * num_samples + (segment - route * num_samples)
        sorted_key, order = key.sort(stable=True)
        ends_of_blocks = torch.searchsorted(
            sorted_key, torch.arange(num_blocks * num_samples + 1, device=self.device)
        )
        block_lengths = ends_of_blocks.diff().int().view(num_blocks, num_samples)
        columns = [ids]
        if "positions" in self.columns:
            columns.append(index - ends[segment])
        if batch.time_begins is not None and batch.references is not None:
            at = batch.time_begins.flatten()[segment] + in_segment
            times = batch.ids[at.clamp_(max=batch.ids.numel() - 1)]
            ages = ages_at(batch.references.flatten()[segment], times)
            columns.append(ages * self.tensors.has_ages[route])
        if batch.weights is not None:
            columns.append(batch.weights[source].long())
        rows = self.row_begins(block_lengths.sum(1))[:, None]
        rows = rows + block_lengths.cumsum(1) - block_lengths
        shift = (rows.flatten() - ends_of_blocks[:-1])[sorted_key]
        return SortedIds(
            [x[order] for x in columns],
            block_lengths,
            torch.empty_like(order).scatter_(0, order, index + shift),
        )

    def blocks_at(
        self, block_lengths: Tensor, counts: Tensor, begins: Tensor, ends: Tensor, strides: Tensor
    ) -> kernels.Blocks:
        """Return where ids are written, from the ``[blocks, B]`` lengths and ``[blocks]`` numbers
        of ids of blocks, and from where blocks begin and end in a message and their strides.
        """
        in_block = block_lengths.cumsum(1) - block_lengths
        return kernels.Blocks(in_block, self.row_begins(counts), begins, ends, strides)

    def row_begins(self, counts: Tensor) -> Tensor:
        """Return where the rows of each block begin among the rows of the block's group, in the
        order in which owner ranks send them back, ``[blocks]``.

        Args:
            counts: number of ids of each block, ``[blocks]``.
        """
        group_counts = self._is_in_group * counts  # [groups, blocks]
        return ((group_counts.cumsum(1) - group_counts) * self._is_in_group).sum(0)

    def counts(self, block_counts: Sequence[int]) -> dict[str, int]:
        """Return the numbers of ids sent to each rank, by the names of their capacities."""
        counts = {pair_capacity(self.rank, owner): 0 for owner in range(self.num_ranks)}
        for (owner, _), count in zip(self.blocks, block_counts, strict=True):
            counts[pair_capacity(self.rank, owner)] += count
        return counts

    def count(self, inputs: Sequence[KeyedJaggedTensor]) -> dict[str, int]:
        """Return the numbers of ids of a batch, by the names of their capacities, or nothing if it
        has values of no sample. This reads from the device.
        """
        joined = self.join(inputs)
        if not joined.is_sent:
            return {}
        batch = self.read(joined)
        if implementation(self.device)[0] == "reference":
            block_lengths = self.sort(batch).block_lengths
        else:
            block_lengths = kernels.count_owners(self, batch)
        return {NUM_VALUES: num_values(inputs)} | self.counts(block_lengths.sum(1).tolist())


def num_values(inputs: Sequence[KeyedJaggedTensor]) -> int:
    """Return the number of ids of a batch, also of features that are not exchanged."""
    return sum(x.values().numel() for x in inputs)


def pair_capacity(source: int, owner: int) -> str:
    """Return the name of the capacity of ids sent from a source rank to an owner rank."""
    return f"ids: {source} -> {owner}"


def ages_at(references: Tensor, times: Tensor) -> Tensor:
    """Return ``references - times``: 0 for later times, INT64_MAX on overflow."""
    ages = references - times
    ages.masked_fill_(ages < 0, INT64_MAX)
    return ages.masked_fill_(times > references, 0)


def as_weights(column: Tensor) -> Tensor:
    """Return the weights in a column, in fp32."""
    return column.int().view(torch.float32)


def _join(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _not_empty(x: Tensor) -> Tensor:
    return x if x.numel() else x.new_zeros(1)
