"""Options of ``JaggedTargetAttention``, and checks of its arguments."""

# FX and torch.jit.script read annotations of records, so they are no strings here.
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_jagged_attn.base.checks import (
    check_bool,
    check_embeddings,
    check_finite,
    check_float,
    check_integers,
    check_offsets_metadata,
    check_same,
    check_shape,
    check_tensor,
)
from torchrec_jagged_attn.base.layout import check_offsets_values, check_order
from torchrec_jagged_attn.codes.checks import check_packed, check_packed_values
from torchrec_jagged_attn.codes.linear_decoder import LinearDecoder
from torchrec_jagged_attn.codes.packed_codes import PackedCodes
from torchrec_jagged_attn.modules.projections import ProjectionWeights
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.attention.checks import (
    check_indices,
    check_indices_values,
    check_prior_weights,
    check_request_time,
    check_score,
    check_timestamps,
)
from torchrec_jagged_attn.ops.attention.dropout import dropout_threshold


class Options(NamedTuple):
    """Options of a module."""

    target_dim: int
    history_dim: int
    num_codes: int  # codes of a packed row; 0 if histories are not packed
    num_levels: int  # levels of a code; 0 if histories are not packed
    num_heads: int
    score: str
    dropout_threshold: int  # the current dropout probability, in units of 2^-32


class RemoteHistory(JaggedTensor):
    """A history whose rows are on other ranks, where attention to them is computed."""

    def attend(
        self,
        query: Tensor,
        query_offsets: Tensor | None,
        weights: ProjectionWeights,
        biases: Biases,
        options: Options,
        dtype: torch.dtype,
    ) -> Awaitable[Tensor]:
        """Compute ``JaggedTargetAttention.forward`` for this history. Returns an awaitable that can
        be used as the output.
        """
        raise NotImplementedError

    def without_samples(self) -> JaggedTensor:
        """Copy with zero samples."""
        raise NotImplementedError


def default_num_heads(embed_dim: int) -> int:
    """Return the default number of heads for outputs of width ``embed_dim``."""
    return next((h for h in (8, 4, 2) if embed_dim % h == 0 and embed_dim >= 4 * h), 1)


def check_options(
    score: str, init: str, dropout: float, recency_bias: bool, value_projection: bool | None
) -> None:
    """Check options of ``JaggedTargetAttention`` that ``TargetAttentionConfig`` has, too."""
    check_score(score)
    if init not in ("recency", "mha"):
        raise ValueError(f"init must be 'recency' or 'mha', got {init!r}")
    dropout_threshold(dropout, "dropout")
    check_bool(recency_bias, "recency_bias")
    if value_projection is not None:
        check_bool(value_projection, "value_projection")


def check_codes(history_codes: object) -> None:
    """Check that ``history_codes`` are :class:`PackedCodes` or a fitted decoder of such."""
    if isinstance(history_codes, LinearDecoder):
        history_codes.check_fitted()
    elif not isinstance(history_codes, PackedCodes):
        raise TypeError(
            "history_codes must be a DiscretePCA, PackedCodes or None, got a "
            f"{type(history_codes).__name__}"
        )


def width_of_codes(history_codes: LinearDecoder | PackedCodes) -> int:
    """Return the width of the rows of ``history_codes``."""
    if isinstance(history_codes, LinearDecoder):
        return history_codes.embed_dim
    return history_codes.num_codes


def packed_codes_of(history_codes: LinearDecoder | PackedCodes) -> PackedCodes:
    """Return the :class:`PackedCodes` of ``history_codes``."""
    return history_codes.packed_codes if isinstance(history_codes, LinearDecoder) else history_codes


def check_targets(
    targets: Tensor, offsets: Tensor | None, name: str, num_samples: int, symbol: str, width: int
) -> None:
    """Check that ``targets`` are ``[B, width]``, ``[B, T, width]`` or, with ``offsets``,
    ``[ΣT, width]``. Errors name the width ``symbol``.
    """
    if offsets is not None:
        check_shape(targets, f"{name}.values()", f"[ΣT, {symbol}]", (None, width))
        check_shape(offsets, f"{name}.offsets()", "[B + 1]", (num_samples + 1,))
        check_integers(offsets, f"{name}.offsets()")
    elif targets.dim() == 3:
        check_shape(targets, name, f"[B, T, {symbol}]", (num_samples, None, width))
    else:
        check_shape(targets, name, f"[B, {symbol}]", (num_samples, width))


def check_inputs(
    target: Tensor,
    query_offsets: Tensor | None,
    rows: Tensor,
    offsets: Tensor,
    indices: Tensor | None,
    biases: Biases,
    options: Options,
) -> None:
    """Check the arguments of ``forward`` against each other and the ``options`` of the module."""
    prior_weights, _, age_bias, timestamps, request_time, *_ = biases
    check_tensor(target, "target", "a tensor or a JaggedTensor")
    check_embeddings(target, "target")
    num_codes, num_levels = options.num_codes, options.num_levels
    if num_levels:
        check_packed(rows, "history.values()", num_codes, num_levels)
    else:
        check_embeddings(rows, "history")
        check_float(rows, "history")
        shape = "[N, D]" if indices is None else "[U, D]"
        check_shape(rows, "history.values()", shape, (None, options.history_dim))
    if indices is not None:
        check_indices(indices)
    num_rows = (rows if indices is None else indices).shape[0]
    check_offsets_metadata(offsets, "history.offsets()")
    num_samples = offsets.numel() - 1
    check_targets(target, query_offsets, "target", num_samples, "target_dim", options.target_dim)
    if timestamps is None:
        if age_bias is not None:
            raise ValueError("timestamps must be given where age_bias=True, got None")
    elif age_bias is None:
        raise ValueError("timestamps must be None unless age_bias=True, got a tensor")
    else:
        check_timestamps(timestamps, num_rows)
    if request_time is not None:
        check_request_time(request_time, timestamps, num_samples)
    if prior_weights is not None:
        check_score(options.score, prior_weights)
        check_prior_weights(prior_weights, num_rows)
    check_same(
        rows, "history", dtype=False,
        offsets=offsets, target=target, target_offsets=query_offsets, indices=indices,
        timestamps=timestamps, prior_weights=prior_weights,
    )  # fmt: skip
    check_offsets_values(offsets, num_rows, "history.offsets()", exact=False)
    if timestamps is not None:
        check_order(timestamps, offsets)
    if indices is not None:
        check_indices_values(indices, rows.shape[0], offsets)
    if query_offsets is not None:
        check_offsets_values(query_offsets, target.shape[0], "target.offsets()", exact=False)
    if num_levels:
        row_offsets = offsets if indices is None else None
        check_packed_values(rows, "history.values()", num_codes, num_levels, row_offsets)
    if prior_weights is not None:
        check_finite(prior_weights, "prior_weights", offsets=offsets)
