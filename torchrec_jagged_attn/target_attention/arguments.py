"""Records of what the ops take, return and give as gradients.

The fields of a record, and of records in it, are the arguments of an op's schema. Of the gradients,
each has the name of the argument that it belongs to, and is ``None`` if not requested.
"""

# torch.jit.script reads annotations of records, so they are no strings here.
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.attention.arguments import Biases


class TargetArguments(NamedTuple):
    """Arguments of ``target_attention``: see :func:`jagged_target_attention`."""

    query: Tensor  # [B, T, H, D], [1, T, H, D] or, with ``query_offsets``, [ΣT, H, D]
    history: Tensor  # [N, D] or, with ``indices``, [U, D]; with ``num_levels``, of packed rows
    offsets: Tensor
    query_offsets: Tensor | None
    indices: Tensor | None  # [N], of the rows of ``history``
    biases: Biases  # of history rows
    # [N] int32 or int64, where the rows are some of a larger batch: the number that each has there,
    # by which dropout of its weights draws and its position is counted. ``None`` of a batch that is
    # whole. Ages are then counted from ``request_time``.
    row_numbers: Tensor | None
    # [B], in the same dtype, with ``row_numbers`` alone: the number after the last row that each
    # sample has there
    row_number_ends: Tensor | None
    scale: float
    score: str  # one of ``SCORES``
    num_levels: int  # of packed codes; 0 where ``history`` is not packed
    for_backward: bool  # whether a gradient may be taken

    @property
    def num_rows(self) -> int:
        """``N``, how many rows the histories of all samples have."""
        return (self.history if self.indices is None else self.indices).shape[0]


class TargetOutputs(NamedTuple):
    """What ``target_attention`` returns."""

    out: Tensor  # [B, T, H, D] or [ΣT, H, D]
    # fp32 output minus its rounded value, for the gradient; empty for fp32, or without a gradient
    residual: Tensor
    # [2, …] fp32, of fp64 in fp64: of each row of ``out`` the softmax's largest score and one by
    # the sum of its weights; zeros where it sees nothing
    stats: Tensor


def new_outputs(args: TargetArguments) -> TargetOutputs:
    """Tensors of the shapes and dtypes that the op gives, with nothing in them."""
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
    """What ``target_attention_with_lse`` returns: :class:`TargetOutputs`, and ``lse``, of each row
    of ``out`` the logarithm of the sum of e to its scores; ``-inf`` where it sees nothing.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor
    stats: Tensor


class TargetGradients(NamedTuple):
    """Gradients of ``target_attention``. That of prior weights is of their logarithms, in fp32."""

    query: Tensor
    history: Tensor | None
    bias: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None
