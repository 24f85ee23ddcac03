"""Records of what the ops take, return and give as gradients.

The fields of a record, and of records in it, are the arguments of an op's schema. Of the gradients,
each has the name of the argument that it belongs to, and is ``None`` if not requested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.attention.arguments import Biases


class FlashArguments(NamedTuple):
    """Arguments of ``flash_attention``: see :func:`jagged_flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    biases: Biases  # of keys
    relative_bias: Tensor | None  # [R, H], by the bucket of the distance of a query and a key
    causal: bool
    window: int  # how many keys each query sees at most; 0 for all
    scale: float
    # Whether the statistics of the softmax are returned. Kernels always keep them, for the gradient
    needs_stats: bool


class FlashOutputs(NamedTuple):
    """What ``flash_attention`` returns."""

    out: Tensor  # [ΣLq, H, Dv]
    stats: Tensor  # [2, ΣLq, H] fp32, see :class:`TargetOutputs`; zeros if not requested


def new_outputs(args: FlashArguments) -> FlashOutputs:
    """Tensors of the shapes and dtypes that the op gives, with nothing in them."""
    rows, heads = args.q.shape[:2]
    out = args.q.new_empty(rows, heads, args.v.shape[2])
    return FlashOutputs(out, args.q.new_empty(2, rows, heads, dtype=torch.float32))


class FlashGradients(NamedTuple):
    """Gradients of ``flash_attention``. That of prior weights is of their logarithms, in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    bias: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None
    relative_bias: Tensor | None
