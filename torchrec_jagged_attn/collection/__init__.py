"""Tables with attention, instead of an EmbeddingBagCollection: in one process and sharded."""

from torchrec_jagged_attn.collection.checkpoint_keys import embedding_bag_keys, rename_keys
from torchrec_jagged_attn.collection.config import EncoderConfig, TargetAttentionConfig
from torchrec_jagged_attn.collection.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.collection.optimizers import embedding_parameters
from torchrec_jagged_attn.collection.requests import repeat_per_candidate
from torchrec_jagged_attn.collection.sharding.planner import HistoryEmbeddingShardingPlanner
from torchrec_jagged_attn.collection.sharding.sharder import HistoryEmbeddingCollectionSharder

__all__ = [
    "EncoderConfig",
    "HistoryEmbeddingCollectionSharder",
    "HistoryEmbeddingShardingPlanner",
    "TargetAttentionConfig",
    "TargetAttentionEmbeddingBagCollection",
    "embedding_bag_keys",
    "embedding_parameters",
    "rename_keys",
    "repeat_per_candidate",
]
