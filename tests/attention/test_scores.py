"""Weights of target attention that are a function of their own score."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.target_attention.test_target_attention import assert_right, inputs_of, inputs_of_layout
from torchrec_jagged_attn import JaggedTargetAttention, jagged_target_attention

SCORE_CASES = [
    ("dense", 1, torch.float32, "tables"),
    ("dense", 1, torch.bfloat16, "tables"),
    ("dense", 3, torch.float32, ""),
    ("dense", 3, torch.float64, "tables"),
    ("dense", 9, torch.float16, "tables"),
    ("dense", 9, torch.float32, "tables"),
    ("dense", 40, torch.float32, "tables"),
    ("dense", 40, torch.bfloat16, ""),
    ("shared", 9, torch.bfloat16, ""),
    ("jagged", 9, torch.float32, "tables"),
    ("jagged", 9, torch.float16, "tables"),
]


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
@pytest.mark.parametrize(("layout", "num_targets", "dtype", "others"), SCORE_CASES, ids=str)
def test_scores(layout, num_targets, dtype, others, score, device):
    inputs, timestamps = inputs_of_layout(layout, num_targets, dtype, others, device)
    assert_right(inputs, score=score, timestamps=timestamps)


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 700, 0], [600, 3, 520]], ids=str)
def test_at_edges(lengths, score, device):
    for num_targets in (0, 1, 9):
        inputs = inputs_of(lengths, device, num_targets=num_targets)
        assert_right(inputs, score=score)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
@pytest.mark.parametrize("score", ["silu", "sigmoid"])
def test_scores_far_from_zero(score, num_targets, device):
    """Where powers of e overflow; and rows that a bias of ``-inf`` leaves out."""
    inputs = inputs_of([70, 5], device, num_targets=num_targets)
    inputs["query"] *= 100
    inputs["position_bias"] = torch.zeros(20, 2, device=device)
    inputs["position_bias"][::3] = -torch.inf
    assert_right(inputs, score=score)


def test_refused():
    inputs = inputs_of([3, 0, 5])
    with pytest.raises(ValueError, match="score must be one of softmax, silu, sigmoid, got 'relu'"):
        jagged_target_attention(**inputs, score="relu")
    with pytest.raises(
        NotImplementedError, match="prior_weights must be None unless score is 'softmax', got score"
    ):
        jagged_target_attention(**inputs, score="silu", prior_weights=torch.ones(8))


def test_module_refuses():
    with pytest.raises(ValueError, match="score must be one of softmax, silu, sigmoid, got 'r"):
        JaggedTargetAttention(16, 2, score="relu")
    history = JaggedTensor(torch.randn(5, 16), lengths=torch.tensor([5]))
    module = JaggedTargetAttention(16, 2, score="silu")
    inputs = torch.randn(1, 16), history
    message = "prior_weights must be None unless score is"
    with pytest.raises(NotImplementedError, match=message):
        module(*inputs, prior_weights=torch.ones(5))
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(module)(*inputs, prior_weights=torch.ones(5))
