"""The registered ops behind the feature interactions, and their gradients, made of one another:

    out = dense(x, y)     dx = dense(dout, yᵀ)    dy = jagged(x, dout)
    out = jagged(x, y)    dx = dense(y, doutᵀ)    dy = dense(x, dout)
    out = pairs(x, y)     dx = array(dout, y)     dy = array(doutᵀ, x)
    out = array(p, y)     dp = pairs(dout, y)     dy = array(pᵀ, dout)
    out = x + y           dx = dout               dy = sum(dout)
    out = x · y           dx = dout · y           dy = sum(dout · x)

where dense is :data:`jagged_dense_bmm`, jagged :data:`jagged_jagged_bmm`, pairs :data:`pair_bmm`,
array :data:`array_jagged_bmm` and sum :data:`jagged_sum`. Where no gradient is taken of these, both
of dense, and both of jagged, are made in one pass.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

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
from torchrec_jagged_attn.cpu import interaction as reference
from torchrec_jagged_attn.devices import implementation_of
from torchrec_jagged_attn.kernels.interaction import product_gradients as gradient_kernels
from torchrec_jagged_attn.kernels.interaction import products as product_kernels
from torchrec_jagged_attn.kernels.interaction import rows as row_kernels
from torchrec_jagged_attn.kernels.interaction import softmax as softmax_kernels
from torchrec_jagged_attn.layout import check_offsets_values
from torchrec_jagged_attn.ops.registration import (
    Caller,
    register_op_of_ops,
    register_op_without_grad,
)

__all__ = [
    "array_jagged_bmm",
    "call_array_jagged_bmm",
    "call_jagged_dense_add",
    "call_jagged_dense_bmm",
    "call_jagged_dense_mul",
    "call_jagged_jagged_bmm",
    "call_pair_bmm",
    "call_pair_offsets",
    "call_softmax",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_jagged_bmm",
    "jagged_sum",
    "pair_bmm",
    "pair_offsets",
    "softmax",
    "softmax_backward",
]

PAIR_OFFSETS = ("x_offsets", "y_offsets", "pair_offsets")


def _implementation(x: Tensor, of_triton: ModuleType) -> ModuleType:
    """What computes on the device of ``x``: the plain PyTorch, or the kernels ``of_triton``."""
    return implementation_of(x, reference, of_triton)


def _dense_gradients(
    grad_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Of ``[N, D] × [B, D, T] → [N, T]``."""
    of_device = _implementation(x, gradient_kernels)
    return of_device.jagged_dense_bmm_backward(grad_out, x, y, offsets)


def _jagged_gradients(
    grad_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Of ``[N, D] × [N, T] → [B, D, T]``."""
    of_device = _implementation(x, gradient_kernels)
    return of_device.jagged_jagged_bmm_backward(grad_out, x, y, offsets)


def _fake_gradients(
    grad_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape)


jagged_dense_bmm_backward = register_op_without_grad(
    "jagged_dense_bmm_backward", forward=_dense_gradients, fake=_fake_gradients
)
jagged_jagged_bmm_backward = register_op_without_grad(
    "jagged_jagged_bmm_backward", forward=_jagged_gradients, fake=_fake_gradients
)


def _check_dense(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[B, D, T]", (offsets.numel() - 1, x.shape[1], None))
    check_same(x, "x", dtype=True, y=y)


def _dense_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [B, D, T] → [N, T]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    return _implementation(x, product_kernels).jagged_dense_bmm(x, y, offsets)


jagged_dense_bmm, call_jagged_dense_bmm = register_op_of_ops(
    "jagged_dense_bmm",
    check=_check_dense,
    forward=_dense_forward,
    fake=lambda x, y, offsets: x.new_empty(x.shape[0], y.shape[2]),
    saves=("x", "y", "offsets"),
    gradients={
        "x": lambda call, grad_out, x, y, offsets, _: call(
            jagged_dense_bmm, grad_out, y.mT, offsets
        ),
        "y": lambda call, grad_out, x, y, offsets, _: call(jagged_jagged_bmm, x, grad_out, offsets),
    },
    in_one_pass=jagged_dense_bmm_backward,
)


def _check_jagged(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[N, T]", (x.shape[0], None))
    check_same(x, "x", dtype=True, y=y)


def _jagged_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] × [N, T] → [B, D, T]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    return _implementation(x, product_kernels).jagged_jagged_bmm(x, y, offsets)


jagged_jagged_bmm, call_jagged_jagged_bmm = register_op_of_ops(
    "jagged_jagged_bmm",
    check=_check_jagged,
    forward=_jagged_forward,
    fake=lambda x, y, offsets: x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1]),
    saves=("x", "y", "offsets"),
    gradients={
        "x": lambda call, grad_out, x, y, offsets, _: call(
            jagged_dense_bmm, y, grad_out.mT, offsets
        ),
        "y": lambda call, grad_out, x, y, offsets, _: call(jagged_dense_bmm, x, grad_out, offsets),
    },
    in_one_pass=jagged_jagged_bmm_backward,
)


def _check_offsets(x_offsets: Tensor, y_offsets: Tensor) -> None:
    check_offsets_metadata(x_offsets, "x_offsets")
    check_offsets_metadata(y_offsets, "y_offsets")
    check_shape(y_offsets, "y_offsets", "[B + 1]", (x_offsets.numel(),))
    check_same(x_offsets, "x_offsets", dtype=False, y_offsets=y_offsets)


def _offsets_forward(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """``[B + 1]`` int64: where each sample's pairs begin, made without waiting for the device."""
    return _implementation(x_offsets, product_kernels).pair_offsets(x_offsets, y_offsets)


pair_offsets, call_pair_offsets = register_op_of_ops(
    "jagged_pair_offsets",
    check=_check_offsets,
    forward=_offsets_forward,
    fake=lambda x_offsets, y_offsets: x_offsets.new_empty(x_offsets.shape, dtype=torch.int64),
    saves=(),
    gradients={},
)


def _check_pairs(
    x_offsets: Tensor, num_x: int, y_offsets: Tensor, num_y: int, pair_offsets: Tensor, total: int
) -> None:
    """Values of offsets must divide the rows, and make ``total`` pairs; skipped as theirs are."""
    if should_validate(pair_offsets):
        check_offsets_values(x_offsets, num_x, "x_offsets")
        check_offsets_values(y_offsets, num_y, "y_offsets")
        _check_total(pair_offsets, total)


def _check_total(pair_offsets: Tensor, total: int) -> None:
    if should_validate(pair_offsets) and int(pair_offsets[-1]) != total:
        raise ValueError(f"offsets must make the {total} pairs, got {int(pair_offsets[-1])}")


def _check_pair_bmm(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, *_: Any) -> None:
    check_rows(x, "x", "[Nx, D]", x_offsets, "x_offsets")
    check_rows(y, "y", "[Ny, D]", y_offsets, "y_offsets")
    check_shape(y, "y", "[Ny, D]", (None, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)


def _pair_forward(
    x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, pair_offsets: Tensor, total: int
) -> Tensor:
    """``[Nx, D], [Ny, D] → [Σ Lx·Ly]``."""
    _check_pairs(x_offsets, x.shape[0], y_offsets, y.shape[0], pair_offsets, total)
    pair_bmm = _implementation(x, product_kernels).pair_bmm
    return pair_bmm(x, y, x_offsets, y_offsets, pair_offsets, total)


def _pair_grad_x(call: Caller, grad_out: Tensor, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
    *offsets, _total, _out = rest
    return call(array_jagged_bmm, grad_out, y, *offsets, x.shape[0], False)


def _pair_grad_y(call: Caller, grad_out: Tensor, x: Tensor, y: Tensor, *rest: Any) -> Tensor:
    *offsets, _total, _out = rest
    return call(array_jagged_bmm, grad_out, x, *offsets, y.shape[0], True)


pair_bmm, call_pair_bmm = register_op_of_ops(
    "jagged_jagged_bmm_jagged_out",
    check=_check_pair_bmm,
    forward=_pair_forward,
    fake=lambda x, y, x_offsets, y_offsets, pair_offsets, total: x.new_empty(total),
    saves=("x", "y", *PAIR_OFFSETS),
    lengths=("total",),
    gradients={"x": _pair_grad_x, "y": _pair_grad_y},
)


def _check_pair_values(p: Tensor, offsets: Tensor) -> None:
    check_float(p, "p")
    check_shape(p, "p", "[Σ Lx·Ly]", (None,))
    check_same(p, "p", dtype=False, x_offsets=offsets)


def _check_array(p: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, *_: Any) -> None:
    _check_pair_values(p, x_offsets)
    check_rows(y, "y", "[Ny, D]", y_offsets, "y_offsets")
    check_same(p, "p", dtype=True, y=y)


def _array_forward(
    p: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor,
    pair_offsets: Tensor,
    num_rows: int,
    transposed: bool,
) -> Tensor:
    """``[Σ Lx·Ly], [Ny, D] → [Nx, D]``; if ``transposed``, ``[Nx, D] → [Ny, D]``."""
    num_x, num_y = (y.shape[0], num_rows) if transposed else (num_rows, y.shape[0])
    _check_pairs(x_offsets, num_x, y_offsets, num_y, pair_offsets, p.shape[0])
    array_jagged_bmm = _implementation(p, product_kernels).array_jagged_bmm
    return array_jagged_bmm(p, y, x_offsets, y_offsets, pair_offsets, num_rows, transposed)


def _array_grad_p(call: Caller, grad_out: Tensor, p: Tensor, y: Tensor, *rest: Any) -> Tensor:
    *offsets, _num_rows, transposed, _out = rest
    of_x, of_y = (y, grad_out) if transposed else (grad_out, y)
    return call(pair_bmm, of_x, of_y, *offsets, p.shape[0])


def _array_grad_y(call: Caller, grad_out: Tensor, p: Tensor, y: Tensor, *rest: Any) -> Tensor:
    *offsets, _num_rows, transposed, _out = rest
    return call(array_jagged_bmm, p, grad_out, *offsets, y.shape[0], not transposed)


array_jagged_bmm, call_array_jagged_bmm = register_op_of_ops(
    "array_jagged_bmm_jagged_out",
    check=_check_array,
    forward=_array_forward,
    fake=lambda p, y, x_offsets, y_offsets, pair_offsets, num_rows, transposed: y.new_empty(
        num_rows, y.shape[1]
    ),
    saves=("p", "y", *PAIR_OFFSETS),
    lengths=("num_rows",),
    gradients={"p": _array_grad_p, "y": _array_grad_y},
)


def _check_softmax(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> None:
    if y_offsets is None:
        check_rows(x, "x", "[N, T]", offsets, "offsets")
    else:  # the offsets of pairs, made of checked ones
        _check_pair_values(x, offsets)


def _softmax_forward(x: Tensor, offsets: Tensor, y_offsets: Tensor | None) -> Tensor:
    """Of columns of ``[N, T]``; or, with ``y_offsets`` and the offsets of pairs, of their rows."""
    if y_offsets is None:
        check_offsets_values(offsets, x.shape[0], "offsets")
    else:
        _check_total(offsets, x.shape[0])
    return _implementation(x, softmax_kernels).softmax(x, offsets, y_offsets)


def _softmax_grad(
    call: Caller, grad_out: Tensor, _: None, offsets: Tensor, y_offsets: Tensor | None, out: Tensor
) -> Tensor:
    return call(softmax_backward, grad_out, out, offsets, y_offsets)


softmax, call_softmax = register_op_of_ops(
    "jagged_softmax",
    check=_check_softmax,
    forward=_softmax_forward,
    fake=lambda x, offsets, y_offsets: x.new_empty(x.shape),
    saves=("offsets", "y_offsets", "out"),
    gradients={"x": _softmax_grad},
)


def _softmax_backward(
    grad_out: Tensor, out: Tensor, offsets: Tensor, y_offsets: Tensor | None
) -> Tensor:
    """Gradient of what gave ``out``."""
    return _implementation(out, softmax_kernels).softmax_backward(grad_out, out, offsets, y_offsets)


def _refuse(*_: Any) -> Tensor:
    raise NotImplementedError("jagged_softmax and jagged2_softmax have no second derivative")


softmax_backward, _ = register_op_of_ops(
    "jagged_softmax_backward",
    forward=_softmax_backward,
    fake=lambda grad_out, out, offsets, y_offsets: out.new_empty(out.shape),
    saves=(),
    gradients={"grad_out": _refuse, "out": _refuse},
)


def _check_elementwise(x: Tensor, y: Tensor, offsets: Tensor) -> None:
    check_rows(x, "x", "[N, D]", offsets, "offsets")
    check_shape(y, "y", "[B, D]", (offsets.numel() - 1, x.shape[1]))
    check_same(x, "x", dtype=True, y=y)


def _add_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] + [B, D] → [N, D]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    return _implementation(x, row_kernels).elementwise(x, y, offsets, multiply=False)


jagged_dense_add, call_jagged_dense_add = register_op_of_ops(
    "jagged_dense_add",
    check=_check_elementwise,
    forward=_add_forward,
    fake=lambda x, y, offsets: x.new_empty(x.shape),
    saves=("offsets",),
    gradients={
        "x": lambda call, grad_out, *_: grad_out,
        "y": lambda call, grad_out, x, y, offsets, _: call(jagged_sum, grad_out, None, offsets),
    },
)


def _mul_forward(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """``[N, D] ∘ [B, D] → [N, D]``."""
    check_offsets_values(offsets, x.shape[0], "offsets")
    return _implementation(x, row_kernels).elementwise(x, y, offsets, multiply=True)


jagged_dense_mul, call_jagged_dense_mul = register_op_of_ops(
    "jagged_dense_mul",
    check=_check_elementwise,
    forward=_mul_forward,
    fake=lambda x, y, offsets: x.new_empty(x.shape),
    saves=("x", "y", "offsets"),
    gradients={
        "x": lambda call, grad_out, x, y, offsets, _: call(jagged_dense_mul, grad_out, y, offsets),
        "y": lambda call, grad_out, x, y, offsets, _: call(jagged_sum, grad_out, x, offsets),
    },
)


def _sum_forward(x: Tensor, y: Tensor | None, offsets: Tensor) -> Tensor:
    """``[N, D] → [B, D]``: the sum of each sample's rows of x, or of x · y."""
    return _implementation(x, row_kernels).sum_rows(x, y, offsets)


def _sum_grad_x(
    call: Caller, grad_out: Tensor, x: Tensor, y: Tensor | None, offsets: Tensor, _: None
) -> Tensor:
    return call(jagged_dense_mul, torch.ones_like(x) if y is None else y, grad_out, offsets)


jagged_sum, _ = register_op_of_ops(
    "jagged_sum",
    forward=_sum_forward,
    fake=lambda x, y, offsets: x.new_empty(offsets.shape[0] - 1, x.shape[1]),
    saves=("x", "y", "offsets"),
    gradients={
        "x": _sum_grad_x,
        "y": lambda call, grad_out, x, y, offsets, _: call(jagged_dense_mul, x, grad_out, offsets),
    },
)
