"""The registered ops behind the feature interactions, whose gradients are made of one another:

    out = dense(x, y)     dx = dense(dout, yᵀ)    dy = jagged(x, dout)
    out = jagged(x, y)    dx = dense(y, doutᵀ)    dy = dense(x, dout)
    out = pairs(x, y)     dx = array(dout, y)     dy = array(doutᵀ, x)
    out = array(p, y)     dp = pairs(dout, y)     dy = array(pᵀ, dout)
    out = x + y           dx = dout               dy = sum(dout)
    out = x · y           dx = dout · y           dy = sum(dout · x)

where dense is ``jagged_dense_bmm``, jagged ``jagged_jagged_bmm``, pairs :data:`pair_bmm` and array
:data:`array_jagged_bmm`. Both gradients of dense, and both of jagged, are made in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.checks import (
    check_float,
    check_offsets_metadata,
    check_rows,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.devices import implementation_of
from torchrec_jagged_attn.interaction import cpu as reference
from torchrec_jagged_attn.interaction.kernels import product_gradients as gradient_kernels
from torchrec_jagged_attn.interaction.kernels import products as product_kernels
from torchrec_jagged_attn.interaction.kernels import rows as row_kernels
from torchrec_jagged_attn.interaction.kernels import softmax as softmax_kernels
from torchrec_jagged_attn.layout import check_offsets_values
from torchrec_jagged_attn.runtime.registration import register_op, register_op_without_grad


class Rows(NamedTuple):
    """Rows ``x`` ``[N, D]``, and what ``y`` has for each sample, or for each row."""

    x: Tensor
    y: Tensor
    offsets: Tensor


class Pairs(NamedTuple):
    """Rows ``x`` ``[Nx, D]`` and ``y`` ``[Ny, D]`` that make ``total`` pairs."""

    x: Tensor
    y: Tensor
    x_offsets: Tensor
    y_offsets: Tensor
    pair_offsets: Tensor
    total: int


class Weighted(NamedTuple):
    """Pairs ``p`` ``[Σ Lx·Ly]`` and rows ``y`` ``[Ny, D]`` for ``num_rows`` rows.

    If ``transposed``, ``y`` is ``[Nx, D]``, and there are ``Ny`` rows.
    """

    p: Tensor
    y: Tensor
    x_offsets: Tensor
    y_offsets: Tensor
    pair_offsets: Tensor
    num_rows: int
    transposed: bool


class Scores(NamedTuple):
    """Columns of ``[N, T]``; or, with ``y_offsets`` and the offsets of pairs, their rows."""

    x: Tensor
    offsets: Tensor
    y_offsets: Tensor | None


class Output(NamedTuple):
    """What each of them returns."""

    out: Tensor


class Gradients(NamedTuple):
    """Of ``x`` and ``y``; ``None`` for those that are not needed."""

    x: Tensor | None
    y: Tensor | None = None


class WeightedGradients(NamedTuple):
    """Of ``p`` and ``y``; ``None`` for those that are not needed."""

    p: Tensor | None
    y: Tensor | None


def _implementation(x: Tensor, of_triton: ModuleType) -> ModuleType:
    """What computes on the device of ``x``: the plain PyTorch, or the kernels ``of_triton``."""
    return implementation_of(x, reference, of_triton)


def _products(needs: Sequence[Any] | None) -> int:
    """One product forward; backward, one for each of the first two arguments that ``needs`` it."""
    return 1 if needs is None else sum(needs[:2])


def _flops_of_rows(args: Rows, needs: Rows | None) -> int:
    """Of ``[N, D]`` and ``T`` columns."""
    return 2 * args.x.numel() * args.y.shape[-1] * _products(needs)


def _check_dense(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[B, D, T]", (offsets.numel() - 1, x.shape[1], None))
    check_same(x, "x", dtype=True, y=y)


def _dense_forward(args: Rows) -> Output:
    """``[N, D] × [B, D, T] → [N, T]``."""
    x, y, offsets = args
    check_offsets_values(offsets, x.shape[0], "offsets")
    return Output(_implementation(x, product_kernels).jagged_dense_bmm(x, y, offsets))


def _dense_backward(grad_out: Tensor, args: Rows, _: Output, needs: Rows) -> Gradients:
    x, y, offsets = args
    if needs.x and needs.y:
        of_device = _implementation(x, gradient_kernels)
        return Gradients(*of_device.jagged_dense_bmm_backward(grad_out, x, y, offsets))
    of_device = _implementation(x, product_kernels)
    if needs.x:
        return Gradients(of_device.jagged_dense_bmm(grad_out, y.mT, offsets))
    return Gradients(None, of_device.jagged_jagged_bmm(x, grad_out, offsets))


_, call_jagged_dense_bmm = register_op(
    "jagged_dense_bmm",
    arguments=Rows,
    outputs=Output,
    check=_check_dense,
    forward=_dense_forward,
    fake=lambda args: Output(args.x.new_empty(args.x.shape[0], args.y.shape[2])),
    backward=_dense_backward,
    flops=_flops_of_rows,
    unsaved=("out",),
)


def _check_jagged(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[N, T]", (x.shape[0], None))
    check_same(x, "x", dtype=True, y=y)


def _jagged_forward(args: Rows) -> Output:
    """``[N, D] × [N, T] → [B, D, T]``."""
    x, y, offsets = args
    check_offsets_values(offsets, x.shape[0], "offsets")
    return Output(_implementation(x, product_kernels).jagged_jagged_bmm(x, y, offsets))


def _jagged_backward(grad_out: Tensor, args: Rows, _: Output, needs: Rows) -> Gradients:
    x, y, offsets = args
    if needs.x and needs.y:
        of_device = _implementation(x, gradient_kernels)
        return Gradients(*of_device.jagged_jagged_bmm_backward(grad_out, x, y, offsets))
    dense = _implementation(x, product_kernels).jagged_dense_bmm
    if needs.x:
        return Gradients(dense(y, grad_out.mT, offsets))
    return Gradients(None, dense(x, grad_out, offsets))


def _fake_jagged(args: Rows) -> Output:
    x, y, offsets = args
    return Output(x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1]))


_, call_jagged_jagged_bmm = register_op(
    "jagged_jagged_bmm",
    arguments=Rows,
    outputs=Output,
    check=_check_jagged,
    forward=_jagged_forward,
    fake=_fake_jagged,
    backward=_jagged_backward,
    flops=_flops_of_rows,
    unsaved=("out",),
)


def _check_offsets(x_offsets: Tensor, y_offsets: Tensor) -> None:
    check_offsets_metadata(x_offsets, "x_offsets")
    check_offsets_metadata(y_offsets, "y_offsets")
    check_shape(y_offsets, "y_offsets", "[B + 1]", (x_offsets.numel(),))
    check_same(x_offsets, "x_offsets", dtype=False, y_offsets=y_offsets)


def _offsets_forward(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """``[B + 1]`` int64: where each sample's pairs begin, made without waiting for the device."""
    return _implementation(x_offsets, product_kernels).pair_offsets(x_offsets, y_offsets)


pair_offsets = register_op_without_grad(
    "jagged_pair_offsets",
    forward=_offsets_forward,
    fake=lambda x_offsets, y_offsets: x_offsets.new_empty(x_offsets.shape, dtype=torch.int64),
)


def call_pair_offsets(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """Check the offsets, and return those of pairs."""
    _check_offsets(x_offsets, y_offsets)
    return pair_offsets(x_offsets, y_offsets)


def _check_pairs(
    x_offsets: Tensor,
    num_x: int,
    y_offsets: Tensor,
    num_y: int,
    pair_offsets: Tensor,
    total: int,
    name: str,
) -> None:
    """Values of offsets must divide the rows, and make ``total`` pairs, of the argument ``name``;
    skipped as theirs are.
    """
    if should_validate(pair_offsets):
        check_offsets_values(x_offsets, num_x, "x_offsets")
        check_offsets_values(y_offsets, num_y, "y_offsets")
        _check_total(pair_offsets, total, name)


def _check_total(pair_offsets: Tensor, total: int, name: str) -> None:
    if should_validate(pair_offsets) and int(pair_offsets[-1]) != total:
        raise ValueError(
            f"{name} must have the {int(pair_offsets[-1])} pairs that offsets define, got {total}"
        )


def _check_pair_bmm(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, *_: Any) -> None:
    check_rows(x, "x", "[Nx, D]", x_offsets, "x_offsets")
    check_rows(y, "y", "[Ny, D]", y_offsets, "y_offsets")
    check_shape(y, "y", "[Ny, D]", (None, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)


def _pair_forward(args: Pairs) -> Output:
    """``[Nx, D], [Ny, D] → [Σ Lx·Ly]``."""
    x, y, x_offsets, y_offsets, pair_offsets, total = args
    _check_pairs(x_offsets, x.shape[0], y_offsets, y.shape[0], pair_offsets, total, "total")
    return Output(_implementation(x, product_kernels).pair_bmm(*args))


def _pair_backward(grad_out: Tensor, args: Pairs, _: Output, needs: Pairs) -> Gradients:
    x, y, *offsets, _total = args
    array = _implementation(x, product_kernels).array_jagged_bmm
    return Gradients(
        array(grad_out, y, *offsets, x.shape[0], False) if needs.x else None,
        array(grad_out, x, *offsets, y.shape[0], True) if needs.y else None,
    )


pair_bmm, call_pair_bmm = register_op(
    "jagged_jagged_bmm_jagged_out",
    arguments=Pairs,
    outputs=Output,
    check=_check_pair_bmm,
    forward=_pair_forward,
    fake=lambda args: Output(args.x.new_empty(args.total)),
    backward=_pair_backward,
    flops=lambda args, needs: 2 * args.total * args.x.shape[1] * _products(needs),
    unsaved=("out",),
)


def _check_pair_values(p: Tensor, offsets: Tensor) -> None:
    check_float(p, "p")
    check_shape(p, "p", "[Σ Lx·Ly]", (None,))
    check_same(p, "p", dtype=False, x_offsets=offsets)


def _check_array(p: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, *_: Any) -> None:
    _check_pair_values(p, x_offsets)
    check_rows(y, "y", "[Ny, D]", y_offsets, "y_offsets")
    check_same(p, "p", dtype=True, y=y)


def _array_forward(args: Weighted) -> Output:
    """``[Σ Lx·Ly], [Ny, D] → [Nx, D]``; if ``transposed``, ``[Nx, D] → [Ny, D]``."""
    p, y, x_offsets, y_offsets, pair_offsets, num_rows, transposed = args
    num_x, num_y = (y.shape[0], num_rows) if transposed else (num_rows, y.shape[0])
    _check_pairs(x_offsets, num_x, y_offsets, num_y, pair_offsets, p.shape[0], "p")
    return Output(_implementation(p, product_kernels).array_jagged_bmm(*args))


def _array_backward(
    grad_out: Tensor, args: Weighted, _: Output, needs: Weighted
) -> WeightedGradients:
    p, y, *offsets, _num_rows, transposed = args
    of_device, grad_p, grad_y = _implementation(p, product_kernels), None, None
    if needs.p:
        of_x, of_y = (y, grad_out) if transposed else (grad_out, y)
        grad_p = of_device.pair_bmm(of_x, of_y, *offsets, p.shape[0])
    if needs.y:
        grad_y = of_device.array_jagged_bmm(p, grad_out, *offsets, y.shape[0], not transposed)
    return WeightedGradients(grad_p, grad_y)


array_jagged_bmm, call_array_jagged_bmm = register_op(
    "array_jagged_bmm_jagged_out",
    arguments=Weighted,
    outputs=Output,
    check=_check_array,
    forward=_array_forward,
    fake=lambda args: Output(args.y.new_empty(args.num_rows, args.y.shape[1])),
    backward=_array_backward,
    flops=lambda args, needs: 2 * args.p.numel() * args.y.shape[1] * _products(needs),
    unsaved=("out",),
)


def _check_softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> None:
    if y_offsets is None:
        check_rows(x, "x", "[N, T]", offsets, "offsets")
    else:  # the offsets of pairs, made of checked ones
        _check_pair_values(x, offsets)


def _softmax_forward(args: Scores) -> Output:
    x, offsets, y_offsets = args
    if y_offsets is None:
        check_offsets_values(offsets, x.shape[0], "offsets")
    else:
        _check_total(offsets, x.shape[0], "p")
    return Output(_implementation(x, softmax_kernels).softmax(x, offsets, y_offsets))


def _softmax_backward(grad_out: Tensor, args: Scores, made: Output, _: Scores) -> Gradients:
    of_device = _implementation(made.out, softmax_kernels)
    return Gradients(of_device.softmax_backward(grad_out, made.out, args.offsets, args.y_offsets))


softmax, call_softmax = register_op(
    "jagged_softmax",
    arguments=Scores,
    outputs=Output,
    check=_check_softmax,
    forward=_softmax_forward,
    fake=lambda args: Output(args.x.new_empty(args.x.shape)),
    backward=_softmax_backward,
    fake_backward=lambda grad_out, args, made: Gradients(made.out),
    unsaved=("x",),
)


def _check_elementwise(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[B, D]", (offsets.numel() - 1, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)


def _add_forward(args: Rows) -> Output:
    """``[N, D] + [B, D] → [N, D]``."""
    check_offsets_values(args.offsets, args.x.shape[0], "offsets")
    return Output(_implementation(args.x, row_kernels).elementwise(*args, multiply=False))


def _add_backward(grad_out: Tensor, args: Rows, *_: Any) -> Gradients:
    sum_rows = _implementation(grad_out, row_kernels).sum_rows
    return Gradients(None, sum_rows(grad_out, None, args.offsets))


def _fake_add_backward(grad_out: Tensor, args: Rows, _: Output) -> Gradients:
    return Gradients(None, grad_out.new_empty(args.offsets.shape[0] - 1, grad_out.shape[1]))


jagged_dense_add, call_jagged_dense_add = register_op(
    "jagged_dense_add",
    arguments=Rows,
    outputs=Output,
    check=_check_elementwise,
    forward=_add_forward,
    fake=lambda args: Output(args.x.new_empty(args.x.shape)),
    backward=_add_backward,
    fake_backward=_fake_add_backward,
    unsaved=("x", "y", "out"),
    passes_gradient=True,
)


def _mul_forward(args: Rows) -> Output:
    """``[N, D] ∘ [B, D] → [N, D]``."""
    check_offsets_values(args.offsets, args.x.shape[0], "offsets")
    return Output(_implementation(args.x, row_kernels).elementwise(*args, multiply=True))


def _mul_backward(grad_out: Tensor, args: Rows, _: Output, needs: Rows) -> Gradients:
    x, y, offsets = args
    of_device = _implementation(x, row_kernels)
    return Gradients(
        of_device.elementwise(grad_out, y, offsets, multiply=True) if needs.x else None,
        of_device.sum_rows(grad_out, x, offsets) if needs.y else None,
    )


_, call_jagged_dense_mul = register_op(
    "jagged_dense_mul",
    arguments=Rows,
    outputs=Output,
    check=_check_elementwise,
    forward=_mul_forward,
    fake=lambda args: Output(args.x.new_empty(args.x.shape)),
    backward=_mul_backward,
    unsaved=("out",),
)
