"""``JaggedTargetAttention(score="din")``."""

import io

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_jagged_attn import (
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    embedding_parameters,
)
from torchrec_jagged_attn.testing import activation_unit


def module_of(**options):
    torch.manual_seed(0)
    return JaggedTargetAttention(16, 1, score="din", hidden_dims=(24, 9), **options)


def inputs_of(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 5, 5, 40])
    target, rows = (torch.randn(n, 16, generator=generator) for n in (3, 40))
    return target.to(device), JaggedTensor(rows.to(device), offsets=offsets.to(device))


@pytest.mark.parametrize("activation", ["sigmoid", "silu", "relu"])
def test_matches_the_formula(activation, device):
    module = module_of(activation=activation, init="mha").to(device)
    target, history = inputs_of(device)
    layers = [x for layer in module.unit for x in (layer.weight, layer.bias)]
    table = module.recency_bias.position_weight
    expected = activation_unit(
        target, history.values(), history.offsets(), *layers,
        activation=activation, position_bias=table,
    )  # fmt: skip
    torch.testing.assert_close(module(target, history), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recency_bias", [False, True])
def test_starts_as_a_sum(recency_bias):
    module = module_of(recency_bias=recency_bias)
    target, history = inputs_of()
    rows = history.values()
    factors = torch.ones(40)
    if recency_bias:
        newer = torch.cat([torch.arange(5).flip(0), torch.arange(35).flip(0)])
        buckets = (4 * (1 + newer).float().log2()).floor().long()
        factors = module.recency_bias.position_weight[buckets, 0].exp()
    weighed = rows * factors.unsqueeze(1)
    expected = torch.stack([weighed[:5].sum(0), torch.zeros(16), weighed[5:].sum(0)])
    torch.testing.assert_close(module(target, history), expected)


def test_every_parameter_has_a_gradient():
    module = module_of(age_bias=True, init="mha")
    target, history = inputs_of()
    out = module(target, history, torch.arange(40), torch.rand(40))
    out.square().sum().backward()
    names = {f"unit.{i}.{x}" for i in range(3) for x in ("weight", "bias")}
    found = {name for name, x in module.named_parameters() if x.grad.abs().sum() > 0}
    assert found == names | {"recency_bias.position_weight", "recency_bias.age_weight"}


def test_autocast_and_half_history():
    module = module_of(init="mha")
    target, history = inputs_of()
    exact = module(target, history)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(target, history).dtype == torch.bfloat16
    half = JaggedTensor(history.values().half(), offsets=history.offsets())
    out = module(target, half)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, exact, rtol=0.01, atol=0.05)


def test_rows_are_dropped_while_training():
    module = module_of(row_dropout=0.5, recency_bias=False)
    target, history = inputs_of()
    assert not torch.equal(module(target, history), module(target, history))
    module.eval()
    assert torch.equal(module(target, history), module(target, history))


def test_scripted_and_saved():
    module = module_of(init="mha")
    inputs = inputs_of()
    scripted = torch.jit.script(torch.fx.symbolic_trace(module))
    assert torch.equal(scripted(*inputs), module(*inputs))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = module_of()
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(*inputs), module(*inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 2}, "num_heads must be 1 where score='din', got 2"),
        ({"value_projection": True}, "value_projection must be False where score='din'"),
        ({"bias": False}, "bias must be True where score='din'"),
        ({"dropout": 0.1}, "dropout must be 0.0 where score='din', got 0.1"),
        ({"target_dim": 8}, "target_dim must be 16 where score='din', got 8"),
        ({"hidden_dims": (8,)}, "hidden_dims must have two sizes"),
        ({"activation": "dice"}, "activation must be one of sigmoid, silu, relu, got 'dice'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        JaggedTargetAttention(**{"embed_dim": 16, "num_heads": 1, "score": "din"} | options)


def test_several_targets_are_refused():
    module = module_of()
    _, history = inputs_of()
    with pytest.raises(NotImplementedError, match="target must have one target per sample"):
        module(torch.randn(3, 2, 16), history)
    jagged = JaggedTensor(torch.randn(4, 16), offsets=torch.tensor([0, 2, 2, 4]))
    with pytest.raises(NotImplementedError, match=r"must be a tensor \[B, D\], one target"):
        module(jagged, history)


def test_collection():
    table = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=9, feature_names=["item", "items"]
    )
    config = TargetAttentionConfig("item", "items", score="din", hidden_dims=(6, 3))
    collection = TargetAttentionEmbeddingBagCollection([table], config)
    batch = KeyedJaggedTensor(
        ["item", "items"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([1, 1, 3, 0])
    )
    out = collection(batch)
    assert out.keys() == ["item", "items"]
    out.values().square().sum().backward()
    own = {id(x) for x in embedding_parameters(collection)}
    dense = {name for name, x in collection.named_parameters() if id(x) not in own}
    assert sum(".unit." in name for name in dense) == 6
