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
    BatchIds,
    IdRouter,
    JoinedIds,
    pair_capacity,
)
from torchrec_jagged_attn.collection.sharding.kernels import pack_ids as kernels


class Segment(NamedTuple):
    """Ids of one route, of the samples of one source rank."""

    route: int
    source: int


class FixedExchange:
    """Exchanges the ids of batches with ``samples_per_rank`` samples.

    All ranks must construct it together. On a GPU, they exchange an empty batch, and the current
    stream must not be the default stream.

    Args:
        router: the router of this rank.
        lookups: routes whose ids a lookup reads, in its order, for each lookup of the model.
        group: process group of the exchange.
        samples_per_rank: samples of each rank.
        capacities: numbers of ids, by :func:`pair_capacity`.
        num_values: largest number of ids of a batch.
        lengths_dtype: dtype of the lengths of batches.
    """

    def __init__(
        self,
        router: IdRouter,
        lookups: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        samples_per_rank: Sequence[int],
        capacities: Mapping[str, int],
        num_values: int,
        lengths_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.router, self.group, self.samples_per_rank = router, group, [*samples_per_rank]
        self.capacities, self._num_values = capacities, num_values
        rank, ranks, device = router.rank, range(router.num_ranks), router.device
        num_columns = len(router.columns)
        self._num_samples = samples_per_rank[rank]
        self._send_capacities = [capacities[pair_capacity(rank, owner)] for owner in ranks]
        self._recv_capacities = [capacities[pair_capacity(source, rank)] for source in ranks]

        # A message has int64 words: the number of samples, lengths (two int32 in a word) and
        # columns.
        def words(source: int, owner: int) -> tuple[int, int]:
            num_lengths = len(router.routes_to(source, owner)) * samples_per_rank[source]
            header = 1 + -(-num_lengths // 2)
            return header, header + capacities[pair_capacity(source, owner)] * num_columns

        send, recv = [words(rank, x) for x in ranks], [words(x, rank) for x in ranks]
        self._send_splits, self._recv_splits = ([n for _, n in x] for x in (send, recv))

        def constant(numbers: Sequence[int]) -> Tensor:
            return torch.tensor([*numbers], dtype=torch.int64, device=device)

        def ranges(begins: Sequence[int], counts: Sequence[int]) -> Tensor:
            parts = [torch.arange(i, i + n) for i, n in zip(begins, counts, strict=True)]
            return torch.cat([torch.arange(0), *parts]).to(device)

        begins = [0, *itertools.accumulate(self._send_splits)][:-1]
        owners = [owner for owner, _ in router.blocks]
        self._send_headers = constant(begins)
        payloads = [begin + header for begin, (header, _) in zip(begins, send, strict=True)]
        self._send_begins = constant([payloads[owner] for owner in owners])
        self._send_strides = constant([self._send_capacities[owner] for owner in owners])
        self._block_owners = constant(owners)
        self._is_before = self._block_owners < torch.arange(len(ranks), device=device)[:, None]
        index = [
            2 * (begins[owner] + 1) + owners[:i].count(owner) * self._num_samples
            for i, owner in enumerate(owners)
        ]
        self._send_length_index = ranges(index, [self._num_samples] * len(owners))
        begins = [0, *itertools.accumulate(self._recv_splits)][:-1]
        self._recv_headers = constant(begins)
        received = [Segment(i, source) for source in ranks for i in router.routes_to(source, rank)]
        rank_in_wire = {segment: i for i, segment in enumerate(received)}
        self.segments = [
            Segment(i, source)
            for lookup in lookups
            for i in lookup
            for source in ranks
            if Segment(i, source) in rank_in_wire
        ]
        self.ranges: dict[int, tuple[int, int]] = {}  # the segments of each route
        for i, segment in enumerate(self.segments):
            first, _ = self.ranges.get(segment.route, (i, i))
            self.ranges[segment.route] = first, i + 1
        in_wire = [rank_in_wire[segment] for segment in self.segments]
        self._in_wire = constant(in_wire)
        self._to_wire = self._in_wire.argsort()
        first_in_wire = {x.source: i for i, x in reversed([*enumerate(received)])}
        self._first_in_wire = constant([first_in_wire[x.source] for x in received])
        self._recv_begins = constant([begins[x.source] + recv[x.source][0] for x in received])
        self._recv_strides = constant([self._recv_capacities[x.source] for x in self.segments])
        samples = [samples_per_rank[x.source] for x in self.segments]
        self.sample_begins = [0, *itertools.accumulate(samples)]
        self._sample_ends = constant(self.sample_begins[1:])
        index = [
            2 * (begins[x.source] + 1) + (at - first_in_wire[x.source]) * n
            for x, at, n in zip(self.segments, in_wire, samples, strict=True)
        ]
        self._recv_length_index = ranges(index, samples)
        self._empty = router.empty(self._num_samples, lengths_dtype)
        self._graphs: list[_Graph] = []
        if device.type == "cuda" and implementation(device)[0] == "triton":
            self._graphs = [_Graph(self._exchange, self._empty, num_values) for _ in range(2)]

    def close(self) -> None:
        """Delete CUDA graphs. Results remain valid."""
        self._graphs = []

    def start(self, inputs: Sequence[KeyedJaggedTensor], can_send: bool) -> ExchangedIds:
        """Send the ids of a batch.

        On a GPU, the result is valid until the next but one call: its tensors are those of one of
        two CUDA graphs, which are replayed in turn. The stream of a call must wait for all uses of
        the result of the last but one.

        If not ``can_send``, because the router does not accept the batch, or with another number of
        samples or more ids, owner ranks are sent -1 as the number of samples. So all ranks replay
        their graphs in all calls, as NCCL requires.
        """
        num_values = sum(x.values().numel() for x in inputs)
        can_send = (
            can_send and inputs[0].stride() == self._num_samples and num_values <= self._num_values
        )
        batch = self.router.join(inputs) if can_send else self._empty
        if not self._graphs:
            return ExchangedIds(self, *self._exchange(batch))
        self._graphs.reverse()
        return ExchangedIds(self, *self._graphs[0].replay(batch))

    def _exchange(self, joined: JoinedIds) -> _Results:
        """Send the ids of a batch."""
        message = self._recv_headers.new_empty(sum(self._send_splits))
        batch = self.router.read(joined)
        block_lengths, order = self._pack(batch, message)
        message.view(torch.int32)[self._send_length_index] = block_lengths.flatten()
        message[self._send_headers] = torch.where(batch.is_valid, self._num_samples, -1)
        received = message.new_empty(sum(self._recv_splits))
        dist.all_to_all_single(
            received, message, self._recv_splits, self._send_splits, group=self.group
        )
        sent = SentIds(batch.lengths, block_lengths.sum(1), order)
        return self._unpack(sent, received)

    def _pack(self, batch: BatchIds, message: Tensor) -> tuple[Tensor, Tensor]:
        """Write the ids into ``message``, and return ``block_lengths`` and ``order``."""
        router = self.router
        if implementation(message.device)[0] == "reference":
            ids = router.sort(batch)
            begins = self._owner_begins(ids.block_lengths).tolist()
            messages = message.split(self._send_splits)
            for part, begin, count in zip(messages, begins, self._send_capacities, strict=True):
                payload = part[part.numel() - count * len(ids.columns) :]
                payload = payload.view(len(ids.columns), count)
                for to, column in zip(payload, ids.columns, strict=True):
                    sent = column[begin : begin + count]
                    to[: sent.numel()] = sent
            return ids.block_lengths, ids.order
        block_lengths = kernels.count_owners(router, batch)
        begins = block_lengths.flatten().cumsum(0, dtype=torch.int64) - block_lengths.flatten()
        shifts = self._send_begins - self._owner_begins(block_lengths)[self._block_owners]
        begins = begins.view(block_lengths.shape) + shifts[:, None]
        ends = self._send_begins + self._send_strides
        args = begins, ends, self._send_strides, message, sum(self._send_capacities)
        return block_lengths, kernels.pack_ids(router, batch, block_lengths, *args)

    def _owner_begins(self, block_lengths: Tensor) -> Tensor:
        """Return the number of ids sent to ranks before each owner rank."""
        return (self._is_before * block_lengths.sum(1)).sum(1)

    def _unpack(self, sent: SentIds, received: Tensor) -> _Results:
        """Put received ids into the order of lookups, routes, source ranks and samples."""
        lengths = received.view(torch.int32)[self._recv_length_index]
        ends = lengths.cumsum(0, dtype=torch.int64)[self._sample_ends - 1]
        counts = ends.diff(prepend=ends.new_zeros(1))
        in_wire = counts[self._to_wire]
        begins = in_wire.cumsum(0) - in_wire
        begins = (self._recv_begins + begins - begins[self._first_in_wire])[self._in_wire]
        size, num_columns = sum(self._recv_capacities), len(self.router.columns)
        if implementation(received.device)[0] != "reference":
            args = received, begins, self._recv_strides, ends, size, num_columns
            columns = kernels.unpack_ids(*args)
        elif not self.segments:
            columns = received.new_empty(num_columns, 0)
        else:
            index = torch.arange(size, device=received.device)
            segment = torch.searchsorted(ends, index, right=True)
            segment.clamp_(max=len(self.segments) - 1)
            index += (begins - (ends - counts))[segment]
            offsets = torch.arange(num_columns, device=received.device)[:, None]
            index = index + offsets * self._recv_strides[segment]
            columns = received[index.clamp_(0, received.numel() - 1)]
        numbers = torch.cat([received[self._recv_headers], counts, sent.block_counts])
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
        sent: SentIds,
        lengths: Tensor,
        columns: Tensor,
        numbers: Tensor,
    ) -> None:
        self._exchange, self._sent_ids = exchange, sent
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

    @functools.cached_property
    def _headers(self) -> list[int]:
        """The number of samples of each source rank, or -1."""
        return self._read[: len(self._exchange.samples_per_rank)]

    @functools.cached_property
    def _received(self) -> dict[Segment, int]:
        """Numbers of ids received, in the order of the columns."""
        numbers = self._read[len(self._headers) :]
        return dict(zip(self._exchange.segments, numbers, strict=False))

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

    def pair_counts(self) -> dict[str, int]:
        """Return the numbers of ids sent to each rank, by the names of their capacities."""
        return self._exchange.router.counts([*self._sent.values()])

    def is_complete(self) -> bool:
        """Return whether this rank received all ids of its rows, and sent all of its samples."""
        exchange, counts = self._exchange, self.pair_counts()
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
        return route in self._exchange.ranges

    def owned(self, routes: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return received lengths, and columns by name, ordered by route and source rank.

        Args:
            routes: routes of one lookup that follow each other.
        """
        exchange = self._exchange
        columns = dict(zip(exchange.router.columns, self._columns, strict=True))
        ranges = [exchange.ranges[route] for route in routes if route in exchange.ranges]
        first, last = (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)
        lengths = self._lengths[exchange.sample_begins[first] : exchange.sample_begins[last]]
        begin, end = self._id_begins[first], self._id_begins[last]
        return lengths, {name: x[begin:end] for name, x in columns.items()}
