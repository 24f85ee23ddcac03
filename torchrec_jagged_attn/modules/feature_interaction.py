"""``JaggedFeatureInteraction``: pools each sample's features by their scores with targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.base.autocast import cast_as_products
from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_float,
    check_number,
    check_offsets_metadata,
    check_same,
    check_shape,
    check_tensor,
    has_values,
)
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.base.module_checks import check_jagged
from torchrec_jagged_attn.modules.target_attention_arguments import check_targets
from torchrec_jagged_attn.ops import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
    jagged_target_attention,
)
from torchrec_jagged_attn.ops.attention.checks import check_width


class JaggedFeatureInteraction(nn.Module):
    r"""Attention of targets to the features of their sample, without parameters.

    For target :math:`q` of a sample with features :math:`x_1 \ldots x_L`,

    .. math:: out = \sum_n w_n x_n, \qquad w = activation(scale \cdot (q \cdot x_1, \ldots,
              q \cdot x_L))

    where ``"softmax"`` is over the sample's features, and ``"silu"`` and ``None``, the identity,
    are elementwise. The output of a sample without features is zeros.

    Unfused, it calls ``jagged_dense_bmm``, the activation and ``jagged_jagged_bmm``; for jagged
    targets, ``jagged_jagged_bmm_jagged_out``, the activation and ``array_jagged_bmm_jagged_out``.
    With softmax, both equal ``jagged_target_attention``, which stores no scores.

    Args:
        activation: ``"softmax"``, ``"silu"`` or ``None``.
        scale: factor of the scores; ``1/√D`` by default.
        fused: whether to use ``jagged_target_attention``; by default if the activation is softmax.
            Results differ by rounding. Unfused calls with jagged targets read the number of pairs
            from the device, and wait for it once.

    Raises:
        ValueError: an unknown ``activation``, or ``fused`` without softmax.

    Example:
        >>> interaction = JaggedFeatureInteraction(activation=None, scale=1.0)
        >>> features = JaggedTensor(
        ...     torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), lengths=torch.tensor([2, 1])
        ... )
        >>> interaction(torch.tensor([[1.0, 1.0], [0.5, 0.0]]), features)
        tensor([[1.0000, 4.0000],
                [4.5000, 0.0000]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Figure 1 and Table 1.
    """

    def __init__(
        self,
        activation: Literal["softmax", "silu"] | None = "softmax",
        *,
        scale: float | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("softmax", "silu", None):
            raise ValueError(f"activation must be 'softmax', 'silu' or None, got {activation!r}")
        if fused is not None:
            check_bool(fused, "fused")
        if fused and activation != "softmax":
            raise ValueError(f"activation must be 'softmax' with fused=True, got {activation!r}")
        if scale is not None:
            scale = check_number(scale, "scale")
        self.activation = activation
        self.scale = scale
        self.fused = activation == "softmax" if fused is None else fused

    def forward(self, targets: Tensor | JaggedTensor, features: JaggedTensor) -> Tensor:
        """Pool ``features`` for each target.

        Args:
            targets: ``[B, D]``; ``[B, T, D]`` for ``T`` targets per sample; or a JaggedTensor with
                values ``[ΣT, D]`` for any number of targets per sample. fp32, bf16 or fp16 (on CPU
                also fp64).
            features: values ``[N, D]`` of ``B`` samples, dtype of ``targets``. Weights are ignored.

        Returns:
            One row per target: ``[B, D]``, ``[B, T, D]`` or ``[ΣT, D]``, in the dtype of
            ``targets``, or of autocast.

        Raises:
            TypeError: ``targets`` or ``features`` is of another type, or a dtype does not fit.
            ValueError: a shape, a device or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``)
                the values of offsets do not fit.
            NotImplementedError: fused, and ``D`` is over 512.
        """
        target_offsets = None
        if isinstance(targets, JaggedTensor):
            targets, target_offsets = targets.values(), targets.offsets()
        else:
            check_tensor(targets, "targets", "a Tensor or a JaggedTensor")
        check_jagged(features, "features")
        rows, offsets = features.values(), features.offsets()
        targets, rows = cast_as_products(targets, rows)
        _check(targets, target_offsets, rows, offsets)
        width = rows.shape[1]
        fused = self.fused and width > 0  # the fused op does not support a width of 0
        if fused:
            check_width(width, "features")
        scale = max(width, 1) ** -0.5 if self.scale is None else self.scale
        # The op reads features once for all targets of a sample, as for all heads.
        query = targets if targets.dim() == 3 else targets.unsqueeze(1)
        if fused:
            out = jagged_target_attention(
                query, rows, offsets, query_offsets=target_offsets, scale=scale
            )
        elif target_offsets is None:
            scores_NT = jagged_dense_bmm(rows, (query * scale).mT, offsets)
            weights_NT = self._activated(scores_NT, jagged_softmax, offsets)
            out = jagged_jagged_bmm(weights_NT, rows, offsets)
        else:
            layout, total = (target_offsets, offsets), None
            if not torch.compiler.is_compiling() and not has_values(offsets):  # any total
                total = targets.shape[0] * rows.shape[0] // max(offsets.numel() - 1, 1)
            scores = jagged_jagged_bmm_jagged_out(targets * scale, rows, *layout, total=total)
            weights = self._activated(scores, jagged2_softmax, *layout)
            return array_jagged_bmm_jagged_out(weights, rows, *layout, num_rows=targets.shape[0])
        return out if targets.dim() == 3 else out.squeeze(1)

    def _activated(self, scores: Tensor, softmax: Callable[..., Tensor], *layout: Tensor) -> Tensor:
        if self.activation == "softmax":
            return softmax(scores, *layout)
        return F.silu(scores) if self.activation == "silu" else scores

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, scale={self.scale}, fused={self.fused}"


def _check(targets: Tensor, target_offsets: Tensor | None, rows: Tensor, offsets: Tensor) -> None:
    """Check the inputs of the ops, with this module's names in errors."""
    check_shape(rows, "features.values()", "[N, D]", (None, None))
    check_float(rows, "features")
    check_offsets_metadata(offsets, "features.offsets()")
    check_targets(targets, target_offsets, "targets", offsets.numel() - 1, "D", rows.shape[1])
    check_same(rows, "features", dtype=True, targets=targets)
    check_same(rows, "features", dtype=False, offsets=offsets, target_offsets=target_offsets)
    check_offsets_values(offsets, rows.shape[0], "features.offsets()")
    if target_offsets is not None:
        check_offsets_values(target_offsets, targets.shape[0], "targets.offsets()")
