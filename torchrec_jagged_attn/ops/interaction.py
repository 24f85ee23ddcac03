"""The feature interactions of the paper's Table 1, unfused, and what goes with them.

The gradient of each is made of the others:

    out = dense(x, y)     dx = dense(dout, yᵀ)    dy = jagged(x, dout)
    out = jagged(x, y)    dx = dense(y, doutᵀ)    dy = dense(x, dout)
    out = pairs(x, y)     dx = array(dout, y)     dy = array(doutᵀ, x)
    out = array(p, y)     dp = pairs(dout, y)     dy = array(pᵀ, dout)

where dense is ``jagged_dense_bmm``, jagged ``jagged_jagged_bmm``, pairs
``jagged_jagged_bmm_jagged_out`` and array ``array_jagged_bmm_jagged_out``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchrec_jagged_attn import reference_interaction
from torchrec_jagged_attn.kernels import interaction as kernels
from torchrec_jagged_attn.kernels import jagged_products
from torchrec_jagged_attn.layout import check_offsets_metadata, should_validate
from torchrec_jagged_attn.ops.checks import (
    check_float,
    check_offsets_values,
    check_same,
    check_shape,
)
from torchrec_jagged_attn.ops.dispatch import implementation
from torchrec_jagged_attn.ops.registration import register_op_of_ops

__all__ = [
    "array_jagged_bmm_jagged_out",
    "jagged2_softmax",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_softmax",
]


def jagged_dense_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Multiply each sample's rows by its own matrix: :math:`out_n = x_n \cdot y_{b(n)}`.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[B, D, T]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64: sample ``b`` owns rows ``offsets[b]`` to
            ``offsets[b + 1] - 1``.

    Returns:
        ``[N, T]``, in the dtype of ``x``.

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
    _check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[B, D, T]", (offsets.numel() - 1, x.shape[1], None))
    check_same(x, "x", dtype=True, y=y)
    return _jagged_dense_bmm(x, y, offsets)


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Sum the outer products of each sample's rows: :math:`out_b = \sum_{n \in b} x_n^T y_n`.

    An empty sample has zeros.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[N, T]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[B, D, T]``, in the dtype of ``x``.

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
    _check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[N, T]", (x.shape[0], None))
    check_same(x, "x", dtype=True, y=y)
    return _jagged_jagged_bmm(x, y, offsets)


def jagged_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    r"""Softmax over each sample's rows, of each column: :math:`e^{x_{nt}} / \sum_m e^{x_{mt}}`.

    A column of a sample that has nothing but ``-inf`` gives zeros.

    Args:
        x: ``[N, T]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[N, T]``, in the dtype of ``x``. It has no second derivative.

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
    _check_rows(x, "x", "[N, T]", offsets, "offsets")
    return _softmax(x, offsets, None)


def jagged_jagged_bmm_jagged_out(
    x: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    *,
    total: int | None = None,
) -> Tensor:
    r"""Dot products of all pairs of rows within each sample: :math:`out_{ij} = x_i \cdot y_j`.

    A sample with ``Lx`` and ``Ly`` rows has ``Lx·Ly`` pairs, row by row of ``x``, after those of
    the samples before it.

    Args:
        x: ``[Nx, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[Ny, D]``, dtype of ``x``.
        x_offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.
        y_offsets: ``[B + 1]`` int32 or int64, the same for ``y``; by default ``x_offsets``.
        total: ``Σ Lx·Ly``. Without it, it is read from the device, which waits for it once.

    Returns:
        ``[Σ Lx·Ly]``, in the dtype of ``x``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`; ``total`` is
            checked where values of offsets are.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> jagged_jagged_bmm_jagged_out(x, x, torch.tensor([0, 2, 3]), total=5)
        tensor([1., 2., 2., 4., 9.])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    _check_rows(x, "x", "[Nx, D]", x_offsets, "x_offsets")
    _check_rows(y, "y", "[Ny, D]", y_offsets, "y_offsets")
    check_shape(y, "y", "[Ny, D]", (None, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)
    pair_offsets = _pair_offsets(x, "x", x_offsets, y_offsets)
    if total is None:
        total = int(pair_offsets[-1])
    return _pair_bmm(x, y, x_offsets, y_offsets, pair_offsets, total)


def array_jagged_bmm_jagged_out(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    *,
    num_rows: int | None = None,
) -> Tensor:
    r"""Sum each sample's rows by the weights of its pairs: :math:`out_i = \sum_j p_{ij} y_j`.

    Args:
        p: ``[Σ Lx·Ly]``, as :func:`jagged_jagged_bmm_jagged_out` gives. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[Ny, D]`` rows of all samples, one sample after the other, dtype of ``p``.
        x_offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.
        y_offsets: ``[B + 1]`` int32 or int64, the same for ``y``; by default ``x_offsets``.
        num_rows: ``Nx``. Without it, it is ``Ny``, unless ``y_offsets`` are given: then it is read
            from the device, which waits for it once.

    Returns:
        ``[Nx, D]``, in the dtype of ``p``. Where ``Ly`` is 0, rows are zero.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`; the size of ``p``
            is checked where values of offsets are.

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
    check_offsets_metadata(x_offsets, "x_offsets")
    if num_rows is None:
        num_rows = y.shape[0] if y_offsets is None else int(x_offsets[-1])
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_float(p, "p")
    check_shape(p, "p", "[Σ Lx·Ly]", (None,))
    _check_rows(y, "y", "[Ny, D]", y_offsets, "y_offsets")
    check_same(p, "p", dtype=True, y=y)
    pair_offsets = _pair_offsets(p, "p", x_offsets, y_offsets)
    return _array_jagged_bmm(p, y, x_offsets, y_offsets, pair_offsets, num_rows, False)


def jagged2_softmax(p: Tensor, x_offsets: Tensor, y_offsets: Tensor | None = None) -> Tensor:
    r"""Softmax of each row of each sample's pairs: :math:`e^{p_{ij}} / \sum_k e^{p_{ik}}`.

    A row that has nothing but ``-inf`` gives zeros.

    Args:
        p: ``[Σ Lx·Ly]``, as :func:`jagged_jagged_bmm_jagged_out` gives. fp32, bf16 or fp16 (on CPU
            also fp64).
        x_offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.
        y_offsets: ``[B + 1]`` int32 or int64, the same for y; by default ``x_offsets``.

    Returns:
        ``[Σ Lx·Ly]``, in the dtype of ``p``. It has no second derivative.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`; the size of ``p``
            is checked where values of offsets are.

    Example:
        >>> jagged2_softmax(torch.tensor([1.0, 1.0, 5.0, 5.0, 9.0]), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])

    Source:
        Jagged Flash Attention (RecSys '24, https://arxiv.org/abs/2409.15373), Table 1.
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_offsets_metadata(x_offsets, "x_offsets")
    check_offsets_metadata(y_offsets, "y_offsets")
    check_float(p, "p")
    check_shape(p, "p", "[Σ Lx·Ly]", (None,))
    pair_offsets = _pair_offsets(p, "p", x_offsets, y_offsets)
    if should_validate(p):
        check_offsets_values(x_offsets, int(x_offsets[-1]), "x_offsets")
        check_offsets_values(y_offsets, int(y_offsets[-1]), "y_offsets")
    return _softmax(p, pair_offsets, y_offsets)


def jagged_dense_add(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Add each sample's row of ``y`` to its rows of ``x``: :math:`out_n = x_n + y_{b(n)}`.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[B, D]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[N, D]``, in the dtype of ``x``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> jagged_dense_add(x, torch.tensor([[10.0], [20.0]]), torch.tensor([0, 2, 3]))
        tensor([[11.],
                [12.],
                [23.]])
    """
    _check_elementwise(x, y, offsets)
    return _jagged_dense_add(x, y, offsets)


def jagged_dense_mul(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    r"""Multiply each sample's rows of ``x`` by its row of ``y``: :math:`out_n = x_n y_{b(n)}`.

    Args:
        x: ``[N, D]`` rows of all samples, one sample after the other. fp32, bf16 or fp16 (on CPU
            also fp64).
        y: ``[B, D]``, dtype of ``x``.
        offsets: ``[B + 1]`` int32 or int64, see :func:`jagged_dense_bmm`.

    Returns:
        ``[N, D]``, in the dtype of ``x``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`jagged_dense_bmm`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> jagged_dense_mul(x, torch.tensor([[10.0], [20.0]]), torch.tensor([0, 2, 3]))
        tensor([[10.],
                [20.],
                [60.]])
    """
    _check_elementwise(x, y, offsets)
    return _jagged_dense_mul(x, y, offsets)


def _check_rows(x: Tensor, name: str, symbols: str, offsets: Tensor, offsets_name: str) -> None:
    """``x`` must be two-dimensional, of a supported dtype, and where its offsets are."""
    check_offsets_metadata(offsets, offsets_name)
    check_float(x, name)
    check_shape(x, name, symbols, (None, None))
    check_same(x, name, dtype=False, **{offsets_name: offsets})


def _check_elementwise(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    _check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[B, D]", (offsets.numel() - 1, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)


def _pair_offsets(x: Tensor, name: str, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """``[B + 1]`` int64: where each sample's pairs begin, made on the device, without waiting."""
    check_shape(y_offsets, "y_offsets", "[B + 1]", (x_offsets.numel(),))
    check_same(x, name, dtype=False, x_offsets=x_offsets, y_offsets=y_offsets)
    pairs = x_offsets.diff().long() * y_offsets.diff()
    return F.pad(pairs.cumsum(0), (1, 0))


def _check_pairs(
    x_offsets: Tensor, num_x: int, y_offsets: Tensor, num_y: int, pair_offsets: Tensor, total: int
) -> None:
    """Values of offsets must divide the rows, and make ``total`` pairs; skipped as theirs are."""
    check_offsets_values(x_offsets, num_x, "x_offsets")
    check_offsets_values(y_offsets, num_y, "y_offsets")
    _check_total(pair_offsets, total)


def _check_total(pair_offsets: Tensor, total: int) -> None:
    if should_validate(pair_offsets) and int(pair_offsets[-1]) != total:
        raise ValueError(f"offsets must make the {total} pairs, got {int(pair_offsets[-1])}")


def _implementation(x: Tensor, of_triton: ModuleType) -> ModuleType:
    """What computes on the device of ``x``: plain PyTorch or the kernels."""
    is_reference = implementation(x.device)[0] == "reference"
    return reference_interaction if is_reference else of_triton


def _jagged_dense_bmm_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [B, D, T] → [N, T]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    with torch.cuda.device_of(x):
        return _implementation(x, jagged_products).jagged_dense_bmm(x, y, offsets)


def _jagged_dense_bmm_fake(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[2])


def _jagged_dense_bmm_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, y, offsets = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    grad_x = _jagged_dense_bmm(grad_out, y.mT, offsets) if needs_x else None
    grad_y = _jagged_jagged_bmm(x, grad_out, offsets) if needs_y else None
    return grad_x, grad_y, None


def _jagged_jagged_bmm_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [N, T] → [B, D, T]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    with torch.cuda.device_of(x):
        return _implementation(x, jagged_products).jagged_jagged_bmm(x, y, offsets)


def _jagged_jagged_bmm_fake(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


def _jagged_jagged_bmm_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, y, offsets = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    grad_x = _jagged_dense_bmm(y, grad_out.mT, offsets) if needs_x else None
    grad_y = _jagged_dense_bmm(x, grad_out, offsets) if needs_y else None
    return grad_x, grad_y, None


def _pair_bmm_forward(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor, total: int
) -> Tensor:
    """``[Nx, D], [Ny, D] → [Σ Lx·Ly]``."""
    _check_pairs(x_offsets, x.shape[0], y_offsets, y.shape[0], pair_offsets, total)
    with torch.cuda.device_of(x):
        pair_bmm = _implementation(x, jagged_products).pair_bmm
        return pair_bmm(x, y, x_offsets, y_offsets, pair_offsets, total)


def _pair_bmm_fake(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor, total: int
) -> Tensor:
    return x.new_empty(total)


def _pair_bmm_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, y, *offsets = ctx.saved_tensors
    needs_x, needs_y, *_ = ctx.needs_input_grad
    grad_x = _array_jagged_bmm(grad_out, y, *offsets, x.shape[0], False) if needs_x else None
    grad_y = _array_jagged_bmm(grad_out, x, *offsets, y.shape[0], True) if needs_y else None
    return grad_x, grad_y, None, None, None, None


def _array_jagged_bmm_forward(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    pair_offsets: Tensor,
    num_rows: int,
    transposed: bool,
) -> Tensor:
    """``[Σ Lx·Ly], [Ny, D] → [Nx, D]``; or, of pᵀ, ``[Nx, D] → [Ny, D]``."""
    num_x, num_y = (y.shape[0], num_rows) if transposed else (num_rows, y.shape[0])
    _check_pairs(x_offsets, num_x, y_offsets, num_y, pair_offsets, p.shape[0])
    with torch.cuda.device_of(p):
        array_jagged_bmm = _implementation(p, jagged_products).array_jagged_bmm
        return array_jagged_bmm(p, y, x_offsets, y_offsets, pair_offsets, num_rows, transposed)


def _array_jagged_bmm_fake(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    pair_offsets: Tensor,
    num_rows: int,
    transposed: bool,
) -> Tensor:
    return y.new_empty(num_rows, y.shape[1])


def _array_jagged_bmm_save(ctx: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.transposed = inputs[6]


def _array_jagged_bmm_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    p, y, *offsets = ctx.saved_tensors
    needs_p, needs_y, *_ = ctx.needs_input_grad
    grad_p = grad_y = None
    if needs_p:
        of_x, of_y = (y, grad_out) if ctx.transposed else (grad_out, y)
        grad_p = _pair_bmm(of_x, of_y, *offsets, p.shape[0])
    if needs_y:
        grad_y = _array_jagged_bmm(p, grad_out, *offsets, y.shape[0], not ctx.transposed)
    return grad_p, grad_y, None, None, None, None, None


def _softmax_forward(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    """Of columns of ``[N, T]``; or, with ``y_offsets`` and the offsets of pairs, of their rows."""
    _check_softmax(x, offsets, y_offsets)
    with torch.cuda.device_of(x):
        return _implementation(x, kernels).softmax(x, offsets, y_offsets)


def _softmax_fake(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _softmax_save(ctx: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
    ctx.save_for_backward(out, *inputs[1:])


def _softmax_grad(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    return _softmax_backward(grad_out, *ctx.saved_tensors), None, None


def _softmax_backward_forward(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Gradient of what gave ``out``."""
    with torch.cuda.device_of(out):
        return _implementation(out, kernels).softmax_backward(grad_out, out, offsets, y_offsets)


def _softmax_backward_fake(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    return out.new_empty(out.shape)


def _softmax_backward_grad(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    raise NotImplementedError("jagged_softmax and jagged2_softmax have no second derivative")


def _check_softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> None:
    if y_offsets is None:
        check_offsets_values(offsets, x.shape[0], "offsets")
    else:
        _check_total(offsets, x.shape[0])


def _jagged_dense_add_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] + [B, D] → [N, D]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    with torch.cuda.device_of(x):
        return _implementation(x, kernels).elementwise(x, y, offsets, multiply=False)


def _jagged_dense_mul_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] ∘ [B, D] → [N, D]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    with torch.cuda.device_of(x):
        return _implementation(x, kernels).elementwise(x, y, offsets, multiply=True)


def _elementwise_fake(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _jagged_dense_add_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    (offsets,) = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    grad_y = _jagged_sum(grad_out, None, offsets) if needs_y else None
    return grad_out if needs_x else None, grad_y, None


def _jagged_dense_mul_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, y, offsets = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    grad_x = _jagged_dense_mul(grad_out, y, offsets) if needs_x else None
    grad_y = _jagged_sum(grad_out, x, offsets) if needs_y else None
    return grad_x, grad_y, None


def _jagged_sum_forward(x: Tensor, y: Tensor | None, offsets: Tensor) -> Tensor:
    """``[N, D] → [B, D]``: the sum of each sample's rows of x, or of x · y."""
    with torch.cuda.device_of(x):
        return _implementation(x, kernels).sum_rows(x, y, offsets)


def _jagged_sum_fake(x: Tensor, y: Tensor | None, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, x.shape[1])


def _jagged_sum_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    x, y, offsets = ctx.saved_tensors
    needs_x, needs_y, _ = ctx.needs_input_grad
    factor = torch.ones_like(x) if y is None else y
    grad_x = _jagged_dense_mul(factor, grad_out, offsets) if needs_x else None
    grad_y = _jagged_dense_mul(x, grad_out, offsets) if needs_y else None
    return grad_x, grad_y, None


def _save_tensors(ctx: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
    ctx.save_for_backward(*(x for x in inputs if x is None or isinstance(x, Tensor)))


def _save_offsets(ctx: Any, inputs: tuple[Any, ...], out: Tensor) -> None:
    ctx.save_for_backward(inputs[-1])


_jagged_dense_bmm = register_op_of_ops(
    "jagged_dense_bmm",
    forward=_jagged_dense_bmm_forward,
    fake=_jagged_dense_bmm_fake,
    save=_save_tensors,
    backward=_jagged_dense_bmm_backward,
)
_jagged_jagged_bmm = register_op_of_ops(
    "jagged_jagged_bmm",
    forward=_jagged_jagged_bmm_forward,
    fake=_jagged_jagged_bmm_fake,
    save=_save_tensors,
    backward=_jagged_jagged_bmm_backward,
)
_pair_bmm = register_op_of_ops(
    "jagged_jagged_bmm_jagged_out",
    forward=_pair_bmm_forward,
    fake=_pair_bmm_fake,
    save=_save_tensors,
    backward=_pair_bmm_backward,
)
_array_jagged_bmm = register_op_of_ops(
    "array_jagged_bmm_jagged_out",
    forward=_array_jagged_bmm_forward,
    fake=_array_jagged_bmm_fake,
    save=_array_jagged_bmm_save,
    backward=_array_jagged_bmm_backward,
)
_softmax = register_op_of_ops(
    "jagged_softmax",
    forward=_softmax_forward,
    fake=_softmax_fake,
    save=_softmax_save,
    backward=_softmax_grad,
)
_softmax_backward = register_op_of_ops(
    "jagged_softmax_backward",
    forward=_softmax_backward_forward,
    fake=_softmax_backward_fake,
    save=_save_offsets,
    backward=_softmax_backward_grad,
)
_jagged_dense_add = register_op_of_ops(
    "jagged_dense_add",
    forward=_jagged_dense_add_forward,
    fake=_elementwise_fake,
    save=_save_offsets,
    backward=_jagged_dense_add_backward,
)
_jagged_dense_mul = register_op_of_ops(
    "jagged_dense_mul",
    forward=_jagged_dense_mul_forward,
    fake=_elementwise_fake,
    save=_save_tensors,
    backward=_jagged_dense_mul_backward,
)
_jagged_sum = register_op_of_ops(
    "jagged_sum",
    forward=_jagged_sum_forward,
    fake=_jagged_sum_fake,
    save=_save_tensors,
    backward=_jagged_sum_backward,
)
