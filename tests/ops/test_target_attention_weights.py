"""``jagged_target_attention_weights`` against the textbook formula, on every device."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.combinations import each_pair
from tests.fixtures import opcheck, skip_unless_supported, sync_debug_mode
from tests.ops.test_target_attention import draw_prior_weights, inputs_of
from torchrec_jagged_attn import jagged_target_attention, jagged_target_attention_weights
from torchrec_jagged_attn.testing import (
    CASES,
    Case,
    assert_close,
    make_target_inputs,
    offsets_of,
    plain_products,
    target_attention_weights,
)

LENGTHS = [300, 0, 3, 64, 1]


def assert_right(inputs, **options):
    exact = {
        name: x.double() if x.is_floating_point() and name != "timestamps" else x
        for name, x in inputs.items()
    }
    expected = target_attention_weights(**exact, **options)
    with plain_products():
        plain = target_attention_weights(**inputs, **options)
    assert_close(jagged_target_attention_weights(**inputs, **options), expected, plain)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.large])
def test_cases(name, bias, device):
    skip_unless_supported(CASES[name], device)
    assert_right(make_target_inputs(CASES[name], device, bias=bias))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rank-200", "rank-200-fp32", "rank-2k-8-targets"])
def test_large_cases(name):
    assert_right(make_target_inputs(CASES[name], "cuda"))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("width", [48, 128, 256, 512])
def test_tf32(width, device):
    assert_right(inputs_of([70, 0, 17, 1], device, num_targets=5, width=width))


@pytest.mark.parametrize(
    ("layout", "others", "score", "dtype"),
    each_pair(
        ["one-target", "targets", "many-targets", "shared"],
        ["", "bias", "tables", "bias and tables"],
        ["softmax", "prior", "silu", "sigmoid"],
        [torch.float32, torch.float16, torch.bfloat16, torch.float64],
    ),
    ids=str,
)
def test_what_is_added_to_scores(layout, others, score, dtype, device):
    skip_unless_supported(Case("weights", 5, 300, 2, 16, dtype=dtype), device)
    num_targets = {"one-target": 1, "many-targets": 40}.get(layout, 9)
    inputs = inputs_of(LENGTHS, device, dtype, num_targets=num_targets)
    generator = torch.Generator().manual_seed(1)
    if layout == "shared":
        inputs["query"] = inputs["query"][:1].contiguous()
    if "bias" not in others:
        del inputs["bias"]
    if "tables" in others:
        inputs["position_bias"] = torch.randn(20, 2, generator=generator).to(device, dtype)
        inputs["age_bias"] = torch.randn(70, 2, generator=generator).to(device, dtype)
        inputs["timestamps"] = torch.arange(368, device=device) ** 2
    if score == "prior":
        inputs["prior_weights"], score = draw_prior_weights(LENGTHS, device), "softmax"
    assert_right(inputs, score=score)


@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0, 0], [1], [0, 0, 700, 1, 1, 0], [64] * 3], ids=str
)
def test_edges(lengths, device):
    assert_right(inputs_of(lengths, device))
    assert_right(inputs_of(lengths, device, num_targets=0))


def test_one_target_without_its_dimension(device):
    inputs = inputs_of([3, 0, 5], device)
    flat = {**inputs, "query": inputs["query"].squeeze(1)}
    assert_right(flat)
    weights = jagged_target_attention_weights(**flat)
    assert weights.shape == (8, 2)
    assert torch.equal(weights, jagged_target_attention_weights(**inputs).squeeze(1))


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_alone_has_all_the_weight(scale, dtype, device):
    inputs = inputs_of([1, 1, 70], device, dtype, num_targets=9, width=96)
    inputs["bias"][2:-1] = -torch.inf
    weights = jagged_target_attention_weights(**inputs, scale=scale)
    assert torch.all(weights[[0, 1, -1]] == 1)
    assert torch.all(weights[2:-1] == 0)


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
def test_hidden_rows_have_no_weight(score, device):
    inputs = inputs_of([70, 5], device)
    inputs["bias"][::3] = -torch.inf
    assert torch.all(jagged_target_attention_weights(**inputs, score=score)[::3] == 0)
    assert_right(inputs, score=score)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_they_are_those_of_the_attention(num_targets, device):
    lengths = [30, 0, 5]
    inputs = inputs_of(lengths, device, num_targets=num_targets)
    weights = jagged_target_attention_weights(**inputs)
    sums = [
        torch.einsum("nth,nd->thd", p, x)
        for p, x in zip(weights.split(lengths), inputs["history"].split(lengths), strict=True)
    ]
    torch.testing.assert_close(torch.stack(sums), jagged_target_attention(**inputs))


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_targets", [1, 40])
def test_other_samples_never_matter(num_targets, dtype, device):
    lengths = [3, 0, 130, 17, 300]
    inputs = inputs_of(lengths, device, dtype, num_targets=num_targets)
    whole = jagged_target_attention_weights(**inputs)
    assert torch.isfinite(whole).all()
    assert torch.equal(whole, jagged_target_attention_weights(**inputs))
    poisoned = {name: x.clone() for name, x in inputs.items()}
    bounds = inputs["offsets"].tolist()
    poisoned["history"][bounds[2] + 5] = torch.nan  # all of its sample see it
    order = [4, 3, 1, 0]  # without sample 2, and in another order
    rows = torch.cat([torch.arange(bounds[b], bounds[b + 1]) for b in order]).to(device)
    fewer = {
        "query": inputs["query"][order],
        "history": inputs["history"][rows],
        "bias": inputs["bias"][rows],
        "offsets": offsets_of(torch.tensor(lengths)[order], torch.int64, device),
    }
    seen = jagged_target_attention_weights(**poisoned)
    assert torch.equal(seen[rows], whole[rows])
    assert torch.isnan(seen[bounds[2] : bounds[3]]).all()
    assert torch.equal(jagged_target_attention_weights(**fewer), whole[rows])


def test_strided_inputs(device):
    inputs = inputs_of([3, 0, 70], device, num_targets=2)
    expected = jagged_target_attention_weights(**inputs)
    inputs["history"] = torch.stack([inputs["history"]] * 2, 1)[:, 1]
    inputs["query"] = torch.stack([inputs["query"]] * 2, -1)[..., 0]
    inputs["bias"] = inputs["bias"].T.contiguous().T
    assert torch.equal(jagged_target_attention_weights(**inputs), expected)


def test_has_no_gradient(device):
    inputs = inputs_of([3, 0, 5], device)
    for name in ("query", "history", "bias"):
        inputs[name].requires_grad_()
    assert not jagged_target_attention_weights(**inputs).requires_grad


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("score", ["softmax", "silu"])
def test_opcheck(shared, score, device):
    inputs = inputs_of([3, 0, 5], device, num_targets=2)
    arguments = (
        inputs["query"][: 1 if shared else None],
        inputs["history"],
        inputs["offsets"],
        inputs["bias"],
        torch.randn(3, 2, device=device),
        torch.randn(5, 2, device=device),
        torch.arange(8, device=device),
        0.25,
        score,
    )
    op = torch.ops.torchrec_jagged_attn.target_attention_weights.default
    opcheck(op, arguments)


@pytest.mark.reference  # traced alike with any kernels
def test_compiles_once_for_all_batches(device):
    counter = CompileCounter()
    compiled = torch.compile(
        jagged_target_attention_weights, backend=counter, fullgraph=True, dynamic=True
    )
    for lengths in ([3, 4, 1], [9, 0, 2, 5], [2, 30, 1, 5, 8]):
        inputs = inputs_of(lengths, device)
        expected = jagged_target_attention_weights(**inputs)
        torch.testing.assert_close(compiled(**inputs), expected)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_never_waits_for_the_device():
    inputs = inputs_of([30, 0, 700], "cuda", num_targets=9)
    jagged_target_attention_weights(**inputs)
    with sync_debug_mode("error"):
        jagged_target_attention_weights(**inputs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": None}, TypeError, "query must be a tensor, got a NoneType"),
        ({"query": torch.zeros(2, 8)}, ValueError, r"query must have shape \[B, T, H, D\]"),
        ({"query": torch.zeros(2, 2, 600)}, NotImplementedError, "width of 1 to 512, got 600"),
        (
            {"history": torch.zeros(7, 9)},
            ValueError,
            r"history must have shape \[N, D\] = \[any, 8",
        ),
        ({"bias": torch.zeros(7, 3)}, ValueError, r"bias must have shape \[N, H\] = \[7, 2\], got"),
        ({"offsets": torch.tensor([0, 3, 6])}, ValueError, "offsets must end at the 7 rows"),
        ({"prior_weights": torch.ones(7) / 0}, ValueError, "prior_weights must be finite, got inf"),
        ({"score": "relu"}, ValueError, "score must be one of softmax, silu, sigmoid, got 'relu'"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {
        "query": torch.zeros(2, 2, 8),
        "history": torch.zeros(7, 8),
        "offsets": torch.tensor([0, 3, 7]),
    }
    with pytest.raises(error, match=message):
        jagged_target_attention_weights(**arguments | change)
