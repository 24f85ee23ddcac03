"""``JaggedSelfAttention`` and ``HistoryEncoderLayer``: self-attention within each history."""

# FX and torch.jit.script evaluate annotations, so they must not be strings.
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_embeddings,
    check_finite,
    check_float,
    check_int,
    check_number,
    check_offsets_metadata,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.base.module_checks import check_jagged, check_not_fsdp
from torchrec_jagged_attn.modules.recency_bias import RecencyBias
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.attention.checks import (
    check_heads,
    check_prior_weights,
    check_width,
    check_window,
    refuse_options,
)
from torchrec_jagged_attn.ops.attention.dropout import draw_dropout, dropout_threshold
from torchrec_jagged_attn.ops.flash_attention.api import call_flash_attention, flash_attention


class JaggedSelfAttention(nn.Module):
    r"""Multi-head self-attention within each history, without padding.

    The same function as ``torch.nn.MultiheadAttention(embed_dim, num_heads)`` on each sample
    separately, with the same parameter names and shapes. Unless ``recency_bias=False``, scores have
    a learned bias per head and distance between query and key, counted in rows in either direction:
    a :class:`RecencyBias` whose positions are these distances.

    Args:
        embed_dim: ``E``, width of the rows.
        num_heads: ``H``, a divisor of ``embed_dim``.
        causal: whether a row attends to itself and older rows only.
        window: maximum number of rows that a row attends to, itself and the newest older ones;
            needs ``causal``. ``None`` for all.
        bias: whether the projections have biases.
        recency_bias: whether to add the learned score of the distance.
        dropout: while training, the probability that a weight is set to zero, as in
            ``torch.nn.MultiheadAttention``; the others are divided by ``1 - dropout``.
        device, dtype: of the parameters.

    Raises:
        TypeError: ``embed_dim``, ``num_heads`` or ``window`` is not an int.
        ValueError: ``num_heads`` does not divide ``embed_dim``, ``dropout`` is not in [0, 1), or
            ``window`` is below one or given without ``causal``.
        NotImplementedError: the width ``E / H`` of a head is over 512.

    Example:
        >>> attention = JaggedSelfAttention(embed_dim=8, num_heads=2)
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> attention(history).values().shape
        torch.Size([5, 8])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Section 2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        window: int | None = None,
        bias: bool = True,
        recency_bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_options("JaggedSelfAttention", options)
        num_heads, embed_dim = check_heads(num_heads, embed_dim)
        check_device(device)
        check_dtype(dtype)
        check_bool(bias, "bias")
        check_bool(recency_bias, "recency_bias")
        check_width(embed_dim // num_heads, "embed_dim / num_heads")
        window = check_window(window, causal)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.causal = causal
        self.window = window
        self.dropout = dropout
        # An integer: compilers take a float for one that varies.
        self._dropout_threshold = dropout_threshold(dropout, "dropout")

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        # The names and shapes of torch.nn.MultiheadAttention.
        self.in_proj_weight = parameter(3 * embed_dim, embed_dim)
        self.in_proj_bias = parameter(3 * embed_dim) if bias else None
        # nn.Linear could be replaced by a quantized module, but its weight is read in forward.
        self.out_proj = NonDynamicallyQuantizableLinear(
            embed_dim, embed_dim, bias=bias, device=device, dtype=dtype
        )
        self.recency_bias = (
            RecencyBias(num_heads, device=device, dtype=dtype) if recency_bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize projections like ``torch.nn.MultiheadAttention``, and reset the bias."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.recency_bias is not None:
            self.recency_bias.reset_parameters()

    def forward(self, history: JaggedTensor, prior_weights: Tensor | None = None) -> JaggedTensor:
        """Attend from each row of ``history`` to the rows of its sample.

        Args:
            history: values ``[N, E]`` of ``B`` samples, each from its oldest row to its newest. Its
                weights are not read. Rows behind the last offset must be finite, and are ignored;
                if their outputs are not used, they do not change gradients.
            prior_weights: ``[N]``, factors of the attention weights before normalization, see
                :func:`jagged_flash_attention`. Rows with a factor of zero or below are masked.

        Returns:
            Values ``[N, E]`` with the offsets of ``history``, in the dtype of the parameters or of
            autocast.

        Raises:
            TypeError: ``history`` is not a JaggedTensor, or holds ids, not embeddings.
            ValueError: a shape or a device does not fit.
            NotImplementedError: ``fully_shard`` was applied to this module.
        """
        if not is_scripting():
            check_not_fsdp(self)
        return _attend(
            history,
            prior_weights,
            self.in_proj_weight,
            self.in_proj_bias,
            self.out_proj.weight,
            self.out_proj.bias,
            None if self.recency_bias is None else self.recency_bias.position_weight,
            self.num_heads,
            self._dropout_threshold if self.training else 0,
            self.causal,
            self.window,
        )

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}, "
            f"window={self.window}, dropout={self.dropout}"
        )


@torch.fx.wrap  # FX cannot trace the checks; torch.jit.script compiles this function
def _attend(
    history: JaggedTensor,
    prior_weights: Tensor | None,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    relative_bias: Tensor | None,
    num_heads: int,
    threshold: int,
    causal: bool,
    window: int | None,
) -> JaggedTensor:
    """``JaggedSelfAttention.forward`` as a function of its parameters and options."""
    rows, offsets = _rows(history, in_weight), history.offsets()
    if not is_scripting():
        check_offsets_metadata(offsets, "history.offsets()")
        if prior_weights is not None:
            check_prior_weights(prior_weights, rows.shape[0])
        check_same(rows, "history", dtype=False, offsets=offsets, prior_weights=prior_weights)
        check_offsets_values(offsets, rows.shape[0], "history.offsets()", exact=False)
        if prior_weights is not None:
            check_finite(prior_weights, "prior_weights", offsets=offsets)
    width = in_weight.shape[1] // num_heads
    qkv = F.linear(rows, in_weight, in_bias).view(-1, 3, num_heads, width)
    q, k, v = qkv.unbind(1)
    biases = Biases(prior_weights, dropout=draw_dropout(threshold, q.device))
    inputs = (
        q, k, v, offsets, offsets, *biases, None, relative_bias, causal,
        0 if window is None else window, 1 / math.sqrt(width), False,
    )  # fmt: skip
    if is_scripting():
        out, _ = _flash_attention_packet(*inputs)
    else:
        check_float(q, "parameters")
        out = call_flash_attention(*inputs)
    return JaggedTensor(F.linear(out.flatten(1), out_weight, out_bias), offsets=offsets)


# torch.jit.script accepts the overload packet of an op, not its overloads.
_flash_attention_packet = flash_attention.overloadpacket


@torch.fx.wrap
def _rows(history: JaggedTensor, weight: Tensor) -> Tensor:
    """Check the rows of ``history``, and return them in the dtype of ``weight`` ``[…, E]``."""
    if not is_scripting():
        check_jagged(history, "history")
        rows = history.values()
        check_embeddings(rows, "history")
        check_float(rows, "history")
        check_shape(rows, "history.values()", "[N, E]", (None, weight.shape[-1]))
    return history.values().to(weight.dtype)


class HistoryEncoderLayer(nn.Module):
    r"""A transformer encoder layer: self-attention within histories, then a feed-forward network.

    .. math:: y = x + attention(norm_1(x)), \qquad z = y + W_2\, gelu(W_1\, norm_2(y))

    The same function as ``torch.nn.TransformerEncoderLayer(embed_dim, num_heads, feedforward_dim,
    activation="gelu", norm_first=True)`` on each sample separately, with the same parameter names
    and shapes; plus the recency bias of :class:`JaggedSelfAttention`. Layers can be stacked before
    a target attention.

    Args:
        embed_dim: ``E``, width of the rows.
        num_heads: ``H``, a divisor of ``embed_dim``.
        feedforward_dim: width of the hidden layer; ``4 · E`` by default.
        dropout: dropout probability, while training, of the attention's output and of inputs and
            outputs of ``W_2``. Unlike in ``torch.nn.TransformerEncoderLayer``, attention weights
            have an argument of their own, ``attention_dropout``.
        causal, window, recency_bias: see :class:`JaggedSelfAttention`.
        attention_dropout: ``dropout`` of :class:`JaggedSelfAttention`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError, NotImplementedError: see :class:`JaggedSelfAttention`.

    Example:
        >>> layers = nn.Sequential(HistoryEncoderLayer(8, 2), HistoryEncoderLayer(8, 2))
        >>> history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> layers(history).values().shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feedforward_dim: int | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        window: int | None = None,
        recency_bias: bool = True,
        attention_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dropout_threshold(attention_dropout, "attention_dropout")
        check_number(dropout, "dropout")
        if feedforward_dim is not None:
            feedforward_dim = check_int(feedforward_dim, "feedforward_dim", 1, "an int or None")
        # The names and shapes of torch.nn.TransformerEncoderLayer.
        self.self_attn = JaggedSelfAttention(
            embed_dim,
            num_heads,
            causal=causal,
            window=window,
            recency_bias=recency_bias,
            dropout=attention_dropout,
            device=device,
            dtype=dtype,
        )
        embed_dim = self.self_attn.embed_dim  # an int, unlike an argument from NumPy
        if feedforward_dim is None:
            feedforward_dim = 4 * embed_dim
        self.linear1 = nn.Linear(embed_dim, feedforward_dim, device=device, dtype=dtype)
        self.linear2 = nn.Linear(feedforward_dim, embed_dim, device=device, dtype=dtype)
        self.norm1 = nn.LayerNorm(embed_dim, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(embed_dim, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, history: JaggedTensor, prior_weights: Tensor | None = None) -> JaggedTensor:
        """Encode ``history``, values ``[N, E]``, as rows ``[N, E]`` with the same offsets.

        See :meth:`JaggedSelfAttention.forward` for rows behind the last offset,
        ``prior_weights`` and errors.
        """
        if not is_scripting():
            check_not_fsdp(self)
        rows, offsets = _rows(history, self.norm1.weight), history.offsets()
        normed = JaggedTensor(self.norm1(rows), offsets=offsets)
        rows = rows + self.dropout(self.self_attn(normed, prior_weights).values())
        hidden = self.dropout(F.gelu(self.linear1(self.norm2(rows))))
        rows = rows + self.dropout(self.linear2(hidden))
        return JaggedTensor(rows, offsets=offsets)
