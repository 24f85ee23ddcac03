"""Comparison of two runs of a model, for which there is no fp64 oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.rounding import DEVIATIONS


def assert_same_run(
    actual: Tensor | Sequence[float],
    expected: Tensor | Sequence[float],
    *,
    num_terms: int,
    num_steps: int | None = 1,
    dtype: torch.dtype = torch.float32,
    name: str = "",
) -> None:
    """Assert that two runs of one model differ by the errors that the tolerance rule allows.

    In its model, a sum of ``n`` terms in fp32 has an error of ``λ · u · √n``; and ``λ · u / √n``
    where terms are rounded to ``dtype``. That is of numbers that are taken to be of order one, or
    as large as the result. Each run has its own, and each training step adds as much.

    Args:
        num_terms: of all sums of a step that follow one another: widths of layers, samples, rows.
        num_steps: training steps that lead to the result; ``None`` where the last axis has the
            result of each.
        dtype: the coarsest of the runs.
        name: of the result, for the message.
    """
    actual, expected = (torch.as_tensor(x).detach().cpu().double() for x in (actual, expected))
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape} for {expected.shape}"
    if not actual.numel():
        return
    sum_dtype = torch.promote_types(dtype, torch.float32)
    units = [torch.finfo(x).eps / 2 for x in (dtype, sum_dtype)]
    step_error = 2**0.5 * DEVIATIONS * (units[0] / num_terms**0.5 + units[1] * num_terms**0.5)
    steps = torch.arange(1, actual.shape[-1] + 1) if num_steps is None else torch.tensor(num_steps)
    bound = steps * step_error * expected.abs().clamp(min=1)
    is_same = (actual == expected) | (actual.isnan() & expected.isnan())
    share = ((actual - expected).abs() / bound).masked_fill(is_same, 0).max().item()
    assert share <= 1, f"{name}: an error is {share:.3g} times its bound"
