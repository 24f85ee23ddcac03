"""DIN's activation unit: weights of rows by a small network, and the rows pooled by them."""

import pytest
import torch

from tests.fixtures import opcheck, skip_unless_supported
from torchrec_jagged_attn import jagged_activation_unit
from torchrec_jagged_attn.testing import (
    Case,
    activation_unit,
    assert_matches_oracle,
    offsets_of,
    outputs_and_gradients,
)

LENGTHS = [300, 0, 3, 64, 1, 600]
FUNCTIONS = jagged_activation_unit, activation_unit


def inputs_of(
    lengths, device="cpu", dtype=torch.float32, width=16, hidden=(24, 9), factors=False, seed=0
):
    """``factors`` are tables, timestamps and prior weights: of one size, so that no row's rounding
    is all of the error.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    num_rows, (first, second) = sum(lengths), hidden
    inputs = {
        "query": draw(len(lengths), width),
        "history": draw(num_rows, width),
        "offsets": offsets_of(torch.tensor(lengths, dtype=torch.int64), torch.int64, device),
        "weight_1": draw(first, 4 * width, scale=width**-0.5),
        "bias_1": draw(first),
        "weight_2": draw(second, first, scale=first**-0.5),
        "bias_2": draw(second),
        "weight_3": draw(1, second),
        "bias_3": draw(1),
    }
    if factors:
        inputs |= {
            "position_bias": draw(40, 1, scale=0.3),
            "age_bias": draw(70, 1, scale=0.3),
            "timestamps": torch.arange(num_rows, device=device) * 3,
            "prior_weights": draw(num_rows).clamp(min=0),
        }
    return inputs


def assert_right(inputs, activation="sigmoid"):
    """The last layer is one tensor here: a gradient of one element has no larger one beside it that
    its error is held against.
    """

    def of_last(function):
        def call(last, **others):
            return function(
                weight_3=last[None, :-1], bias_3=last[-1:], activation=activation, **others
            )

        return call

    inputs = dict(inputs)
    inputs["last"] = torch.cat([inputs.pop("weight_3")[0], inputs.pop("bias_3")])
    assert_matches_oracle(*map(of_last, FUNCTIONS), inputs)


@pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_oracle(dtype, activation, factors, device):
    skip_unless_supported(Case("unit", 5, 300, 1, 16, dtype=dtype), device)
    assert_right(inputs_of(LENGTHS, device, dtype, factors=factors), activation)


@pytest.mark.parametrize(
    ("width", "hidden"), [(3, (2, 5)), (64, (80, 40)), (100, (17, 33)), (200, (16, 128))], ids=str
)
def test_shapes(width, hidden, device):
    assert_right(inputs_of([70, 0, 300], device, width=width, hidden=hidden))


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0, 0], [0, 700, 0], [16, 17, 255, 256]])
def test_at_edges(lengths, device):
    assert_right(inputs_of(lengths, device))


@pytest.mark.parametrize("table", ["position_bias", "age_bias", "prior_weights"])
def test_one_factor(table, device):
    inputs = inputs_of([70, 0, 300], device, factors=True)
    others = {"position_bias", "age_bias", "prior_weights"} - {table}
    if table != "age_bias":
        others |= {"timestamps"}
    assert_right({name: x for name, x in inputs.items() if name not in others})


def test_no_row_is_padding(device):
    """A sample alone, with all bits as in a batch; repeats have the same bits."""
    inputs = inputs_of(LENGTHS, device, factors=True)
    grad_out = torch.randn(inputs["query"].shape, generator=torch.Generator().manual_seed(2))
    grad_out = grad_out.to(device)
    whole = outputs_and_gradients(jagged_activation_unit, inputs, grad_out)
    again = outputs_and_gradients(jagged_activation_unit, inputs, grad_out)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    bounds = inputs["offsets"].tolist()
    for b in (3, 5):
        rows = slice(bounds[b], bounds[b + 1])
        own = {
            "query": inputs["query"][b : b + 1],
            "offsets": inputs["offsets"][b : b + 2] - bounds[b],
            **{name: inputs[name][rows] for name in ("history", "timestamps", "prior_weights")},
        }
        alone = outputs_and_gradients(jagged_activation_unit, inputs | own, grad_out[b : b + 1])
        assert torch.equal(alone["out"][0], whole["out"][b])
        assert torch.equal(alone["query"][0], whole["query"][b])
        for name in ("history", "prior_weights"):
            assert torch.equal(alone[name], whole[name][rows])


def test_nan_of_another_sample(device, nan_filled_memory):
    inputs = inputs_of([40, 300, 3], device)
    clean = jagged_activation_unit(**inputs)
    inputs["history"][40:340] = torch.nan
    out = jagged_activation_unit(**inputs)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert out[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_weights_of_another_dtype(dtype, device):
    """They are cast as they are read, and their gradients are not rounded to the history's."""
    skip_unless_supported(Case("unit", 5, 300, 1, 16, dtype=dtype), device)
    inputs = inputs_of([70, 0, 300], device)
    cast = inputs | {name: inputs[name].to(dtype) for name in ("query", "history")}
    out = jagged_activation_unit(**cast)
    assert out.dtype == dtype
    results = outputs_and_gradients(jagged_activation_unit, cast, torch.ones_like(out))
    assert results["weight_1"].dtype == torch.float32
    expected = outputs_and_gradients(
        activation_unit,
        {name: x.double() if x.is_floating_point() else x for name, x in cast.items()},
        torch.ones(out.shape, dtype=torch.float64, device=device),
    )
    rounded = torch.finfo(dtype).eps * 20
    for name, x in results.items():
        error = (x.double() - expected[name]).abs().max()
        assert error <= rounded * expected[name].abs().max(), name


def test_rows_are_dropped(device):
    inputs = inputs_of([400, 0, 300], device)
    torch.manual_seed(3)
    dropped = jagged_activation_unit(**inputs, row_dropout=0.3)
    torch.manual_seed(3)
    weights = torch.ones(700, device=device, requires_grad=True)
    out = jagged_activation_unit(**inputs, row_dropout=0.3, prior_weights=weights)
    assert torch.equal(out, dropped)
    out.sum().backward()
    left = (weights.grad != 0).float()
    assert 0.6 < left.mean() < 0.8
    expected = jagged_activation_unit(**inputs, prior_weights=left)
    assert torch.equal(dropped, expected)


def test_its_output_may_be_changed(device):
    inputs = inputs_of([3, 0, 5], device)
    inputs["history"].requires_grad_()
    out = jagged_activation_unit(**inputs)
    (expected,) = torch.autograd.grad(2 * out.sum(), inputs["history"], retain_graph=True)
    out.mul_(2).sum().backward()
    torch.testing.assert_close(inputs["history"].grad, expected)


@pytest.mark.reference
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gradcheck(activation):
    inputs = inputs_of([3, 0, 5], dtype=torch.float64, width=3, hidden=(4, 2), factors=True)
    inputs["prior_weights"] = inputs["prior_weights"] + 0.1
    names = [name for name, x in inputs.items() if x.is_floating_point()]

    def pool(*leaves):
        given = inputs | dict(zip(names, leaves, strict=True))
        return jagged_activation_unit(**given, activation=activation)

    assert torch.autograd.gradcheck(pool, [inputs[name].requires_grad_() for name in names])


def test_opcheck(device):
    inputs = inputs_of([3, 0, 5], device, factors=True)
    names = list(inputs)[:9]
    leaves = [
        inputs[n].requires_grad_() if inputs[n].is_floating_point() else inputs[n] for n in names
    ]
    rest = (inputs["position_bias"].requires_grad_(), inputs["age_bias"], inputs["timestamps"])
    opcheck(
        torch.ops.torchrec_jagged_attn.activation_unit.default,
        (*leaves, *rest, None, inputs["prior_weights"], "silu"),
    )


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (NotImplementedError, "query must have one target per sample", {"query": (3, 2, 16)}),
        (ValueError, r"query must have shape \[B, D\]", {"query": (4, 16)}),
        (ValueError, r"history must have shape \[N, D\]", {"history": (8, 15)}),
        (ValueError, r"weight_1 must have shape \[H1, 4·D\]", {"weight_1": (24, 60)}),
        (ValueError, r"weight_2 must have shape \[H2, H1\]", {"weight_2": (9, 23)}),
        (ValueError, r"bias_3 must have shape \[1\]", {"bias_3": (2,)}),
        (NotImplementedError, "hidden_dims must be 1 to 128 each", {"weight_1": (129, 64)}),
    ],
)
def test_refused(error, message, change):
    inputs = inputs_of([3, 0, 5])
    inputs |= {name: torch.randn(shape) for name, shape in change.items()}
    with pytest.raises(error, match=message):
        jagged_activation_unit(**inputs)


def test_refused_otherwise():
    inputs = inputs_of([3, 0, 5])
    with pytest.raises(ValueError, match="activation must be one of sigmoid, silu, relu, got 'di"):
        jagged_activation_unit(**inputs, activation="dice")
    with pytest.raises(TypeError, match="history must be"):
        jagged_activation_unit(**inputs | {"history": inputs["history"].half()})
    wide = inputs_of([3], width=257)
    with pytest.raises(NotImplementedError, match="must have a width of 1 to 256"):
        jagged_activation_unit(**wide)
