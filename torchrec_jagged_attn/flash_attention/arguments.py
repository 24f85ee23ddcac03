"""Records of what the ops take, return and give as gradients.

The fields of a record, and of records in it, are the arguments of an op's schema. Of the gradients,
each has the name of the argument that it belongs to, and is ``None`` if not requested.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchrec_jagged_attn.attention.arguments import Biases


class FlashArguments(NamedTuple):
    """Arguments of ``flash_attention``: see :func:`jagged_flash_attention`.

    Attributes:
        biases: of keys.
        relative_bias: ``[R, H]``, by the bucket of the distance of a query and a key.
        window: how many keys each query sees at most; 0 for all.
        needs_stats: whether the statistics of the softmax are returned. Kernels always keep them,
            for the gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    biases: Biases
    relative_bias: Tensor | None
    causal: bool
    window: int
    scale: float
    needs_stats: bool


class FlashOutputs(NamedTuple):
    """What ``flash_attention`` returns.

    Attributes:
        out: ``[ΣLq, H, Dv]``.
        stats: ``[2, ΣLq, H]`` fp32, see :class:`TargetOutputs`; zeros if not requested.
    """

    out: Tensor
    stats: Tensor


class FlashGradients(NamedTuple):
    """Gradients of ``flash_attention``. That of prior weights is of their logarithms, in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    bias: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None
    relative_bias: Tensor | None
