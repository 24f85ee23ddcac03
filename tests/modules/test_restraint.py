"""What ``JaggedTargetAttention`` does to pooled rows: dropout, noise, and what lengths teach."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec import JaggedTensor

from tests.modules.target_attention_inputs import example
from tests.plain import plain_attention
from torchrec_jagged_attn import JaggedTargetAttention
from torchrec_jagged_attn.devices import supported_dtypes
from torchrec_jagged_attn.modules import target_attention
from torchrec_jagged_attn.modules.target_attention import OUTPUT_DROPOUT, OUTPUT_NOISE, ROW_DROPOUT
from torchrec_jagged_attn.ops.dropout import draw_dropout
from torchrec_jagged_attn.testing import UNRESTRAINED


def rates_of_dropped_outputs(p, lengths):
    """Of histories of so many rows."""
    root = lengths.double().clamp(min=1).sqrt()
    return p / (p + (1 - p) * root)


def rows_of(lengths, width, device):
    return JaggedTensor(
        torch.randn(int(lengths.sum()), width, device=device), lengths=lengths.to(device)
    )


def of_three_lengths(device, **options):
    """A module of one head, and 100 targets of each of the lengths 1, 4 and 100."""
    torch.manual_seed(0)
    module = plain_attention(64, 1, device=device, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    history = rows_of(torch.tensor([1, 4, 100]).repeat_interleave(100), 64, device)
    return module, torch.randn(300, 64, device=device, requires_grad=True), history


@pytest.mark.parametrize(
    ("score", "jagged"), [("softmax", False), ("softmax", True), ("silu", False), ("din", False)]
)
def test_output_dropout(score, jagged, device):
    module, target, history = of_three_lengths(device, score=score, output_dropout=0.5)
    targets = JaggedTensor(target, offsets=torch.arange(301, device=device)) if jagged else target
    expected = module.eval()(targets, history)
    module.train()

    def draw(seed):
        torch.manual_seed(seed)
        return module(targets, history)

    out = draw(1)
    kept = out != 0
    rates = rates_of_dropped_outputs(0.5, history.lengths())
    # 6,400 draws a length: five standard deviations.
    assert ((~kept).view(3, -1).double().mean(1) - rates[::100]).abs().max() < 0.032
    scale = (1 / (1 - rates)).float().unsqueeze(1)
    torch.testing.assert_close(out, torch.where(kept, expected * scale, 0))
    assert torch.equal(draw(1), out)
    assert not torch.equal(draw(2), out)
    of_kept, of_dropped = (torch.autograd.grad(draw(1)[x].sum(), target)[0] for x in (kept, ~kept))
    assert of_kept.any()
    assert not of_dropped.any()


@pytest.mark.parametrize("score", ["softmax", "silu", "din"])
def test_output_noise(score, device):
    """In units of one by the root of the width, by the root of the length."""
    module, target, history = of_three_lengths(device, score=score, output_noise=0.5)
    expected = module.eval()(target, history)
    module.train()
    out = module(target, history)
    noise = (out - expected).detach().double().view(3, -1).std(1)
    deviations = torch.tensor([0.5, 0.25, 0.05], dtype=torch.float64, device=device) / 64**0.5
    torch.testing.assert_close(noise, deviations, rtol=0.05, atol=0)
    weights = torch.randn_like(out)
    of_out, of_expected = (torch.autograd.grad(x, target, weights)[0] for x in (out, expected))
    assert torch.equal(of_out, of_expected)
    assert not torch.equal(module(target, history), out)


@pytest.mark.parametrize("score", ["softmax", "din"])
def test_rows_and_outputs_are_dropped_at_once(score, device):
    """By one seed: the same rows, whether outputs are dropped or not."""
    rows, both = (
        plain_attention(64, 1, score=score, row_dropout=0.3, output_dropout=p, device=device)
        for p in (0.0, 0.5)
    )
    for parameter in rows.parameters():
        nn.init.normal_(parameter, std=0.1)
    both.load_state_dict(rows.state_dict())
    history = rows_of(torch.full((50,), 9), 64, device)
    target = torch.randn(50, 64, device=device)

    def draw(module):
        torch.manual_seed(1)
        return module(target, history)

    assert not torch.equal(draw(rows), rows.eval()(target, history))
    rows.train()
    out = draw(both)
    kept = out != 0
    assert 0.7 < kept.double().mean() < 0.8  # three of four
    torch.testing.assert_close(out, torch.where(kept, draw(rows) * (4 / 3), 0))


def test_weights_have_a_seed_of_their_own(device, monkeypatch):
    """With one seed, their draws would be those of outputs."""
    drawn = []

    def draw(*arguments):
        drawn.append(draw_dropout(*arguments))
        return drawn[-1]

    monkeypatch.setattr(target_attention, "draw_dropout", draw)
    module = plain_attention(64, 1, output_dropout=0.5, dropout=0.5, device=device)
    module(torch.randn(50, 64, device=device), rows_of(torch.full((50,), 9), 64, device))
    of_outputs, of_weights = drawn
    assert of_outputs[0] != of_weights[0]


def test_output_dropout_is_scripted(device):
    scripted = torch.jit.script(plain_attention(64, 2, output_dropout=0.5, device=device))
    history = rows_of(torch.full((50,), 9), 64, device)
    target = torch.randn(50, 64, device=device)
    dropped = [(scripted.train(x)(target, history) == 0).double().mean() for x in (True, False)]
    assert 0.2 < dropped[0] < 0.3
    assert dropped[1] == 0


# What is the default


DEFAULTS = {
    "row_dropout": ROW_DROPOUT,
    "output_dropout": OUTPUT_DROPOUT,
    "output_noise": OUTPUT_NOISE,
    "length_power": True,
    "length_bias": True,
}


def restraints_of(module):
    """What is dropped and added, and which parameters of the length there are."""
    learned = module.state_dict()
    return {
        "row_dropout": module.row_dropout,
        "output_dropout": module.output_dropout,
        "output_noise": module.output_noise,
        "length_power": "length_power" in learned,
        "length_bias": "length_bias" in learned,
    }


def test_restrained_where_rows_are_not_projected():
    assert restraints_of(JaggedTargetAttention(16, 2)) == DEFAULTS


@pytest.mark.parametrize(
    "options",
    [{"value_projection": True}, {"init": "mha"}, {"score": "silu"}, {"history_dim": 8}],
    ids=str,
)
def test_not_restrained_elsewhere(options):
    assert restraints_of(JaggedTargetAttention(16, 2, **options)) == UNRESTRAINED


@pytest.mark.parametrize("name", list(UNRESTRAINED))
def test_each_restraint_is_left_out_by_its_option(name):
    module = JaggedTargetAttention(16, 2, **{name: UNRESTRAINED[name]})
    assert restraints_of(module) == DEFAULTS | {name: UNRESTRAINED[name]}


@pytest.mark.parametrize(
    ("embed_dim", "num_heads"),
    [(1, 1), (4, 1), (8, 2), (12, 2), (16, 4), (18, 2), (28, 4), (32, 8), (68, 4), (128, 8)],
)
def test_as_many_heads_as_have_four_columns(embed_dim, num_heads):
    assert JaggedTargetAttention(embed_dim).num_heads == num_heads
    assert JaggedTargetAttention(embed_dim, score="din").num_heads == 1


def test_restrained_modules_are_compiled_once_and_traced(device):
    module = JaggedTargetAttention(64, 2, device=device)
    for parameter in (module.length_power, module.length_bias):
        nn.init.normal_(parameter)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    traced = torch.fx.symbolic_trace(module)
    for same in (compiled, traced, torch.jit.script(traced), torch.jit.script(module)):
        # As in test_compiles_once_for_all_batches.
        for lengths, num_targets in (([9, 1, 2, 23], 3), ([30, 1, 6, 5, 8, 70, 4], 6)):
            out, again = (same(*example(module, lengths, device, num_targets)) for _ in range(2))
            assert (out == 0).any()
            assert not torch.equal(again, out)
    assert counter.frame_count == 1
    module.eval()
    traced = torch.fx.symbolic_trace(module)
    target, history = example(module, [5, 0, 40], device)
    torch.testing.assert_close(traced(target, history), module(target, history))


# What is learned of the length

LEARNED = {"length_power": True, "length_bias": True}


def with_and_without(device, **options):
    """A module that learns of lengths, and one that does not, of the same parameters but those."""
    torch.manual_seed(0)
    module = plain_attention(16, 2, device=device, **LEARNED | options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    without = plain_attention(16, 2, device=device, **options)
    load_own(without, module)
    return module, without


def load_own(module, other):
    """Parameters of ``other`` that ``module`` has, too."""
    state = other.state_dict()
    module.load_state_dict({name: state[name] for name in module.state_dict()})


def formula(module, pooled, length):
    """Of pooled rows and the lengths of their histories, ``[..., 1]``, in fp64."""
    # An empty history counts as one of one row.
    at_least_one = length.clamp(min=1).double()
    row = pooled.double() * at_least_one ** module.length_power.double()
    return row + module.length_bias.double() * at_least_one.log()


def test_noise_is_in_units_of_the_width(device):
    """Beside what is learned of the length."""
    module, without = with_and_without(device, output_noise=0.5)
    without.eval()
    target, history = example(module, [400] * 100, device)
    length = torch.full((100, 1, 1), 400, device=device)
    noise = module(target, history) - formula(module, without(target, history), length)
    assert noise.std().item() == pytest.approx(0.5 / (16 * 400) ** 0.5, rel=0.05)


@pytest.mark.parametrize("targets", ["three", "jagged"])
def test_noise_of_targets_differs(targets, device):
    module, _ = with_and_without(device, output_noise=0.5)
    target, history = example(module, [5, 40, 1], device, jagged=targets == "jagged")
    out, again = module(target, history), module(target, history)
    noise = (out - again).flatten(0, -2)
    assert (noise != 0).all()
    assert len(noise.unique(dim=0)) == len(noise)


def test_of_the_length_without_other_biases(device):
    module, _ = with_and_without(device, bias=False)
    assert module.in_proj_bias is None
    out = module(*example(module, [5, 0, 40], device))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[[0, 2]].all()


def test_of_rows_that_are_all_removed_the_length_is_left(device):
    module, _ = with_and_without(device)
    target, history = example(module, [5, 1], device)
    weights = torch.zeros(6, device=device)
    out = module(target, history, prior_weights=weights)
    length = torch.tensor([5, 1], device=device).view(2, 1, 1)
    expected = formula(module, torch.zeros_like(out), length).float()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", list(LEARNED))
def test_each_is_learned_alone(name, device):
    """Of the others, the formula is given zeros."""
    module, without = with_and_without(device)
    alone = plain_attention(16, 2, **{name: LEARNED[name]}, device=device)
    load_own(alone, module)
    for other in LEARNED.keys() - {name}:
        nn.init.zeros_(getattr(module, other))
    target, history = example(module, [5, 0, 40], device)
    rows = history.values().requires_grad_()
    out = alone(target, history)
    length = torch.tensor([5, 0, 40], device=device).view(3, 1, 1)
    expected = formula(module, without(target, history), length).float()
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    of_out, of_expected = (torch.autograd.grad(x, rows, weights)[0] for x in (out, expected))
    torch.testing.assert_close(of_out, of_expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value_projection", [False, True], ids=["rows", "values"])
@pytest.mark.parametrize("targets", ["one", "three", "jagged"])
def test_what_is_learned_of_the_length(targets, value_projection, device):
    module, without = with_and_without(device, value_projection=value_projection)
    lengths = [5, 0, 40, 1, 300]
    target, history = example(module, lengths, device, jagged=targets == "jagged")
    length = torch.tensor(lengths, device=device)
    if targets == "jagged":
        length = length.repeat_interleave(target.lengths())[:, None]
    elif targets == "three":
        length = length[:, None, None]
    else:
        length, target = length[:, None], target[:, 0]
    rows = history.values().requires_grad_()
    out = module(target, history)
    expected = formula(module, without(target, history), length).float()
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    leaves = [rows, module.length_power, module.length_bias]
    gradients = [torch.autograd.grad(x, leaves, weights) for x in (out, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_the_length_changes_nothing_at_first(device):
    module, without = with_and_without(device)
    module.reset_parameters()
    load_own(without, module)
    arguments = example(module, [5, 0, 40], device)
    assert torch.equal(module(*arguments), without(*arguments))


def test_empty_histories_stay_zeros(device):
    """While training, compiled, and in half precision."""
    module, _ = with_and_without(device, output_noise=0.5)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    target, history = example(module, [3, 0], device)
    for same in (module, compiled):
        for dtype in (None, torch.bfloat16):
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                out = same(target, history)
            assert out[0].any()
            assert not out[1].any()


def test_what_is_learned_of_the_length_travels(device):
    module, _ = with_and_without(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    traced = torch.fx.symbolic_trace(module)
    for same in (traced, torch.jit.script(traced), torch.jit.script(module), compiled):
        for lengths, jagged in (([5, 0, 40], False), ([2, 90, 31, 7], False), ([2, 0, 31], True)):
            arguments = example(module, lengths, device, jagged=jagged)
            torch.testing.assert_close(same(*arguments), module(*arguments))


def test_the_length_keeps_the_dtype(device):
    for dtype in supported_dtypes(device):
        module, without = with_and_without(device, dtype=dtype)
        target, history = example(module, [5, 0, 300], device)
        history = JaggedTensor(history.values().to(dtype), lengths=history.lengths())
        length = torch.tensor([5, 0, 300], device=device).view(3, 1, 1)
        out, exact = module(target, history), formula(module, without(target, history), length)
        assert out.dtype == dtype
        # Products, one after the other, each of which is rounded.
        bound = 8 * torch.finfo(dtype).eps * exact.abs().max().item()
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)
