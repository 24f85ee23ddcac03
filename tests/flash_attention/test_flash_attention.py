"""``jagged_flash_attention`` against PyTorch's SDPA on each sample, on all devices and kernels."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tests.cases import CASES, Case, make_flash_inputs, offsets_of
from tests.combinations import each_pair
from tests.fixtures import assert_graph_replays, opcheck, skip_unless_supported, summed
from tests.oracles import flash_attention_oracle
from tests.rounding import RoundingErrors
from tests.samples import assert_other_samples_never_matter, assert_rows_behind_never_matter
from tests.target_attention.test_target_attention import (
    FAR_TIMES,
    bucket_distances,
    inputs_of_ages,
    inputs_of_far_times,
)
from tests.tolerance import assert_close, assert_matches_oracle, in_fp64, outputs_and_gradients
from torchrec_jagged_attn import jagged_flash_attention
from torchrec_jagged_attn.base import devices

CPU = torch.device("cpu")


def assert_right(inputs, causal=False, **options):
    functions = jagged_flash_attention, flash_attention_oracle
    assert_matches_oracle(*functions, inputs, causal=causal, **options)


def inputs_of(
    q_lengths, kv_lengths, device=CPU, dtype=torch.float32, bias=False, width=16, kv_heads=1
):
    """Random inputs of two query heads for the given lengths."""
    generator = torch.Generator().manual_seed(0)
    q_lengths, kv_lengths = (torch.as_tensor(x, dtype=torch.int64) for x in (q_lengths, kv_lengths))

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = {
        "q": draw(int(q_lengths.sum()), 2, width),
        "k": draw(int(kv_lengths.sum()), kv_heads, width),
        "v": draw(int(kv_lengths.sum()), kv_heads, width // 2),
        "q_offsets": offsets_of(q_lengths, torch.int64, device),
        "kv_offsets": offsets_of(kv_lengths, torch.int32, device),
    }
    if bias:
        inputs["bias"] = draw(int(kv_lengths.sum()), 2)
    return inputs


@pytest.mark.parametrize(
    ("name", "kind", "causal"),
    each_pair(
        [name for name, case in CASES.items() if not case.large],
        ["self", "cross", "biased", "cross and biased"],
        [False, True],
    ),
    ids=str,
)
def test_cases(name, kind, causal, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    options = {}
    if "cross" in kind:  # with grouped heads if possible
        kv_heads = max(1, case.num_heads // 2) if "biased" in kind else 1
        options = {"cross": True, "kv_heads": kv_heads, "value_width": 24}
    assert_right(make_flash_inputs(case, device, **options, bias="biased" in kind), causal)


def assert_rows_behind_never_matter_to(inputs, num_queries, num_keys, **options):
    """Outputs of queries behind the last offset are zeros, and their log-sum-exps ``-inf``."""
    sides = ("q", "out"), ("k", "v", "bias", "prior_weights", "timestamps")
    if "kv_offsets" not in inputs:
        num_queries = num_keys
    behind = dict.fromkeys(sides[0], num_queries) | dict.fromkeys(sides[1], num_keys)
    attend = partial(jagged_flash_attention, **options)
    shape = *inputs["q"].shape[:2], inputs["v"].shape[2]
    grad_out = torch.ones(shape, device=inputs["q"].device, dtype=inputs["q"].dtype)
    assert_rows_behind_never_matter(attend, inputs, grad_out, behind)
    q = torch.cat([inputs["q"], inputs["q"].new_full((num_queries, *inputs["q"].shape[1:]), 1)])
    _, lse = jagged_flash_attention(**inputs | {"q": q}, **options, return_lse=True)
    assert torch.all(lse[len(inputs["q"]) :] == -torch.inf)


BEHIND = {  # shapes of biases, and options
    "self": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 20},
    "distance": {"relative_bias": (20, 2)},
    "bias": {"bias": (98, 2), "position_bias": (20, 2)},
    "prior": {"prior_weights": (98,), "age_bias": (30, 2)},
    "both": {"bias": (98, 2), "prior_weights": (98,)},
}


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize(
    ("name", "dtype", "num_behind"),
    each_pair(BEHIND, [torch.float32, torch.float16], [(1, 0), (70, 33), (3, 300)]),
    ids=str,
)
def test_rows_behind_the_last_offset(name, dtype, num_behind, device):
    lengths = [20, 0, 70, 8], [70, 3, 0, 25]
    if name in ("self", "causal", "window"):
        lengths = lengths[1], lengths[1]
    inputs = inputs_of(*lengths, device, dtype, kv_heads=2)
    if lengths[0] == lengths[1]:
        del inputs["kv_offsets"]
    generator = torch.Generator().manual_seed(1)
    options = {}
    for key, value in BEHIND[name].items():
        if isinstance(value, tuple):
            inputs[key] = torch.rand(value, generator=generator).to(device, dtype)
        else:
            options[key] = value
    if "age_bias" in inputs:
        inputs["timestamps"] = torch.arange(98, device=device) ** 3
    assert_rows_behind_never_matter_to(inputs, *num_behind, **options)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("num_samples", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_rows_behind(dtype, num_samples, device):
    inputs = inputs_of([0] * num_samples, [0] * num_samples, device, dtype)
    inputs["relative_bias"] = torch.randn(20, 2, device=device)
    assert_rows_behind_never_matter_to(inputs, 70, 130)


WINDOWS = [1, 2, 31, 63, 64, 65, 127, 128, 129, 200, 400, 2**40]
MASKS = [(False, None), *((True, window) for window in (None, *WINDOWS))]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "width", "dtype", "kv_heads"),
    each_pair(MASKS, [40, 48, 64, 96, 128], [torch.float16, torch.bfloat16, torch.float32], [1, 2]),
    ids=str,
)
def test_lengths_and_windows_about_tiles(mask, width, dtype, kv_heads):
    causal, window = mask
    lengths = [1, 16, 31, 33, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 17, 900, 32]
    for kv_lengths in (lengths, lengths[::-1]):
        inputs = inputs_of(lengths, kv_lengths, "cuda", dtype, width=width, kv_heads=kv_heads)
        assert_right(inputs, causal, window=window)


@pytest.mark.parametrize("difference", ["stride", "dtype"])
def test_offsets_at_the_same_address(difference, device):
    """Offsets of keys and queries differ in stride or dtype."""
    if difference == "stride":
        numbers = torch.tensor([0, 60, 90, 100, 170], device=device)
        q_offsets, kv_offsets = numbers[:3], numbers[::2]
    else:
        numbers = torch.tensor([0, 0, 90, 0, 100, 0], dtype=torch.int32, device=device)
        q_offsets, kv_offsets = numbers.view(torch.int64), numbers[:3]
    lengths = (x.diff().cpu() for x in (q_offsets, kv_offsets))
    inputs = inputs_of(*lengths, device) | {"q_offsets": q_offsets, "kv_offsets": kv_offsets}
    assert_right(inputs)


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("width", [128, 256, 512])
def test_tf32(width):
    case = Case("tf32", 9, 70, 2, width)
    assert_right(make_flash_inputs(case, "cuda", kv_heads=1))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 256), (torch.float32, 128)], ids=str)
def test_less_shared_memory(width, dtype, kernel_device, monkeypatch):
    monkeypatch.setattr(devices, "shared_memory", lambda device: 99 * 1024)
    lengths = [3, 70, 0, 5], [40, 70, 4, 1]
    assert_right(inputs_of(*lengths, kernel_device, dtype, bias=True, width=width))


@pytest.mark.parametrize(
    ("name", "window", "kind"),
    each_pair(
        [name for name, case in CASES.items() if not case.large],
        [1, 32, 65, 1000],
        ["self", "cross", "biased"],
    ),
    ids=str,
)
def test_window(name, window, kind, device):
    skip_unless_supported(CASES[name], device)
    options = {"cross": True, "kv_heads": 1, "value_width": 24} if kind != "self" else {}
    inputs = make_flash_inputs(CASES[name], device, **options, bias=kind == "biased")
    assert_right(inputs, causal=True, window=window)


@pytest.mark.parametrize("window", [1, 6, 64, 10**12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_window_of_biases(dtype, window, device):
    """Windows with biases by key, position and age, and prior weights."""
    skip_unless_supported(Case("biases", 6, 150, 2, 16, dtype=dtype), device)
    lengths = [9, 70, 5, 64, 0, 3], [150, 70, 0, 64, 5, 1]
    inputs = inputs_of(*lengths, device, dtype, bias=True, kv_heads=2)
    generator = torch.Generator().manual_seed(1)
    inputs["position_bias"] = torch.randn(20, 2, generator=generator).to(device, dtype)
    inputs["age_bias"] = torch.randn(70, 2, generator=generator).to(device, dtype)
    inputs["prior_weights"] = draw_prior_weights(290, device)
    timestamps = torch.exp(14 * torch.rand(290, generator=generator)).to(device)
    assert_right(inputs, True, timestamps=timestamps, window=window)


def assert_tiles_beyond_a_window_are_not_read(inputs, window):
    """NaN in keys and values beyond the window does not affect outputs or gradients."""
    num_rows = len(inputs["q"]) * 2 // 7
    attend = partial(jagged_flash_attention, causal=True, window=window)
    grad_out = torch.ones_like(inputs["q"][..., : inputs["v"].shape[2]])
    poisoned = inputs | {name: inputs[name].clone() for name in "qkv"}
    for name in "kv":
        poisoned[name][:num_rows] = torch.nan
    results = outputs_and_gradients(attend, poisoned, grad_out)
    for name in ("out", "q"):
        assert results[name][-num_rows:].isfinite().all(), name
    poisoned = inputs | {"q": inputs["q"].clone()}
    poisoned["q"][-num_rows:] = torch.nan
    results = outputs_and_gradients(attend, poisoned, grad_out)
    for name in {"k", "v", "bias"} & {*results}:
        assert results[name][:num_rows].isfinite().all(), name


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "width", "biased"),
    [(torch.float32, 16, False), (torch.float32, 16, True), (torch.float16, 20, False)],
    ids=["plain", "biased", "half"],
)
def test_tiles_beyond_a_window_are_not_read(dtype, width, biased, kv_heads, kernel_device):
    length = [700 if kernel_device.type == "cuda" else 280]
    inputs = inputs_of(length, length, kernel_device, dtype, biased, width, kv_heads)
    assert_tiles_beyond_a_window_are_not_read(inputs, 37)


TIMES = [None, torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("times", "dtype", "causal"),
    [
        *each_pair(TIMES, [torch.float32, torch.float16], [False, True]),
        *each_pair(TIMES, [torch.bfloat16], [False, True]),
    ],
    ids=str,
)
def test_recency(causal, times, dtype, device):
    skip_unless_supported(Case("recency", 5, 150, 2, 16, dtype=dtype), device)
    inputs = inputs_of([4, 9, 2, 70, 0, 64, 1], [0, 90, 0, 3, 5, 64, 1], device, dtype)
    if causal:
        inputs |= inputs_of([90, 0, 3, 5, 64, 1], [90, 0, 3, 5, 64, 1], device, dtype)
    generator = torch.Generator().manual_seed(1)
    inputs["position_bias"] = torch.randn(20, 2, generator=generator).to(device, dtype)
    timestamps = None
    if times is not None:
        inputs["age_bias"] = torch.randn(70, 2, generator=generator).to(device, dtype)
        timestamps = torch.exp(14 * torch.rand(163, generator=generator)).to(device, times)
    assert_right(inputs, causal, timestamps=timestamps)


def draw_prior_weights(num_keys, device, dtype=torch.float32):
    """Random weights: about a third are zero, and the 64 before the last."""
    generator = torch.Generator().manual_seed(3)
    weights = 3 * torch.rand(num_keys, generator=generator)
    weights = weights.masked_fill(torch.rand(num_keys, generator=generator) < 0.3, 0)
    weights[-65:-1] = 0
    return weights.to(device, dtype)


@pytest.mark.parametrize(
    ("dtype", "others"),
    [(torch.float32, ""), *((dtype, "tables") for dtype in (torch.float16, torch.bfloat16))],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_prior_weights(causal, kv_heads, dtype, others, device):
    skip_unless_supported(Case("prior", 5, 300, 2, 16, dtype=dtype), device)
    q_lengths, kv_lengths = [4, 9, 2, 70, 0, 64, 1], [0, 90, 0, 7, 5, 64, 1]
    inputs = inputs_of(q_lengths, kv_lengths, device, dtype, kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(1)
    timestamps = None
    if others:
        inputs["position_bias"] = torch.randn(30, 2, generator=generator).to(device, dtype)
        inputs["age_bias"] = torch.randn(70, 2, generator=generator).to(device, dtype)
        timestamps = torch.arange(167, device=device) ** 2
    inputs["prior_weights"] = draw_prior_weights(167, device, torch.float32 if causal else dtype)
    assert_right(inputs, causal, timestamps=timestamps)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_prior_weights_and_distances(causal, device):
    inputs = inputs_of([70, 3, 40], [70, 3, 40], device)
    inputs["relative_bias"] = torch.randn(20, 2, device=device)
    inputs["prior_weights"] = draw_prior_weights(113, device)
    assert_right(inputs, causal)


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 15, 31, 63, 64, 65]),
            st.sampled_from([0, 1, 17, 33, 64, 65, 129]),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_lengths_that_hurt(lengths, causal):
    q_lengths = [q_length for q_length, _ in lengths]
    kv_lengths = [kv_length for _, kv_length in lengths]
    assert_right(inputs_of(q_lengths, kv_lengths, CPU, torch.float16, bias=True), causal)


@pytest.mark.parametrize(
    ("q_lengths", "kv_lengths"),
    [([], []), ([0], [0]), ([0, 3], [4, 0]), ([70, 1], [1, 70]), ([5, 0, 0], [0, 0, 5])],
    ids=str,
)
def test_edges(q_lengths, kv_lengths, device):
    for causal in (False, True):
        assert_right(inputs_of(q_lengths, kv_lengths, device, bias=causal), causal)


def assert_tail_is_independent(inputs, grad_out, sample):
    """Samples from ``sample`` on have the same bits without those before; returns their inputs."""
    row = int(inputs["q_offsets"][sample])
    tail = {name: inputs[name][row:].clone() for name in "qkv"}
    tail |= {name: x[sample:] - row for name, x in inputs.items() if "offsets" in name}
    whole = outputs_and_gradients(jagged_flash_attention, inputs, grad_out)
    alone = outputs_and_gradients(jagged_flash_attention, tail, grad_out[row:])
    for name, value in alone.items():
        assert torch.equal(whole[name][row:], value), name
    return tail


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 64)], ids=str)
def test_more_programs_than_a_grid_dimension_holds(width, dtype):
    lengths = torch.arange(70_000) % 3
    lengths[::7] += 40
    inputs = inputs_of(lengths, lengths, "cuda", dtype, width=width)
    grad_out = torch.randn_like(inputs["q"][..., : width // 2])
    assert_right(assert_tail_is_independent(inputs, grad_out, 69_990))


@pytest.fixture
def freed_memory():
    """Free the CUDA memory that PyTorch caches, after the test."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("freed_memory")
def test_more_elements_than_int32_counts():
    """Takes 37 GB, including 13 for sums of the backward on Hopper."""
    lengths = torch.randint(301, 333, (4000,), generator=torch.Generator().manual_seed(0))
    lengths[::8] -= 300
    x = torch.randn(int(lengths.sum()), 16, 128, device="cuda", dtype=torch.bfloat16)
    inputs = dict.fromkeys("qkv", x) | {"q_offsets": offsets_of(lengths, torch.int64, "cuda")}
    tail = assert_tail_is_independent(inputs, x, 3900)
    assert x.numel() - tail["q"].numel() > 2**31


@pytest.mark.parametrize(
    ("mask", "kind", "num_buckets"),
    each_pair(
        [(False, None), (True, None), *((True, window) for window in (1, 6, 64, 100))],
        [
            (torch.float32, 16), (torch.float16, 64), (torch.bfloat16, 128), (torch.float16, 20),
            (torch.float64, 16),
        ],
        [1, 17, 100],
    ),
    ids=str,
)  # fmt: skip
def test_relative_bias(mask, kind, num_buckets, device):
    causal, window = mask
    dtype, width = kind
    skip_unless_supported(Case("relative", 5, 150, 2, width, dtype=dtype), device)
    q_lengths, kv_lengths = [9, 2, 70, 0, 64, 1, 5], [150, 0, 3, 5, 64, 1, 5]
    inputs = inputs_of(q_lengths, kv_lengths, device, dtype, width=width)
    generator = torch.Generator().manual_seed(1)
    inputs["relative_bias"] = torch.randn(num_buckets, 2, generator=generator).to(device, dtype)
    assert_right(inputs, causal, window=window)


@pytest.mark.parametrize(("scale", "width"), [(0.25, 16), (-0.25, 64), (0.25, 20)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_relative_bias_and_key_bias(causal, scale, width, device):
    lengths = [9, 70, 0, 64, 3], [70, 9, 5, 64, 0]
    inputs = inputs_of(*lengths, device, bias=True, width=width, kv_heads=2)
    generator = torch.Generator().manual_seed(1)
    inputs["relative_bias"] = torch.randn(16, 2, generator=generator).to(device)
    assert_right(inputs, causal, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_relative_bias_of_far_keys(dtype):
    """One query and 70,000 keys: 65 buckets, and an empty one."""
    inputs = inputs_of([1], [70_000], "cuda", dtype, width=64)
    inputs["relative_bias"] = torch.linspace(-2, 2, 132, device="cuda").view(66, 2)
    assert_right(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_log_sum_exps(causal, window, dtype, device):
    """Log-sum-exps are fp32, and minus infinity without keys."""
    inputs = inputs_of([3, 40, 70, 0, 2], [5, 40, 100, 4, 0], device, dtype, bias=True)
    options = {"causal": causal, "window": window}
    _, lse = jagged_flash_attention(**inputs, **options, return_lse=True)
    with RoundingErrors(dtype) as errors:
        _, expected = flash_attention_oracle(**in_fp64(inputs), **options, return_lse=True)
    assert lse.dtype == torch.float32
    assert torch.all(lse[113:] == -torch.inf)
    assert_close(lse, expected, errors)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.float16, 64)], ids=str)
@pytest.mark.parametrize("scale", [-0.7, 0.0], ids=str)
def test_any_scale(scale, width, dtype, device):
    inputs = inputs_of([3, 70, 5], [5, 90, 5], device, dtype, width=width)
    assert_right(inputs, scale=scale)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bias_of_minus_infinity_hides_keys(device, causal):
    inputs = inputs_of([3, 70, 5], [5, 150, 5], device, bias=True)
    inputs["bias"][[1, 4]] = -torch.inf
    inputs["bias"][5:80] = -torch.inf  # more than a whole tile before the first key that is seen
    inputs["bias"][156:] = -torch.inf  # but one of the last sample's: its gradient is exactly zero
    assert_right(inputs, causal)
    inputs["bias"][:5] = -torch.inf
    attend = partial(jagged_flash_attention, causal=causal)
    results = outputs_and_gradients(attend, inputs, torch.randn(78, 2, 8, device=device))
    assert all(torch.isfinite(value).all() for value in results.values())
    assert torch.all(results["out"][:3] == 0)
    for name, first, last in (("k", 0, 5), ("v", 0, 5), ("bias", 0, 5), ("q", 73, 78)):
        assert torch.all(results[name][first:last] == 0), name
    assert torch.all(results["bias"][155:] == 0)


@pytest.mark.parametrize("name", ["bias", "position_bias", "relative_bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_bias_of_nan_or_infinity(value, name, device):
    """Outputs of queries that see it are NaN."""
    inputs = inputs_of([20], [20], device)
    inputs[name] = torch.zeros(20, 2, device=device)
    inputs[name][4] = value  # of a distance or position of 1, or of key 4
    first = {"bias": 4, "position_bias": 18, "relative_bias": 1}[name]
    out = jagged_flash_attention(**inputs, causal=True)
    assert torch.isfinite(out[:first]).all()
    assert torch.isnan(out[first:]).all()


def test_bias_whose_exponential_overflows(device):
    inputs = inputs_of([5, 70], [90, 3], device, bias=True)
    inputs["bias"] += 128  # exp(128) is past fp32
    assert_right(inputs)


@pytest.mark.parametrize("times", [None, *FAR_TIMES], ids=str)
def test_buckets_of_ages(times, device):
    inputs, expected = (
        inputs_of_ages(device) if times is None else inputs_of_far_times(times, device)
    )
    keys, recency = (
        inputs["history"].unsqueeze(1),
        {name: inputs[name] for name in ("age_bias", "timestamps")},
    )
    offsets = torch.arange(len(expected) + 1, device=device), inputs["offsets"]
    out = jagged_flash_attention(inputs["query"].squeeze(1), keys, keys, *offsets, **recency)
    distances = bucket_distances(out)
    assert torch.equal(distances, expected.view(-1, 1, 1).expand_as(distances))


@pytest.mark.parametrize(
    ("times", "dtype", "causal"),
    each_pair(TIMES[1:], [torch.float32, torch.float16], [False, True]),
    ids=str,
)
def test_ages_from_the_request(causal, times, dtype, device):
    """Keys may be newer than the request, or all much older."""
    inputs = inputs_of([4, 9, 2, 70, 0], [0, 90, 0, 3, 5], device, dtype)
    if causal:
        inputs |= inputs_of([90, 0, 3, 5], [90, 0, 3, 5], device, dtype)
    num_samples, num_keys = len(inputs["kv_offsets"]) - 1, len(inputs["k"])
    inputs["age_bias"] = torch.randn(70, 2, generator=torch.Generator().manual_seed(1))
    inputs["age_bias"] = inputs["age_bias"].to(device, dtype)
    ages = {
        "timestamps": (torch.arange(num_keys, device=device) ** 2).to(times),
        "request_time": (torch.arange(num_samples, device=device) * 4000).to(times),
    }
    assert_right(inputs, causal, **ages)


def test_strided_inputs_and_gradients(device):
    inputs = inputs_of([7, 0, 20], [3, 5, 0], device, bias=True)
    strided = {**inputs, "bias": inputs["bias"].T.contiguous().T}
    for name in "qkv":
        buffer = torch.full((40, 5, 37), torch.nan, device=device)
        rows, heads, width = inputs[name].shape
        buffer[5 : 5 + rows, 1 : 1 + heads, 3 : 3 + width] = inputs[name]
        strided[name] = buffer[5 : 5 + rows, 1 : 1 + heads, 3 : 3 + width]
    packed = torch.cat([inputs["k"], inputs["v"]], 2)  # [ΣLk, 1, 24]
    packed = {**inputs, "k": packed[..., :16], "v": packed[..., 16:]}
    for changed in (strided, packed):
        assert_right(changed)
        functions = jagged_flash_attention, flash_attention_oracle
        assert_matches_oracle(*map(summed, functions), changed)


@pytest.mark.parametrize(
    ("dtype", "biased", "window", "more_keys"),
    [
        *(
            (torch.float32, biased, *mask)
            for biased in (False, True)
            for mask in ((None, 0), (5, 9))
        ),
        *((torch.float16, False, *mask) for mask in ((None, 0), (None, 9), (5, 0), (1, 9))),
    ],
    ids=str,
)
def test_masked_scores_may_be_large(dtype, biased, window, more_keys, device):
    """The exponential of their difference to the visible scores overflows."""
    inputs = inputs_of([40, 5, 70], [40 + more_keys, 5, 70], device, dtype, bias=biased, width=64)
    attend = partial(jagged_flash_attention, causal=True, window=window)
    grad_out = torch.ones_like(inputs["q"][..., : inputs["v"].shape[2]])
    grad_out[39] = 0  # of the only query that sees the key
    expected = outputs_and_gradients(attend, inputs, grad_out)
    inputs["k"] = inputs["k"].clone()
    inputs["k"][39 + more_keys] *= 4096
    actual = outputs_and_gradients(attend, inputs, grad_out)
    for name in expected:
        rows = torch.arange(len(expected[name])) != (39 if name in ("out", "q") else 39 + more_keys)
        assert torch.equal(actual[name][rows], expected[name][rows]), name


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("biased", [False, True], ids=["half", "biased"])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 20)], ids=["full", "causal", "20"]
)
def test_other_samples_never_matter(device, causal, window, biased):
    queries, keys = [3, 0, 70, 17, 33], [5, 4, 33, 17, 70]
    kind = {"bias": True} if biased else {"dtype": torch.float16, "width": 64}
    inputs = inputs_of(queries, keys, device, **kind)
    if biased:
        inputs["position_bias"] = torch.randn(20, 2, device=device)
        inputs["age_bias"] = torch.randn(40, 2, device=device)
        inputs["timestamps"] = torch.arange(129, device=device) ** 2
    lengths = dict.fromkeys(("q", "out", "q_offsets"), queries)
    lengths |= dict.fromkeys(("k", "v", "bias", "timestamps", "kv_offsets"), keys)
    grad_out = torch.randn_like(inputs["q"][..., : inputs["v"].shape[2]])
    attend = partial(jagged_flash_attention, causal=causal, window=window)
    assert_other_samples_never_matter(attend, inputs, grad_out, lengths)


def test_opcheck(device):
    inputs = inputs_of([3, 0, 5], [2, 4, 6], device)
    arguments = [inputs[name].requires_grad_() for name in "qkv"]
    arguments += [inputs["q_offsets"], inputs["kv_offsets"]]
    weights = draw_prior_weights(12, device).requires_grad_()
    bias, *tables, relative_bias = (
        torch.randn(size, 2, device=device, requires_grad=True) for size in (12, 3, 5, 4)
    )
    timestamps = torch.arange(12, device=device)
    op = torch.ops.torchrec_jagged_attn.flash_attention.default
    dropout = torch.tensor([9, 2**30], device=device)
    others = (relative_bias, True, 2, 0.25, True)
    opcheck(op, (*arguments, None, *tables, timestamps, None, dropout, bias, *others))
    times = (timestamps, timestamps[3:6])
    opcheck(op, (*arguments, weights, *tables, *times, dropout, None, *others))
    without_gradients = [x.detach() for x in arguments]
    opcheck(op, (*without_gradients, *[None] * 8, False, 0, 0.25, False))
    opcheck(op, (*without_gradients, *[None] * 8, True, 3, 0.25, False))


@pytest.mark.parametrize("transposed", [False, True], ids=["as-is", "transposed"])
@pytest.mark.parametrize("lengths", [[2, 4, 6], [0, 0, 0]], ids=str)
def test_gradients_are_contiguous(lengths, transposed, device):
    """The fakes are contiguous, and compiled graphs rely on them."""
    inputs = inputs_of([3, 0, 5], lengths, device)
    tables = {"bias": sum(lengths), "position_bias": 3, "age_bias": 5, "relative_bias": 4}
    for name, size in tables.items():
        shape = (2, size) if transposed else (size, 2)
        table = torch.randn(shape, device=device)
        inputs[name] = table.T if transposed else table
    leaves = [x.requires_grad_() for x in inputs.values() if x.is_floating_point()]
    out = jagged_flash_attention(**inputs, timestamps=torch.arange(sum(lengths), device=device))
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.is_contiguous() for grad in grads)


@pytest.mark.reference  # traced alike with any kernels
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 3}], ids=str)
def test_compiles_once_for_all_batches(options, device):
    counter = CompileCounter()
    compiled = torch.compile(jagged_flash_attention, backend=counter, fullgraph=True, dynamic=True)
    for q_lengths, kv_lengths in (([3, 5, 1], [9, 6, 3]), ([9, 0, 2, 6], [4, 0, 0, 9])):
        inputs = inputs_of(q_lengths, kv_lengths, device)
        expected = jagged_flash_attention(**inputs, **options)
        torch.testing.assert_close(compiled(**inputs, **options), expected, rtol=0, atol=0)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 200)], ids=["full", "causal", "200"]
)
def test_a_hundred_repeats_are_equal(causal, window, biased, width):
    case = Case("repeats", 128, 1500, 4, width, lengths="log-normal", dtype=torch.bfloat16)
    inputs = make_flash_inputs(case, "cuda", kv_heads=2)
    if biased:
        inputs["relative_bias"] = torch.randn(40, 4, device="cuda")
    grad_out = torch.randn_like(inputs["q"])
    attend = partial(jagged_flash_attention, causal=causal, window=window)
    first = outputs_and_gradients(attend, inputs, grad_out)
    for _ in range(100):
        again = outputs_and_gradients(attend, inputs, grad_out)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("max_length", [16, 32, 64, 100])
def test_repeats_of_many_short_samples_are_equal(max_length, width, kv_heads):
    case = Case("short", 5000, max_length, 4, width, lengths="uniform", dtype=torch.bfloat16)
    inputs = make_flash_inputs(case, "cuda", kv_heads=kv_heads)
    grad_out = torch.randn_like(inputs["q"])
    first = outputs_and_gradients(jagged_flash_attention, inputs, grad_out)
    for _ in range(20):
        again = outputs_and_gradients(jagged_flash_attention, inputs, grad_out)
        assert all(torch.equal(again[name], value) for name, value in first.items())
    assert_right(assert_tail_is_independent(inputs, grad_out, 4900))


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1, 15])
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 20)], ids=["full", "causal", "20"]
)
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)],
    ids=["fp32-64", "bf16-64", "bf16-128"],
)
def test_cuda_graph_replays_with_other_lengths(dtype, width, causal, window, is_self, factor):
    lengths = [factor * length for length in (3, 60, 7, 30)]
    inputs = inputs_of(lengths, lengths[::-1], "cuda", dtype, width=width)
    if is_self:
        del inputs["kv_offsets"]
    grad_out = torch.randn(100 * factor, 2, width // 2, device="cuda", dtype=dtype)
    attend = partial(jagged_flash_attention, causal=causal, window=window)

    def change():
        inputs["q_offsets"].copy_(torch.tensor([0, 70, 70, 71, 80]) * factor)
        if not is_self:
            inputs["kv_offsets"].copy_(torch.tensor([0, 1, 40, 90, 90]) * factor)

    assert_graph_replays(lambda: outputs_and_gradients(attend, inputs, grad_out), change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q must be a tensor, got a NoneType"),
        ({"k": [0.0]}, TypeError, "k must be a tensor, got a list"),
        ({"kv_offsets": [0, 3, 7]}, TypeError, "kv_offsets must be a tensor, got a list"),
        ({"timestamps": [0] * 7}, TypeError, "timestamps must be a tensor, got a list"),
        (
            {"q": torch.zeros(7, 8)},
            ValueError,
            r"q must have shape \[ΣLq, H, D\] = \[any, any, any",
        ),
        ({"q": torch.zeros(7, 2, 8).long()}, TypeError, "q must be one of .* got torch.int64"),
        (
            {"q": torch.zeros(7, 0, 8)},
            ValueError,
            r"q must have at least one head, got \[7, 0, 8\]",
        ),
        ({"q": torch.zeros(7, 3, 8)}, ValueError, "multiple of the 2 heads of k, got 3 heads"),
        ({"k": torch.zeros(7, 2, 9)}, ValueError, r"k must have shape .* = \[any, any, 8\], got"),
        ({"k": torch.zeros(7, 2, 8).half()}, TypeError, "k must be torch.float32 as q is, got"),
        ({"v": torch.zeros(6, 2, 8)}, ValueError, r"v must have shape .* = \[7, 2, any\], got \[6"),
        ({"v": torch.zeros(7, 2, 513)}, NotImplementedError, "v must have a width of 1 to 512"),
        ({"bias": torch.zeros(7, 1)}, ValueError, r"bias must have shape \[N, H\] = \[7, 2\], got"),
        ({"relative_bias": torch.zeros(7, 1)}, ValueError, r"relative_bias must have shape \[R, H"),
        ({"relative_bias": torch.zeros(0, 2)}, ValueError, "relative_bias must have at least one"),
        ({"prior_weights": torch.ones(7, 2)}, ValueError, r"prior_weights must have shape \[N\]"),
        ({"prior_weights": torch.full((7,), torch.nan)}, ValueError, "be finite, got nan at pos"),
        ({"timestamps": torch.zeros(7)}, ValueError, "age_bias and timestamps must be given toge"),
        ({"causal": True, "window": 2.0}, TypeError, "window must be an int or None, got 2.0"),
        ({"causal": True, "window": True}, TypeError, "window must be an int or None, got True"),
        ({"causal": True, "window": 0}, ValueError, "window must be at least 1, or None, got 0"),
        ({"window": 4}, ValueError, "causal must be True with a window, got causal=False"),
        ({"q_offsets": torch.tensor([1, 3, 7])}, ValueError, "q_offsets must start at 0, got 1"),
        ({"kv_offsets": torch.tensor([0, 7])}, ValueError, r"kv_offsets must have shape \[B \+ 1"),
        ({"kv_offsets": torch.tensor([0, 8, 7])}, ValueError, "kv_offsets must never decrease"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {name: torch.zeros(7, 2, 8) for name in "qkv"}
    arguments["q_offsets"] = torch.tensor([0, 3, 7])
    with pytest.raises(error, match=message):
        jagged_flash_attention(**arguments | change)
