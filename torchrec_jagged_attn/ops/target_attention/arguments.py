"""Records of the arguments, outputs and gradients of the ops.

The fields of :class:`TargetArguments`, and of records in it, are the arguments of an op's schema. A
gradient has the name of its argument, and is ``None`` if not requested.
"""

# torch.jit.script reads annotations of records, so they are no strings here.
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.ops.attention.arguments import Biases


class TargetArguments(NamedTuple):
    """Arguments of ``target_attention``: see :func:`jagged_target_attention`."""

    query: Tensor  # [B, T, H, D], [1, T, H, D] or, with ``query_offsets``, [ΣT, H, D]
    history: Tensor  # [N, D] or, with ``indices``, [U, D]; with ``num_levels``, packed codes
    offsets: Tensor  # [B + 1]
    query_offsets: Tensor | None  # [B + 1]
    indices: Tensor | None  # [N], gather indices into ``history``
    biases: Biases  # of history rows
    # If the rows are a part of a larger batch, [N] int32 or int64: the index of each row there,
    # which positions and dropout depend on. Ages then require ``request_time``.
    row_numbers: Tensor | None
    # Only with ``row_numbers``, [B] in the same dtype: the end of each sample's row numbers
    row_number_ends: Tensor | None
    scale: float
    score: str  # one of ``SCORES``
    num_levels: int  # levels of packed codes; 0 if ``history`` is not packed
    for_backward: bool  # whether gradients may be computed

    @property
    def num_rows(self) -> int:
        """``N``, the number of history rows of all samples."""
        return (self.history if self.indices is None else self.indices).shape[0]


class TargetOutputs(NamedTuple):
    """Outputs of ``target_attention``."""

    out: Tensor  # [B, T, H, D] or [ΣT, H, D]
    # The rounding error of ``out``, for backward; empty for fp32 and fp64, or without a gradient
    residual: Tensor
    # [2, …] fp32, for fp64 in fp64: for each row of ``out``, the largest score and the inverse of
    # the sum of weights before normalization; zeros if no history row is visible
    stats: Tensor


def new_outputs(args: TargetArguments) -> TargetOutputs:
    """Return uninitialized outputs."""
    query, shape = args.query, list(args.query.shape)
    if args.query_offsets is None:
        shape[0] = args.offsets.numel() - 1
    is_rounded = args.for_backward and query.element_size() == 2
    stats_dtype = torch.promote_types(query.dtype, torch.float32)
    return TargetOutputs(
        query.new_empty(shape),
        query.new_empty(shape if is_rounded else [0]),
        query.new_empty([2, *shape[:-1]], dtype=stats_dtype),
    )


class TargetOutputsWithLse(NamedTuple):
    """Outputs of ``target_attention_with_lse``: as :class:`TargetOutputs`, and ``lse``, the
    log-sum-exps of the scores of each row of ``out``, ``-inf`` if no history row is visible.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor
    stats: Tensor


class TargetGradients(NamedTuple):
    """Gradients of ``target_attention``. Implementations return the gradients of the logarithms of
    prior weights, ``[N]`` or by head ``[N, H]``, which ``api.py`` converts.
    """

    query: Tensor
    history: Tensor | None
    prior_weights: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None
