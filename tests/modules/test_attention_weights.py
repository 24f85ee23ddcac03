"""``JaggedTargetAttention.attention_weights``."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec import JaggedTensor

from tests.cases import Case
from tests.combinations import each_pair
from tests.fixtures import skip_unless_supported, sync_debug_mode
from tests.modules.target_attention_inputs import (
    OPTIONS,
    attend_by_sample,
    draw_prior_weights,
    example,
    make_inputs,
    make_module,
)
from tests.rounding import RoundingErrors
from tests.tolerance import assert_close
from torchrec_jagged_attn import JaggedTargetAttention


def with_parameters(name, inputs, **options):
    """A module of :data:`OPTIONS` that has the parameters among ``inputs``, taken out of these.

    While it trains it drops weights, of outputs alone.
    """
    module = make_module(16, 2, dropout=0.5, **OPTIONS[name], **options)
    module.load_state_dict({key: inputs.pop(key) for key in module.state_dict()})
    return module.to(inputs["history"].device)


def weights_of(module, *, target, history, offsets, **options):
    return module.attention_weights(
        target, JaggedTensor(history, offsets=offsets), **options
    ).values()


OF_SCORES = each_pair(["default", "values", "another-width", "no-recency"], ["silu", "sigmoid"])


@pytest.mark.parametrize(
    ("name", "prior", "targets", "score"),
    [(*case, "softmax") for case in each_pair(OPTIONS, [False, True], [None, 3, 40])]
    + [(name, False, 3, score) for name, score in OF_SCORES],
)
def test_attention_weights_equal_multihead_attention(name, prior, targets, score, device):
    dtype = OPTIONS[name].get("dtype", torch.float32)
    skip_unless_supported(Case("weights", 5, 70, 2, 16, dtype=dtype), device)
    lengths = [70, 0, 30, 1, 20]
    module = make_module(16, 2, score=score, device="meta", **OPTIONS[name])
    inputs = make_inputs(module, lengths, device, dtype, targets=targets)
    if prior:
        inputs["prior_weights"] = draw_prior_weights(lengths, device, dtype)
    times = {}
    if OPTIONS[name].get("age_bias"):
        times["timestamps"] = torch.arange(121, device=device) ** 2
        times["request_time"] = torch.tensor([3000, 7, 10**12, -5, 14_400], device=device)
    exact = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    weights = []
    with RoundingErrors(dtype) as errors:
        attend_by_sample(module, **exact, **times, weights=weights)
        expected = torch.cat(weights)
    if targets is None:
        expected = expected.squeeze(1)
    trained = with_parameters(name, inputs, score=score)
    assert_close(weights_of(trained, **inputs, **times), expected, errors)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 70, 1, 0]], ids=str)
def test_attention_weights_at_edges(lengths, device):
    for num_targets in (0, 2):
        module = JaggedTargetAttention(16, 2, device="meta")
        inputs = make_inputs(module, lengths, device, targets=num_targets)
        weights = weights_of(with_parameters("default", inputs), **inputs)
        assert weights.shape == (sum(lengths), num_targets, 2)
        assert torch.isfinite(weights).all()


def test_attention_weights_are_computed_in_fp32(device):
    """Under autocast, and for half-precision rows."""
    module = JaggedTargetAttention(16, 2, init="mha").to(device)
    target, history = example(module, [5, 0, 40], device)
    rows = history.values().half()
    exact = JaggedTensor(rows.float(), lengths=history.lengths())
    weights = module.attention_weights(target.requires_grad_(), exact)
    assert weights.lengths().tolist() == [5, 0, 40]
    assert not weights.values().requires_grad
    expected = weights.values()
    assert expected.dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16):
        weights = module.attention_weights(target, exact).values()
    assert torch.equal(weights, expected)
    half = JaggedTensor(rows, lengths=history.lengths())
    assert torch.equal(module.attention_weights(target, half).values(), expected.half())


def test_attention_weights_do_not_depend_on_other_samples(device):
    module = JaggedTargetAttention(16, 2, age_bias=True).to(device)
    target, history, times = example(module, [5, 0, 40, 3], device)
    prior_weights = torch.ones(48, device=device)
    prior_weights[[1, 46]] = 0
    expected = module.attention_weights(target, history, times, prior_weights).values()
    assert torch.all(expected[[1, 46]] == 0)
    values = history.values().detach().clone()
    values[10] = torch.nan
    poisoned = JaggedTensor(values, lengths=history.lengths())
    weights = module.attention_weights(target, poisoned, times, prior_weights).values()
    assert torch.equal(weights[:5], expected[:5])
    assert torch.equal(weights[45:], expected[45:])
    assert torch.isnan(weights[5:45]).all()


@pytest.mark.parametrize("score", ["softmax", "silu"])
def test_attention_weights_of_rows_behind_the_last_offset(score, device):
    module = JaggedTargetAttention(16, 2, age_bias=True, score=score).to(device)
    target, history, times = example(module, [5, 0, 40, 3], device)
    options = {"request_time": torch.arange(4, device=device)}
    expected = module.attention_weights(target, history, times, **options).values()
    rows, times = F.pad(history.values(), (0, 0, 0, 9), value=torch.nan), F.pad(times, (0, 9))
    padded = JaggedTensor(rows, lengths=history.lengths())
    weights = module.attention_weights(target, padded, times, **options).values()
    assert torch.equal(weights, F.pad(expected, (0, 0, 0, 0, 0, 9)))


@pytest.mark.gpu
def test_attention_weights_never_wait_for_the_device():
    module = JaggedTargetAttention(16, 2, age_bias=True).cuda()
    arguments = example(module, [30, 0, 700], torch.device("cuda"))
    arguments[1].offsets()
    module.attention_weights(*arguments)
    with sync_debug_mode("error"):
        module.attention_weights(*arguments)


def test_attention_weights_compile_once_for_all_batches(device):
    module = JaggedTargetAttention(16, 2, age_bias=True).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        module.attention_weights, backend=counter, fullgraph=True, dynamic=True
    )
    for lengths, num_targets in (([9, 0, 2, 23], 3), ([30, 1, 0, 5, 8, 70, 4], 6)):
        arguments = example(module, lengths, device, num_targets)
        expected = module.attention_weights(*arguments).values()
        torch.testing.assert_close(compiled(*arguments).values(), expected, rtol=0, atol=0)
    assert counter.frame_count == 1
