"""Gradients of the rows of lookups."""

import pytest
import torch
from torch import Tensor

from tests.cases import offsets_of
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.base.row_gradients import new_gradient, scale_gradient, split_rows

COUNTS = [2, 0, 3, 1]


class Multiply(torch.autograd.Function):
    """``factor * x``, whose backward writes into :func:`new_gradient`."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.mul(grad, ctx.factor, out=new_gradient(x)), None


def use(parts: tuple[Tensor, ...], multiply) -> Tensor:
    """A value that uses one part once, one twice and one not at all."""
    first, _, twice, _ = parts
    total = multiply(first, 2.0).sum() + multiply(twice, 3.0).square().sum()
    return total + multiply(twice, 5.0).sum() + twice.sum()


def test_gradients_equal_split():
    rows = torch.randn(6, 4, requires_grad=True)
    for _ in range(2):  # also of a second backward of one graph
        expected = torch.autograd.grad(use(rows.split(COUNTS), torch.mul), rows)
        total = use(split_rows(rows, COUNTS), Multiply.apply)
        for _ in range(2):
            actual = torch.autograd.grad(total, rows, retain_graph=True)
            torch.testing.assert_close(actual, expected)


def test_a_gradient_of_the_wrong_part_is_copied():
    rows = torch.randn(6, 4, requires_grad=True)
    first, second = split_rows(rows, [3, 3])
    total = Multiply.apply(first, 2.0).sum() + first.sum() + Multiply.apply(second, 3.0).sum()
    (actual,) = torch.autograd.grad(total, rows)
    assert actual.tolist() == [[3.0] * 4] * 6


def test_scaled_gradients():
    x = torch.randn(3, requires_grad=True)
    assert scale_gradient(x, 1.0) is x
    y = scale_gradient(x, 0.25)
    assert torch.equal(y, x)
    (actual,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(actual, 0.5 * x)


@pytest.mark.gpu
def test_attention_writes_its_part_of_the_gradient():
    rows = torch.randn(9, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target, history = split_rows(rows, [2, 7])
    query = target.view(2, 1, 1, 16)
    offsets = offsets_of(torch.tensor([3, 4]), torch.int64, "cuda")
    gradients: list[Tensor] = []
    for x in (history, rows):
        x.register_hook(gradients.append)
    jagged_target_attention(query, history, offsets).sum().backward()
    history_gradient, gradient = gradients
    assert history_gradient.data_ptr() == gradient[2:].data_ptr()
