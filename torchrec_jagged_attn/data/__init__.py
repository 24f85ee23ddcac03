"""Samplers of batches, on the host; needs torch alone."""

from torchrec_jagged_attn.data.balanced_batches import BalancedBatchSampler

__all__ = ["BalancedBatchSampler"]
