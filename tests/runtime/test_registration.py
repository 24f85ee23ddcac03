"""Ops under autograd, transforms, dispatch modes and tensor subclasses."""

import functools
from typing import ClassVar

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.runs import assert_same_run
from torchrec_jagged_attn import JaggedTargetAttention
from torchrec_jagged_attn.ops import (
    jagged_dense_add,
    jagged_dense_bmm,
    jagged_flash_attention,
    jagged_softmax,
    jagged_target_attention,
)


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
    leaves = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]
    attention_on(leaves[0].device)  # its random weights are not drawn within a transform
    return leaves


@pytest.fixture
def out(leaves, device):
    return jagged_target_attention(*leaves, torch.tensor([0, 2, 5], device=device))


def test_modes_see_both_directions(leaves, device):
    with Recorder() as recorder:
        out = jagged_target_attention(*leaves, torch.tensor([0, 2, 5], device=device))
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert recorder.names == ["target_attention", "target_attention_backward"]


def test_modes_see_backward_alone(leaves, out):
    with Recorder() as recorder:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert recorder.names == ["target_attention_backward"]


def test_gradients_yet_to_be_negated(leaves, out):
    grad_out = torch.ones_like(out)
    negated = torch.autograd.grad(out, leaves, torch._neg_view(grad_out), retain_graph=True)
    for actual, grad in zip(negated, torch.autograd.grad(out, leaves, grad_out), strict=True):
        torch.testing.assert_close(actual, -grad, rtol=0, atol=0)


def test_gradients_of_a_batch_are_refused(leaves, out):
    grad_out = torch.ones(3, *out.shape, device=out.device)
    with pytest.raises(NotImplementedError, match="target_attention has no gradient of a batch"):
        torch.autograd.grad(out, leaves, grad_out, is_grads_batched=True)


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_out):
        return None


def test_undefined_gradients(leaves, out):
    grads = torch.autograd.grad(WithoutGradient.apply(out).sum(), leaves, allow_unused=True)
    assert grads == (None, None)


def attend(leaves):
    offsets = torch.tensor([0, 2, 5], device=leaves[0].device)
    return jagged_target_attention(*leaves, offsets)


def softmax(leaves):
    return jagged_softmax(leaves[1], torch.tensor([0, 2, 5], device=leaves[1].device))


@pytest.mark.parametrize("function", [attend, softmax])
def test_checkpointed(function, leaves):
    expected = torch.autograd.grad(function(leaves).sum(), leaves, allow_unused=True)
    out = checkpoint(function, leaves, use_reentrant=False)
    grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


class Wrapper(torch.Tensor):
    """A subclass that keeps the names of the package's ops that it meets."""

    names: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.namespace == "torchrec_jagged_attn":
            cls.names.append(func._opname)
            return out
        return tree_map_only(torch.Tensor, cls, out)


@pytest.mark.parametrize(
    ("function", "name"),
    [(attend, "target_attention_backward"), (softmax, "jagged_softmax_backward")],
)
def test_saved_tensors_that_come_back_as_a_subclass(function, name, leaves):
    expected = torch.autograd.grad(function(leaves).sum(), leaves, allow_unused=True)
    with saved_tensors_hooks(lambda x: x, lambda x: Wrapper(x) if len(x) == 5 else x):
        out = function(leaves)
    Wrapper.names.clear()
    grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    assert Wrapper.names == [name]


@pytest.mark.parametrize("function", [attend, softmax])
def test_compiled_autograd_makes_one_graph(function, leaves):
    function(leaves).sum().backward()
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    out = function(leaves).sum()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        out.backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected, rtol=0, atol=0)


def attend_flash(leaves):
    x = leaves[1].unsqueeze(1)
    return jagged_flash_attention(x, x, x, torch.tensor([0, 2, 5], device=x.device))


@functools.cache
def attention_on(device):
    return JaggedTargetAttention(16, 2, device=device)


def attend_by_module(leaves):
    history = JaggedTensor(leaves[1], offsets=torch.tensor([0, 2, 5], device=leaves[1].device))
    return attention_on(leaves[1].device)(leaves[0].squeeze(1), history)


def multiply(leaves):
    offsets = torch.tensor([0, 2, 5], device=leaves[1].device)
    return jagged_dense_bmm(leaves[1], leaves[0].mT, offsets)


def add(leaves):
    offsets = torch.tensor([0, 2, 5], device=leaves[1].device)
    return jagged_dense_add(leaves[1], leaves[0].squeeze(1), offsets)


@pytest.mark.parametrize(
    "function", [attend, attend_flash, attend_by_module, softmax, multiply, add]
)
def test_forward_mode_is_refused(function, leaves):
    query, history = (leaf.detach() for leaf in leaves)
    out = function(leaves)
    message = "has no forward-mode derivative, got a dual tensor"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda x: function([query, x]), (history,), (history,))
    with forward_ad.dual_level():
        function([query, history])  # which have no tangent
        with pytest.raises(NotImplementedError, match=message):
            function([query, forward_ad.make_dual(history, history)])
        grad_out = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(out, leaves, grad_out, allow_unused=True)


DIFFERENTIABLE = [attend, attend_flash, attend_by_module, softmax, multiply, add]


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_second_derivatives_are_refused(function, leaves):
    out = function(leaves).sum()
    with pytest.raises(NotImplementedError, match=r"must be False, jagged_.*=True: det"):
        torch.autograd.grad(out, leaves[1], create_graph=True)


def loss_of(function):
    return lambda *leaves: function(leaves).square().sum()


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_transforms_take_gradients(function, leaves):
    loss = loss_of(function)(*leaves)
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    inputs = [leaf.detach() for leaf in leaves]
    grads = torch.func.grad(loss_of(function), (0, 1))(*inputs)
    loss, pull_back = torch.func.vjp(loss_of(function), *inputs)
    for others in (grads, pull_back(torch.ones_like(loss))):
        for grad, wanted in zip(others, expected, strict=True):
            assert_same_run(grad, wanted, num_terms=100)  # kernels may differ by strides


@pytest.mark.parametrize(
    "function", [attend, attend_flash, attend_by_module, softmax, multiply]
)  # the gradient of a sum is the output's, which has one
def test_transforms_are_refused_second_derivatives(function, leaves):
    def first_by_transform(x):
        return torch.func.grad(lambda x: loss_of(function)(leaves[0].detach(), x))(x).sum()

    def first_by_autograd(x):
        loss = loss_of(function)(leaves[0].detach(), x)
        return torch.autograd.grad(loss, x, create_graph=True)[0].sum()

    message = "no second derivative"
    for first in (first_by_transform, first_by_autograd):
        with pytest.raises(NotImplementedError, match=message):
            torch.func.grad(first)(leaves[1].detach())
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(first_by_transform(leaves[1]), leaves[1])
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.hessian(lambda x: loss_of(function)(leaves[0].detach(), x))(leaves[1].detach())


@pytest.mark.parametrize("function", [attend, attend_flash, attend_by_module, softmax, multiply])
def test_gradients_of_mapped_functions_are_refused(function, leaves):
    def loss(x):
        return loss_of(function)(leaves[0].detach(), x)

    with pytest.raises(NotImplementedError, match=r"no gradient of a batch, .* torch\.func\.vmap"):
        torch.func.vmap(torch.func.grad(loss))(torch.stack([leaves[1].detach()] * 2))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_mapped_functions_run_one_after_the_other(function, leaves):
    query, history = (leaf.detach() for leaf in leaves)
    histories = torch.stack([history, -history])
    actual = torch.func.vmap(lambda x: function([query, x]))(histories)
    expected = torch.stack([function([query, x]) for x in histories])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def attend_by_age(leaves, times):
    table, offsets = leaves[1][:, :1], torch.tensor([0, 2, 5], device=times.device)
    ages = {"age_bias": table, "timestamps": times, "request_time": times[3:]}
    return jagged_target_attention(*leaves, offsets, **ages)


def attend_flash_by_age(leaves, times):
    x, offsets = leaves[1].unsqueeze(1), torch.tensor([0, 2, 5], device=times.device)
    table = leaves[0][:, :, 0]
    ages = {"age_bias": table, "timestamps": times, "request_time": times[3:]}
    return jagged_flash_attention(x, x, x, offsets, **ages)


@functools.cache
def attention_by_age_on(device):
    return JaggedTargetAttention(16, 2, recency_bias=True, age_bias=True, device=device)


def attend_by_module_and_age(leaves, times):
    history = JaggedTensor(leaves[1], offsets=torch.tensor([0, 2, 5], device=times.device))
    return attention_by_age_on(times.device)(leaves[0].squeeze(1), history, timestamps=times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", [attend_by_age, attend_flash_by_age, attend_by_module_and_age])
def test_timestamps_have_no_gradient(function, dtype, leaves, device):
    """Scores are piecewise constant in them."""
    times = torch.tensor([0, 5, 1, 20, 30], device=device, dtype=dtype)
    expected = torch.autograd.grad(function(leaves, times).sum(), leaves)
    times.requires_grad_()
    out = function(leaves, times)
    *grads, times_grad = torch.autograd.grad(out.sum(), [*leaves, times], allow_unused=True)
    assert times_grad is None
    torch.testing.assert_close(grads, list(expected), rtol=0, atol=0)


@pytest.mark.parametrize("function", [attend_by_age, attend_flash_by_age])
def test_timestamps_alone_make_no_graph(function, leaves, device):
    times = torch.arange(5.0, device=device, requires_grad=True)
    assert not function([leaf.detach() for leaf in leaves], times).requires_grad
