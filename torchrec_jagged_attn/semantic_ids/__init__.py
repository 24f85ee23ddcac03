"""Rows kept as a few digits each, and attention over these; needs torch alone."""

from torchrec_jagged_attn.semantic_ids.attention import jagged_target_attention_over_ids
from torchrec_jagged_attn.semantic_ids.digits import SemanticIds
from torchrec_jagged_attn.semantic_ids.discrete_pca import DiscretePCA

__all__ = ["DiscretePCA", "SemanticIds", "jagged_target_attention_over_ids"]
