"""Target attention without dropout and noise, and whose rows' lengths do nothing, so that training
computes as it does in evaluation. That of a config has four heads.
"""

import functools

from torchrec_jagged_attn import JaggedTargetAttention, TargetAttentionConfig

__all__ = ["plain_attention", "plain_config"]

UNRESTRAINED = {
    "row_dropout": 0.0,
    "output_dropout": 0.0,
    "output_noise": 0.0,
    "length_power": False,
    "length_bias": False,
}

plain_attention = functools.partial(JaggedTargetAttention, **UNRESTRAINED)
plain_config = functools.partial(TargetAttentionConfig, num_heads=4, **UNRESTRAINED)
