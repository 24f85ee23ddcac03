"""That results of a sample depend on it alone: no other sample changes a bit of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cases import offsets_of
from tests.tolerance import outputs_and_gradients


def assert_other_samples_never_matter(
    function: Callable[..., Tensor],
    inputs: dict[str, Any],
    grad_out: Tensor,
    lengths: dict[str, list[int]],
) -> None:
    """Assert that outputs and gradients repeat bit for bit, and that those of samples have the same
    bits if the third one is NaN, and without the third one and in another order.

    ``lengths`` are the rows of each sample: of inputs by name, of ``"out"``, and those that offsets
    divide. Gradients of other inputs are sums over samples, and only have to repeat.
    """

    def rows_of(name: str, samples: list[int]) -> Tensor:
        parts = torch.arange(sum(lengths[name]), device=grad_out.device).split(lengths[name])
        return torch.cat([parts[sample] for sample in samples])

    others = [sample for sample in range(len(lengths["out"])) if sample != 2][::-1]
    poisoned, fewer = dict(inputs), dict(inputs)
    for name in inputs.keys() & lengths.keys():
        if name.endswith("offsets"):
            of_others = torch.tensor(lengths[name])[others]
            fewer[name] = offsets_of(of_others, inputs[name].dtype, grad_out.device)
        else:
            fewer[name] = inputs[name][rows_of(name, others)]
            if inputs[name].is_floating_point():
                poisoned[name] = inputs[name].index_fill(0, rows_of(name, [2]), torch.nan)
    whole = outputs_and_gradients(function, inputs, grad_out)
    assert all(torch.isfinite(value).all() for value in whole.values())
    again = outputs_and_gradients(function, inputs, grad_out)
    beside_nan = outputs_and_gradients(function, poisoned, grad_out)
    alone = outputs_and_gradients(function, fewer, grad_out[rows_of("out", others)])
    for name, value in whole.items():
        assert torch.equal(again[name], value), f"{name} does not repeat"
        if name in lengths:
            own = rows_of(name, others)
            assert torch.equal(beside_nan[name][own], value[own]), f"{name} sees another sample"
            assert torch.equal(alone[name], value[own]), f"{name} depends on the batch"
