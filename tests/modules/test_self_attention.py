"""``JaggedSelfAttention`` and ``HistoryEncoderLayer`` against PyTorch's modules on each sample."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchrec import JaggedTensor

from tests.cases import Case, offsets_of
from tests.combinations import each_pair
from tests.fixtures import skip_unless_supported
from tests.runs import assert_same_run
from tests.samples import assert_rows_behind_never_matter
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn import HistoryEncoderLayer, JaggedSelfAttention, JaggedTargetAttention

LENGTHS = torch.tensor([3, 0, 17, 1, 70])


def make_inputs(module, device, dtype=torch.float32, width=16):
    """Random rows and offsets, and random parameters of a usual size."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = {
        "rows": draw(int(LENGTHS.sum()), width),
        "offsets": offsets_of(LENGTHS, torch.int64, device),
    }
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[1] if parameter.dim() == 2 and "weight" in name else 1
        inputs[name] = draw(*parameter.shape) / (2 * fan_in) ** 0.5
    return inputs


def run(module, *, rows, offsets, prior_weights=None, **parameters):
    """Call ``module`` with other ``parameters``."""
    history = JaggedTensor(rows, offsets=offsets)
    return functional_call(module, parameters, (history, prior_weights), strict=True).values()


def distance_mask(table, length, causal, window=None):
    """``[H, L, L]`` scores by distance, and ``-inf`` of newer rows and beyond the window."""
    places = torch.arange(length)
    distance = places[:, None] - places
    buckets = [(1 + abs(d)) ** 4 for d in distance.flatten().tolist()]
    index = torch.tensor([b.bit_length() - 1 for b in buckets], dtype=torch.int64)
    index = index.clamp(max=63).view(length, length)
    if table is None:
        mask = torch.zeros(1, length, length)
    else:
        mask = table[index.to(table.device)].permute(2, 0, 1)
    hidden = (distance < 0).to(mask.device) & causal
    if window is not None:
        hidden |= (distance >= window).to(mask.device)
    return mask.masked_fill(hidden, -torch.inf)


def run_by_sample(
    peer, heads, causal, *, rows, offsets, prior_weights=None, window=None, **parameters
):
    """Run a PyTorch module, ``peer(parameters, x, mask)``, on each sample."""
    names = [name for name in parameters if "recency_bias" in name]
    table = parameters.pop(names[0]) if names else None
    lengths = offsets.diff().tolist()
    weights = rows.new_ones(len(rows)) if prior_weights is None else prior_weights
    outs = []
    for x, w in zip(rows.split(lengths), weights.split(lengths), strict=True):
        mask = distance_mask(table, len(x), causal, window).to(x).expand(heads, -1, -1)
        mask = (mask + w.masked_fill(w == 0, 1).log()).masked_fill(w == 0, -torch.inf)
        outs.append(peer(parameters, x, mask) if len(x) else x)
    return torch.cat(outs)


def attention_peer(bias, parameters, x, mask):
    mha = nn.MultiheadAttention(x.shape[1], 2, bias=bias, device="meta")
    options = {"attn_mask": mask, "need_weights": False}  # weights of a row that sees none are NaN
    return functional_call(mha, parameters, (x, x, x), options, strict=True)[0]


def layer_peer(parameters, x, mask):
    layer = nn.TransformerEncoderLayer(
        x.shape[1], 2, 4 * x.shape[1], 0.0, "gelu", norm_first=True, batch_first=True, device="meta"
    )
    return functional_call(layer, parameters, (x[None], mask), strict=True)[0]


LAYERS = {
    "attention": (JaggedSelfAttention, partial(attention_peer, True)),
    "attention without bias": (
        partial(JaggedSelfAttention, bias=False),
        partial(attention_peer, False),
    ),
    "encoder layer": (HistoryEncoderLayer, layer_peer),
}
MASKS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window of 1": {"causal": True, "window": 1},
    "window of 5": {"causal": True, "window": 5},
    "window of 64": {"causal": True, "window": 64},
}


@pytest.mark.parametrize(
    ("layer", "mask", "recency_bias", "prior"),
    each_pair(LAYERS, MASKS, [True, False], [False, True]),
)
def test_is_the_layer_of_torch(layer, mask, recency_bias, prior, device):
    make, peer = LAYERS[layer]
    module = make(16, 2, recency_bias=recency_bias, **MASKS[mask])
    inputs = make_inputs(module, device)
    if prior:
        generator = torch.Generator().manual_seed(1)
        weights = 3 * torch.rand(len(inputs["rows"]), generator=generator)
        if mask in ("full", "causal"):  # the oldest row stays, so that each row sees one
            weights[1::3] = 0
            weights[inputs["offsets"][:-1][LENGTHS.to(device) > 0].cpu()] = 1
        inputs["prior_weights"] = weights.to(device)
    peer = partial(run_by_sample, peer, 2, **MASKS[mask])
    assert_matches_oracle(partial(run, module), peer, inputs)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layer", ["attention", "encoder layer"])
def test_half_precision(layer, causal, device):
    skip_unless_supported(Case("half", 5, 70, 2, 64, dtype=torch.bfloat16), device)
    make, peer = LAYERS[layer]
    module = make(128, 2, causal=causal, recency_bias=False)
    peer = partial(run_by_sample, peer, 2, causal)
    inputs = make_inputs(module, device, torch.bfloat16, width=128)
    assert_matches_oracle(partial(run, module), peer, inputs)


def test_state_dict_compatibility():
    mha = nn.MultiheadAttention(16, 2)
    attention = JaggedSelfAttention(16, 2, recency_bias=False)
    attention.load_state_dict(mha.state_dict())
    mha.load_state_dict(attention.state_dict())
    layer = nn.TransformerEncoderLayer(16, 2, 64)
    encoder = HistoryEncoderLayer(16, 2, recency_bias=False)
    encoder.load_state_dict(layer.state_dict())
    layer.load_state_dict(encoder.state_dict())


def test_starts_with_a_bias_that_falls_with_distance():
    table = JaggedSelfAttention(16, 2).recency_bias.position_weight
    assert torch.all(table[1:] < table[:-1])


def test_no_rows_at_all(device):
    layer = HistoryEncoderLayer(16, 2).to(device)
    history = JaggedTensor(
        torch.zeros(0, 16, device=device), lengths=torch.zeros(3, dtype=torch.int64, device=device)
    )
    out = layer(history)
    assert out.values().shape == (0, 16)
    out.values().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_autocast_gives_its_dtype():
    module = JaggedSelfAttention(16, 2)
    history = JaggedTensor(torch.randn(4, 16), lengths=torch.tensor([1, 3]))
    with torch.autocast("cpu", torch.float16):
        assert module(history).values().dtype == torch.float16
    assert module(history).values().dtype == torch.float32


def test_removed_rows(device):
    layer = HistoryEncoderLayer(16, 2).to(device)
    rows = torch.randn(9, 16, device=device)
    lengths = torch.tensor([4, 5], device=device)
    weights = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 0.0], device=device)
    outs = []
    for removed in (rows[1], rows[1] + 1):
        rows = torch.cat([rows[:1], removed[None], rows[2:]])
        outs.append(layer(JaggedTensor(rows, lengths=lengths), weights).values())
    others = [0, *range(2, 9)]
    assert torch.equal(outs[0][others], outs[1][others])
    alone = layer(JaggedTensor(rows[4:], lengths=lengths[1:]), weights[4:]).values()
    assert_same_run(outs[1][4:], alone, num_terms=3 * 16 + 64 + 5)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "recency_bias": False}, {"causal": True, "window": 2}],
    ids=str,
)
def test_traced_and_scripted(options, device):
    layer = HistoryEncoderLayer(16, 2, **options).to(device)
    lengths = torch.tensor([1, 3], device=device)
    history = JaggedTensor(torch.randn(4, 16, device=device), lengths=lengths)
    expected = layer(history).values()
    traced = torch.fx.symbolic_trace(layer)
    for same in (traced, torch.jit.script(traced), torch.jit.script(layer)):
        assert torch.equal(same(history).values(), expected)


@pytest.mark.parametrize(
    ("history", "error", "message"),
    [
        (torch.zeros(4, 16), TypeError, "history must be a JaggedTensor, got a Tensor"),
        (
            JaggedTensor(torch.zeros(4, 16).long(), lengths=torch.tensor([4])),
            TypeError,
            "history must hold floating-point embeddings, got torch.int64",
        ),
        (
            JaggedTensor(torch.zeros(4, 15), lengths=torch.tensor([4])),
            ValueError,
            r"history.values\(\) must have shape \[N, E\] = \[any, 16\], got \[4, 15\]",
        ),
        (
            JaggedTensor(torch.zeros(4, 16), lengths=torch.tensor([5])),
            ValueError,
            r"history.offsets\(\) must end at or before the 4 rows",
        ),
    ],
)
@pytest.mark.parametrize("module", [JaggedSelfAttention, HistoryEncoderLayer])
def test_errors_name_the_argument(module, history, error, message):
    with pytest.raises(error, match=message):
        module(16, 2)(history)


class Stack(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.Sequential(*(HistoryEncoderLayer(16, 2, **options) for _ in range(2)))
        self.attention = JaggedTargetAttention(16, 2)

    def forward(self, target, history):
        return self.attention(target, self.layers(history))


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("num_behind", [1, 70, 200])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}], ids=str)
def test_rows_behind_the_last_offset(options, num_behind, device):
    """In encoder layers before a target attention, with finite rows."""
    model = Stack(**options).to(device)
    inputs = make_inputs(model, device)
    target = torch.randn(len(LENGTHS), 16, device=device)

    def attend(rows, offsets, **parameters):
        history = JaggedTensor(rows, offsets=offsets)
        return functional_call(model, parameters, (target, history), strict=True)

    attention, feed_forward = 16 + 8 + 70 + 16, 16 + 64
    assert_rows_behind_never_matter(
        attend, inputs, torch.randn_like(target), {"rows": num_behind},
        finite=("rows",), num_terms=2 * (3 * attention + 2 * feed_forward),
    )  # fmt: skip


def test_constructor_errors():
    with pytest.raises(ValueError, match="causal must be True with a window, got causal=False"):
        HistoryEncoderLayer(16, 2, window=4)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim 16, got 3"):
        JaggedSelfAttention(16, 3)
    with pytest.raises(NotImplementedError, match="embed_dim / num_heads must have a width"):
        HistoryEncoderLayer(1024, 1)
