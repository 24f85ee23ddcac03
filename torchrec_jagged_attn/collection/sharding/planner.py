"""``HistoryEmbeddingShardingPlanner``: TorchRec's planner, with the costs of local histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ShardEstimator, ShardingOption
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_jagged_attn.collection.sharding.tables import HistoryFeature, histories_in


class HistoryEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """Plans the sharding of a model whose sharder is a :class:`HistoryEmbeddingCollectionSharder`.

    ``EmbeddingShardingPlanner`` assumes that all rows of a history are sent to the rank of their
    sample. For histories with attention on the ranks that own their rows, this planner counts
    instead a query and a partial result, each as wide as the table, per sample and owner rank, and
    16 to 32 bytes per id.

    Estimates depend on the mean lengths of histories: ``ParameterConstraints(pooling_factors=…)``
    of a table has one for each of its ``feature_names``.

    Args:
        *args, **kwargs: as for ``EmbeddingShardingPlanner``. An ``enumerator`` must be an
            ``EmbeddingEnumerator``.

    Example:
        >>> from torchrec.distributed.planner import ParameterConstraints, Topology
        >>> from torchrec_jagged_attn import HistoryEmbeddingShardingPlanner
        >>> planner = HistoryEmbeddingShardingPlanner(
        ...     topology=Topology(world_size=8, compute_device="cuda"),
        ...     batch_size=512,
        ...     constraints={"item_table": ParameterConstraints(pooling_factors=[1.0, 4000.0])},
        ... )
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._enumerator._estimators.append(_HistoryEstimator())  # pyright: ignore


class _HistoryEstimator(ShardEstimator):
    """Corrects the communication costs of the ``EmbeddingPerfEstimator`` that ran before.

    Estimates of storage remain: owner ranks store the rows of a batch, whether they send them or
    not.
    """

    def __init__(self) -> None:
        pass

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: object) -> None:
        for option in sharding_options:
            if option.sharding_type == ShardingType.DATA_PARALLEL.value:
                continue
            rows = sent = numbers = 0.0  # per sample
            for history, length in _features(option):
                rows += length
                sent += 2 * len(option.shards) if history and history.is_local else length
                numbers += length * (history.payload_width if history else 1)
            if rows == 0:
                continue
            for shard in option.shards:
                assert shard.perf is not None
                shard.perf = replace(
                    shard.perf,
                    fwd_comms=shard.perf.fwd_comms * sent / rows,
                    bwd_comms=shard.perf.bwd_comms * sent / rows,
                    input_dist_comms=shard.perf.input_dist_comms * numbers / rows,
                )


def _features(option: ShardingOption) -> Iterator[tuple[HistoryFeature | None, float]]:
    """Yield for each feature of a table: the history, if it is one, and the mean length."""
    collection = option.module[1]
    if isinstance(collection, EmbeddingCollection):
        tables = [table.name for table in collection.embedding_configs()]
        names = collection.embedding_names_by_table()[tables.index(option.name)]
        for name, length in zip(names, option.input_lengths, strict=False):
            yield histories_in(collection).get(name), length
