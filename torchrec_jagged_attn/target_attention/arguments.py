"""Records of what the ops take, return and give as gradients.

The fields of a record, and of records in it, are the arguments of an op's schema. Of the gradients,
each has the name of the argument that it belongs to, and is ``None`` if not requested.
"""

# torch.jit.script reads annotations of records, so they are no strings here.
import math
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


class ProjectionWeights(NamedTuple):
    """Weights and biases of queries, keys, values and the output."""

    q_weight: Tensor  # [E, C]; or, without the next two, [3 · E, E] for all three
    k_weight: Tensor | None  # [E, D]
    v_weight: Tensor | None  # [E, D]
    # [3 · E] of queries, keys and values; that of keys changes nothing. [E] of queries alone, where
    # there is no ``out_weight``.
    in_bias: Tensor | None
    # [E, E]; or ``None``, where values are the rows of the history themselves and are not
    # projected: each head has its own columns of them. ``k_weight`` is given then, without
    # ``v_weight`` and ``out_bias``, and ``D = E``.
    out_weight: Tensor | None
    out_bias: Tensor | None  # [E]

    @property
    def of_inputs(self) -> list[Tensor]:
        """The weight of all three projections, or those of queries, keys and, if any, values."""
        return [weight for weight in self[:3] if weight is not None]


class MultiHeadArguments(NamedTuple):
    """Arguments of ``multi_head_target_attention``."""

    target: Tensor  # [B, C], [B, T, C] or, with ``query_offsets``, [ΣT, C], of any dtype
    history: Tensor  # [N, D] or, with ``indices``, [U, D]; with ``num_levels``, of packed rows
    offsets: Tensor  # [B + 1] int32 or int64
    query_offsets: Tensor | None  # [B + 1] int32 or int64, of a jagged target
    indices: Tensor | None  # [N], of the rows of ``history``: keys and values are absorbed then
    weights: ProjectionWeights  # of the module
    # Of history rows; ``bias`` are prior weights. ``dropout`` leaves the bias of values as it is.
    biases: Biases
    num_heads: int  # ``H``
    # What projections are computed in, whatever dtypes their inputs have; but materialized keys and
    # values in that of ``history``
    dtype: torch.dtype
    keys_and_values: str  # ``"absorbed"``, ``"materialized"`` or ``"auto"``
    score: str  # one of ``SCORES``
    num_levels: int  # see :class:`TargetArguments`. Keys and values are absorbed then
    for_backward: bool  # whether a gradient may be taken

    @property
    def embed_dim(self) -> int:
        """``E``, width of the output."""
        q_weight, out_weight = self.weights.q_weight, self.weights.out_weight
        return (q_weight if out_weight is None else out_weight).shape[0]

    @property
    def row_dim(self) -> int:
        """``D``, width of history rows; of codes, with the one after them."""
        if self.num_levels and self.weights.k_weight is not None:
            return self.weights.k_weight.shape[1]
        return self.history.shape[1]

    @property
    def row_dtype(self) -> torch.dtype:
        """What history rows are attended in; codes have no dtype of their own."""
        return self.dtype if self.num_levels else self.history.dtype

    @property
    def head_dim(self) -> int:
        """``E / H``, width of a head."""
        return self.embed_dim // self.num_heads

    @property
    def scale(self) -> float:
        """Factor of the scores: one by the root of a head's width."""
        return 1 / math.sqrt(self.head_dim)


class MultiHeadOutputs(NamedTuple):
    """What ``multi_head_target_attention`` returns: the output, and what its gradient needs.

    ``R`` are all targets.
    """

    out: Tensor  # [B, E], [B, T, E] or [ΣT, E]
    q: Tensor  # [R, H, E / H]
    # [R, H, D], what history rows are compared with, in the dtype of the history. Without a row
    # where nothing asks for it, like ``pooled``.
    u: Tensor
    pooled: Tensor  # [R, H, D], the pooled rows of the history, in its dtype
    residual: Tensor  # that of ``pooled``, see :class:`TargetOutputs`
    stats: Tensor  # of the attention
    # [R, E]; of no row where they are not projected: they are ``out``. Materialized ones are
    # without their bias where weights are dropped.
    values: Tensor
    # [R] ones for targets with a history, zeros for others; empty where values have no bias
    filled: Tensor


class MultiHeadGradients(NamedTuple):
    """Gradients of ``multi_head_target_attention``."""

    target: Tensor | None
    history: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    v_weight: Tensor | None
    in_bias: Tensor | None
    out_weight: Tensor | None
    out_bias: Tensor | None
    bias: Tensor | None
    position_bias: Tensor | None
    age_bias: Tensor | None


class ProjectionRows(NamedTuple):
    """Rows of ``R`` targets that the gradients of weights and biases are sums over."""

    grad_q: Tensor  # [R, E]
    target: Tensor  # [R, C]
    # [R, E]; ``None`` where values are not projected, like all of values below
    grad_out: Tensor | None = None
    v: Tensor | None = None  # [R, E], the pooled values
    grad_v: Tensor | None = None  # [R, E], of values
    # [R] ones where a target has a history, else zeros; empty without biases. Of values.
    filled: Tensor | None = None
    # [R, H, E / H]; ``None`` where keys and values are materialized, like the next two
    q: Tensor | None = None
    grad_u: Tensor | None = None  # [R, H, D]
    pooled: Tensor | None = None  # [R, H, D], of values


class ProjectionGradients(NamedTuple):
    """Gradients of weights and biases, each contiguous."""

    w_q: Tensor  # [E, C]
    # [E, E]; ``None`` where values are not projected, like ``w_v`` and ``b_out``
    w_out: Tensor | None
    # [H, E / H, D]; ``None`` where keys and values are materialized, like the next one
    w_k: Tensor | None
    w_v: Tensor | None  # [H, E / H, D]
    # [3 · E] of queries, keys (zeros) and values, or [E] of queries alone, where values are not
    # projected; ``None`` without
    b_in: Tensor | None
    b_out: Tensor | None  # [E]; ``None`` without
