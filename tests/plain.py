"""Target attention without dropout and noise, and whose rows' lengths do nothing, so that training
computes as it does in evaluation. That of a config has four heads.
"""

import functools

from torchrec_jagged_attn import JaggedTargetAttention, TargetAttentionConfig
from torchrec_jagged_attn.testing import UNRESTRAINED

__all__ = ["plain_attention", "plain_config"]

plain_attention = functools.partial(JaggedTargetAttention, **UNRESTRAINED)
plain_config = functools.partial(TargetAttentionConfig, num_heads=4, **UNRESTRAINED)
