"""``jagged_target_attention`` against PyTorch's SDPA on each sample, on all devices and kernels."""

import functools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tests.cases import CASES, Case, jagged_lengths, make_target_inputs, offsets_of
from tests.combinations import each_pair
from tests.fixtures import assert_graph_replays, opcheck, skip_unless_supported, summed
from tests.oracles import target_attention_oracle
from tests.rounding import RoundingErrors
from tests.samples import assert_other_samples_never_matter
from tests.tolerance import (
    assert_close,
    assert_matches_oracle,
    assert_output,
    outputs_and_gradients,
)
from torchrec_jagged_attn import jagged_target_attention
from torchrec_jagged_attn.base.devices import implementation
from torchrec_jagged_attn.ops.attention.arguments import Biases
from torchrec_jagged_attn.ops.registration import flatten
from torchrec_jagged_attn.ops.target_attention.arguments import TargetArguments

CPU = torch.device("cpu")


def assert_right(inputs, **options):
    functions = jagged_target_attention, target_attention_oracle
    assert_matches_oracle(*functions, inputs, **options)


def inputs_of(lengths, device=CPU, dtype=torch.float32, num_heads=2, num_targets=1, width=16):
    """Random inputs for the given history lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.as_tensor(lengths, dtype=torch.int64)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    return {
        "query": draw(lengths.numel(), num_targets, num_heads, width),
        "history": draw(int(lengths.sum()), width),
        "offsets": offsets_of(lengths, torch.int64, device),
    }


@pytest.mark.parametrize("prior", [True, False], ids=["prior", "no-prior"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.large])
def test_cases(name, prior, device):
    skip_unless_supported(CASES[name], device)
    assert_right(make_target_inputs(CASES[name], device, prior_weights=prior))


@pytest.mark.gpu
@pytest.mark.parametrize("prior", [True, False], ids=["prior", "no-prior"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.large])
def test_large_cases(name, prior):
    assert_right(make_target_inputs(CASES[name], "cuda", prior_weights=prior))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("num_targets", [1, 32])
@pytest.mark.parametrize("width", [48, 128, 256, 512])
def test_tf32(width, num_targets, device):
    assert_right(inputs_of([70, 0, 17], device, num_targets=num_targets, width=width))


LAYOUTS = ["one-target", "targets", "many-targets", "shared", "jagged"]
TIMES = [torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("layout", "times", "has_requests", "dtype"),
    [
        *each_pair(LAYOUTS, TIMES, [False, True], [torch.float32, torch.float16]),
        *each_pair(LAYOUTS, [torch.int64, torch.float32], [False, True], [torch.bfloat16]),
    ],
    ids=str,
)
def test_ages(layout, times, has_requests, dtype, device):
    """Ages relative to the newest row, or to a request time, with rows newer and much older."""
    num_targets = {"one-target": 1, "many-targets": 40}.get(layout, 9)
    inputs, timestamps = inputs_of_layout(layout, num_targets, dtype, "tables", device)
    ages = {"timestamps": timestamps.to(times)}
    if has_requests:
        ages["request_time"] = torch.tensor(REQUEST_TIMES, device=device).to(times)
    assert_right(inputs, **ages)


def draw_prior_weights(lengths, device, dtype=torch.float32):
    """Random weights: about a third are zero, and all of the second-longest sample."""
    generator = torch.Generator().manual_seed(3)
    weights = 3 * torch.rand(sum(lengths), generator=generator)
    weights = weights.masked_fill(torch.rand(sum(lengths), generator=generator) < 0.3, 0)
    second_longest = sorted(range(len(lengths)), key=lambda b: lengths[b])[-2:-1]
    for b in second_longest:
        weights.split(lengths)[b].zero_()
    return weights.to(device, dtype)


LENGTHS = [300, 0, 3, 64, 1]
REQUEST_TIMES = [50_000, -5, 2**31 - 1, 2**27, 0]  # of the samples of LENGTHS


def lay_out_queries(inputs, layout, generator):
    """Replace the dense query of ``inputs`` if ``layout`` is shared or jagged."""
    if layout == "shared":
        inputs["query"] = inputs["query"][:1].contiguous()
    elif layout == "jagged":
        query = torch.randn(32, 2, 16, generator=generator)
        inputs["query"] = query.to(inputs["query"])
        inputs["query_offsets"] = torch.tensor(
            [0, 25, 26, 26, 31, 32], device=inputs["query"].device
        )


def inputs_of_layout(layout, num_targets, dtype, others, device):
    """Inputs of attention over LENGTHS, and timestamps.

    Queries are ``"shared"``, ``"jagged"``, or else dense. ``others`` names the biases: ``prior``
    weights, a table of ``positions``, or all ``tables``.
    """
    skip_unless_supported(Case("layout", 5, 300, 2, 16, dtype=dtype), device)
    inputs = inputs_of(LENGTHS, device, dtype, num_targets=num_targets)
    generator = torch.Generator().manual_seed(1)
    lay_out_queries(inputs, layout, generator)
    if "prior" in others:
        inputs["prior_weights"] = draw_prior_weights(LENGTHS, device, dtype)
    if "positions" in others or "tables" in others:
        inputs["position_bias"] = torch.randn(20, 2, generator=generator).to(device, dtype)
    if "tables" not in others:
        return inputs, None
    inputs["age_bias"] = torch.randn(70, 2, generator=generator).to(device, dtype)
    return inputs, torch.arange(sum(LENGTHS), device=device) ** 2


# Each layout with each dtype, and with tables and without.
PRIOR_CASES = [
    ("dense", 1, torch.float32, "tables"),
    ("dense", 1, torch.bfloat16, "tables"),
    ("dense", 3, torch.float32, ""),
    ("dense", 3, torch.float16, "tables"),
    ("dense", 3, torch.float64, "tables"),
    ("dense", 9, torch.float16, "tables"),
    ("dense", 9, torch.bfloat16, ""),
    ("dense", 40, torch.float32, "tables"),
    ("dense", 40, torch.float16, ""),
    ("dense", 40, torch.bfloat16, "tables"),
    ("shared", 9, torch.float32, ""),
    ("shared", 9, torch.bfloat16, "tables"),
    ("jagged", 9, torch.float32, "tables"),
    ("jagged", 9, torch.float16, "tables"),
]


@pytest.mark.parametrize(("layout", "num_targets", "dtype", "others"), PRIOR_CASES, ids=str)
def test_prior_weights(layout, num_targets, dtype, others, device):
    inputs, timestamps = inputs_of_layout(layout, num_targets, dtype, others, device)
    if layout == "jagged":
        inputs["query_offsets"] = inputs["query_offsets"].int()
    weights_dtype = dtype if num_targets == 9 else torch.float32
    inputs["prior_weights"] = draw_prior_weights(LENGTHS, device, weights_dtype)
    assert_right(inputs, timestamps=timestamps)


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 700, 0], [600, 3, 520]], ids=str)
def test_prior_weights_at_edges(lengths, device):
    for num_targets in (0, 1, 9):
        inputs = inputs_of(lengths, device, num_targets=num_targets)
        inputs["prior_weights"] = draw_prior_weights(lengths, device)
        assert_right(inputs)
        inputs["prior_weights"].zero_()
        results = outputs_and_gradients(
            jagged_target_attention, inputs, torch.ones_like(inputs["query"])
        )
        assert all(torch.all(value == 0) for value in results.values())


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_prior_weights_without_their_gradient(num_targets, device):
    """The other gradients are bit-equal without it."""
    inputs = inputs_of([700, 0, 3], device, torch.float16, num_targets=num_targets)
    weights = draw_prior_weights([700, 0, 3], device)
    grad_out = torch.randn_like(inputs["query"])
    expected = outputs_and_gradients(
        jagged_target_attention, inputs | {"prior_weights": weights}, grad_out
    )
    attend = functools.partial(jagged_target_attention, prior_weights=weights)
    for name, value in outputs_and_gradients(attend, inputs, grad_out).items():
        assert torch.equal(value, expected[name]), name


def test_prior_weights_must_be_finite(device, monkeypatch):
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")
    inputs = inputs_of([5, 2], device)
    for value in (float("nan"), float("inf")):
        weights = torch.ones(7, device=device)
        weights[3] = value
        with pytest.raises(
            ValueError, match=f"prior_weights must be finite, got {value} at position 3"
        ):
            jagged_target_attention(**inputs, prior_weights=weights)


@pytest.mark.parametrize(
    ("shape", "shared", "dtype"),
    each_pair(
        [(1, 4, 24, 800), (3, 2, 128, 500), (9, 2, 64, 1100), (30, 2, 24, 1100)],
        [False, True],
        [torch.float16, torch.bfloat16],
    ),
    ids=str,
)
def test_recency_over_several_chunks(shape, shared, dtype, device):
    num_targets, num_heads, width, length = shape
    skip_unless_supported(Case("recency", 5, length, 2, 16, dtype=dtype), device)
    inputs = inputs_of([length, 0, 3, 64, 1], device, dtype, num_heads, num_targets, width)
    if shared:
        inputs["query"] = inputs["query"][:1].contiguous()
    generator = torch.Generator().manual_seed(1)
    inputs["position_bias"] = torch.randn(30, num_heads, generator=generator).to(device, dtype)
    inputs["age_bias"] = torch.randn(70, num_heads, generator=generator).to(device, dtype)
    timestamps = torch.exp(14 * torch.rand(length + 68, generator=generator)).to(device).long()
    assert_right(inputs, timestamps=timestamps)


# Times of two rows of a sample, and the distance of the buckets of their ages, modulo 20: of 140
# buckets, the last has 19 there, and the buckets of 2^32 and 2^31 have 8 and 4.
FAR_TIMES = {
    torch.int32: [(-(2**31), 2**31 - 1, 8), (2**31 - 1, -(2**31), 0), (-1, 2**31 - 1, 4)],
    torch.int64: [
        *((-(2**63), newest, 19) for newest in (-1, 0, 1, 2**62, 2**63 - 1)),
        *((2**63 - 1, newest, 0) for newest in (-2, -1, 0, -(2**63))),
        (-(2**63), -(2**63), 0),
        (-(2**63), 7 - 2**63, 12),
    ],
    torch.float32: [
        (-math.inf, 0, 19),
        (math.inf, 0, 0),
        (math.nan, 0, 19),
        (7, math.nan, 0),  # both are in the last one
        (7, math.inf, 0),
        (-3e38, 3e38, 19),
    ],
}
FAR_TIMES[torch.float64] = [*FAR_TIMES[torch.float32], (-1e308, 1e308, 19)]


def inputs_of_far_times(times, device, dtype=torch.float32, num_targets=1, width=16):
    """Samples whose outputs :func:`bucket_distances` reads."""
    *rows, distances = zip(*FAR_TIMES[times], strict=True)
    num_samples = len(distances)
    inputs = {
        "query": torch.zeros(num_samples, num_targets, 1, width),
        "history": torch.tensor([[1.0], [0.0]]).repeat(num_samples, width),
        "age_bias": (torch.arange(140.0) % 20).unsqueeze(1) / 8,
    }
    inputs = {name: x.to(device, dtype) for name, x in inputs.items()}
    inputs["offsets"] = torch.arange(num_samples + 1, device=device) * 2
    inputs["timestamps"] = torch.tensor(rows, dtype=times, device=device).T.flatten()
    return inputs, torch.tensor(distances)


def age_bucket(age):
    """The bucket of an age: four per octave below 2^32, and one per octave above."""
    x = age + 1
    ulp = 1 << max(x.bit_length() - 24, 0)
    x = round(Fraction(x, ulp)) * ulp  # to fp32
    octave = x.bit_length() - 1
    return (x**4).bit_length() - 1 if octave < 32 else 128 + octave - 32


def inputs_of_ages(device, dtype=torch.float32, num_targets=1, width=16):
    """Samples whose outputs :func:`bucket_distances` reads, with ages around the start of each
    bucket, around powers of two, and around the first age that fp32 rounds up to one.
    """
    edges = [math.isqrt(math.isqrt(2**bucket - 1)) for bucket in range(1, 128)]
    edges += [2**octave - below for octave in range(64) for below in (1, 2**octave // 2**25)]
    ages = {age + step for age in edges for step in (-1, 0, 1)}
    ages = sorted(age for age in ages if 0 <= age < 2**63)
    inputs = {
        "query": torch.zeros(len(ages), num_targets, 1, width),
        "history": torch.tensor([[1.0], [0.0]]).repeat(len(ages), width),
        "age_bias": (torch.arange(160.0) % 20).unsqueeze(1) / 8,
    }
    inputs = {name: x.to(device, dtype) for name, x in inputs.items()}
    inputs["offsets"] = torch.arange(len(ages) + 1, device=device) * 2
    times = torch.tensor([[2**62 - age, 2**62] for age in ages], device=device)
    inputs["timestamps"] = times.flatten()
    return inputs, torch.tensor([age_bucket(age) % 20 for age in ages])


def bucket_distances(out):
    """Distance of the buckets of a sample's older and newer row, for each row of its output."""
    return (8 * torch.logit(out.double().cpu())).round().long()


@pytest.mark.parametrize("times", [None, *FAR_TIMES], ids=str)
@pytest.mark.parametrize(
    ("num_targets", "dtype"), [(1, torch.float32), (9, torch.float16), (40, torch.float32)]
)
def test_buckets_of_ages(num_targets, dtype, times, device):
    """Ages at bucket edges. Ages of NaN or beyond int64 are the oldest; rows newer than the last
    have age zero.
    """
    if times is None:
        inputs, expected = inputs_of_ages(device, dtype, num_targets)
    else:
        inputs, expected = inputs_of_far_times(times, device, dtype, num_targets)
    distances = bucket_distances(jagged_target_attention(**inputs))
    assert torch.equal(distances, expected.view(-1, 1, 1, 1).expand_as(distances))


@pytest.mark.parametrize("layout", ["shared", "jagged"])
@pytest.mark.parametrize("name", ["targets-48", "fp16-64", "bf16-targets-128"])
def test_shared_and_jagged_queries(name, layout, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    inputs = make_target_inputs(case, device, prior_weights=True)
    if layout == "shared":
        inputs["query"] = inputs["query"][:1].contiguous()
    else:
        generator = torch.Generator().manual_seed(1)
        targets = jagged_lengths(case.batch_size, 40, "edges", generator)
        query = torch.randn(int(targets.sum()), case.num_heads, case.width, generator=generator)
        inputs["query"] = query.to(device, case.dtype)
        inputs["query_offsets"] = offsets_of(targets, torch.int32, device)
    assert_right(inputs)


def cancelling_gradients_inputs(num_targets, device):
    """Inputs with a shared query in half precision, and the gradient of the output. The query's
    gradients from two samples overflow, but cancel; from the third sample they are 4.
    """
    history = torch.tensor([64.0, -64, 64, -64, 1, -1]).view(6, 1).repeat(1, 16)
    inputs = {
        "query": torch.zeros(1, num_targets, 1, 16, dtype=torch.float16, device=device),
        "history": history.to(device, torch.float16),
        "offsets": torch.tensor([0, 2, 4, 6], device=device),
    }
    grad_out = torch.tensor([16.0, -16, 1]).view(3, 1, 1, 1).repeat(1, num_targets, 1, 16)
    return inputs, grad_out.to(device, torch.float16)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_gradient_of_a_shared_query_is_summed_in_fp32(num_targets, device):
    inputs, grad_out = cancelling_gradients_inputs(num_targets, device)
    results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    assert torch.all(results["query"] == 4)


def test_one_target_without_its_dimension(device):
    inputs = inputs_of([3, 0, 5], device)
    flat = {**inputs, "query": inputs["query"].squeeze(1)}
    assert_right(flat)
    expected = jagged_target_attention(**inputs).squeeze(1)
    assert torch.equal(jagged_target_attention(**flat), expected)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 129]), max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_lengths_that_hurt(lengths, num_targets, num_heads):
    inputs = inputs_of(lengths, CPU, torch.float16, num_heads, num_targets)
    assert_right(inputs | {"prior_weights": draw_prior_weights(lengths, CPU)})


@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0, 0], [1], [0, 0, 700, 1, 1, 0], [64] * 3], ids=str
)
def test_edges(lengths, device):
    assert_right(inputs_of(lengths, device))
    assert_right(inputs_of(lengths, device, num_targets=0))


def test_more_samples_than_a_grid_dimension_holds(device):
    if implementation(device)[0] == "triton-interpreter":
        pytest.skip("too many programs for the interpreter")
    inputs = inputs_of(torch.arange(70_000) % 3, device, width=8)
    out = jagged_target_attention(**inputs)
    last = slice(69_990, None)
    first_row = int(inputs["offsets"][69_990])
    tail = {
        "query": inputs["query"][last],
        "history": inputs["history"][first_row:],
        "offsets": inputs["offsets"][last] - first_row,
    }
    assert_output(out[last], target_attention_oracle, tail)


def test_prior_weights_of_zero_hide_rows(device):
    inputs = inputs_of([5, 70], device)
    inputs["prior_weights"] = torch.ones(75, device=device)
    inputs["prior_weights"][[1, 4]] = 0
    inputs["prior_weights"][5:70] = 0  # more than a whole tile before the first visible row
    assert_right(inputs)
    inputs["prior_weights"][:5] = 0
    results = outputs_and_gradients(
        jagged_target_attention, inputs, torch.ones_like(inputs["query"])
    )
    assert torch.all(results["out"][0] == 0)
    assert all(torch.isfinite(value).all() for value in results.values())


@pytest.mark.parametrize("width", [48, 128, 256])
@pytest.mark.parametrize("num_targets", [1, 40])
def test_row_with_weight_one_gets_the_whole_gradient(num_targets, width, device):
    """Its weight is exactly one: forward and backward round its large score equally."""
    inputs = inputs_of([40], device, num_heads=4, num_targets=num_targets, width=width)
    inputs["query"][:] = 100 * inputs["history"][7]
    grad_out = torch.randn(inputs["query"].shape, generator=torch.Generator().manual_seed(1))
    grad_out = grad_out.to(device)
    results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    with RoundingErrors(torch.float32) as errors:
        expected = grad_out.double().sum((0, 1, 2))
    assert_close(results["history"][7], expected, errors)


def test_bias_whose_exponential_overflows(device):
    """Its exponential overflows in fp32."""
    inputs = inputs_of([5, 70], device)
    inputs["position_bias"] = torch.linspace(127, 129, 40, device=device).view(20, 2)
    assert_right(inputs)


@pytest.mark.usefixtures("nan_filled_memory")
def test_other_samples_never_matter_to_jagged_queries(device):
    """Long samples have several chunks, and the first has several blocks of queries, too."""
    rows, targets = [700, 5, 530, 520, 5], [40, 1, 20, 8, 3]
    inputs = inputs_of(rows, device)
    generator = torch.Generator().manual_seed(1)
    inputs["query"] = torch.randn(72, 2, 16, generator=generator).to(device)
    inputs["query_offsets"] = offsets_of(torch.tensor(targets), torch.int64, device)
    inputs["prior_weights"] = draw_prior_weights(rows, device)
    lengths = dict.fromkeys(("query", "out", "query_offsets"), targets)
    lengths |= dict.fromkeys(("history", "prior_weights", "offsets"), rows)
    grad_out = torch.randn(72, 2, 16, generator=generator).to(device)
    assert_other_samples_never_matter(
        jagged_target_attention, inputs, grad_out, lengths, finite=("prior_weights",)
    )
    assert_output(jagged_target_attention(**inputs), target_attention_oracle, inputs)


@pytest.mark.parametrize("layout", ["dense", "shared", "jagged"])
def test_many_query_rows_over_several_chunks(layout, device):
    """64 targets of 4 heads; if jagged, the long sample has 120 of all targets."""
    inputs = inputs_of([1100, 0, 17], device, torch.float16, num_heads=4, num_targets=64)
    if layout == "shared":
        inputs["query"] = inputs["query"][:1].contiguous()
    elif layout == "jagged":
        inputs["query"] = inputs["query"].flatten(0, 1)
        inputs["query_offsets"] = torch.tensor([0, 120, 150, 192], device=device)
    assert_right(inputs)


def test_strided_inputs_and_gradients(device):
    inputs = inputs_of([7, 0, 20], device)
    buffer = torch.full((40, 37), torch.nan, device=device)
    buffer[5:32, 3:19] = inputs["history"]
    strided = {
        **inputs,
        "history": buffer[5:32, 3:19],
        "query": inputs["query"].transpose(2, 3).contiguous().transpose(2, 3),
        "prior_weights": draw_prior_weights([7, 0, 20], device).repeat_interleave(2)[::2],
    }
    assert not strided["query"].is_contiguous()
    assert_right(strided)
    functions = jagged_target_attention, target_attention_oracle
    assert_matches_oracle(*map(summed, functions), strided)


@pytest.mark.parametrize("num_targets", [1, 9, 40])
def test_queries_and_gradients_at_any_address(num_targets, device):
    inputs = inputs_of([7, 0, 700], device, torch.float16, num_targets=num_targets)

    def misaligned(tensor):
        buffer = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        return buffer.copy_(tensor)

    grad_out = torch.randn_like(inputs["query"])
    plain = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    inputs["query"] = misaligned(inputs["query"])
    results = outputs_and_gradients(jagged_target_attention, inputs, misaligned(grad_out))
    for name, expected in plain.items():
        assert torch.equal(results[name], expected), name


@pytest.mark.parametrize(
    ("num_targets", "dtype", "no_gradient"),
    each_pair([1, 9, 40], [torch.float32, torch.float16], [torch.no_grad, torch.inference_mode]),
    ids=str,
)
def test_inference_rounds_as_training_does(num_targets, dtype, no_gradient, device):
    inputs = inputs_of([7, 0, 700], device, dtype, num_targets=num_targets)
    expected = jagged_target_attention(**inputs)
    with no_gradient():
        assert torch.equal(jagged_target_attention(**inputs), expected)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("num_targets", "prior", "dtype"),
    each_pair([1, 9, 40], [True, False], [torch.float32, torch.float16]),
    ids=str,
)
def test_other_samples_never_matter(device, prior, num_targets, dtype):
    rows = [3, 0, 130, 17, 1100 if num_targets == 40 else 600]  # of several chunks
    inputs = inputs_of(rows, device, dtype, num_targets=num_targets)
    if prior:
        inputs["prior_weights"] = draw_prior_weights(rows, device, dtype)
    lengths = dict.fromkeys(("query", "out"), [1] * 5)
    lengths |= dict.fromkeys(("history", "prior_weights", "offsets"), rows)
    grad_out = torch.randn_like(inputs["query"])
    assert_other_samples_never_matter(
        jagged_target_attention, inputs, grad_out, lengths, finite=("prior_weights",)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck_without_a_gradient(dtype, device):
    inputs = inputs_of([3, 0, 5], device, dtype, num_targets=2)
    arguments = flatten(arguments_of(inputs, for_backward=False))
    op = torch.ops.torchrec_jagged_attn.target_attention.default
    opcheck(op, arguments)
    inputs["query"].requires_grad_()
    with pytest.raises(ValueError, match="for_backward must be True where a gradient is taken"):
        op(*arguments)[0].sum().backward()


def arguments_of(inputs, **others):
    """Arguments of ``torch.ops.torchrec_jagged_attn.target_attention``; ``others`` override
    ``inputs`` and the defaults.
    """
    options = {"scale": 0.25, "score": "softmax", "num_levels": 0, "for_backward": True}
    values = options | inputs | others
    biases = Biases(**{name: values.pop(name) for name in Biases._fields if name in values})
    return TargetArguments(**dict.fromkeys(TargetArguments._fields) | values | {"biases": biases})


def arguments_of_op(inputs, *, jagged=False):
    """Flat arguments of the op, with all biases, for three samples of eight rows in all; if
    ``jagged``, with six targets.
    """
    device = inputs["query"].device
    query, query_offsets = inputs["query"].requires_grad_(), None
    if jagged:
        query_offsets = torch.tensor([0, 1, 1, 6], device=device)
        query = query.detach().flatten(0, 1).requires_grad_()
    values = {
        "query": query,
        "query_offsets": query_offsets,
        "prior_weights": draw_prior_weights([3, 0, 5], device).requires_grad_(),
        "position_bias": torch.randn(3, 2, device=device, requires_grad=True),
        "age_bias": torch.randn(5, 2, device=device, requires_grad=True),
        "timestamps": torch.arange(8, device=device),
        "request_time": torch.tensor([9, 0, 6], device=device) if jagged else None,
        "dropout": torch.tensor([9, 2**30], device=device),
    }
    return flatten(arguments_of(inputs, **values))


@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
@pytest.mark.parametrize("name", ["target_attention", "target_attention_with_lse"])
def test_opcheck(device, name, jagged):
    inputs = inputs_of([3, 0, 5], device, num_targets=2)
    inputs["history"].requires_grad_()
    arguments = arguments_of_op(inputs, jagged=jagged)
    opcheck(getattr(torch.ops.torchrec_jagged_attn, name).default, arguments)


@pytest.mark.reference  # traced alike with any kernels
def test_compiles_once_for_all_batches(device):
    counter = CompileCounter()
    compiled = torch.compile(jagged_target_attention, backend=counter, fullgraph=True, dynamic=True)
    for has_prior_weights in (False, True):
        for lengths in ([3, 4, 1], [9, 0, 2, 5], [2, 30, 1, 5, 8]):
            inputs = inputs_of(lengths, device)
            if has_prior_weights:
                inputs["prior_weights"] = draw_prior_weights(lengths, device)
            assert torch.equal(compiled(**inputs), jagged_target_attention(**inputs))
        assert counter.frame_count == 1 + has_prior_weights


def on_every_kernel(test):
    """Run a test on the GPU, for the Gluon kernels (one warp, several, Hopper) and in Triton."""
    for mark in (
        pytest.mark.parametrize("num_targets", [1, 9, 40]),
        pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str),
        pytest.mark.gpu,
    ):
        test = mark(test)
    return test


with_shared_queries = pytest.mark.parametrize("shared", [False, True], ids=["dense", "shared"])


def cuda_inputs(lengths, num_targets, dtype, shared, width=16):
    """Inputs for tests of :func:`on_every_kernel`, and a gradient of the output."""
    inputs = inputs_of(lengths, "cuda", dtype, num_targets=num_targets, width=width)
    grad_out = torch.randn_like(inputs["query"])
    if shared:
        inputs["query"] = inputs["query"][:1].contiguous()
    return inputs, grad_out


@pytest.mark.parametrize("factor", [1, 20])
@with_shared_queries
@on_every_kernel
def test_cuda_graph_replays_with_other_lengths(num_targets, dtype, shared, factor):
    lengths = [3 * factor, 60 * factor, 7 * factor, 30 * factor]
    inputs, grad_out = cuda_inputs(lengths, num_targets, dtype, shared)
    assert_graph_replays(
        lambda: outputs_and_gradients(jagged_target_attention, inputs, grad_out),
        lambda: inputs["offsets"].copy_(torch.tensor([0, 70, 70, 71, 80]) * factor),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("lengths", [[30] * 4000, [700, 30]], ids=["short", "cut"])
def test_cuda_graph_of_work_before_it(lengths, waits):
    """Kernels launched early wait for the kernels that write their inputs."""
    inputs = inputs_of(lengths, "cuda")
    grad_out = torch.randn_like(inputs["query"])
    expected = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    kept = {name: value.clone() for name, value in inputs.items()}
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if waits else torch.cuda.current_stream()):
            inputs["history"].zero_()
            torch._foreach_copy_(list(inputs.values()), list(kept.values()))
        torch.cuda.current_stream().wait_stream(side)
        results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for _ in range(20):
        for value in results.values():
            value.fill_(torch.nan)
        graph.replay()
        for name, value in expected.items():
            assert torch.equal(results[name], value)


@with_shared_queries
@on_every_kernel
def test_repeats_are_bit_equal(num_targets, dtype, shared):
    """In any order in which the chunks of a sample finish."""
    lengths = torch.arange(100) * 29 % 4001
    inputs, grad_out = cuda_inputs(lengths, num_targets, dtype, shared, width=64)
    inputs["position_bias"] = torch.randn(20, 2, device="cuda")
    first = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    for _ in range(100):
        again = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    num_rows, width = 2**24 + 100, 128
    history = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(3, 1, 2, width, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, num_rows - 50, num_rows - 50, num_rows], device="cuda")
    grad_out = torch.randn_like(query)
    inputs = {"query": query, "history": history, "offsets": offsets}
    results = outputs_and_gradients(jagged_target_attention, inputs, grad_out)
    tail = {
        "query": query[2:],
        "history": history[-50:],
        "offsets": torch.tensor([0, 50], device="cuda"),
    }
    expected = outputs_and_gradients(jagged_target_attention, tail, grad_out[2:])
    assert torch.equal(results["out"][2:], expected["out"])
    assert torch.equal(results["history"][-50:], expected["history"])


@pytest.mark.gpu
@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
def test_inference_allocates_only_the_output(no_gradient):
    inputs = inputs_of([2] * 4096, "cuda", torch.bfloat16, 4, num_targets=8, width=64)
    with no_gradient():
        jagged_target_attention(**inputs)  # compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = jagged_target_attention(**inputs)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * out.nbytes


@pytest.mark.gpu
def test_offsets_are_validated_on_cuda_when_asked(monkeypatch):
    inputs = inputs_of([3, 4], "cuda")
    inputs["offsets"][-1] = 8
    monkeypatch.setenv("TORCHREC_JAGGED_ATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="must end at or before the 7 rows they divide, got 8"):
        jagged_target_attention(**inputs)


AGES = {"age_bias": torch.zeros(5, 2), "timestamps": torch.zeros(7, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": None}, TypeError, "query must be a tensor, got a NoneType"),
        ({"history": [[0.0] * 8] * 7}, TypeError, "history must be a tensor, got a list"),
        ({"offsets": [0, 3, 7]}, TypeError, "offsets must be a tensor, got a list"),
        ({"query_offsets": [0, 3, 7]}, TypeError, "query_offsets must be a tensor, got a list"),
        ({"position_bias": 1.0}, TypeError, "position_bias must be a tensor, got a float"),
        ({"query": torch.zeros(2, 8)}, ValueError, r"query must have shape \[B, T, H, D\]"),
        ({"query": torch.zeros(3, 2, 8)}, ValueError, r"\[B, H, D\] = \[2, any, any\], got \[3, 2"),
        ({"query": torch.zeros(2, 2, 8, dtype=torch.int64)}, TypeError, "query must be one of"),
        ({"query": torch.zeros(2, 2, 600)}, NotImplementedError, "width of 1 to 512, got 600"),
        (
            {"history": torch.zeros(7, 9)},
            ValueError,
            r"history must have shape \[N, D\] = \[any, 8",
        ),
        (
            {"history": torch.zeros(7, 8).half()},
            TypeError,
            "history must be torch.float32 as query",
        ),
        (
            {"history": torch.zeros(7, 8, device="meta")},
            ValueError,
            "history must be on cpu as que",
        ),
        (
            {"position_bias": torch.zeros(7, 3)},
            ValueError,
            r"position_bias must have shape \[P, H\] = \[any, 2\], got",
        ),
        ({"position_bias": torch.zeros(7, 2).long()}, TypeError, "position_bias must be one of"),
        (
            {"request_time": torch.zeros(2)},
            ValueError,
            "request_time must be None without timestamps",
        ),
        (AGES | {"request_time": 3}, TypeError, "request_time must be a tensor, got a int"),
        (
            AGES | {"request_time": torch.zeros(3).long()},
            ValueError,
            r"request_time must have shape \[B\] = \[2\], got \[3\]",
        ),
        (
            AGES | {"request_time": torch.zeros(2)},
            TypeError,
            "request_time must be torch.int64 as timestamps is, got torch.float32",
        ),
        ({"prior_weights": 1.0}, TypeError, "prior_weights must be a tensor, got a float"),
        ({"prior_weights": torch.ones(7).long()}, TypeError, "prior_weights must be one of"),
        (
            {"prior_weights": torch.ones(7, 2)},
            ValueError,
            r"prior_weights must have shape \[N\] = \[",
        ),
        ({"offsets": torch.zeros(3)}, TypeError, "offsets must be int32 or int64, got"),
        ({"offsets": torch.tensor([0, 3, 8])}, ValueError, "must end at or before the 7 rows"),
        ({"query_offsets": torch.tensor([0, 1])}, ValueError, r"query_offsets must have shape"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {
        "query": torch.zeros(2, 2, 8),
        "history": torch.zeros(7, 8),
        "offsets": torch.tensor([0, 3, 7]),
    }
    with pytest.raises(error, match=message):
        jagged_target_attention(**arguments | change)
