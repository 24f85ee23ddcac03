"""What the length of a history does to its pooled row: factors, summands, noise and dropout."""

import pytest
import torch

from tests.fixtures import opcheck
from torchrec_jagged_attn.arguments import LengthArguments
from torchrec_jagged_attn.cpu import scale_by_length as cpu
from torchrec_jagged_attn.cpu.dropout import dropped_rows
from torchrec_jagged_attn.devices import has_kernels, supported_dtypes
from torchrec_jagged_attn.kernels.target import scale_by_length as kernels
from torchrec_jagged_attn.ops.scale_by_length import call_scale_by_length
from torchrec_jagged_attn.testing import assert_close, offsets_of, outputs_and_gradients

LENGTHS = torch.tensor([5, 0, 1, 700, 40, 3])
TARGETS = torch.tensor([2, 1, 0, 80, 0, 9])
LEARNED = ("x", "power", "bias")


def inputs_of(layout, width, device="cpu", dtype=torch.float32):
    shape = {"one": (6, width), "three": (6, 3, width), "jagged": (92, width)}[layout]
    generator = torch.Generator().manual_seed(0)
    column_dtype = torch.promote_types(dtype, torch.float32)

    def draw(*shape, scale=1.0, dtype=dtype):
        return torch.randn(shape, generator=generator).mul(scale).to(device, dtype)

    return {
        "x": draw(*shape),
        "offsets": offsets_of(LENGTHS, torch.int64, device),
        "query_offsets": offsets_of(TARGETS, torch.int64, device) if layout == "jagged" else None,
        "power": draw(width, scale=0.2, dtype=column_dtype),
        "bias": draw(width, dtype=column_dtype),
        "seed": None,
        "noise": 0.0,
        "odds": 0.0,
    }


def drawn(device, p=0.6, noise=0.5):
    """The last three inputs where there is noise, and elements are dropped."""
    return {
        "seed": torch.tensor([-(2**62) + 7], device=device),
        "noise": noise,
        "odds": p / (1 - p),
    }


def scale(**inputs):
    return call_scale_by_length(*LengthArguments(**inputs))


def of_ones(x, lengths, **inputs):
    """Of ``x`` with histories of these ``lengths``, and what else is given."""
    others = dict.fromkeys(("query_offsets", "power", "bias", "seed"))
    offsets = offsets_of(lengths, torch.int64, x.device)
    return scale(**others | {"noise": 0.0, "odds": 0.0} | inputs, x=x, offsets=offsets)


def lengths_of(x, query_offsets):
    """Of the history of each row."""
    lengths = LENGTHS if query_offsets is None else LENGTHS.repeat_interleave(TARGETS)
    return lengths.view(-1, *[1] * (x.dim() - 1)).to(x.device)


def draws_of(x, query_offsets, seed, noise, odds):
    """Noise, and which elements are kept, taken as given, and the formula of what is kept."""
    arguments = LengthArguments(
        x=torch.zeros_like(x, dtype=torch.float64, device="cpu"),
        offsets=offsets_of(LENGTHS, torch.int64, "cpu"),
        query_offsets=None if query_offsets is None else query_offsets.cpu(),
        power=None,
        bias=None,
        seed=seed.cpu(),
        noise=noise,
        odds=0.0,
    )
    drawn_noise = cpu.forward(arguments).to(x.device)
    ones = arguments._replace(x=torch.ones_like(arguments.x), noise=0.0, odds=odds)
    is_kept = cpu.forward(ones).to(x.device) != 0
    root = lengths_of(x, query_offsets).clamp(min=1).double().sqrt()
    return drawn_noise, is_kept * (1 + odds / root)


def oracle(x, offsets, query_offsets, power, bias, seed, noise, odds):
    log = lengths_of(x, query_offsets).to(power.dtype).clamp(min=1).log()
    out = x * torch.exp(log * power) + bias * log
    if seed is not None:
        drawn_noise, kept = draws_of(x, query_offsets, seed, noise, odds)
        out = (out + drawn_noise) * kept
    return out.to(x.dtype)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    ("layout", "width"), [("one", 16), ("one", 600), ("three", 33), ("jagged", 200)]
)
def test_matches_the_formula(layout, width, drops, device):
    for dtype in supported_dtypes(device):
        inputs = inputs_of(layout, width, device, dtype)
        if drops:
            inputs |= drawn(device, 0.3)
        grad_out = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1))
        grad_out = grad_out.to(device, dtype)
        actual = outputs_and_gradients(scale, inputs, grad_out)
        doubled = {name: inputs[name].double() for name in LEARNED}
        expected = outputs_and_gradients(oracle, inputs | doubled, grad_out.double())
        plain = outputs_and_gradients(oracle, inputs, grad_out)
        for name in ("out", *LEARNED):
            x = actual[name]
            assert x.dtype == (dtype if name == "out" else inputs[name].dtype)
            if dtype == torch.float64:  # in which the oracle rounds as often
                torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-12)
            else:
                assert_close(x, expected[name], plain[name], gradient=name != "out", name=name)


@pytest.mark.parametrize("p", [0.1, 0.6, 0.99])
def test_drops_as_often_as_asked_for(p, device):
    """The odds fall with the root of the length; no row and no column is like another."""
    num_samples, num_targets, width = 100, 3, 200
    num_rows = num_samples * num_targets
    for length in (1, 9, 400):
        x = torch.ones(num_samples, num_targets, width, device=device)
        lengths = torch.full((num_samples,), length)
        out = of_ones(x, lengths, **drawn(device, p, noise=0.0)).flatten(0, 1)
        dropped = (out == 0).double()
        rate = p / (p + (1 - p) * length**0.5)
        deviation = (rate * (1 - rate)) ** 0.5
        assert abs(dropped.mean() - rate) < 5 * deviation / (num_rows * width) ** 0.5
        for axis, number in ((0, num_rows), (1, width)):
            means = dropped.mean(axis)
            assert abs(means.std() / deviation * number**0.5 - 1) < 0.25
        assert torch.allclose(out[out != 0], torch.tensor(1 / (1 - rate), device=device))


@pytest.mark.parametrize("deviation", [0.1, 3.0])
def test_noise_is_as_large_as_asked_for(deviation, device):
    """It falls with the root of the length, and knows nothing of what is dropped."""
    lengths = torch.tensor([1, 9, 400, 0]).repeat_interleave(100)
    x = torch.zeros(400, 300, device=device)
    noise = of_ones(x, lengths, **drawn(device, p=0.0, noise=deviation))
    of_one, others = noise[:100], noise.double().view(4, -1)
    expected = torch.tensor([1, 1 / 3, 1 / 20, 0], dtype=torch.float64, device=device) * deviation
    # 30,000 draws a length: five standard deviations.
    assert ((others.std(1) - expected).abs() <= 0.02 * expected).all()
    assert (others.mean(1).abs() <= 0.03 * expected).all()
    assert of_one.abs().max() < deviation * 3**0.5 * 1.0001
    for axis in (0, 1):
        assert 0.5 < of_one.mean(axis).std() / deviation * of_one.shape[axis] ** 0.5 < 1.5
    dropped = of_ones(x + 1, lengths, **drawn(device, p=0.5, noise=0.0))[:100] == 0
    assert of_one[dropped].mean().abs() < 0.05 * deviation


def test_drops_independently_of_rows():
    """With one seed."""
    dropout = torch.tensor([1, 2**31])
    outputs = of_ones(
        torch.ones(400, 300), torch.ones(400, dtype=torch.int64), seed=dropout, odds=1.0
    )
    outputs = (outputs == 0).double()
    for rows in (dropped_rows(dropout, 400), ~dropped_rows(dropout, 400)):
        errors = (outputs[rows].mean(0) - 0.5) / (0.25 / rows.sum()) ** 0.5
        assert errors.abs().max() < 5


def test_each_device_draws_the_same(device):
    """Whatever implementation it takes."""
    inputs = inputs_of("jagged", 200, device) | drawn(device)
    out = scale(**inputs).cpu()
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    expected = cpu.forward(LengthArguments(**on_cpu))
    assert torch.equal(out == 0, expected == 0)
    torch.testing.assert_close(out, expected)


def test_repeats_are_equal_to_the_bit(device, nan_filled_memory):
    inputs = inputs_of("three", 33, device) | drawn(device)
    grad_out = torch.ones(1, device=device).expand_as(inputs["x"])
    first, again = (outputs_and_gradients(scale, inputs, grad_out) for _ in range(2))
    for name, x in first.items():
        assert torch.equal(x, again[name])
        assert x.isfinite().all()


@pytest.mark.parametrize("needs", [["x"], ["power"], ["bias"], LEARNED], ids=str)
def test_any_strides(needs, device):
    """Of all, also of gradients, of which those that are asked for are made."""
    inputs = inputs_of("three", 24, device) | drawn(device)
    grad_out = torch.randn(6, 3, 24, device=device)
    expected = outputs_and_gradients(scale, inputs, grad_out)
    inputs["x"] = inputs["x"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for name in ("power", "bias", "offsets"):
        inputs[name] = torch.stack([inputs[name]] * 2, 1)[:, 0]
    for name in needs:
        inputs[name].requires_grad_()
    out = scale(**inputs)
    assert torch.equal(out, expected["out"])
    transposed = grad_out.mT.contiguous().mT
    found = torch.autograd.grad(out, [inputs[name] for name in needs], transposed)
    assert out.is_contiguous()
    for name, grad in zip(needs, found, strict=True):
        assert torch.equal(grad, expected[name])
        assert grad.is_contiguous()


@pytest.mark.parametrize("name", ["x", "power", "bias"])
def test_gradients_of_columns_are_made_if_asked_for(name, device):
    inputs = inputs_of("three", 24, device)
    args = LengthArguments(**inputs)
    needs = LengthArguments(**dict.fromkeys(inputs, False) | {name: True})
    for implementation in [cpu, kernels] if has_kernels(device, args.x.dtype) else [cpu]:
        grads = implementation.backward(torch.ones_like(args.x), args, needs)
        made = {column for column in ("power", "bias") if getattr(grads, column) is not None}
        assert made == {name} - {"x"}


def test_its_output_may_be_changed(device):
    inputs = inputs_of("one", 16, device)
    inputs["x"].requires_grad_()
    out = scale(**inputs)
    (expected,) = torch.autograd.grad(2 * out.sum(), inputs["x"], retain_graph=True)
    out.mul_(2).sum().backward()
    assert torch.equal(inputs["x"].grad, expected)


def test_nan_of_another_row(device):
    inputs = inputs_of("one", 16, device)
    clean = scale(**inputs)
    inputs["x"][3] = torch.nan
    out = scale(**inputs)
    assert out[3].isnan().all()
    assert torch.equal(out[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


def test_powers_are_as_exact_as_their_dtype(device):
    """Off by less than two units in the last place, of lengths that fp32 has."""
    short, long = torch.arange(1, 3000), 2 ** torch.arange(2, 24)
    lengths = torch.cat([short, long - 1, long, long + 1, (long * 1.4142).long()])
    power = torch.linspace(-5, 5, 64, device=device)
    out = of_ones(torch.ones(len(lengths), 64, device=device), lengths, power=power)
    exact = lengths.double().to(device).unsqueeze(1) ** power.double()
    last_place = torch.finfo(torch.float32).eps * 2.0 ** exact.log2().floor()
    assert ((out - exact).abs() / last_place).max() < 2


def test_powers_of_the_largest_numbers(device):
    """What fp32 can hold is neither infinite nor zero."""
    power = torch.tensor([127.9, -127.9, -140.0, 128.1, -151.0], device=device)
    out = of_ones(torch.ones(1, 5, device=device), torch.tensor([2]), power=power)
    exact = 2.0 ** power.double()
    torch.testing.assert_close(out[0, :3].double(), exact[:3], rtol=1e-2, atol=0)
    assert out[0, 3:].tolist() == [torch.inf, 0]


def test_powers_without_measure(device):
    """They give zeros and infinities, no NaN; of a history of one row, ones."""
    power = torch.tensor([200.0, -200.0, 3e38, -3e38], device=device)
    x = torch.ones(6, 4, device=device)
    long = torch.tensor([torch.inf, 0, torch.inf, 0], device=device)
    is_long = lengths_of(x, None) > 1
    assert torch.equal(of_ones(x, LENGTHS, power=power), torch.where(is_long, long, 1.0))


def test_empty_histories_of_zeros_stay_zeros(device):
    inputs = inputs_of("one", 16, device) | drawn(device, p=0.1)
    inputs["x"][LENGTHS == 0] = 0
    out = scale(**inputs)
    assert not out[LENGTHS == 0].any()
    assert out[LENGTHS != 0].any(1).all()


@pytest.mark.parametrize("shape", [(0, 16), (0, 3, 16), (2, 0, 16)])
def test_no_rows(shape, device):
    x = torch.zeros(shape, device=device, requires_grad=True)
    power, bias = (torch.zeros(16, device=device, requires_grad=True) for _ in range(2))
    lengths = torch.zeros(shape[0], dtype=torch.int64)
    out = of_ones(x, lengths, power=power, bias=bias, **drawn(device))
    assert out.shape == shape
    out.sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(power.grad, torch.zeros_like(power))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.reference
def test_gradcheck():
    inputs = inputs_of("jagged", 3, dtype=torch.float64) | drawn("cpu")
    leaves = [inputs[name].requires_grad_() for name in LEARNED]

    def call(*leaves):
        return scale(**inputs | dict(zip(LEARNED, leaves, strict=True)))

    assert torch.autograd.gradcheck(call, leaves)


def test_opcheck(device):
    for layout in ("three", "jagged"):
        inputs = inputs_of(layout, 16, device) | drawn(device)
        inputs["x"] = inputs["x"].mT.contiguous().mT
        for name in LEARNED:
            inputs[name].requires_grad_()
        opcheck(torch.ops.torchrec_jagged_attn.scale_by_length.default, tuple(inputs.values()))
