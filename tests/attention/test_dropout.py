"""Dropout of attention weights: which weights are dropped, and the scale of the others."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.cases import offsets_of
from tests.combinations import each_pair
from tests.modules.target_attention_inputs import attend, make_inputs, make_module
from tests.modules.test_self_attention import make_inputs as make_self_inputs
from tests.modules.test_self_attention import run
from tests.oracles import flash_attention_oracle, target_attention_oracle, weight_factors
from tests.target_attention.test_log_sum_exp import attend as attend_with_lse
from tests.target_attention.test_log_sum_exp import joined as joined_with_lse
from tests.target_attention.test_log_sum_exp import make_inputs as make_target_inputs
from tests.target_attention.test_target_attention import LENGTHS, inputs_of, inputs_of_layout
from tests.tolerance import assert_matches_oracle
from torchrec_jagged_attn import (
    JaggedSelfAttention,
    JaggedTargetAttention,
    jagged_flash_attention,
    jagged_target_attention,
)
from torchrec_jagged_attn.ops.attention.dropout import draw_dropout, dropout_threshold

P = 0.4


def seeded(function, **options):
    """``function``, which draws the same each time."""

    def call(*args, **kwargs):
        torch.manual_seed(5)
        return function(*args, **kwargs, **options)

    return call


def flash_inputs(lengths, width, dtype, device):
    """Inputs of self-attention, with two query heads per key head."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(sum(lengths), heads, width, generator=generator).to(device, dtype)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    inputs["q_offsets"] = offsets_of(torch.tensor(lengths), torch.int64, device)
    return inputs


def make_history(device, width=16):
    values = torch.randn(93, width, device=device)
    return JaggedTensor(values, lengths=torch.tensor([70, 0, 3, 20], device=device))


def splitmix64(seed: int, counter: int) -> int:
    """SplitMix64 as published, in unbounded integers."""
    x = (seed + counter * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def finalizer(x: int) -> int:
    """The finalizer of MurmurHash3 as published, in unbounded integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1])
def test_draws(seed):
    """Also of rows beyond 2^32."""
    drops = 2**30
    query_rows, rows = [0, 1, 2, 2**33 + 5], [0, 1, 2, 1000, 2**32 - 1, 2**33 + 1]
    expected = [
        [
            0.0
            if finalizer((splitmix64(seed, r + 1) >> 32) ^ (n * 0x9E3779B1 % 2**32)) < drops
            else 4 / 3
            for n in rows
        ]
        for r in query_rows
    ]
    dropout = torch.tensor([seed, drops])
    actual = weight_factors(dropout, torch.tensor(query_rows), torch.tensor(rows))
    assert actual.tolist() == expected


def is_dropped(dropout, num_query_rows, num_rows):
    return weight_factors(dropout, torch.arange(num_query_rows), torch.arange(num_rows)) == 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_probability(p):
    """Equal for each query row and each row, and the draws of two rows are uncorrelated."""
    torch.manual_seed(0)
    draws = is_dropped(
        draw_dropout(dropout_threshold(p, "dropout"), torch.device("cpu")), 400, 300
    ).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(draws.mean() - p) < 5 * deviation / draws.numel() ** 0.5
    for axis, number in ((0, 400), (1, 300)):
        means = draws.mean(axis)
        assert abs(means - p).max() < 5 * deviation / number**0.5
        assert abs(means.std() / deviation * number**0.5 - 1) < 0.25
    normed = (draws - p) / deviation
    for x in (normed, normed.T):
        correlations = (x @ x.T / x.shape[1]).fill_diagonal_(0)
        assert correlations.max() < 0.7
        assert abs(correlations.std() * x.shape[1] ** 0.5 - 1) < 0.05


def factors_of(device, num_query_rows, num_heads, num_rows, p=P):
    """Factors ``[rows, H, N]`` by which ``seeded`` calls multiply the weights."""
    torch.manual_seed(5)
    dropout = draw_dropout(dropout_threshold(p, "dropout"), device).cpu()
    r, n = torch.arange(num_query_rows * num_heads), torch.arange(num_rows)
    factors = weight_factors(dropout, r, n)
    assert 0 < factors.count_nonzero() < factors.numel()
    return factors.view(num_query_rows, num_heads, num_rows).to(device)


def assert_weights_are_dropped(functions, inputs, num_query_rows, num_heads, num_rows, **options):
    attend, oracle = functions
    device = inputs["offsets" if "offsets" in inputs else "q_offsets"].device
    factors = factors_of(device, num_query_rows, num_heads, num_rows)
    assert_matches_oracle(
        seeded(attend, dropout=P),
        functools.partial(oracle, weight_factors=factors),
        inputs,
        **options,
    )


@pytest.mark.parametrize(
    ("layout", "num_targets", "dtype", "others", "score"),
    [
        ("dense", 1, torch.float32, "prior, positions", "softmax"),
        ("dense", 1, torch.bfloat16, "", "softmax"),
        ("dense", 9, torch.float16, "prior, positions", "softmax"),
        ("dense", 9, torch.float32, "", "silu"),
        ("dense", 40, torch.float16, "", "softmax"),
        ("dense", 40, torch.float32, "prior, positions", "softmax"),
        ("shared", 9, torch.bfloat16, "prior, positions", "softmax"),
        ("jagged", 9, torch.float32, "prior, positions", "softmax"),
        ("jagged", 9, torch.bfloat16, "positions", "sigmoid"),
    ],
    ids=str,
)
def test_target_attention(layout, num_targets, dtype, others, score, device):
    inputs, _ = inputs_of_layout(layout, num_targets, dtype, others, device)
    num_query_rows = 32 if layout == "jagged" else num_targets * len(LENGTHS)
    functions = jagged_target_attention, target_attention_oracle
    assert_weights_are_dropped(functions, inputs, num_query_rows, 2, sum(LENGTHS), score=score)


FLASH = jagged_flash_attention, flash_attention_oracle


@pytest.mark.parametrize(
    ("mask", "width", "dtype"),
    each_pair([(False, None), (True, None), (True, 9)], [16, 64], [torch.float32, torch.float16]),
    ids=str,
)
def test_flash_attention(mask, width, dtype, device):
    causal, window = mask
    inputs = flash_inputs([70, 0, 3, 20], width, dtype, device)
    assert_weights_are_dropped(FLASH, inputs, 93, 4, 93, causal=causal, window=window)


@pytest.mark.parametrize(
    ("mask", "width", "by_distance", "lengths"),
    each_pair(
        [(False, None), (True, None), (True, 9)],
        [32, 64, 128],
        [False, True],
        [[150, 0, 3, 70], [20, 0, 50, 33]],
    ),
    ids=str,
)
def test_flash_attention_on_hopper(mask, width, by_distance, lengths, hopper):
    device, launched = hopper
    causal, window = mask
    inputs = flash_inputs(lengths, width, torch.float16, device)
    if by_distance:
        inputs["relative_bias"] = torch.linspace(-2, 2, 80, device=device).view(20, 4)
    rows = sum(lengths)
    assert_weights_are_dropped(FLASH, inputs, rows, 4, rows, causal=causal, window=window)
    assert launched in (["hopper_forward", "hopper_backward"], None)


def test_cross_attention_with_all_biases(device):
    """Queries and keys have numbers of their own."""
    inputs = flash_inputs([70, 0, 3, 20], 16, torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    inputs["q"] = torch.randn(14, 4, 16, generator=generator).to(device)
    inputs["kv_offsets"] = inputs["q_offsets"]
    inputs["q_offsets"] = torch.tensor([0, 5, 7, 7, 14], device=device)
    inputs["position_bias"] = torch.randn(9, 4, generator=generator).to(device)
    inputs["bias"] = torch.randn(93, 4, generator=generator).to(device)
    assert_weights_are_dropped(FLASH, inputs, 14, 4, 93)


def test_beside_distances(device):
    """They have a kernel of their own."""
    inputs = flash_inputs([70, 0, 23], 16, torch.float32, device)
    inputs["relative_bias"] = torch.randn(6, 4, device=device)
    assert_weights_are_dropped(FLASH, inputs, 93, 4, 93, causal=True)


def test_zero_probability(device):
    inputs = inputs_of([40, 7], device)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    out = jagged_target_attention(**inputs, dropout=0.0)
    assert torch.equal(out, jagged_target_attention(**inputs))
    assert torch.equal(state, torch.get_rng_state())


def test_log_sum_exps_count_all_keys(device):
    inputs = flash_inputs([70, 0, 3, 20], 16, torch.float32, device)
    dropped, with_dropout = jagged_flash_attention(**inputs, dropout=P, return_lse=True)
    out, lse = jagged_flash_attention(**inputs, return_lse=True)
    assert torch.equal(with_dropout, lse)
    assert not torch.allclose(dropped, out)


def attend_by_hand(module, factors, target, history, offsets, **parameters):
    """``JaggedTargetAttention`` of one width, without recency bias, of ``[B, T, E]`` targets."""
    if module.value_projection:
        w_q, w_k, w_v = parameters["in_proj_weight"].chunk(3)
        b_q, _, b_v = parameters["in_proj_bias"].chunk(3)
    else:
        w_q, w_k, b_q = (
            parameters[name] for name in ("q_proj_weight", "k_proj_weight", "in_proj_bias")
        )
    num_samples, num_targets, _ = target.shape
    q = F.linear(target.flatten(0, 1), w_q, b_q)
    k, v = history @ w_k.T, history @ w_v.T if module.value_projection else history
    out = flash_attention_oracle(
        *(x.unflatten(1, (module.num_heads, module.head_dim)) for x in (q, k, v)),
        torch.arange(num_samples + 1) * num_targets, offsets,
        weight_factors=factors,
    ).flatten(1)  # fmt: skip
    if module.value_projection:
        has_rows = (offsets.diff() > 0).repeat_interleave(num_targets)
        out = out + b_v * has_rows.unsqueeze(1)
        out = F.linear(out, parameters["out_proj.weight"], parameters["out_proj.bias"])
    return out.view(target.shape)


@pytest.mark.parametrize("value_projection", [True, False])
@pytest.mark.parametrize("keys_and_values", ["absorbed", "materialized"])
def test_module(keys_and_values, value_projection, device):
    """In training alone; both ways drop the same, and add the bias of values once."""
    module = make_module(
        16, 2, recency_bias=False, value_projection=value_projection, dropout=P,
        keys_and_values=keys_and_values, device="meta",
    )  # fmt: skip
    inputs = make_inputs(module, [70, 0, 3, 20], device, targets=3)
    oracle = functools.partial(attend_by_hand, module, factors_of(device, 12, 2, 93).double())
    attend_with = functools.partial(attend, module)
    assert_matches_oracle(seeded(attend_with), oracle, inputs)
    module.eval()
    assert torch.equal(attend_with(**inputs), attend_with(**inputs))


def test_module_of_self_attention(device):
    """Like ``torch.nn.MultiheadAttention``, dropout of weights also drops the bias of values."""
    module = JaggedSelfAttention(16, 2, recency_bias=False, dropout=P, device="meta")
    inputs = make_self_inputs(module, device)
    factors = factors_of(device, 91, 2, 91).double()

    def by_hand(rows, offsets, in_proj_weight, in_proj_bias, **out_proj):
        q, k, v = F.linear(rows, in_proj_weight, in_proj_bias).unflatten(1, (3, 2, 8)).unbind(1)
        out = flash_attention_oracle(q, k, v, offsets, weight_factors=factors)
        return F.linear(out.flatten(1), out_proj["out_proj.weight"], out_proj["out_proj.bias"])

    assert_matches_oracle(seeded(functools.partial(run, module)), by_hand, inputs)
    module.eval()
    assert torch.equal(run(module, **inputs), run(module, **inputs))


@pytest.mark.parametrize(
    ("num_targets", "dtype"),
    [(1, torch.float32), (3, torch.float16), (9, torch.float32), (40, torch.float16)],
)
def test_row_numbers_beyond_32_bits(num_targets, dtype, device):
    """Weights are dropped by the lowest 32 bits of row numbers, positions by all of them."""
    lengths = [40, 0, 3, 20, 1]
    inputs = make_target_inputs(device, dtype, num_targets, 2, "tables", lengths)
    samples = torch.arange(len(lengths), device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )
    positions = torch.arange(sum(lengths), device=device) - inputs["offsets"][1:][samples]
    numbers, ends = ((samples + 1) << 32) + positions, torch.arange(1, 6, device=device) << 32
    dropout = torch.tensor([7, 2**30], device=device)
    r = torch.arange(len(lengths) * num_targets * 2, device=device)
    factors = weight_factors(dropout, r, numbers)
    numbered = functools.partial(
        attend_with_lse, row_numbers=numbers, row_number_ends=ends, dropout=dropout
    )

    def oracle(**inputs):
        out, lse = target_attention_oracle(
            weight_factors=factors.view(-1, 2, len(numbers)), return_lse=True, **inputs
        )
        return joined_with_lse(out, lse)

    assert_matches_oracle(numbered, oracle, inputs)


@pytest.mark.reference  # traced alike with any kernels
@pytest.mark.parametrize("make", [JaggedTargetAttention, JaggedSelfAttention])
def test_scripted(make):
    module = make(16, 2, dropout=P)
    inputs = [make_history("cpu")]
    if make is JaggedTargetAttention:
        inputs.insert(0, torch.randn(4, 16))
    scripted = torch.jit.script(torch.fx.symbolic_trace(module))
    values = [seeded(function)(*inputs) for function in (module, scripted)]
    if make is JaggedSelfAttention:
        values = [value.values() for value in values]
    assert torch.equal(*values)


@pytest.mark.reference  # traced alike with any kernels
@pytest.mark.parametrize("make", [JaggedTargetAttention, JaggedSelfAttention])
def test_compiles_once(make):
    module = make(16, 2, dropout=P)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for num_rows in (93, 70):
        offsets = torch.tensor([0, 20, 20, 30, num_rows])
        inputs = [JaggedTensor(torch.randn(num_rows, 16), offsets=offsets)]
        if make is JaggedTargetAttention:
            inputs.insert(0, torch.randn(4, 16))
        values = [seeded(function)(*inputs) for function in (module, compiled)]
        if make is JaggedSelfAttention:
            values = [value.values() for value in values]
        torch.testing.assert_close(*values, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_cuda_graph_redraws():
    history = make_history("cuda")
    query, offsets = torch.randn(4, 2, 16, device="cuda"), history.offsets()

    def attend():
        return jagged_target_attention(query, history.values(), offsets, dropout=P)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append(out.clone())
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
