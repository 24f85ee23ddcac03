"""The ops: functions of tensors, each one registered torch op with a fake and a gradient."""

from torchrec_jagged_attn.ops.attention import jagged_flash_attention, jagged_target_attention
from torchrec_jagged_attn.ops.dispatch import implementation

__all__ = ["implementation", "jagged_flash_attention", "jagged_target_attention"]
