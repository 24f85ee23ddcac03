"""Arguments, outputs and gradients of ``flash_attention``.

The fields of ``FlashArguments``, and of the record in it, are the arguments of the op's schema. A
gradient has the name of its argument, and is ``None`` if not requested.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.ops.attention.arguments import Biases


class FlashArguments(NamedTuple):
    """Arguments of ``flash_attention``: see :func:`jagged_flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    biases: Biases  # of keys
    bias: Tensor | None  # [ΣLk, H]
    relative_bias: Tensor | None  # [R, H], by the bucket of the distance of a query and a key
    causal: bool
    window: int  # maximum number of keys that a query attends to; 0 for all
    scale: float
    # Whether to return the statistics of the softmax. Kernels always do, for the gradient
    needs_stats: bool


class FlashOutputs(NamedTuple):
    """Outputs of ``flash_attention``."""

    out: Tensor  # [ΣLq, H, Dv]
    stats: Tensor  # [2, ΣLq, H] fp32, see :class:`TargetOutputs`; zeros if not requested


def new_outputs(args: FlashArguments) -> FlashOutputs:
    """Return uninitialized outputs of the op."""
    rows, heads = args.q.shape[:2]
    out = args.q.new_empty(rows, heads, args.v.shape[2])
    return FlashOutputs(out, args.q.new_empty(2, rows, heads, dtype=torch.float32))


class FlashGradients(NamedTuple):
    """Gradients of ``flash_attention``. Implementations return ``bias`` alone, also if there are
    prior weights: ``api.py`` computes the gradient of prior weights from it.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    bias: Tensor | None
    prior_weights: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None
    relative_bias: Tensor | None
