"""The softmax of a single tile."""

import torch
import triton
import triton.language as tl

from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn.ops.device.softmax import mean_grad


@triton.jit
def _mean_grad_kernel(p_ptr, dp_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    at = i[:, None] * N + j[None, :]
    nothing = tl.zeros([M], tl.float32)
    mean = mean_grad(tl.load(p_ptr + at), tl.load(dp_ptr + at), nothing, True)
    tl.store(out_ptr + i, mean)


def mean_grad_of(p, dp):
    out = torch.empty(len(p), device=p.device)
    _mean_grad_kernel[(1,)](p, dp, out, M=p.shape[0], N=p.shape[1])
    return out


def test_the_mean_gradient_is_rounded_once(kernel_device):
    """Also with large terms: a weight of 0.01 has a ``dp`` of 100."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(64, 16, generator=generator)
    p[:, 0] *= 0.01
    p /= p.sum(1, keepdim=True)
    dp = torch.randn(64, 16, generator=generator)
    dp[:, 0] = 100
    with RoundingErrors(torch.float32) as errors:
        expected = (p.double() * dp.double()).sum(1) / p.double().sum(1)
    mean = mean_grad_of(p.to(kernel_device), dp.to(kernel_device)).cpu()
    assert_close(mean, expected, errors)


def test_a_single_key_gets_no_gradient(kernel_device):
    generator = torch.Generator().manual_seed(0)
    p = torch.zeros(64, 16)
    p[:, 3] = 1 + torch.finfo(torch.float32).eps * torch.randint(-2, 3, (64,), generator=generator)
    dp = torch.randn(64, 16, generator=generator) * 10
    mean = mean_grad_of(p.to(kernel_device), dp.to(kernel_device)).cpu()
    assert torch.equal(mean, dp[:, 3])
