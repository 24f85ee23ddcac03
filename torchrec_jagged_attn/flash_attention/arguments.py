"""Records of what the ops take, return and give as gradients.

The fields of a record are the arguments of an op's schema, in their order. Of the gradients, each
has the name of the argument that it belongs to, and is ``None`` if not requested.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torchrec_jagged_attn.attention.arguments import Biases

__all__ = ["FlashArguments", "FlashGradients", "FlashOutputs"]


class FlashArguments(NamedTuple):
    """Arguments of ``flash_attention``: see :func:`jagged_flash_attention`.

    Attributes:
        bias: see :class:`Biases`.
        window: how many keys each query sees at most; 0 for all.
        needs_stats: whether the statistics of the softmax are returned. Kernels always keep them,
            for the gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    bias: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None
    timestamps: Tensor | None
    request_time: Tensor | None
    row_dropout: Tensor | None
    dropout: Tensor | None
    relative_bias: Tensor | None
    causal: bool
    window: int
    scale: float
    needs_stats: bool

    @property
    def biases(self) -> Biases:
        """What is added to the scores."""
        return Biases(
            self.bias,
            self.position_bias,
            self.age_bias,
            self.timestamps,
            self.request_time,
            self.row_dropout,
            self.dropout,
            relative_bias=self.relative_bias,
        )


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
