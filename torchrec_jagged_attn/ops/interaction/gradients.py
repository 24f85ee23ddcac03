"""The registered ops behind the feature interactions. Their gradients are the same operations:

    out = dense(x, y)     dx = dense(dout, yᵀ)    dy = jagged(x, dout)
    out = jagged(x, y)    dx = dense(y, doutᵀ)    dy = dense(x, dout)
    out = pairs(x, y)     dx = array(dout, y)     dy = array(doutᵀ, x)
    out = array(p, y)     dp = pairs(dout, y)     dy = array(pᵀ, dout)
    out = x + y           dx = dout               dy = sum(dout)
    out = x · y           dx = dout · y           dy = sum(dout · x)

where dense is ``jagged_dense_bmm``, jagged ``jagged_jagged_bmm``, pairs :data:`pair_bmm` and array
:data:`array_jagged_bmm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrec_jagged_attn.base.checks import (
    check_float,
    check_integers,
    check_offsets_metadata,
    check_same,
    check_shape,
    should_validate,
)
from torchrec_jagged_attn.base.devices import implementation_of
from torchrec_jagged_attn.base.layout import check_offsets_values
from torchrec_jagged_attn.ops.interaction import cpu
from torchrec_jagged_attn.ops.interaction.kernels import products as product_kernels
from torchrec_jagged_attn.ops.interaction.kernels import rows as row_kernels
from torchrec_jagged_attn.ops.interaction.kernels import softmax as softmax_kernels
from torchrec_jagged_attn.ops.registration import register_op, register_op_without_grad


class Rows(NamedTuple):
    """Rows ``x`` ``[N, D]``, and ``y`` with one entry per sample or per row."""

    x: Tensor
    y: Tensor
    offsets: Tensor


class Pairs(NamedTuple):
    """Rows ``x`` ``[Nx, D]`` and ``y`` ``[Ny, D]`` with ``total`` pairs."""

    x: Tensor
    y: Tensor
    x_offsets: Tensor
    y_offsets: Tensor
    pair_offsets: Tensor
    total: int


class Weighted(NamedTuple):
    """Weights ``p`` ``[Σ Lx·Ly]`` of pairs and rows ``y`` ``[Ny, D]``, for ``num_rows`` sums.

    If ``transposed``, ``y`` is ``[Nx, D]`` and there are ``Ny`` sums.
    """

    p: Tensor
    y: Tensor
    x_offsets: Tensor
    y_offsets: Tensor
    pair_offsets: Tensor
    num_rows: int
    transposed: bool


class Scores(NamedTuple):
    """Scores ``[N, T]`` and their offsets, or scores of pairs, pair offsets and ``y_offsets``."""

    x: Tensor
    offsets: Tensor
    y_offsets: Tensor | None


class Output(NamedTuple):
    """The output of an op."""

    out: Tensor


class Gradients(NamedTuple):
    """Gradients of the inputs; ``None`` if not required."""

    x: Tensor | None = None
    y: Tensor | None = None
    p: Tensor | None = None


def _implementation(x: Tensor, kernels: ModuleType) -> ModuleType:
    """Return the module with the functions for the device of ``x``: ``cpu`` or ``kernels``."""
    return implementation_of(x, cpu, kernels)


def _num_products(needs: Sequence[Any] | None) -> int:
    """Return 1 for forward; for backward, how many of the first two arguments need a gradient."""
    return 1 if needs is None else sum(needs[:2])


def _row_flops(args: Rows, needs: Rows | None) -> int:
    """Return the FLOPs of products of ``[N, D]`` with ``T`` columns."""
    return 2 * args.x.numel() * args.y.shape[-1] * _num_products(needs)


def _empty_like_x(args: Rows | Scores) -> Output:
    return Output(args.x.new_empty(args.x.shape))


def _check_rows(x: Tensor, symbols: str, offsets: Tensor) -> None:
    check_offsets_metadata(offsets)
    check_shape(x, "x", symbols, (None, None))
    check_float(x, "x")
    check_same(x, "x", dtype=False, offsets=offsets)


def _check_dense(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    _check_rows(x, "[N, D]", offsets)
    check_shape(y, "y", "[B, D, T]", (offsets.numel() - 1, x.shape[1], None))
    check_same(x, "x", dtype=True, y=y)


def _check_row_values(args: Rows) -> None:
    check_offsets_values(args.offsets, args.x.shape[0], "offsets")


def _dense_backward(grad_out: Tensor, args: Rows, _: Output, needs: Rows) -> Gradients:
    x, y, offsets = args
    products = _implementation(x, product_kernels)
    return Gradients(
        products.jagged_dense_bmm(grad_out, y.mT, offsets) if needs.x else None,
        products.jagged_jagged_bmm(x, grad_out, offsets) if needs.y else None,
    )


_, call_jagged_dense_bmm = register_op(
    "jagged_dense_bmm",
    arguments=Rows,
    outputs=Output,
    check=_check_dense,
    check_values=_check_row_values,
    forward=lambda args: Output(_implementation(args.x, product_kernels).jagged_dense_bmm(*args)),
    fake=lambda args: Output(args.x.new_empty(args.x.shape[0], args.y.shape[2])),
    backward=_dense_backward,
    flops=_row_flops,
    not_saved=("out",),
)


def _check_jagged(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    _check_rows(x, "[N, D]", offsets)
    check_shape(y, "y", "[N, T]", (x.shape[0], None))
    check_same(x, "x", dtype=True, y=y)


def _jagged_backward(grad_out: Tensor, args: Rows, _: Output, needs: Rows) -> Gradients:
    x, y, offsets = args
    dense = _implementation(x, product_kernels).jagged_dense_bmm
    return Gradients(
        dense(y, grad_out.mT, offsets) if needs.x else None,
        dense(x, grad_out, offsets) if needs.y else None,
    )


def _fake_jagged(args: Rows) -> Output:
    x, y, offsets = args
    return Output(x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1]))


_, call_jagged_jagged_bmm = register_op(
    "jagged_jagged_bmm",
    arguments=Rows,
    outputs=Output,
    check=_check_jagged,
    check_values=_check_row_values,
    forward=lambda args: Output(_implementation(args.x, product_kernels).jagged_jagged_bmm(*args)),
    fake=_fake_jagged,
    backward=_jagged_backward,
    flops=_row_flops,
    not_saved=("out",),
)


def _offsets_forward(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    return _implementation(x_offsets, product_kernels).pair_offsets(x_offsets, y_offsets)


pair_offsets = register_op_without_grad(
    "jagged_pair_offsets",
    forward=_offsets_forward,
    fake=lambda x_offsets, y_offsets: x_offsets.new_empty(x_offsets.shape, dtype=torch.int64),
)


def call_pair_offsets(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """Check the offsets, and return ``[B + 1]`` int64 offsets of the pairs of each sample."""
    check_offsets_metadata(x_offsets, "x_offsets")
    check_shape(y_offsets, "y_offsets", "[B + 1]", (x_offsets.numel(),))
    check_integers(y_offsets, "y_offsets")
    check_same(x_offsets, "x_offsets", dtype=False, y_offsets=y_offsets)
    return pair_offsets(x_offsets, y_offsets)


def _check_pair_values(p: Tensor, x_offsets: Tensor) -> None:
    check_shape(p, "p", "[Σ Lx·Ly]", (None,))
    check_float(p, "p")
    check_same(p, "p", dtype=False, x_offsets=x_offsets)


def _check_num_pairs(pair_offsets: Tensor, num_pairs: int, name: str) -> None:
    """Check that the argument ``name`` has as many pairs as the offsets; see should_validate."""
    if should_validate(pair_offsets) and int(pair_offsets[-1]) != num_pairs:
        expected = int(pair_offsets[-1])
        raise ValueError(
            f"{name} must have the {expected} pairs that offsets define, got {num_pairs}"
        )


def _check_pair_bmm(x: Tensor, y: Tensor, x_offsets: Tensor, *_: Any) -> None:
    check_shape(x, "x", "[Nx, D]", (None, None))
    check_float(x, "x")
    check_shape(y, "y", "[Ny, D]", (None, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)
    check_same(x, "x", dtype=False, x_offsets=x_offsets)


def _check_pair_bmm_values(args: Pairs) -> None:
    check_offsets_values(args.x_offsets, args.x.shape[0], "x_offsets")
    check_offsets_values(args.y_offsets, args.y.shape[0], "y_offsets")
    _check_num_pairs(args.pair_offsets, args.total, "total")


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
    check_values=_check_pair_bmm_values,
    forward=lambda args: Output(_implementation(args.x, product_kernels).pair_bmm(*args)),
    fake=lambda args: Output(args.x.new_empty(args.total)),
    backward=_pair_backward,
    flops=lambda args, needs: 2 * args.total * args.x.shape[1] * _num_products(needs),
    not_saved=("out",),
)


def _check_array(p: Tensor, y: Tensor, x_offsets: Tensor, *_: Any) -> None:
    _check_pair_values(p, x_offsets)
    check_same(p, "p", dtype=True, y=y)


def _check_array_values(args: Weighted) -> None:
    p, y, x_offsets, y_offsets, pair_offsets, num_rows, transposed = args
    num_x, num_y = (y.shape[0], num_rows) if transposed else (num_rows, y.shape[0])
    check_offsets_values(x_offsets, num_x, "x_offsets")
    check_offsets_values(y_offsets, num_y, "y_offsets")
    _check_num_pairs(pair_offsets, p.shape[0], "p")


def _array_backward(grad_out: Tensor, args: Weighted, _: Output, needs: Weighted) -> Gradients:
    p, y, *offsets, _num_rows, transposed = args
    products = _implementation(p, product_kernels)
    grad_p = grad_y = None
    if needs.p:
        x_rows, y_rows = (y, grad_out) if transposed else (grad_out, y)
        grad_p = products.pair_bmm(x_rows, y_rows, *offsets, p.shape[0])
    if needs.y:
        grad_y = products.array_jagged_bmm(p, grad_out, *offsets, y.shape[0], not transposed)
    return Gradients(p=grad_p, y=grad_y)


array_jagged_bmm, call_array_jagged_bmm = register_op(
    "array_jagged_bmm_jagged_out",
    arguments=Weighted,
    outputs=Output,
    check=_check_array,
    check_values=_check_array_values,
    forward=lambda args: Output(_implementation(args.p, product_kernels).array_jagged_bmm(*args)),
    fake=lambda args: Output(args.y.new_empty(args.num_rows, args.y.shape[1])),
    backward=_array_backward,
    flops=lambda args, needs: 2 * args.p.numel() * args.y.shape[1] * _num_products(needs),
    not_saved=("out",),
)


def _check_softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> None:
    if y_offsets is None:
        _check_rows(x, "[N, T]", offsets)
    else:  # pair offsets, computed from checked offsets
        _check_pair_values(x, offsets)


def _check_softmax_values(args: Scores) -> None:
    if args.y_offsets is None:
        check_offsets_values(args.offsets, args.x.shape[0], "offsets")
    else:
        _check_num_pairs(args.offsets, args.x.shape[0], "p")


def _softmax_backward(grad_out: Tensor, args: Scores, result: Output, _: Scores) -> Gradients:
    backward = _implementation(grad_out, softmax_kernels).softmax_backward
    return Gradients(backward(grad_out, result.out, args.offsets, args.y_offsets))


softmax, call_softmax = register_op(
    "jagged_softmax",
    arguments=Scores,
    outputs=Output,
    check=_check_softmax,
    check_values=_check_softmax_values,
    forward=lambda args: Output(_implementation(args.x, softmax_kernels).softmax(*args)),
    fake=_empty_like_x,
    backward=_softmax_backward,
    fake_backward=lambda grad_out, args, result: Gradients(result.out),
    not_saved=("x",),
)


def _check_elementwise(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    _check_rows(x, "[N, D]", offsets)
    check_shape(y, "y", "[B, D]", (offsets.numel() - 1, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)


def _elementwise_forward(args: Rows, *, multiply: bool) -> Output:
    return Output(_implementation(args.x, row_kernels).elementwise(*args, multiply=multiply))


def _add_backward(grad_out: Tensor, args: Rows, *_: Any) -> Gradients:
    sum_rows = _implementation(grad_out, row_kernels).sum_rows
    return Gradients(y=sum_rows(grad_out, None, args.offsets))


def _fake_add_backward(grad_out: Tensor, args: Rows, _: Output) -> Gradients:
    return Gradients(y=grad_out.new_empty(args.offsets.shape[0] - 1, grad_out.shape[1]))


jagged_dense_add, call_jagged_dense_add = register_op(
    "jagged_dense_add",
    arguments=Rows,
    outputs=Output,
    check=_check_elementwise,
    check_values=_check_row_values,
    forward=partial(_elementwise_forward, multiply=False),
    fake=_empty_like_x,
    backward=_add_backward,
    fake_backward=_fake_add_backward,
    not_saved=("x", "y", "out"),
    grad_is_passthrough=True,
)


def _mul_backward(grad_out: Tensor, args: Rows, _: Output, needs: Rows) -> Gradients:
    x, y, offsets = args
    rows = _implementation(x, row_kernels)
    return Gradients(
        rows.elementwise(grad_out, y, offsets, multiply=True) if needs.x else None,
        rows.sum_rows(grad_out, x, offsets) if needs.y else None,
    )


_, call_jagged_dense_mul = register_op(
    "jagged_dense_mul",
    arguments=Rows,
    outputs=Output,
    check=_check_elementwise,
    check_values=_check_row_values,
    forward=partial(_elementwise_forward, multiply=True),
    fake=_empty_like_x,
    backward=_mul_backward,
    not_saved=("out",),
)
