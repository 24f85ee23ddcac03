"""Rows that attention leaves out: which, and that all else is as if they were not there."""

import functools

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.cases import offsets_of
from tests.combinations import each_pair
from tests.modules.test_self_attention import attention_peer, layer_peer, run, run_by_sample
from tests.modules.test_self_attention import make_inputs as make_self_inputs
from tests.oracles import flash_attention_oracle, target_attention_oracle
from tests.target_attention.test_log_sum_exp import attend
from tests.target_attention.test_log_sum_exp import joined as joined_with_lse
from tests.target_attention.test_log_sum_exp import make_inputs as make_target_inputs
from tests.target_attention.test_target_attention import LENGTHS, inputs_of_layout
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn import (
    EncoderConfig,
    HistoryEncoderLayer,
    JaggedSelfAttention,
    JaggedTargetAttention,
    TargetAttentionConfig,
    TargetAttentionEmbeddingBagCollection,
    jagged_flash_attention,
    jagged_target_attention,
)
from torchrec_jagged_attn.attention.cpu_dropout import dropped_rows, weight_factors
from torchrec_jagged_attn.attention.dropout import draw_dropout, drops_of


def splitmix64(seed: int, counter: int) -> int:
    """The generator as it was published, in integers without an end."""
    x = (seed + counter * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1])
def test_draws_are_those_of_splitmix64(seed):
    drops = 2**30
    expected = [splitmix64(seed, n + 1) >> 32 < drops for n in range(500)]
    assert dropped_rows(torch.tensor([seed, drops]), 500).tolist() == expected
    assert 80 < sum(expected) < 170


def test_as_many_rows_are_dropped_as_asked_for(device):
    row_dropout = draw_dropout(drops_of(0.3, "row_dropout"), device)
    assert row_dropout.device.type == device.type
    draws = dropped_rows(row_dropout, 100_000).double()
    assert abs(draws.mean() - 0.3) < 5 * (0.21 / 100_000) ** 0.5
    other = dropped_rows(draw_dropout(drops_of(0.3, "row_dropout"), device), 100_000).double()
    assert abs((draws * other).mean() - 0.09) < 5 * (0.09 / 100_000) ** 0.5


def seeded(function, **options):
    """``function``, which draws the same each time."""

    def call(*args, **kwargs):
        torch.manual_seed(5)
        return function(*args, **kwargs, **options)

    return call


def kept(device, num_rows, p):
    """``[N]`` prior weights that leave out what ``seeded`` calls drop."""
    torch.manual_seed(5)
    weights = (~dropped_rows(draw_dropout(drops_of(p, "row_dropout"), device), num_rows)).double()
    assert 0 < weights.sum() < num_rows
    return weights


def assert_rows_are_dropped(functions, inputs, num_rows, **options):
    attend, oracle = functions
    weights = kept(inputs["offsets" if "offsets" in inputs else "q_offsets"].device, num_rows, 0.4)
    assert_matches_oracle(
        seeded(attend, row_dropout=0.4),
        functools.partial(oracle, prior_weights=weights),
        inputs,
        **options,
    )


def flash_inputs(lengths, width, dtype, device):
    """Of self-attention, with two query heads to each key head."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(sum(lengths), heads, width, generator=generator).to(device, dtype)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    inputs["q_offsets"] = offsets_of(torch.tensor(lengths), torch.int64, device)
    return inputs


@pytest.mark.parametrize(
    ("layout", "num_targets", "dtype", "others"),
    [
        ("own", 1, torch.float32, "bias, positions"),
        ("own", 1, torch.bfloat16, ""),
        ("own", 9, torch.float16, "bias, positions"),
        ("own", 9, torch.float32, ""),
        ("own", 40, torch.float16, ""),
        ("shared", 9, torch.bfloat16, "bias, positions"),
        ("jagged", 9, torch.float32, "bias, positions"),
    ],
    ids=str,
)
def test_target_attention(layout, num_targets, dtype, others, device):
    inputs, _ = inputs_of_layout(layout, num_targets, dtype, others, device)
    functions = jagged_target_attention, target_attention_oracle
    assert_rows_are_dropped(functions, inputs, sum(LENGTHS))


@pytest.mark.parametrize(
    ("mask", "width", "dtype"),
    each_pair([(False, None), (True, None), (True, 9)], [16, 64], [torch.float32, torch.float16]),
    ids=str,
)
def test_flash_attention(mask, width, dtype, device):
    causal, window = mask
    inputs = flash_inputs([70, 0, 3, 20], width, dtype, device)
    functions = jagged_flash_attention, flash_attention_oracle
    assert_rows_are_dropped(functions, inputs, 93, causal=causal, window=window)


def test_beside_distances_and_prior_weights(device):
    """These have kernels of their own."""
    inputs = flash_inputs([70, 0, 23], 16, torch.float32, device)
    inputs["relative_bias"] = torch.randn(6, 4, device=device)
    weights = torch.rand(93, device=device)
    oracle = functools.partial(
        flash_attention_oracle, prior_weights=weights.double() * kept(device, 93, 0.4)
    )
    attend = seeded(jagged_flash_attention, prior_weights=weights, row_dropout=0.4)
    assert_matches_oracle(attend, oracle, inputs)


def make_history(device, width=16):
    values = torch.randn(93, width, device=device)
    return JaggedTensor(values, lengths=torch.tensor([70, 0, 3, 20], device=device))


@pytest.mark.parametrize(
    ("make", "peer"),
    [
        (JaggedSelfAttention, functools.partial(attention_peer, True)),
        (HistoryEncoderLayer, layer_peer),
    ],
)
def test_module_of_self_attention(make, peer, device):
    """A CPU drops the only row of a sample, which then sees none; other devices may, too."""
    module = make(16, 2, row_dropout=0.7, device="meta")
    inputs = make_self_inputs(module, device)
    weights = kept(device, len(inputs["rows"]), 0.7)
    oracle = functools.partial(run_by_sample, peer, 2, False, prior_weights=weights)
    assert_matches_oracle(seeded(functools.partial(run, module)), oracle, inputs)
    module.eval()
    assert torch.equal(run(module, **inputs), run(module, **inputs))


def test_of_a_collection():
    tables = [
        EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=90, feature_names=["item", "history"]
        )
    ]
    config = TargetAttentionConfig(
        "item", "history", row_dropout=0.4, dropout=0.2, encoder=EncoderConfig()
    )
    collection = TargetAttentionEmbeddingBagCollection(tables, config)
    modules = [module for module in collection.modules() if hasattr(module, "row_dropout")]
    kinds = {type(module): (module.row_dropout, module.dropout) for module in modules}
    assert kinds == {JaggedTargetAttention: (0.4, 0.2), JaggedSelfAttention: (0.4, 0.2)}
    layers = [x for x in collection.modules() if isinstance(x, HistoryEncoderLayer)]
    assert [x.dropout.p for x in layers] == [0.0]
    features = KeyedJaggedTensor(
        keys=["item", "history"], values=torch.arange(82), lengths=torch.tensor([1, 1, 40, 40])
    )
    one, other = (collection(features).values() for _ in range(2))
    assert torch.equal(one[:, :8], other[:, :8])
    assert not torch.equal(one[:, 8:], other[:, 8:])
    collection.eval()
    assert torch.equal(collection(features).values(), collection(features).values())
    with pytest.raises(ValueError, match="row_dropout must be at least 0 and below 1, got 1"):
        TargetAttentionEmbeddingBagCollection(
            tables, TargetAttentionConfig("item", "history", row_dropout=1.0)
        )


@pytest.mark.parametrize(
    ("num_targets", "dtype"),
    [(1, torch.float32), (3, torch.float16), (9, torch.float32), (40, torch.float16)],
)
def test_row_numbers_beyond_32_bits(num_targets, dtype, device):
    """Rows are dropped by all bits of their numbers, weights by the lowest 32."""
    lengths = [40, 0, 3, 20, 1]
    inputs = make_target_inputs(device, dtype, num_targets, 2, "tables", lengths)
    samples = torch.arange(len(lengths), device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )
    positions = torch.arange(sum(lengths), device=device) - inputs["offsets"][1:][samples]
    numbers, ends = ((samples + 1) << 32) + positions, torch.arange(1, 6, device=device) << 32
    drops = {
        name: torch.tensor([seed, 2**30], device=device)
        for name, seed in (("row_dropout", 5), ("dropout", 7))
    }
    dropped = dropped_rows(drops["row_dropout"], len(numbers), numbers)
    assert not torch.equal(dropped, dropped_rows(drops["row_dropout"], len(numbers), positions))
    r = torch.arange(len(lengths) * num_targets * 2, device=device)
    factors = weight_factors(drops["dropout"], r, numbers)
    numbered = functools.partial(attend, row_numbers=numbers, row_number_ends=ends, **drops)

    def oracle(history, **others):
        weights = history.new_ones(len(numbers)).masked_fill(dropped, 0)
        out, lse = target_attention_oracle(
            history=history,
            prior_weights=weights,
            weight_factors=factors.view(-1, 2, len(numbers)),
            return_lse=True,
            **others,
        )
        return joined_with_lse(out, lse)

    assert_matches_oracle(numbered, oracle, inputs)
