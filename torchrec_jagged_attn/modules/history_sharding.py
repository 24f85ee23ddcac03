"""``HistoryEmbeddingCollectionSharder``: rows of histories stay with their shard.

TorchRec sends each row of a sequence to the rank of its sample. Here rows of targets travel so, and
histories go another way: their ids are sorted by owner, which looks the rows up and keeps them for
:mod:`torchrec_jagged_attn.modules.owned_rows`. Rows of histories that an attention must have whole
travel, too, but in one copy. All go through one lookup, so that a row that both a target and
histories have is updated once.

TorchRec has no public way to this. Here and in ``history_planner.py``, ``lookup_rows.py`` and
``lookup_bags.py`` are all of its private names that are read; ``test_rows_that_stay.py`` and
``test_planner.py`` of ``tests/torchrec`` fail where they change.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist, KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_jagged_attn.modules.batch_checks import (
    check_equal_lengths,
    check_single_rows,
    has_no_sample,
    one_sample_without_ids,
)
from torchrec_jagged_attn.modules.owned_rows import OwnedRows, RemoteHistory, start_exchange

__all__ = [
    "HistoryEmbeddingCollectionSharder",
    "HistoryFeatures",
    "ShardedHistoryEmbeddingCollection",
    "set_histories",
]

SHARDING_TYPES = (
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)


class HistoryFeatures(NamedTuple):
    """What an EmbeddingCollection of a TargetAttentionEmbeddingBagCollection knows of a history.

    Attributes:
        feature: its key in batches.
        stays: whether attention can do with rows that stay.
        timestamps: their key, or empty.
        request_time: its key, or empty.
        is_weighted: whether batches have prior weights.
    """

    feature: str
    stays: bool
    timestamps: str
    request_time: str
    is_weighted: bool

    @property
    def has_ages(self) -> bool:
        return self.stays and bool(self.timestamps)

    @property
    def has_weights(self) -> bool:
        return self.stays and self.is_weighted

    @property
    def num_columns(self) -> int:
        """Numbers that are sent of each row: its id and, where it stays, its place, and age and
        weight if there are any.
        """
        return 1 + self.stays + self.has_ages + self.has_weights


def set_histories(collection: nn.Module, histories: dict[str, HistoryFeatures]) -> None:
    """Tell the sharder which rows of ``collection`` are histories, by what it calls them."""
    collection.__dict__["_histories"] = histories


def histories_of(collection: nn.Module) -> dict[str, HistoryFeatures]:
    return collection.__dict__.get("_histories", {})


class _HistoryDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Ids of one history, and what else is sent of each row, to the owners of the rows.

    A pipeline looks for ``_dist``, and exchanges the sizes of all such in one.

    Args:
        group: of the ranks.
        history: what is sent.
        owner: the rank that has the whole table; None if each has as many rows.
        num_embeddings: of the table.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        history: HistoryFeatures,
        owner: int | None,
        num_embeddings: int,
    ) -> None:
        super().__init__()
        self.history, self._num_ranks = history, group.size()
        self._is_whole, self._rows_per_rank = owner is not None, -(-num_embeddings // group.size())
        self._dist = KJTAllToAll(
            group, [int(owner is None or rank == owner) for rank in range(group.size())]
        )
        self.unbucketize_permute_tensor: Tensor | None = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, features: KeyedJaggedTensor, history: JaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        lengths = history.lengths()
        # FBGEMM checks bounds, but takes -1 for no row: ids below zero come to lie above all.
        ids = history.values().long() & torch.iinfo(torch.int64).max
        num_samples, num_rows = lengths.shape[0], ids.shape[0]
        device = ids.device
        sample = torch.arange(num_samples, device=device).repeat_interleave(
            lengths, output_size=num_rows
        )
        columns = [ids]
        if self.history.stays:
            ends = history.offsets()[1:].long()
            columns.append(torch.arange(num_rows, device=device) - ends[sample])
            if self.history.has_ages:
                columns.append(_ages(features, self.history, history, sample, ends))
            if self.history.has_weights:
                columns.append(history.weights().detach().double().view(torch.int64))
        values, counts = torch.stack(columns, dim=1), lengths
        if not self._is_whole:
            owner = (ids // self._rows_per_rank).clamp_(0, self._num_ranks - 1)
            values[:, 0] -= owner * self._rows_per_rank
            cell, order = (owner * num_samples + sample).int().sort(stable=True)
            values = values[order]
            num_cells = self._num_ranks * num_samples
            cells = torch.arange(num_cells + 1, dtype=torch.int32, device=device)
            counts = torch.searchsorted(cell, cells).diff()
            if not self.history.stays:
                self.unbucketize_permute_tensor = order.argsort()
        sent = KeyedJaggedTensor(
            [self.history.feature] * (1 if self._is_whole else self._num_ranks),
            values.flatten(),
            lengths=(counts * self.history.num_columns).to(lengths.dtype),
            stride=num_samples,
        )
        return self._dist(sent)


def _ages(
    features: KeyedJaggedTensor,
    of: HistoryFeatures,
    history: JaggedTensor,
    sample: Tensor,
    ends: Tensor,
) -> Tensor:
    """``[N]`` int64: at the time of the request, or else of the newest row. Zero of what is newer,
    the largest number of what int64 does not hold.
    """
    timestamps = features[of.timestamps]
    check_equal_lengths(timestamps, of.timestamps, history, of.feature)
    times = timestamps.values().long()
    if of.request_time:
        request_time = features[of.request_time]
        if sample.numel() > 0:  # what stands for a batch without samples has no time
            check_single_rows([request_time], [of.request_time], "request_time", "integer")
        references = request_time.values().long()[sample]
    else:
        references = times[ends[sample] - 1]
    ages = references - times
    ages.masked_fill_(ages < 0, torch.iinfo(torch.int64).max)
    return ages.masked_fill_(times > references, 0)


class _Awaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """What travels by TorchRec, and histories."""

    def __init__(
        self,
        travelling: EmbeddingCollectionAwaitable,
        histories: dict[str, Callable[[], JaggedTensor]],
    ) -> None:
        super().__init__()
        self._travelling, self._histories = travelling, histories

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        histories = {name: wait() for name, wait in self._histories.items()}
        return {**self._travelling.wait(), **histories}


class _Part(NamedTuple):
    """The features of one kind of sharding, by the names that the collection has for their rows.

    Attributes:
        travelling: names, and features in batches, of what goes TorchRec's way.
        histories: names and dists of histories.
        local: names, and features in batches, of what this rank looks up, in the order of its
            lookup.
    """

    travelling: dict[str, str]
    histories: dict[str, _HistoryDist]
    local: dict[str, str]


class _Received(NamedTuple):
    """What this rank has got of a part.

    Attributes:
        travelling: the ids of what goes TorchRec's way, if anything does.
        histories: what was sent of each, by their names.
        ids: of all rows that this rank looks up.
    """

    travelling: KeyedJaggedTensor | None
    histories: dict[str, KeyedJaggedTensor]
    ids: KeyedJaggedTensor


class ShardedHistoryEmbeddingCollection(ShardedEmbeddingCollection):
    """An EmbeddingCollection on several ranks, which gives each history as a
    :class:`RemoteHistory` or, where it cannot stay, as a JaggedTensor.
    """

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        group = self._env.process_group
        assert group is not None
        self._group: dist.ProcessGroup = group
        self._parts: list[_Part] = []
        self._orders: dict[tuple[Any, ...], tuple[list[int], Tensor]] = {}
        self._output_dists = [
            self._add_part(kind, sharding, histories_of(module), output_dist)
            for (kind, sharding), output_dist in zip(
                self._sharding_type_to_sharding.items(), self._output_dists, strict=True
            )
        ]
        self._has_uninitialized_input_dist = False

    def _add_part(
        self,
        kind: str,
        sharding: Any,
        histories: dict[str, HistoryFeatures],
        output_dist: nn.Module,
    ) -> nn.Module:
        """What travels, and what stays, of one kind of sharding; returns the dist of rows that
        travel, TorchRec's ``output_dist`` if these are all.
        """
        group = self._group
        names = dict(zip(sharding.embedding_names(), sharding.feature_names(), strict=True))
        owners: dict[str, int | None] = dict.fromkeys(names)
        if kind == ShardingType.DATA_PARALLEL.value:
            histories = {}
        if kind == ShardingType.TABLE_WISE.value:
            counts = enumerate(sharding.features_per_rank())
            ranks = [rank for rank, count in counts for _ in range(count)]
            owners = dict(zip(names, ranks, strict=True))
        sizes = {
            name: table.num_embeddings
            for table in sharding.embedding_tables()
            for name in table.embedding_names
        }
        part = _Part(
            travelling={name: of for name, of in names.items() if name not in histories},
            histories={
                name: _HistoryDist(group, histories[name], owners[name], sizes[name])
                for name in names
                if name in histories
            },
            local={name: of for name, of in names.items() if owners[name] in (None, group.rank())},
        )
        self._parts.append(part)
        options = self._device, self.qcomm_codecs_registry
        if not part.histories:
            self._input_dists.append(sharding.create_input_dist())
        elif part.travelling and kind == ShardingType.TABLE_WISE.value:
            counts = Counter(owners[name] for name in part.travelling)
            per_rank = [counts[rank] for rank in range(group.size())]
            self._input_dists.append(TwSparseFeaturesDist(group, per_rank))
            output_dist = TwSequenceEmbeddingDist(group, per_rank, *options)
        elif part.travelling:
            of_each = [sizes[name] for name in part.travelling]
            self._input_dists.append(
                RwSparseFeaturesDist(
                    group, len(of_each), of_each, device=self._device, is_sequence=True
                )
            )
            output_dist = RwSequenceEmbeddingDist(group, len(of_each), *options)
        self._input_dists += part.histories.values()
        return output_dist

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
        awaitables, dists = [], iter(self._input_dists)
        with torch.no_grad():
            for at, part in enumerate(self._parts):
                if part.travelling:
                    input_dist, travelling = next(dists), self._travelling(features, at)
                    awaitables.append(input_dist(travelling))
                    _add_context(ctx, travelling, input_dist)
                for input_dist in part.histories.values():
                    history = features[input_dist.history.feature]
                    awaitables.append(next(dists)(features, history))
                    at_home = KeyedJaggedTensor(
                        [input_dist.history.feature],
                        history.values(),
                        lengths=history.lengths(),
                        offsets=history.offsets(),
                    )
                    _add_context(ctx, at_home, input_dist)
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        contexts = iter(ctx.sharding_contexts)
        awaitables, at_home, names = [], [], []
        histories: dict[str, Callable[[], JaggedTensor]] = {}
        for part, received, lookup, output_dist in zip(
            self._parts, self._received(input), self._lookups, self._output_dists, strict=True
        ):
            rows = self._look_up(lookup, received.ids, part)
            if received.travelling is not None:
                features, context = received.travelling, next(contexts)
                context.lengths_after_input_dist = features.lengths().view(-1, features.stride())
                moved = [rows[name] for name in part.local if name in part.travelling]
                awaitables.append(output_dist(torch.cat(moved or [rows[""]]), context))
                at_home.append(context.features_before_input_dist)
                names.append(list(part.travelling))
            for name, sent in received.histories.items():
                owned = rows[name if name in rows else ""]
                history = part.histories[name].history
                histories[name] = self._history(history, owned, next(contexts), sent)
        travel = EmbeddingCollectionAwaitable(
            awaitables, at_home, names, EmbeddingCollectionContext()
        )
        return _Awaitable(travel, histories)

    def _travelling(self, features: KeyedJaggedTensor, part: int) -> KeyedJaggedTensor:
        """The features of a part that go TorchRec's way."""
        key = part, *features.keys()
        if key not in self._orders:
            order = [features.keys().index(name) for name in self._parts[part].travelling.values()]
            device = features.values().device
            self._orders[key] = order, torch.tensor(order, dtype=torch.int32, device=device)
        return features.permute(*self._orders[key])

    def prefetch(
        self,
        dist_input: KJTList,
        forward_stream: torch.Stream | None = None,
        ctx: EmbeddingCollectionContext | None = None,
    ) -> None:
        """Prepare the lookups of :meth:`compute_and_output_dist`."""
        ids = [received.ids for received in self._received(dist_input)]
        super().prefetch(KJTList(ids), forward_stream, ctx)  # pyright: ignore[reportArgumentType]

    def _received(self, input: KJTList) -> Iterator[_Received]:
        """What has come for each part."""
        features = iter(input)
        for part in self._parts:
            ids: dict[str, Tensor] = {}
            travelling = next(features) if part.travelling else None
            if travelling is not None:
                names = [name for name in part.local if name in part.travelling]
                counts = travelling.length_per_key()
                ids |= zip(names, travelling.values().split(counts), strict=True)
            histories = {name: next(features) for name in part.histories}
            for name, sent in histories.items():
                num_columns = part.histories[name].history.num_columns
                ids[name] = sent.values().view(-1, num_columns)[:, 0]
            local = [ids[name] for name in part.local]
            joined = torch.cat(local or [torch.empty(0, dtype=torch.int64, device=self._device)])
            counts = [x.shape[0] for x in local]
            # From pinned memory: a copy from any other waits for the device.
            lengths = torch.tensor(counts, dtype=torch.int32, pin_memory=joined.is_cuda)
            lengths = lengths.to(joined.device, non_blocking=True)
            yield _Received(
                travelling,
                histories,
                KeyedJaggedTensor(
                    list(part.local.values()),
                    joined,
                    lengths=lengths,
                    stride=1,
                    length_per_key=counts,
                ),
            )

    def _look_up(self, lookup: nn.Module, ids: KeyedJaggedTensor, part: _Part) -> dict[str, Tensor]:
        """Rows by their names, and ``""`` for none. Gradients of histories are divided by the
        number of ranks if those that travel are.
        """
        counts = ids.length_per_key()
        rows = lookup(ids)
        if self.post_lookup_tracker_fn is not None:
            self.post_lookup_tracker_fn(ids, rows, self, None)
        rows = rows.view(-1, self._embedding_dim)
        share = 1 / self._env.world_size if get_gradient_division() else 1.0
        shares = [share if name in part.histories else 1.0 for name in part.local]
        split = _SplitRows.apply(rows, [*counts, 0], [*shares, 1.0])
        return dict(zip([*part.local, ""], split, strict=True))

    def _history(
        self,
        history: HistoryFeatures,
        rows: Tensor,
        context: SequenceShardingContext,
        sent: KeyedJaggedTensor,
    ) -> Callable[[], JaggedTensor]:
        """One history, of the ``rows`` of it that this rank has, to be waited for."""
        num_columns, at_home = history.num_columns, context.features_before_input_dist
        assert at_home is not None
        columns = sent.values().view(-1, num_columns).unbind(1)
        per_home = [n // num_columns for n in context.output_splits]
        if not history.stays:
            per_owner = [n // num_columns for n in context.input_splits]
            get_values = start_exchange(rows, per_owner, per_home, self._group)
            order = context.unbucketize_permute_tensor

            def whole() -> JaggedTensor:
                values = get_values() if order is None else _Permute.apply(get_values(), order)
                return JaggedTensor(values, lengths=at_home.lengths(), offsets=at_home.offsets())

            return whole
        samples = context.batch_size_per_rank
        lengths = sent.lengths().long() // num_columns
        if not sent.keys():  # of a rank that has no part of the table
            lengths = lengths.new_zeros(sum(samples))
        owned = OwnedRows(
            rows,
            lengths,
            places=columns[1].contiguous(),
            ages=columns[2].contiguous() if history.has_ages else None,
            prior_weights=columns[-1].contiguous().view(torch.float64).float()
            if history.has_weights
            else None,
            rows_per_home=per_home,
            samples_per_home=samples,
            group=self._group,
        )
        num_rows = at_home.values().shape[0]
        return functools.partial(RemoteHistory, at_home.lengths(), num_rows, owned)


def _add_context(
    ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor, input_dist: nn.Module
) -> None:
    ctx.sharding_contexts.append(
        SequenceShardingContext(
            features_before_input_dist=features,
            unbucketize_permute_tensor=getattr(input_dist, "unbucketize_permute_tensor", None),
        )
    )


class _SplitRows(torch.autograd.Function):
    """``x.split(counts)``, whose gradients are multiplied by ``factors``, in the same copy."""

    @staticmethod
    def forward(ctx, x, counts, factors):
        ctx.counts, ctx.factors = counts, factors
        ctx.shape = x.shape
        return x.split(counts)

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0].new_empty(ctx.shape)
        for part, of_part, factor in zip(grad.split(ctx.counts), grads, ctx.factors, strict=True):
            torch.mul(of_part, factor, out=part)
        return grad, None, None


class _Permute(torch.autograd.Function):
    """``x[order]``, of each row once: the gradient is written, not added up."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None


class HistoryEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards EmbeddingCollections such that rows of histories stay on the ranks that own them.

    It takes the place of ``EmbeddingCollectionSharder`` among the ``sharders`` of a
    ``DistributedModelParallel`` and its planner. Histories of
    :class:`TargetAttentionEmbeddingBagCollection` that a single attention reads row by row are then
    attended where their rows are; those with encoder layers or other histories beside
    them travel whole. All else, and a single rank, is as with TorchRec's. Results differ
    from those of one rank by rounding.

    Tables of histories may be sharded row-wise, the best, table-wise or be data-parallel.
    :class:`HistoryEmbeddingShardingPlanner` knows what each costs.

    Args:
        fused_params: as for ``EmbeddingCollectionSharder``.
        qcomm_codecs_registry: likewise, for rows of all but histories. Those of histories that
            travel, queries and results are sent as they are.

    Raises:
        NotImplementedError: a table of histories is sharded by column.
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
        if not histories_of(module) or env.world_size == 1:
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
