"""The modules: they hold weights, take TorchRec's jagged tensors and call the ops."""

from torchrec_jagged_attn.modules.feature_interaction import JaggedFeatureInteraction
from torchrec_jagged_attn.modules.self_attention import HistoryEncoderLayer, JaggedSelfAttention
from torchrec_jagged_attn.modules.target_attention import JaggedTargetAttention

__all__ = [
    "HistoryEncoderLayer",
    "JaggedFeatureInteraction",
    "JaggedSelfAttention",
    "JaggedTargetAttention",
]
