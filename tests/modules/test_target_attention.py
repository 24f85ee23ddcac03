"""``JaggedTargetAttention`` against ``torch.nn.MultiheadAttention`` on each sample."""

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torchrec import JaggedTensor

from tests.cases import CASES, jagged_lengths
from tests.combinations import each_pair
from tests.fixtures import PATHS, skip_unless_supported
from tests.modules.target_attention_inputs import (
    attend,
    attend_by_sample,
    bucket,
    draw_prior_weights,
    each_pair_by_dtype,
    make_inputs,
    make_module,
    projected,
    zeros,
)
from tests.rounding import RoundingErrors
from tests.runs import assert_same_run
from tests.tolerance import assert_close, assert_matches_oracle, outputs_and_gradients
from torchrec_jagged_attn import JaggedTargetAttention, jagged_target_attention
from torchrec_jagged_attn.modules.recency_bias import RecencyBias
from torchrec_jagged_attn.ops.flash_attention import cpu as flash_attention
from torchrec_jagged_attn.ops.target_attention import cpu as target_attention

SMALL_CASES = [name for name, case in CASES.items() if not case.large]


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


def module_of_case(case, *, value_projection=True, head_width=None, **options):
    """A module on the meta device, with the width of the case."""
    if not value_projection:
        num_heads = case.num_heads if case.width % case.num_heads == 0 else 1
        options |= {"value_projection": False, "device": "meta"}
        return make_module(case.width, num_heads, **options)
    embed_dim = case.width if case.width % case.num_heads == 0 else 8 * case.num_heads
    if head_width is not None:
        embed_dim = head_width * case.num_heads
    return projected(embed_dim, case.num_heads, history_dim=case.width, device="meta", **options)


WIDTHS = {
    "one": {},
    "of outputs": {"head_width": 16},
    "of targets": {"target_dim": 20},
    "of outputs and targets": {"head_width": 16, "target_dim": 144},
    "rows": {"value_projection": False},
    "rows, of targets": {"value_projection": False, "target_dim": 20},
}
RECENCY = {
    "none": {"recency_bias": False},
    "positions": {},
    "ages": {"age_bias": True},
    "ages at a request": {"age_bias": True},
}


@pytest.mark.parametrize(
    ("name", "widths", "bias", "recency", "targets", "prior"),
    each_pair(
        SMALL_CASES, WIDTHS, [True, False], RECENCY, ["one", "many", "jagged"], [False, True]
    ),
)
def test_is_multihead_attention(name, widths, bias, recency, targets, prior, path, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, bias=bias, **WIDTHS[widths], **RECENCY[recency], **path)
    num_targets = {
        "one": None,
        "many": case.num_targets,
        "jagged": jagged_lengths(case.batch_size, 20, "edges", torch.Generator().manual_seed(1)),
    }
    inputs = inputs_of_case(module, case, device, num_targets[targets])
    num_rows, times = len(inputs["history"]), {}
    if prior:
        lengths = inputs["offsets"].diff().tolist()
        inputs["prior_weights"] = draw_prior_weights(lengths, device)
    if module.recency_bias is not None and module.recency_bias.age_weight is not None:
        times["timestamps"] = torch.arange(num_rows, device=device) ** 2
    if recency == "ages at a request":  # before a history, in one, long after one
        times["request_time"] = torch.arange(case.batch_size, device=device) ** 9 - 4
    assert_right(module, inputs, **times)


def test_timestamps_that_decrease_are_refused():
    """Within a sample; they may decrease between samples."""
    module = projected(16, 2, age_bias=True)
    history = JaggedTensor(torch.zeros(5, 16), lengths=torch.tensor([2, 0, 3]))
    target = torch.zeros(3, 16)
    module(target, history, timestamps=torch.tensor([8, 9, 1, 1, 2]))
    with pytest.raises(ValueError, match=r"timestamps must not decrease .* got 2 then"):
        module(target, history, timestamps=torch.tensor([8, 9, 1, 2, 1]))


@pytest.mark.parametrize(
    ("lengths", "targets", "value_projection", "path"),
    each_pair(
        [[], [0], [0, 0, 0], [1], [0, 0, 70, 1, 0], [16] * 3],
        [None, 2, 0, "jagged"],
        [True, False],
        PATHS,
    ),
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


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("history_dim", [16, 20])
def test_state_dict_compatibility(history_dim, bias, path):
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


def dtypes_that_differ(half):
    """Dtypes of weights, rows and targets."""
    f32 = torch.float32
    return [(f32, half, f32), (f32, half, half), (half, f32, half)]


@pytest.mark.parametrize(
    ("dtypes", "value_projection", "targets", "recency_bias", "path"),
    each_pair_by_dtype(
        dtypes_that_differ(torch.float16),
        dtypes_that_differ(torch.bfloat16),
        [True, False],
        [None, 3, [0, 3, 1, 0, 2]],
        [True, False],
        PATHS,
    ),
    ids=str,
    indirect=["path"],
)
def test_dtypes_that_differ(dtypes, value_projection, targets, recency_bias, path, device):
    half = min(dtypes, key=lambda dtype: dtype.itemsize)
    case = dataclasses.replace(CASES["fp16-64"], dtype=half)
    skip_unless_supported(case, device)
    module = module_of_case(
        case, value_projection=value_projection, recency_bias=recency_bias, **path
    )
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, dtypes[0], targets=targets)
    weight = "out_proj.weight" if value_projection else "q_proj_weight"
    inputs = {weight: inputs.pop(weight), **inputs}  # its dtype is out's
    inputs["history"] = inputs["history"].to(dtypes[1])
    inputs["target"] = inputs["target"].to(dtypes[2])
    assert_right(module, inputs)


@pytest.mark.parametrize(
    ("kind", "targets", "path"),
    each_pair(["recency", "no-recency", "rows"], [None, 3, [0, 3, 1, 0, 2]], PATHS),
    ids=str,
    indirect=["path"],
)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_autocast(device, dtype, targets, kind, path):
    options = {"value_projection": kind != "rows", "recency_bias": kind != "no-recency"}
    module = module_of_case(CASES["wide-20"], **options, **path)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, targets=targets)

    def autocast(**inputs):
        with torch.autocast(device, dtype):
            out = attend(module, **inputs)
        assert out.dtype == dtype
        return out

    assert_matches_oracle(autocast, lambda **inputs: attend_by_sample(module, **inputs), inputs)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("history_dtype", [torch.float32, torch.float16], ids=str)
def test_history_is_not_copied(monkeypatch, history_dtype, autocast):
    """Rows are neither copied nor cast."""
    seen = []
    attend = target_attention.forward
    monkeypatch.setattr(
        target_attention, "forward", lambda args: seen.append(args.history) or attend(args)
    )
    rows = torch.randn(5, 24)[:, 4:20].to(history_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = projected(16, 2)(torch.randn(2, 16), JaggedTensor(rows, lengths=torch.tensor([2, 3])))
    assert seen[0] is rows
    assert out.dtype == (torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize("history_dtype", [torch.float32, torch.float16], ids=str)
def test_keys_and_values_are_made_in_the_dtype_of_the_history(monkeypatch, history_dtype):
    seen = []
    attend = flash_attention.forward
    monkeypatch.setattr(flash_attention, "forward", lambda x: seen.append(x) or attend(x))
    rows = torch.randn(5, 16).to(history_dtype)
    module = projected(16, 2, keys_and_values="materialized")
    out = module(torch.randn(2, 16), JaggedTensor(rows, lengths=torch.tensor([2, 3])))
    assert out.dtype == torch.float32
    (args,) = seen
    assert args.q.dtype == args.k.dtype == args.v.dtype == history_dtype
    assert args.k.shape == args.v.shape == (5, 2, 8)


@pytest.mark.parametrize(
    ("embed_dim", "num_heads"), [(1, 1), (4, 1), (12, 2), (16, 4), (18, 2), (28, 4), (128, 8)]
)
def test_default_num_heads(embed_dim, num_heads):
    assert JaggedTargetAttention(embed_dim).num_heads == num_heads


@pytest.mark.parametrize(("width", "num_heads"), [(16, 1), (16, 16), (144, 1)])
def test_one_head_or_one_column_per_head(width, num_heads, path, device):
    """Including a wide head."""
    module = make_module(width, num_heads, value_projection=False, device="meta", **path)
    assert_right(module, make_inputs(module, [5, 0, 40], device, targets=3))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("target_dim", [16, 20])
def test_parameters_without_a_value_projection(target_dim, bias):
    module = JaggedTargetAttention(16, value_projection=False, target_dim=target_dim, bias=bias)
    shapes = {"q_proj_weight": (16, target_dim), "k_proj_weight": (16, 16)}
    shapes |= {"in_proj_bias": (16,)} if bias else {}
    shapes["recency_bias.position_weight"] = (RecencyBias.POSITION_BUCKETS, 4)
    assert {name: (*x.shape,) for name, x in module.state_dict().items()} == shapes


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
        inputs = {"rows": rows, **dict(module.named_parameters())}

        def run(rows, **parameters):
            return functional_call(module, parameters, (target, history(rows), times))

        return outputs_and_gradients(run, inputs, torch.ones(3, 16, device=device))

    expected = results(lambda x: JaggedTensor(x, offsets=offsets), rows)
    no_weights = torch.full((12,), torch.nan, device=device)  # which attention does not read
    for actual in (
        results(lambda x: JaggedTensor(x, lengths=lengths), rows),
        results(lambda x: JaggedTensor(x, lengths=lengths.repeat(2)[3:]), view),
        results(lambda x: JaggedTensor(x, no_weights, lengths), rows.T.contiguous().T),
        results(lambda x: JaggedTensor(x, lengths=lengths), rows, times.repeat_interleave(2)[::2]),
    ):
        for name, value in expected.items():
            assert_same_run(actual[name], value, num_terms=100, name=name)


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


# Errors


ERRORS = {
    TypeError: [
        ({"history": torch.zeros(2, 5, 8)}, "history must be a JaggedTensor, got a Te"),
        ({"target": None}, "target must be a tensor or a JaggedTensor, got a NoneType"),
        ({"target": torch.zeros(2).long()}, "target must hold floating-point embedding"),
        ({"history": zeros([2, 3], dtype=torch.int32)}, "history must hold floating-po"),
        ({"timestamps": [0.0] * 5}, "timestamps must be a tensor, got a list"),
        ({"prior_weights": [1.0] * 5}, "prior_weights must be a tensor, got a list"),
        ({"prior_weights": torch.ones(5).int()}, "prior_weights must be one of"),
        ({"request_time": torch.ones(2).int()}, "request_time must be torch.float32 as"),
        ({"request_time": 5}, "request_time must be a tensor, got a int"),
        ({"embed_dim": 8.0}, "embed_dim must be an int, got 8.0"),
    ],
    ValueError: [
        ({"target": torch.zeros(2, 9)}, "target must have shape [B, target_dim] = [2, 8]"),
        ({"target": torch.zeros(3, 8)}, "target must have shape [B, target_dim] = [2, 8]"),
        ({"target": torch.zeros(8)}, "target must have shape [B, target_dim] = [2, 8]"),
        ({"target": torch.zeros(1, 3, 8)}, "target must have shape [B, T, target_dim] = ["),
        ({"target": zeros([1, 3], 9)}, "target.values() must have shape [ΣT, target_d"),
        ({"target": JaggedTensor.empty()}, "target.values() must have shape [ΣT, target"),
        ({"target": zeros([1, 2, 1])}, "target.offsets() must have shape [B + 1] = [3]"),
        ({"target": torch.zeros(2, 8).to("meta")}, "target must be on cpu as history"),
        ({"history": zeros([2, 3], 9)}, "history.values() must have shape [N, D] = [a"),
        ({"history": JaggedTensor.empty()}, "history.values() must have shape [N, D]"),
        (
            {"history": JaggedTensor(torch.zeros(0, 8), offsets=torch.zeros(0).long())},
            "history.offsets() must have shape [B + 1], got [0]",
        ),
        (
            {"history": JaggedTensor(torch.zeros(5, 8), offsets=torch.tensor([0, 2, 6]))},
            "history.offsets() must end at or before the 5 rows they divide, got 6",
        ),
        (
            {"target": JaggedTensor(torch.zeros(5, 8), offsets=torch.tensor([0, 2, 6]))},
            "target.offsets() must end at or before the 5 rows they divide, got 6",
        ),
        ({"timestamps": None}, "timestamps must be given where age_bias=True, got None"),
        ({"prior_weights": torch.ones(4)}, "prior_weights must have shape [N] = [5]"),
        ({"prior_weights": torch.ones(5).to("meta")}, "prior_weights must be on cpu"),
        (
            {"prior_weights": torch.tensor([1, 0, torch.inf, 1, 1])},
            "prior_weights must be finite, got inf at position 2",
        ),
        ({"timestamps": torch.zeros(4)}, "timestamps must have shape [N] = [5], got"),
        ({"timestamps": torch.zeros(5).to("meta")}, "timestamps must be on cpu as his"),
        ({"age_bias": False}, "timestamps must be None unless age_bias=True, got a"),
        ({"request_time": torch.zeros(3)}, "request_time must have shape [B] = [2]"),
        (
            {"request_time": torch.zeros(2), "timestamps": None, "age_bias": False},
            "request_time must be None without timestamps, got a tensor",
        ),
        (
            {"request_time": torch.zeros(2).to("meta")},
            "request_time must be on cpu as timestamps is, got meta",
        ),
        ({"recency_bias": False}, "recency_bias must be True with age_bias=True, got"),
        ({"num_heads": 3}, "num_heads must divide embed_dim 8, got 3"),
        ({"num_heads": 0}, "num_heads must divide embed_dim 8, got 0"),
        ({"embed_dim": 0, "num_heads": None}, "embed_dim must be at least 1, got 0"),
        ({"init": "alibi"}, "init must be 'recency' or 'mha', got 'alibi'"),
        ({"target_dim": 24}, "target must have shape [B, target_dim] = [2, 24], got [2, 8]"),
        (
            {"value_projection": False, "history_dim": 12},
            "history_dim must be embed_dim 8 where value_projection=False, got 12",
        ),
    ],
    NotImplementedError: [
        ({"history_dim": 513}, "history_dim must have a width of 1 to 512"),
    ],
}


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [(error, *case) for error, cases in ERRORS.items() for case in cases],
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
        ({"target": zeros([1, 3])}, TypeError, "target must be a tensor [B, C] or [B, T, C], got"),
        ({"target": torch.zeros(3, 8)}, ValueError, "target must have shape [B, target_dim] = [2,"),
        ({"history": torch.zeros(2, 5, 8)}, TypeError, "history must be a JaggedTensor, got a Te"),
        ({"timestamps": torch.zeros(5)}, ValueError, "timestamps must be None unless age_bias=Tr"),
        ({"prior_weights": torch.ones(5) / 0}, ValueError, "prior_weights must be finite, got inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_attention_weights_name_the_argument(change, error, message):
    arguments = {"target": torch.zeros(2, 8), "history": zeros([2, 3])}
    with pytest.raises(error) as raised:
        JaggedTargetAttention(8, 2).attention_weights(**arguments | change)
    assert str(raised.value).startswith(message)
