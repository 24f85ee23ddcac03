"""``jagged_target_attention_over_codes``: target attention over rows stored as packed codes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchrec_jagged_attn.base.autocast import autocast_off, cast_as_products
from torchrec_jagged_attn.base.checks import check_float, check_same, check_shape, check_tensor
from torchrec_jagged_attn.codes.checks import check_packed
from torchrec_jagged_attn.codes.packed_codes import PackedCodes
from torchrec_jagged_attn.ops import jagged_target_attention


def jagged_target_attention_over_codes(
    query: Tensor,
    packed: Tensor,
    offsets: Tensor,
    mean: Tensor,
    basis: Tensor,
    *,
    num_levels: int = 3,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    r"""Attend from query rows to the decoded rows of their sample, without materializing them.

    For query row :math:`q`, over its sample's rows :math:`\hat x_n = \mu + B^T c_n` of codes
    :math:`c_n`,

    .. math:: q \cdot \hat x_n = (B q) \cdot c_n + q \cdot \mu, \qquad
              \sum_n p_n \hat x_n = B^T \sum_n p_n c_n + \mu \sum_n p_n

    It calls :func:`jagged_target_attention` over rows of ``L + 1`` instead of ``D`` columns: the
    codes of a row and a constant 1. The query is ``B q``, followed by :math:`q \cdot \mu`, or by 0
    for a softmax, which this constant does not change. The last column of the op's output is the
    sum of the weights, which is 0 for an empty history.

    Args:
        query: see :func:`jagged_target_attention`; any width ``D``.
        packed: ``[N, num_bytes]`` uint8, packed by ``PackedCodes(L, num_levels)``: the rows of all
            samples, one sample after the other.
        offsets: ``[B + 1]`` int32 or int64, see :class:`JaggedLayout`.
        mean: ``[D]``, dtype of ``query``.
        basis: ``[L, D]``, dtype of ``query``; ``L`` in 1…511.
        num_levels: number of values of a code.
        scale: factor of the dot products; ``1/√D`` by default.
        options: other options of :func:`jagged_target_attention`.

    Returns:
        The attention output, with the shape and dtype of ``query``.

    Raises:
        TypeError: a dtype or an option does not fit.
        ValueError: a shape, a device or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the
            values of offsets, bytes or prior weights do not fit.
        NotImplementedError: ``L`` is over 511, or the device is neither CPU nor CUDA.

    Example:
        >>> packed = PackedCodes(num_codes=1).pack(torch.tensor([[1], [0], [-1]]))
        >>> query, mean, basis = torch.zeros(2, 1, 2), torch.ones(2), torch.tensor([[4.0, 8.0]])
        >>> jagged_target_attention_over_codes(query, packed, torch.tensor([0, 2, 3]), mean, basis)
        tensor([[[ 3.,  5.]],
        <BLANKLINE>
                [[-3., -7.]]])
    """
    query, mean, basis = cast_as_products(query, mean, basis)
    check_tensor(query, "query")
    check_float(query, "query")
    if query.dim() not in (3, 4):
        raise ValueError(f"query must have 3 or 4 dimensions, got {list(query.shape)}")
    width = query.shape[-1]
    check_shape(basis, "basis", "[L, D]", (None, width))
    check_shape(mean, "mean", "[D]", (width,))
    check_same(query, "query", dtype=True, mean=mean, basis=basis)
    layout = PackedCodes(basis.shape[0], num_levels)
    check_packed(packed, "packed", layout.num_codes, layout.num_levels)
    check_same(query, "query", dtype=False, packed=packed)
    # With a softmax, q·μ would only cost precision of the scores.
    key_mean = torch.zeros_like(mean) if options.get("score", "softmax") == "softmax" else mean
    with autocast_off(query):  # all operands have the dtype of the query
        pooled = jagged_target_attention(
            query @ torch.cat([basis, key_mean.unsqueeze(0)]).T,
            packed,
            offsets,
            num_levels=layout.num_levels,
            scale=1 / math.sqrt(width) if scale is None else scale,
            **options,
        )
        return pooled @ torch.cat([basis, mean.unsqueeze(0)])
