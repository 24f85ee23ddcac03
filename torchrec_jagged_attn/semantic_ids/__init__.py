"""Experimental: rows stored as a few codes each, and attention over them; needs torch alone."""

from torchrec_jagged_attn.codes.packed_codes import PackedCodes
from torchrec_jagged_attn.semantic_ids.attention import jagged_target_attention_over_codes
from torchrec_jagged_attn.semantic_ids.discrete_pca import DiscretePCA
from torchrec_jagged_attn.semantic_ids.fusion import Fused, VQFusion

__all__ = ["DiscretePCA", "Fused", "PackedCodes", "VQFusion", "jagged_target_attention_over_codes"]
