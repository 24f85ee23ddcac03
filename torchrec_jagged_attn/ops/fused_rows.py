"""The rows of FBGEMM's quantized tables, as :func:`jagged_target_attention` reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.checks import check_shape

__all__ = ["FusedRows", "fused_rows"]


class FusedRows(NamedTuple):
    """Views of fused rows, by the names that :func:`jagged_target_attention` has for them.

    Attributes:
        history: ``[U, D]`` uint8.
        row_scale: ``[U]`` fp32 or fp16.
        row_bias: likewise.
    """

    history: Tensor
    row_scale: Tensor
    row_bias: Tensor


def fused_rows(rows: Tensor, width: int, *, scale_bias_last: bool = True) -> FusedRows:
    """View rows that FBGEMM has quantized to 8 bits as numbers, scales and biases: no copy is made.

    .. math:: x_u = row\\_scale_u \\cdot history_u + row\\_bias_u

    Args:
        rows: ``[U, R]`` uint8, each a multiple of 4 bytes: the numbers of a row, its scale and its
            bias.
        width: ``D``, how many numbers a row has, a multiple of 4.
        scale_bias_last: whether a row is ``D`` numbers, and scale and bias in fp32 after them, as
            ``torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized`` makes it; or scale and bias in
            fp16, and ``D`` numbers after them, as ``IntNBitTableBatchedEmbeddingBagsCodegen`` holds
            its INT8 tables. More bytes may follow.

    Returns:
        What ``jagged_target_attention(query, offsets=offsets, **rows._asdict())`` takes.

    Raises:
        TypeError: ``rows`` are not uint8.
        ValueError: ``rows`` or ``width`` do not fit.

    Example:
        >>> rows = torch.tensor([[0, 1, 2, 255, 0, 0, 0, 63, 0, 0, 128, 191]], dtype=torch.uint8)
        >>> x = fused_rows(rows, 4)
        >>> x.row_scale, x.row_bias
        (tensor([0.5000]), tensor([-1.]))
        >>> x.history * x.row_scale.unsqueeze(1) + x.row_bias.unsqueeze(1)
        tensor([[ -1.0000,  -0.5000,   0.0000, 126.5000]])
    """
    check_shape(rows, "rows", "[U, R]", (None, None))
    if rows.dtype != torch.uint8:
        raise TypeError(f"rows must be uint8, got {rows.dtype}")
    row_bytes = width + (8 if scale_bias_last else 4)
    if width < 1 or width % 4:
        raise ValueError(f"width must be a multiple of 4, got {width}")
    if rows.shape[1] < row_bytes:
        raise ValueError(
            f"rows must have {row_bytes} bytes or more each, for {width} numbers, scale and bias, "
            f"got {rows.shape[1]}"
        )
    if rows.stride(1) != 1 or rows.stride(0) % 4 or rows.storage_offset() % 4:
        raise ValueError(
            "rows must begin at multiples of 4 bytes, each byte next to the last, got strides "
            f"{rows.stride()} and a storage offset of {rows.storage_offset()}"
        )
    if scale_bias_last:
        begin, scales = 0, rows[:, width : width + 8].view(torch.float32)
    else:
        begin, scales = 4, rows[:, :4].view(torch.float16)
    return FusedRows(rows[:, begin : begin + width], scales[:, 0], scales[:, 1])
