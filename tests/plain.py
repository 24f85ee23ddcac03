"""Target attention without dropout and noise, so that training computes as it does in evaluation;
and of pooled rows alone, to which their length does nothing.
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
    "feedforward_dim": 0,
}

plain_attention = functools.partial(JaggedTargetAttention, **UNRESTRAINED)
plain_config = functools.partial(TargetAttentionConfig, **UNRESTRAINED)
