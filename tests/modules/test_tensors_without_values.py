"""Shapes of modules on the meta device and in ``FakeTensorMode``, forward and backward."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.combinations import each_pair
from tests.modules.target_attention_inputs import make_module
from torchrec_jagged_attn import (
    HistoryEncoderLayer,
    JaggedFeatureInteraction,
    JaggedSelfAttention,
    JaggedTargetAttention,
    repeat_per_candidate,
)
from torchrec_jagged_attn.semantic_ids import DiscretePCA

pytestmark = pytest.mark.reference  # alike with any kernels


MODES = ["meta", "fake", "of real parameters"]


@pytest.fixture(params=MODES)
def mode(request):
    """A device, the context of the construction, and the context of the call."""
    is_meta, is_real = request.param == "meta", request.param == "of real parameters"
    fake = contextlib.nullcontext() if is_meta else FakeTensorMode(allow_non_fake_inputs=is_real)
    device = "meta" if is_meta else "cpu"
    return device, contextlib.nullcontext() if is_real else fake, fake


def draw(*shape, device):
    return torch.randn(shape, device=device, requires_grad=True)


def history_of(device):
    lengths = torch.tensor([2, 0, 4], device=device)
    return JaggedTensor(draw(6, 8, device=device), lengths=lengths)


TARGETS = {
    "one": lambda device: draw(3, 8, device=device),
    "five": lambda device: draw(3, 5, 8, device=device),
    "jagged": history_of,
}


def assert_pools(module, target, device, **others):
    target, history = TARGETS[target](device), history_of(device)
    out = module(target, history, **others)
    rows = target.values() if isinstance(target, JaggedTensor) else target
    assert out.shape == rows.shape
    history_grad, target_grad = torch.autograd.grad(out.sum(), [history.values(), rows])
    assert history_grad.shape == (6, 8)
    assert target_grad.shape == rows.shape


OPTIONS = [
    {},
    {"keys_and_values": "materialized", "age_bias": True},
    {"keys_and_values": "absorbed", "dropout": 0.1},
    {"score": "silu"},
]


@pytest.mark.parametrize(
    ("options", "target", "mode"), each_pair(OPTIONS, TARGETS, MODES), ids=str, indirect=["mode"]
)
def test_target_attention(options, target, mode):
    device, around, inside = mode
    with around:
        attention = make_module(8, 2, device=device, **options)
    with inside:
        indices = torch.zeros(6, dtype=torch.int64, device=device)
        others = {"timestamps": indices} if "age_bias" in options else {}
        assert_pools(attention, target, device, **others)
        assert_pools(attention, target, device, indices=indices, **others)


@pytest.mark.parametrize("score", ["softmax", "silu"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_attention_weights(is_packed, score, mode):
    device, around, inside = mode
    with around:
        codes = None
        if is_packed:
            codes = DiscretePCA(8, 12, device=device)
            codes.mean += 1  # as if it were fitted
        options = {"age_bias": True, "history_codes": codes, "score": score, "device": device}
        attention = JaggedTargetAttention(8, 2, **options)
    with inside:
        history, times = history_of(device), torch.zeros(6, dtype=torch.int64, device=device)
        if is_packed:
            packed = torch.zeros(6, 3, dtype=torch.uint8, device=device)
            history = JaggedTensor(packed, lengths=history.lengths())
        target = TARGETS["five"](device)
        assert attention.attention_weights(target, history, times).values().shape == (6, 5, 2)
        assert attention(target, history, times).shape == (3, 5, 8)


@pytest.mark.parametrize(
    ("fused", "target", "mode"), each_pair([True, False], TARGETS, MODES), indirect=["mode"]
)
def test_feature_interaction(fused, target, mode):
    device, _, inside = mode
    with inside:
        assert_pools(JaggedFeatureInteraction(fused=fused), target, device)


@pytest.mark.parametrize("layer", [JaggedSelfAttention, HistoryEncoderLayer])
def test_self_attention(layer, mode):
    device, around, inside = mode
    with around:
        attention = layer(8, 2, causal=True, window=3, device=device)
    with inside:
        history = history_of(device)
        out = attention(history).values()
        (grad,) = torch.autograd.grad(out.sum(), history.values())
        assert out.shape == grad.shape == (6, 8)


def test_repeat_per_candidate(mode):
    device, _, inside = mode
    with inside:
        assert repeat_per_candidate(draw(3, 8, device=device), history_of(device)).shape == (6, 8)
