"""Rows kept as a few digits each, and attention over these; needs torch alone."""

from torchrec_jagged_attn.semantic_ids.attention import jagged_target_attention_over_ids
from torchrec_jagged_attn.semantic_ids.digits import SemanticIds
from torchrec_jagged_attn.semantic_ids.discrete_pca import DiscretePCA
from torchrec_jagged_attn.semantic_ids.fusion import Fused, VQFusion

__all__ = ["DiscretePCA", "Fused", "SemanticIds", "VQFusion", "jagged_target_attention_over_ids"]
