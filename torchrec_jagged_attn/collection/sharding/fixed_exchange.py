"""``FixedExchange``: one all-to-all of the ids of all sharded modules of a model, with fixed sizes.

The *source rank* of a sample is the rank whose batch contains it, the *owner rank* of a row the
rank whose shard contains it. Each pair of a source rank and an owner rank has a capacity that all
ranks know, so that no sizes are sent before the ids, and the host need not wait for the device: all
steps are device operations with fixed sizes. On a GPU they are a CUDA graph, as about 60 launches
take the host longer than the GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.base.devices import implementation
from torchrec_jagged_attn.collection.sharding.id_router import (
    NUM_VALUES,
    BatchIds,
    IdRouter,
    JoinedIds,
    num_values,
    pair_capacity,
)
from torchrec_jagged_attn.collection.sharding.kernels import pack_ids as kernels


class Segment(NamedTuple):
    """Ids of one route, of the samples of one source rank."""

    route: int
    source: int


class _SentLayout:
    """Where a source rank writes its messages, one after the other in one tensor.

    Attributes:
        capacities, splits: ids and int64 words of the message to each owner rank.
        headers: index of each message.
        begins, ends, strides: first and last index, exclusive, of the ids of each block's message,
            and the distance from a column to the next one.
        length_index: int32 index of the lengths of all blocks.
    """

    def __init__(
        self, router: IdRouter, samples_per_rank: Sequence[int], capacities: Mapping[str, int]
    ) -> None:
        ranks, num_samples = range(router.num_ranks), samples_per_rank[router.rank]
        self.capacities = [capacities[pair_capacity(router.rank, owner)] for owner in ranks]
        sizes = [
            _message_sizes(router, router.rank, owner, num_samples, capacity)
            for owner, capacity in enumerate(self.capacities)
        ]
        self.splits = [sum(x) for x in sizes]
        begins = [0, *itertools.accumulate(self.splits)]
        owners = [owner for owner, _ in router.blocks]
        constant = functools.partial(_constant, device=router.device)
        self.headers = constant(begins[:-1])
        self.begins = constant([begins[owner] + sizes[owner][0] for owner in owners])
        self.strides = constant([self.capacities[owner] for owner in owners])
        self.ends = self.begins + self.strides
        self._first_of_owner = constant([owners.index(owner) for owner in owners])
        index = [
            2 * (begins[owner] + 1) + owners[:i].count(owner) * num_samples
            for i, owner in enumerate(owners)
        ]
        self.length_index = _ranges(index, [num_samples] * len(owners)).to(router.device)

    def id_begins(self, counts: Tensor) -> Tensor:
        """Return the index of the first id of each block, which has ``counts`` ids."""
        begins = counts.cumsum(0) - counts
        return self.begins + begins - begins[self._first_of_owner]


class _ReceivedLayout:
    """Where an owner rank reads the messages received, one after the other in one tensor.

    Messages have their segments in the order of routes. Lookups need them in the order of lookups,
    then routes, then source ranks.

    Attributes:
        capacity, splits: ids of all messages, and int64 words of the message of each source rank.
        headers: index of each message.
        segments: all segments, in the order of lookups.
        ranges: first and last index, exclusive, of the segments of each route.
        sample_begins: index of the first sample of each segment.
        length_index: int32 index of the lengths of all segments.
        strides: distance from a column to the next one, of each segment.
    """

    def __init__(
        self,
        router: IdRouter,
        lookups: Sequence[Sequence[int]],
        samples_per_rank: Sequence[int],
        capacities: Mapping[str, int],
    ) -> None:
        ranks, rank = range(router.num_ranks), router.rank
        per_source = [capacities[pair_capacity(source, rank)] for source in ranks]
        self.capacity = sum(per_source)
        sizes = [
            _message_sizes(router, source, rank, samples_per_rank[source], capacity)
            for source, capacity in enumerate(per_source)
        ]
        self.splits = [sum(x) for x in sizes]
        begins = [0, *itertools.accumulate(self.splits)]
        constant = functools.partial(_constant, device=router.device)
        self.headers = constant(begins[:-1])
        messages = [Segment(i, source) for source in ranks for i in router.routes_to(source, rank)]
        in_message = {segment: i for i, segment in enumerate(messages)}
        self.segments = [
            Segment(i, source)
            for lookup in lookups
            for i in lookup
            for source in ranks
            if Segment(i, source) in in_message
        ]
        self.ranges: dict[int, tuple[int, int]] = {}
        for i, segment in enumerate(self.segments):
            first, _ = self.ranges.get(segment.route, (i, i))
            self.ranges[segment.route] = first, i + 1
        order = [in_message[segment] for segment in self.segments]
        first_of_source = {x.source: i for i, x in reversed([*enumerate(messages)])}
        self._in_message = constant(order)
        self._to_message = self._in_message.argsort()
        self._first_of_source = constant([first_of_source[x.source] for x in messages])
        self._id_begins = constant([begins[x.source] + sizes[x.source][0] for x in messages])
        self.strides = constant([per_source[x.source] for x in self.segments])
        samples = [samples_per_rank[x.source] for x in self.segments]
        self.sample_begins = [0, *itertools.accumulate(samples)]
        self._sample_ends = constant(self.sample_begins[1:])
        index = [
            2 * (begins[x.source] + 1) + (at - first_of_source[x.source]) * n
            for x, at, n in zip(self.segments, order, samples, strict=True)
        ]
        self.length_index = _ranges(index, samples).to(router.device)

    def id_ends(self, lengths: Tensor) -> Tensor:
        """Return the end of the ids of each segment, in the order of lookups."""
        return lengths.cumsum(0, dtype=torch.int64)[self._sample_ends - 1]

    def id_begins(self, counts: Tensor) -> Tensor:
        """Return the index of the first id of each segment, which has ``counts`` ids, in the
        messages.
        """
        counts = counts[self._to_message]
        begins = counts.cumsum(0) - counts
        return (self._id_begins + begins - begins[self._first_of_source])[self._in_message]


def _message_sizes(
    router: IdRouter, source: int, owner: int, num_samples: int, capacity: int
) -> tuple[int, int]:
    """Return the numbers of int64 words of a message before its columns, and of its columns."""
    num_lengths = len(router.routes_to(source, owner)) * num_samples
    return 1 + -(-num_lengths // 2), capacity * len(router.columns)


def _constant(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([*numbers], dtype=torch.int64, device=device)


def _ranges(begins: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return ``begins[i], …, begins[i] + counts[i] - 1`` of all ``i``."""
    parts = [torch.arange(i, i + n) for i, n in zip(begins, counts, strict=True)]
    return torch.cat([torch.arange(0), *parts])


class FixedExchange:
    """Exchanges the ids of batches with ``samples_per_rank`` samples.

    All ranks must construct it together. On a GPU, they exchange an empty batch, and the current
    stream must not be the default stream. A source rank sends each owner rank one message::

        | samples | lengths of all routes | ids | positions | ages | weights |
          1 word    two int32 in a word     as many words each as the capacity

    Args:
        router: the router of this rank.
        lookups: routes whose ids a lookup reads, in its order, for each lookup of the model.
        group: process group of the exchange.
        samples_per_rank: samples of each rank.
        capacities: largest numbers of ids, by :data:`NUM_VALUES` and :func:`pair_capacity`.
        lengths_dtype: dtype of the lengths of batches.
    """

    def __init__(
        self,
        router: IdRouter,
        lookups: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        samples_per_rank: Sequence[int],
        capacities: Mapping[str, int],
        lengths_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.router, self.group, self.samples_per_rank = router, group, [*samples_per_rank]
        self.capacities = capacities
        self._num_samples = samples_per_rank[router.rank]
        self._sent = _SentLayout(router, samples_per_rank, capacities)
        self.received = _ReceivedLayout(router, lookups, samples_per_rank, capacities)
        self._empty = router.empty(self._num_samples, lengths_dtype)
        self._graphs: list[_Graph] = []
        if router.device.type == "cuda" and implementation(router.device)[0] == "triton":
            args = self._exchange, self._empty, capacities[NUM_VALUES]
            self._graphs = [_Graph(*args) for _ in range(2)]

    def close(self) -> None:
        """Delete CUDA graphs. Results remain valid."""
        self._graphs = []

    def start(self, inputs: Sequence[KeyedJaggedTensor], can_send: bool) -> ExchangedIds:
        """Send the ids of a batch.

        On a GPU, the result is valid until the next but one call: its tensors belong to one of two
        CUDA graphs, which are replayed in turn. The stream of a call must wait for all uses of
        the result of the last but one.

        If not ``can_send``, because the router does not accept the batch, or with another number of
        samples, more ids, or ids of no sample, owner ranks are sent -1 as the number of samples. So
        all ranks replay their graphs in all calls, as NCCL requires.
        """
        count = num_values(inputs) if can_send else 0
        can_send = can_send and inputs[0].stride() == self._num_samples
        fits = can_send and count <= self.capacities[NUM_VALUES]
        batch = self.router.join(inputs) if fits else self._empty
        if not self._graphs:
            return ExchangedIds(self, count, *self._exchange(batch))
        self._graphs.reverse()
        return ExchangedIds(self, count, *self._graphs[0].replay(batch))

    def _exchange(self, joined: JoinedIds) -> _Results:
        """Send the ids of a batch, if there are several ranks, and order received ones."""
        sent_to, received_from = self._sent, self.received
        batch = self.router.read(joined)
        message = batch.ids.new_empty(sum(sent_to.splits))
        block_lengths, counts, order = self._pack(batch, message)
        message.view(torch.int32)[sent_to.length_index] = block_lengths.flatten()
        message[sent_to.headers] = torch.where(batch.is_valid, self._num_samples, -1)
        received = message
        if self.router.num_ranks > 1:
            received = message.new_empty(sum(received_from.splits))
            splits = received_from.splits, sent_to.splits
            dist.all_to_all_single(received, message, *splits, group=self.group)
        return self._unpack(SentIds(batch.lengths, counts, order), received)

    def _pack(self, batch: BatchIds, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the ids into ``message``, and return the lengths of blocks, their numbers of ids,
        and ``SortedIds.order``.
        """
        router, layout = self.router, self._sent
        if implementation(message.device)[0] == "reference":
            ids = router.sort(batch)
            counts = ids.block_lengths.sum(1)
            per_owner = [*router.counts(counts.tolist()).values()]
            messages = message.split(layout.splits)
            for i, column in enumerate(reversed(ids.columns), 1):
                for part, size, sent in zip(
                    messages, layout.capacities, column.split(per_owner), strict=True
                ):
                    begin = part.numel() - i * size
                    part[begin : begin + min(size, sent.numel())] = sent[:size]
            return ids.block_lengths, counts, ids.order
        block_lengths = kernels.count_owners(router, batch)
        counts = block_lengths.sum(1)
        places = layout.id_begins(counts), layout.ends, layout.strides
        blocks = router.blocks_at(block_lengths, counts, *places)
        order = kernels.pack_ids(router, batch, blocks, message, sum(layout.capacities))
        return block_lengths, counts, order

    def _unpack(self, sent: SentIds, received: Tensor) -> _Results:
        """Put received ids into the order of lookups, routes, source ranks and samples."""
        layout = self.received
        lengths = received.view(torch.int32)[layout.length_index].to(sent.lengths.dtype)
        ends = layout.id_ends(lengths)
        counts = ends.diff(prepend=ends.new_zeros(1))
        begins = layout.id_begins(counts)
        num_columns = len(self.router.columns)
        if implementation(received.device)[0] != "reference":
            args = received, begins, layout.strides, ends, layout.capacity, num_columns
            columns = kernels.unpack_ids(*args)
        elif not layout.segments:
            columns = received.new_empty(num_columns, 0)
        else:
            index = torch.arange(layout.capacity, device=received.device)
            segment = torch.searchsorted(ends, index, right=True)
            segment.clamp_(max=len(layout.segments) - 1)
            index += (begins - (ends - counts))[segment]
            offsets = torch.arange(num_columns, device=received.device)[:, None]
            index = index + offsets * layout.strides[segment]
            columns = received[index.clamp_(0, received.numel() - 1)]
        numbers = torch.cat([received[layout.headers], counts, sent.block_counts])
        return _Results(sent, lengths, columns, numbers)


class SentIds(NamedTuple):
    """Ids of a batch on their source rank."""

    lengths: Tensor  # [routes, B]
    block_counts: Tensor  # [blocks] int64
    order: Tensor  # see ``SortedIds``


class _Results(NamedTuple):
    """The tensors of :class:`ExchangedIds`."""

    sent: SentIds
    lengths: Tensor  # of the received ids, of all segments
    columns: Tensor  # [columns, ids], of all segments
    # Headers of the source ranks, then numbers of ids of each segment and of each block
    numbers: Tensor


class _Graph:
    """An exchange in a CUDA graph, with tensors of its own for the batch and the results.

    Args:
        exchange: the function to capture.
        empty: a batch without ids.
        num_values: largest number of ids of a batch.
    """

    def __init__(
        self, exchange: Callable[[JoinedIds], _Results], empty: JoinedIds, num_values: int
    ) -> None:
        values = empty.values.new_zeros(max(num_values, 1))
        weights = None if empty.weights is None else empty.weights.new_zeros(values.shape)
        self._batch = JoinedIds(values, weights, empty.lengths.clone(), empty.is_sent.clone())
        exchange(self._batch)  # compiles kernels and connects ranks
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._results = exchange(self._batch)

    def replay(self, batch: JoinedIds) -> _Results:
        for static, x in zip(self._batch, batch, strict=True):
            if static is not None and x is not None:
                (static[: x.shape[0]] if x.dim() else static).copy_(x)
        self._graph.replay()
        return self._results


class ExchangedIds:
    """The result of an exchange.

    The first call of :meth:`is_complete` waits until the numbers of ids are on the host. The other
    methods may be called if it returns True.
    """

    def __init__(
        self,
        exchange: FixedExchange,
        num_values: int,
        sent: SentIds,
        lengths: Tensor,
        columns: Tensor,
        numbers: Tensor,
    ) -> None:
        self._exchange, self._num_values, self._sent_ids = exchange, num_values, sent
        self._lengths, self._columns = lengths, columns
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def samples_per_rank(self) -> list[int]:
        return self._exchange.samples_per_rank

    @property
    def num_samples(self) -> int:
        """Number of samples of this rank."""
        return self._sent_ids.lengths.shape[1]

    @functools.cached_property
    def _headers(self) -> list[int]:
        """The number of samples of each source rank, or -1."""
        return self._read[: len(self._exchange.samples_per_rank)]

    @functools.cached_property
    def _received(self) -> dict[Segment, int]:
        """Numbers of ids received, in the order of the columns."""
        numbers = self._read[len(self._headers) :]
        return dict(zip(self._exchange.received.segments, numbers, strict=False))

    @functools.cached_property
    def _id_begins(self) -> list[int]:
        """Where the ids of each segment begin in the columns."""
        return [0, *itertools.accumulate(self._received.values())]

    @functools.cached_property
    def _sent(self) -> dict[tuple[int, int], int]:
        """Numbers of ids sent, by owner rank and route."""
        numbers = self._read[len(self._headers) + len(self._received) :]
        return dict(zip(self._exchange.router.blocks, numbers, strict=True))

    @functools.cached_property
    def _read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()

    def counts(self) -> dict[str, int]:
        """Return numbers of ids of this rank's batch, by the names of their capacities."""
        router = self._exchange.router
        return {NUM_VALUES: self._num_values} | router.counts([*self._sent.values()])

    def is_complete(self) -> bool:
        """Return whether this rank received all ids of its rows, and sent all of its samples."""
        exchange, counts = self._exchange, self.counts()
        rank = exchange.router.rank
        for segment, count in self._received.items():
            name = pair_capacity(segment.source, rank)
            if segment.source != rank:
                counts[name] = counts.get(name, 0) + count
        return self._headers == exchange.samples_per_rank and all(
            count <= exchange.capacities[name] for name, count in counts.items()
        )

    def sent(self, route: int) -> list[int]:
        """Return the number of ids of a route sent to each rank."""
        ranks = range(self._exchange.router.num_ranks)
        return [self._sent.get((owner, route), 0) for owner in ranks]

    def received(self, route: int) -> list[int]:
        """Return the number of ids of a route received from each rank."""
        ranks = range(self._exchange.router.num_ranks)
        return [self._received.get(Segment(route, source), 0) for source in ranks]

    def lengths(self, first: int, last: int) -> Tensor:
        """Return the lengths of routes ``first`` to ``last - 1``, ``[routes, B]``."""
        return self._sent_ids.lengths[first:last]

    def order(self, first: int, last: int) -> Tensor:
        """Return the index of each row of routes ``first`` to ``last - 1`` among the rows of their
        group, in the order in which they are sent back.
        """
        totals = [sum(self.sent(route)) for route in range(last)]
        return self._sent_ids.order.narrow(0, sum(totals[:first]), sum(totals[first:]))

    def is_owned(self, route: int) -> bool:
        """Return whether ids of a route are sent to this rank."""
        return route in self._exchange.received.ranges

    def owned(self, routes: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return received lengths, and columns by name, ordered by route and source rank.

        Args:
            routes: routes of one lookup that follow each other.
        """
        exchange = self._exchange
        columns = dict(zip(exchange.router.columns, self._columns, strict=True))
        ranges = [
            exchange.received.ranges[route] for route in routes if route in exchange.received.ranges
        ]
        first, last = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        lengths = self._lengths[
            exchange.received.sample_begins[first] : exchange.received.sample_begins[last]
        ]
        begin, end = self._id_begins[first], self._id_begins[last]
        return lengths, {name: x[begin:end] for name, x in columns.items()}
