"""Assertions that results of a sample depend on it alone: other samples and rows behind the last
offset change no bit of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cases import offsets_of
from tests.runs import assert_same_run
from tests.tolerance import outputs_and_gradients


def assert_other_samples_never_matter(
    function: Callable[..., Tensor],
    inputs: dict[str, Any],
    grad_out: Tensor,
    lengths: dict[str, list[int]],
    *,
    finite: tuple[str, ...] = (),
) -> None:
    """Assert that repeated runs are bit-equal, and that samples keep their bits if the third one is
    NaN, or if it is removed and the others are permuted. In inputs that must be ``finite``, it is
    one instead of NaN.

    ``lengths`` are the numbers of rows of each sample, by the name of an input, of offsets or
    ``"out"``. Gradients of other inputs are sums over samples, and only have to repeat.
    """

    def rows_of(name: str, samples: list[int]) -> Tensor:
        parts = torch.arange(sum(lengths[name]), device=grad_out.device).split(lengths[name])
        return torch.cat([parts[sample] for sample in samples])

    others = [sample for sample in range(len(lengths["out"])) if sample != 2][::-1]
    poisoned, fewer = dict(inputs), dict(inputs)
    for name in inputs.keys() & lengths.keys():
        if name.endswith("offsets"):
            other_lengths = torch.tensor(lengths[name])[others]
            fewer[name] = offsets_of(other_lengths, inputs[name].dtype, grad_out.device)
        else:
            fewer[name] = inputs[name][rows_of(name, others)]
            if inputs[name].is_floating_point():
                value = 1 if name in finite else torch.nan
                poisoned[name] = inputs[name].index_fill(0, rows_of(name, [2]), value)
    whole = outputs_and_gradients(function, inputs, grad_out)
    assert all(torch.isfinite(value).all() for value in whole.values())
    again = outputs_and_gradients(function, inputs, grad_out)
    beside_nan = outputs_and_gradients(function, poisoned, grad_out)
    alone = outputs_and_gradients(function, fewer, grad_out[rows_of("out", others)])
    for name, value in whole.items():
        assert torch.equal(again[name], value), f"{name} does not repeat"
        if name in lengths:
            kept = rows_of(name, others)
            assert torch.equal(beside_nan[name][kept], value[kept]), f"{name} sees another sample"
            assert torch.equal(alone[name], value[kept]), f"{name} depends on the batch"


def assert_rows_behind_never_matter(
    function: Callable[..., Tensor],
    inputs: dict[str, Any],
    grad_out: Tensor,
    behind: dict[str, int],
    out_behind: Tensor | float = 0.0,
    *,
    finite: tuple[str, ...] = (),
    num_terms: int | None = None,
) -> None:
    """Assert that rows behind the last offset change no bit of outputs and gradients, and that
    their kept outputs are ``out_behind``, and their gradients zeros.

    ``behind`` has the number of such rows, of inputs by name and of ``"out"``. They are NaN or, of
    integers, out of range; but ``finite`` ones are ones. With ``num_terms``, other outputs and
    gradients are compared by :func:`assert_same_run`: the order of sums in a matrix product may
    depend on its number of rows.
    """

    def check(name: str, value: Tensor, kept: Tensor) -> None:
        if num_terms is None:
            assert torch.equal(value, kept), f"{name} sees rows behind the last offset"
        else:
            assert_same_run(value, kept, num_terms=num_terms, name=name)

    def extended(name: str, x: Tensor) -> Tensor:
        value = torch.nan if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -(2**31)
        value = 1 if name in finite else value
        return torch.cat([x, x.new_full((behind.get(name, 0), *x.shape[1:]), value)])

    expected = outputs_and_gradients(function, inputs, grad_out)
    extended_inputs = {
        name: extended(name, x) if name in behind else x for name, x in inputs.items()
    }
    more_grad_out = extended("out", grad_out)
    for name, value in outputs_and_gradients(function, extended_inputs, more_grad_out).items():
        kept = expected[name]
        if name not in behind:
            check(name, value, kept)
            continue
        check(name, value[: len(kept)], kept)
        zeros = torch.zeros_like(value[len(kept) :]) + (out_behind if name == "out" else 0.0)
        assert torch.equal(value[len(kept) :], zeros), f"{name} of rows behind the last offset"
