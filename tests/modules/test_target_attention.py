"""``JaggedTargetAttention`` against ``torch.nn.MultiheadAttention`` on each sample."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from tests.cases import CASES, jagged_lengths
from tests.combinations import each_pair
from tests.fixtures import PATHS, skip_unless_supported
from tests.modules.target_attention_inputs import (
    assert_same_uniform,
    attend,
    attend_by_sample,
    bucket,
    draw_prior_weights,
    each_pair_by_dtype,
    example,
    make_inputs,
    make_module,
    outputs_and_gradients_of,
    projected,
    zeros,
)
from tests.rounding import RoundingErrors
from tests.runs import assert_same_run
from tests.tolerance import assert_close, assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import JaggedTargetAttention, jagged_target_attention
from torchrec_jagged_attn.flash_attention import api as flash_attention
from torchrec_jagged_attn.modules.recency_bias import RecencyBias
from torchrec_jagged_attn.target_attention import api as target_attention

SMALL_CASES = [name for name, case in CASES.items() if not case.large]

NOW = 1_700_000_000  # seconds since 1970


def inputs_of_case(module, case, device, targets=None):
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    return make_inputs(
        module, lengths, device, case.dtype, targets=targets, index_dtype=case.index_dtype
    )


def assert_right(module, inputs, **times):
    assert_matches_oracle(
        lambda **inputs: attend(module, **times, **inputs),
        lambda **inputs: attend_by_sample(module, **times, **inputs),
        inputs,
    )


def module_of_case(case, **options):
    """A module without weights of its own, over rows of the case's width."""
    embed_dim = case.width if case.width % case.num_heads == 0 else 8 * case.num_heads
    return projected(embed_dim, case.num_heads, history_dim=case.width, device="meta", **options)


@pytest.mark.parametrize(
    ("name", "bias", "path"), each_pair(SMALL_CASES, [True, False], PATHS), indirect=["path"]
)
def test_is_multihead_attention(name, bias, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, bias=bias, recency_bias=False, **path)
    targets = None if case.num_targets == 1 else case.num_targets
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize(
    ("name", "bias", "embed_dim", "path"),
    each_pair_by_dtype(["targets-48", "fp16-64"], ["bf16-96"], [True, False], [32, 128], PATHS),
    indirect=["path"],
)
def test_history_of_another_width(name, bias, embed_dim, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = projected(
        embed_dim,
        case.num_heads,
        history_dim=case.width,
        bias=bias,
        recency_bias=False,
        device="meta",
        **path,
    )
    assert_right(module, inputs_of_case(module, case, device, case.num_targets))


@pytest.mark.parametrize(
    ("widths", "target_dim", "targets", "path"),
    each_pair_by_dtype(
        [("targets-48", 32, 48), ("fp16-64", 48, 48)],
        [("bf16-96", 32, 96)],
        [20, 144],
        [None, 5, [0, 3, 1, 0, 9]],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_targets_of_another_width(widths, target_dim, targets, path, device):
    name, embed_dim, history_dim = widths
    case = CASES[name]
    skip_unless_supported(case, device)
    module = projected(
        embed_dim,
        case.num_heads,
        history_dim=history_dim,
        target_dim=target_dim,
        device="meta",
        **path,
    )
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, case.dtype, targets=targets)
    assert attend(module, **inputs).shape == (*inputs["target"].shape[:-1], embed_dim)
    assert_right(module, inputs)


@pytest.mark.parametrize(
    ("num_targets", "jagged", "path"),
    each_pair([1, 2, 15, 16, 17, 33, 64, 70], [False, True], PATHS),
    indirect=["path"],
)
def test_any_number_of_targets(num_targets, jagged, path, device):
    module = projected(16, 2, age_bias=True, device="meta", **path)
    targets = [num_targets, 3, 0, 1, 9] if jagged else num_targets
    inputs = make_inputs(module, [40, 0, 30, 1, 20], device, torch.float16, targets=targets)
    assert_right(module, inputs, timestamps=torch.arange(91, device=device) ** 2)


def test_gradients_of_biases_over_many_targets(path, device):
    """Sums of thousands of targets, and of about as many rows."""
    module = projected(32, 2, recency_bias=False, device="meta", **path)
    inputs = make_inputs(module, [1100, 0, 900, 20], device, targets=1024)
    assert_right(module, inputs)


@pytest.mark.parametrize("recency_bias", [True, False], ids=["recency", "no-recency"])
@pytest.mark.parametrize("name", ["targets-48", "fp16-64", "bf16-targets-128"])
def test_jagged_targets(name, recency_bias, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, recency_bias=recency_bias, **path)
    targets = jagged_lengths(case.batch_size, 20, "edges", torch.Generator().manual_seed(1))
    assert (targets == 0).any()
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize("name", SMALL_CASES)
def test_bias_by_position(name, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, **path)
    targets = None if case.num_targets == 1 else case.num_targets
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize(
    ("times", "name", "path"),
    each_pair(
        [
            "seconds-since-1970",
            "microseconds-since-1970",
            "days-in-fp64",
            "seconds-in-int32",
            "all-equal",
        ],
        ["one-head", "targets-48", "fp16-64"],
        PATHS,
    ),
    indirect=["path"],
)
def test_bias_by_age(name, times, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, age_bias=True, **path)
    inputs = inputs_of_case(module, case, device, case.num_targets)
    generator = torch.Generator().manual_seed(2)
    ages = 2 ** (40 * torch.rand(len(inputs["history"]), generator=generator, dtype=torch.float64))
    lengths = inputs["offsets"].diff().tolist()
    ages = torch.cat([a.sort(descending=True)[0] for a in ages.split(lengths)])
    timestamps = {
        "seconds-since-1970": NOW - (ages / 2**10).long(),
        "microseconds-since-1970": NOW * 10**6 - ages.long(),
        "days-in-fp64": NOW / 86400 - ages / 2**30,
        "seconds-in-int32": (NOW - (ages / 2**10).long()).int(),
        "all-equal": torch.full_like(ages, NOW).long(),
    }[times]
    assert_right(module, inputs, timestamps=timestamps.to(device))


@pytest.mark.parametrize(
    ("targets", "dtype"), [(None, torch.int64), (3, torch.float64), ([2, 0, 1, 4], torch.int64)]
)
def test_ages_from_the_time_of_a_request(targets, dtype, path, device):
    """In the middle of a history, of none, long after one, before one."""
    module = projected(16, 2, age_bias=True, device="meta", **path)
    inputs = make_inputs(module, [5, 0, 40, 1], device, targets=targets)
    timestamps = (torch.arange(46, device=device) ** 2).to(dtype)
    request_time = torch.tensor([600, 7, 10**12, -4], dtype=dtype, device=device)
    assert_right(module, inputs, timestamps=timestamps, request_time=request_time)


def test_timestamps_that_decrease_are_refused():
    """Within a sample alone: of one to the next they may."""
    module = projected(16, 2, age_bias=True)
    history = JaggedTensor(torch.zeros(5, 16), lengths=torch.tensor([2, 0, 3]))
    target = torch.zeros(3, 16)
    module(target, history, timestamps=torch.tensor([8, 9, 1, 1, 2]))
    with pytest.raises(ValueError, match=r"timestamps must not decrease .* got 2 then"):
        module(target, history, timestamps=torch.tensor([8, 9, 1, 2, 1]))


@pytest.mark.parametrize("value_projection", [True, False], ids=["values", "rows"])
@pytest.mark.parametrize(
    ("lengths", "targets", "path"),
    each_pair([[], [0], [0, 0, 0], [1], [0, 0, 70, 1, 0], [16] * 3], [None, 2, 0, "jagged"], PATHS),
    ids=str,
    indirect=["path"],
)
def test_edges(lengths, targets, value_projection, path, device):
    options = {"value_projection": value_projection, "age_bias": value_projection, **path}
    module = make_module(16, 2, device="meta", **options)
    if targets == "jagged":
        targets = [b % 3 for b in range(len(lengths))]
    inputs = make_inputs(module, lengths, device, targets=targets)
    timestamps = torch.arange(len(inputs["history"]), device=device) if value_projection else None
    assert_right(module, inputs, timestamps=timestamps)


@pytest.mark.parametrize("value_projection", [True, False], ids=["values", "rows"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_empty_history_gives_the_output_projection_of_zero(bias, value_projection, path, device):
    module = make_module(16, 2, value_projection=value_projection, bias=bias, **path).to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    target = torch.randn(3, 2, 16, device=device, requires_grad=True)
    rows = torch.randn(4, 16, device=device)
    out = module(target, JaggedTensor(rows, lengths=torch.tensor([0, 4, 0], device=device)))
    no_rows = torch.zeros(16, device=device)
    expected = module.out_proj(no_rows) if value_projection else no_rows
    assert torch.equal(out[[0, 2]], expected.expand(2, 2, 16))
    assert torch.all(out[1] != 0)
    out[[0, 2]].sum().backward()
    for name, parameter in module.named_parameters():  # each has a gradient: DDP waits for all
        expected = torch.zeros_like(parameter)
        if name == "out_proj.bias":
            expected += 4
        assert torch.equal(parameter.grad, expected), name
    assert torch.equal(target.grad, torch.zeros_like(target))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("history_dim", [16, 20])
def test_state_dict_moves_both_ways(history_dim, bias, path):
    module = projected(16, 2, history_dim=history_dim, bias=bias, recency_bias=False, **path)
    mha = nn.MultiheadAttention(
        16, 2, bias=bias, kdim=history_dim, vdim=history_dim, batch_first=True
    )
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.3)
    module.load_state_dict(mha.state_dict(), strict=True)
    rows = torch.randn(3, 5, history_dim)
    target = torch.randn(3, 4, 16)
    history = JaggedTensor(rows.flatten(0, 1), lengths=torch.full((3,), 5))
    exact = copy.deepcopy(mha).double()
    with RoundingErrors(torch.float32) as errors:
        expected, _ = exact(target.double(), rows.double(), rows.double())
    assert_close(module(target, history), expected, errors)

    other = copy.deepcopy(mha)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(target, rows, rows)[0], mha(target, rows, rows)[0])
    assert [*module.state_dict()] == [*mha.state_dict()]


# Dtypes that differ


@pytest.mark.parametrize(
    ("history_dtype", "target_dtype", "targets", "recency_bias", "path"),
    each_pair_by_dtype(
        [torch.float16],
        [torch.bfloat16],
        [torch.float32, torch.float16, torch.bfloat16],
        [None, 3, [0, 3, 1, 0, 2]],
        [True, False],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_half_history_with_fp32_weights(
    history_dtype, target_dtype, targets, recency_bias, path, device
):
    case = CASES["fp16-64" if history_dtype == torch.float16 else "bf16-96"]
    skip_unless_supported(case, device)
    module = module_of_case(case, recency_bias=recency_bias, **path)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, targets=targets)
    inputs = {"out_proj.weight": inputs.pop("out_proj.weight"), **inputs}  # its dtype is out's
    inputs["history"] = inputs["history"].to(history_dtype)
    inputs["target"] = inputs["target"].to(target_dtype)
    assert_right(module, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_history_with_half_weights(dtype, path, device):
    case = CASES["fp16-64" if dtype == torch.float16 else "bf16-96"]
    skip_unless_supported(case, device)
    module = module_of_case(case, **path)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, dtype)
    inputs = {"out_proj.weight": inputs.pop("out_proj.weight"), **inputs}
    inputs["history"] = inputs["history"].float()
    assert_right(module, inputs)


@pytest.mark.parametrize("kind", ["recency", "no-recency", "rows"])
@pytest.mark.parametrize("targets", [None, 3, [0, 3, 1, 0, 2]], ids=["one", "three", "jagged"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_autocast(device, dtype, targets, kind, path):
    if kind == "rows":
        module = module_of_rows(32, 2, **path)
    else:
        module = module_of_case(CASES["wide-20"], recency_bias=kind == "recency", **path)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, targets=targets)

    def autocast(function):
        def run(**inputs):
            with torch.autocast(device, dtype):
                return function(module, **inputs)

        return run

    with torch.autocast(device, dtype):
        assert attend(module, **inputs).dtype == dtype
    assert_matches_oracle(
        autocast(attend),
        lambda **inputs: attend_by_sample(module, **inputs),
        inputs,
    )


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("history_dtype", [torch.float32, torch.float16], ids=str)
def test_history_reaches_the_op_as_it_is(monkeypatch, history_dtype, autocast):
    """No copy, no cast: the rows are what is large."""
    seen = []

    attend = target_attention.forward
    monkeypatch.setattr(
        target_attention,
        "forward",
        lambda args, listing: seen.append(args.history) or attend(args, listing),
    )
    rows = torch.randn(5, 24)[:, 4:20].to(history_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = projected(16, 2)(torch.randn(2, 16), JaggedTensor(rows, lengths=torch.tensor([2, 3])))
    assert seen[0] is rows
    assert out.dtype == (torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize("history_dtype", [torch.float32, torch.float16], ids=str)
def test_keys_and_values_are_made_in_the_dtype_of_the_history(monkeypatch, history_dtype):
    """By one product: they are two halves of one tensor, and so are their gradients."""
    seen = []

    attend, differentiate = flash_attention.forward, flash_attention.backward

    def forward(args):
        seen.append(args[:3])
        return attend(args)

    def backward(grad_out, args, outputs, grad_k, grad_v, **options):
        seen.append((grad_out, grad_k, grad_v))
        return differentiate(grad_out, args, outputs, grad_k, grad_v, **options)

    monkeypatch.setattr(flash_attention, "forward", forward)
    monkeypatch.setattr(flash_attention, "backward", backward)
    rows = torch.randn(5, 16).to(history_dtype)
    module = projected(16, 2, keys_and_values="materialized")
    out = module(torch.randn(2, 16), JaggedTensor(rows, lengths=torch.tensor([2, 3])))
    out.sum().backward()
    assert out.dtype == torch.float32
    for other, k, v in seen:
        assert other.dtype == k.dtype == v.dtype == history_dtype
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert k.shape == v.shape == (5, 2, 8)
        assert k.stride() == v.stride() == (32, 8, 1)
    assert len(seen) == 2


# What is the default


@pytest.mark.parametrize(
    ("embed_dim", "num_heads"),
    [(1, 1), (4, 1), (8, 2), (12, 2), (16, 4), (18, 2), (28, 4), (32, 8), (68, 4), (128, 8)],
)
def test_as_many_heads_as_have_four_columns(embed_dim, num_heads):
    assert JaggedTargetAttention(embed_dim).num_heads == num_heads


def test_the_default_computes_the_same_while_training(device):
    module = JaggedTargetAttention(16).to(device)
    nn.init.normal_(module.q_proj_weight)
    target, history = example(module, [5, 0, 40], device)
    expected = module.eval()(target, history)
    module.train()
    for _ in range(2):
        assert torch.equal(module(target, history), expected)


def test_the_default_is_a_mean_of_rows_whatever_the_length(device):
    """In their own space: the mean of equal rows is this row."""
    module = JaggedTargetAttention(16, device="meta")
    inputs = make_inputs(module, [1, 2, 40, 300], device)
    row = inputs["history"][0]
    inputs["history"] = row.repeat(343, 1)
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    with RoundingErrors(torch.float32) as errors:
        mean = attend_by_sample(module, **exact)
    mean[:] = row  # but for the rounding of fp64
    assert_close(attend(module, **inputs), mean, errors)


# Without a projection of values


def module_of_rows(embed_dim, num_heads, **options):
    """Without weights of its own."""
    return make_module(embed_dim, num_heads, value_projection=False, device="meta", **options)


@pytest.mark.parametrize(
    ("name", "bias", "path"),
    each_pair(
        [name for name in SMALL_CASES if CASES[name].width % CASES[name].num_heads == 0],
        [True, False],
        PATHS,
    ),
    indirect=["path"],
)
def test_rows_that_are_not_projected(name, bias, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_rows(case.width, case.num_heads, bias=bias, **path)
    targets = None if case.num_targets == 1 else case.num_targets
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize(
    ("name", "target_dim", "targets", "path"),
    each_pair_by_dtype(
        ["targets-48", "fp16-64"],
        ["bf16-96"],
        [20, 96, 144],
        [None, 5, [0, 3, 1, 0, 9]],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_rows_that_are_not_projected_and_any_targets(name, target_dim, targets, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_rows(96, 3, target_dim=target_dim, age_bias=True, **path)
    lengths = [7, 0, 60, 1, 20]
    inputs = make_inputs(module, lengths, device, case.dtype, targets=targets)
    inputs["prior_weights"] = draw_prior_weights(lengths, device)
    assert_right(module, inputs, timestamps=torch.arange(88, device=device) ** 2)


@pytest.mark.parametrize(("width", "num_heads"), [(16, 1), (16, 16), (144, 1)])
def test_own_columns_are_all_or_one(width, num_heads, path, device):
    """Also of a head that is too wide for kernels of products."""
    module = module_of_rows(width, num_heads, **path)
    assert_right(module, make_inputs(module, [5, 0, 40], device, targets=3))


@pytest.mark.parametrize(
    ("dtypes", "targets", "recency_bias", "path"),
    each_pair_by_dtype(
        [(torch.float32, torch.float16), (torch.float16, torch.float32)],
        [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
        [None, [0, 3, 1, 0, 2]],
        [True, False],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_dtypes_that_differ_without_a_value_projection(dtypes, targets, recency_bias, path, device):
    dtype, history_dtype = dtypes
    half = min(dtype, history_dtype, key=lambda x: x.itemsize)
    skip_unless_supported(CASES["fp16-64" if half == torch.float16 else "bf16-96"], device)
    module = module_of_rows(32, 2, recency_bias=recency_bias, **path)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, dtype, targets=targets)
    inputs = {"q_proj_weight": inputs.pop("q_proj_weight"), **inputs}  # its dtype is out's
    inputs["history"] = inputs["history"].to(history_dtype)
    assert_right(module, inputs)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("target_dim", [16, 20])
def test_parameters_without_a_value_projection(target_dim, bias):
    options = {"target_dim": target_dim, "bias": bias}
    module = JaggedTargetAttention(16, 2, value_projection=False, **options)
    shapes = {"q_proj_weight": (16, target_dim), "k_proj_weight": (16, 16)}
    shapes |= {"in_proj_bias": (16,)} if bias else {}
    shapes["recency_bias.position_weight"] = (RecencyBias.POSITION_BUCKETS, 2)
    assert {name: (*x.shape,) for name, x in module.state_dict().items()} == shapes
    with pytest.raises(
        RuntimeError, match=r'Unexpected key\(s\) in state_dict: .*"out_proj.weight"'
    ):
        module.load_state_dict(projected(16, 2, **options).state_dict())


@pytest.mark.parametrize("init", ["recency", "mha"])
@pytest.mark.parametrize("target_dim", [64, 48])
def test_queries_and_keys_start_as_they_do_with_a_value_projection(target_dim, init):
    torch.manual_seed(0)
    options = {"target_dim": target_dim, "init": init}
    module = JaggedTargetAttention(64, 4, value_projection=False, **options)
    other = projected(64, 4, **options)
    if target_dim == 64:
        expected = other.in_proj_weight[:64], other.in_proj_weight[64:128]
    else:
        expected = other.q_proj_weight, other.k_proj_weight
    for ours, theirs in zip((module.q_proj_weight, module.k_proj_weight), expected, strict=True):
        assert_same_uniform(ours, theirs)
    assert torch.all(module.in_proj_bias == 0)


# What TorchRec hands over

TABLE = EmbeddingConfig(
    name="t", embedding_dim=16, num_embeddings=50, feature_names=["item", "hist"]
)

FEATURES = KeyedJaggedTensor(
    keys=["item", "hist"],
    values=torch.arange(3 + 20),
    lengths=torch.tensor([1, 1, 1, 13, 0, 7]),
)


def quantized(collection, dtype):
    collection.qconfig = torch.ao.quantization.QConfig(
        activation=torch.ao.quantization.PlaceholderObserver.with_args(dtype=dtype),
        weight=torch.ao.quantization.PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    return QuantEmbeddingCollection.from_float(collection)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_lookups_of_a_quantized_collection(dtype):
    """Rows are views with a storage offset, and of ``dtype``; so are the targets."""
    found = quantized(EmbeddingCollection([TABLE]), dtype)(FEATURES)
    target, history = found["item"].values(), found["hist"]
    assert history.values().storage_offset() > 0
    assert history.values().dtype == target.dtype == dtype
    module = projected(16, 2)
    out = module(target, history)
    assert out.dtype == torch.float32
    arguments = {
        "target": target,
        "history": history.values(),
        "offsets": history.offsets(),
        **dict(module.named_parameters()),
    }
    exact = {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}
    with RoundingErrors(dtype) as errors:
        expected = attend_by_sample(module, **exact)
    assert_close(out, expected, errors)


def test_lookups_of_a_collection_train_its_table():
    collection = EmbeddingCollection([TABLE], need_indices=True)
    weight = collection.embeddings["t"].weight
    module = projected(16, 2, init="mha")
    found = collection(FEATURES)
    assert found["hist"].weights().dtype == torch.int64  # the ids, never attention weights
    module(found["item"].values(), found["hist"]).sum().backward()
    touched = weight.grad.abs().sum(1) > 0
    in_a_history = torch.arange(3, 23)
    expected = torch.zeros(50, dtype=torch.bool)
    expected[in_a_history] = True
    expected[[0, 2]] = True  # the target of the sample without a history learns nothing
    assert torch.equal(touched, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_all_ways_to_write_a_jagged_tensor(index_dtype, path, device):
    module = projected(16, 2, age_bias=True, **path).to(device)
    lengths = torch.tensor([3, 0, 9], device=device, dtype=index_dtype)
    offsets = torch.tensor([0, 3, 3, 12], device=device, dtype=index_dtype)
    times = torch.arange(12, device=device) ** 2
    target = torch.randn(3, 16, device=device)
    buffer = torch.full((20, 21), torch.nan, device=device)
    buffer[4:16, 3:19] = torch.randn(12, 16, device=device)
    view = buffer[4:16, 3:19]
    rows = view.contiguous()

    def results(history, rows, times=times):
        rows.requires_grad_()
        inputs = {"rows": rows, **dict(module.named_parameters())}

        def run(rows, **parameters):
            return functional_call(module, parameters, (target, history(rows), times))

        return outputs_and_gradients(run, inputs, torch.ones(3, 16, device=device))

    expected = results(lambda x: JaggedTensor(x, offsets=offsets), rows.clone())
    for history, values in [
        (lambda x: JaggedTensor(x, lengths=lengths), rows.clone()),
        (lambda x: JaggedTensor(x, lengths=lengths.repeat(2)[3:]), view.detach()),
        (
            lambda x: JaggedTensor(
                x, lengths=lengths, weights=torch.full((12,), torch.nan, device=device)
            ),
            rows.T.contiguous().T,
        ),
    ]:
        actual = results(history, values)
        for name, value in expected.items():
            assert_same_run(actual[name], value, num_terms=100, name=name)
    strided = results(
        lambda x: JaggedTensor(x, offsets=offsets), rows, times.repeat_interleave(2)[::2]
    )
    assert torch.equal(strided["out"], expected["out"])


# The bias


@pytest.mark.parametrize(
    ("option", "num_buckets", "first"),
    [
        ("position_bias", RecencyBias.POSITION_BUCKETS, 55_108),
        ("age_bias", RecencyBias.AGE_BUCKETS, 2**63 - 2**38 - 1),
    ],
)
def test_last_bucket_has_no_end(option, num_buckets, first, device):
    if option == "age_bias":
        distances = torch.tensor([2**63 - 1, first + 1, first, first - 1, 2**62, 2**40, 0])
        timestamps = {"timestamps": 2**62 - distances.to(device)}
    else:
        distances, timestamps = torch.arange(60_000).flip(0), {}
    far = (distances >= first).to(device)
    offsets = torch.tensor([0, len(far)], device=device)
    in_last = torch.arange(num_buckets, device=device).unsqueeze(1) == num_buckets - 1
    for should_be_hidden, hidden in ((~far, ~in_last), (far, in_last)):
        bias = torch.zeros(num_buckets, 1, device=device).masked_fill(hidden, -torch.inf)
        rows = torch.stack([should_be_hidden, torch.ones_like(far)], 1).float()
        query = torch.zeros(1, 1, 2, device=device)
        out = jagged_target_attention(query, rows, offsets, **{option: bias}, **timestamps)
        assert out[0, 0, 0] == 0, "one that should be hidden is seen"
        assert out[0, 0, 1] > 0.5, "none is seen"


def test_bias_starts_at_the_logarithm_of_the_position():
    bias = RecencyBias(3, ages=True)
    assert torch.all(bias.age_weight == 0)
    start = bias.position_weight.detach()[[bucket(n, 64) for n in range(1024)]]
    positions = torch.arange(1, 1025, dtype=torch.float64)
    with RoundingErrors(torch.float32) as errors:
        line = -positions.log().unsqueeze(1).expand(-1, 3)
    octaves = 2 ** torch.arange(11) - 1
    bound = errors.bound(line, torch.float32)
    assert torch.all((start - line).abs()[octaves] <= bound[octaves])
    # Within a bucket it is flat: up to a quarter of an octave above the line, never below.
    assert torch.all(start >= line - bound)
    assert torch.all(start <= line + 0.25 * math.log(2) + bound)


# Weights that are functions of their own scores


@pytest.mark.parametrize("score", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("options", "targets"),
    each_pair(
        [
            {"value_projection": True, "recency_bias": False},
            {"value_projection": True, "age_bias": True},
            {"value_projection": False},
            {"value_projection": True, "history_dim": 20, "target_dim": 24},
        ],
        [None, 3, [2, 0, 9]],
    ),
    ids=str,
)
def test_scores(options, targets, score, device):
    module = make_module(16, 2, score=score, device="meta", **options)
    inputs = make_inputs(module, [5, 0, 35], device, targets=targets)
    timestamps = torch.arange(40, device=device) ** 2 if options.get("age_bias") else None
    assert_right(module, inputs, timestamps=timestamps)


# Prior weights


@pytest.mark.parametrize(
    ("name", "targets", "recency", "path"),
    each_pair_by_dtype(
        ["targets-48", "fp16-64"],
        ["bf16-96"],
        [None, 3, 40, [0, 3, 1, 9, 2]],
        [{"age_bias": True}, {"recency_bias": False}],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_prior_weights(name, recency, targets, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, **recency, **path)
    lengths = [70, 0, 30, 1, 20]
    inputs = make_inputs(module, lengths, device, case.dtype, targets=targets)
    inputs["prior_weights"] = draw_prior_weights(lengths, device)
    timestamps = torch.arange(121, device=device) ** 2 if recency.get("age_bias") else None
    assert_right(module, inputs, timestamps=timestamps)


def test_removed_rows_are_an_empty_history(path, device):
    module = projected(16, 2, **path).to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    target = torch.randn(3, 4, 16, device=device)
    rows = torch.randn(9, 16, device=device)
    lengths = torch.tensor([3, 4, 2], device=device)
    weights = torch.tensor([0, 0, 0, 1, 0, 2, 3, 0, 0.0], device=device)
    results = []
    for x, of_samples, w in (
        (rows, lengths, weights),
        (rows[3:7], lengths * (lengths == 4), weights[3:7]),
    ):
        x = x.detach().requires_grad_()
        history = JaggedTensor(x, lengths=of_samples)
        out, *grads = outputs_and_gradients_of(module, module, target, history, prior_weights=w)
        results.append([out, x.grad, *grads])
    out, grad = results[0][:2]
    assert torch.equal(out[[0, 2]], module.out_proj.bias.expand(2, 4, 16))
    assert torch.all(grad[[0, 1, 2, 4, 7, 8]] == 0)
    results[0][1] = grad[3:7]
    for actual, expected in zip(*results, strict=True):
        assert_same_run(actual, expected, num_terms=100)


# Errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"history": torch.zeros(2, 5, 8)}, TypeError, "history must be a JaggedTensor, got a Te"),
        ({"target": None}, TypeError, "target must be a tensor or a JaggedTensor, got a NoneType"),
        ({"target": torch.zeros(2).long()}, TypeError, "target must hold floating-point embedding"),
        ({"history": zeros([2, 3], dtype=torch.int32)}, TypeError, "history must hold floating-po"),
        (
            {"target": torch.zeros(2, 9)},
            ValueError,
            "target must have shape [B, target_dim] = [2, 8]",
        ),
        (
            {"target": torch.zeros(3, 8)},
            ValueError,
            "target must have shape [B, target_dim] = [2, 8]",
        ),
        ({"target": torch.zeros(8)}, ValueError, "target must have shape [B, target_dim] = [2, 8]"),
        (
            {"target": torch.zeros(1, 3, 8)},
            ValueError,
            "target must have shape [B, T, target_dim] = [",
        ),
        ({"target": zeros([1, 3], 9)}, ValueError, "target.values() must have shape [ΣT, target_d"),
        (
            {"target": JaggedTensor.empty()},
            ValueError,
            "target.values() must have shape [ΣT, target",
        ),
        (
            {"target": zeros([1, 2, 1])},
            ValueError,
            "target.offsets() must have shape [B + 1] = [3]",
        ),
        ({"target": torch.zeros(2, 8).to("meta")}, ValueError, "target must be on cpu as history"),
        ({"history": zeros([2, 3], 9)}, ValueError, "history.values() must have shape [N, D] = [a"),
        ({"history": JaggedTensor.empty()}, ValueError, "history.values() must have shape [N, D]"),
        (
            {"history": JaggedTensor(torch.zeros(0, 8), offsets=torch.zeros(0).long())},
            ValueError,
            "history.offsets() must have shape [B + 1], got [0]",
        ),
        (
            {"history": JaggedTensor(torch.zeros(5, 8), offsets=torch.tensor([0, 2, 4]))},
            ValueError,
            "history.offsets() must end at the 5 rows they divide, got 4",
        ),
        *(
            (
                {"target": JaggedTensor(torch.zeros(5, 8), offsets=torch.tensor([0, 2, end]))},
                ValueError,
                f"target.offsets() must end at the 5 rows they divide, got {end}",
            )
            for end in (4, 6)
        ),
        ({"timestamps": [0.0] * 5}, TypeError, "timestamps must be a tensor, got a list"),
        (
            {"timestamps": None},
            ValueError,
            "timestamps must be given where age_bias=True, got None",
        ),
        ({"prior_weights": [1.0] * 5}, TypeError, "prior_weights must be a tensor, got a list"),
        ({"prior_weights": torch.ones(5).int()}, TypeError, "prior_weights must be one of"),
        ({"prior_weights": torch.ones(4)}, ValueError, "prior_weights must have shape [N] = [5]"),
        ({"prior_weights": torch.ones(5).to("meta")}, ValueError, "prior_weights must be on cpu"),
        (
            {"prior_weights": torch.tensor([1, 0, torch.inf, 1, 1])},
            ValueError,
            "prior_weights must be finite, got inf at position 2",
        ),
        ({"timestamps": torch.zeros(4)}, ValueError, "timestamps must have shape [N] = [5], got"),
        ({"timestamps": torch.zeros(5).to("meta")}, ValueError, "timestamps must be on cpu as his"),
        ({"age_bias": False}, ValueError, "timestamps must be None unless age_bias=True, got a"),
        ({"request_time": torch.zeros(3)}, ValueError, "request_time must have shape [B] = [2]"),
        ({"request_time": torch.ones(2).int()}, TypeError, "request_time must be torch.float32 as"),
        ({"request_time": 5}, TypeError, "request_time must be a tensor, got a int"),
        (
            {"request_time": torch.zeros(2), "timestamps": None, "age_bias": False},
            ValueError,
            "request_time must be None without timestamps, got a tensor",
        ),
        (
            {"request_time": torch.zeros(2).to("meta")},
            ValueError,
            "request_time must be on cpu as timestamps is, got meta",
        ),
        ({"recency_bias": False}, ValueError, "recency_bias must be True with age_bias=True, got"),
        ({"embed_dim": 8.0}, TypeError, "embed_dim must be an int, got 8.0"),
        ({"num_heads": 3}, ValueError, "num_heads must divide embed_dim 8, got 3"),
        ({"num_heads": 0}, ValueError, "num_heads must divide embed_dim 8, got 0"),
        ({"embed_dim": 0}, ValueError, "num_heads must divide embed_dim 0, got 2"),
        ({"embed_dim": 0, "num_heads": None}, ValueError, "embed_dim must be at least 1, got 0"),
        ({"embed_dim": 8.0, "num_heads": None}, TypeError, "embed_dim must be an int, got 8.0"),
        ({"init": "alibi"}, ValueError, "init must be 'recency' or 'mha', got 'alibi'"),
        (
            {"target_dim": 24},
            ValueError,
            "target must have shape [B, target_dim] = [2, 24], got [2, 8]",
        ),
        *(
            ({name: p}, ValueError, f"{name} must be at least 0 and below 1, got {p}")
            for name in ("row_dropout", "dropout")
            for p in (-0.1, 1.0)
        ),
        (
            {"value_projection": False, "history_dim": 12},
            ValueError,
            "history_dim must be embed_dim 8 where value_projection=False, got 12",
        ),
        ({"history_dim": 513}, NotImplementedError, "history_dim must have a width of 1 to 512"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_name_the_argument(change, error, message):
    options = {"embed_dim": 8, "num_heads": 2, "age_bias": True}
    arguments = {
        "target": torch.zeros(2, 8),
        "history": zeros([2, 3]),
        "timestamps": torch.zeros(5),
        "prior_weights": None,
        "request_time": None,
    }
    for name, value in change.items():
        (arguments if name in arguments else options)[name] = value
    with pytest.raises(error) as raised:
        JaggedTargetAttention(**options)(**arguments)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"target": zeros([1, 3])},
            TypeError,
            "target must be a tensor [B, C] or [B, T, C], got a JaggedTensor",
        ),
        ({"target": None}, TypeError, "target must be a tensor or a JaggedTensor, got a NoneType"),
        ({"target": torch.zeros(3, 8)}, ValueError, "target must have shape [B, target_dim] = [2,"),
        ({"history": torch.zeros(2, 5, 8)}, TypeError, "history must be a JaggedTensor, got a Te"),
        ({"timestamps": torch.zeros(5)}, ValueError, "timestamps must be None unless age_bias=Tr"),
        ({"prior_weights": torch.ones(4)}, ValueError, "prior_weights must have shape [N] = [5]"),
        ({"prior_weights": torch.ones(5) / 0}, ValueError, "prior_weights must be finite, got inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_attention_weights_name_the_argument(change, error, message):
    arguments = {"target": torch.zeros(2, 8), "history": zeros([2, 3])}
    with pytest.raises(error) as raised:
        JaggedTargetAttention(8, 2).attention_weights(**arguments | change)
    assert str(raised.value).startswith(message)
