"""Experimental: rows kept as a few codes each, and attention over these; needs torch alone."""

from torchrec_jagged_attn.semantic_ids.attention import jagged_target_attention_over_codes
from torchrec_jagged_attn.semantic_ids.discrete_pca import DiscretePCA
from torchrec_jagged_attn.semantic_ids.fusion import Fused, VQFusion
from torchrec_jagged_attn.semantic_ids.packed_codes import PackedCodes

__all__ = ["DiscretePCA", "Fused", "PackedCodes", "VQFusion", "jagged_target_attention_over_codes"]
