"""``ModelExchange``: one exchange of ids of fixed size, in place of input dists of sharded modules.

Lookups get the same ids, and contexts with the same numbers, as from the input dists.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    ShardedEmbeddingBagCollection,
    _create_mean_pooling_divisor,
)
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_jagged_attn.collection.sharding.fixed_exchange import (
    ExchangedIds,
    FixedExchange,
)
from torchrec_jagged_attn.collection.sharding.id_exchange import (
    Received,
    one_bag_per_feature,
    owned_ids,
)
from torchrec_jagged_attn.collection.sharding.id_router import (
    NUM_VALUES,
    IdRouter,
    Route,
    as_weights,
)
from torchrec_jagged_attn.collection.sharding.sharder import ShardedHistoryEmbeddingCollection


class ModuleRoutes(Protocol):
    """The routes of a sharded module."""

    routes: list[Route]
    lookups: list[list[int]]  # indices of the routes of each lookup, in its order

    def result(self, ids: ExchangedIds, first: int, context: Any) -> Any:
        """Return the result of the input dist, and set the numbers of its ``context``.

        Args:
            ids: the exchanged ids of all modules.
            first: index of the first route of this module.
            context: the module's context of the batch.
        """
        ...


class HistoryRoutes:
    """Routes of an EmbeddingCollection with attention on the owner ranks of history rows."""

    def __init__(self, module: ShardedHistoryEmbeddingCollection, index: int) -> None:
        exchange = module._exchange
        self._features, self._groups = exchange.features, exchange.groups
        self._local_histories = module._local_histories
        self._owned = {x.name for x in exchange.owned_features}
        self.routes = exchange.routes(index)
        self._route = {feature.name: i for i, feature in enumerate(self._features)}
        names: dict[int, list[str]] = {feature.lookup: [] for feature in self._features}
        for feature in exchange.owned_features:
            names[feature.lookup].append(feature.name)
        self._names = names
        self.lookups = [[self._route[name] for name in xs] for xs in names.values()]
        self._replicated: list[tuple[list[str], list[int]]] = []
        for keys in module._replicated.values():
            first = len(self.routes)
            self.routes += [Route(index, key, [], 0, is_replicated=True) for key in keys.values()]
            self._replicated.append(([*keys.values()], [*range(first, len(self.routes))]))
        self.lookups += [routes for _, routes in self._replicated]

    def result(self, ids: ExchangedIds, first: int, context: Any) -> KJTList:
        sent = {name: ids.sent(first + i) for name, i in self._route.items()}
        received = {name: ids.received(first + self._route[name]) for name in self._owned}
        history_ids = {
            lookup: ids.owned([first + self._route[name] for name in names])[1]["ids"]
            for lookup, names in self._names.items()
        }
        keys = {feature.name: feature.key for feature in self._features}
        orders = []
        for group in self._groups:
            begin = first + self._route[group[0].name]
            is_sorted = len(group) == 1 and len(group[0].owners) == 1
            orders.append(None if is_sorted else ids.order(begin, begin + len(group)))
        for names, routes in self._replicated:
            lengths, replicated = ids.owned([first + i for i in routes])
            context.input_features.append(
                KeyedJaggedTensor(
                    names,
                    replicated["ids"],
                    lengths=lengths,
                    length_per_key=[sum(ids.received(first + i)) for i in routes],
                )
            )
        ranks = range(len(ids.samples_per_rank))
        received_ids = Received(
            ids.lengths(first, first + len(self._features)),
            {name: sum(counts) for name, counts in sent.items()},
            orders,
            {
                lookup: one_bag_per_feature(
                    [keys[name] for name in names],
                    history_ids[lookup],
                    [sum(received[name]) for name in names],
                )
                for lookup, names in self._names.items()
            },
            {
                x.name: owned_ids(x.history, *ids.owned([first + self._route[x.name]]))
                for x in self._local_histories
                if x.history is not None
            },
            [
                {x.name: sent[x.name][rank] for x in self._features if rank in x.owners}
                for rank in ranks
            ],
            [{name: n[rank] for name, n in received.items()} for rank in ranks],
            ids.samples_per_rank,
        )
        # Pipelines accept any object with ``record_stream`` in place of a KeyedJaggedTensor.
        return KJTList([received_ids])  # pyright: ignore[reportArgumentType]


class LookupRoutes:
    """Routes of lookups of TorchRec."""

    def __init__(
        self,
        shardings: Iterable[EmbeddingSharding],
        input_dists: Iterable[nn.Module],
        index: int,
        num_ranks: int,
        is_weighted: bool = False,
    ) -> None:
        self._is_weighted = is_weighted  # whether lookups read the weights of ids
        self.routes, self.lookups = [], []
        self.are_replicated: list[bool] = []  # whether each rank looks up its own samples
        for sharding, input_dist in zip(shardings, input_dists, strict=True):
            first, keys = len(self.routes), sharding.feature_names()
            owners, rows = [[*range(num_ranks)]] * len(keys), [0] * len(keys)
            if isinstance(input_dist, TwSparseFeaturesDist):
                counts = enumerate(sharding.features_per_rank())
                owners = [[rank] for rank, count in counts for _ in range(count)]
            elif isinstance(input_dist, RwSparseFeaturesDist):
                rows = input_dist._feature_block_sizes_tensor.tolist()  # pyright: ignore
            is_replicated = isinstance(input_dist, DpSparseFeaturesDist)
            self.routes += [
                Route(index, key, ranks, n, is_replicated)
                for key, ranks, n in zip(keys, owners, rows, strict=True)
            ]
            self.lookups.append([*range(first, len(self.routes))])
            self.are_replicated.append(is_replicated)

    def result(self, ids: ExchangedIds, first: int, context: Any) -> KJTList:
        features = []
        for routes, is_replicated in zip(self.lookups, self.are_replicated, strict=True):
            owned = [i for i in routes if ids.is_owned(first + i)]
            lengths, columns = ids.owned([first + i for i in owned])
            features.append(
                KeyedJaggedTensor(
                    [self.routes[i].key for i in owned],
                    columns["ids"],
                    as_weights(columns["weights"]) if self._is_weighted else None,
                    lengths=lengths,
                    stride=ids.num_samples if is_replicated else sum(ids.samples_per_rank),
                    length_per_key=[sum(ids.received(first + i)) for i in owned],
                )
            )
        return KJTList(features)


class BagRoutes(LookupRoutes):
    """Routes of an EmbeddingBagCollection."""

    def __init__(
        self, module: ShardedEmbeddingBagCollection, index: int, num_ranks: int, is_weighted: bool
    ) -> None:
        self._module: Any = module
        super().__init__(
            module._embedding_shardings, module._input_dists, index, num_ranks, is_weighted
        )

    def result(self, ids: ExchangedIds, first: int, context: Any) -> KJTList:
        module = self._module
        context.variable_batch_per_feature, context.inverse_indices = False, None
        if module._has_mean_pooling_callback:
            flat = ids.lengths(first, first + len(self.routes)).flatten()
            context.divisor = _create_mean_pooling_divisor(
                lengths=flat,
                keys=[route.key for route in self.routes],
                offsets=flat,  # only read if there are weights
                stride=ids.num_samples,
                stride_per_key=[ids.num_samples] * len(self.routes),
                dim_per_key=module._dim_per_key,
                pooling_type_to_rs_features=module._pooling_type_to_rs_features,
                embedding_names=module._embedding_names,
                embedding_dims=module._embedding_dims,
                variable_batch_per_feature=False,
                kjt_inverse_order=module._kjt_inverse_order,
                kjt_key_indices=module._kjt_key_indices,
                kt_key_ordering=module._kt_key_ordering,
            )
        for routes, is_replicated in zip(self.lookups, self.are_replicated, strict=True):
            context.sharding_contexts.append(
                EmbeddingShardingContext(
                    batch_size_per_rank=[] if is_replicated else ids.samples_per_rank,
                    batch_size_per_feature_pre_a2a=[ids.num_samples] * len(routes),
                )
            )
        return super().result(ids, first, context)


def _routes_of(module: Any, index: int, num_ranks: int, is_weighted: bool) -> ModuleRoutes | None:
    """Return the routes of a sharded module, or None if its input dist cannot be replaced.

    Args:
        module: the module.
        index: index of the KeyedJaggedTensor in a batch.
        num_ranks: number of ranks.
        is_weighted: whether its ids have weights.
    """
    if isinstance(module, ShardedHistoryEmbeddingCollection):
        return HistoryRoutes(module, index)
    options = (
        "_has_feature_processor",
        "_need_pos",
        "_keep_original_indices",
        "_has_multiple_blocks_per_shard",
        "zch_bucketize_row_pos",
    )
    if getattr(module, "_enable_feature_score_weight_accumulation", False) or not all(
        type(x) in (TwSparseFeaturesDist, RwSparseFeaturesDist, DpSparseFeaturesDist)
        and not any(getattr(x, option, None) for option in options)
        for x in module._input_dists
    ):
        return None
    if isinstance(module, ShardedEmbeddingCollection):
        shardings = module._sharding_type_to_sharding.values()
        return LookupRoutes(shardings, module._input_dists, index, num_ranks)
    if is_weighted and module._has_mean_pooling_callback:
        return None
    return BagRoutes(module, index, num_ranks, is_weighted)


class BatchExchange:
    """The exchange of one batch.

    Attributes:
        signature: number of samples, 0 of a batch that cannot be exchanged with fixed sizes; and
            the columns, modules and dtype of lengths that are exchanged.
    """

    def __init__(
        self,
        signature: tuple[int, Any],
        modules: Mapping[str, tuple[ModuleRoutes, int]],
        counts: dict[str, int],
        ids: ExchangedIds | None = None,
    ) -> None:
        self.signature, self._modules, self._counts, self._ids = signature, modules, counts, ids

    @property
    def is_fixed(self) -> bool:
        """Whether the batch is exchanged with fixed sizes."""
        return self._ids is not None

    def counts(self) -> dict[str, int]:
        """Return numbers of ids, by the names of their capacities."""
        return self._counts if self._ids is None else self._ids.counts()

    def is_complete(self) -> bool:
        """Return whether this rank has all ids of its rows. Waits for the numbers of ids."""
        return self._ids is None or self._ids.is_complete()

    def result(self, name: str, context: Any, ids: Any) -> Any:
        """Return the ids of a module, and set the numbers of its ``context``.

        Args:
            name: name of the module.
            context: the module's context of the batch.
            ids: the result of its input dist, for modules whose input dist is not replaced.
        """
        if self._ids is None or name not in self._modules:
            return ids
        routes, first = self._modules[name]
        return routes.result(self._ids, first, context)


class ModelExchange:
    """Replaces input dists of ``modules``, by name, by one exchange of fixed size.

    Until :meth:`fix` is called, the input dists exchange ids.

    Args:
        modules: sharded modules, by name.
        rank, num_ranks: this rank, and the number of ranks.
        device: device of the model.
    """

    def __init__(
        self, modules: Mapping[str, Any], rank: int, num_ranks: int, device: torch.device
    ) -> None:
        self._rank, self._num_ranks, self._device = rank, num_ranks, device
        kinds = ShardedEmbeddingCollection, ShardedEmbeddingBagCollection
        self._all_modules: dict[str, Any] = {
            name: module for name, module in modules.items() if isinstance(module, kinds)
        }
        self._features: dict[str, Any] = {}  # of one batch, by module
        self._inputs: dict[str, int] = {}  # index of the KeyedJaggedTensor, by module
        self._names_of_inputs: list[str] = []  # a module with each KeyedJaggedTensor
        self._router: IdRouter | None = None
        self._modules: dict[str, tuple[ModuleRoutes, int]] = {}
        self._fixed: FixedExchange | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether batches are exchanged with fixed sizes."""
        return self._fixed is not None

    def close(self) -> None:
        """Exchange further batches by the input dists, and delete CUDA graphs."""
        if self._fixed is not None:
            self._fixed.close()
            self._fixed = None

    def fix(
        self,
        group: dist.ProcessGroup,
        per_rank: Sequence[tuple[int, Any]],
        capacities: Mapping[str, int],
    ) -> list[str]:
        """Exchange further batches with fixed sizes. All ranks must do so together.

        Args:
            group: process group of the exchange.
            per_rank: ``BatchExchange.signature`` of one batch of each rank.
            capacities: numbers of ids, by the names of their capacities.

        Returns:
            The names of the modules whose input dists are replaced: none if ranks differ, or if no
            batch was counted.
        """
        self.close()
        samples, contents = zip(*per_rank, strict=True)
        is_alike = all(samples) and all(x == contents[0] for x in contents)
        if self._router is None or not is_alike or NUM_VALUES not in capacities:
            return []
        lookups = [
            [first + i for i in lookup]
            for routes, first in self._modules.values()
            for lookup in routes.lookups
        ]
        *_, lengths_dtype = contents[0]
        self._fixed = FixedExchange(
            self._router, lookups, group, samples, capacities, lengths_dtype
        )
        return [*self._modules]

    @contextlib.contextmanager
    def replaced_input_dists(self, is_fixed: bool) -> Iterator[None]:
        """Replace the input dists in this context, in which they must be called for one batch.

        Args:
            is_fixed: whether the batch will be exchanged with fixed sizes. Otherwise, the input
                dists are called as well.
        """
        before = {name: vars(x).get("input_dist") for name, x in self._all_modules.items()}
        try:
            for name, module in self._all_modules.items():
                module.input_dist = functools.partial(
                    self._input_dist, name, module.input_dist, is_fixed
                )
            yield
        finally:
            for name, module in self._all_modules.items():
                del module.input_dist
                if before[name] is not None:
                    module.input_dist = before[name]

    def _input_dist(
        self, name: str, input_dist: Any, is_fixed: bool, context: Any, features: Any
    ) -> Any:
        self._features[name] = features
        if is_fixed and name in self._modules:
            return KJTListSplitsAwaitable([], context)
        return input_dist(context, features)

    def start(self, is_fixed: bool, is_counted: bool) -> BatchExchange:
        """Exchange the ids of the batch whose input dists were called last.

        Args:
            is_fixed: whether to exchange them with fixed sizes, as the input dists were not called.
            is_counted: if they were called, whether to count the ids, which waits for the device.
        """
        features, self._features = self._features, {}
        if self._router is None:
            self._router = self._plan(features)
        inputs = [features[name] for name in self._names_of_inputs]
        if self._router is None:
            return BatchExchange((0, None), {}, {})
        fits = (
            all(map(_is_supported, inputs))
            and all(features[name] is inputs[i] for name, i in self._inputs.items())
            and self._router.accepts(inputs)
        )
        signature: tuple[int, Any] = 0, None
        if fits:
            contents = self._router.columns, [*self._modules], inputs[0].lengths().dtype
            signature = inputs[0].stride(), contents
        if is_fixed and self._fixed is not None:
            ids = self._fixed.start(inputs, fits)
            return BatchExchange(signature, self._modules, {}, ids)
        counts = self._router.count(inputs) if fits and is_counted else {}
        return BatchExchange(signature, self._modules, counts)

    def _plan(self, features: Mapping[str, Any]) -> IdRouter | None:
        """Make the routes of all modules that are supported."""
        inputs: list[KeyedJaggedTensor] = []
        routes: list[Route] = []
        for name, x in features.items():
            module: Any = self._all_modules[name]
            if not _is_supported(x):
                continue
            found = [i for i, y in enumerate(inputs) if x is y]
            index = found[0] if found else len(inputs)
            is_weighted = x.weights_or_none() is not None
            module_routes = _routes_of(module, index, self._num_ranks, is_weighted)
            if module_routes is None:
                continue
            if not found:
                inputs.append(x)
                self._names_of_inputs.append(name)
            self._inputs[name] = index
            self._modules[name] = module_routes, len(routes)
            routes += module_routes.routes
        if not routes:
            return None
        keys = [x.keys() for x in inputs]
        is_weighted = [x.weights_or_none() is not None for x in inputs]
        return IdRouter(routes, keys, is_weighted, self._rank, self._num_ranks, self._device)


def _is_supported(features: Any) -> bool:
    """Return whether ids and weights of a batch have dtypes that are exchanged."""
    if not isinstance(features, KeyedJaggedTensor) or features.variable_stride_per_key():
        return False
    weights = features.weights_or_none()
    is_supported = features.values().dtype == torch.int64
    return is_supported and (weights is None or weights.dtype == torch.float32)
