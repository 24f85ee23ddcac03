"""The tolerance rule, and its assertions.

A result may differ from its fp64 oracle by what rounding errors make likely: each element has a
bound of its own, from an error analysis of the oracle. The model, its one constant and how bounds
grow with the number of terms are in :mod:`tests.rounding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.rounding import RoundingErrors


def assert_close(
    actual: Tensor, expected: Tensor, errors: RoundingErrors, *, name: str = "out"
) -> None:
    """Assert that ``actual`` is the fp64 ``expected``, but for the errors that are allowed.

    Args:
        actual: of any floating-point dtype.
        expected: result of an oracle, computed while ``errors`` was active.
        errors: of the dtype that ``actual`` was computed in.
        name: of the tensor, for the message.

    Raises:
        AssertionError: naming the tensor, an error and its bound; also for NaN or another shape.
    """
    assert expected.dtype == torch.float64, f"{name}: the oracle must be fp64"
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape} for {expected.shape}"
    if actual.numel() == 0:
        return
    bound = errors.bound(expected, actual.dtype)
    assert bound.isfinite().all(), f"{name}: no bound"  # which nothing would exceed
    largest = torch.finfo(actual.dtype).max  # beyond which a result is infinite
    error = (actual.double().clamp(-largest, largest) - expected.clamp(-largest, largest)).abs()
    error.masked_fill_(actual.isnan() & expected.isnan(), 0)
    wrong = ~(error <= bound)
    if wrong.any():
        at = (error / bound).nan_to_num(torch.inf).argmax()
        raise AssertionError(
            f"{name}: error {error.flatten()[at]:.3e} is over the bound "
            f"{bound.flatten()[at]:.3e}; {int(wrong.sum())} of {wrong.numel()} elements are wrong"
        )


def outputs_and_gradients(
    function: Callable[..., Tensor],
    inputs: dict[str, Any],
    grad_out: Tensor | Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """``function(**inputs)`` as ``"out"``, and the gradient of each floating-point input.

    ``grad_out`` is the gradient of the output, or makes it from the output.
    """
    leaves = {
        name: value.detach().requires_grad_() if _is_float(value) else value
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
    inputs: dict[str, Any],
    **options: Any,
) -> None:
    """Assert that ``function``'s output and all its gradients follow the tolerance rule.

    ``oracle`` is called on the inputs in fp64; the gradient of the output is random. Errors are for
    the coarsest dtype among inputs and output. Both functions also get ``options``, which
    have no gradient and are not converted.
    """
    function, oracle = (functools.partial(f, **options) for f in (function, oracle))
    exact = in_fp64(inputs)
    dtype = next(x.dtype for x in inputs.values() if _is_float(x))

    def grad_out(out: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(out.shape, generator=generator).to(dtype).to(out)

    actual = outputs_and_gradients(function, inputs, grad_out)
    dtypes = [x.dtype for x in (*inputs.values(), actual["out"]) if _is_float(x)]
    with RoundingErrors(max(dtypes, key=lambda x: torch.finfo(x).eps)) as errors:
        expected = outputs_and_gradients(oracle, exact, grad_out)
    assert actual.keys() == expected.keys(), f"gradients of {list(actual)}, not {list(expected)}"
    for name in expected:
        assert_close(actual[name], expected[name], errors, name=name)


def assert_output(
    out: Tensor, oracle: Callable[..., Tensor], inputs: dict[str, Any], at: Any = ...
) -> None:
    """Assert that an output alone, or what of it is ``at`` an index, follows the rule."""
    with RoundingErrors(out.dtype) as errors:
        expected = oracle(**in_fp64(inputs))
    assert_close(out[at], expected[at], errors)


def in_fp64(inputs: dict[str, Any]) -> dict[str, Any]:
    """``inputs`` with floating-point tensors in fp64."""
    return {name: x.double() if _is_float(x) else x for name, x in inputs.items()}


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
