"""What a call of an op passes on its way to the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_jagged_attn.ops import jagged_target_attention


class Recorder(TorchDispatchMode):
    """Keeps the names of the package's ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchrec_jagged_attn":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def leaves(device):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 1, 16), (5, 16)
    return [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]


@pytest.fixture
def out(leaves, device):
    return jagged_target_attention(*leaves, torch.tensor([0, 2, 5], device=device))


def test_modes_see_both_directions(leaves, device):
    with Recorder() as recorder:
        out = jagged_target_attention(*leaves, torch.tensor([0, 2, 5], device=device))
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert recorder.names == ["target_attention", "target_attention_backward"]


def test_modes_see_backward_of_what_they_did_not_see(leaves, out):
    with Recorder() as recorder:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert recorder.names == ["target_attention_backward"]


def test_gradients_yet_to_be_negated(leaves, out):
    grad_out = torch.ones_like(out)
    negated = torch.autograd.grad(out, leaves, torch._neg_view(grad_out), retain_graph=True)
    for actual, grad in zip(negated, torch.autograd.grad(out, leaves, grad_out), strict=True):
        torch.testing.assert_close(actual, -grad, rtol=0, atol=0)
