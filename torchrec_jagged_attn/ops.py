"""The ops: functions of tensors, each a registered torch op with a fake and a gradient."""

# Exported programs have these ops.
import torchrec_jagged_attn.target_attention.multi_head  # noqa: F401
from torchrec_jagged_attn.flash_attention.api import jagged_flash_attention
from torchrec_jagged_attn.interaction.api import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_add,
    jagged_dense_bmm,
    jagged_dense_mul,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
)
from torchrec_jagged_attn.layout import JaggedLayout
from torchrec_jagged_attn.selection.api import SelectedRows, select_rows, take_rows
from torchrec_jagged_attn.target_attention.api import jagged_target_attention

__all__ = [
    "JaggedLayout",
    "SelectedRows",
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
    "select_rows",
    "take_rows",
]
