"""The tolerance rule, and what asserts by it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_jagged_attn.testing.rounding import RoundingErrors

__all__ = [
    "RoundingErrors",
    "TF32Products",
    "assert_close",
    "assert_matches_oracle",
    "error_bound",
    "outputs_and_gradients",
    "plain_products",
]


def error_bound(expected: Tensor, plain: Tensor, *, gradient: bool = False) -> float:
    """The largest error allowed, by the one tolerance rule.

    Twice (gradients: three times) the error of ``plain``, the textbook formula computed in the
    input dtype, against ``expected`` in fp64, plus two units in the last place of the largest
    value.
    """
    if expected.numel() == 0:
        return 0.0
    largest = expected.abs().max().item()
    ulp = torch.finfo(plain.dtype).eps * 2 ** math.floor(math.log2(largest)) if largest else 0.0
    plain_error = (plain.double() - expected).abs().max().item()
    return (3 if gradient else 2) * plain_error + 2 * ulp


def assert_close(
    actual: Tensor,
    expected: Tensor,
    errors: RoundingErrors | Tensor,
    *,
    gradient: bool = False,
    name: str = "out",
) -> None:
    """Assert that ``actual`` is the fp64 ``expected`` but for what ``errors`` allow.

    Raises:
        AssertionError: naming the tensor, its error and the bound; also for NaN or another shape.
    """
    assert expected.dtype == torch.float64, f"{name}: the oracle must be fp64"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape} for {expected.shape}"
    if actual.numel() == 0:
        return
    if isinstance(errors, Tensor):
        error = (actual.double() - expected).abs().max().item()
        bound = error_bound(expected, errors, gradient=gradient)
        assert error <= bound, f"{name}: error {error:.3e} is over the bound {bound:.3e}"
        return
    bound = errors.bound(expected, actual.dtype)
    largest = torch.finfo(actual.dtype).max  # beyond which a result is infinite
    error = (actual.double().clamp(-largest, largest) - expected.clamp(-largest, largest)).abs()
    error.masked_fill_(actual.isnan() & expected.isnan(), 0)
    wrong = ~(error <= bound)
    if wrong.any():
        at = (error / bound).nan_to_num(torch.inf).argmax()
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are over their bounds, one by "
            f"{error.flatten()[at]:.3e} over {bound.flatten()[at]:.3e}"
        )


class TF32Products(TorchDispatchMode):
    """A context in which products of fp32 matrices are what tensor cores make of them.

    These read the upper 19 bits of their operands, and add up in fp32. On any device, and for
    products of any size: cuBLAS gives thin ones to units that are exact.
    """

    PRODUCTS = (
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.mv.default,
        torch.ops.aten.dot.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run ``func``, a product with its operands cut short."""
        if func in self.PRODUCTS:
            *summand, a, b = args
            args = (*summand, self._cut(a), self._cut(b))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _cut(operand: Tensor) -> Tensor:
        if operand.dtype != torch.float32:
            return operand
        return (operand.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


class HalfProducts(TorchDispatchMode):
    """A context in which products of half-precision matrices are, on a CPU, those of fp32 copies.

    They are rounded once, as PyTorch's own are there. Only the order of sums is another one, and
    they take a fraction of the time.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run ``func``, a product with operands in fp32."""
        halves = (torch.float16, torch.bfloat16)
        if (
            func in TF32Products.PRODUCTS
            and args[0].device.type == "cpu"
            and args[0].dtype in halves
        ):
            args, dtype = [x.float() for x in args], args[0].dtype
            return func(*args, **(kwargs or {})).to(dtype)
        return func(*args, **(kwargs or {}))


def plain_products(dtype: torch.dtype | None = None) -> contextlib.AbstractContextManager:
    """The context for a plain formula: its products as ``torch.get_float32_matmul_precision()``.

    For a formula in half precision, its ``dtype`` makes them quick on a CPU.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return HalfProducts()
    exact = torch.get_float32_matmul_precision() == "highest"
    return contextlib.nullcontext() if exact else TF32Products()


def outputs_and_gradients(
    function: Callable[..., Tensor],
    inputs: dict[str, Any],
    grad_out: Tensor | Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """``function(**inputs)`` as ``"out"``, and the gradient of each floating-point input.

    ``grad_out`` is the gradient of the output, or makes it from the output.
    """
    leaves = {
        name: value.detach().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    out = function(**leaves)
    if out.requires_grad:
        out.backward(grad_out if isinstance(grad_out, Tensor) else grad_out(out))
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    return {"out": out.detach(), **gradients}


def assert_matches_oracle(
    function: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    *rest: Any,
    seed: int = 0,
) -> None:
    """Assert that ``function``'s output and all its gradients follow the tolerance rule.

    ``oracle`` is run on the inputs in fp64; the gradient of the output is random.
    """
    inputs = rest[-1]
    exact = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    dtype = next(
        value.dtype
        for value in inputs.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    )

    def grad_out(out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(out.shape, generator=generator).to(dtype).to(out)

    actual = outputs_and_gradients(function, inputs, grad_out)
    dtypes = [x.dtype for x in (*inputs.values(), *actual.values()) if _is_float(x)]
    with RoundingErrors(max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)) as errors:
        expected = outputs_and_gradients(oracle, exact, grad_out)
    assert actual.keys() == expected.keys(), f"gradients of {list(actual)}, not {list(expected)}"
    for name in expected:
        assert_close(actual[name], expected[name], errors, name=name)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
