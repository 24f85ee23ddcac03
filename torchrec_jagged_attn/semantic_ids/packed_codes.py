"""``PackedCodes``, for imports from this folder."""

from torchrec_jagged_attn.codes.packed_codes import PackedCodes

__all__ = ["PackedCodes"]
