"""``HistoryEmbeddingCollectionSharder``: rows of histories stay with their shard.

Ids of all features go to the owners of their rows, see ``id_exchange.py``. Owners look them up, all
that are in a table at once, so that a row that both a target and histories have is updated once.
Rows of histories stay there for :mod:`torchrec_jagged_attn.modules.owned_rows`. All others are sent
back to the samples, such as those of targets; and histories that an attention must have whole, in
one copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.collection.batch_checks import has_no_sample, one_sample_without_ids
from torchrec_jagged_attn.collection.sharding.id_exchange import (
    Feature,
    HistoryFeatures,
    IdExchange,
    Received,
)
from torchrec_jagged_attn.collection.sharding.looked_up import (
    SPARE,
    Capacities,
    LocalHistory,
    LookedUp,
    Padding,
    ReplicatedRows,
    SentFeatures,
    SentRows,
    block_sizes,
    local_capacity,
    local_tensors,
    sent_capacity,
    static_local_ids,
)
from torchrec_jagged_attn.collection.sharding.padding import PaddedJaggedTensor, Segments
from torchrec_jagged_attn.modules.owned_rows import OwnedRows, RemoteHistory, start_exchange

SHARDING_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


def set_histories(collection: nn.Module, histories: dict[str, HistoryFeatures]) -> None:
    """Tell the sharder which rows of ``collection`` are histories, by their names in it."""
    collection.__dict__["_histories"] = histories


def set_fixed_rows(collection: nn.Module, names: set[str]) -> None:
    """Tell the sharder which features of ``collection`` have one row per sample or candidate, by
    their names in its output.
    """
    collection.__dict__["_fixed_rows"] = names


def histories_of(collection: nn.Module) -> dict[str, HistoryFeatures]:
    return collection.__dict__.get("_histories", {})


def fixed_rows_of(collection: nn.Module) -> set[str]:
    return collection.__dict__.get("_fixed_rows", set())


def _codecs_of(registry: dict[str, QuantizedCommCodecs] | None) -> QuantizedCommCodecs | None:
    return (registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)


class _Rows(LazyAwaitable[dict[str, JaggedTensor]]):
    """Rows received from owner ranks, which are waited for, and rows that are not sent."""

    def __init__(
        self, local: dict[str, JaggedTensor], sent: Sequence[Callable[[], dict[str, JaggedTensor]]]
    ) -> None:
        super().__init__()
        self._local, self._sent = local, sent

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        if self._result is None:  # else a hook has looked at it
            sent = {name: rows for wait in self._sent for name, rows in wait().items()}
            self._result = sent | self._local
        return self._result


class ShardedHistoryEmbeddingCollection(ShardedEmbeddingCollection):
    """An EmbeddingCollection on several ranks, which gives each history as a
    :class:`RemoteHistory` or, where it cannot stay, as a JaggedTensor.
    """

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        group = self._env.process_group
        assert group is not None
        histories, fixed_rows = histories_of(module), fixed_rows_of(module)
        self._capacities: dict[str, str | None] = {}  # names, see ``padding.py``
        self._replicated: dict[int, dict[str, str]] = {}
        features: list[Feature] = []
        for at, (kind, sharding) in enumerate(self._sharding_type_to_sharding.items()):
            names = dict(zip(sharding.embedding_names(), sharding.feature_names(), strict=True))
            self._capacities |= {
                name: None
                if name in fixed_rows
                else histories[name].capacity
                if name in histories
                else key
                for name, key in names.items()
            }
            if kind == ShardingType.DATA_PARALLEL.value:
                self._replicated[at] = names
                continue
            owners = {name: [*range(group.size())] for name in names}
            if kind == ShardingType.TABLE_WISE.value:
                counts = enumerate(sharding.features_per_rank())
                ranks = [rank for rank, count in counts for _ in range(count)]
                owners = {name: [rank] for name, rank in zip(names, ranks, strict=True)}
            sizes = {
                name: -(-table.num_embeddings // len(owners[name]))
                for table in sharding.embedding_tables()
                for name in table.embedding_names
            }
            features += [
                Feature(
                    name,
                    key,
                    at,
                    owners[name],
                    sizes[name],
                    histories.get(name),
                    self._capacities[name],
                )
                for name, key in names.items()
            ]
        assert self._device is not None
        # A training pipeline may replace the group of the exchange of ids.
        self._group = group
        self._exchange = IdExchange(features, group, self._device)
        rank, num_ranks = group.rank(), group.size()
        self._sent = [SentFeatures.create(x, rank, num_ranks) for x in self._exchange.groups]
        self._local_histories = [x for x in self._exchange.features if x.stays]
        self._codecs = _codecs_of(self.qcomm_codecs_registry)
        self._orders: dict[tuple[str, ...], list[tuple[list[int], Tensor]]] = {}
        self._has_uninitialized_input_dist = False

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        features = maybe_td_to_kjt(features)
        if features.variable_stride_per_key():
            raise NotImplementedError(
                "features must have one batch size with HistoryEmbeddingCollectionSharder, got "
                "several: give DistributedModelParallel an EmbeddingCollectionSharder"
            )
        if has_no_sample(features):
            features = one_sample_without_ids(features)
        with torch.no_grad():
            ctx.input_features += [features.permute(*x) for x in self._orders_in(features)]
            sizes: Any = self._exchange.start(features)
        return KJTListSplitsAwaitable([sizes], ctx)

    def _orders_in(self, features: KeyedJaggedTensor) -> list[tuple[list[int], Tensor]]:
        """Where the features of each lookup are whose tables are replicated."""
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
        """What each lookup looks up."""
        received: Received = input[0]  # pyright: ignore[reportAssignmentType]
        replicated = dict(zip(self._replicated, ctx.input_features, strict=True))
        return [(received.ids | replicated)[at] for at in range(len(self._lookups))]

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self.exchange(self.look_up(ctx, input))

    def look_up(
        self, ctx: EmbeddingCollectionContext, input: KJTList, detach: bool = False
    ) -> LookedUp:
        """Look up all rows of which this rank is an owner rank. With ``detach``, backward does not
        reach the tables.
        """
        received: Received = input[0]  # pyright: ignore[reportAssignmentType]
        rows: dict[int, Tensor] = {}
        replicated: list[ReplicatedRows] = []
        for at, (lookup, ids) in enumerate(zip(self._lookups, self._ids(ctx, input), strict=True)):
            found = lookup(ids)
            if self.post_lookup_tracker_fn is not None:
                self.post_lookup_tracker_fn(ids, found, self, None)
            found = found.view(-1, self._embedding_dim)
            if detach:
                found = found.detach().requires_grad_()
            if at not in self._replicated:
                rows[at] = found
                continue
            names = [*self._replicated[at]]
            capacities = [self._capacities[name] for name in names]
            lengths = ids.lengths().view(len(names), -1)
            replicated.append(
                ReplicatedRows(
                    f"lookup {at}", names, capacities, found, lengths, ids.length_per_key()
                )
            )
        parts = [*self._exchange.groups, *([x] for x in self._local_histories)]
        share = 1 / self._env.world_size if get_gradient_division() else 1.0
        layout = _Layout(self._exchange.local, received.rows_of_homes, [*rows])
        distributed = iter(_Distribute.apply(layout, parts, share, *rows.values()))
        sent = [self._sent_rows(received, i, next(distributed)) for i in range(len(self._sent))]
        histories = [
            LocalHistory(
                feature,
                received.counts[feature.name],
                OwnedRows(
                    next(distributed),
                    *received.owned[feature.name],
                    samples_per_rank=received.samples_of_homes,
                    owners=feature.owners,
                    group=self._group,
                    queries_per_rank=received.queries_per_rank,
                ),
            )
            for feature in self._local_histories
        ]
        if self.post_odist_tracker_fn is not None:
            self.post_odist_tracker_fn()
        return LookedUp(
            received.lengths,
            self._exchange.features,
            received.samples_of_homes,
            sent,
            histories,
            replicated,
            received.paddings is not None,
        )

    def _sent_rows(self, received: Received, i: int, rows: Tensor) -> SentRows:
        sent = self._sent[i]
        names = [feature.name for feature in sent.features]
        recv_counts, send_counts = (
            [counts.get(name, 0) for counts in per_rank for name in names]
            for per_rank in (received.rows_of_owners, received.rows_of_homes)
        )
        counts = [received.counts[name] for name in names]
        padding = received.paddings[i] if received.paddings else None
        return SentRows(sent, rows, send_counts, recv_counts, received.orders[i], counts, padding)

    def sizes(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> tuple[dict[str, int], tuple[Any, ...]]:
        """The numbers of rows to look up, by the names of their capacities, and all other numbers
        of the host that :meth:`look_up` and :meth:`exchange` read.
        """
        received: Received = input[0]  # pyright: ignore[reportAssignmentType]
        names: list[str | None] = []
        counts: list[int] = []
        for sent in self._sent:
            names += sent.send_capacities + sent.recv_capacities
            for per_rank in (received.rows_of_homes, received.rows_of_owners):
                counts += [x.get(feature.name, 0) for x in per_rank for feature in sent.features]
        for feature in self._exchange.features:
            names.append(feature.capacity)
            counts.append(received.counts[feature.name])
        for feature in self._local_histories:
            names.append(local_capacity(feature, self._group.rank()))
            counts.append(sum(x.get(feature.name, 0) for x in received.rows_of_homes))
        for features, ids in zip(self._replicated.values(), ctx.input_features, strict=True):
            names += [self._capacities[name] for name in features]
            counts += ids.length_per_key()
        sizes = [*zip(names, counts, strict=True)]
        fixed = [n for name, n in sizes if name is None]
        constants = *received.samples_of_homes, *received.lengths.shape, *fixed
        return {name: n for name, n in sizes if name is not None}, constants

    def id_tensors(self, input: KJTList) -> dict[str, Tensor | Segments]:
        """All tensors that :meth:`look_up` reads, if no table is replicated."""
        received: Received = input[0]  # pyright: ignore[reportAssignmentType]
        tensors: dict[str, Tensor | Segments] = {"lengths": received.lengths}
        for i in range(len(self._sent)):
            sent = self._sent_rows(received, i, received.lengths)
            tensors |= sent.order_tensors()
        for at, ids in received.ids.items():
            names, counts = self._id_segments(at, received)
            tensors[f"ids {at}"] = Segments(ids.values(), counts, names, SPARE, fill=None)
        for feature in self._local_histories:
            ids = received.owned[feature.name]
            tensors |= local_tensors(feature, ids, received.counts[feature.name], self._group)
        return tensors

    def padded_input(
        self, input: KJTList, tensors: dict[str, Tensor], capacities: Capacities
    ) -> Any:
        """An ``input`` of :meth:`look_up` that reads the static counterparts of
        :meth:`id_tensors`, and whose numbers of rows are ``capacities``.
        """
        received: Received = input[0]  # pyright: ignore[reportAssignmentType]
        ids: dict[int, KeyedJaggedTensor] = {}
        per_source: list[dict[str, int]] = [{} for _ in received.rows_of_homes]
        per_owner: list[dict[str, int]] = [{} for _ in received.rows_of_owners]
        for at, x in received.ids.items():
            blocks = iter(block_sizes(*self._id_segments(at, received), capacities))
            per_key: list[int] = []
            for feature in self._local_features(at):
                ranks = per_source[:1] if feature.stays else per_source
                sizes = [next(blocks) for _ in ranks]
                for counts in per_source:
                    counts[feature.name] = 0
                for counts, size in zip(ranks, sizes, strict=True):
                    counts[feature.name] = size
                per_key.append(sum(sizes))
            offsets = torch.tensor([0, *itertools.accumulate(per_key)], device=x.values().device)
            ids[at] = KeyedJaggedTensor(
                x.keys(), tensors[f"ids {at}"], offsets=offsets, stride=1, length_per_key=per_key
            )
        paddings = []
        for i, sent in enumerate(self._sent):
            counts = self._sent_rows(received, i, received.lengths).recv_counts
            blocks = block_sizes(sent.recv_capacities, counts, capacities)
            ends = tensors[f"{sent.name}: ends of rows received"]
            paddings.append(Padding.create(ends, sent.recv_capacities, blocks))
            for j, size in enumerate(blocks):
                feature = sent.features[j % len(sent.features)]
                per_owner[j // len(sent.features)][feature.name] = size
        return [
            Received(
                tensors["lengths"],
                {
                    feature.name: capacities(feature.capacity, received.counts[feature.name])
                    for feature in self._exchange.features
                },
                [tensors[f"{sent.name}: order"] for sent in self._sent],
                ids,
                {x.name: static_local_ids(x, tensors) for x in self._local_histories},
                per_owner,
                per_source,
                received.samples_of_homes,
                paddings,
                [],
            )
        ]

    def _local_features(self, lookup: int) -> list[Feature]:
        return [feature for feature in self._exchange.local if feature.lookup == lookup]

    def _id_segments(self, lookup: int, received: Received) -> tuple[list[str | None], list[int]]:
        """Names of capacities and numbers of ids of a lookup: of each local history one, and of
        each other feature those of each source rank.
        """
        rank, names, counts = self._group.rank(), [], []
        for feature in self._local_features(lookup):
            per_source = [x[feature.name] for x in received.rows_of_homes]
            if feature.stays:
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
        sent = [self._send(x, lengths) for x in looked_up.sent]
        local: dict[str, JaggedTensor] = {}
        for x in looked_up.replicated:
            local |= _jagged_tensors(
                x.features,
                x.rows.split(x.counts),
                x.lengths.unbind(),
                x.capacities if looked_up.is_padded else None,
            )
        for x in looked_up.histories:
            name = x.feature.name
            local[name] = RemoteHistory(lengths[name], x.num_rows, x.owned)
        return _Rows(local, sent)

    def _send(
        self, x: SentRows, lengths: dict[str, Tensor]
    ) -> Callable[[], dict[str, JaggedTensor]]:
        """Start to send rows. Returns a function that waits for the rows of this rank's samples."""
        features = x.sent.features
        codecs = self._codecs if features[0].history is None else None
        recv_splits, send_splits = map(x.sent.splits, (x.recv_counts, x.send_counts))
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
                rows = _Permute.apply(rows, order, padding is None)
            local_lengths = [lengths[name] for name in names]
            return _jagged_tensors(names, rows.split(x.counts), local_lengths, capacities)

        return wait


def _jagged_tensors(
    names: Sequence[str],
    rows: Sequence[Tensor],
    lengths: Sequence[Tensor],
    capacities: Sequence[str | None] | None,
) -> dict[str, JaggedTensor]:
    """JaggedTensors by name, with padding if their capacity has a name."""
    if capacities is None:
        capacities = [None] * len(names)
    return {
        name: (JaggedTensor if capacity is None else PaddedJaggedTensor)(values, lengths=x)
        for name, values, x, capacity in zip(names, rows, lengths, capacities, strict=True)
    }


class _Layout:
    """How the rows that ``lookups`` give are divided into ``local`` features, in the order of the
    lookups, and homes, which have ``rows_of_homes`` of each.
    """

    def __init__(
        self, local: list[Feature], rows_of_homes: list[dict[str, int]], lookups: list[int]
    ) -> None:
        self.homes, self.lookups = rows_of_homes, lookups
        self.ranges: dict[str, tuple[int, int, int]] = {}
        ends = dict.fromkeys(lookups, 0)
        for of in local:
            count = sum(of_home[of.name] for of_home in rows_of_homes)
            self.ranges[of.name] = lookups.index(of.lookup), ends[of.lookup], count
            ends[of.lookup] += count

    def part(self, features: list[Feature], rows: Sequence[Tensor]) -> Tensor:
        """The rows of ``features``, home by home. A copy, unless there is one feature."""
        names = [of.name for of in features if of.name in self.ranges]
        if len(names) > 1:
            pieces = [self._of(name, rows).split(self._counts(name)) for name in names]
            return torch.cat([*itertools.chain(*zip(*pieces, strict=True))])
        if names:
            return self._of(names[0], rows)
        return rows[self.lookups.index(features[0].lookup)][:0]

    def put_back(
        self, features: list[Feature], part: Tensor, factor: float, rows: Sequence[Tensor]
    ) -> None:
        """Multiply a ``part`` by a factor, and write it where it belongs."""
        names = [of.name for of in features if of.name in self.ranges]
        if len(names) == 1:
            torch.mul(part, factor, out=self._of(names[0], rows))
            return
        counts = [of_home[name] for of_home in self.homes for name in names]
        pieces = part.mul(factor).split(counts)
        of_names = [pieces[i :: len(names)] for i in range(len(names))]
        targets = [x for name in names for x in self._of(name, rows).split(self._counts(name))]
        if targets:
            torch._foreach_copy_(targets, [*itertools.chain(*of_names)])  # pyright: ignore

    def _of(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        lookup, start, count = self.ranges[name]
        return rows[lookup].narrow(0, start, count)

    def _counts(self, name: str) -> list[int]:
        return [of_home[name] for of_home in self.homes]


class _Distribute(torch.autograd.Function):
    """Rows of the lookups, as ``parts``, which have each of them once. Gradients are multiplied by
    ``factor``.
    """

    @staticmethod
    def forward(ctx, layout, parts, factor, *rows):
        ctx.layout, ctx.parts, ctx.factor = layout, parts, factor
        ctx.shapes = [x.shape for x in rows]
        return tuple(layout.part(features, rows) for features in parts)

    @staticmethod
    def backward(ctx, *grads):
        rows = [grads[0].new_empty(shape) for shape in ctx.shapes]
        for features, grad in zip(ctx.parts, grads, strict=True):
            ctx.layout.put_back(features, grad, ctx.factor, rows)
        return None, None, None, *rows


class _Permute(torch.autograd.Function):
    """``x[order]``. ``order`` has each row once, so that the gradient is written, not added up; or,
    unless ``is_permutation``, at most once, besides padding, whose gradient is zero.
    """

    @staticmethod
    def forward(ctx, x, order, is_permutation):
        ctx.save_for_backward(order)
        ctx.shape = None if is_permutation else x.shape
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        out = torch.empty_like(grad) if ctx.shape is None else grad.new_zeros(ctx.shape)
        return out.index_copy_(0, order, grad), None, None


class HistoryEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """An EmbeddingCollectionSharder that leaves history rows on the ranks that own them.

    It replaces ``EmbeddingCollectionSharder`` in ``sharders``, for ``DistributedModelParallel`` and
    its planner. Attention over the histories of a :class:`TargetAttentionEmbeddingBagCollection` is
    then computed where their rows are. History rows are still sent for encoder layers, and if one
    attention has several histories. All other features, and models on a single rank, are sharded as
    by ``EmbeddingCollectionSharder``. Results differ from those of one rank by rounding.

    Tables of histories may be row-wise, which is best, table-wise or data-parallel.
    :class:`HistoryEmbeddingShardingPlanner` estimates the cost of each.

    Args:
        fused_params: as for ``EmbeddingCollectionSharder``.
        qcomm_codecs_registry: codecs for the rows of all features other than histories. Queries,
            partial results, and history rows that are sent are not encoded.

    Raises:
        NotImplementedError: a table of histories is sharded by column, or codecs encode several
            rows together.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
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
        if not histories_of(module) or env.world_size == 1 or is_replicated:
            return super().shard(module, params, env, device, module_fqn)
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
        """Those that a planner may choose from."""
        return list(SHARDING_TYPES)


def _check_codecs(registry: dict[str, QuantizedCommCodecs] | None, width: int) -> None:
    """Codecs must encode single rows: of some numbers of rows, they would fail on one rank alone,
    for which the others would wait.
    """
    codecs = _codecs_of(registry)
    for codec in (codecs.forward, codecs.backward) if codecs else ():
        try:
            codec.calc_quantized_size(width, codec.create_context())
        except (AssertionError, RuntimeError) as error:
            raise NotImplementedError(
                f"qcomm_codecs_registry must have codecs that divide rows of {width} columns "
                f"evenly with HistoryEmbeddingCollectionSharder, got one for which {error}: use "
                "FP16 or BF16"
            ) from error
