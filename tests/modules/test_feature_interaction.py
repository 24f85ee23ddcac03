"""``JaggedFeatureInteraction``, fused and unfused, against PyTorch."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.cases import Case, offsets_of
from tests.fixtures import skip_unless_supported
from tests.tolerance import assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import JaggedFeatureInteraction

CPU = torch.device("cpu")
LENGTHS = [3, 0, 65, 1, 300, 0]
TARGETS = {"one": None, "five": 5, "jagged": [2, 3, 0, 16, 70, 1]}  # per sample
ALL_TARGETS = pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
ACTIVATIONS = {
    "softmax": lambda x: x.softmax(-1),
    "silu": F.silu,
    None: lambda x: x,
}
ALL_WAYS = pytest.mark.parametrize(
    ("activation", "fused"), [("softmax", True), ("softmax", False), ("silu", None), (None, None)]
)


def inputs_of(targets, device=CPU, dtype=torch.float32, width=24, lengths=LENGTHS):
    """Random targets and features, and their offsets."""
    generator = torch.Generator().manual_seed(0)
    shape = {type(None): [len(lengths)], int: [len(lengths), targets]}.get(type(targets))
    if shape is None:
        shape = [sum(targets)]

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = {
        "targets": draw(*shape, width),
        "features": draw(sum(lengths), width),
        "offsets": offsets_of(torch.tensor(lengths), torch.int64, device),
    }
    if isinstance(targets, list):
        inputs["target_offsets"] = offsets_of(torch.tensor(targets), torch.int32, device)
    return inputs


def run(module, targets, features, offsets, target_offsets=None):
    if target_offsets is not None:
        targets = JaggedTensor(targets, offsets=target_offsets)
    return module(targets, JaggedTensor(features, offsets=offsets))


def formula(activation, targets, features, offsets, target_offsets=None):
    """The formula of the docstring, for each sample."""
    if target_offsets is None:
        samples = targets.unsqueeze(1) if targets.dim() == 2 else targets
    else:
        samples = targets.split(target_offsets.diff().tolist())
    outs = []
    for q_TD, x_LD in zip(samples, features.split(offsets.diff().tolist()), strict=True):
        scores_TL = q_TD @ x_LD.T * x_LD.shape[1] ** -0.5
        outs.append(ACTIVATIONS[activation](scores_TL) @ x_LD)
    out = torch.cat(outs)
    return out if target_offsets is not None else out.view_as(targets)


@ALL_TARGETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@ALL_WAYS
def test_matches_the_formula(activation, fused, dtype, targets, device):
    skip_unless_supported(Case("interaction", 6, 300, 1, 24, dtype=dtype), device)
    function = functools.partial(run, JaggedFeatureInteraction(activation, fused=fused))
    oracle = functools.partial(formula, activation)
    assert_matches_oracle(function, oracle, inputs_of(targets, device, dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("lengths", [[0, 0, 0], []], ids=str)
def test_without_features(activation, lengths, device):
    inputs = inputs_of(5, device, lengths=lengths)
    module = JaggedFeatureInteraction(activation)
    results = outputs_and_gradients(
        functools.partial(run, module), inputs, torch.ones_like(inputs["targets"])
    )
    assert results["out"].shape == (len(lengths), 5, 24)
    assert all((value == 0).all() for value in results.values())


def test_given_scale():
    inputs = inputs_of(5, width=16)
    scaled = JaggedFeatureInteraction(scale=0.25)  # 1/√16
    assert torch.equal(run(scaled, **inputs), run(JaggedFeatureInteraction(), **inputs))
    assert "scale=0.25" in repr(scaled)


@ALL_WAYS
def test_without_width(activation, fused, device):
    inputs = inputs_of(TARGETS["jagged"], device, width=0)
    module = JaggedFeatureInteraction(activation, fused=fused)
    results = outputs_and_gradients(
        functools.partial(run, module), inputs, torch.ones_like(inputs["targets"])
    )
    assert results["out"].shape == inputs["targets"].shape
    assert results["features"].shape == (sum(LENGTHS), 0)


@ALL_WAYS
def test_export(activation, fused):
    inputs = inputs_of(TARGETS["jagged"])
    module = JaggedFeatureInteraction(activation, fused=fused)
    exported = torch.export.export(
        _OfTensors(module), tuple(inputs.values()), strict=False
    ).module()
    torch.testing.assert_close(exported(*inputs.values()), run(module, **inputs), rtol=0, atol=0)


class _OfTensors(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return run(self.module, *inputs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"activation": "relu"}, "activation must be 'softmax', 'silu' or None, got 'relu'"),
        (
            {"activation": "silu", "fused": True},
            "activation must be 'softmax' with fused=True, got 'silu'",
        ),
    ],
)
def test_invalid_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        JaggedFeatureInteraction(**kwargs)


ERRORS = {
    ValueError: [
        ({"targets": torch.zeros(5, 24)}, r"targets must have shape \[B, D\] = \[6, 24"),
        ({"targets": torch.zeros(6, 2, 8)}, r"\[B, T, D\] = \[6, any, 24\], got"),
        (
            {"target_offsets": torch.tensor([0, 6])},
            r"targets.offsets\(\) must have shape \[B \+ 1\] = \[7\]",
        ),
        (
            {"offsets": torch.tensor([0, 3, 3, 68, 69, 369, 368])},
            r"features.offsets\(\) must end at the 369 rows",
        ),
        (
            {"target_offsets": torch.tensor([0, 1, 2, 3, 4, 6, 5])},
            r"targets.offsets\(\) must end at the 6 rows",
        ),
        ({"features": torch.zeros(369)}, r"features.values\(\) must have shape"),
    ],
    TypeError: [
        ({"targets": torch.zeros(6, 24).half()}, "targets must be torch.float32"),
        ({"targets": [0.0] * 6}, "targets must be a Tensor or a JaggedTensor, got a li"),
        ({"features": torch.zeros(369, 24).long()}, "features must be one of"),
    ],
    NotImplementedError: [
        (
            {"targets": torch.zeros(6, 513), "features": torch.zeros(369, 513)},
            "features must have a width of 1 to 512, got 513",
        ),
    ],
}


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [(error, *case) for error, cases in ERRORS.items() for case in cases],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=message):
        run(JaggedFeatureInteraction(), **inputs_of(None) | change)


def test_features_must_be_jagged():
    with pytest.raises(TypeError, match="features must be a JaggedTensor, got a Tensor"):
        JaggedFeatureInteraction()(torch.zeros(2, 4), torch.zeros(3, 4))


@ALL_WAYS
def test_autocast(activation, fused, device):
    """Targets have the dtype of a layer, features the dtype of tables."""
    module = JaggedFeatureInteraction(activation, fused=fused)
    inputs = inputs_of(TARGETS["five"], device)
    inputs["targets"] = inputs["targets"].half()

    def function(**inputs):
        with torch.autocast(device.type, torch.float16):
            out = run(module, **inputs)
        assert out.dtype == torch.float16
        return out

    assert_matches_oracle(function, functools.partial(formula, activation), inputs)
