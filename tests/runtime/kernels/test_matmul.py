"""fp32 products on tensor cores."""

import pytest
import torch
import triton
import triton.language as tl

from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn.ops.device.matmul import product


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, PREC: tl.constexpr):
    n, k = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + n[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[:, None] * K + k[None, :])
    tl.store(out_ptr + n[:, None] * N + n[None, :], product(a, tl.trans(b), PREC))


@pytest.mark.parametrize("width", [16, 64])
def test_the_transpose_of_an_exact_product_has_the_same_bits(width, kernel_device):
    """One kernel multiplies gradients by values, the next values by gradients."""
    a, b = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    products = torch.empty(2, 64, 64, device=kernel_device)
    _product_kernel[(1,)](a, b, products[0], N=64, K=width, PREC="bf16x8")
    _product_kernel[(1,)](b, a, products[1], N=64, K=width, PREC="bf16x8")
    assert torch.equal(products[0], products[1].T)
    with RoundingErrors(torch.float32) as errors:
        expected = a.double() @ b.double().T
    assert_close(products[0], expected, errors)
