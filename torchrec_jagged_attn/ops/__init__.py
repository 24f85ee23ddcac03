"""Functions of tensors, each a registered PyTorch op with a fake implementation and gradient."""

from torchrec_jagged_attn.base.layout import JaggedLayout
from torchrec_jagged_attn.ops.flash_attention.api import jagged_flash_attention
from torchrec_jagged_attn.ops.interaction.api import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_add,
    jagged_dense_bmm,
    jagged_dense_mul,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
)
from torchrec_jagged_attn.ops.target_attention.api import jagged_target_attention

__all__ = [
    "JaggedLayout",
    "array_jagged_bmm_jagged_out",
    "jagged2_softmax",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_flash_attention",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_softmax",
    "jagged_target_attention",
]
