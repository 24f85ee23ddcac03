"""``JaggedTargetAttention``: a target item attends over its user's history."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.layout import JaggedLayout
from torchrec_jagged_attn.ops import jagged_target_attention

__all__ = ["JaggedTargetAttention", "RecencyBias"]


class RecencyBias(nn.Module):
    r"""A learned score per head for how far back in its history a row lies.

    .. math:: bias_{nh} = P_{\beta(position_n), h} + A_{\beta(age_n), h}, \qquad
              \beta(x) = \lfloor 4 \log_2(1 + x) \rfloor

    Positions count the newer rows of the sample, ages the time units between a row and the newest
    row of its sample. Both fall into four buckets per octave, the last of which holds all that is
    further back: positions past 2¹⁶ and ages past 2³².

    The table of positions starts as the straight lines of ALiBi (https://arxiv.org/abs/2108.12409,
    Section 3), ``P = -slope · position``, with the last of several heads flat; the table of ages
    starts at zero.

    Args:
        num_heads: ``H``.
        ages: whether to learn a table of ages, too.
        device: of the tables.
        dtype: of the tables.
    """

    BUCKETS_PER_OCTAVE = 4
    POSITION_BUCKETS = 64
    AGE_BUCKETS = 128

    def __init__(
        self,
        num_heads: int,
        ages: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(
            torch.empty(self.POSITION_BUCKETS, num_heads, device=device, dtype=dtype)
        )
        self.age_weight: nn.Parameter | None = None
        if ages:
            self.age_weight = nn.Parameter(
                torch.empty(self.AGE_BUCKETS, num_heads, device=device, dtype=dtype)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the positions at ALiBi's slopes, one head of several flat, and the ages at zero."""
        num_heads = self.position_weight.shape[1]
        slopes = [2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)]
        if num_heads > 1:
            slopes[-1] = 0.0
        with torch.no_grad():
            device = self.position_weight.device
            buckets = torch.arange(self.POSITION_BUCKETS, device=device)
            positions = torch.exp2(buckets / self.BUCKETS_PER_OCTAVE) - 1
            self.position_weight.copy_(
                -positions.unsqueeze(1) * torch.tensor(slopes, device=device)
            )
            if self.age_weight is not None:
                self.age_weight.zero_()

    def forward(self, layout: JaggedLayout, timestamps: Tensor | None = None) -> Tensor:
        """``[N, H]`` bias of the rows of ``layout``; ``timestamps`` are ``[N]``."""
        bias = F.embedding(
            self._bucket(layout.positions_from_end(), self.POSITION_BUCKETS), self.position_weight
        )
        if self.age_weight is None:
            return bias
        if timestamps is None:
            raise ValueError(
                "timestamps must be given to a module made with age_bias=True, got None"
            )
        newest = (layout.offsets[1:].long() - 1).clamp(min=0)[layout.sample_ids()]
        ages = (timestamps[newest] - timestamps).clamp(min=0)
        return bias + F.embedding(self._bucket(ages, self.AGE_BUCKETS), self.age_weight)

    def _bucket(self, distance: Tensor, num_buckets: int) -> Tensor:
        bucket = torch.log2(1 + distance.float()) * self.BUCKETS_PER_OCTAVE
        return bucket.long().clamp(max=num_buckets - 1)


class JaggedTargetAttention(nn.Module):
    r"""Multi-head attention with targets as queries and their user's history as keys and values.

    The same function as ``torch.nn.MultiheadAttention(embed_dim, num_heads, kdim=history_dim,
    vdim=history_dim)`` on each sample for itself, with the same parameter names and shapes; plus,
    unless ``recency_bias=False``, a learned bias by position in the history (see
    :class:`RecencyBias`). No key and no value is ever made: the projections move to the target's
    side, where rows are few,

    .. math:: q_h \cdot (W_{K,h} x_n + b_{K,h}) = (W_{K,h}^T q_h) \cdot x_n + const, \qquad
              \sum_n p_n (W_{V,h} x_n + b_{V,h}) = W_{V,h} \sum_n p_n x_n + b_{V,h}

    and softmax drops the constant. The attention of a sample with an empty history is zero, so
    that its output is the bias of ``out_proj``.

    Args:
        embed_dim: ``E``, width of targets and outputs.
        num_heads: ``H``, a divisor of ``embed_dim``.
        history_dim: ``D``, width of history rows; ``embed_dim`` by default.
        bias: whether the projections have biases.
        recency_bias: whether to add the learned bias by position in the history.
        age_bias: whether that bias also learns from the age of a row, given ``timestamps``.
        init: ``"recency"`` starts as a pooling in the embedding's own space, weighted by recency
            alone but for small random scores: value and output projections at the identity, where
            ``D = E``. ``"mha"`` starts as ``torch.nn.MultiheadAttention`` does.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``, ``age_bias`` without
            ``recency_bias``, or an unknown ``init``.

    Example:
        >>> attention = JaggedTargetAttention(embed_dim=8, num_heads=2)
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> attention(torch.randn(3, 8), history).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        history_dim: int | None = None,
        bias: bool = True,
        recency_bias: bool = True,
        age_bias: bool = False,
        init: Literal["recency", "mha"] = "recency",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads != 0:
            raise ValueError(f"num_heads must divide embed_dim {embed_dim}, got {num_heads}")
        if age_bias and not recency_bias:
            raise ValueError("age_bias must go with recency_bias=True, got recency_bias=False")
        if init not in ("recency", "mha"):
            raise ValueError(f"init must be 'recency' or 'mha', got {init!r}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.history_dim = embed_dim if history_dim is None else history_dim
        self.init = init

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        # Names, shapes and the two cases are those of torch.nn.MultiheadAttention.
        self.in_proj_weight = None
        if self.history_dim == embed_dim:
            self.in_proj_weight = parameter(3 * embed_dim, embed_dim)
        else:
            self.q_proj_weight = parameter(embed_dim, embed_dim)
            self.k_proj_weight = parameter(embed_dim, self.history_dim)
            self.v_proj_weight = parameter(embed_dim, self.history_dim)
        self.in_proj_bias = parameter(3 * embed_dim) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.recency_bias = (
            RecencyBias(num_heads, age_bias, device, dtype) if recency_bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters as ``init`` says."""
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                nn.init.xavier_uniform_(weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.init == "recency" and self.in_proj_weight is not None:
            nn.init.eye_(self.in_proj_weight[2 * self.embed_dim :])
            nn.init.eye_(self.out_proj.weight)
        if self.recency_bias is not None:
            self.recency_bias.reset_parameters()

    def forward(
        self,
        target: Tensor | JaggedTensor,
        history: JaggedTensor,
        timestamps: Tensor | None = None,
    ) -> Tensor:
        """Attend ``target`` over ``history``.

        Args:
            target: ``[B, E]``; ``[B, T, E]`` for ``T`` targets per sample; or a JaggedTensor with
                values ``[ΣT, E]`` for any number of targets per sample.
            history: values ``[N, D]`` of ``B`` samples, each from its oldest row to its newest. Its
                weights are not read.
            timestamps: ``[N]`` integer or floating times of the rows, in any unit, read where the
                module learns from ages.

        Returns:
            One row per target: ``[B, E]``, ``[B, T, E]`` or ``[ΣT, E]``.

        Raises:
            TypeError: ``target`` or ``history`` hold no floating-point values.
            ValueError: a shape does not fit.
        """
        rows, offsets = history.values(), history.offsets()
        query_offsets = None
        if isinstance(target, JaggedTensor):
            target, query_offsets = target.values(), target.offsets()
        self._check(target, rows, query_offsets is not None)
        layout = JaggedLayout(offsets, rows.shape[0])
        if timestamps is not None and timestamps.shape != (layout.num_rows,):
            raise ValueError(
                f"timestamps must have shape [N] = [{layout.num_rows}], "
                f"got {list(timestamps.shape)}"
            )

        bias = None if self.recency_bias is None else self.recency_bias(layout, timestamps)
        pooled = jagged_target_attention(
            self._query(target).to(rows.dtype),
            rows,
            offsets,
            query_offsets=query_offsets,
            bias=bias,
            scale=1 / math.sqrt(self.head_dim),
        )
        empty = layout.lengths == 0
        if query_offsets is not None:
            empty = empty[JaggedLayout(query_offsets, target.shape[0]).sample_ids()]
        elif target.dim() == 3:
            empty = empty.unsqueeze(1)
        return self._output(pooled.to(self.out_proj.weight.dtype), empty)

    def _projections(self) -> tuple[Tensor, ...]:
        """Query ``[E, E]``, key ``[E, D]`` and value ``[E, D]`` weights."""
        if self.in_proj_weight is not None:
            return self.in_proj_weight.chunk(3)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _query(self, target: Tensor) -> Tensor:
        """``[…, E] -> […, H, D]``: the projected target, carried through the key projection."""
        q_weight, k_weight, _ = self._projections()
        q_bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        query = F.linear(target, q_weight, q_bias).unflatten(-1, (self.num_heads, self.head_dim))
        return torch.einsum("...he,hed->...hd", query, k_weight.unflatten(0, (self.num_heads, -1)))

    def _output(self, pooled: Tensor, empty: Tensor) -> Tensor:
        """``[…, H, D] -> […, E]``: value and output projections of the pooled history rows."""
        _, _, v_weight = self._projections()
        v_weight = v_weight.unflatten(0, (self.num_heads, self.head_dim))
        values = torch.einsum("...hd,hed->...he", pooled, v_weight).flatten(-2)
        if self.in_proj_bias is not None:
            v_bias = self.in_proj_bias[2 * self.embed_dim :]
            values = values + v_bias.masked_fill(empty.unsqueeze(-1), 0)
        return self.out_proj(values)

    def _check(self, target: Tensor, rows: Tensor, jagged: bool) -> None:
        for name, tensor in (("target", target), ("history", rows)):
            if not tensor.is_floating_point():
                raise TypeError(
                    f"{name} must hold floating-point embeddings, got {tensor.dtype}: look the ids "
                    "up in an EmbeddingCollection first"
                )
        dims = "[ΣT, E]" if jagged else "[B, E] or [B, T, E]"
        allowed = (2,) if jagged else (2, 3)
        if target.dim() not in allowed or target.shape[-1] != self.embed_dim:
            raise ValueError(
                f"target must have shape {dims} with E = {self.embed_dim}, got {list(target.shape)}"
            )
        if rows.dim() != 2 or rows.shape[1] != self.history_dim:
            raise ValueError(
                f"history must have values of shape [N, D] with D = {self.history_dim}, "
                f"got {list(rows.shape)}"
            )

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"history_dim={self.history_dim}, init={self.init!r}"
        )
