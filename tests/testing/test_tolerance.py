"""What plain formulas, whose errors the one tolerance rule allows, are computed with."""

import pytest
import torch

from torchrec_jagged_attn.testing import plain_products


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["mm", "bmm"])
def test_products_in_half_precision_are_as_right_as_pytorch_s_own(batch, dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(*batch, 40, 70, generator=generator).to(dtype).requires_grad_()
    b = torch.randn(*batch, 70, 50, generator=generator).to(dtype)
    own = a @ b
    with plain_products(dtype):
        product = a @ b
        (grad,) = torch.autograd.grad(product.sum(), a)
    assert (product.dtype, grad.dtype) == (dtype, dtype)
    exact = a.double() @ b.double()
    assert (product.double() - exact).abs().max() <= (own.double() - exact).abs().max()
    rounded_once = exact.to(dtype).double() - exact
    assert (product.double() - exact).abs().max() == rounded_once.abs().max()
    torch.testing.assert_close(grad, b.sum(-1).unsqueeze(-2).expand_as(grad))
