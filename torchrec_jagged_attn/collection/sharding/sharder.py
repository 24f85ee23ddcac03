"""``HistoryEmbeddingCollectionSharder``: keeps the rows of histories on their owner ranks.

Ids of all features are sent to the owner ranks of their rows (``id_exchange.py``). Owner ranks look
up all ids of a table together, so that a row that both a target and histories contain is updated
once. Rows of local histories are read there by attention, see ``remote_attention.py``. The rows of
all other features, and of histories that are not local, are sent back to the source ranks of their
samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    CommOp,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.base.row_gradients import scale_gradient
from torchrec_jagged_attn.collection.batch_checks import check_keys, pad_empty_batch
from torchrec_jagged_attn.collection.sharding.id_exchange import Feature, IdExchange, Received
from torchrec_jagged_attn.collection.sharding.looked_up import (
    SPARE,
    Capacities,
    LocalHistory,
    LookedUp,
    Padding,
    ReplicatedRows,
    SendGroup,
    SentRows,
    block_sizes,
    local_capacity,
    local_tensors,
    sent_capacity,
    static_local_ids,
)
from torchrec_jagged_attn.collection.sharding.padding import PaddedJaggedTensor, Segments
from torchrec_jagged_attn.collection.sharding.remote_attention import (
    OwnedHistory,
    OwnedRows,
    start_exchange,
)
from torchrec_jagged_attn.collection.sharding.row_groups import divide_rows, permute_rows
from torchrec_jagged_attn.collection.sharding.tables import fixed_rows_in, histories_in

SHARDING_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


def _sequence_codecs(registry: dict[str, QuantizedCommCodecs] | None) -> QuantizedCommCodecs | None:
    return (registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)


class _Output(LazyAwaitable[dict[str, JaggedTensor]]):
    """The output of the collection: rows that ``waits`` return, and rows that were not sent."""

    def __init__(
        self, not_sent: dict[str, JaggedTensor], waits: list[Callable[[], dict[str, JaggedTensor]]]
    ) -> None:
        super().__init__()
        self._not_sent, self._waits = not_sent, waits

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        if self._result is None:  # a hook may have waited before
            sent = {name: rows for wait in self._waits for name, rows in wait().items()}
            self._result = sent | self._not_sent
        return self._result


class ShardedHistoryEmbeddingCollection(ShardedEmbeddingCollection):
    """An EmbeddingCollection on several ranks, whose output contains local histories as
    :class:`OwnedHistory` and all other features as JaggedTensor.

    Args:
        module: its tables are :class:`HistoryTableConfig`.
        *args, **kwargs: as for ``ShardedEmbeddingCollection``.
    """

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        assert self._env.process_group is not None
        assert self._device is not None
        # A training pipeline may replace the group of the exchange of ids, but not this one.
        self._group = self._env.process_group
        rank, num_ranks = self._group.rank(), self._group.size()
        histories, fixed_rows = histories_in(module), fixed_rows_in(module)
        self._capacities: dict[str, str | None] = {}  # names by feature, see ``padding.py``
        self._replicated: dict[int, dict[str, str]] = {}  # by lookup: keys in the batch, by feature
        features: list[Feature] = []
        for i, (kind, sharding) in enumerate(self._sharding_type_to_sharding.items()):
            keys = dict(zip(sharding.embedding_names(), sharding.feature_names(), strict=True))
            for name, key in keys.items():
                capacity = histories[name].capacity if name in histories else key
                self._capacities[name] = None if name in fixed_rows else capacity
            if kind == ShardingType.DATA_PARALLEL.value:
                self._replicated[i] = keys
                continue
            owners = {name: [*range(num_ranks)] for name in keys}
            if kind == ShardingType.TABLE_WISE.value:
                counts = enumerate(sharding.features_per_rank())
                owner_per_feature = [owner for owner, count in counts for _ in range(count)]
                owners = {x: [owner] for x, owner in zip(keys, owner_per_feature, strict=True)}
            num_rows = {
                name: table.num_embeddings
                for table in sharding.embedding_tables()
                for name in table.embedding_names
            }
            features += [
                Feature(
                    name,
                    key,
                    i,
                    owners[name],
                    -(-num_rows[name] // len(owners[name])),
                    histories.get(name),
                    self._capacities[name],
                )
                for name, key in keys.items()
            ]
        times = [
            y for x in histories.values() if x.has_ages for y in (x.timestamps, x.request_time)
        ]
        shardings = self._sharding_type_to_sharding.values()
        keys = [key for sharding in shardings for key in sharding.feature_names()]
        self._keys = [*dict.fromkeys(keys + [key for key in times if key])]
        self._exchange = IdExchange(features, self._group, self._device)
        self._send_groups = [SendGroup.create(x, rank, num_ranks) for x in self._exchange.groups]
        self._local_histories = [x for x in self._exchange.features if x.is_local]
        self._codecs = _sequence_codecs(self.qcomm_codecs_registry)
        self._orders: dict[tuple[str, ...], list[tuple[list[int], Tensor]]] = {}
        self._has_uninitialized_input_dist = False

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        features = pad_empty_batch(maybe_td_to_kjt(features))
        check_keys(features, self._keys)  # pipelines call this before the checks of the collection
        if features.variable_stride_per_key():
            raise NotImplementedError(
                "features must have one batch size with HistoryEmbeddingCollectionSharder, got "
                "several: give DistributedModelParallel an EmbeddingCollectionSharder"
            )
        with torch.no_grad():
            ctx.input_features += [features.permute(*x) for x in self._orders_in(features)]
            ids = self._exchange.send_sizes(features)
        # Pipelines accept any object with ``record_stream`` in place of a KeyedJaggedTensor.
        return KJTListSplitsAwaitable([ids], ctx)  # pyright: ignore[reportArgumentType]

    def _orders_in(self, features: KeyedJaggedTensor) -> list[tuple[list[int], Tensor]]:
        """Return the indices in the batch of the features of each replicated lookup."""
        keys, device = tuple(features.keys()), features.values().device
        if keys not in self._orders:
            orders = [[keys.index(key) for key in x.values()] for x in self._replicated.values()]
            self._orders[keys] = [
                (order, torch.tensor(order, dtype=torch.int32, device=device)) for order in orders
            ]
        return self._orders[keys]

    def prefetch(
        self,
        dist_input: KJTList,
        forward_stream: torch.Stream | None = None,
        ctx: EmbeddingCollectionContext | None = None,
    ) -> None:
        """Prepare the lookups of :meth:`compute_and_output_dist`."""
        assert ctx is not None
        ids = self._ids(ctx, dist_input)
        super().prefetch(KJTList(ids), forward_stream, ctx)  # pyright: ignore[reportArgumentType]

    def _ids(self, ctx: EmbeddingCollectionContext, input: KJTList) -> list[KeyedJaggedTensor]:
        """Return the ids of each lookup."""
        replicated = dict(zip(self._replicated, ctx.input_features, strict=True))
        return [(_received(input).ids | replicated)[i] for i in range(len(self._lookups))]

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self.exchange(self.look_up(ctx, input))

    def look_up(
        self, ctx: EmbeddingCollectionContext, input: KJTList, detach: bool = False
    ) -> LookedUp:
        """Look up all rows that this rank owns. With ``detach``, backward does not reach the
        tables.
        """
        received = _received(input)
        rows: dict[int, Tensor] = {}
        replicated: list[ReplicatedRows] = []
        for i, (lookup, ids) in enumerate(zip(self._lookups, self._ids(ctx, input), strict=True)):
            found = lookup(ids)
            if self.post_lookup_tracker_fn is not None:
                self.post_lookup_tracker_fn(ids, found, self, None)
            found = found.view(-1, self._embedding_dim)
            if detach:
                found = found.detach().requires_grad_()
            if i not in self._replicated:
                rows[i] = found
                continue
            names = [*self._replicated[i]]
            capacities = [self._capacities[name] for name in names]
            lengths = ids.lengths().view(len(names), -1)
            counts = ids.length_per_key()
            replicated.append(
                ReplicatedRows(f"lookup {i}", names, capacities, found, lengths, counts)
            )
        groups = [*self._exchange.groups, *([x] for x in self._local_histories)]
        factor = 1 / self._env.world_size if get_gradient_division() else 1.0
        owned = self._exchange.owned_features
        divided = iter(divide_rows(owned, received.counts_per_source, groups, rows))
        sent = [
            self._rows_to_send(received, i, scale_gradient(next(divided), factor))
            for i in range(len(self._send_groups))
        ]
        histories = [
            LocalHistory(
                feature,
                received.counts[feature.name],
                OwnedRows(
                    next(divided),
                    *received.owned[feature.name],
                    samples_per_rank=received.samples_per_rank,
                    owners=feature.owners,
                    group=self._group,
                    queries_per_rank=received.queries_per_rank,
                    gradient_factor=factor,
                ),
            )
            for feature in self._local_histories
        ]
        if self.post_odist_tracker_fn is not None:
            self.post_odist_tracker_fn()
        return LookedUp(
            received.lengths,
            self._exchange.features,
            received.samples_per_rank,
            sent,
            histories,
            replicated,
            received.paddings is not None,
        )

    def _rows_to_send(self, received: Received, i: int, rows: Tensor) -> SentRows:
        group = self._send_groups[i]
        names = [feature.name for feature in group.features]
        recv_counts, send_counts = (
            [counts.get(name, 0) for counts in per_rank for name in names]
            for per_rank in (received.counts_per_owner, received.counts_per_source)
        )
        counts = [received.counts[name] for name in names]
        padding = received.paddings[i] if received.paddings else None
        return SentRows(group, rows, send_counts, recv_counts, received.orders[i], counts, padding)

    def sizes(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> tuple[dict[str, int], tuple[Any, ...]]:
        """Return the numbers of rows by the names of their capacities, and all other Python numbers
        that :meth:`look_up` and :meth:`exchange` read.
        """
        received = _received(input)
        names: list[str | None] = []
        counts: list[int] = []
        for i, group in enumerate(self._send_groups):
            sent = self._rows_to_send(received, i, received.lengths)
            names += group.send_capacities + group.recv_capacities
            counts += sent.send_counts + sent.recv_counts
        for feature in self._exchange.features:
            names.append(feature.capacity)
            counts.append(received.counts[feature.name])
        for feature in self._local_histories:
            names.append(local_capacity(feature, self._group.rank()))
            counts.append(sum(x.get(feature.name, 0) for x in received.counts_per_source))
        for features, ids in zip(self._replicated.values(), ctx.input_features, strict=True):
            names += [self._capacities[name] for name in features]
            counts += ids.length_per_key()
        sizes = [*zip(names, counts, strict=True)]
        fixed = [n for name, n in sizes if name is None]
        constants = *received.samples_per_rank, *received.lengths.shape, *fixed
        return {name: n for name, n in sizes if name is not None}, constants

    def id_tensors(self, input: KJTList) -> dict[str, Tensor | Segments]:
        """Return all tensors that :meth:`look_up` reads, if no table is replicated."""
        received = _received(input)
        tensors: dict[str, Tensor | Segments] = {"lengths": received.lengths}
        for i in range(len(self._send_groups)):
            sent = self._rows_to_send(received, i, received.lengths)
            tensors |= sent.order_tensors()
        for i, ids in received.ids.items():
            names, counts = self._id_segments(i, received)
            tensors[f"ids {i}"] = Segments(ids.values(), counts, names, SPARE, fill=None)
        for feature in self._local_histories:
            ids = received.owned[feature.name]
            tensors |= local_tensors(feature, ids, received.counts[feature.name], self._group)
        return tensors

    def padded_input(
        self, input: KJTList, tensors: dict[str, Tensor], capacities: Capacities
    ) -> Any:
        """Return an ``input`` of :meth:`look_up` that reads the static counterparts of
        :meth:`id_tensors` and has ``capacities`` as numbers of rows.
        """
        received = _received(input)
        ids: dict[int, KeyedJaggedTensor] = {}
        per_source: list[dict[str, int]] = [{} for _ in received.counts_per_source]
        per_owner: list[dict[str, int]] = [{} for _ in received.counts_per_owner]
        for i, x in received.ids.items():
            blocks = iter(block_sizes(*self._id_segments(i, received), capacities))
            per_key: list[int] = []
            for feature in self._owned_features(i):
                ranks = per_source[:1] if feature.is_local else per_source
                sizes = [next(blocks) for _ in ranks]
                for counts in per_source:
                    counts[feature.name] = 0
                for counts, size in zip(ranks, sizes, strict=True):
                    counts[feature.name] = size
                per_key.append(sum(sizes))
            offsets = torch.tensor([0, *itertools.accumulate(per_key)], device=x.values().device)
            ids[i] = KeyedJaggedTensor(
                x.keys(), tensors[f"ids {i}"], offsets=offsets, stride=1, length_per_key=per_key
            )
        paddings = []
        for i, group in enumerate(self._send_groups):
            counts = self._rows_to_send(received, i, received.lengths).recv_counts
            blocks = block_sizes(group.recv_capacities, counts, capacities)
            ends = tensors[f"{group.name}: ends of rows received"]
            paddings.append(Padding.create(ends, group.recv_capacities, blocks))
            for j, size in enumerate(blocks):
                feature = group.features[j % len(group.features)]
                per_owner[j // len(group.features)][feature.name] = size
        return [
            Received(
                tensors["lengths"],
                {
                    feature.name: capacities(feature.capacity, received.counts[feature.name])
                    for feature in self._exchange.features
                },
                [tensors[f"{group.name}: order"] for group in self._send_groups],
                ids,
                {x.name: static_local_ids(x, tensors) for x in self._local_histories},
                per_owner,
                per_source,
                received.samples_per_rank,
                paddings,
                [],
            )
        ]

    def _owned_features(self, lookup: int) -> list[Feature]:
        return [feature for feature in self._exchange.owned_features if feature.lookup == lookup]

    def _id_segments(self, lookup: int, received: Received) -> tuple[list[str | None], list[int]]:
        """Return names of capacities and numbers of ids of a lookup: one per local history, and one
        per source rank of each other feature.
        """
        rank, names, counts = self._group.rank(), [], []
        for feature in self._owned_features(lookup):
            per_source = [x[feature.name] for x in received.counts_per_source]
            if feature.is_local:
                names.append(local_capacity(feature, rank))
                counts.append(sum(per_source))
            else:
                names += [sent_capacity(feature, rank, i) for i in range(len(per_source))]
                counts += per_source
        return names, counts

    def exchange(self, looked_up: LookedUp) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Send rows to the source ranks of their samples, except rows of local histories."""
        names = [feature.name for feature in looked_up.features]
        lengths = dict(zip(names, looked_up.lengths.unbind(), strict=True))
        waits = [self._send(x, lengths) for x in looked_up.sent]
        not_sent: dict[str, JaggedTensor] = {}
        for x in looked_up.replicated:
            not_sent |= _jagged_tensors(
                x.features,
                x.rows.split(x.counts),
                x.lengths.unbind(),
                x.capacities if looked_up.is_padded else None,
            )
        for x in looked_up.histories:
            name = x.feature.name
            not_sent[name] = OwnedHistory(lengths[name], x.num_rows, x.owned)
        return _Output(not_sent, waits)

    def _send(
        self, x: SentRows, lengths: dict[str, Tensor]
    ) -> Callable[[], dict[str, JaggedTensor]]:
        """Start to send rows. Returns a function that waits for the rows of this rank's samples."""
        features = x.group.features
        codecs = self._codecs if features[0].history is None else None
        recv_splits, send_splits = map(x.group.splits, (x.recv_counts, x.send_counts))
        get_rows = start_exchange(x.rows, recv_splits, send_splits, self._group, codecs)
        order, padding = x.order, x.padding
        capacities = None
        if padding is not None:
            assert order is not None
            order = padding.index(order)
            capacities = [feature.capacity for feature in features]
        names = [feature.name for feature in features]

        def wait() -> dict[str, JaggedTensor]:
            rows = get_rows()
            if order is not None:
                rows = permute_rows(rows, order, padding is None)
            local_lengths = [lengths[name] for name in names]
            return _jagged_tensors(names, rows.split(x.counts), local_lengths, capacities)

        return wait


def _received(input: KJTList) -> Received:
    """Return the result of :class:`IdExchange` from the result of :meth:`input_dist`."""
    return input[0]  # pyright: ignore[reportReturnType]


def _jagged_tensors(
    names: Sequence[str],
    rows: Sequence[Tensor],
    lengths: Sequence[Tensor],
    capacities: Sequence[str | None] | None,
) -> dict[str, JaggedTensor]:
    """Return JaggedTensors by name, with padding if their capacity has a name."""
    if capacities is None:
        capacities = [None] * len(names)
    return {
        name: (JaggedTensor if capacity is None else PaddedJaggedTensor)(values, lengths=x)
        for name, values, x, capacity in zip(names, rows, lengths, capacities, strict=True)
    }


class HistoryEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """An EmbeddingCollectionSharder that leaves history rows on the ranks that own them.

    It replaces ``EmbeddingCollectionSharder`` in ``sharders``, for ``DistributedModelParallel`` and
    its planner. Attention over the histories of a :class:`TargetAttentionEmbeddingBagCollection` is
    then computed on the ranks that own their rows. History rows are still sent for encoder layers,
    and if one attention has several histories. All other features, and models on a single rank, are
    sharded as by ``EmbeddingCollectionSharder``. Results differ from a single rank by rounding.

    Tables of histories may be row-wise, which is best, table-wise or data-parallel.
    :class:`HistoryEmbeddingShardingPlanner` estimates the cost of each. Batch sizes may not vary by
    feature. ``TrainPipelineCudaGraph`` requires this sharder on several ranks.

    Args:
        fused_params: as for ``EmbeddingCollectionSharder``.
        qcomm_codecs_registry: codecs for the rows of all features other than histories. Queries,
            partial results, and history rows that are sent are not encoded.
        use_index_dedup: must be False.

    Raises:
        NotImplementedError: a table of histories is sharded by column, codecs encode several rows
            together, the model is in a DMPCollection, or ``use_index_dedup`` is True.

    Example:
        >>> from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> sharders = [EmbeddingBagCollectionSharder(), HistoryEmbeddingCollectionSharder()]
        >>> model = DistributedModelParallel(model, sharders=sharders)  # doctest: +SKIP
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        if use_index_dedup:
            raise NotImplementedError(
                "use_index_dedup must be False with HistoryEmbeddingCollectionSharder, got "
                f"{use_index_dedup!r}: use EmbeddingCollectionSharder(use_index_dedup=True)"
            )
        super().__init__(fused_params, qcomm_codecs_registry)

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        kinds = {params[config.name].sharding_type for config in module.embedding_configs()}
        is_replicated = kinds == {ShardingType.DATA_PARALLEL.value}
        if not histories_in(module) or env.world_size == 1 or is_replicated:
            return super().shard(module, params, env, device, module_fqn)
        if isinstance(env, ShardingEnv2D):
            raise NotImplementedError(
                "HistoryEmbeddingCollectionSharder must be in the sharders of a "
                "DistributedModelParallel, got a DMPCollection (2D parallelism): give it an "
                "EmbeddingCollectionSharder"
            )
        for config in module.embedding_configs():
            kind = params[config.name].sharding_type
            if kind not in SHARDING_TYPES:
                raise NotImplementedError(
                    f"the table {config.name!r} must be sharded in one of {SHARDING_TYPES} with "
                    f"HistoryEmbeddingCollectionSharder, got {kind!r}: use 'row_wise'"
                )
            if config.use_virtual_table or config.total_num_buckets is not None:
                raise NotImplementedError(
                    f"the table {config.name!r} must have as many rows as ids, and no buckets, "
                    "with HistoryEmbeddingCollectionSharder, got use_virtual_table="
                    f"{config.use_virtual_table} and total_num_buckets="
                    f"{config.total_num_buckets}: use EmbeddingCollectionSharder"
                )
        _check_codecs(self.qcomm_codecs_registry, module.embedding_dim())
        return ShardedHistoryEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that a planner may choose."""
        return list(SHARDING_TYPES)


def _check_codecs(registry: dict[str, QuantizedCommCodecs] | None, width: int) -> None:
    """Raise an error unless codecs can encode any number of rows: otherwise they would fail on some
    ranks only, and the others would wait forever.
    """
    codecs = _sequence_codecs(registry)
    for codec in (codecs.forward, codecs.backward) if codecs else ():
        try:
            codec.calc_quantized_size(width, codec.create_context())
        except (AssertionError, RuntimeError) as error:
            raise NotImplementedError(
                f"qcomm_codecs_registry must have codecs that divide rows of {width} columns "
                f"evenly with HistoryEmbeddingCollectionSharder, got one for which {error}: use "
                "FP16 or BF16"
            ) from error
