"""The feature-interaction ops on a CPU, in PyTorch without padding.

Products and sums are computed in fp32 (fp64 for fp64 inputs), as in the kernels. A product is one
``grouped_mm`` for all samples if it supports the operands, else one product per sample. The bits of
a batched product would depend on the number of samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn.base.layout import sample_ids


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [B, D, T] → [N, T]``."""
    x, y, dtype = _compute(x), _compute(y), x.dtype
    if _fits_grouped_mm(x) and _fits_grouped_mm(y):
        return F.grouped_mm(x, y, offs=offsets[1:].int()).to(dtype).contiguous()
    out = x.new_empty(x.shape[0], y.shape[2], dtype=dtype)
    for (rows,), y_DT in zip(_slices(offsets), y, strict=True):
        out[rows] = x[rows] @ y_DT
    return out


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [N, T] → [B, D, T]``."""
    x, y, dtype = _compute(x), _compute(y), x.dtype
    if _fits_grouped_mm(x) and _fits_grouped_mm(y):
        return F.grouped_mm(x.T, y, offs=offsets[1:].int()).to(dtype).contiguous()
    out = x.new_empty(offsets.numel() - 1, x.shape[1], y.shape[1], dtype=dtype)
    for (rows,), out_DT in zip(_slices(offsets), out, strict=True):
        out_DT[:] = x[rows].T @ y[rows]
    return out


def pair_offsets(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """``[B + 1]`` int64 offsets of the pairs of each sample."""
    pairs = x_offsets.diff().long() * y_offsets.diff()
    return F.pad(pairs.cumsum(0), (1, 0))


def pair_bmm(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor, total: int
) -> Tensor:
    """``[Nx, D], [Ny, D] → [total]``."""
    out = x.new_empty(total)
    x, y = _compute(x), _compute(y)
    for x_rows, y_rows, pairs in _slices(x_offsets, y_offsets, pair_offsets):
        out[pairs] = (x[x_rows] @ y[y_rows].T).flatten()
    return out


def array_jagged_bmm(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    pair_offsets: Tensor,
    num_rows: int,
    transposed: bool,
) -> Tensor:
    """``[Σ Lx·Ly], [Ny, D] → [Nx, D]``; if ``transposed``, ``[Nx, D] → [Ny, D]``."""
    out = y.new_empty(num_rows, y.shape[1])
    p, y = _compute(p), _compute(y)
    for x_rows, y_rows, pairs in _slices(x_offsets, y_offsets, pair_offsets):
        p_XY = p[pairs].view(x_rows.stop - x_rows.start, y_rows.stop - y_rows.start)
        if transposed:
            out[y_rows] = p_XY.T @ y[x_rows]
        else:
            out[x_rows] = p_XY @ y[y_rows]
    return out


def softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    """Softmax of each column of each sample's rows of ``x`` ``[N, T]``.

    With ``y_offsets``, of each row of each sample's pairs ``[Σ Lx·Ly]``, and ``offsets`` are pair
    offsets.
    """
    if y_offsets is not None:
        out = x.new_empty(x.shape)
        for pairs, shape in _nonempty_pairs(offsets, y_offsets):
            x_XY = _compute(x[pairs]).view(shape)
            is_masked = x_XY.amax(1, keepdim=True) == -torch.inf
            out[pairs] = x_XY.softmax(1).masked_fill_(is_masked, 0).flatten()
        return out
    x_NT, samples = _compute(x).contiguous(), sample_ids(offsets, x.shape[0])
    largest_BT = torch.segment_reduce(x_NT, "max", offsets=offsets, unsafe=True)
    largest_BT.clamp_(min=torch.finfo(x_NT.dtype).min)
    p_NT = (x_NT - largest_BT.index_select(0, samples)).exp_()
    total_BT = _sum_rows(p_NT, offsets).clamp_(min=1)
    return p_NT.div_(total_BT.index_select(0, samples)).to(x.dtype)


def softmax_backward(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Gradient of the input of :func:`softmax`, which returned ``out``."""
    if y_offsets is not None:
        grad_x = out.new_empty(out.shape)
        for pairs, shape in _nonempty_pairs(offsets, y_offsets):
            p_XY, dp_XY = (_compute(x[pairs]).view(shape) for x in (out, grad_out))
            ds_XY = p_XY * (dp_XY - (p_XY * dp_XY).sum(1, keepdim=True))
            grad_x[pairs] = ds_XY.flatten()
        return grad_x
    p_NT, dp_NT = _compute(out), _compute(grad_out).contiguous()
    mean_BT = _sum_rows(p_NT * dp_NT, offsets)
    mean_NT = mean_BT.index_select(0, sample_ids(offsets, out.shape[0]))
    return p_NT.mul(dp_NT - mean_NT).to(out.dtype)


def elementwise(x: Tensor, y: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    """Each row of ``x`` ``[N, D]`` plus or times its sample's row of ``y`` ``[B, D]``."""
    rows = y.index_select(0, sample_ids(offsets, x.shape[0]))
    return rows.mul_(x) if multiply else rows.add_(x)


def sum_rows(x: Tensor, y: Tensor | None, offsets: Tensor) -> Tensor:
    """The sum ``[B, D]`` of each sample's rows of ``x`` ``[N, D]``, or of ``x · y``."""
    products = _compute(x) if y is None else _compute(x) * _compute(y)
    return _sum_rows(products, offsets).to(x.dtype)


def _nonempty_pairs(
    pair_offsets: Tensor, y_offsets: Tensor
) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield the pairs of each sample that has some, and their shape ``(Lx, Ly)``."""
    for (pairs,), num_y in zip(_slices(pair_offsets), y_offsets.diff().tolist(), strict=True):
        if pairs.stop > pairs.start:
            yield pairs, ((pairs.stop - pairs.start) // num_y, num_y)


def _sum_rows(x_NT: Tensor, offsets: Tensor) -> Tensor:
    """Sum each sample's rows to ``[B, T]``, in fp64, since the sum is sequential."""
    total = torch.segment_reduce(x_NT.double().contiguous(), "sum", offsets=offsets, unsafe=True)
    return total.to(x_NT.dtype)


def _slices(*all_offsets: Tensor) -> Iterator[tuple[slice, ...]]:
    """Yield the rows of each sample, one slice for each of the given offsets."""
    slices = (
        itertools.starmap(slice, itertools.pairwise(offsets.tolist())) for offsets in all_offsets
    )
    return zip(*slices, strict=True)


def _compute(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fits_grouped_mm(x: Tensor) -> bool:
    """Whether ``grouped_mm`` supports ``x``: fp32, rows or columns aligned to 16 bytes."""
    if x.dtype != torch.float32 or x.data_ptr() % 16 or x.numel() == 0:
        return False
    *batch_strides, row_stride, column_stride = x.stride()
    row_major = column_stride == 1 and row_stride >= x.shape[-1] and row_stride % 4 == 0
    column_major = row_stride == 1 and column_stride >= x.shape[-2] and column_stride % 4 == 0
    return (row_major or column_major) and all(stride % 4 == 0 for stride in batch_strides)
