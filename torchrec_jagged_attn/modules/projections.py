"""Linear projections of ``JaggedTargetAttention``: absorbed, or as materialized keys and values.

With ``R`` targets ``[R, C]`` in all, and ``W_K,h`` ``[E / H, D]`` the rows of ``W_K`` of head
``h``, the projections of keys and values are absorbed: they are applied to queries and pooled rows,
in place of all ``N`` history rows,

    q = target · W_Qᵀ + b_Q                   [R, E]
    absorbed_h = q_h · W_K,h                  [R, D]      the query of attention over raw rows
    pooled_h = Σ_n p_nh x_n                   [R, D]      the output of that attention
    values_h = pooled_h · W_V,hᵀ + b_V,h      [R, E / H]  b_V only if the sample has a history
    out = values · W_Oᵀ + b_O                 [R, E]

Without a value projection, ``D = E``, and the values of head ``h`` are its ``E / H`` columns of
``pooled_h``.

With many targets, keys and values are materialized instead, ``[N, E]`` each, and flash attention
attends to them. With ``T`` targets per sample, each history row then takes

                absorbed          materialized
    forward     4·T·H·D           4·T·E + 4·D·E             FLOPs
    backward    14·T·H·D          14·T·E + 12·D·E           FLOPs
    together    3·D               4·D + 16·E                elements moved
"""

# torch.jit.script reads annotations of records and functions, so they are no strings here.
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from torchrec_jagged_attn.ops.attention.checks import MAX_WIDTH


class ProjectionWeights(NamedTuple):
    """Parameters of a module, with the names and shapes of ``torch.nn.MultiheadAttention``."""

    q_weight: Tensor  # [E, C]; or, without the next two, [3 · E, E] for all three
    k_weight: Tensor | None  # [E, D]
    v_weight: Tensor | None  # [E, D]
    in_bias: Tensor | None  # [3 · E]; [E] of queries without a value projection
    out_weight: Tensor | None  # [E, E]; None without a value projection
    out_bias: Tensor | None  # [E]


class Projections(NamedTuple):
    """Weights of each projection, in the dtype of its products."""

    query: Tensor  # [E, C]
    query_bias: Tensor | None  # [E]
    key: Tensor  # [H, E / H, D]
    value: Tensor | None  # [H, E / H, D]; None without a value projection, like all below
    value_bias: Tensor | None  # [E]
    output: Tensor | None  # [E, E]
    output_bias: Tensor | None  # [E]


def split_projections(
    weights: ProjectionWeights, num_heads: int, dtype: torch.dtype
) -> Projections:
    """Return the weights of each projection in ``dtype``, with keys and values divided by head."""
    w_q, w_k, w_v, b_q, w_out, b_out = weights
    b_v: Tensor | None = None
    if w_k is None:
        w_q, w_k, w_v = w_q.chunk(3)
    if w_v is not None and b_q is not None:
        b_q, _, b_v = b_q.chunk(3)
    return Projections(
        w_q.to(dtype),
        None if b_q is None else b_q.to(dtype),
        w_k.to(dtype).reshape(num_heads, -1, w_k.shape[1]),
        None if w_v is None else w_v.to(dtype).reshape(num_heads, -1, w_v.shape[1]),
        None if b_v is None else b_v.to(dtype),
        None if w_out is None else w_out.to(dtype),
        None if b_out is None else b_out.to(dtype),
    )


def absorb_keys(q: Tensor, w_k: Tensor) -> Tensor:
    """Return absorbed queries ``[R, H, D]`` of queries ``[R, E]``, contiguous."""
    num_heads, head_dim = w_k.shape[:2]
    by_head = q.view(q.shape[0], num_heads, head_dim).transpose(0, 1)
    return torch.bmm(by_head, w_k).transpose(0, 1).contiguous()


def project_values(pooled: Tensor, w_v: Tensor | None) -> Tensor:
    """Return values ``[R, E]`` of pooled rows ``[R, H, D]``, without a bias."""
    num_rows, num_heads, width = pooled.shape
    if w_v is not None:
        return torch.bmm(pooled.transpose(0, 1), w_v.mT).transpose(0, 1).flatten(1)
    columns = pooled.view(num_rows, num_heads, num_heads, width // num_heads)
    return columns.diagonal(dim1=1, dim2=2).mT.flatten(1)


def project_outputs(values: Tensor, has_rows: Tensor | None, projections: Projections) -> Tensor:
    """Return outputs ``[R, E]`` of ``values`` ``[R, E]``.

    The bias of values is added for targets whose sample has a history, see :func:`has_history`.
    """
    w_out, b_v = projections.output, projections.value_bias
    if w_out is None:
        return values
    if b_v is not None and has_rows is not None:
        values = values + has_rows.unsqueeze(1) * b_v
    return F.linear(values, w_out, projections.output_bias)


def has_history(
    offsets: Tensor,
    prior_weights: Tensor | None,
    query_offsets: Tensor | None,
    num_queries: int,
) -> Tensor:
    """Return ``[R]`` bool: whether each query's sample has rows with positive prior weights."""
    if prior_weights is None:
        has_rows = offsets.diff() > 0
    else:
        counts = F.pad((prior_weights > 0).cumsum(0), (1, 0))
        has_rows = counts[offsets.long()].diff() > 0
    if query_offsets is None:
        num_samples = has_rows.shape[0]
        num_targets = num_queries // num_samples if num_samples > 0 else 0
        return has_rows.unsqueeze(1).expand(-1, num_targets).flatten()
    rows = torch.arange(num_queries, device=offsets.device)
    # Queries behind the last offset belong to a further sample without a history.
    samples = torch.bucketize(rows, query_offsets[1:].contiguous(), right=True)
    return F.pad(has_rows, (0, 1))[samples]


def is_materialized(
    shape: list[int],
    history: Tensor,
    offsets: Tensor,
    is_jagged: bool,
    embed_dim: int,
    num_heads: int,
    has_value_projection: bool,
    score: str,
    num_levels: int,
    max_head_dim: int = MAX_WIDTH,
) -> bool:
    """Return whether keys and values of all history rows are materialized, for targets of ``shape``
    ``[B]``, ``[B, T]`` or, if they are jagged, ``[ΣT]``.

    Flash attention requires a softmax, rows without packed codes, and heads of up to 512 columns.
    Then the costs at the top of this file are compared, which depend on shapes alone. For targets
    ``[B, T, C]`` they do not depend on ``B``, so that compiled and exported code is valid for any
    ``B``.
    """
    if score != "softmax" or num_levels > 0 or embed_dim // num_heads > max_head_dim:
        return False
    # FLOPs in the time of moving an element; and FLOPs of attention over keys in the time of one
    # FLOP over raw rows, whose kernels are slower for many targets. On CUDA for an H200 with 250
    # TFLOP/s in 16 bits, 32 in fp32, and 4 TB/s; on a CPU measured for histories of 100 rows.
    flops_per_element, flops_of_absorbed, queries_to_fill = 28.0, 1.0, 0
    if history.is_cuda:
        flops_per_element, flops_of_absorbed = 32.0, 4.5
        if history.element_size() == 2:
            flops_per_element, flops_of_absorbed = 128.0, 3.5
        queries_to_fill = 8192  # targets × heads; over keys, fewer queries take as long
    num_samples, num_targets, num_to_fill = 1, 1, 0
    if is_jagged:
        num_samples, num_targets = offsets.shape[0] - 1, shape[0]
        num_to_fill = queries_to_fill // num_heads
    elif len(shape) > 1:
        num_targets = shape[1]
    history_dim = history.shape[1]
    flops, elements = (16, 16) if has_value_projection else (8, 13)  # (8, 13): keys alone
    moved = history_dim + elements * embed_dim
    per_row = flops * history_dim * embed_dim + moved * flops_per_element
    absorbed = int(18 * flops_of_absorbed) * num_targets * num_heads * history_dim
    materialized = 18 * num_targets * embed_dim + num_samples * per_row
    with_few_queries = 18 * num_to_fill * embed_dim + num_samples * per_row
    is_cheaper, is_cheaper_with_few = absorbed > materialized, absorbed > with_few_queries
    if is_scripting():
        return is_cheaper and is_cheaper_with_few
    # An exported program that does not know the number of targets, as in serving, materializes.
    return guard_or_true(is_cheaper) and guard_or_true(is_cheaper_with_few)
