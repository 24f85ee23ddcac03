"""The unfused feature-interaction ops of the paper's Table 1, and elementwise ops."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from torchrec_jagged_attn.base.autocast import cast_as_products, cast_as_softmax, cast_as_sums
from torchrec_jagged_attn.base.checks import (
    check_has_values,
    check_int,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.ops.interaction import gradients as registered


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Multiply each sample's rows by its own matrix: :math:`out_n = x_n \cdot y_{b(n)}`.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[B, D, T]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64: sample ``b`` owns rows ``offsets[b]`` to
            ``offsets[b + 1] - 1``.

    Returns:
        ``[N, T]``, in the dtype of ``x``; under autocast in its dtype, as ``torch.bmm``.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device or (on CPU, or under ``TORCHREC_JAGGED_ATTN_VALIDATE=1``) the
            values of offsets do not fit.
        NotImplementedError: the device is neither CPU nor CUDA.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> y = torch.tensor([[[1.0], [1.0]], [[10.0], [0.0]]])  # B=2, D=2, T=1
        >>> jagged_dense_bmm(x, y, torch.tensor([0, 2, 3]))
        tensor([[ 3.],
                [ 7.],
                [50.]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    return registered.call_jagged_dense_bmm(*cast_as_products(x, y), offsets)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Sum the outer products of each sample's rows: :math:`out_b = \sum_{n \in b} x_n^T y_n`.

    The result of an empty sample is zeros.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[N, T]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[B, D, T]``, in the dtype of ``x``; under autocast in its dtype, as ``torch.bmm``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> y = torch.tensor([[1.0], [1.0], [10.0]])
        >>> jagged_jagged_bmm(x, y, torch.tensor([0, 2, 3])).squeeze(2)
        tensor([[ 4.,  6.],
                [50., 60.]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    return registered.call_jagged_jagged_bmm(*cast_as_products(x, y), offsets)


def jagged_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    r"""Softmax of each column over each sample's rows: :math:`e^{x_{nt}} / \sum_m e^{x_{mt}}`.

    The result of a column with only ``-inf`` is zeros.

    Args:
        x: ``[N, T]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[N, T]``, in the dtype of ``x``; in fp32 under autocast, as ``torch.softmax``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`.

    Example:
        >>> jagged_softmax(torch.tensor([[1.0], [1.0], [5.0]]), torch.tensor([0, 2, 3]))
        tensor([[0.5000],
                [0.5000],
                [1.0000]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    return registered.call_softmax(cast_as_softmax(x), offsets, None)


def jagged_jagged_bmm_jagged_out(
    x: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    *,
    total: int | None = None,
) -> Tensor:
    r"""Dot products of all pairs of rows within each sample: :math:`out_{ij} = x_i \cdot y_j`.

    A sample with ``Lx`` and ``Ly`` rows has ``Lx·Ly`` consecutive pairs, ``Ly`` for each row of
    ``x``. Samples keep their order.

    Args:
        x: ``[Nx, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[Ny, D]``, dtype of ``x``.
        x_offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.
        y_offsets: ``[B + 1]`` int32 or int64, the same for ``y``; by default ``x_offsets``.
        total: ``Σ Lx·Ly``. By default, the host reads it from the device, and waits for it once.

    Returns:
        ``[Σ Lx·Ly]``, in the dtype of ``x``; under autocast in its dtype, as ``torch.bmm``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`; ``total`` is
            checked if the values of offsets are.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> jagged_jagged_bmm_jagged_out(x, x, torch.tensor([0, 2, 3]), total=5)
        tensor([1., 2., 2., 4., 9.])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    pair_offsets = registered.call_pair_offsets(x_offsets, y_offsets)
    if total is None:
        total = _last(pair_offsets, "total")
    else:
        total = check_int(total, "total", 0, "an int or None")
    return registered.call_pair_bmm(
        *cast_as_products(x, y), x_offsets, y_offsets, pair_offsets, total
    )


def array_jagged_bmm_jagged_out(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    *,
    num_rows: int | None = None,
) -> Tensor:
    r"""Sum each sample's rows, weighted by its pairs: :math:`out_i = \sum_j p_{ij} y_j`.

    Args:
        p: ``[Σ Lx·Ly]``, see :func:`jagged_jagged_bmm_jagged_out`. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[Ny, D]`` rows of all samples, one sample after the other, dtype of ``p``.
        x_offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.
        y_offsets: ``[B + 1]`` int32 or int64, the same for ``y``; by default ``x_offsets``.
        num_rows: ``Nx``. By default ``Ny`` without ``y_offsets``; with them, the host reads it from
            the device, and waits for it once.

    Returns:
        ``[Nx, D]``, in the dtype of ``p``; under autocast in its dtype, as ``torch.bmm``. Rows
        of samples with ``Ly = 0`` are zeros.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`; the size of ``p``
            is checked if the values of offsets are.

    Example:
        >>> y = torch.tensor([[1.0], [2.0], [3.0]])
        >>> p = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0])
        >>> array_jagged_bmm_jagged_out(p, y, torch.tensor([0, 2, 3]))
        tensor([[1.],
                [3.],
                [6.]])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    check_shape(y, "y", "[Ny, D]", (None, None))
    if num_rows is not None:
        num_rows = check_int(num_rows, "num_rows", 0, "an int or None")
    elif y_offsets is None:
        num_rows = y.shape[0]
    y_offsets = x_offsets if y_offsets is None else y_offsets
    pair_offsets = registered.call_pair_offsets(x_offsets, y_offsets)
    if num_rows is None:
        num_rows = _last(x_offsets, "num_rows")
    return registered.call_array_jagged_bmm(
        *cast_as_products(p, y), x_offsets, y_offsets, pair_offsets, num_rows, False
    )


def jagged2_softmax(p: Tensor, x_offsets: Tensor, y_offsets: Tensor | None = None) -> Tensor:
    r"""Softmax of each row of each sample's pairs: :math:`e^{p_{ij}} / \sum_k e^{p_{ik}}`.

    The result of a row with only ``-inf`` is zeros.

    Args:
        p: ``[Σ Lx·Ly]``, see :func:`jagged_jagged_bmm_jagged_out`. fp32, bf16 or fp16 (on CPU
            also fp64).
        x_offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.
        y_offsets: ``[B + 1]`` int32 or int64, the same for y; by default ``x_offsets``.

    Returns:
        ``[Σ Lx·Ly]``, in the dtype of ``p``; in fp32 under autocast, as ``torch.softmax``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`; the size of ``p``
            is checked if the values of offsets are.

    Example:
        >>> jagged2_softmax(torch.tensor([1.0, 1.0, 5.0, 5.0, 9.0]), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    pair_offsets = registered.call_pair_offsets(x_offsets, y_offsets)
    if should_validate(x_offsets):
        check_offsets_values(x_offsets, int(x_offsets[-1]), "x_offsets")
        check_offsets_values(y_offsets, int(y_offsets[-1]), "y_offsets")
    return registered.call_softmax(cast_as_softmax(p), pair_offsets, y_offsets)


def jagged_dense_add(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Add each sample's row of ``y`` to its rows of ``x``: :math:`out_n = x_n + y_{b(n)}`.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[B, D]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[N, D]``, in the dtype of ``x``; under autocast in the wider dtype of ``x`` and ``y``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> jagged_dense_add(x, torch.tensor([[10.0], [20.0]]), torch.tensor([0, 2, 3]))
        tensor([[11.],
                [12.],
                [23.]])
    """
    return registered.call_jagged_dense_add(*cast_as_sums(x, y), offsets)


def jagged_dense_mul(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Multiply each sample's rows of ``x`` by its row of ``y``: :math:`out_n = x_n y_{b(n)}`.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[B, D]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[N, D]``, in the dtype of ``x``; under autocast in the wider dtype of ``x`` and ``y``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> jagged_dense_mul(x, torch.tensor([[10.0], [20.0]]), torch.tensor([0, 2, 3]))
        tensor([[10.],
                [20.],
                [60.]])
    """
    return registered.call_jagged_dense_mul(*cast_as_sums(x, y), offsets)


def _last(offsets: Tensor, name: str) -> int:
    """Read the default of the argument ``name``, the last of ``offsets``, from the device."""
    check_has_values(offsets, name)
    size = cast("int", offsets[-1].item())  # torch.export cannot trace int(offsets[-1])
    if torch.compiler.is_compiling():
        torch._check_value(size >= 0)  # a strict export allows no message
    elif size < 0:
        raise ValueError(f"offsets must not end below 0, got {size}")
    return size
