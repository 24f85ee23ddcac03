"""The modules: they hold weights, take TorchRec's jagged tensors and call the ops."""

from torchrec_jagged_attn.modules.checkpoint_keys import embedding_bag_keys, rename_keys
from torchrec_jagged_attn.modules.config import EncoderConfig, TargetAttentionConfig
from torchrec_jagged_attn.modules.embedding_bag_collection import (
    TargetAttentionEmbeddingBagCollection,
)
from torchrec_jagged_attn.modules.feature_interaction import JaggedFeatureInteraction
from torchrec_jagged_attn.modules.history_planner import HistoryEmbeddingShardingPlanner
from torchrec_jagged_attn.modules.history_sharding import HistoryEmbeddingCollectionSharder
from torchrec_jagged_attn.modules.requests import repeat_per_candidate
from torchrec_jagged_attn.modules.self_attention import HistoryEncoderLayer, JaggedSelfAttention
from torchrec_jagged_attn.modules.sharding import embedding_parameters
from torchrec_jagged_attn.modules.target_attention import JaggedTargetAttention

__all__ = [
    "EncoderConfig",
    "HistoryEmbeddingCollectionSharder",
    "HistoryEmbeddingShardingPlanner",
    "HistoryEncoderLayer",
    "JaggedFeatureInteraction",
    "JaggedSelfAttention",
    "JaggedTargetAttention",
    "TargetAttentionConfig",
    "TargetAttentionEmbeddingBagCollection",
    "embedding_bag_keys",
    "embedding_parameters",
    "rename_keys",
    "repeat_per_candidate",
]
