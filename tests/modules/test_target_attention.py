"""``JaggedTargetAttention`` against ``torch.nn.MultiheadAttention`` on each sample."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from tests.combinations import each_pair
from tests.fixtures import skip_unless_supported, sync_debug_mode
from tests.plain import plain_attention
from torchrec_jagged_attn import JaggedTargetAttention, jagged_target_attention
from torchrec_jagged_attn.arguments import MultiHeadArguments
from torchrec_jagged_attn.devices import supported_dtypes
from torchrec_jagged_attn.modules.recency_bias import RecencyBias
from torchrec_jagged_attn.modules.target_attention import OUTPUT_DROPOUT, ROW_DROPOUT
from torchrec_jagged_attn.ops import flash_attention, target_attention
from torchrec_jagged_attn.ops.multi_head_target_attention import is_explicit
from torchrec_jagged_attn.testing import (
    CASES,
    Case,
    assert_close,
    assert_matches_oracle,
    flash_attention_plain,
    jagged_lengths,
    offsets_of,
    outputs_and_gradients,
)

CPU = torch.device("cpu")
SMALL_CASES = [name for name, case in CASES.items() if not case.large]
NOW = 1_700_000_000  # seconds since 1970


ROADS = ["absorbed", "explicit"]


@pytest.fixture(params=ROADS)
def road(request):
    """How keys and values are taken, as an option of the module."""
    return {"keys_and_values": request.param}


def each_pair_by_dtype(interpreted, in_bf16, *axes):
    """Each pair with either, and so each among those that the interpreter has a dtype for."""
    return each_pair(interpreted, *axes) + each_pair(in_bf16, *axes)


def make_inputs(
    module,
    lengths,
    device=CPU,
    dtype=torch.float32,
    *,
    targets=None,
    index_dtype=torch.int64,
    seed=0,
):
    """Random arguments of :func:`attend`, and random parameters of a usual size.

    ``targets``: ``None`` for ``[B, C]``, a number for ``[B, T, C]``, or a number for each sample.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.as_tensor(lengths, dtype=torch.int64)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    shape = [lengths.numel()] if targets is None else [lengths.numel(), targets]
    inputs = {}
    if not isinstance(targets, (int, type(None))):
        targets = torch.as_tensor(targets, dtype=torch.int64)
        shape = [int(targets.sum())]
        inputs["target_offsets"] = offsets_of(targets, index_dtype, device)
    inputs |= {
        "target": draw(*shape, module.target_dim),
        "history": draw(int(lengths.sum()), module.history_dim),
        "offsets": offsets_of(lengths, index_dtype, device),
    }
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[1] if "proj" in name and parameter.dim() == 2 else 1
        inputs[name] = draw(*parameter.shape) / (2 * fan_in) ** 0.5
    return inputs


def inputs_of_case(module, case, device, targets=None):
    generator = torch.Generator().manual_seed(0)
    lengths = jagged_lengths(case.batch_size, case.max_length, case.lengths, generator)
    return make_inputs(
        module, lengths, device, case.dtype, targets=targets, index_dtype=case.index_dtype
    )


def attend(
    module,
    *,
    target,
    history,
    offsets,
    target_offsets=None,
    timestamps=None,
    prior_weights=None,
    indices=None,
    **parameters,
):
    """``module`` with ``parameters`` in place of its own."""
    if target_offsets is not None:
        target = JaggedTensor(target, offsets=target_offsets)
    history = JaggedTensor(history, offsets=offsets)
    arguments = (target, history, timestamps, prior_weights, indices)
    return functional_call(module, parameters, arguments, strict=True)


def bucket(distance, num_buckets):
    """⌊4 log2(1 + distance)⌋, in exact arithmetic for integers."""
    return min(int((1 + distance) ** 4).bit_length() - 1, num_buckets - 1)


def projected(embed_dim, num_heads, **options):
    """A module that projects values, also where it does not have to."""
    return plain_attention(embed_dim, num_heads, value_projection=True, **options)


def attend_by_sample(
    module,
    *,
    target,
    history,
    offsets,
    target_offsets=None,
    timestamps=None,
    prior_weights=None,
    weights=None,
    **parameters,
):
    """The same by ``nn.MultiheadAttention``, sample for sample, with the bias as a mask.

    And with the logarithms of prior weights, on the rows that these leave. Values that the module
    does not project are projected by the identity. Weights ``[L, T, H]`` of each sample are added
    to the list ``weights``.
    """
    if not module.value_projection:
        parameters = with_identities(module, parameters)
    tables = {name: parameters.pop(name) for name in list(parameters) if "recency_bias" in name}
    if module.target_dim != module.embed_dim:  # which it does not know: queries are made before
        target = F.linear(target, parameters.pop("q_proj_weight"))
        identity = torch.eye(module.embed_dim, dtype=target.dtype, device=target.device)
        if module.history_dim == module.embed_dim:
            others = [parameters.pop(f"{name}_proj_weight") for name in "kv"]
            parameters["in_proj_weight"] = torch.cat([identity, *others])
        else:
            parameters["q_proj_weight"] = identity
    mha = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        bias="in_proj_bias" in parameters,
        kdim=module.history_dim,
        vdim=module.history_dim,
        device="meta",
    )
    lengths = offsets.diff().tolist()
    if target_offsets is not None:
        targets = target.split(target_offsets.diff().tolist())
    else:
        targets = (target if target.dim() == 3 else target.unsqueeze(1)).unbind()
    times = [None] * len(lengths) if timestamps is None else timestamps.split(lengths)
    if prior_weights is None:
        prior_weights = history.new_ones(len(history))
    priors = prior_weights.split(lengths)
    outs = [target.new_zeros(0, module.embed_dim)]
    for q_TE, x_LD, t_L, w_L in zip(targets, history.split(lengths), times, priors, strict=True):
        left = w_L > 0
        p_LTH = x_LD.new_zeros(len(x_LD), len(q_TE), module.num_heads)
        if weights is not None:
            weights.append(p_LTH)
        if not left.any():
            out_bias = parameters.get("out_proj.bias")
            outs.append(F.linear(torch.zeros_like(q_TE), parameters["out_proj.weight"], out_bias))
            continue
        if len(q_TE) == 0:
            continue
        mask = w_L.masked_fill(~left, 1).log().unsqueeze(1).expand(-1, module.num_heads)
        if tables:
            table = tables["recency_bias.position_weight"]
            positions = range(len(x_LD) - 1, -1, -1)
            mask = mask + table[[bucket(position, len(table)) for position in positions]]
        if t_L is not None:
            table = tables["recency_bias.age_weight"]
            ages = [max(t_L[-1].item() - time, 0) for time in t_L.tolist()]
            mask = mask + table[[bucket(age, len(table)) for age in ages]]
        x_LD, mask = x_LD[left], mask[left].to(x_LD.dtype)
        mask = mask.T.unsqueeze(1).expand(-1, len(q_TE), -1)
        options = {"attn_mask": mask, "average_attn_weights": False}
        out, p_HTL = functional_call(mha, parameters, (q_TE, x_LD, x_LD), options, strict=True)
        outs.append(out)
        p_LTH[left] = p_HTL.detach().permute(2, 1, 0).to(p_LTH.dtype)
    out = torch.cat(outs)
    return out if target_offsets is not None else out.view(target.shape)


def with_identities(module, parameters):
    """Those of a module that has the same queries and keys, and projects values by the identity."""
    width, history_dim = module.k_proj_weight.shape
    q_weight, k_weight = (parameters[f"{name}_proj_weight"] for name in "qk")
    identity = torch.eye(width, dtype=k_weight.dtype, device=k_weight.device)
    full = {name: x for name, x in parameters.items() if "_proj_" not in name}
    full["out_proj.weight"] = identity
    if module.target_dim == history_dim == width:
        full["in_proj_weight"] = torch.cat([q_weight, k_weight, identity])
    else:
        full |= {"q_proj_weight": q_weight, "k_proj_weight": k_weight, "v_proj_weight": identity}
    if "in_proj_bias" in parameters:
        zeros = k_weight.new_zeros(width)
        full["in_proj_bias"] = torch.cat([parameters["in_proj_bias"], zeros, zeros])
        full["out_proj.bias"] = zeros
    return full


def attend_by_formula(module, *, target, history, offsets, timestamps=None, **parameters):
    """The textbook formula, its projections of all rows at once; without a recency bias."""
    if "in_proj_weight" in parameters:
        q_weight, k_weight, v_weight = parameters["in_proj_weight"].chunk(3)
    else:
        q_weight, k_weight, v_weight = (parameters[f"{name}_proj_weight"] for name in "qkv")
    biases = parameters["in_proj_bias"].chunk(3) if "in_proj_bias" in parameters else [None] * 3
    queries = target.view(-1, module.target_dim)
    num_targets = len(queries) // max(len(target), 1)
    q, k, v = (
        F.linear(rows, weight, bias).unflatten(1, (module.num_heads, -1))
        for rows, weight, bias in zip(
            (queries, history, history), (q_weight, k_weight, v_weight), biases, strict=True
        )
    )
    query_offsets = num_targets * torch.arange(len(target) + 1, device=offsets.device)
    out = flash_attention_plain(q, k, v, query_offsets, offsets).flatten(1)
    out = F.linear(out, parameters["out_proj.weight"], parameters.get("out_proj.bias"))
    return out.view(*target.shape[:-1], module.embed_dim)


def assert_right(module, inputs, plain=attend_by_sample, timestamps=None):
    assert_matches_oracle(
        lambda **inputs: attend(module, timestamps=timestamps, **inputs),
        lambda **inputs: attend_by_sample(module, timestamps=timestamps, **inputs),
        lambda **inputs: plain(module, timestamps=timestamps, **inputs),
        inputs,
    )


def module_of_case(case, **options):
    """A module without weights of its own, over rows of the case's width."""
    embed_dim = case.width if case.width % case.num_heads == 0 else 8 * case.num_heads
    return projected(embed_dim, case.num_heads, history_dim=case.width, device="meta", **options)


@pytest.mark.parametrize(
    ("name", "bias", "road"), each_pair(SMALL_CASES, [True, False], ROADS), indirect=["road"]
)
def test_is_multihead_attention(name, bias, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, bias=bias, recency_bias=False, **road)
    targets = None if case.num_targets == 1 else case.num_targets
    assert_right(module, inputs_of_case(module, case, device, targets), attend_by_formula)


@pytest.mark.parametrize(
    ("name", "bias", "embed_dim", "road"),
    each_pair_by_dtype(["targets-48", "fp16-64"], ["bf16-96"], [True, False], [32, 128], ROADS),
    indirect=["road"],
)
def test_history_of_another_width(name, bias, embed_dim, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = projected(
        embed_dim,
        case.num_heads,
        history_dim=case.width,
        bias=bias,
        recency_bias=False,
        device="meta",
        **road,
    )
    assert_right(module, inputs_of_case(module, case, device, case.num_targets))


@pytest.mark.parametrize(
    ("widths", "target_dim", "targets", "road"),
    each_pair_by_dtype(
        [("targets-48", 32, 48), ("fp16-64", 48, 48)],
        [("bf16-96", 32, 96)],
        [20, 144],
        [None, 5, [0, 3, 1, 0, 9]],
        ROADS,
    ),
    ids=str,
    indirect=["road"],
)
def test_targets_of_another_width(widths, target_dim, targets, road, device):
    name, embed_dim, history_dim = widths
    case = CASES[name]
    skip_unless_supported(case, device)
    module = projected(
        embed_dim,
        case.num_heads,
        history_dim=history_dim,
        target_dim=target_dim,
        device="meta",
        **road,
    )
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, case.dtype, targets=targets)
    assert attend(module, **inputs).shape == (*inputs["target"].shape[:-1], embed_dim)
    assert_right(module, inputs)


@pytest.mark.parametrize(
    ("num_targets", "jagged", "road"),
    each_pair([1, 2, 15, 16, 17, 33, 64, 70], [False, True], ROADS),
    indirect=["road"],
)
def test_any_number_of_targets(num_targets, jagged, road, device):
    module = projected(16, 2, age_bias=True, device="meta", **road)
    targets = [num_targets, 3, 0, 1, 9] if jagged else num_targets
    inputs = make_inputs(module, [40, 0, 30, 1, 20], device, torch.float16, targets=targets)
    assert_right(module, inputs, timestamps=torch.arange(91, device=device) ** 2)


def test_gradients_of_biases_over_many_targets(road, device):
    """Sums of thousands of targets, and of about as many rows."""
    module = projected(32, 2, recency_bias=False, device="meta", **road)
    inputs = make_inputs(module, [1100, 0, 900, 20], device, targets=1024)
    assert_right(module, inputs, attend_by_formula)


@pytest.mark.parametrize("recency_bias", [True, False], ids=["recency", "no-recency"])
@pytest.mark.parametrize("name", ["targets-48", "fp16-64", "bf16-targets-128"])
def test_jagged_targets(name, recency_bias, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, recency_bias=recency_bias, **road)
    targets = jagged_lengths(case.batch_size, 20, "edges", torch.Generator().manual_seed(1))
    assert (targets == 0).any()
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize("name", SMALL_CASES)
def test_bias_by_position(name, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, **road)
    targets = None if case.num_targets == 1 else case.num_targets
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize(
    ("times", "name", "road"),
    each_pair(
        [
            "seconds-since-1970",
            "microseconds-since-1970",
            "days-in-fp64",
            "seconds-in-int32",
            "unordered",
            "all-equal",
        ],
        ["one-head", "targets-48", "fp16-64"],
        ROADS,
    ),
    indirect=["road"],
)
def test_bias_by_age(name, times, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, age_bias=True, **road)
    inputs = inputs_of_case(module, case, device, case.num_targets)
    generator = torch.Generator().manual_seed(2)
    ages = 2 ** (40 * torch.rand(len(inputs["history"]), generator=generator, dtype=torch.float64))
    lengths = inputs["offsets"].diff().tolist()
    unordered, ages = ages, torch.cat([a.sort(descending=True)[0] for a in ages.split(lengths)])
    timestamps = {
        "seconds-since-1970": NOW - (ages / 2**10).long(),
        "microseconds-since-1970": NOW * 10**6 - ages.long(),
        "days-in-fp64": NOW / 86400 - ages / 2**30,
        "seconds-in-int32": (NOW - (ages / 2**10).long()).int(),
        "unordered": NOW - unordered.long(),
        "all-equal": torch.full_like(ages, NOW).long(),
    }[times]
    assert_right(module, inputs, timestamps=timestamps.to(device))


@pytest.mark.parametrize(
    ("lengths", "targets", "road"),
    each_pair([[], [0], [0, 0, 0], [1], [0, 0, 70, 1, 0], [16] * 3], [None, 2, 0, "jagged"], ROADS),
    ids=str,
    indirect=["road"],
)
def test_edges(lengths, targets, road, device):
    module = projected(16, 2, age_bias=True, device="meta", **road)
    if targets == "jagged":
        targets = [b % 3 for b in range(len(lengths))]
    inputs = make_inputs(module, lengths, device, targets=targets)
    timestamps = torch.arange(len(inputs["history"]), device=device)
    assert_right(module, inputs, timestamps=timestamps)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_empty_history_gives_the_output_projection_of_zero(bias, road, device):
    module = projected(16, 2, bias=bias, **road).to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    target = torch.randn(3, 2, 16, device=device, requires_grad=True)
    rows = torch.randn(4, 16, device=device)
    out = module(target, JaggedTensor(rows, lengths=torch.tensor([0, 4, 0], device=device)))
    expected = module.out_proj(torch.zeros(16, device=device))
    assert torch.equal(out[[0, 2]], expected.expand(2, 2, 16))
    out[[0, 2]].sum().backward()
    for name, parameter in module.named_parameters():  # each has a gradient: DDP waits for all
        expected = torch.zeros_like(parameter)
        if name == "out_proj.bias":
            expected += 4
        assert torch.equal(parameter.grad, expected), name
    assert torch.equal(target.grad, torch.zeros_like(target))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("history_dim", [16, 20])
def test_state_dict_moves_both_ways(history_dim, bias, road):
    module = projected(16, 2, history_dim=history_dim, bias=bias, recency_bias=False, **road)
    mha = nn.MultiheadAttention(
        16, 2, bias=bias, kdim=history_dim, vdim=history_dim, batch_first=True
    )
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.3)
    module.load_state_dict(mha.state_dict(), strict=True)
    rows = torch.randn(3, 5, history_dim)
    target = torch.randn(3, 4, 16)
    history = JaggedTensor(rows.flatten(0, 1), lengths=torch.full((3,), 5))
    expected, _ = mha(target, rows, rows)
    torch.testing.assert_close(module(target, history), expected)

    other = copy.deepcopy(mha)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(other(target, rows, rows)[0], expected)
    assert [*module.state_dict()] == [*mha.state_dict()]


# Dtypes that differ


def attend_by_sample_in(dtype):
    """``nn.MultiheadAttention`` in ``dtype``, whatever its inputs; the output as ``out_proj``'s."""

    def plain(module, timestamps=None, **inputs):
        cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in inputs.items()}
        out = attend_by_sample(module, timestamps=timestamps, **cast)
        return out.to(next(x.dtype for name, x in inputs.items() if "proj" in name))

    return plain


@pytest.mark.parametrize(
    ("history_dtype", "target_dtype", "targets", "recency_bias", "road"),
    each_pair_by_dtype(
        [torch.float16],
        [torch.bfloat16],
        [torch.float32, torch.float16, torch.bfloat16],
        [None, 3, [0, 3, 1, 0, 2]],
        [True, False],
        ROADS,
    ),
    ids=str,
    indirect=["road"],
)
def test_half_history_with_fp32_weights(
    history_dtype, target_dtype, targets, recency_bias, road, device
):
    case = CASES["fp16-64" if history_dtype == torch.float16 else "bf16-96"]
    skip_unless_supported(case, device)
    module = module_of_case(case, recency_bias=recency_bias, **road)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, targets=targets)
    inputs = {"out_proj.weight": inputs.pop("out_proj.weight"), **inputs}  # its dtype is out's
    inputs["history"] = inputs["history"].to(history_dtype)
    inputs["target"] = inputs["target"].to(target_dtype)
    assert_right(module, inputs, attend_by_sample_in(history_dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp32_history_with_half_weights(dtype, road, device):
    case = CASES["fp16-64" if dtype == torch.float16 else "bf16-96"]
    skip_unless_supported(case, device)
    module = module_of_case(case, **road)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, dtype)
    inputs = {"out_proj.weight": inputs.pop("out_proj.weight"), **inputs}
    inputs["history"] = inputs["history"].float()
    assert_right(module, inputs, attend_by_sample_in(dtype))


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
def test_autocast(device, dtype, targets, kind, road):
    if kind == "rows":
        module = module_of_rows(32, 2, **road)
    else:
        module = module_of_case(CASES["wide-20"], recency_bias=kind == "recency", **road)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, targets=targets)

    def autocast(function):
        def run(**inputs):
            with torch.autocast(device, dtype):
                return function(module, **inputs).float()

        return run

    with torch.autocast(device, dtype):
        assert attend(module, **inputs).dtype == dtype
    assert_matches_oracle(
        autocast(attend),
        lambda **inputs: attend_by_sample(module, **inputs),
        autocast(attend_by_sample),
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
    module = projected(16, 2, keys_and_values="explicit")
    out = module(torch.randn(2, 16), JaggedTensor(rows, lengths=torch.tensor([2, 3])))
    out.sum().backward()
    assert out.dtype == torch.float32
    for other, k, v in seen:
        assert other.dtype == k.dtype == v.dtype == history_dtype
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert k.shape == v.shape == (5, 2, 8)
        assert k.stride() == v.stride() == (32, 8, 1)
    assert len(seen) == 2


# Without a projection of values


def module_of_rows(embed_dim, num_heads, **options):
    """Without weights of its own."""
    return plain_attention(embed_dim, num_heads, value_projection=False, device="meta", **options)


@pytest.mark.parametrize(
    ("name", "bias", "road"),
    each_pair(
        [name for name in SMALL_CASES if CASES[name].width % CASES[name].num_heads == 0],
        [True, False],
        ROADS,
    ),
    indirect=["road"],
)
def test_rows_that_are_not_projected(name, bias, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_rows(case.width, case.num_heads, bias=bias, **road)
    targets = None if case.num_targets == 1 else case.num_targets
    assert_right(module, inputs_of_case(module, case, device, targets))


@pytest.mark.parametrize(
    ("name", "target_dim", "targets", "road"),
    each_pair_by_dtype(
        ["targets-48", "fp16-64"],
        ["bf16-96"],
        [20, 96, 144],
        [None, 5, [0, 3, 1, 0, 9]],
        ROADS,
    ),
    ids=str,
    indirect=["road"],
)
def test_rows_that_are_not_projected_and_any_targets(name, target_dim, targets, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_rows(96, 3, target_dim=target_dim, age_bias=True, **road)
    lengths = [7, 0, 60, 1, 20]
    inputs = make_inputs(module, lengths, device, case.dtype, targets=targets)
    inputs["prior_weights"] = draw_prior_weights(lengths, device)
    assert_right(module, inputs, timestamps=torch.arange(88, device=device) ** 2)


@pytest.mark.parametrize(
    ("lengths", "targets", "road"),
    each_pair([[], [0], [0, 0, 0], [1], [0, 0, 70, 1, 0]], [None, 2, 0, "jagged"], ROADS),
    ids=str,
    indirect=["road"],
)
def test_edges_of_rows_that_are_not_projected(lengths, targets, road, device):
    module = module_of_rows(16, 2, **road)
    if targets == "jagged":
        targets = [b % 3 for b in range(len(lengths))]
    assert_right(module, make_inputs(module, lengths, device, targets=targets))


@pytest.mark.parametrize(("width", "num_heads"), [(16, 1), (16, 16), (144, 1)])
def test_own_columns_are_all_or_one(width, num_heads, road, device):
    """Also of a head that is too wide for kernels of products."""
    module = module_of_rows(width, num_heads, **road)
    assert_right(module, make_inputs(module, [5, 0, 40], device, targets=3))


@pytest.mark.parametrize(
    ("dtypes", "targets", "recency_bias", "road"),
    each_pair_by_dtype(
        [(torch.float32, torch.float16), (torch.float16, torch.float32)],
        [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
        [None, [0, 3, 1, 0, 2]],
        [True, False],
        ROADS,
    ),
    ids=str,
    indirect=["road"],
)
def test_dtypes_that_differ_without_a_value_projection(dtypes, targets, recency_bias, road, device):
    dtype, history_dtype = dtypes
    half = min(dtype, history_dtype, key=lambda x: x.itemsize)
    skip_unless_supported(CASES["fp16-64" if half == torch.float16 else "bf16-96"], device)
    module = module_of_rows(32, 2, recency_bias=recency_bias, **road)
    inputs = make_inputs(module, [7, 0, 60, 1, 20], device, dtype, targets=targets)
    inputs = {"q_proj_weight": inputs.pop("q_proj_weight"), **inputs}  # its dtype is out's
    inputs["history"] = inputs["history"].to(history_dtype)
    assert_right(module, inputs, attend_by_sample_in(half))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_empty_history_gives_zeros_without_a_value_projection(bias, road, device):
    module = plain_attention(16, 2, value_projection=False, bias=bias, **road).to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    target = torch.randn(3, 2, 16, device=device, requires_grad=True)
    rows = torch.randn(4, 16, device=device)
    out = module(target, JaggedTensor(rows, lengths=torch.tensor([0, 4, 0], device=device)))
    assert torch.all(out[[0, 2]] == 0)
    assert torch.all(out[1] != 0)
    out[[0, 2]].sum().backward()
    for tensor in (target, *module.parameters()):  # each has a gradient: DDP waits for all
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("target_dim", [16, 20])
def test_parameters_without_a_value_projection(target_dim, bias):
    options = {"target_dim": target_dim, "bias": bias}
    module = plain_attention(16, 2, value_projection=False, **options)
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
    module = plain_attention(64, 4, value_projection=False, **options)
    other = projected(64, 4, **options)
    if target_dim == 64:
        expected = other.in_proj_weight[:64], other.in_proj_weight[64:128]
    else:
        expected = other.q_proj_weight, other.k_proj_weight
    for ours, theirs in zip((module.q_proj_weight, module.k_proj_weight), expected, strict=True):
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.02)
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
    assert torch.all(module.in_proj_bias == 0)


class OfTensors(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, target, rows, offsets):
        return self.module(target, JaggedTensor(rows, offsets=offsets))


def assert_exports(module, device):
    """With any number of samples."""
    module = OfTensors(module).to(device).eval()
    shapes = [{0: torch.export.Dim.DYNAMIC}] * 3

    def tensors(lengths):
        target, history = example(module.module, lengths, device, num_targets=1)
        return target.squeeze(1), history.values(), history.offsets()

    exported = torch.export.export(module, tensors([5, 0, 40]), dynamic_shapes=shapes).module()
    for lengths in ([5, 0, 40], [7, 1, 0, 30, 2]):
        inputs = tensors(lengths)
        assert torch.equal(exported(*inputs), module(*inputs))


def test_exports_without_a_value_projection(road, device):
    module = JaggedTargetAttention(16, 2, value_projection=False, **road)
    nn.init.normal_(module.length_power)
    assert_exports(module, device)


def test_exports_an_activation_unit(device):
    assert_exports(JaggedTargetAttention(16, 1, score="din"), device)


def test_values_are_the_rows_of_the_history(monkeypatch):
    """No copy of them, whatever their strides are."""
    seen = []
    attend = flash_attention.forward
    monkeypatch.setattr(flash_attention, "forward", lambda x: seen.append(x) or attend(x))
    module = plain_attention(16, 2, value_projection=False, keys_and_values="explicit")
    target, lengths = torch.randn(2, 16), torch.tensor([2, 3])
    rows = torch.randn(5, 24)[:, 4:20].requires_grad_()
    out = module(target, JaggedTensor(rows, lengths=lengths))
    out.sum().backward()
    assert seen[0].v.data_ptr() == rows.data_ptr()
    assert seen[0].v.stride() == (24, 8, 1)
    same = rows.detach().clone().requires_grad_()
    assert torch.equal(module(target, JaggedTensor(same, lengths=lengths)), out)
    module(target, JaggedTensor(same, lengths=lengths)).sum().backward()
    assert torch.equal(same.grad, rows.grad)


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
    expected = attend_by_sample(module, **exact)
    assert_close(out, expected, attend_by_sample_in(dtype)(module, **arguments))


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
def test_all_ways_to_write_a_jagged_tensor(index_dtype, road, device):
    module = projected(16, 2, age_bias=True, **road).to(device)
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
            torch.testing.assert_close(actual[name], value)
    strided = results(
        lambda x: JaggedTensor(x, offsets=offsets), rows, times.repeat_interleave(2)[::2]
    )
    assert torch.equal(strided["out"], expected["out"])


# The bias


@pytest.mark.parametrize(
    ("option", "num_buckets", "first"),
    [
        ("position_bias", RecencyBias.POSITION_BUCKETS, 55_108),
        ("age_bias", RecencyBias.AGE_BUCKETS, 2**39.75 - 1),
    ],
)
def test_last_bucket_has_no_end(option, num_buckets, first, device):
    if option == "age_bias":
        distances = torch.tensor([2.0**60, 2.0**40, 1.001 * first, 0.999 * first, 2**20, 0]).long()
        timestamps = {"timestamps": 2**61 - distances.to(device)}
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


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 0]),
        (4, [2**-2, 2**-4, 2**-6, 0]),
        (3, [2 ** (-8 / 3), 2 ** (-16 / 3), 0]),
    ],
)
def test_bias_starts_at_the_slopes_of_alibi(num_heads, slopes):
    bias = RecencyBias(num_heads, ages=True)
    assert torch.all(bias.age_weight == 0)
    start = bias.position_weight.detach()[[bucket(n, 64) for n in range(1024)]]
    slopes = torch.tensor(slopes)
    line = torch.arange(1024).unsqueeze(1) * -slopes
    octaves = 2 ** torch.arange(11) - 1
    torch.testing.assert_close(start[octaves], line[octaves])
    # Within a bucket it is flat: up to a quarter of an octave above the line, never below.
    assert torch.all(start >= line - 1e-5)
    assert torch.all(start <= (line - slopes) / 2**0.25 + slopes + 1e-5)


# Prior weights


def draw_prior_weights(lengths, device=CPU, dtype=torch.float32):
    """About a third of them zeros, and all of the longest sample but one.

    None is small: its gradient has it as a divisor, and would be larger than all others.
    """
    generator = torch.Generator().manual_seed(3)
    weights = 1 + 2 * torch.rand(sum(lengths), generator=generator)
    weights = weights.masked_fill(torch.rand(sum(lengths), generator=generator) < 0.3, 0)
    by_sample = list(weights.split(lengths))
    longest_but_one = sorted(range(len(lengths)), key=lambda b: lengths[b])[-2]
    by_sample[longest_but_one].zero_()
    return weights.to(device, dtype)


@pytest.mark.parametrize(
    ("name", "targets", "recency", "road"),
    each_pair_by_dtype(
        ["targets-48", "fp16-64"],
        ["bf16-96"],
        [None, 3, 40, [0, 3, 1, 9, 2]],
        [{"age_bias": True}, {"recency_bias": False}],
        ROADS,
    ),
    ids=str,
    indirect=["road"],
)
def test_prior_weights(name, recency, targets, road, device):
    case = CASES[name]
    skip_unless_supported(case, device)
    module = module_of_case(case, **recency, **road)
    lengths = [70, 0, 30, 1, 20]
    inputs = make_inputs(module, lengths, device, case.dtype, targets=targets)
    inputs["prior_weights"] = draw_prior_weights(lengths, device)
    timestamps = torch.arange(121, device=device) ** 2 if recency.get("age_bias") else None
    assert_right(module, inputs, timestamps=timestamps)


def test_removed_rows_are_an_empty_history(road, device):
    module = projected(16, 2, **road).to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
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
        module.zero_grad()
        out = module(target, JaggedTensor(x, lengths=of_samples), prior_weights=w)
        out.square().sum().backward()
        results.append((out, x.grad, [parameter.grad for parameter in module.parameters()]))
    (out, grad, grads), (expected, expected_grad, expected_grads) = results
    assert torch.equal(out[[0, 2]], module.out_proj.bias.expand(2, 4, 16))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad[3:7], expected_grad)
    assert torch.all(grad[[0, 1, 2, 4, 7, 8]] == 0)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("value_projection", [True, False])
def test_prior_weights_travel(value_projection, device):
    """Through FX, TorchScript and a compiler."""
    module = plain_attention(16, 2, value_projection=value_projection).to(device)
    target, history = example(module, [5, 0, 40], device)
    weights = draw_prior_weights([5, 0, 40], device)
    expected = module(target, history, prior_weights=weights)
    assert not torch.allclose(expected, module(target, history))
    traced = torch.fx.symbolic_trace(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for same in (traced, torch.jit.script(traced), torch.jit.script(module), compiled):
        assert torch.equal(same(target, history, None, weights), expected)


# How it starts, and how it travels


@pytest.mark.parametrize("value_projection", [True, False])
def test_recency_init_without_scores_is_recency_weighted_pooling(value_projection, device):
    """Each head pools its own slice of the rows, by recency alone."""
    torch.manual_seed(0)
    module = plain_attention(12, 3, value_projection=value_projection).to(device)
    with torch.no_grad():
        (module.in_proj_weight[:12] if value_projection else module.q_proj_weight).zero_()
    lengths = [40, 0, 1, 7]
    rows = torch.randn(48, 12, device=device)
    history = JaggedTensor(rows, lengths=torch.tensor(lengths, device=device))
    out = module(torch.randn(4, 12, device=device), history)

    def pooled(dtype):
        table = module.recency_bias.position_weight.detach().to(dtype)
        outs = []
        for x_LD in rows.to(dtype).split(lengths):
            recency = table[[bucket(n, 64) for n in range(len(x_LD) - 1, -1, -1)]]
            weights = torch.exp(recency).repeat_interleave(4, 1)
            mean = (weights * x_LD).sum(0) / weights.sum(0)
            outs.append(mean if len(x_LD) else torch.zeros_like(mean))
        return torch.stack(outs)

    assert_close(out.detach(), pooled(torch.float64), pooled(torch.float32))
    flat = out[:, 8:].detach()  # the last head: the mean
    torch.testing.assert_close(flat[0], rows[:40, 8:].mean(0))
    newest_first = pooled(torch.float64)[0, :4] - rows[:40, :4].mean(0)
    assert newest_first.abs().max() > 0.01, "the other heads are no mean"


@pytest.mark.parametrize(
    ("init", "history_dim"), [("mha", 64), ("mha", 48), ("recency", 48)], ids=str
)
def test_init_has_the_distribution_of_multihead_attention(init, history_dim):
    torch.manual_seed(0)
    module = projected(64, 4, history_dim=history_dim, recency_bias=False, init=init)
    mha = nn.MultiheadAttention(64, 4, kdim=history_dim, vdim=history_dim)
    for name, theirs in mha.state_dict().items():
        ours = module.state_dict()[name]
        if init == "recency" and name == "q_proj_weight":
            assert torch.all(ours == 0)
            continue
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.02), name
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05), name
        if name.endswith("bias"):
            assert torch.all(ours == 0), name


def test_recency_init_is_the_same_whatever_the_targets_width():
    module = projected(64, 4, target_dim=20)
    assert torch.equal(module.v_proj_weight, torch.eye(64))
    assert torch.equal(module.out_proj.weight, torch.eye(64))
    assert module.q_proj_weight.shape == (64, 20)
    other = projected(64, 4, history_dim=20, target_dim=20)
    assert not torch.equal(other.out_proj.weight, torch.eye(64))


def test_recency_init_starts_keys_as_multihead_attention_does_and_queries_at_zero():
    torch.manual_seed(0)
    queries, ours, _ = projected(64, 4).in_proj_weight.chunk(3)
    assert torch.all(queries == 0)
    theirs = nn.MultiheadAttention(64, 4).in_proj_weight[64 : 2 * 64]
    assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.02)
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)


OPTIONS = {
    "default": {},
    "values": {"value_projection": True},
    "ages": {"age_bias": True},
    "mha": {"init": "mha"},
    "another-width": {"history_dim": 20},
    "another-target-width": {"target_dim": 20},
    "half-without-bias": {"bias": False, "dtype": torch.bfloat16},
    "no-recency": {"recency_bias": False},
    "explicit": {"value_projection": True, "age_bias": True, "keys_and_values": "explicit"},
    "explicit-another-width": {"history_dim": 20, "keys_and_values": "explicit"},
    "explicit-all-widths": {"history_dim": 20, "target_dim": 24, "keys_and_values": "explicit"},
    "rows": {"value_projection": False},
    "rows-without-bias": {"value_projection": False, "bias": False, "age_bias": True},
    "explicit-rows": {"value_projection": False, "target_dim": 20, "keys_and_values": "explicit"},
}


def reset_whole(module):
    module.to_empty(device="cpu")
    torch.manual_seed(1)
    module.reset_parameters()


def reset_as_torchrec_does(module):
    """What DistributedModelParallel does to modules on the meta device: children first."""

    def reset(child):
        if child._parameters:
            child.to_empty(device="cpu", recurse=False)
            torch.manual_seed(1)
            child.reset_parameters()

    module.apply(reset)


@pytest.mark.parametrize("reset", [reset_whole, reset_as_torchrec_does])
@pytest.mark.parametrize("name", OPTIONS)
def test_from_the_meta_device(name, reset):
    module = plain_attention(16, 2, device="meta", **OPTIONS[name])
    assert all(parameter.is_meta for parameter in module.parameters())
    reset(module)
    expected = plain_attention(16, 2, **OPTIONS[name])
    torch.manual_seed(1)
    expected.reset_parameters()
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=0)


def example(module, lengths, device=CPU, num_targets=3, seed=0, jagged=False):
    """Arguments of ``module``, on ``device``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    target = draw(len(lengths), num_targets, module.target_dim)
    if jagged:
        counts = torch.tensor([b * num_targets % 4 for b in range(len(lengths))], device=device)
        target = JaggedTensor(draw(int(counts.sum()), module.target_dim), lengths=counts)
    rows = draw(sum(lengths), module.history_dim)
    history = JaggedTensor(rows, lengths=torch.tensor(lengths, device=device))
    if module.recency_bias is None or module.recency_bias.age_weight is None:
        return target, history
    return target, history, torch.arange(sum(lengths), device=device) ** 2


@pytest.mark.parametrize("name", [name for name in OPTIONS if "half" not in name])
def test_copies_compute_the_same(name, tmp_path):
    module = plain_attention(16, 2, **OPTIONS[name])
    arguments = example(module, [5, 0, 40])
    expected = module(*arguments)
    loaded = plain_attention(16, 2, **OPTIONS[name])
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"), strict=True)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded]
    copies.append(copy.deepcopy(module).eval())
    for other in copies:
        assert repr(other).splitlines()[0] == repr(module).splitlines()[0]
        assert torch.equal(other(*arguments), expected)


# Attention weights


def with_parameters(name, inputs, **options):
    """A module of :data:`OPTIONS` that has the parameters among ``inputs``, taken out of these."""
    module = plain_attention(16, 2, **OPTIONS[name], **options)
    module.load_state_dict({key: inputs.pop(key) for key in module.state_dict()})
    return module.to(inputs["history"].device)


def weights_of(module, *, target, history, offsets, **more):
    return module.attention_weights(target, JaggedTensor(history, offsets=offsets), **more).values()


@pytest.mark.parametrize(
    ("name", "prior", "targets"), each_pair(OPTIONS, [False, True], [None, 3, 40])
)
def test_attention_weights_are_those_of_multihead_attention(name, prior, targets, device):
    dtype = OPTIONS[name].get("dtype", torch.float32)
    skip_unless_supported(Case("weights", 5, 70, 2, 16, dtype=dtype), device)
    lengths = [70, 0, 30, 1, 20]
    module = plain_attention(16, 2, device="meta", **OPTIONS[name])
    inputs = make_inputs(module, lengths, device, dtype, targets=targets)
    if prior:
        inputs["prior_weights"] = draw_prior_weights(lengths, device, dtype)
    times = {}
    if OPTIONS[name].get("age_bias"):
        times["timestamps"] = torch.arange(121, device=device) ** 2
    exact = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    expected, plain = [], []
    for some, weights in ((exact, expected), (inputs, plain)):
        attend_by_sample(module, **some, **times, weights=weights)
    expected, plain = (torch.cat(weights) for weights in (expected, plain))
    if targets is None:
        expected, plain = expected.squeeze(1), plain.squeeze(1)
    actual = weights_of(with_parameters(name, inputs), **inputs, **times)
    assert_close(actual, expected, plain)


@pytest.mark.parametrize("score", ["softmax", "silu", "sigmoid"])
@pytest.mark.parametrize("name", ["default", "values", "another-width", "no-recency"])
def test_outputs_are_sums_by_attention_weights(name, score, device):
    """While training, too, which drops rows and weights of outputs alone."""
    dropout = {"row_dropout": 0.5, "dropout": 0.5, "score": score}
    module = plain_attention(16, 2, device="meta", **OPTIONS[name])
    inputs = make_inputs(module, [70], device, targets=3)
    module = with_parameters(name, inputs, **dropout)
    assert module.training
    pooled = torch.einsum("nth,nd->thd", weights_of(module, **inputs), inputs["history"])
    if module.value_projection:
        if module.in_proj_weight is not None:
            w_v = module.in_proj_weight[32:]
        else:
            w_v = module.v_proj_weight
        values = torch.einsum("thd,hed->the", pooled, w_v.view(2, 8, -1)).flatten(1)
        expected = module.out_proj(values + module.in_proj_bias[32:])
    else:
        expected = torch.cat([pooled[:, 0, :8], pooled[:, 1, 8:]], dim=1)
    history = JaggedTensor(inputs["history"], offsets=inputs["offsets"])
    actual = module.eval()(inputs["target"], history)[0]
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_attention_weights_have_the_lengths_of_the_history_and_no_gradient(device):
    module = plain_attention(16, 2, init="mha").to(device)
    target, history = example(module, [5, 0, 40], device)
    weights = module.attention_weights(target.requires_grad_(), history)
    assert weights.lengths().tolist() == [5, 0, 40]
    assert weights.values().shape == (45, 3, 2)
    assert not weights.values().requires_grad
    of_one = module.attention_weights(target[:, 1], history).values()
    torch.testing.assert_close(of_one, weights.values()[:, 1])


def test_attention_weights_under_autocast_have_the_dtype_of_the_history(device):
    module = plain_attention(16, 2, init="mha").to(device)
    target, history = example(module, [5, 0, 40], device)
    expected = module.attention_weights(target, history).values()
    with torch.autocast(device.type, torch.bfloat16):
        weights = module.attention_weights(target, history).values()
    assert weights.dtype == torch.float32
    assert not torch.equal(weights, expected)
    torch.testing.assert_close(weights, expected, atol=0.02, rtol=0.02)


def test_attention_weights_compile_once_for_all_batches(device):
    module = plain_attention(16, 2, age_bias=True).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        module.attention_weights, backend=counter, fullgraph=True, dynamic=True
    )
    for lengths, num_targets in (([9, 0, 2, 23], 3), ([30, 1, 0, 5, 8, 70, 4], 6)):
        arguments = example(module, lengths, device, num_targets)
        expected = module.attention_weights(*arguments).values()
        torch.testing.assert_close(compiled(*arguments).values(), expected)
    assert counter.frame_count == 1


def test_attention_weights_of_an_activation_unit_are_refused():
    module = plain_attention(16, 1, score="din")
    with pytest.raises(NotImplementedError, match="score must be one of softmax, silu, sigmoid f"):
        module.attention_weights(torch.zeros(2, 16), zeros([2, 3], 16))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 70, 1, 0]], ids=str)
def test_attention_weights_at_edges(lengths, device):
    for num_targets in (0, 2):
        module = plain_attention(16, 2, device="meta")
        inputs = make_inputs(module, lengths, device, targets=num_targets)
        weights = weights_of(with_parameters("default", inputs), **inputs)
        assert weights.shape == (sum(lengths), num_targets, 2)
        assert torch.isfinite(weights).all()


@pytest.mark.parametrize(
    ("name", "jagged"),
    [
        ("ages", False),
        ("another-width", True),
        ("another-target-width", False),
        ("no-recency", True),
        ("explicit", True),
        ("explicit-another-width", False),
        ("explicit-all-widths", True),
        ("rows", False),
        ("rows", True),
        ("explicit-rows", False),
    ],
)
def test_compiles_once_for_all_batches(name, jagged, device):
    module = plain_attention(64, 2, **OPTIONS[name]).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    # No two sizes of a batch are equal, so that none is taken for another; and targets are so few
    # that "auto" absorbs them all.
    for lengths, num_targets in (
        ([9, 0, 2, 23], 3),
        ([30, 1, 0, 5, 8, 70, 4], 6),
        ([2, 90, 31], 5),
    ):
        arguments = example(module, lengths, device, num_targets, jagged=jagged)
        results = []
        for run in (module, compiled):
            module.zero_grad()
            out = run(*arguments)
            out.square().sum().backward()
            results.append([out, *(parameter.grad for parameter in module.parameters())])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


def test_compiles_under_autocast():
    module = projected(16, 2)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    for run in (module, compiled):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*example(module, [5, 0, 40]))
        out.float().square().sum().backward()
        results.append([out, *(parameter.grad for parameter in module.parameters())])
    assert results[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(*results)


MANY = 40  # targets per sample of a module of 8 heads: explicit keys and values are the cheaper


@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
@pytest.mark.parametrize("history_dim", [64, 48])
def test_many_targets_take_explicit_keys_and_values(history_dim, jagged, device):
    """To the bit what that option gives, and few targets what the other gives."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randn(40, history_dim, generator=generator).to(device)
    history = JaggedTensor(history, lengths=torch.tensor([30, 0, 10], device=device))
    results = {}
    for option in ("auto", "absorbed", "explicit"):
        torch.manual_seed(0)
        module = projected(
            64, 8, history_dim=history_dim, keys_and_values=option
        ).to(device)  # fmt: skip
        for num_targets in (2, MANY):
            target = torch.randn(3 * num_targets, 64, generator=generator.manual_seed(1)).to(device)
            if jagged:
                lengths = torch.tensor([1, 3, 3 * num_targets - 4], device=device)
                target = JaggedTensor(target, lengths=lengths)
            else:
                target = target.view(3, num_targets, 64)
            module.zero_grad()
            out = module(target, history)
            out.square().sum().backward()
            gradients = [parameter.grad for parameter in module.parameters()]
            results[option, num_targets] = [out, *gradients]
    for num_targets, option, other in (
        (2, "absorbed", "explicit"),
        (MANY, "explicit", "absorbed"),
    ):
        chosen = results["auto", num_targets]
        assert all(map(torch.equal, chosen, results[option, num_targets]))
        assert not all(map(torch.equal, chosen, results[other, num_targets]))


def test_one_head_never_takes_explicit_keys_and_values_on_a_cpu():
    """It would save no arithmetic."""
    history = JaggedTensor(torch.randn(9, 16), lengths=torch.tensor([9]))
    target = torch.randn(1, 5000, 16)
    module = projected(16, 1)
    expected = module(target, history)
    module.keys_and_values = "absorbed"
    assert torch.equal(module(target, history), expected)


@pytest.mark.parametrize(
    ("device_type", "dtype", "num_samples", "most_absorbed", "least_explicit", "projected"),
    [
        ("cuda", torch.bfloat16, 1000, 18, 19, True),
        ("cuda", torch.bfloat16, 1000, 12, 13, False),
        ("cuda", torch.float32, 1000, 8, 9, True),
        ("cuda", torch.float32, 1000, 4, 5, False),
        ("cuda", torch.bfloat16, 1, 163, 164, True),  # too few to fill a GPU by themselves
        ("cpu", torch.float32, 1000, 46, 47, True),
        ("cpu", torch.float32, 1000, 26, 27, False),
        ("cpu", torch.float32, 1, 46, 47, True),
    ],
)
def test_auto_counts_what_either_way_takes(
    device_type, dtype, num_samples, most_absorbed, least_explicit, projected
):
    """As ``docs/target_attention.md`` has it, of 4 heads and width 128."""

    def makes_keys(num_targets, jagged):
        with FakeTensorMode():
            target = torch.empty(num_samples, num_targets, 128, device=device_type, dtype=dtype)
            history = torch.empty(9, 128, device=device_type, dtype=dtype)
            offsets = torch.empty(num_samples + 1, device=device_type, dtype=torch.int64)
            arguments = MultiHeadArguments(*[None] * len(MultiHeadArguments._fields))._replace(
                target=target, history=history, offsets=offsets, num_heads=4,
                q_weight=torch.empty(128, 128), keys_and_values="auto", score="softmax",
                out_weight=torch.empty(128, 128) if projected else None,
            )  # fmt: skip
            if jagged:
                arguments = arguments._replace(target=target.flatten(0, 1), query_offsets=offsets)
            return is_explicit(arguments)

    assert not makes_keys(most_absorbed, jagged=True)
    assert makes_keys(least_explicit, jagged=True)
    if num_samples > 1:  # the batch size of others plays no part
        assert not makes_keys(most_absorbed, jagged=False)
        assert makes_keys(least_explicit, jagged=False)


def test_compiles_once_whatever_the_number_of_jagged_targets_decides(device):
    module = projected(64, 8).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for lengths, counts in (([9, 0, 2], [5, 7, 8]), ([7, 5, 1, 0], [2 * MANY, MANY, 0, MANY + 1])):
        _, history = example(module, lengths, device)
        target = torch.randn(sum(counts), 64, device=device)
        target = JaggedTensor(target, lengths=torch.tensor(counts, device=device))
        results = []
        for run in (module, compiled):
            module.zero_grad()
            out = run(target, history)
            out.square().sum().backward()
            results.append([out, *(parameter.grad for parameter in module.parameters())])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 1


def test_compiles_once_more_where_the_number_of_targets_crosses_over(device):
    module = projected(64, 2).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for lengths, num_targets in (
        ([9, 0, 2, 23], 3),
        ([30, 1, 4], 700),
        ([5, 7, 1], 4),
        ([3, 8], 650),
    ):
        arguments = example(module, lengths, device, num_targets)
        torch.testing.assert_close(compiled(*arguments), module(*arguments))
    assert counter.frame_count == 2


def test_stays_whole_under_dynamic_quantization():
    """Of linear layers, which would take the weights that are read out of them."""
    module = projected(16, 2)
    arguments = example(module, [5, 0, 40])
    quantized_module = torch.ao.quantization.quantize_dynamic(module)
    assert torch.equal(quantized_module(*arguments), module(*arguments))


# One op


OP = torch.ops.torchrec_jagged_attn.multi_head_target_attention.default


def op_arguments(
    device=CPU,
    *,
    jagged=False,
    history_dtype=torch.float32,
    history_dim=16,
    target_dim=16,
    prior=False,
    value_projection=True,
    keys_and_values="auto",
    by_index=False,
):
    """All arguments of the op, by name; the floating-point ones need a gradient."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    target_offsets = torch.tensor([0, 1, 1, 6], device=device) if jagged else None
    prior_weights = torch.tensor([0.5, 0, 2, 0, 0, 1, 3, 0.25], device=device)
    others = {"in_bias": draw(48), "out_weight": draw(16, 16), "out_bias": draw(16)}
    if not value_projection:
        weights = {"q_weight": draw(16, target_dim), "k_weight": draw(16, 16), "v_weight": None}
        others = {"in_bias": draw(16), "out_weight": None, "out_bias": None}
    elif history_dim == target_dim == 16:
        weights = {"q_weight": draw(48, 16), "k_weight": None, "v_weight": None}
    else:
        weights = {"q_weight": draw(16, target_dim)}
        weights |= {name: draw(16, history_dim) for name in ("k_weight", "v_weight")}
    return {
        "target": draw(6, target_dim) if jagged else draw(3, 2, target_dim),
        "history": draw(5 if by_index else 8, history_dim, dtype=history_dtype),
        "offsets": torch.tensor([0, 3, 3, 8], device=device),
        "query_offsets": target_offsets,
        "indices": torch.arange(8, device=device) ** 2 % 5 if by_index else None,
        **weights,
        **others,
        "position_bias": draw(3, 2),
        "age_bias": draw(5, 2),
        "timestamps": torch.arange(8, device=device),
        "row_dropout": None,
        "dropout": None,
        "prior_weights": prior_weights.requires_grad_() if prior else None,
        "num_heads": 2,
        "dtype": torch.float32,
        "keys_and_values": keys_and_values,
        "score": "softmax",
        "num_levels": 0,
        "for_backward": True,
    }


@pytest.mark.parametrize(
    ("projections", "jagged", "history_dtype", "prior", "by_index", "road"),
    each_pair(
        [{}, {"history_dim": 20}, {"target_dim": 24}, {"value_projection": False}],
        [False, True],
        [torch.float32, torch.float16],
        [False, True],
        [False, True],
        ROADS,
    ),
    ids=str,
    indirect=["road"],
)
def test_opcheck(projections, jagged, history_dtype, prior, by_index, road, device):
    options = {"jagged": jagged, "history_dtype": history_dtype, "prior": prior}
    arguments = op_arguments(device, by_index=by_index, **options, **projections, **road)
    torch.library.opcheck(OP, tuple(arguments.values()))


@pytest.mark.parametrize(
    ("value_projection", "history_dtype", "jagged", "road"),
    each_pair([True, False], [torch.float32, torch.float16], [False, True], ROADS),
    ids=str,
    indirect=["road"],
)
def test_opcheck_without_a_gradient(value_projection, history_dtype, jagged, road, device):
    options = {"jagged": jagged, "value_projection": value_projection}
    arguments = op_arguments(device, history_dtype=history_dtype, **options, **road)
    expected = OP(*arguments.values())[0]
    arguments["for_backward"] = False
    values = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments.values()]
    torch.library.opcheck(OP, tuple(values))
    out, _, *absorbed, _, _, _ = OP(*values)
    assert torch.equal(out, expected)
    assert not any(x.numel() for x in absorbed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"history_dim": 20},
        {"target_dim": 24},
        {"prior": True},
        {"value_projection": False, "prior": True},
        {"by_index": True},
    ],
    ids=str,
)
def test_gradients_are_those_asked_for(options, road, device):
    arguments = op_arguments(device, **options, **road)
    leaves = [name for name, x in arguments.items() if getattr(x, "requires_grad", False)]
    out = OP(*arguments.values())[0]
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    for name in leaves:
        alone = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        alone[name].requires_grad_()
        OP(*alone.values())[0].backward(grad_out)
        assert torch.equal(alone[name].grad, arguments[name].grad), name


@pytest.mark.parametrize("value_projection", [True, False])
def test_is_one_node_of_autograd(value_projection, road):
    options = {"value_projection": value_projection, **road}
    module = plain_attention(16, 2, age_bias=True, **options)
    target, history, timestamps = example(module, [5, 0, 40])
    out = module(target.requires_grad_(), history, timestamps)
    nodes = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert {node.name() for node in nodes} == {"torch::autograd::AccumulateGrad"}
    assert len(nodes) == 1 + len(list(module.parameters()))
    with pytest.raises(NotImplementedError, match="no second derivative, got create_graph=True"):
        torch.autograd.grad(out.sum(), target, create_graph=True)


# CUDA


@pytest.fixture(params=[False, True], ids=["dense", "jagged"])
def run_on_cuda(request, road):
    """Computes an output and all gradients; long enough for the sums of large embedding tables."""
    module = projected(16, 2, age_bias=True, **road).to("cuda")
    target, history, times = example(module, [2000, 0, 3, 5000], "cuda", jagged=request.param)

    def run():
        module.zero_grad()
        rows = history.values().detach().requires_grad_()
        out = module(target, JaggedTensor(rows, lengths=history.lengths()), times)
        out.backward(torch.ones_like(out))
        return [out, rows.grad, *(parameter.grad for parameter in module.parameters())]

    run()  # compiles
    return run


@pytest.mark.gpu
def test_never_waits_for_the_device(run_on_cuda):
    with sync_debug_mode("error"):
        run_on_cuda()


@pytest.mark.gpu
def test_repeats_are_equal_to_the_bit(run_on_cuda):
    first = run_on_cuda()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run_on_cuda(), first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("jagged", [False, True], ids=["dense", "jagged"])
@pytest.mark.parametrize("value_projection", [True, False], ids=["values", "rows"])
def test_cuda_graph_replays_with_other_lengths(value_projection, jagged, road):
    options = {"jagged": jagged, "value_projection": value_projection}
    arguments = op_arguments("cuda", **options, **road)
    leaves = [x for x in arguments.values() if getattr(x, "requires_grad", False)]
    grad_out = torch.randn_like(arguments["target"])

    def run():
        out = OP(*arguments.values())[0]
        return [out, *torch.autograd.grad(out, leaves, grad_out)]

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    arguments["offsets"].copy_(torch.tensor([0, 0, 7, 8]))
    graph.replay()
    for result, expected in zip(results, run(), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("no_gradient", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("num_targets", [8, 256])
def test_inference_keeps_nothing_for_backward(num_targets, no_gradient):
    """Also where so many jagged targets take explicit keys and values."""
    width, num_heads, num_rows = 64, 4, 32768
    module = projected(width, num_heads, recency_bias=False, bias=False)
    module = module.to("cuda", torch.bfloat16)
    counts = torch.full([num_rows // num_targets], num_targets)
    offsets = [offsets_of(x, torch.int64, "cuda") for x in (counts, torch.full_like(counts, 2))]
    rows = [torch.randn(int(x[-1]), width, device="cuda").bfloat16() for x in offsets]
    arguments = [JaggedTensor(x, offsets=o) for x, o in zip(rows, offsets, strict=True)]
    with no_gradient():
        module(*arguments)  # compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = module(*arguments)
    # Queries, values, the output and statistics; if absorbed, u and what is pooled by it, too.
    most = (5 + (2 * num_heads if num_targets == 8 else 0)) * out.nbytes
    assert torch.cuda.max_memory_allocated() - before < most


def rates_of_dropped_outputs(p, lengths):
    """Of histories of so many rows."""
    root = lengths.double().clamp(min=1).sqrt()
    return p / (p + (1 - p) * root)


def rows_of(lengths, width, device):
    return JaggedTensor(
        torch.randn(int(lengths.sum()), width, device=device), lengths=lengths.to(device)
    )


@pytest.mark.parametrize(
    ("score", "jagged"), [("softmax", False), ("softmax", True), ("silu", False), ("din", False)]
)
def test_output_dropout(score, jagged, device):
    torch.manual_seed(0)
    module = plain_attention(64, 1, score=score, output_dropout=0.5, device=device)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    lengths = torch.tensor([1, 4, 100]).repeat_interleave(100)
    history = rows_of(lengths, 64, device)
    target = torch.randn(300, 64, device=device, requires_grad=True)
    targets = JaggedTensor(target, offsets=torch.arange(301, device=device)) if jagged else target
    expected = module.eval()(targets, history)
    module.train()

    def draw(seed):
        torch.manual_seed(seed)
        return module(targets, history)

    out = draw(1)
    kept = out != 0
    rates = rates_of_dropped_outputs(0.5, lengths).to(device)
    # 6,400 draws a length: five standard deviations.
    assert ((~kept).view(3, -1).double().mean(1) - rates[::100]).abs().max() < 0.032
    scale = (1 / (1 - rates)).float().unsqueeze(1)
    torch.testing.assert_close(out, torch.where(kept, expected * scale, 0))
    assert torch.equal(draw(1), out)
    assert not torch.equal(draw(2), out)
    of_kept, of_dropped = (torch.autograd.grad(draw(1)[x].sum(), target)[0] for x in (kept, ~kept))
    assert of_kept.any()
    assert not of_dropped.any()


def test_output_dropout_is_scripted(device):
    scripted = torch.jit.script(plain_attention(64, 2, output_dropout=0.5, device=device))
    history = rows_of(torch.full((50,), 9), 64, device)
    target = torch.randn(50, 64, device=device)
    dropped = [(scripted.train(x)(target, history) == 0).double().mean() for x in (True, False)]
    assert 0.2 < dropped[0] < 0.3
    assert dropped[1] == 0


# What is the default


def test_restrained_where_rows_are_not_projected():
    module = JaggedTargetAttention(16, 2)
    assert (module.row_dropout, module.output_dropout) == (ROW_DROPOUT, OUTPUT_DROPOUT)
    assert module.length_power.shape == (16,)


@pytest.mark.parametrize(
    "options",
    [{"value_projection": True}, {"init": "mha"}, {"score": "silu"}, {"history_dim": 8}],
    ids=str,
)
def test_not_restrained_elsewhere(options):
    module = JaggedTargetAttention(16, 2, **options)
    assert (module.row_dropout, module.output_dropout) == (0, 0)
    assert module.length_power is None


def test_each_restraint_is_left_out_by_its_option():
    module = JaggedTargetAttention(16, 2, row_dropout=0.0)
    assert (module.row_dropout, module.output_dropout) == (0, OUTPUT_DROPOUT)
    module = JaggedTargetAttention(16, 2, output_dropout=0.0, length_power=False)
    assert (module.row_dropout, module.output_dropout) == (ROW_DROPOUT, 0)
    assert module.length_power is None


def test_restrained_modules_are_compiled_once_and_traced(device):
    module = JaggedTargetAttention(64, 2, device=device)
    nn.init.normal_(module.length_power)
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


# Powers of the length


def with_and_without_powers(device, **options):
    """A module with ``length_power``, and one without, whose other parameters are the same."""
    torch.manual_seed(0)
    module = plain_attention(16, 2, length_power=True, device=device, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    without = plain_attention(16, 2, device=device, **options)
    state = module.state_dict()
    del state["length_power"]
    without.load_state_dict(state)
    return module, without


@pytest.mark.parametrize("value_projection", [False, True], ids=["rows", "values"])
@pytest.mark.parametrize("targets", ["one", "three", "jagged"])
def test_length_power(targets, value_projection, device):
    module, without = with_and_without_powers(device, value_projection=value_projection)
    lengths = [5, 0, 40, 1]
    target, history = example(module, lengths, device, jagged=targets == "jagged")
    length = torch.tensor(lengths, device=device).clamp(min=1)  # an empty one counts as one row
    if targets == "jagged":
        length = length.repeat_interleave(target.lengths())[:, None]
    elif targets == "three":
        length = length[:, None, None]
    else:
        length, target = length[:, None], target[:, 0]
    rows = history.values().requires_grad_()
    out = module(target, history)
    expected = without(target, history) * length**module.length_power
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    gradients = [
        torch.autograd.grad(x, [rows, module.length_power], weights) for x in (out, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_length_power_changes_nothing_at_first(device):
    module, without = with_and_without_powers(device)
    module.reset_parameters()
    without.load_state_dict(module.state_dict(), strict=False)
    arguments = example(module, [5, 0, 40], device)
    assert torch.equal(module(*arguments), without(*arguments))


def test_empty_histories_stay_zeros(device):
    """Also one whose rows are all removed, compiled, and in half precision."""
    module, _ = with_and_without_powers(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    target, history = example(module, [3, 0, 4], device)
    weights = torch.tensor([1.0] * 3 + [0.0] * 4, device=device)
    for same in (module, compiled):
        for dtype in (None, torch.bfloat16):
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                out = same(target, history, prior_weights=weights)
            assert out[0].any()
            assert not out[1:].any()


def test_length_power_travels(device):
    module, _ = with_and_without_powers(device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    traced = torch.fx.symbolic_trace(module)
    for same in (traced, torch.jit.script(traced), torch.jit.script(module), compiled):
        for lengths, jagged in (([5, 0, 40], False), ([2, 90, 31, 7], False), ([2, 0, 31], True)):
            arguments = example(module, lengths, device, jagged=jagged)
            torch.testing.assert_close(same(*arguments), module(*arguments))


def test_length_power_keeps_the_dtype(device):
    for dtype in supported_dtypes(device):
        module, without = with_and_without_powers(device, dtype=dtype)
        target, history = example(module, [5, 0, 300], device)
        history = JaggedTensor(history.values().to(dtype), lengths=history.lengths())
        length = torch.tensor([5, 1, 300], device=device).view(3, 1, 1)
        exact = without(target, history).double() * length ** module.length_power.double()
        torch.testing.assert_close(module(target, history), exact.to(dtype))


# Errors


def zeros(lengths, width=8, dtype=torch.float32):
    return JaggedTensor(
        torch.zeros(sum(lengths), width, dtype=dtype), lengths=torch.tensor(lengths)
    )


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
            {"prior_weights": torch.tensor([1, 0, -0.5, 1, 1])},
            ValueError,
            "prior_weights must be finite and not negative, got -0.5 at position 2",
        ),
        ({"timestamps": torch.zeros(4)}, ValueError, "timestamps must have shape [N] = [5], got"),
        ({"timestamps": torch.zeros(5).to("meta")}, ValueError, "timestamps must be on cpu as his"),
        ({"age_bias": False}, ValueError, "timestamps must be None unless age_bias=True, got a"),
        ({"recency_bias": False}, ValueError, "age_bias must go with recency_bias=True, got recen"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an int, got 2.0"),
        ({"embed_dim": 8.0}, TypeError, "embed_dim must be an int, got 8.0"),
        ({"num_heads": 3}, ValueError, "num_heads must divide embed_dim 8, got 3"),
        ({"num_heads": 0}, ValueError, "num_heads must divide embed_dim 8, got 0"),
        ({"embed_dim": 0}, ValueError, "num_heads must divide embed_dim 0, got 2"),
        ({"init": "alibi"}, ValueError, "init must be 'recency' or 'mha', got 'alibi'"),
        (
            {"keys_and_values": "both"},
            ValueError,
            "keys_and_values must be 'auto', 'absorbed' or 'explicit', got 'both'",
        ),
        (
            {"embed_dim": 1026, "keys_and_values": "explicit", "history_dim": 8},
            NotImplementedError,
            "embed_dim / num_heads must have a width of 1 to 512, got 513",
        ),
        (
            {"target_dim": 24},
            ValueError,
            "target must have shape [B, target_dim] = [2, 24], got [2, 8]",
        ),
        ({"target_dim": 8.0}, TypeError, "target_dim must be an int, got 8.0"),
        ({"target_dim": 0}, ValueError, "target_dim must be at least 1, got 0"),
        (
            {"length_power": True, "score": "silu", "prior_weights": None},
            ValueError,
            "length_power must be None or False unless score is 'softmax', got 'silu'",
        ),
        ({"length_power": "no"}, TypeError, "length_power must be a bool or None, got 'no'"),
        *(
            ({name: p}, ValueError, f"{name} must be at least 0 and below 1, got {p}")
            for name in ("row_dropout", "dropout", "output_dropout")
            for p in (-0.1, 1.0)
        ),
        ({"dropout": "0.1"}, TypeError, "dropout must be a number, got '0.1'"),
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
    }
    for name, value in change.items():
        (arguments if name in arguments else options)[name] = value
    with pytest.raises(error) as raised:
        plain_attention(**options)(**arguments)
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
        ({"prior_weights": -torch.ones(5)}, ValueError, "prior_weights must be finite and not neg"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_attention_weights_name_the_argument(change, error, message):
    arguments = {"target": torch.zeros(2, 8), "history": zeros([2, 3])}
    with pytest.raises(error) as raised:
        plain_attention(8, 2).attention_weights(**arguments | change)
    assert str(raised.value).startswith(message)
